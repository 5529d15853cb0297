"""Writes trained weights as model files that the engine loads: python -m tools.tiny_model.export STATE FOLDER

NumPy only; `values` reads such files. Names are those of the published models: Wan's for the diffusion transformers and
the VAE, llama.cpp's for umt5. Linear layers are F32, F16 or Q8_0; convolutions F16 and the rest F32, as the engine
keeps them.
"""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sdsage._headers import read_header
from sdsage.tiny import gguf, safetensors
from sdsage.tiny.tensors import Constant, DType, Tensor, encode
from tools.tiny_model import arrays, tokens
from tools.tiny_model.sizes import LATENT, TEXT

Weights = Mapping[str, NDArray]
Described = list[tuple[Tensor, NDArray]]


def dit(weights: Weights, linear: DType, inputs: int) -> Described:
    """One expert with so many of its input channels: a clip without a first frame is one with zeros in the others."""
    found = []
    for name, values in weights.items():
        dtype = DType.F32
        if name == "patch_embedding.weight":
            values = np.ascontiguousarray(values[:, :inputs]).reshape(-1, *values.shape[2:])  # ggml has four dimensions
            dtype = DType.F16
        elif name.endswith(".weight") and values.ndim == 2:
            dtype = linear
        found.append(_described(name, values, dtype))
    return found


def vae(weights: Weights) -> Described:
    """Convolutions as F16."""
    return [_described(k, v, DType.F16 if k.endswith(".weight") else DType.F32) for k, v in weights.items()]


def text(weights: Weights, linear: DType, vocabulary: int = TEXT.vocabulary) -> Described:
    """The encoder with the whole vocabulary: rows of tokens that no caption has are zeros."""
    rows = np.zeros((vocabulary, weights["token_embd.weight"].shape[1]), np.float32)
    rows[list(tokens.used())] = weights["token_embd.weight"][1:]
    found = [_described("token_embd.weight", rows, linear)]
    for name, values in weights.items():
        if name != "token_embd.weight":
            matrix = values.ndim == 2 and "rel_b" not in name
            found.append(_described(f"enc.{name}", values, linear if matrix else DType.F32))
    return found


def _described(name: str, values: NDArray, dtype: DType) -> tuple[Tensor, NDArray]:
    return Tensor(name, values.shape, dtype, Constant(0.0)), np.ascontiguousarray(values, np.float32)


def as_gguf(described: Described, architecture: str, name: str) -> bytes:
    """A whole GGUF file."""
    general: dict[str, str | int] = {"general.architecture": architecture, "general.name": name}
    general["general.quantization_version"] = 2
    head = gguf.header([t for t, _ in described], general)
    return head + b"".join(gguf.pad(encode(v, t.dtype)) for t, v in described)


def as_safetensors(described: Described) -> bytes:
    """A whole safetensors file."""
    head = safetensors.header([t for t, _ in described], {})
    return head + b"".join(encode(v, t.dtype) for t, v in described)


def values(path: Path) -> dict[str, NDArray[np.float32]]:
    """What the tensors of a model file stand for, by their names in the file."""
    content, found = path.read_bytes(), {}
    for name, t in read_header(path).tensors.items():
        raw = content[t.begin : t.begin + t.nbytes]
        if t.type == "q8_0":
            blocks = np.frombuffer(raw, np.dtype([("d", "<f2"), ("q", "i1", 32)]))
            flat = blocks["q"].astype(np.float32) * blocks["d"].astype(np.float32)[:, None]
        else:
            flat = np.frombuffer(raw, {"f16": "<f2", "f32": "<f4"}[t.type]).astype(np.float32)
        found[name] = flat.reshape(t.shape)
    return found


def shorter(values: NDArray, bits: int) -> NDArray:
    """float16 values with so many bits of mantissa left: the rest is zeros, which compress."""
    drop = 10 - bits
    raw = values.astype(np.float16).view(np.uint16).astype(np.uint32)
    raw = raw + (1 << (drop - 1)) - 1 + ((raw >> drop) & 1)
    return (raw >> drop << drop).astype(np.uint16).view(np.float16).astype(np.float32)


def files(state: Path, linear: DType, vae_bits: int = 10) -> Iterable[tuple[str, bytes]]:
    """Name and bytes of every model file for which `state` has weights."""
    kind = {DType.F32: "f32", DType.F16: "f16", DType.Q8_0: "q8_0"}[linear]
    for expert in ("low", "high"):
        weights = arrays.load(state, f"{expert}.ema")
        for task, inputs in (("t2v", LATENT), ("i2v", 2 * LATENT + 4)) if weights else ():
            described = dit(weights, linear, inputs)
            yield f"wan-{task}-{expert}-{kind}.gguf", as_gguf(described, "wan", f"sdsage tiny {task} {expert}")
    if weights := arrays.load(state, "text.ema"):
        yield f"umt5-{kind}.gguf", as_gguf(text(weights, linear), "t5encoder", "sdsage tiny umt5")
    if weights := arrays.load(state, "vae.ema"):
        if vae_bits < 10:
            weights = {
                k: shorter(v, vae_bits) if v.ndim > 3 and k.endswith("weight") else v for k, v in weights.items()
            }
        yield "wan21-vae.safetensors", as_safetensors(vae(weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("state", type=Path, help="folder with the weights of train.py")
    parser.add_argument("folder", type=Path, help="where the model files go")
    parser.add_argument("--type", choices=("f32", "f16", "q8_0"), default="q8_0", help="of linear layers")
    parser.add_argument("--vae-bits", type=int, default=10, help="bits of mantissa in the VAE's weights, 4 to 10")
    a = parser.parse_args()
    if not 4 <= a.vae_bits <= 10:
        parser.error(f"--vae-bits is {a.vae_bits}: 4 to 10 are possible")
    written = 0
    a.folder.mkdir(parents=True, exist_ok=True)
    for name, data in files(a.state, DType[a.type.upper()], a.vae_bits):
        (a.folder / name).write_bytes(data)
        print(f"{a.folder / name}  {len(data) / 1e6:.2f} MB")
        written += 1
    if not written:
        parser.error(f"{a.state} holds no weights: train.py --state {a.state} makes them")


if __name__ == "__main__":
    main()
