"""What attention should give: exactly (float64), and as each kernel's quantized mathematics gives it. NumPy alone.

q is [B, heads, Lq, D], k and v are [B, kv_heads, Lk, D], float32 or wider; bias is [1 or B, Lk]. `quantize` and
`attend` are the two halves of a kernel, apart so that a test can spoil what lies between them.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F32, F64 = np.float32, np.float64
LOG2E = 1.4426950408889634
KERNELS = ("fp16", "fp8", "fp8++")
E4M3_MAX = 448.0
PP_MAX = 2.25  # V's range in fp8++: 448 * 2.25 * 64 keys = 64512, just under FP16's 65504
PP_KEYS = 64


@dataclass(frozen=True)
class Tile:
    """Where groups and tiles begin: query rows a warp, keys a block."""

    wq: int
    bk: int


# Has to say what native/sage_cuda does: the groups decide the scales, the key block decides how P is rounded.
TILES = {"fp16": Tile(32, 64), "fp8": Tile(32, 64), "fp8++": Tile(32, 64)}


@dataclass(frozen=True)
class Limit:
    rel_l2: float
    cosine: float


# Against exact attention: normal inputs, and channel offsets up to 20 in K and V.
LIMITS = {"fp16": Limit(0.012, 0.9999), "fp8": Limit(0.040, 0.9992), "fp8++": Limit(0.040, 0.9992)}
OFFSET_LIMITS = {"fp16": 0.0005, "fp8": 0.004, "fp8++": 0.004}
# Of a kernel against its own quantized reference.
TWIN_LIMITS = {"fp16": 0.002, "fp8": 0.005, "fp8++": 0.005}


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


def e4m3(x: Array) -> NDArray[np.float32]:
    """To the nearest E4M3 value, ties to even, saturating at 448; NaN stays."""
    x = np.clip(np.asarray(x, F32), F32(-E4M3_MAX), F32(E4M3_MAX))
    exponent = np.maximum(np.frexp(x)[1] - 1, -6)  # under 2^-6 the step no longer shrinks
    step = np.ldexp(F32(1), exponent - 3)
    return np.asarray(np.rint(x / step) * step, F32)


def e4m3_value(code: int) -> float:
    """What one of the 256 codes means, spelled out from the format (OCP FP8, E4M3)."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def _int8(x: Array, groups: NDArray[np.int64]) -> tuple[Array, Array]:
    """Codes [B, H, L, D] and scales [B, H, L], one amax for all rows of a group. A row that is not finite spoils its
    group's scale. Codes are x times the reciprocal, rounded: with 16-bit inputs many quotients are ties."""
    x = np.where(np.isfinite(x), x, np.nan).astype(F32)
    row = np.abs(x).max(-1)
    amax = np.zeros((int(groups.max()) + 1, *row.shape[:2]), F32)
    np.maximum.at(amax, groups, np.moveaxis(row, 2, 0))
    scale = np.moveaxis(np.where(amax == 0, F32(1), amax / F32(127))[groups], 0, 2)
    reciprocal = np.moveaxis(np.where(amax == 0, F32(0), F32(127) / np.where(amax == 0, F32(1), amax))[groups], 0, 2)
    codes = np.clip(np.rint(np.nan_to_num(x * reciprocal[..., None])), -127, 127)
    return codes.astype(F32), scale


def q_groups(lq: int, wq: int) -> NDArray[np.int64]:
    row = np.arange(lq)
    return row // wq * 8 + row % 8


def k_groups(lk: int, bk: int) -> NDArray[np.int64]:
    key = np.arange(lk)
    return key // bk * 4 + key % 8 // 2


@dataclass(frozen=True)
class Quantized:
    """What a kernel reads. Integer codes are held in float32, which is exact for them and their dot products."""

    kernel: str
    tile: Tile
    q: Array  # [B, heads, Lq, D]
    q_scale: Array  # [B, heads, Lq]
    k: Array  # [B, heads, Lk, D]: each head has its KV head's
    k_scale: Array
    v: Array  # [B, heads, Lk, D]: values of the 8 or 16 bit type
    v_scale: Array  # [B, heads, D]
    v_mean: Array  # the same: what the codes of V lack; zeros in fp16

    def with_(self, **changes: Array) -> "Quantized":
        return replace(self, **changes)  # type: ignore[arg-type]


def mean_of(x: Array, live: Array) -> NDArray[np.float32]:
    """[B, H, D]: over the unmasked keys."""
    x = np.where(live[:, None, :, None], x, 0)
    with np.errstate(invalid="ignore"):
        return np.asarray(x.sum(2, dtype=F64) / np.maximum(live.sum(-1), 1)[:, None, None], F32)


def less(x: Array, mean: Array, live: Array) -> NDArray[np.float32]:
    """K or V less a mean; masked keys become zeros."""
    with np.errstate(invalid="ignore"):
        return np.where(live[:, None, :, None], x - mean[:, :, None], F32(0)).astype(F32)


def mean_of_v(kernel: str, v: Array, live: Array) -> NDArray[np.float32]:
    """What the codes of V lack: nothing in fp16, in channels that are not finite, and where the difference could
    overflow."""
    if kernel == "fp16":
        return np.zeros((*v.shape[:2], v.shape[3]), F32)
    with np.errstate(invalid="ignore"):
        large = np.abs(np.where(live[:, None, :, None], v, 0)).max(2)
    return np.where(large < 2.0**126, mean_of(v, live), F32(0))  # a NaN is not below


def quantize_v(kernel: str, v: Array, live: Array) -> tuple[Array, Array]:
    """Values in the kernel's type and a scale per channel, of V less its mean."""
    v = np.where(live[:, None, :, None], v, 0).astype(F32)
    amax = np.abs(np.where(np.isfinite(v), v, np.nan)).max(2)  # [B, H, D]
    if kernel == "fp16":  # any power of two will do that keeps the largest in range
        scale = np.ldexp(F32(1), np.where(amax > 0, np.frexp(np.nan_to_num(amax))[1] - 15, 0))
        scale = np.where(np.isnan(amax), np.nan, scale).astype(F32)
        return (v / scale[:, :, None]).astype(np.float16).astype(F32), scale
    top = F32(PP_MAX if kernel == "fp8++" else E4M3_MAX)
    scale = np.where(amax == 0, F32(1), amax / top).astype(F32)
    return e4m3(v * (F32(1) / scale)[:, :, None]), scale


def quantize(kernel: str, q: Array, k: Array, v: Array, bias: Array | None, tile: Tile | None = None) -> Quantized:
    tile = TILES[kernel] if tile is None else tile
    live = live_keys(bias, q.shape[0], k.shape[2])
    share = q.shape[1] // k.shape[1]
    q8, q_scale = _int8(q, q_groups(q.shape[2], tile.wq))
    k8, k_scale = _int8(less(k, mean_of(k, live), live), k_groups(k.shape[2], tile.bk))
    v_mean = mean_of_v(kernel, v, live)
    vq, v_scale = quantize_v(kernel, less(v, v_mean, live), live)
    spread = [np.repeat(x, share, axis=1) for x in (k8, k_scale, vq, v_scale, v_mean)]
    return Quantized(kernel, tile, q8, q_scale, *spread)


def _pv(kernel: str, p: Array, v: Array) -> Array:
    """One tile's P V, as the tensor core leaves it."""
    if kernel != "fp8++":
        return np.asarray(p.astype(F64) @ v, F32)
    total = np.zeros((*p.shape[:-1], v.shape[-1]), F32)
    for start in range(0, p.shape[-1], PP_KEYS):
        part = np.zeros(total.shape, np.float16)
        for i in range(start, min(start + PP_KEYS, p.shape[-1]), 32):  # one mma: 32 keys
            step = slice(i, min(i + 32, start + PP_KEYS))
            part = (part + p[..., step].astype(F64) @ v[..., step, :]).astype(np.float16)
        total += part
    return total


def attend(x: Quantized, scale: float, bias: Array | None = None, causal: bool = False) -> NDArray[np.float32]:
    """Online softmax in base 2 over key tiles, FP32 running maximum and sum, each tile's P V added to FP32."""
    batch, heads, lq, dim = x.q.shape
    lk = x.k.shape[2]
    live = live_keys(bias, batch, lk)
    extra = np.zeros((batch, lk), F32)
    if bias is not None:
        with np.errstate(over="ignore"):
            extra = np.broadcast_to(np.asarray(bias, F32) * F32(LOG2E), (batch, lk))
    head_room = F32(0) if x.kernel == "fp16" else F32(np.log2(E4M3_MAX))
    top = np.full((batch, heads, lq, 1), -1e30, F32)
    total = np.zeros((batch, heads, lq, 1), F32)
    out = np.zeros((batch, heads, lq, dim), F32)
    for start in range(0, lk, x.tile.bk):
        keys = slice(start, min(start + x.tile.bk, lk))
        dots = x.q @ x.k[:, :, keys].swapaxes(-1, -2)  # up to 127 * 127 * 128: exact in float32
        factor = (x.q_scale * F32(scale * LOG2E))[..., None] * x.k_scale[:, :, None, keys]
        s = dots * factor + extra[:, None, None, keys]
        seen = visible(np.arange(lq), lq, lk, causal)[None, None, :, keys] & live[:, None, None, keys]
        s = np.where(seen, s, F32(-np.inf))
        new = np.maximum(top, s.max(-1, keepdims=True))
        p = np.exp2(s - new + head_room)
        shrink = np.exp2(top - new)
        total = total * shrink + p.sum(-1, keepdims=True, dtype=F32)
        narrow = p.astype(np.float16).astype(F32) if x.kernel == "fp16" else e4m3(p)
        out = out * shrink + _pv(x.kernel, narrow, x.v[:, :, keys])
        top = new
    with np.errstate(invalid="ignore"):
        rows = out / np.where(total == 0, 1, total) * x.v_scale[:, :, None] + x.v_mean[:, :, None]
        return np.where(total == 0, F32(0), rows)


def quantized(
    kernel: str,
    q: Array,
    k: Array,
    v: Array,
    scale: float | None = None,
    bias: Array | None = None,
    causal: bool = False,
    tile: Tile | None = None,
) -> NDArray[np.float32]:
    """What the kernel should give, to rounding."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attend(quantize(kernel, q, k, v, bias, tile), scale, bias, causal)


def must_be_nan(q: Array, k: Array, v: Array, bias: Array | None = None, causal: bool = False) -> NDArray[np.bool_]:
    """[B, heads, Lq, D]: outputs that depend on an element that is not finite. Others of the same head may be NaN too
    (they share a scale or a mean), of another head never: see may_be_nan."""
    batch, heads, lq = q.shape[:3]
    share, lk = heads // k.shape[1], k.shape[2]
    seen: Array = np.logical_and(visible(np.arange(lq), lq, lk, causal)[None], live_keys(bias, batch, lk)[:, None])
    bad_q = np.logical_not(np.isfinite(q).all(-1)) & np.any(seen, -1, keepdims=True).swapaxes(1, 2)
    bad_k = np.repeat(np.logical_not(np.isfinite(k).all(-1)), share, axis=1)  # [B, heads, Lk]
    by_k = (seen[:, None] & bad_k[:, :, None]).any(-1)
    bad_v = np.repeat(~np.isfinite(v), share, axis=1)  # [B, heads, Lk, D]
    by_v = np.einsum("bik,bhkd->bhid", seen.astype(F32), bad_v.astype(F32)) > 0
    return np.asarray((bad_q | by_k)[..., None] | by_v)


def may_be_nan(q: Array, k: Array, v: Array, bias: Array | None = None) -> NDArray[np.bool_]:
    """[B, heads]: heads that hold an element that is not finite, masked keys left out."""
    share = q.shape[1] // k.shape[1]
    live = live_keys(bias, q.shape[0], k.shape[2])[:, None, :, None]
    bad = [np.repeat((~np.isfinite(x) & live).any((-1, -2)), share, axis=1) for x in (k, v)]
    return np.asarray(bad[0] | bad[1] | (~np.isfinite(q)).any((-1, -2)))
