"""The references against each other and against the error table, and that the table notices what it must."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference as ref
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import KERNELS, LIMITS, OFFSET_LIMITS, Quantized, Tile

SHAPE = (1, 2, 200, 300, 128)
TILES = [Tile(32, 64), Tile(16, 128)]
FINITE = np.array([ref.e4m3_value(code) for code in range(256)])
FINITE = FINITE[np.isfinite(FINITE)]


def normal(shape: tuple[int, int, int, int, int], kv_heads: int = 0, seed: int = 0) -> tuple[Any, Any, Any]:
    batch, heads, lq, lk, dim = shape
    rng = np.random.default_rng(seed)
    sizes = ((heads, lq), (kv_heads or heads, lk), (kv_heads or heads, lk))
    q, k, v = (rng.standard_normal((batch, h, n, dim), np.float32) for h, n in sizes)
    return q, k, v


def within(errors: ref.Errors, kernel: str) -> bool:
    return errors.rel_l2 <= LIMITS[kernel].rel_l2 and errors.cosine >= LIMITS[kernel].cosine


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dim", [64, 128])
def test_normal_inputs_stay_within_the_table(kernel: str, dim: int, tile: Tile) -> None:
    q, k, v = normal((*SHAPE[:4], dim))
    off = ref.errors(ref.quantized(kernel, q, k, v, tile=tile), ref.exact(q, k, v))
    assert within(off, kernel), off
    assert off.worst_row < 3 * LIMITS[kernel].rel_l2, off


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("lk", [77, 300])
def test_channel_offsets_stay_within_the_table(kernel: str, tile: Tile, lk: int) -> None:
    q, k, v = normal((*SHAPE[:3], lk, 128))
    offsets = np.random.default_rng(1).uniform(-20, 20, (2, 1, 2, 1, 128)).astype(np.float32)
    off = ref.errors(
        ref.quantized(kernel, q, k + offsets[0], v + offsets[1], tile=tile), ref.exact(q, k, v + offsets[1])
    )
    assert off.rel_l2 <= OFFSET_LIMITS[kernel], off


def without_smoothing(q: Any, k: Any, v: Any) -> Quantized:
    x = ref.quantize("fp16", q, k, v, None)
    codes, scale = ref._int8(k, ref.k_groups(k.shape[2], x.tile.bk))
    return x.with_(k=codes, k_scale=scale)


@pytest.mark.parametrize("kernel", ["fp8", "fp8++"])
def test_offsets_of_v_need_its_smoothing(kernel: str) -> None:
    q, k, v = normal((*SHAPE[:3], 77, 128))
    v = v + np.random.default_rng(1).uniform(-20, 20, (1, 2, 1, 128)).astype(np.float32)
    rough, scale = ref.quantize_v(kernel, v, ref.live_keys(None, 1, 77))
    x = ref.quantize(kernel, q, k, v, None)
    off = ref.errors(ref.attend(x.with_(v=rough, v_scale=scale, v_mean=x.v_mean * 0), 128**-0.5), ref.exact(q, k, v))
    assert off.rel_l2 > OFFSET_LIMITS[kernel], off


def test_offsets_need_the_smoothing() -> None:
    q, k, v = normal(SHAPE)
    k = k + np.random.default_rng(1).uniform(-20, 20, (1, 2, 1, 128)).astype(np.float32)
    off = ref.errors(ref.attend(without_smoothing(q, k, v), 128**-0.5), ref.exact(q, k, v))
    assert off.rel_l2 > 3 * LIMITS["fp16"].rel_l2


def swap_keys(x: Quantized) -> Quantized:
    v = x.v.copy()
    v[:, :, [2, 8]] = v[:, :, [8, 2]]  # what a wrong key order in a group of 16 does to one pair
    return x.with_(v=v)


MUTATIONS: dict[str, Callable[[Quantized], Quantized]] = {
    "two V keys swapped": swap_keys,
    "K group one off": lambda x: x.with_(k_scale=np.roll(x.k_scale, 2, axis=2)),
    "Q group one off": lambda x: x.with_(q_scale=np.roll(x.q_scale, 1, axis=2)),
    "KV head one off": lambda x: x.with_(
        **{name: np.roll(getattr(x, name), 1, 1) for name in ("k", "k_scale", "v", "v_scale", "v_mean")}
    ),
    "V's scale one channel off": lambda x: x.with_(v_scale=np.roll(x.v_scale, 1, axis=2)),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mistake_exceeds_the_limits(mutation: str, kernel: str) -> None:
    q, k, v = normal(SHAPE)
    x = ref.quantize(kernel, q, k, v, None)
    wrong = ref.attend(MUTATIONS[mutation](x), 128**-0.5)
    against_exact = ref.errors(wrong, ref.exact(q, k, v))
    assert not within(against_exact, kernel), against_exact
    against_twin = ref.errors(wrong, ref.attend(x, 128**-0.5))
    assert against_twin.rel_l2 > 2 * ref.TWIN_LIMITS[kernel], against_twin


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_wrong_tile_is_told_from_the_right_one(kernel: str) -> None:
    """The twin limits see which rows share a scale; the key block they see through P's rounding."""
    q, k, v = normal(SHAPE)
    one, other = (ref.quantized(kernel, q, k, v, tile=tile) for tile in TILES)
    assert ref.errors(one, other).rel_l2 > ref.TWIN_LIMITS[kernel]


# --- E4M3 ------------------------------------------------------------------------------------------------------------


def test_e4m3_keeps_each_of_its_values() -> None:
    assert len(FINITE) == 254
    assert FINITE.max() == ref.E4M3_MAX
    assert np.array_equal(ref.e4m3(FINITE), FINITE.astype(np.float32))
    assert np.isnan(ref.e4m3(np.array([np.nan]))).all()


def nearest(x: float) -> float:
    """By looking at all codes: nearest, a tie to the even code, saturating."""
    if abs(x) >= ref.E4M3_MAX:
        return float(np.copysign(ref.E4M3_MAX, x))
    codes = [code for code in range(127)]  # the positive ones
    best = min(codes, key=lambda code: (abs(ref.e4m3_value(code) - abs(x)), code & 1))
    return float(np.copysign(ref.e4m3_value(best), x))


@settings(max_examples=300, deadline=None)
@given(st.floats(width=32, allow_nan=False) | st.floats(-500, 500, width=32) | st.floats(-(2**-5), 2**-5, width=32))
def test_e4m3_rounds_to_the_nearest(x: float) -> None:
    assert float(ref.e4m3(np.array([x]))[0]) == nearest(x)


def test_e4m3_between_neighbours() -> None:
    """Every midpoint of two codes, and the floats beside it."""
    values = np.sort(np.abs(FINITE))[1::2].astype(np.float32)
    middle = (values[1:] + values[:-1]) / 2
    for x in (middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))):
        assert ref.e4m3(x).tolist() == [nearest(float(v)) for v in x]


# --- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("lq", "lk"), [(1, 1), (1, 9), (7, 64), (64, 7), (65, 129), (100, 60)], ids=lambda n: str(n))
@pytest.mark.parametrize("causal", [False, True])
def test_edges_agree_with_exact(kernel: str, lq: int, lk: int, causal: bool) -> None:
    q, k, v = normal((2, 4, lq, lk, 40), kv_heads=2)
    bias = np.random.default_rng(2).standard_normal((2, lk)).astype(np.float32)
    bias[1, lk // 2 :] = -np.inf
    out, right = (
        ref.quantized(kernel, q, k, v, bias=bias, causal=causal),
        ref.exact(q, k, v, bias=bias, causal=causal),
    )
    off = ref.errors(out, right)
    assert off.rel_l2 < 2 * LIMITS[kernel].rel_l2, off
    assert np.array_equal((right == 0).all(-1), (out == 0).all(-1))


def test_causal_is_bottom_right_aligned() -> None:
    q, k, v = normal((1, 1, 5, 3, 8))
    out = ref.exact(q, k, v, causal=True)
    assert (out[0, 0, :2] == 0).all()
    assert np.allclose(out[0, 0, 2], v[0, 0, 0])
    assert np.allclose(out[0, 0, 4], ref.exact(q, k, v)[0, 0, 4])


def test_exact_against_plain_loops() -> None:
    q, k, v = normal((2, 4, 3, 5, 8), kv_heads=2)
    bias = np.array([[0.5, -np.inf, 0, 1, -1]], np.float32)
    out = ref.exact(q, k, v, scale=0.3, bias=bias, causal=True)
    for b, h, i in np.ndindex(2, 4, 3):
        keys = [j for j in range(5) if j <= i + 2 and bias[0, j] > -np.inf]
        w = [np.exp(0.3 * float(q[b, h, i].astype(float) @ k[b, h // 2, j]) + float(bias[0, j])) for j in keys]
        row = sum(a * v[b, h // 2, j].astype(float) for a, j in zip(w, keys, strict=True)) / sum(w)
        assert np.allclose(out[b, h, i], row)
    assert np.allclose(ref.exact(q, k, v, 0.3, bias, True, rows=np.array([2, 0])), out[:, :, [2, 0]])


@pytest.mark.parametrize("kernel", KERNELS)
def test_dead_rows_are_zeros_and_masked_contents_do_not_matter(kernel: str) -> None:
    q, k, v = normal((2, 2, 10, 200, 16))
    bias = np.zeros((2, 200), np.float32)
    bias[0, :100] = -np.inf  # the first tile has no live key
    bias[1] = -np.finfo(np.float32).max  # overflows to -inf in base 2
    out = ref.quantized(kernel, q, k, v, bias=bias)
    assert (out[1] == 0).all()
    assert ref.errors(out[0], ref.exact(q, k, v, bias=bias)[0]).rel_l2 < 2 * LIMITS[kernel].rel_l2
    for filler in (np.nan, np.inf, 1e38):
        dirty_k, dirty_v = k.copy(), v.copy()
        dirty_k[0, :, :100] = dirty_v[0, :, :100] = filler
        assert np.array_equal(ref.quantized(kernel, q, dirty_k, dirty_v, bias=bias), out)


@pytest.mark.parametrize("kernel", KERNELS)
def test_zeros_give_zeros_and_big_values_stay_finite(kernel: str) -> None:
    q, k, v = normal((1, 2, 20, 100, 64))
    assert (ref.quantized(kernel, q, k * 0, v * 0) == 0).all()
    for factor in (6e4, 1e-6, 1e30):
        off = ref.errors(ref.quantized(kernel, q, k, v * np.float32(factor)), ref.exact(q, k, v * np.float32(factor)))
        assert off.rel_l2 < 2 * LIMITS[kernel].rel_l2, (factor, off)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_arrives_as_nan(kernel: str, where: str, value: float) -> None:
    arrays = dict(zip("qkv", normal((2, 4, 20, 100, 16), kv_heads=2), strict=True))
    arrays[where][1, 1, 7, 3] = value
    out = ref.quantized(kernel, **arrays)
    must, may = ref.must_be_nan(**arrays), ref.may_be_nan(**arrays)
    assert must.any()
    assert np.isnan(out[must]).all()
    assert np.isfinite(out[~may]).all()
    assert not must[~may].any()
