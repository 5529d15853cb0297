"""What a header says, and the limits of reading one."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sdsage.errors import ModelError

# A reader gives up past these, whatever the file says: 2 seconds and 256 MiB are enough for all of them together.
MAX_TENSORS = 50_000  # the engine has room for 32768 in a network
MAX_PAIRS = 16_384  # entries of metadata
MAX_KEPT = 16 * 2**20  # bytes of names and values, or of JSON
MAX_READ = 128 * 2**20  # bytes; vocabularies are read to step over them
MAX_STEPS = 2_000_000  # texts of arrays that are stepped over: vocabularies have up to 800,000
MAX_DIMENSIONS = 8
MAX_NAME = 4096  # bytes; keys as well
MAX_VALUE = 4096  # bytes of a text value that are kept


class TooLarge(ModelError):
    """A header past the limits of this reader. The engine may still take the file."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry.

    Attributes:
        shape: slowest dimension first.
        type: number format, as the engine calls it: "f16", "q4_K", "f8_e4m3".
        begin, nbytes: place of the data in its file.
    """

    shape: tuple[int, ...]
    type: str
    begin: int
    nbytes: int


Value = str | int | float | bool


@dataclass(frozen=True)
class Header:
    """The header of a file, or of all parts of a file in parts.

    Attributes:
        container: "gguf" or "safetensors".
        size: bytes of all files.
        metadata: single values; lists are left out, long texts cut.
        parts: files that hold the tensors.
    """

    path: Path
    container: str
    size: int
    metadata: dict[str, Value]
    tensors: dict[str, Tensor]
    parts: tuple[Path, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())


@dataclass
class Budget:
    """What is left of the limits while a file, or the parts of one, are read."""

    path: Path
    tensors: int = MAX_TENSORS
    pairs: int = MAX_PAIRS
    kept: int = MAX_KEPT
    read: int = MAX_READ
    steps: int = MAX_STEPS

    def spend(self, what: str, count: int) -> None:
        """Raises TooLarge when more than `count` of what is left would be used."""
        left = getattr(self, what) - count
        if left < 0:
            words = {"pairs": "entries", "kept": "bytes of names", "read": "bytes", "steps": "texts"}.get(what, what)
            raise TooLarge(f"{self.path}: the header has more {words} than that of any model: fetch the file again")
        setattr(self, what, left)


def damaged(path: Path, what: str) -> ModelError:
    return ModelError(f"{path} is damaged: {what}; fetch the file again")


def shown(text: str) -> str:
    """A name out of a file, safe for a terminal: no control characters, not too long."""
    return ascii(text if len(text) <= 100 else text[:97] + "...")


def check_places(path: Path, size: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ModelError unless every tensor lies in the file, and no two in the same place."""
    end, last = 0, ""
    for name, t in sorted(tensors, key=lambda item: item[1].begin):
        if t.begin + t.nbytes > size:
            raise ModelError(
                f"{path} is truncated: tensor {shown(name)} ends at byte {t.begin + t.nbytes}, the file has {size}; "
                "fetch the file again"
            )
        if t.nbytes and t.begin < end:
            raise damaged(path, f"tensors {shown(last)} and {shown(name)} lie in the same place")
        if t.nbytes:
            end, last = t.begin + t.nbytes, name
