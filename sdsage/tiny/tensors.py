"""Tensors of the tiny models: name, shape, type and how the values are drawn."""

from dataclasses import dataclass
from enum import Enum
from math import prod, sqrt
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

GENERATOR = 1  # goes up when the same description gives other bytes than before

Q8_BLOCK = 32  # values that share one scale in Q8_0


class DType(Enum):
    """Storage type of a tensor in the file: GGML type number, safetensors name, values and bytes a block."""

    F32 = (0, "F32", 1, 4)
    F16 = (1, "F16", 1, 2)
    Q8_0 = (8, "", Q8_BLOCK, 2 + Q8_BLOCK)

    def __init__(self, ggml: int, safetensors: str, block: int, block_bytes: int) -> None:
        self.ggml = ggml
        self.safetensors = safetensors
        self.block = block
        self.block_bytes = block_bytes


@dataclass(frozen=True, slots=True)
class Uniform:
    """Values uniform in +-sqrt(3) std around zero."""

    std: float


@dataclass(frozen=True, slots=True)
class Constant:
    """The same value everywhere."""

    value: float


Kernel = tuple[tuple[float, ...], ...]  # weights of each kernel dimension; the kernel is their outer product


@dataclass(frozen=True, slots=True)
class Blur:
    """A convolution that mixes channels at random and blurs: weight[o, i, ...] = mix[o, i] * kernel[...].

    `mix` is uniform with deviation `std`. Each drawn row of it serves `repeat` output channels in a row: those that
    the engine spreads over the pixels of a patch. With `centred` its rows sum to zero, so that what all input channels
    have in common (SiLU and ReLU give them a positive mean) does not reach the output.
    """

    std: float
    kernel: Kernel
    repeat: int = 1
    centred: bool = False


@dataclass(frozen=True, slots=True)
class Carry:
    """A convolution that blurs each channel for itself; more outputs than inputs start over with the first input."""

    kernel: Kernel


Fill = Uniform | Constant | Blur | Carry


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a model file; `shape` is in row-major order, the fastest dimension last, as in PyTorch."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    fill: Fill

    def __post_init__(self) -> None:
        if self.shape[-1] % self.dtype.block:
            raise ValueError(
                f"{self.name}: rows of {self.shape[-1]} values do not divide into blocks of {self.dtype.block}"
            )

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.dtype.block * self.dtype.block_bytes

    def data(self, seed: int) -> bytes:
        """The tensor's bytes in the file; they depend on name, shape, type, fill and seed alone."""
        return encode(self.values(seed), self.dtype)

    def values(self, seed: int) -> NDArray[np.float32]:
        """What the file's bytes are rounded from."""
        match self.fill:
            case Constant(value):
                return np.full(self.shape, value, np.float32)
            case Uniform(std):
                return uniform(self.name, seed, prod(self.shape), std).reshape(self.shape)
            case Blur(std, kernel, repeat, centred):
                n_out, n_in = self.shape[:2]
                std = std * sqrt(0.5) if centred else std
                mix = uniform(self.name, seed, n_out // repeat * n_in, std).reshape(-1, n_in)
                if centred:
                    mix = mix - np.roll(mix, 1, axis=1)
                return _outer_product(mix.repeat(repeat, axis=0), kernel)
            case Carry(kernel):
                n_out, n_in = self.shape[:2]
                same = np.arange(n_out)[:, None] % n_in == np.arange(n_in)
                return _outer_product(same.astype(np.float32), kernel)


def _outer_product(mix: NDArray[np.float32], kernel: Kernel) -> NDArray[np.float32]:
    for axis in kernel:
        mix = mix[..., None] * np.array(axis, np.float32)
    return mix


def uniform(name: str, seed: int, n: int, std: float) -> NDArray[np.float32]:
    """n values of mean 0 and deviation std, from a stream of their own for every name and seed.

    Only `random_raw` is used: NumPy keeps the stream of a bit generator for good (NEP 19), but not the
    distributions of `Generator`. All that follows is exact or rounded once, so every machine gets the same bits.
    """
    raw = np.random.PCG64([crc32(name.encode()), seed]).random_raw((n + 1) // 2)
    bits = raw.astype("<u8", copy=False).view("<u4")[:n]
    values = (bits >> np.uint32(8)).astype(np.float32)  # 24 bits: exact in float32
    values *= np.float32(2.0**-23)
    values -= np.float32(1.0)
    values *= np.float32(std * sqrt(3.0))
    return values


def encode(values: NDArray[np.float32], dtype: DType) -> bytes:
    """Values in row-major order as bytes of the given type, little-endian."""
    match dtype:
        case DType.F32:
            return values.astype("<f4", copy=False).tobytes()
        case DType.F16:
            return values.astype("<f2").tobytes()
        case DType.Q8_0:
            return _encode_q8_0(values)


def decode(data: bytes, dtype: DType) -> NDArray[np.float32]:
    """The values of bytes, in a row."""
    match dtype:
        case DType.F32:
            return np.frombuffer(data, "<f4").astype(np.float32, copy=False)
        case DType.F16:
            return np.frombuffer(data, "<f2").astype(np.float32)
        case DType.Q8_0:
            blocks = np.frombuffer(data, np.uint8).reshape(-1, 2 + Q8_BLOCK)
            scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
            return (scales * blocks[:, 2:].view(np.int8)).reshape(-1)


def _encode_q8_0(values: NDArray[np.float32]) -> bytes:
    """Blocks of a float16 scale d = max|x| / 127 and 32 int8 values round(x / d)."""
    out = np.empty((values.size // Q8_BLOCK, 2 + Q8_BLOCK), np.uint8)
    step = 1 << 14  # 2 MiB of float32: the passes below stay in cache
    for part in (slice(i, i + step) for i in range(0, len(out), step)):
        x = values.reshape(-1, Q8_BLOCK)[part]
        d = np.abs(x).max(axis=1) / np.float32(127.0)
        inverse = np.divide(np.float32(1.0), d, out=np.zeros_like(d), where=d > 0)
        q = np.rint(x * inverse[:, None])
        out[part, :2] = d.astype("<f2").view(np.uint8).reshape(-1, 2)
        out[part, 2:] = q.astype(np.int8).view(np.uint8)
    return out.tobytes()
