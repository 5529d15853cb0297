"""An attention to compute: its shape, and inputs that follow from a seed. NumPy alone."""

from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
ZERO_CHANNEL = 3  # of V, in inputs with zero channels; the next one is zero in Q and K
CLIP = 8.0  # of normal numbers that are made large: a size says what the largest are

NORMAL, LARGE, ZERO_CHANNELS, ZERO_KEYS = "normal", "large", "zero channels", "zero keys"


@dataclass(frozen=True)
class Problem:
    """A shape and its inputs.

    Attributes:
        causal: query i sees keys 0 .. i + lk - lq; lq is at most lk.
        inputs: NORMAL: standard normal numbers. LARGE: the same times `size`. ZERO_CHANNELS: a channel of V, and
            another of Q and K, is zero. ZERO_KEYS: K and V are zeros, as of an empty prompt.
        half: they are given as FP16.
        masked: so many of the last keys are masked by a bias.
        seed: the same seed, shape and NumPy give the same numbers.
    """

    batch: int
    heads: int
    kv_heads: int
    lq: int
    lk: int
    head_dim: int
    causal: bool = False
    inputs: str = NORMAL
    size: float = 1.0
    half: bool = False
    masked: int = 0
    seed: int = 0

    def __str__(self) -> str:
        kv = f"/{self.kv_heads}" if self.kv_heads != self.heads else ""
        length = f"{self.lq}" if self.lq == self.lk else f"{self.lq}x{self.lk}"
        return f"B={self.batch} H={self.heads}{kv} L={length} D={self.head_dim}{' causal' if self.causal else ''}"

    @property
    def operations(self) -> float:
        """Multiplications and additions of both products; half of them with a causal mask over equal lengths."""
        all_keys = 4.0 * self.batch * self.heads * self.lq * self.lk * self.head_dim
        return all_keys * (1 - (self.lq - 1) / (2 * self.lk)) if self.causal else all_keys

    def arrays(self) -> tuple[Array, Array, Array]:
        """q [B, heads, lq, D], k and v [B, kv_heads, lk, D]."""
        shape = astuple(self)[:6]
        rng = np.random.default_rng([self.seed, *shape])
        sizes = ((self.heads, self.lq), (self.kv_heads, self.lk), (self.kv_heads, self.lk))
        q, k, v = (rng.standard_normal((self.batch, n, length, self.head_dim), np.float32) for n, length in sizes)
        if self.inputs == LARGE:
            q, k, v = (np.clip(x, -CLIP, CLIP) * np.float32(self.size) for x in (q, k, v))
        elif self.inputs == ZERO_CHANNELS:
            v[..., ZERO_CHANNEL] = q[..., ZERO_CHANNEL + 1] = k[..., ZERO_CHANNEL + 1] = 0
        elif self.inputs == ZERO_KEYS:
            k[...] = v[...] = 0
        if self.half:
            q, k, v = (x.astype(np.float16).astype(np.float32) for x in (q, k, v))
        return q, k, v

    def bias(self) -> Array | None:
        """[1, lk]; None without masked keys."""
        if not self.masked:
            return None
        bias = np.zeros((1, self.lk), np.float32)
        bias[:, self.lk - self.masked :] = -np.inf
        return bias


@dataclass(frozen=True)
class Measured:
    """What one method gave.

    Attributes:
        method: as it was asked for; `kernel`: what ran, "" when nothing did; `why`: why not.
        emulated: the kernel's FP8 instructions are emulated on the GPU.
        seconds, quantize_seconds: of each repeat; the latter of SageAttention's quantizers alone, else empty.
        max_abs, rel_l2, cosine, worst_row: against float64; infinite where a value is not finite. None when the output
            was not compared.
        finite: no NaN and no infinity; None when the output was not looked at.
        largest: absolute value, where the output is finite.
        zeros: what has to be zero is zero; None when nothing has to be.
    """

    method: str
    kernel: str
    why: str
    emulated: bool
    seconds: tuple[float, ...]
    quantize_seconds: tuple[float, ...]
    max_abs: float | None = None
    rel_l2: float | None = None
    cosine: float | None = None
    worst_row: float | None = None
    finite: bool | None = None
    largest: float | None = None
    zeros: bool | None = None


@dataclass(frozen=True)
class Sample:
    """What of an output is compared: so many rows of so many heads; 0: all of them."""

    rows: int = 0
    heads: int = 0

    def of(self, problem: Problem) -> tuple[NDArray[Any], NDArray[Any]]:
        """Numbers of rows and heads: spread evenly, the first and the last among them; heads are whole KV groups'
        first ones."""
        share = problem.heads // problem.kv_heads
        kv = _spread(self.heads, problem.kv_heads)
        heads = (kv[:, None] * share + np.arange(share)).ravel() if not self.heads else kv * share
        return _spread(self.rows, problem.lq), heads


ALL = Sample()


def _spread(count: int, total: int) -> NDArray[Any]:
    if not count or count >= total:
        return np.arange(total)
    return np.unique(np.linspace(0, total - 1, count).round().astype(int))
