"""Final latents as a file: what a job has before it decodes.

A .safetensors file with one float32 tensor for each picture, or one for a video: "latents.0", "latents.1", ..., of
shape 1 x C x H x W or 1 x C x T x H x W, as the sampler leaves them (before the scaling that belongs to the VAE). Its
metadata have one key, "sdsage": a JSON object with "format" (1), "model" (the version as `Context.version_name` gives
it), "video", and what the writer added.
"""

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdsage._parts import part_of
from sdsage.errors import BadRequest

FORMAT = 1
_MAX_HEADER = 2**24  # bytes


@dataclass(frozen=True)
class Latents:
    """Final latents and what they are of.

    Attributes:
        tensors: float32, one per picture (1 x C x H x W) or one for a video (1 x C x T x H x W).
        model: the version of the model, as `Context.version_name` gives it.
        info: what else was written beside them, as plain JSON values.
    """

    tensors: tuple[NDArray[np.float32], ...]
    model: str
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def video(self) -> bool:
        return self.tensors[0].ndim == 5


def save_latents(
    path: str | os.PathLike[str],
    tensors: Sequence[NDArray[np.float32]],
    model: str,
    info: Mapping[str, Any] | None = None,
) -> None:
    """Writes latents for `load_latents` and `sdsage decode`; the file appears, or is replaced, when it is whole.

    Args:
        tensors: as `Result.latents` holds them.
        model: `Context.version_name`.
        info: plain JSON values that come back from `load_latents`.

    Raises:
        BadRequest: there are no latents, or `info` holds something that JSON has no word for.
        OSError: the file can't be written.
    """
    if not tensors:
        raise BadRequest("there are no latents to save: a job keeps them with keep_latents=True")
    about = {**(info or {}), "format": FORMAT, "model": model, "video": np.ndim(tensors[0]) == 5}
    try:
        entries: dict[str, Any] = {"__metadata__": {"sdsage": json.dumps(about, allow_nan=False)}}
    except (TypeError, ValueError) as error:
        raise BadRequest(f"info takes plain JSON values only: {error}") from error
    arrays = [np.ascontiguousarray(x, "<f4") for x in tensors]
    offset = 0
    for i, x in enumerate(arrays):
        span = [offset, offset + x.nbytes]
        entries[f"latents.{i}"] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": span}
        offset = span[1]
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    write_whole(Path(path), [struct.pack("<Q", len(header)), header, *(x.tobytes() for x in arrays)])


def write_whole(path: Path, parts: Sequence[bytes]) -> None:
    """Writes beside `path`, through to the disk, then renames: the old file or the new one is there, never half."""
    part = part_of(path)
    try:
        with part.open("xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load_latents(path: str | os.PathLike[str]) -> Latents:
    """Reads what `save_latents` wrote.

    Raises:
        BadRequest: it is no such file, or is damaged.
        OSError: it can't be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise BadRequest(f"{os.fspath(path)} holds no latents: a .safetensors file that sdsage wrote is needed")
        try:
            entries = json.loads(file.read(length))
            about = json.loads(entries.pop("__metadata__")["sdsage"])
            if not entries:
                raise ValueError("no tensors")
            tensors = tuple(_tensor(entries[f"latents.{i}"], file, 8 + length, size) for i in range(len(entries)))
            found = Latents(tensors, str(about.pop("model")), about)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadRequest(
                f"{os.fspath(path)} holds no latents that sdsage wrote, or is damaged ({type(error).__name__}: {error})"
            ) from None
    if about.get("format") != FORMAT:
        raise BadRequest(
            f"{os.fspath(path)} has format {about.get('format')!r}, this version of sdsage reads {FORMAT}: use the "
            "version that wrote it"
        )
    return found


def _tensor(entry: dict[str, Any], file: Any, base: int, size: int) -> NDArray[np.float32]:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    whole = all(type(n) is int and 0 < n < 2**31 for n in (*shape, begin + 1, end))
    if entry["dtype"] != "F32" or len(shape) not in (4, 5) or not whole or base + end > size:
        raise ValueError("a tensor of another kind, or cut off")
    count = 1
    for n in shape:
        count *= n
    if end - begin != 4 * count:
        raise ValueError(f"a tensor of shape {shape} with {end - begin} bytes")
    file.seek(base + begin)
    values = np.frombuffer(file.read(4 * count), "<f4").astype(np.float32).reshape(shape)
    if not np.isfinite(values).all():
        raise ValueError("values that are not finite")
    return values
