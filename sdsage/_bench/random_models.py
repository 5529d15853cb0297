"""Model files of the real sizes with random weights, for measuring speed: Wan 14B and 1.3B, umt5-xxl, the Wan 2.1 VAE.

    python -m sdsage._bench.random_models FOLDER [14b | 1.3b]

The networks are those of sdsage.tiny at other sizes. Large tensors repeat one stretch of random blocks, each from a
start of its own: 15 GB are written in seconds, and rows differ.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from sdsage.tiny import gguf, safetensors, umt5, wan, wan_vae
from sdsage.tiny.tensors import DType, Tensor, Uniform, decode, encode, uniform

WAN = {
    "14b": wan.Size(dim=5120, ffn=13824, blocks=40, text_dim=4096),
    "1.3b": wan.Size(dim=1536, ffn=8960, blocks=30, text_dim=4096),
}
UMT5_XXL = umt5.Size(dim=4096, heads=64, ffn=10240, layers=24)
VAE = wan_vae.Kind(z=16, pixel=3, width=96, decoder_width=96, grouped=False)
POOL_BLOCKS = 131_071  # a prime number of blocks of 32 values: no row length divides it


FEWEST = 1 << 20  # numbers of a tensor that is worth drawing from the stretch

Change = Callable[[NDArray[np.float32]], NDArray[np.float32]]


def _bytes(values: NDArray[np.float32], dtype: DType, change: Change | None) -> bytes:
    stored = encode(values, dtype)
    return stored if change is None else encode(change(decode(stored, dtype)), DType.F32)


@cache
def pool(dtype: DType, std: float, change: Change | None) -> memoryview:
    return memoryview(_bytes(uniform("pool", 0, POOL_BLOCKS * 32, std), dtype, change))


def data(tensor: Tensor, change: Change | None = None) -> Iterator[bytes | memoryview]:
    """The tensor's bytes in pieces; with `change` F32: what it makes of the values that would be stored."""
    if not isinstance(tensor.fill, Uniform) or prod(tensor.shape) < FEWEST:
        yield _bytes(tensor.values(0), tensor.dtype, change)
        return
    source = pool(tensor.dtype, tensor.fill.std, change)
    block = len(source) // POOL_BLOCKS  # bytes of 32 values
    at, left = crc32(tensor.name.encode()) % POOL_BLOCKS * block, prod(tensor.shape) * block // 32
    while left:
        piece = source[at : at + left]
        yield piece
        at, left = 0, left - len(piece)


def write(path: Path, tensors: Sequence[Tensor], architecture: str = "", change: Change | None = None) -> Path:
    """A .gguf or .safetensors file, unless it is there already.

    Args:
        change: makes weights of linear layers F32, with values of its own.
    """
    if path.is_file():
        return path
    changes = [change if len(t.shape) == 2 and t.dtype is not DType.F32 else None for t in tensors]
    kept = [replace(t, dtype=DType.F32) if c else t for t, c in zip(tensors, changes, strict=True)]
    is_gguf = path.suffix == ".gguf"
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb", buffering=0) as file:
        if is_gguf:
            general: dict[str, str | int] = {"general.architecture": architecture, "general.quantization_version": 2}
            file.write(gguf.header(kept, general))
        else:
            file.write(safetensors.header(kept, {}))
        for tensor, change, stored in zip(tensors, changes, kept, strict=True):
            for piece in data(tensor, change):
                while piece:  # one write takes 2 GiB at most
                    piece = memoryview(piece)[file.write(piece) :]
            if is_gguf:
                file.write(bytes(gguf.padded(stored.nbytes) - stored.nbytes))
    unfinished.rename(path)
    return path


def make(folder: Path, size: str) -> dict[str, str]:
    """Writes what is missing; fields of SdCtxParams and their files."""
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "diffusion_model_path": str(write(folder / f"wan-{size}.gguf", wan.wan(16, 16, WAN[size]), "wan")),
        "t5xxl_path": str(write(folder / "umt5-xxl.gguf", umt5.umt5(UMT5_XXL), "t5encoder")),
        "vae_path": str(write(folder / "wan21-vae.safetensors", wan_vae.wan_vae(VAE))),
    }


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for size in sys.argv[2:] or list(WAN):
        for path in make(Path(sys.argv[1]), size).values():
            print(path, f"{Path(path).stat().st_size / 1e9:.2f} GB")
