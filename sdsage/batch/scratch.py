"""A place whose outputs go elsewhere: jobs run in a folder of their own, and what they wrote is handed over."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sdsage.batch.places import DONE, Outcome, Place, Task, Tell, is_whole
from sdsage.cli.console import as_json
from sdsage.latents import write_whole
from sdsage.media import naming
from sdsage.tiny import cache_dir

_OUTCOME = "outcome.json"
_CHECKPOINT = ".sdsage-checkpoint"
Pictures = Mapping[str, list[tuple[str, bytes]]]  # option -> names and contents


@dataclass
class Sent:
    """A task as it goes to another machine.

    Attributes:
        task: its output is a name below any folder.
        pictures: the pictures that it reads; the folders among their options are in `folders`.
        token: tells this attempt from all others.
    """

    task: Task
    pictures: Pictures = field(default_factory=dict)
    folders: frozenset[str] = frozenset()
    token: str = ""


def folder_of(batch: str) -> Path:
    """Where this machine keeps what a batch works at, for the same batch to go on with."""
    return cache_dir() / "batch" / batch


def parted(output: str) -> tuple[str, str]:
    """The folder of an output whose name is known, and the rest."""
    folder = os.path.dirname(output)
    while naming.is_pattern(folder):
        folder = os.path.dirname(folder)
    return folder, os.path.relpath(output, folder or ".")


def _read(path: Path, out: Path) -> Outcome | None:
    """The outcome of a task that was done before, and whose files are still here."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not all(is_whole(out, entry) for entry in found["files"]):
        return None
    return Outcome(**{**found, "poster": bytes.fromhex(found["poster"]) or None, "loaded": False})


class Scratch:
    """Runs tasks in folders below `root`, one for each. A task finds its checkpoint there again, or its files."""

    def __init__(self, place: Place, root: Path) -> None:
        self._place, self._root = place, root

    def run(self, sent: Sent, tell: Tell) -> Outcome:
        """The files of the outcome are named as they lie below the folder of the task's output."""
        task, out = sent.task, self._out(sent.task)
        done = self._root / task.key / _OUTCOME
        if (known := _read(done, out)) is not None:
            return known
        out.mkdir(parents=True, exist_ok=True)
        for path in list(self._files(out)):  # they did not get to their place
            path.unlink()
        raw = {**task.raw, **self._unpacked(sent)}
        outcome = self._place.run(replace(task, raw=raw, output=str(out / task.output)), tell)
        outcome.files = [[Path(path).relative_to(out).as_posix(), *rest] for path, *rest in outcome.files]
        if outcome.state == DONE:
            plain = {**vars(outcome), "poster": (outcome.poster or b"").hex()}
            write_whole(done, [as_json(plain).encode()])
        return outcome

    def written(self, task: Task) -> Iterator[tuple[str, Path]]:
        """All files that it has made, those that are kept beside the output included."""
        out = self._out(task)
        for path in self._files(out):
            yield path.relative_to(out).as_posix(), path

    def remove(self, task: Task) -> None:
        shutil.rmtree(self._root / task.key, ignore_errors=True)

    def _out(self, task: Task) -> Path:
        return self._root / task.key / "out"

    def _files(self, out: Path) -> Iterator[Path]:
        return (path for path in sorted(out.rglob("*")) if path.is_file() and not path.name.endswith(_CHECKPOINT))

    def _unpacked(self, sent: Sent) -> dict[str, Any]:
        """The pictures' options, with where they lie now."""
        found: dict[str, Any] = {}
        for option, files in sent.pictures.items():
            paths = []
            for number, (name, data) in enumerate(files):
                alone = "" if option in sent.folders else str(number)
                path = self._root / sent.task.key / "pictures" / option / alone / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                paths.append(str(path))
            given = sent.task.raw[option]
            found[option] = (
                str(path.parent) if option in sent.folders else paths if isinstance(given, list) else paths[0]
            )
        return found
