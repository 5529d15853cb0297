"""Looks for files by name and hash, in folders and what is below them."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sdsage import _digests

MOST_ENTRIES = 100_000  # below one folder: somebody's home folder must not be read for minutes
DEEPEST = 8  # folders below a given one
_LONG = 1 << 30  # bytes from which hashing takes seconds


@dataclass(frozen=True)
class WantedFile:
    """A file as it was recorded.

    Attributes:
        option: key of the option by which it came.
        word: what it was looked up by, for a LoRA, an embedding or an upscaler; else empty.
        size: bytes; None for a folder.
        sha256: of the whole file; None when it was not known.
    """

    option: str
    name: str
    word: str
    size: int | None
    sha256: str | None

    def __str__(self) -> str:
        return f"{self.name} (sha256 {self.sha256 or 'unknown'})"


class Finder:
    """Finds recorded files.

    Args:
        first: files that are looked at before the folders.
        folders: looked at in this order, near files before those further below.
        by_name: hashes and sizes don't matter.
        note: called with a sentence before something that takes seconds.
    """

    def __init__(
        self, first: Iterable[str], folders: Iterable[str], by_name: bool, note: Callable[[str], None]
    ) -> None:
        self._first = [Path(path) for path in first]
        self._folders = [Path(folder) for folder in folders]
        self._by_name = by_name
        self._note = note
        self._seen: set[str] = set()
        self.cut_short = False

    def find(self, wanted: WantedFile) -> tuple[Path | None, str]:
        """The file, or None and what is wrong.

        A file of another name counts when size and hash are right; one of the right name only with them.
        """
        for path in self._first:  # before the folders are read at all
            if path.name == wanted.name and self._is(path, wanted):
                return path, ""
        named = [path for path in self._all if path.name == wanted.name]
        if self._by_name or wanted.size is None:
            return (named[0], "") if named else (None, "not found")
        for path in named:
            if self._is(path, wanted):
                return path, ""
        if wanted.sha256 is not None:
            suffix = Path(wanted.name).suffix
            for path in self._all:
                if path.suffix == suffix and path.name != wanted.name and self._is(path, wanted):
                    return path, ""
        if named:
            return None, f"another file of this name is {named[0]}: its content differs"
        return None, "not found"

    def find_folder(self, wanted: list[WantedFile], listed: Callable[[Path], list[Path]]) -> tuple[Path | None, str]:
        """A folder whose pictures, as `listed` gives them, are the wanted ones."""
        for folder in dict.fromkeys(path.parent for path in self._all if path.name == wanted[0].name):
            pictures = listed(folder)
            if [p.name for p in pictures] == [w.name for w in wanted] and all(
                self._by_name or self._is(path, w) for path, w in zip(pictures, wanted, strict=True)
            ):
                return folder, ""
        return None, f"no folder has this and the other {len(wanted) - 1} pictures"

    def _is(self, path: Path, wanted: WantedFile) -> bool:
        try:
            if not path.is_file() or path.stat().st_size != wanted.size:
                return False
            if wanted.sha256 is None:
                return True
            found = _digests.known(path)
            if found is None:
                if wanted.size > _LONG:
                    self._note(f"comparing the hash of {path} ({wanted.size / 2**30:.1f} GiB), once")
                found = _digests.sha256(path)
        except OSError:
            return False
        return found == wanted.sha256

    @cached_property
    def _all(self) -> list[Path]:
        """Every file and folder to look at, each once."""
        return list(dict.fromkeys([*self._first, *(path for folder in self._folders for path in self._below(folder))]))

    def _below(self, top: Path) -> Iterator[Path]:
        """Breadth first; a folder that was seen is not entered again, so that links can't make a circle."""
        waiting, count = deque([(top, 0)]), 0
        while waiting:
            folder, depth = waiting.popleft()
            real = os.path.realpath(folder)
            if real in self._seen:
                continue
            self._seen.add(real)
            for path, is_folder in _entries(folder):
                count += 1
                if count > MOST_ENTRIES:
                    self.cut_short = True
                    return
                yield path
                if is_folder and not path.name.startswith("."):
                    if depth < DEEPEST:
                        waiting.append((path, depth + 1))
                    else:
                        self.cut_short = True


def _entries(folder: Path) -> list[tuple[Path, bool]]:
    """What is in a folder, by name, and whether it is a folder; nothing when it can't be read."""
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                found.append((Path(entry.path), entry.is_dir()))
    return sorted(found)
