"""Files that come from other machines, in parts: they get their names when they are whole."""

import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from sdsage._parts import part_of
from sdsage.batch.places import Outcome, whole
from sdsage.errors import OutputError


class Parcel:
    """The files of one job, in a `with` block; what is not finished in it is gone after it."""

    def __init__(self, folder: str, overwrite: bool) -> None:
        self._folder, self._overwrite = folder, overwrite
        self._parts: dict[str, tuple[Path, BinaryIO]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path, file in self._parts.values():
            file.close()
            path.unlink(missing_ok=True)

    def take(self, name: str, chunk: bytes) -> None:
        """The next part of a file. Raises OSError."""
        if name not in self._parts:
            target = Path(self._folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            part = part_of(target)
            self._parts[name] = part, open(part, "xb", buffering=0)  # noqa: SIM115 - closed at the end
        self._parts[name][1].write(chunk)

    def finish(self, outcome: Outcome) -> None:
        """All files get their names, the recorded ones last; the outcome names them as they lie here.

        Raises:
            OutputError: one is not as its maker wrote it, or there is a file that is not to be replaced.
        """
        recorded = {name: rest for name, *rest in outcome.files}
        found = {}
        for name, (path, file) in self._parts.items():
            file.close()
            target = Path(self._folder, name)
            _, *rest = whole(path)
            if rest != recorded.get(name, rest):
                raise OutputError(f"{target} did not arrive whole: {rest[0]} bytes of {recorded[name][0]}")
            if target.exists() and not self._overwrite:
                raise OutputError(f"{target} exists: choose another name, or --overwrite")
            found[name] = [str(target), *rest]
        for name in sorted(found, key=lambda name: name in recorded):
            os.replace(self._parts[name][0], found[name][0])
        outcome.files = [found[name] for name in recorded]
        outcome.summary["files"] = [path for path, *_ in outcome.files]
        outcome.summary["latents"] = [path for name, (path, *_) in found.items() if name not in recorded]
