"""Python values as JSON and arrays: what may pass between the program and its worker process.

Plain values, lists, tuples, dicts with text keys, NumPy arrays, parameter objects and the dataclasses of `_RECORDS`;
enums pass as their numbers. Nothing else: no pickles, so that a worker can't make the program run anything.
"""

import math
import os
from dataclasses import fields, is_dataclass
from enum import IntEnum
from importlib import import_module
from typing import Any

from sdsage._shared import SharedFile

# Dataclasses that may pass, and their modules.
_RECORDS = {
    "Adjustment": "context",
    "Attention": "_job",
    "Checkpoint": "checkpoint",
    "Device": "_job",
    "Estimate": "_estimate",
    "Fault": "_fault",
    "Lever": "_job",
    "Measured": "_attention.problem",
    "Module": "_estimate",
    "Preview": "_job",
    "Problem": "_attention.problem",
    "Progress": "_job",
    "Result": "context",
    "SageInfo": "_job",
    "Sample": "_attention.problem",
    "Step": "_job",
    "Timings": "context",
}
_DTYPES = "?bBhHiIlLqQefd"
_MARK = "#"  # key of a JSON object that stands for something else than a dict


class ProtocolError(Exception):
    """The other side of the pipe said what this protocol does not know."""


class Arrays:
    """The bytes of a message's arrays: gathered before it is sent, or where they lie after it came."""

    def __init__(self) -> None:
        self.parts: list[memoryview] = []
        self.size = 0
        self._bytes: bytes | None = None
        self._file: SharedFile | None = None
        self._begin = 0

    @classmethod
    def of_bytes(cls, data: bytes) -> "Arrays":
        made = cls()
        made._bytes, made.size = data, len(data)
        return made

    @classmethod
    def of_file(cls, file: SharedFile, begin: int, size: int) -> "Arrays":
        made = cls()
        made._file, made._begin, made.size = file, begin, size
        return made

    def add(self, array: Any) -> int:
        """Where the array will be."""
        at = self.size
        self.parts.append(_bytes_of(array))
        self.size += array.nbytes
        return at

    def read_into(self, at: int, target: memoryview) -> None:
        if self._bytes is not None:
            target[:] = self._bytes[at : at + len(target)]
        elif self._file is not None:
            self._file.read_into(self._begin + at, target)


def _bytes_of(array: Any) -> memoryview:
    return memoryview(array.reshape(-1).view("u1"))


def pack(value: Any, blobs: Arrays) -> Any:
    """`value` as JSON; its arrays are added to `blobs`. Raises ValueError for what can't pass."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int | IntEnum):
        return int(value)
    if isinstance(value, list):
        return [pack(item, blobs) for item in value]
    if isinstance(value, tuple):
        return {_MARK: "tuple", "items": [pack(item, blobs) for item in value]}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("a dict needs text keys to pass to a worker process")
        return {_MARK: "dict", "items": {key: pack(item, blobs) for key, item in value.items()}}
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if hasattr(value, "parts") and hasattr(type(value), "_c_type"):
        origin, explicit, fields_ = value.parts()
        parts = [list(origin), explicit, {key: pack(item, blobs) for key, item in fields_.items()}]
        return {_MARK: "struct", "class": type(value).__name__, "parts": parts}
    if is_dataclass(value) and type(value).__name__ in _RECORDS:
        return {
            _MARK: "record",
            "class": type(value).__name__,
            "fields": {f.name: pack(getattr(value, f.name), blobs) for f in fields(value)},
        }
    return _pack_array(value, blobs)


def _pack_array(value: Any, blobs: Arrays) -> Any:
    import numpy as np

    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray) and not hasattr(value, "__array_interface__"):
        raise ValueError(f"a {type(value).__name__} can't pass to a worker process")
    array = np.asarray(value)
    if array.dtype.char not in _DTYPES or not array.dtype.isnative:
        raise ValueError(f"an array of {array.dtype} can't pass to a worker process")
    array = np.asarray(array, order="C")
    return {_MARK: "array", "dtype": array.dtype.char, "shape": list(array.shape), "at": blobs.add(array)}


def unpack(item: Any, blobs: Arrays) -> Any:
    """The value of `pack`. Raises ProtocolError."""
    if isinstance(item, list):
        return [unpack(i, blobs) for i in item]
    if not isinstance(item, dict):
        return item
    try:
        return _UNPACK[item[_MARK]](item, blobs)
    except ProtocolError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{str(item)[:200]} is no value: {type(error).__name__}: {error}") from None


def _tuple(item: dict[str, Any], blobs: Arrays) -> tuple[Any, ...]:
    return tuple(unpack(i, blobs) for i in item["items"])


def _dict(item: dict[str, Any], blobs: Arrays) -> dict[str, Any]:
    return {key: unpack(value, blobs) for key, value in item["items"].items()}


def _array(item: dict[str, Any], blobs: Arrays) -> Any:
    import numpy as np

    shape, at, code = item["shape"], item["at"], item["dtype"]
    if code not in _DTYPES or len(code) != 1 or not all(type(n) is int and n >= 0 for n in (*shape, at)):
        raise ProtocolError(f"there is no array of {code!r} with shape {shape} at {at}")
    size = math.prod(shape) * np.dtype(code).itemsize
    if at + size > blobs.size:
        raise ProtocolError(f"an array of {size} bytes at {at} is outside the {blobs.size} bytes of the message")
    array = np.empty(shape, code)
    blobs.read_into(at, _bytes_of(array))
    return array


def _struct(item: dict[str, Any], blobs: Arrays) -> Any:
    from sdsage import params  # noqa: F401  (its classes register themselves)
    from sdsage._struct import _CLASSES

    cls = {c.__name__: c for c in _CLASSES.values()}[item["class"]]
    origin, explicit, values = item["parts"]
    return cls.revived(tuple(origin), explicit, {key: unpack(value, blobs) for key, value in values.items()})


def _record(item: dict[str, Any], blobs: Arrays) -> Any:
    cls = getattr(import_module(f"sdsage.{_RECORDS[item['class']]}"), item["class"])
    return cls(**{key: unpack(value, blobs) for key, value in item["fields"].items()})


_UNPACK = {"tuple": _tuple, "dict": _dict, "array": _array, "struct": _struct, "record": _record}
