"""Attention exactly, how far a result is from it, and how far it may be: the one place where the limits stand.

NumPy alone, and nothing else of this package: the tests of the kernels (tests/sage) read this file where there is no
libsdsage. q is [B, heads, Lq, D], k and v are [B, kv_heads, Lk, D], float32 or wider; bias is [1 or B, Lk].
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F32, F64 = np.float32, np.float64
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Limit:
    """The largest relative L2 error, and the least cosine; one row may be off four times as far as all together."""

    rel_l2: float
    cosine: float

    @property
    def worst_row(self) -> float:
        return 4 * self.rel_l2


# Against exact attention: normal inputs, and channel offsets up to 20 in K and V.
LIMITS = {
    "plain": Limit(0.002, 0.99999),
    "flash": Limit(0.004, 0.99999),
    "fp16": Limit(0.012, 0.9999),
    "fp8": Limit(0.040, 0.9992),
    "fp8++": Limit(0.040, 0.9992),
    "hopper": Limit(0.040, 0.9992),
}
OFFSET_LIMITS = {"fp16": 0.0005, "fp8": 0.004, "fp8++": 0.004, "hopper": 0.004}
FEW_OUTPUTS = 1.25  # a limit is wider by this factor where an output has few rows, whose errors scatter


@dataclass(frozen=True)
class Errors:
    rel_l2: float
    cosine: float
    worst_row: float  # largest rel. L2 of one output row
    max_abs: float

    def __str__(self) -> str:
        return (
            f"rel. L2 {self.rel_l2:.2e}, 1 - cosine {1 - self.cosine:.1e}, worst row {self.worst_row:.2e}, "
            f"largest error {self.max_abs:.2e}"
        )


def errors(out: Array, ref: Array) -> Errors:
    """NaN and infinities anywhere give infinite errors: no limit passes them."""
    a, b = np.asarray(out, F64), np.asarray(ref, F64)
    if a.shape != b.shape:
        raise ValueError(f"shapes {a.shape} and {b.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return Errors(np.inf, -1.0, np.inf, np.inf)
    size, off = np.linalg.norm(b), np.linalg.norm(a - b)
    if size == 0:
        return Errors(0.0 if off == 0 else np.inf, 1.0 if off == 0 else -1.0, float(off), float(np.abs(a).max()))
    rows, row_off = np.linalg.norm(b, axis=-1), np.linalg.norm(a - b, axis=-1)
    worst = np.max(np.where(rows > 0, row_off / np.where(rows > 0, rows, 1), np.where(row_off > 0, np.inf, 0)))
    cosine = float((a * b).sum() / (np.linalg.norm(a) * size)) if np.linalg.norm(a) else -1.0
    return Errors(float(off / size), cosine, float(worst), float(np.abs(a - b).max()))


def live_keys(bias: Array | None, batch: int, lk: int) -> NDArray[np.bool_]:
    """[B, Lk]: keys that a bias leaves; one that overflows to -inf in base 2 masks as well."""
    if bias is None:
        return np.ones((batch, lk), bool)
    with np.errstate(over="ignore"):
        base2 = np.asarray(bias, F32) * F32(LOG2E)
    return np.broadcast_to(base2 != -np.inf, (batch, lk)).copy()


def visible(rows: Array, lq: int, lk: int, causal: bool) -> NDArray[np.bool_]:
    """[rows, Lk]: bottom-right aligned."""
    if not causal:
        return np.ones((len(rows), lk), bool)
    return np.asarray(np.arange(lk)[None, :] <= np.asarray(rows)[:, None] + (lk - lq))


def exact(
    q: Array,
    k: Array,
    v: Array,
    scale: float | None = None,
    bias: Array | None = None,
    causal: bool = False,
    rows: Array | None = None,
) -> Array:
    """softmax(scale q k^T + bias) v in float64; all rows, or those asked for. A row that sees no key is zeros."""
    batch, heads, lq, dim = q.shape
    kv_heads, lk = k.shape[1:3]
    scale = dim**-0.5 if scale is None else scale
    rows = np.arange(lq) if rows is None else np.asarray(rows)
    live = live_keys(bias, batch, lk)
    out = np.zeros((batch, heads, len(rows), v.shape[-1]))
    step = max(1, 2**25 // (lk * (heads // kv_heads)))
    for b in range(batch):
        extra = np.zeros(lk) if bias is None else np.asarray(bias, F64)[b % len(bias)]
        extra = np.where(live[b], extra, 0)
        for g in range(kv_heads):
            keys = np.where(live[b, :, None], k[b, g], 0).astype(F64)
            values = np.where(live[b, :, None], v[b, g], 0).astype(F64)
            group = slice(g * heads // kv_heads, (g + 1) * heads // kv_heads)
            for i in range(0, len(rows), step):
                part = rows[i : i + step]
                seen = visible(part, lq, lk, causal) & live[b]
                s = np.where(seen, q[b, group][:, part].astype(F64) * scale @ keys.T + extra, -np.inf)
                top = s.max(-1, keepdims=True)
                p = np.exp(s - np.where(np.isfinite(top), top, 0))
                total = p.sum(-1, keepdims=True)
                out[b, group, i : i + step] = (p @ values) / np.where(total > 0, total, 1)
    return out
