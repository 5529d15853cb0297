"""What decides on the latents of a job: its settings as flat plain values, to be compared with those of another run."""

import hashlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sdsage._struct import Struct
from sdsage.params import SdCtxParams, SdImgGenParams, SdVidGenParams

# How a context works, not what it computes.
_IDLE = {
    "ctx.n_threads",
    "ctx.vae_decode_only",
    "ctx.free_params_immediately",
    "ctx.enable_mmap",
    "ctx.offload_params_to_cpu",
    "ctx.max_vram",
    "ctx.keep_clip_on_cpu",
    "ctx.keep_vae_on_cpu",
    "ctx.keep_control_net_on_cpu",
}
_TILING = "gen.vae_tiling_params."  # also of the encoder, so it counts beside input pictures
_BLOCKS, _BLOCK = 64, 65536  # what is read of a model file


class Difference(NamedTuple):
    """A setting that is not the same in two runs. `name` is its path in the parameters: "gen.sample_params.eta"."""

    name: str
    before: Any
    now: Any


def identity(ctx: dict[str, Any], gen: SdImgGenParams | SdVidGenParams, seed: int) -> dict[str, Any]:
    """Settings by their path. Files stand as name and hash, pictures as size and hash.

    Args:
        ctx: what `flat` makes of a context's parameters.
        seed: the real one.

    Raises:
        OSError: a model file can't be read.
    """
    from sdsage import __version__  # late: 25 ms, which a process that only starts has no use for

    found = {"sdsage": __version__, **ctx, **flat(gen, "gen"), "gen.seed": seed}
    pictures = any(isinstance(value, dict) and "picture" in value for value in found.values())
    return {
        name: _fingerprint(value) if name.endswith("path") and value else value
        for name, value in found.items()
        if name not in _IDLE and (pictures or not name.startswith(_TILING))
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[Difference]:
    """Settings in which two runs differ; a file that was renamed is the same file."""

    def essence(value: Any) -> Any:
        return value["sha256"] if isinstance(value, dict) and "file" in value else value

    names = [*before, *(name for name in now if name not in before)]
    return [
        Difference(name, before.get(name), now.get(name))
        for name in names
        if essence(before.get(name)) != essence(now.get(name))
    ]


def text(value: Any) -> str:
    """A value of a `Difference` for people."""
    if isinstance(value, dict):
        return f"{value.get('file') or value.get('picture')} (sha256 {value['sha256'][:12]})"
    return "nothing" if value in (None, "") else str(value)


def flat(params: SdCtxParams | SdImgGenParams | SdVidGenParams, root: str) -> dict[str, Any]:
    """All fields by their path."""
    return dict(_walk(params, root))


def _walk(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Struct):
        for field, inner in value._values().items():
            yield from _walk(inner, f"{name}.{field}")
    elif isinstance(value, list):
        yield f"{name}.count", len(value)
        for i, item in enumerate(value):
            yield from _walk(item, f"{name}[{i}]")
    elif isinstance(value, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        yield name, {"picture": "x".join(map(str, value.shape)), "sha256": digest}
    elif isinstance(value, float):  # of the engine's 32 bits
        yield name, float(f"{value:.7g}") if math.isfinite(value) else str(value)
    else:
        yield name, getattr(value, "engine_name", value)


def _fingerprint(path: str) -> dict[str, str]:
    """Name and a hash of size and 64 blocks that lie evenly in the file: 4 MiB are read of a file of any size."""
    file = Path(path)
    digest = hashlib.sha256()
    for part in sorted(p for p in file.rglob("*") if p.is_file()) if file.is_dir() else [file]:
        size = os.stat(part).st_size
        digest.update(f"{size}\n".encode())
        with part.open("rb") as opened:
            for i in range(_BLOCKS):
                opened.seek(max(0, size - _BLOCK) * i // (_BLOCKS - 1))
                digest.update(opened.read(_BLOCK))
                if size <= _BLOCK:
                    break
    return {"file": file.name, "sha256": digest.hexdigest()}
