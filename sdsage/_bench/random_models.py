"""Model files of the real sizes with random weights, for measuring speed: Wan 14B and 1.3B, umt5-xxl, the Wan 2.1 VAE.

    python -m sdsage._bench.random_models FOLDER [14b | 1.3b]

The networks are those of sdsage.tiny at other sizes. Large tensors repeat one stretch of random blocks, each from a
start of its own: 15 GB are written in seconds, and rows differ.
"""

import sys
from collections.abc import Iterator
from functools import cache
from math import prod
from pathlib import Path
from zlib import crc32

from sdsage.tiny import gguf, safetensors, umt5, wan, wan_vae
from sdsage.tiny.tensors import DType, Tensor, Uniform, encode, uniform

WAN = {
    "14b": wan.Size(dim=5120, ffn=13824, blocks=40, text_dim=4096),
    "1.3b": wan.Size(dim=1536, ffn=8960, blocks=30, text_dim=4096),
}
UMT5_XXL = umt5.Size(dim=4096, heads=64, ffn=10240, layers=24)
VAE = wan_vae.Kind(z=16, pixel=3, width=96, decoder_width=96, grouped=False)
POOL_BLOCKS = 131_071  # a prime number of blocks of 32 values: no row length divides it


@cache
def pool(dtype: DType, std: float) -> memoryview:
    return memoryview(encode(uniform("pool", 0, POOL_BLOCKS * 32, std), dtype))


def data(tensor: Tensor) -> Iterator[bytes | memoryview]:
    """The tensor's bytes in pieces."""
    if not isinstance(tensor.fill, Uniform) or prod(tensor.shape) < POOL_BLOCKS * 32:
        yield tensor.data(0)
        return
    source = pool(tensor.dtype, tensor.fill.std)
    block = tensor.dtype.block_bytes * 32 // tensor.dtype.block
    at, left = crc32(tensor.name.encode()) % POOL_BLOCKS * block, tensor.nbytes
    while left:
        piece = source[at : at + left]
        yield piece
        at, left = 0, left - len(piece)


def write(path: Path, tensors: list[Tensor], architecture: str = "") -> Path:
    """A .gguf or .safetensors file, unless it is there already."""
    if path.is_file():
        return path
    is_gguf = path.suffix == ".gguf"
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb", buffering=0) as file:
        if is_gguf:
            general: dict[str, str | int] = {"general.architecture": architecture, "general.quantization_version": 2}
            file.write(gguf.header(tensors, general))
        else:
            file.write(safetensors.header(tensors, {}))
        for tensor in tensors:
            for piece in data(tensor):
                while piece:  # one write takes 2 GiB at most
                    piece = memoryview(piece)[file.write(piece) :]
            if is_gguf:
                file.write(bytes(gguf.padded(tensor.nbytes) - tensor.nbytes))
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
