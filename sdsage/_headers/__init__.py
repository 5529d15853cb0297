"""Headers of model files: metadata, and name, shape, type and place of every tensor; no weight is read.

Pure Python without the native library, so that a command can look at files before anything heavy starts. Time and
memory are bounded whatever a file says (`header.py`), and every fault is a ModelError.
"""

import os
import stat
from functools import lru_cache
from pathlib import Path

from sdsage.errors import ModelError

from . import gguf, safetensors
from .header import Budget, Header, Tensor, TooLarge

__all__ = ["Header", "Tensor", "TooLarge", "look", "read_header", "sniff"]

_ADVICE = "fetch the file again"


def sniff(path: Path) -> str:
    """ "gguf", "safetensors", "pickle" or "unknown", from the first bytes of a file."""
    with path.open("rb") as f:
        return _kind(f.read(16))


def _kind(head: bytes) -> str:
    if head[:4] == b"GGUF":
        return "gguf"
    if len(head) > 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**32:
        return "safetensors"  # before pickle: a length may begin with its bytes
    if head[:2] == b"PK" or (len(head) > 1 and head[0] == 0x80 and head[1] <= 5):
        return "pickle"
    return "unknown"


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a GGUF or safetensors file, or of all parts that a `.safetensors.index.json` names.

    Raises:
        TooLarge: the header is past the limits of this reader.
        ModelError: the file is missing, damaged, or not a model file that is read here.
    """
    file = Path(path)
    try:
        about = file.stat()
    except FileNotFoundError:
        raise ModelError(f"{file} does not exist: check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        raise ModelError(f"{file} can't be read: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(about.st_mode):
        raise ModelError(f"{file} is a folder: a model file is needed")
    if not stat.S_ISREG(about.st_mode):
        raise ModelError(f"{file} is not a file but a device, pipe or socket: a model file is needed")
    return _cached(file, about.st_size, about.st_mtime_ns)


def look(path: str | os.PathLike[str] | None) -> Header | None:
    """The header, or None where there is none to read or it can't be read: the engine then says why."""
    if not path:
        return None
    try:
        return read_header(path)
    except ModelError:
        return None


@lru_cache(maxsize=16)  # the slots of a run; several parts of a command look at the same files
def _cached(path: Path, size: int, changed: int) -> Header:
    return _read(path, Budget(path))


def _read(path: Path, budget: Budget, part: bool = False) -> Header:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            kind = _kind(file.read(16))
            file.seek(0)
            if kind == "gguf" and not part:
                return gguf.read(path, file, size, budget)
            if kind == "safetensors":
                return safetensors.read(path, file, size, budget)
            if path.name.endswith(safetensors.INDEX) and not part:
                return safetensors.read_index(path, file, size, budget, lambda p, b: _read(p, b, part=True))
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from None
    if kind == "pickle":
        raise ModelError(f"{path} is a checkpoint of Python pickles, which is not opened here: convert it to GGUF")
    raise ModelError(f"{path} is neither GGUF nor safetensors: {_ADVICE}")
