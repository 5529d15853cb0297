"""What attention should give: exactly (sdsage/_attention/accuracy.py), and as each kernel's quantized mathematics gives
it. NumPy alone.

q is [B, heads, Lq, D], k and v are [B, kv_heads, Lk, D], float32 or wider; bias is [1 or B, Lk]. `quantize` and
`attend` are the two halves of a kernel, apart so that a test can spoil what lies between them.
"""

import importlib.util
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def _accuracy() -> Any:
    """By itself: a machine that checks the kernels has no libsdsage, which `import sdsage` asks for."""
    path = Path(__file__).parents[2] / "sdsage" / "_attention" / "accuracy.py"
    spec = importlib.util.spec_from_file_location("accuracy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["accuracy"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


accuracy = _accuracy()
Limit, LIMITS, OFFSET_LIMITS, Errors = accuracy.Limit, accuracy.LIMITS, accuracy.OFFSET_LIMITS, accuracy.Errors
errors, exact, live_keys, visible = accuracy.errors, accuracy.exact, accuracy.live_keys, accuracy.visible

Array = NDArray[Any]
F32, F64 = np.float32, np.float64
LOG2E: float = accuracy.LOG2E
KERNELS = ("fp16", "fp8", "fp8++", "hopper")
E4M3_MAX = 448.0
PP_MAX = 2.25  # V's range in fp8++: 448 * 2.25 * 64 keys = 64512, just under FP16's 65504
PP_KEYS = 64


@dataclass(frozen=True)
class Tile:
    """Where groups and tiles begin: query rows a warp, keys a block; how many keys a step takes, and in which order."""

    wq: int
    bk: int
    step: int = 64
    backwards: bool = False


# Has to say what native/sage_cuda does: the groups decide the scales, the steps decide how P is rounded.
TILES = {"fp16": Tile(32, 64), "fp8": Tile(32, 64), "fp8++": Tile(32, 64), "hopper": Tile(32, 64, 128, True)}


# Of a kernel against its own quantized reference.
TWIN_LIMITS = {"fp16": 0.002, "fp8": 0.005, "fp8++": 0.005, "hopper": 0.005}


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
    """Online softmax in base 2 over steps of keys, FP32 running maximum and sum, each step's P V added to FP32."""
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
    starts = range(0, lk, x.tile.step)
    for start in reversed(starts) if x.tile.backwards else starts:
        keys = slice(start, min(start + x.tile.step, lk))
        dots = x.q @ x.k[:, :, keys].swapaxes(-1, -2)  # up to 127 * 127 * 128: exact in float32
        factor = (x.q_scale * F32(scale * LOG2E))[..., None] * x.k_scale[:, :, None, keys]
        s = dots * factor + extra[:, None, None, keys]
        seen = visible(np.arange(lq), lq, lk, causal)[None, None, :, keys] & live[:, None, None, keys]
        s = np.where(seen, s, F32(-np.inf))
        new = np.maximum(top, s.max(-1, keepdims=True))
        p = np.exp2(s - new + head_room)
        shrink = np.exp2(top - new)
        narrow = p.astype(np.float16).astype(F32) if x.kernel == "fp16" else e4m3(p)
        summed = narrow if x.kernel == "hopper" else p  # there the tensor core sums what it multiplies
        total = total * shrink + summed.sum(-1, keepdims=True, dtype=F32)
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
