"""Names and shapes of the tensors in a model file, from its header alone."""

import json
import mmap
import struct
from pathlib import Path

from sdsage._files import sniff

Shapes = dict[str, tuple[int, ...]]

# GGUF's value types: bytes of those with a fixed size; strings and arrays carry their length.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def tensor_shapes(path: Path) -> Shapes:
    """Shape of each tensor, slowest dimension first; empty for a file that is neither GGUF nor safetensors, or damaged.

    A look ahead only: the engine reads the file itself, and says what is wrong with it.
    """
    try:
        kind = sniff(path)
        if kind == "safetensors":
            return _safetensors(path)
        return _gguf(path) if kind == "gguf" else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return {}


def _safetensors(path: Path) -> Shapes:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        table = json.loads(file.read(length))
    return {name: tuple(entry["shape"]) for name, entry in table.items() if name != "__metadata__"}


def _gguf(path: Path) -> Shapes:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Gguf(data).shapes()


class _Gguf:
    """Walks through a GGUF header."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 8  # after magic and version

    def shapes(self) -> Shapes:
        tensors, pairs = self._take("QQ")
        for _ in range(pairs):
            self._string()
            self._skip(*self._take("I"))
        found: Shapes = {}
        for _ in range(tensors):
            name = self._string()
            (dims,) = self._take("I")
            found[name] = tuple(reversed(self._take(f"{dims}Q")))
            self._take("IQ")  # type and place
        return found

    def _take(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def _string(self) -> str:
        (length,) = self._take("Q")
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8", "replace")

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            inner, count = self._take("I") + self._take("Q")
            if inner in _SIZES:
                self._at += _SIZES[inner] * count
            else:
                for _ in range(count):
                    self._skip(inner)
        else:
            self._at += _SIZES[kind]
