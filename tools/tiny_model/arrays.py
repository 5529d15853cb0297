"""Named arrays in safetensors files of limited size: `NAME.0.safetensors`, `NAME.1.safetensors`, ... NumPy only.

Types are float32, float16 and bfloat16; the last are uint16 arrays here (`to_bf16`, `from_bf16`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from struct import pack, unpack

import numpy as np
from numpy.typing import NDArray

PART = 15 * 2**20 - 2**16  # bytes of a file at most, before its header: a transformer goes into one
_TYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def from_bf16(values: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (values.astype("<u4") << 16).view("<f4")


def save(folder: Path, name: str, arrays: Mapping[str, NDArray], info: Mapping[str, str] | None = None) -> list[Path]:
    """Writes the files whole, one after another; older ones of the name go."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[list[str]] = [[]]
    room = PART
    for key, array in arrays.items():
        if array.nbytes > PART:
            raise ValueError(f"{key} has {array.nbytes} bytes, and a file holds {PART}")
        if array.nbytes > room:
            parts.append([])
            room = PART
        parts[-1].append(key)
        room -= array.nbytes
    written = []
    for number, keys in enumerate(parts):
        path = folder / f"{name}.{number}.safetensors"
        part = path.with_suffix(".part")
        part.write_bytes(_packed({key: arrays[key] for key in keys}, info or {}))
        part.replace(path)
        written.append(path)
    for old in sorted(folder.glob(f"{name}.*.safetensors")):
        if old not in written:
            old.unlink()
    return written


def load(folder: Path, name: str) -> dict[str, NDArray]:
    """All arrays of the name; empty if there is no such file."""
    return read(folder, name)[0]


def read(folder: Path, name: str) -> tuple[dict[str, NDArray], dict[str, str]]:
    """Arrays and what `save` was told with them."""
    arrays: dict[str, NDArray] = {}
    info: dict[str, str] = {}
    for path in sorted(folder.glob(f"{name}.*.safetensors")):
        more, about = read_file(path)
        arrays |= more
        info |= about
    return arrays, info


def read_file(path: Path) -> tuple[dict[str, NDArray], dict[str, str]]:
    """Arrays and metadata of one safetensors file."""
    data = path.read_bytes()
    (length,) = unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    info = header.pop("__metadata__", {})
    arrays = {}
    for key, entry in header.items():
        begin, end = (8 + length + at for at in entry["data_offsets"])
        arrays[key] = np.frombuffer(data[begin:end], _TYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays, info


def _packed(arrays: Mapping[str, NDArray], info: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(info)}
    at = 0
    body = []
    for key, array in arrays.items():
        kind = next(name for name, dtype in _TYPES.items() if array.dtype == dtype)
        header[key] = {"dtype": kind, "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
        body.append(np.ascontiguousarray(array).tobytes())
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return pack("<Q", len(text)) + text + b"".join(body)
