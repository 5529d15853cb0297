"""Presets: named sets of model files and settings, one TOML file each beside this module.

A preset file holds `description`, `mode` ("vid-gen" or "img-gen"), a table `[files]` (option = the name of a tiny model
file, or {repo, file, size} of a hub), a table `[settings]` (option = value) and, perhaps, `[[loras]]` ({repo, file,
size, weight, high_noise}). Options are named as on the command line, with underscores. `size` is in bytes.
"""

import tomllib
from collections.abc import Callable, Container
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdsage.errors import BadRequest, ModelError

if TYPE_CHECKING:
    from sdsage.hub import HubFile

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class PresetLora:
    """A LoRA that belongs to a preset.

    Attributes:
        file: at the hub; weight: how strongly it counts; high_noise: it is for the high-noise expert.
        path: where it is; None when it is not here.
    """

    file: "HubFile"
    weight: float
    high_noise: bool
    path: Path | None = None

    @property
    def word(self) -> str:
        """What a prompt calls it."""
        return self.file.name.rpartition(".")[0]

    @property
    def tag(self) -> str:
        """How a prompt uses it."""
        return f"<lora:{'|high_noise|' if self.high_noise else ''}{self.word}:{self.weight:g}>"


@dataclass(frozen=True)
class Preset:
    """A preset whose files exist.

    Attributes:
        mode: the verb it is for, "vid-gen" or "img-gen".
        options: option name -> value; model files are absolute paths.
        loras: with their paths.
    """

    name: str
    mode: str
    description: str
    options: dict[str, object]
    loras: tuple[PresetLora, ...] = ()


def names() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(path.name.removesuffix(".toml") for path in _FOLDER.glob("*.toml"))


def describe(name: str) -> str:
    """One sentence on a preset; makes no files.

    Raises:
        BadRequest: there is no preset of that name.
    """
    return str(_read(name)["description"])


def mode(name: str) -> str:
    """The verb that a preset is for, "vid-gen" or "img-gen"; makes no files.

    Raises:
        BadRequest: there is no preset of that name.
    """
    return str(_read(name)["mode"])


def settings(name: str) -> dict[str, Any]:
    """Option name -> value of a preset, without its files. Raises BadRequest as `mode` does."""
    return dict(_read(name)["settings"])


def files(name: str) -> "dict[str, str | HubFile]":
    """Option name -> tiny file or file of a hub. Raises BadRequest as `mode` does."""
    return {
        option: entry if isinstance(entry, str) else _hub_file(entry) for option, entry in _read(name)["files"].items()
    }


def loras(name: str) -> tuple[PresetLora, ...]:
    """The LoRAs of a preset, without their paths. Raises BadRequest as `mode` does."""
    entries = _read(name).get("loras", [])
    return tuple(PresetLora(_hub_file(e), float(e["weight"]), bool(e["high_noise"])) for e in entries)


def hub_files(name: str) -> "list[HubFile]":
    """All files of a preset that come from a hub. Raises BadRequest as `mode` does."""
    return [*(f for f in files(name).values() if not isinstance(f, str)), *(lora.file for lora in loras(name))]


def load(
    name: str,
    on_write: Callable[[Path], None] | None = None,
    *,
    without: Container[str] = (),
    missing_ok: bool = False,
) -> Preset:
    """A preset with its model files: tiny ones are made in the user's cache if they aren't there yet.

    Args:
        on_write: called before a model file is made.
        without: options whose files are not needed, because others are given.
        missing_ok: leave out files of a hub that are not here.

    Raises:
        BadRequest: there is no preset of that name.
        ModelError: files of a hub are not here.
        MissingExtra: the preset has files of a hub, and huggingface_hub is not installed.
        OutputError: the cache folder can't be written.
    """
    table, wanted = _read(name), {o: f for o, f in files(name).items() if o not in without}
    options: dict[str, object] = {}
    missing: list[HubFile] = []
    if any(isinstance(f, str) for f in wanted.values()):
        from sdsage.tiny import ensure  # NumPy; not needed to list presets

        paths = ensure([f for f in wanted.values() if isinstance(f, str)], on_write)
        options |= {option: str(paths[file]) for option, file in wanted.items() if isinstance(file, str)}
    for option, file in wanted.items():
        if not isinstance(file, str):
            path = _local(file, missing)
            options |= {option: str(path)} if path else {}
    placed = [_placed(lora, missing) for lora in loras(name)]
    if missing and not missing_ok:
        count = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ModelError(
            f"preset {name} needs {missing[0]}{count}, not yet on this machine: run 'sdsage models pull {name}'"
        )
    chosen = tuple(lora for lora in placed if lora.path is not None)
    return Preset(name, table["mode"], table["description"], options | table["settings"], chosen)


def _local(file: "HubFile", missing: "list[HubFile]") -> Path | None:
    from sdsage import hub

    path = hub.local(file)
    if path is None:
        missing.append(file)
    return path


def _placed(lora: PresetLora, missing: "list[HubFile]") -> PresetLora:
    return PresetLora(lora.file, lora.weight, lora.high_noise, _local(lora.file, missing))


def _hub_file(entry: dict[str, Any]) -> "HubFile":
    from sdsage.hub import HubFile

    return HubFile(entry["repo"], entry["file"], entry.get("size"))


def _read(name: str) -> dict[str, Any]:
    known = names()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of these"
        raise BadRequest(f"no preset is called {name!r}; there are {', '.join(known)}: {hint}")
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
