"""What makes a job that job: everything that its result depends on. A changed job is a new one."""

import hashlib
import json
import os
from collections.abc import Callable
from typing import Any

from sdsage import _digests
from sdsage._identity import _IDLE
from sdsage.cli.inputs import Inputs
from sdsage.cli.job import Resolved
from sdsage.cli.option import Kind
from sdsage.cli.options import of_verb
from sdsage.cli.settings import Settings, is_idle
from sdsage.errors import BadRequest

_LONG = 1 << 30  # bytes from which hashing takes seconds
_DECIDE = ("codec", "crf", "disable_image_metadata", "save_latents")  # on the files, and stand in none of them
_MEMORY = ("vram",)


class Files:
    """Size and SHA-256 of files, each looked at once."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._known: dict[str, list[Any]] = {}
        self._note = note

    def identity(self, path: str, size: int | None) -> list[Any]:
        """Raises BadRequest for a file that can't be read, or changes meanwhile."""
        if path not in self._known:
            self._known[path] = [os.path.basename(path.rstrip("/")), size, self._hash(path, size)]
        return self._known[path]

    def _hash(self, path: str, size: int | None) -> str | None:
        if size is None:  # a folder
            return None
        try:
            found = _digests.known(path)
            if found is None:
                if size > _LONG:
                    self._note(f"computing the hash of {path} ({size / 2**30:.1f} GiB), once")
                found = _digests.sha256(path)
        except OSError as error:
            raise BadRequest(f"{path} can't be read: {error.strerror}") from None
        if found is None:
            raise BadRequest(f"{path} is being written to: wait until it is whole")
        return found


def key_of(settings: Settings, inputs: Inputs, output: str, seed: int | None, files: Files) -> str:
    """The hash of a job. Where memory is saved and which device works does not count.

    Args:
        output: its name below the folder of the batch.
        seed: None when it will be drawn.
    """
    values: dict[str, Any] = {"verb": settings.verb, "output": output, "seed": seed}
    for option in of_verb(settings.verb):
        plain = option.kind not in (Kind.FILE, Kind.FOLDER)
        counts = option.record and option.target not in _IDLE and option.key not in _MEMORY
        if plain and ((counts and not is_idle(option, settings)) or option.key in _DECIDE) and option.key != "seed":
            values[option.key] = settings[option.key]
    values["files"] = [[f.option, f.word, *files.identity(f.path, f.size)] for f in inputs.files]
    return hashed(values)


def group_of(settings: Settings, resolved: Resolved) -> str:
    """Jobs of one group use the same loaded model."""
    values: dict[str, Any] = {
        option.key: settings[option.key] for option in of_verb(settings.verb) if option.target.startswith("ctx.")
    }
    values |= {"vram": settings["vram"], "pickle": settings["allow_pickle"], "embeddings": resolved.embeddings}
    if merges_loras(settings["lora_apply_mode"]):
        values["loras"] = [[lora.path, lora.multiplier, lora.is_high_noise] for lora in resolved.loras]
    return hashed(values)


def merges_loras(mode: str) -> bool:
    """LoRAs that were added to the weights can't be taken out again to the last bit, so others need a new load."""
    return mode != "at_runtime"


def hashed(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=list).encode()).hexdigest()
