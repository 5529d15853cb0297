"""The GPU code inside a library, read from the file: which architectures it holds, as machine code and as PTX.

nvcc puts it into the ELF section .nv_fatbin: one container after another (magic, version, bytes of its header, bytes
of its entries), each on a multiple of 8 bytes. An entry has a header of its own: kind (1 PTX, 2 machine code), its
bytes, those of what follows, the architecture, and flags, of which two say 90a or 100f for 90 or 100. What follows may
be compressed, and is not looked at.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIIIIIQ")
_PTX, _CODE = 1, 2
_LETTERS = ((0x100000, "a"), (0x200000, "f"))
_SECTIONS = (".nv_fatbin", "__nv_relfatbin")


@dataclass(frozen=True)
class GpuCode:
    """Architectures by their names, "80", "90a", "100f", each once, in order."""

    machine_code: tuple[str, ...]
    ptx: tuple[str, ...]


def gpu_code(file: Path) -> GpuCode:
    """What a library or an object file holds; empty for one without GPU code.

    Raises:
        OSError: it can't be read. ValueError: it is no 64-bit ELF file, or damaged.
    """
    data = file.read_bytes()
    found: dict[int, set[str]] = {_PTX: set(), _CODE: set()}
    try:
        for section in _sections(data):
            for kind, name in _entries(section):
                found.setdefault(kind, set()).add(name)
    except struct.error:
        raise ValueError(f"{file} is damaged: it ends in the middle of what it announces") from None
    return GpuCode(_sorted(found[_CODE]), _sorted(found[_PTX]))


def _sorted(names: set[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: (int(name.rstrip("af")), name)))


def _sections(data: bytes) -> Iterator[memoryview]:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it is no 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    if names >= count:
        return
    for name, _, _, _, offset, length in headers:
        start = headers[names][4] + name
        if data[start : data.find(b"\0", start)].decode("ascii", "replace") in _SECTIONS:
            if offset + length > len(data):
                raise ValueError("it is damaged: it ends in the middle of its GPU code")
            yield memoryview(data)[offset : offset + length]


def _entries(section: memoryview) -> Iterator[tuple[int, str]]:
    at = 0
    while at + _CONTAINER.size <= len(section):
        magic, _, header, length = _CONTAINER.unpack_from(section, at)
        if magic != _MAGIC:
            at += 8  # padding between two containers
            continue
        entry, end = at + header, at + header + length
        while entry < end:
            kind, _, own, bytes_, _, _, _, arch, _, _, flags = _ENTRY.unpack_from(section, entry)
            yield kind, f"{arch}{''.join(letter for bit, letter in _LETTERS if flags & bit)}"
            if own < _ENTRY.size:
                raise ValueError("it is damaged: an entry of its GPU code has no header")
            entry += own + bytes_
        at = (end + 7) & ~7
