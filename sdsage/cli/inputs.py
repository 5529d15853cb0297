"""The files that a result is made from: models, LoRAs, embeddings, pictures; recorded by name, size and hash."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .option import Kind
from .options import of_verb
from .settings import Settings, is_idle

if TYPE_CHECKING:
    from sdsage._digests import Digests

    from .job import Resolved

# Folders whose pictures are all read, in the order of their names.
PICTURE_FOLDERS = ("control_video", "pm_id_images_dir")
# Folders in which files are looked up by a word.
WORD_FOLDERS = ("lora_model_dir", "embd_dir", "hires_upscalers_dir")


@dataclass(frozen=True)
class InputFile:
    """One file.

    Attributes:
        option: key of the option that names it, or the folder in which it was looked up.
        word: what it was looked up by in that folder, such as NAME of <lora:NAME:WEIGHT>; else empty.
        size: bytes; None for a model that is a folder.
    """

    option: str
    path: str
    word: str
    size: int | None


class Inputs:
    """The files of one run, hashed beside its work."""

    def __init__(self, files: list[InputFile]) -> None:
        self.files = files
        self._digests: Digests | None = None

    def start_hashing(self) -> None:
        """To be called when the models are loaded."""
        from sdsage._digests import Digests

        self._digests = Digests(f.path for f in self.files if f.size is not None)
        self._digests.start()

    def finish_hashing(self) -> None:
        """Waits a little for the last hash; one that is not ready is left out."""
        if self._digests is not None:
            self._digests.finish()

    def hash_of(self, path: str) -> str | None:
        return self._digests.ready.get(path) if self._digests is not None else None

    def described(self) -> list[dict[str, Any]]:
        """For the metadata: names without folders."""
        return [
            {
                "option": file.option,
                "name": os.path.basename(file.path.rstrip("/")),
                **({"word": file.word} if file.word else {}),
                "bytes": file.size,
                "sha256": self.hash_of(file.path),
            }
            for file in self.files
        ]

    def notes(self) -> list[str]:
        """A sentence on hashes that are missing."""
        missing = [os.path.basename(f.path) for f in self.files if f.size is not None and not self.hash_of(f.path)]
        return [f"recorded without a hash, which was not ready: {', '.join(missing)}"] if missing else []


def input_files(settings: Settings, resolved: "Resolved") -> Inputs:
    """What `settings` name, in the order of the options."""
    return Inputs([_described(*found) for found in _found(settings, resolved)])


def _described(option: str, path: str, word: str = "") -> InputFile:
    return InputFile(option, path, word, None if os.path.isdir(path) else os.path.getsize(path))


def _found(settings: Settings, resolved: "Resolved") -> Iterator[tuple[str, ...]]:
    from sdsage.media.load import image_files

    for option in of_verb(settings.verb):
        value = settings[option.key]
        if not option.record or not value or is_idle(option, settings):
            continue
        if option.kind is Kind.FILE:
            yield from ((option.key, path) for path in (value if option.many else (value,)))
        elif option.key in PICTURE_FOLDERS:
            limit = settings["video_frames"] if option.key == "control_video" else 0
            yield from ((option.key, str(path)) for path in image_files(value, limit))
    for lora in resolved.loras:
        yield from (("lora_model_dir", lora.path, name) for name in lora.names)
    said = f"{settings['prompt']} {settings['negative_prompt']}".casefold()
    for word, path in resolved.embeddings.items():
        if word.casefold() in said:
            yield "embd_dir", path, word
    if resolved.hires_model is not None:
        yield "hires_upscalers_dir", resolved.hires_model, settings["hires_upscaler"]
