"""Presets: named sets of model files and settings, one TOML file each beside this module.

A preset file holds `description`, `mode` ("vid-gen" or "img-gen"), a table `[files]` (option = name of a tiny model
file) and a table `[settings]` (option = value). Options are named as on the command line, with underscores.
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sdsage.errors import BadRequest

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Preset:
    """A preset whose files exist.

    Attributes:
        mode: the verb it is for, "vid-gen" or "img-gen".
        options: option name -> value; model files are absolute paths.
    """

    name: str
    mode: str
    description: str
    options: dict[str, object]


def names() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


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


def load(name: str, on_write: Callable[[Path], None] | None = None) -> Preset:
    """A preset with its model files, which are made in the user's cache if they aren't there yet.

    Args:
        on_write: called before a model file is made.

    Raises:
        BadRequest: there is no preset of that name.
        OutputError: the cache folder can't be written.
    """
    from sdsage.tiny import ensure  # NumPy; not needed to list presets

    table = _read(name)
    files: dict[str, str] = table["files"]
    paths = ensure(files.values(), on_write)
    options: dict[str, object] = {option: str(paths[file]) for option, file in files.items()}
    return Preset(name, table["mode"], table["description"], options | table["settings"])


def _read(name: str) -> dict[str, Any]:
    known = names()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of these"
        raise BadRequest(f"no preset is called {name!r}; there are {', '.join(known)}: {hint}")
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
