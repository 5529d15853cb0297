"""GGUF, version 2 and 3: little-endian; metadata, then the table of tensors, then their data, aligned."""

import struct
from math import prod
from pathlib import Path
from typing import BinaryIO

from sdsage.errors import ModelError

from .header import (
    MAX_DIMENSIONS,
    MAX_NAME,
    MAX_VALUE,
    Budget,
    Header,
    Tensor,
    TooLarge,
    Value,
    check_places,
    damaged,
    shown,
)
from .types import GGML

# Types of metadata values that have a fixed size: struct format. Texts and lists carry their length.
_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_WINDOW = 2**18
_ALIGNMENT = 32  # the format's default


def read(path: Path, file: BinaryIO, size: int, budget: Budget) -> Header:
    """The header of a file that begins with "GGUF"."""
    window = _Window(path, file, size, budget)
    window.skip(4, "the magic")
    (version,) = window.take("I", "the version")
    if version & 0xFFFF == 0:
        raise ModelError(f"{path} is a GGUF file of a big-endian machine: fetch a little-endian one")
    if version == 1:
        raise ModelError(f"{path} is a GGUF file of version 1, which nothing reads any more: fetch a newer one")
    if version > 3:
        raise TooLarge(f"{path} is a GGUF file of version {version}: 2 and 3 are known")
    tensors, pairs = window.take("QQ", "the counts")
    # The shortest entry has 13 bytes, the shortest tensor 24.
    if pairs * 13 + tensors * 24 > size:
        raise damaged(path, f"it says that it holds {tensors} tensors and {pairs} entries, and has {size} bytes")
    budget.spend("tensors", tensors)
    budget.spend("pairs", pairs)
    metadata: dict[str, Value] = {}
    for _ in range(pairs):
        key = window.text("a key")
        (kind,) = window.take("I", "a value")
        value = window.value(kind, key)
        if key in metadata:
            raise damaged(path, f"there are two entries {shown(key)}")
        if value is not None:
            metadata[key] = value
    table = _table(window, tensors)
    return Header(path, "gguf", size, metadata, _placed(path, size, metadata, table, window.at), (path,))


def _table(window: "_Window", count: int) -> dict[str, Tensor]:
    """Tensors whose `begin` counts from the first one's place."""
    found: dict[str, Tensor] = {}
    for _ in range(count):
        name = window.text("a tensor's name")
        (dims,) = window.take("I", "a shape")
        if dims > MAX_DIMENSIONS:
            raise damaged(window.path, f"tensor {shown(name)} has {dims} dimensions")
        *shape, number, offset = window.take(f"{dims}QIQ", "a tensor")
        if name in found:
            raise damaged(window.path, f"there are two tensors {shown(name)}")
        if number not in GGML:
            raise ModelError(
                f"{window.path}: tensor {shown(name)} has type {number}, which is not known: fetch another format"
            )
        kind, block, block_bytes = GGML[number]
        if shape and shape[0] % block:
            raise damaged(
                window.path,
                f"tensor {shown(name)} of type {kind} has rows of {shape[0]} values, not a multiple of {block}",
            )
        nbytes = prod(shape) // block * block_bytes
        if nbytes + offset >= 2**63:
            raise damaged(window.path, f"tensor {shown(name)} has {nbytes} bytes at {offset}")
        found[name] = Tensor(tuple(reversed(shape)), kind, offset, nbytes)
    return found


def _placed(
    path: Path, size: int, metadata: dict[str, Value], table: dict[str, Tensor], header_end: int
) -> dict[str, Tensor]:
    """The tensors with their places in the file."""
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise damaged(path, f"general.alignment is {alignment}, not a power of two")
    start = -(-header_end // alignment) * alignment
    tensors = {n: Tensor(t.shape, t.type, start + t.begin, t.nbytes) for n, t in table.items()}
    check_places(path, size, tensors.items())
    return tensors


class _Window:
    """Reads a file from front to back, and holds one stretch of it."""

    def __init__(self, path: Path, file: BinaryIO, size: int, budget: Budget) -> None:
        self.path = path
        self.at = 0
        self._file, self._size, self._budget = file, size, budget
        self._data, self._base = b"", 0

    def skip(self, count: int, what: str) -> None:
        if count > self._size - self.at:
            raise damaged(
                self.path, f"{what} at byte {self.at} would take {count} bytes, and the file ends at {self._size}"
            )
        self.at += count

    def take(self, form: str, what: str) -> tuple[int, ...]:
        form = "<" + form
        return struct.unpack(form, self._bytes(struct.calcsize(form), what))

    def text(self, what: str) -> str:
        """A name or key."""
        (length,) = self.take("Q", what)
        if length > MAX_NAME:
            raise damaged(self.path, f"{what} at byte {self.at} has {length} bytes, more than {MAX_NAME}")
        self._budget.spend("kept", length)
        return self._bytes(length, what).decode("utf-8", "backslashreplace")

    def value(self, kind: int, key: str) -> Value | None:
        """A single value; None for a list, which is stepped over."""
        what = f"the value of {shown(key)}"
        if kind in _FIXED:
            return self.take(_FIXED[kind], what)[0]
        if kind == _STRING:
            (length,) = self.take("Q", what)
            kept = min(length, MAX_VALUE)
            if length > self._size - self.at:
                self.skip(length, what)  # raises
            self._budget.spend("kept", kept)
            text = self._bytes(kept, what).decode("utf-8", "replace")
            self.skip(length - kept, what)
            return text
        if kind != _ARRAY:
            raise damaged(self.path, f"{what} has type {kind}, which there is not")
        self._list(what)
        return None

    def _list(self, what: str) -> None:
        """Steps over a list. Lists of lists are in no file that the engine reads."""
        (inner,) = self.take("I", what)
        (count,) = self.take("Q", what)
        if inner in _FIXED:
            self.skip(struct.calcsize(_FIXED[inner]) * count, what)
        elif inner == _STRING:
            self._skip_texts(count, what)
        else:
            raise damaged(self.path, f"{what} is a list of type {inner}")

    def _skip_texts(self, count: int, what: str) -> None:
        if count * 8 > self._size - self.at:
            self.skip(count * 8, what)  # raises
        self._budget.spend("steps", count)
        size, decode = self._size, int.from_bytes
        while count:
            self._fill(8, what)
            data, at = self._data, self.at - self._base
            last = len(data) - 8
            while count and at <= last:
                at += 8 + decode(data[at : at + 8], "little")
                count -= 1
            self.at = self._base + at
            if self.at > size:
                raise damaged(self.path, f"a text in {what} ends at byte {self.at}, and the file at {size}")

    def _bytes(self, count: int, what: str) -> bytes:
        self._fill(count, what)
        at = self.at - self._base
        self.at += count
        return self._data[at : at + count]

    def _fill(self, count: int, what: str) -> None:
        """The next `count` bytes are in the window."""
        if count > self._size - self.at:
            self.skip(count, what)  # raises
        at = self.at - self._base
        if at >= 0 and at + count <= len(self._data):
            return
        self._file.seek(self.at)
        self._data, self._base = self._file.read(max(count, _WINDOW)), self.at
        self._budget.spend("read", len(self._data))
        if len(self._data) < count:
            raise damaged(self.path, f"{what} can't be read at byte {self.at}: the file became shorter")
