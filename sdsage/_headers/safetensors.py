"""safetensors: the length of a JSON table, the table, the data. And the index of a model in several files."""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from sdsage.errors import ModelError

from .header import (
    MAX_DIMENSIONS,
    MAX_NAME,
    MAX_TENSORS,
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
from .types import SAFETENSORS

INDEX = ".safetensors.index.json"
_METADATA = "__metadata__"
_MOST_PARTS = 1000


def read(path: Path, file: BinaryIO, size: int, budget: Budget) -> Header:
    """The header of a safetensors file."""
    length = int.from_bytes(file.read(8), "little")
    if length > size - 8:
        raise damaged(path, f"its header would have {length} bytes, and the file has {size}")
    table = _json(path, file, length, budget)
    metadata = _metadata(path, table.pop(_METADATA, {}))
    budget.spend("tensors", len(table))
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in table.items()}
    check_places(path, size, tensors.items())
    return Header(path, "safetensors", size, metadata, tensors, (path,))


def read_index(path: Path, file: BinaryIO, size: int, budget: Budget, part: Callable[[Path, Budget], Header]) -> Header:
    """The header of a model in parts, from its index; `part` reads that of one."""
    table = _json(path, file, size, budget)
    where = table.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise damaged(path, "the index has no weight_map")
    names = sorted({name for name in where.values() if isinstance(name, str)})
    if len(names) > _MOST_PARTS:
        raise TooLarge(f"{path} names {len(names)} files: up to {_MOST_PARTS} are read")
    for name in names:
        if "/" in name or "\\" in name or "\0" in name or name.startswith(".") or not name.endswith(".safetensors"):
            raise damaged(path, f"the index names {shown(name)}, which is no safetensors file beside it")
    headers = [_part(path, name, budget, part) for name in names]
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, Value] = {}
    for header in headers:
        metadata = header.metadata | metadata
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise damaged(path, f"two of its parts hold a tensor {shown(name)}")
            tensors[name] = tensor
    missing = next((name for name in where if name not in tensors), None)
    if missing is not None:
        raise damaged(path, f"its parts do not hold the tensor {shown(missing)} of the index")
    return Header(path, "safetensors", sum(h.size for h in headers), metadata, tensors, tuple(h.path for h in headers))


def _part(index: Path, name: str, budget: Budget, part: Callable[[Path, Budget], Header]) -> Header:
    file = index.parent / name
    if not file.is_file():
        raise ModelError(f"{index} names the part {name}, which is not beside it: fetch all parts of the model")
    return part(file, budget)


def _json(path: Path, file: BinaryIO, length: int, budget: Budget) -> dict[str, Any]:
    """A JSON object of `length` bytes without a name twice."""
    budget.spend("kept", length)
    text = file.read(length)
    # Small objects would take many times the memory of their text: a tensor has three brackets and some commas.
    if text.count(b"{") + text.count(b"[") > 4 * MAX_TENSORS or text.count(b",") > 10 * MAX_TENSORS:
        raise TooLarge(f"{path}: the header has more entries than that of any model: fetch the file again")
    try:
        found = json.loads(text, object_pairs_hook=_without_twins)
    except RecursionError:
        raise damaged(path, "the table in its header is nested without end") from None
    except _TwiceError as error:
        raise damaged(path, f"there are two entries {shown(str(error))}") from None
    except ValueError:  # json's own, and that of a number with thousands of digits
        raise damaged(path, "its header is not JSON") from None
    if not isinstance(found, dict):
        raise damaged(path, "its header is not a table")
    return found


class _TwiceError(Exception):
    """A name that stands twice in an object."""


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        raise _TwiceError(next(name for name, _ in pairs if name in seen or seen.add(name)))  # type: ignore[func-returns-value]
    return found


def _metadata(path: Path, table: Any) -> dict[str, Value]:
    if not isinstance(table, dict):
        raise damaged(path, f"{_METADATA} is not a table")
    return {k[:MAX_NAME]: v[:MAX_VALUE] for k, v in table.items() if isinstance(v, str)}


def _tensor(path: Path, name: str, entry: Any, start: int) -> Tensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]}:
            pass
        case _:
            raise damaged(path, f"the entry of {shown(name)} lacks dtype, shape or data_offsets")
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME or len(shape) > MAX_DIMENSIONS:
        raise damaged(path, f"tensor {shown(name)} has {len(shape)} dimensions and a name of {len(name)} characters")
    if not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end)):
        raise damaged(path, f"tensor {shown(name)} has a size that is no whole number")
    if dtype not in SAFETENSORS:
        raise ModelError(f"{path}: tensor {shown(name)} has type {shown(dtype)}, which is not known: convert the file")
    kind, each = SAFETENSORS[dtype]
    nbytes = prod(shape) * each
    if end - begin != nbytes:
        raise damaged(path, f"tensor {shown(name)} of {dtype} takes {nbytes} bytes, and has {end - begin}")
    return Tensor(tuple(shape), kind, start + begin, nbytes)
