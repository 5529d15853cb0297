"""The traps of the field: ragged sizes, zeros, huge values, masks, head sizes. Field reports K01 to K30."""

from typing import Any

import numpy as np
import pytest
import reference as ref
from binding import Memory
from checked import attention, check, close, each_kernel, gpu, normal, within_table
from reference import LIMITS, OFFSET_LIMITS

pytestmark = gpu

INF = np.inf
FLT_MAX = float(np.finfo(np.float32).max)


def pollute() -> None:
    """NaN in memory that later allocations and shared memory get (K01)."""
    Memory(2**28).free()


@each_kernel
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lk", [1, 9, 12, 63, 64, 65, 77, 127, 128, 129, 191, 192, 193, 503])
def test_key_tails(kernel: str, lk: int, dim: int) -> None:
    """K01: tails of the last tile."""
    pollute()
    check(kernel, (1, 2, 2, 101, lk, dim))


@each_kernel
@pytest.mark.parametrize("lk", [9, 503])
def test_many_queries_with_a_key_tail(kernel: str, lk: int) -> None:
    pollute()
    check(kernel, (1, 3, 3, 1001, lk, 128))


@each_kernel
@pytest.mark.parametrize("lk", [4161, 4200, 4223, 4224, 4225])
def test_key_counts_around_a_multiple_of_128(kernel: str, lk: int) -> None:
    """K02."""
    q, k, v = normal(1, 4, 4, 200, lk, 128)
    out = attention(kernel, q, k, v)
    close(kernel, out, q, k, v)
    within_table(kernel, out, ref.exact(q, k, v))


@each_kernel
@pytest.mark.parametrize("lq", [1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_few_queries(kernel: str, lq: int) -> None:
    """K05."""
    check(kernel, (2, 5, 5, lq, 333, 64))


@each_kernel
@pytest.mark.parametrize("shape", [(2, 5, 5, 77, 333, 96), (1, 2, 2, 2048, 8192, 96), (1, 4, 4, 1000, 77, 128)])
def test_lengths_that_differ(kernel: str, shape: Any) -> None:
    """K07."""
    check(kernel, shape)


@each_kernel
@pytest.mark.parametrize("dim", [1, 2, 7, 8, 16, 31, 33, 40, 63, 64, 65, 72, 80, 88, 96, 100, 112, 127, 128])
def test_head_sizes(kernel: str, dim: int) -> None:
    """K11: padded inside; the scale is the true size's."""
    check(kernel, (1, 3, 3, 70, 150, dim))


@each_kernel
@pytest.mark.parametrize("dim", [40, 64, 72, 80, 88, 96, 112, 128])
def test_head_sizes_against_exact(kernel: str, dim: int) -> None:
    q, k, v = normal(1, 4, 4, 256, 1000, dim)
    within_table(kernel, attention(kernel, q, k, v), ref.exact(q, k, v))


@each_kernel
@pytest.mark.parametrize("shares", [(6, 1), (6, 2), (6, 3), (8, 8)])
def test_grouped_heads(kernel: str, shares: tuple[int, int]) -> None:
    check(kernel, (2, *shares, 65, 130, 64))


@each_kernel
def test_normal_inputs_and_the_error_table(kernel: str) -> None:
    for dim in (64, 128):
        q, k, v = normal(1, 4, 4, 1024, 4096, dim)
        out = attention(kernel, q, k, v)
        print(kernel, dim, ref.errors(out, ref.exact(q, k, v)))
        within_table(kernel, out, ref.exact(q, k, v))


@each_kernel
def test_channel_offsets(kernel: str) -> None:
    """Channel offsets up to 20 in K and V, with few keys and many: 0.0005 for fp16, 0.004 for the others."""
    for lk in (77, 300, 2000):
        q, k, v = normal(1, 4, 2, 300, lk, 128)
        offsets = np.random.default_rng(1).uniform(-20, 20, (2, 1, 2, 1, 128)).astype(np.float32)
        out = attention(kernel, q, k + offsets[0], v + offsets[1])
        off = ref.errors(out, ref.exact(q, k + offsets[0], v + offsets[1]))
        print(kernel, lk, off)
        assert off.rel_l2 <= OFFSET_LIMITS[kernel], off


@each_kernel
def test_one_loud_key_channel(kernel: str) -> None:
    """K with a channel 300 times the others. One code more or less is a factor in a probability: a wide limit."""
    q, k, v = normal(1, 2, 2, 200, 300, 128)
    k[..., 5] *= 300
    assert ref.errors(attention(kernel, q, k, v), ref.quantized(kernel, q, k, v)).rel_l2 < 0.03


# --- zeros and magnitudes --------------------------------------------------------------------------------------------


@each_kernel
@pytest.mark.parametrize("dim", [64, 80])
def test_empty_prompt(kernel: str, dim: int) -> None:
    """K18: all-zero K and V."""
    q, k, v = normal(2, 3, 3, 100, 77, dim)
    assert (attention(kernel, q, k * 0, v * 0) == 0).all()
    close(kernel, attention(kernel, q, k * 0, v), q, k * 0, v)
    close(kernel, attention(kernel, q * 0, k, v), q * 0, k, v)


@each_kernel
def test_zero_groups_and_channels(kernel: str) -> None:
    q, k, v = normal(1, 2, 2, 96, 200, 64)
    v[..., 3] = 0
    q[:, :, 32:64] = 0
    k[:, :, 64:128] = 0
    out = attention(kernel, q, k, v)
    assert (out[..., 3] == 0).all()
    close(kernel, out, q, k, v)


@each_kernel
def test_constant_values(kernel: str) -> None:
    """K and V the same at every key: smoothing leaves nothing of K, and the output is V."""
    q, k, v = normal(1, 2, 2, 65, 130, 128)
    k[...], v[...] = k[:, :, :1], v[:, :, :1]
    off = ref.errors(attention(kernel, q, k, v), np.broadcast_to(v[:, :, :1], q.shape))
    assert off.rel_l2 < {"fp16": 1e-3, "fp8": 1e-6, "fp8++": 1e-6, "hopper": 1e-6}[kernel], off  # FP8: V is all mean


@each_kernel
@pytest.mark.parametrize("size", ["6e4", "3e3", "1e30", "1e38", "1e-6", "1e-30"])
def test_value_magnitudes(kernel: str, size: str) -> None:
    """K15: V beyond FP16's range, and far below it."""
    q, k, v = normal(1, 2, 2, 65, 8192, 64)
    v = np.full_like(v, 6e4) if size == "6e4" else (v / 5 if size == "1e38" else v) * np.float32(size)
    out = attention(kernel, q, k, v)
    assert np.isfinite(out).all()
    if size == "6e4":
        assert np.abs(out / 6e4 - 1).max() < 5e-3
    else:
        close(kernel, out, q, k, v)


@each_kernel
@pytest.mark.parametrize("size", [1e3, 1e10, 1e19, 1e30, 3e37])
@pytest.mark.parametrize("which", ["q", "k", "qk", "qkv"])
def test_finite_inputs_never_give_nan(kernel: str, size: float, which: str) -> None:
    q, k, v = (
        np.clip(x, -8, 8) * np.float32(size if name in which else 1)
        for name, x in zip("qkv", normal(1, 2, 2, 70, 200, 64), strict=True)
    )
    out = attention(kernel, q, k, v)
    assert np.isfinite(out).all()
    assert np.abs(out).max() <= np.abs(v).max() * np.float32(1.07)  # P is rounded, its sum is not


@each_kernel
def test_float_extremes_stay_finite(kernel: str) -> None:
    for lk in (70, 4100):
        q, k, v = (np.copysign(np.float32(3.3e38), x) for x in normal(1, 1, 1, 33, lk, 64))
        assert np.isfinite(attention(kernel, q, k, v)).all()


@each_kernel
@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.5, 3.0, -0.1])
def test_softmax_scales(kernel: str, scale: float) -> None:
    q, k, v = normal(1, 2, 2, 65, 130, 64)
    out = attention(kernel, q, k, v, scale=scale)
    if abs(scale) < 1:
        close(kernel, out, q, k, v, scale=scale)
    else:  # one code more or less is a factor in a probability
        assert ref.errors(out, ref.quantized(kernel, q, k, v, scale=scale)).rel_l2 < 0.05


# --- masks -----------------------------------------------------------------------------------------------------------


@each_kernel
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("lk", [65, 200])
def test_a_bias_is_added(kernel: str, lk: int, rows: int) -> None:
    q, k, v = normal(2, 4, 2, 65, lk, 64)
    bias = np.random.default_rng(3).normal(0, 2, (rows, lk)).astype(np.float32)
    bias[:, ::7] = -INF
    check_bias = attention(kernel, q, k, v, bias=bias, bias_lead=3, bias_gap=5)
    close(kernel, check_bias, q, k, v, bias=bias)


@each_kernel
def test_the_last_40_keys_masked(kernel: str) -> None:
    """K21."""
    q, k, v = normal(1, 4, 4, 256, 1000, 64)
    bias = np.zeros((1, 1000), np.float32)
    bias[:, -40:] = -INF
    out = attention(kernel, q, k, v, bias=bias)
    within_table(kernel, out, ref.exact(q, k, v, bias=bias))
    short = attention(kernel, q, k[:, :, :-40].copy(), v[:, :, :-40].copy())
    assert ref.errors(out, short).rel_l2 < ref.TWIN_LIMITS[kernel]


@each_kernel
@pytest.mark.parametrize("filler", [np.nan, np.inf, -np.inf, FLT_MAX, 0.0])
def test_masked_contents_never_matter(kernel: str, filler: float) -> None:
    q, k, v = normal(2, 2, 1, 70, 150, 80)
    bias = np.zeros((2, 150), np.float32)
    bias[0, 10:90], bias[1, 0], bias[1, 149] = -INF, -INF, -INF
    dirty_k, dirty_v = k.copy(), v.copy()
    for x in (dirty_k, dirty_v):
        x[0, :, 10:90], x[1, :, 0], x[1, :, 149] = filler, filler, filler
    clean = attention(kernel, q, k, v, bias=bias)
    assert np.array_equal(attention(kernel, q, dirty_k, dirty_v, bias=bias), clean)
    close(kernel, clean, q, k, v, bias=bias)


@each_kernel
@pytest.mark.parametrize("mask", [-INF, -FLT_MAX])
@pytest.mark.parametrize("lk", [1, 64, 200])
def test_no_key_left_gives_zeros(kernel: str, lk: int, mask: float) -> None:
    q, k, v = normal(2, 2, 2, 65, lk, 64)
    bias = np.zeros((2, lk), np.float32)
    bias[0] = mask
    out = attention(kernel, q, k, v, bias=bias)
    assert (out[0] == 0).all()
    close(kernel, out[1:], q[1:], k[1:], v[1:])


@each_kernel
@pytest.mark.parametrize("live", [(150, 151), (64, 128), (199, 200), (0, 1)])
def test_whole_tiles_masked(kernel: str, live: tuple[int, int]) -> None:
    """First tiles masked and a later one live, and the other way round."""
    q, k, v = normal(1, 2, 2, 65, 200, 64)
    bias = np.full((1, 200), -INF, np.float32)
    bias[0, slice(*live)] = 0
    close(kernel, attention(kernel, q, k, v, bias=bias), q, k, v, bias=bias)


@each_kernel
@pytest.mark.parametrize("low", [-1e4, -1e9, -1e20])
def test_low_biases_mask_in_effect(kernel: str, low: float) -> None:
    q, k, v = normal(1, 2, 2, 65, 200, 64)
    bias = np.zeros((1, 200), np.float32)
    bias[0, :130] = low
    close(kernel, attention(kernel, q, k, v, bias=bias), q, k, v, bias=bias)


CAUSAL = [(1, 1), (64, 64), (65, 65), (200, 200), (1, 130), (100, 300), (63, 65), (300, 100), (130, 1), (129, 128)]


@each_kernel
@pytest.mark.parametrize(("lq", "lk"), CAUSAL)
@pytest.mark.parametrize("dim", [64, 128])
def test_causal(kernel: str, lq: int, lk: int, dim: int) -> None:
    """Bottom-right aligned; rows that see no key are zeros."""
    q, k, v = normal(2, 4, 2, lq, lk, dim)
    out = attention(kernel, q, k, v, causal=True)
    assert (out[:, :, : max(0, lq - lk)] == 0).all()
    close(kernel, out, q, k, v, causal=True)


@each_kernel
@pytest.mark.parametrize(("lq", "lk"), [(200, 200), (100, 300), (300, 100)])
def test_causal_with_a_bias(kernel: str, lq: int, lk: int) -> None:
    q, k, v = normal(2, 2, 2, lq, lk, 64)
    bias = np.random.default_rng(3).normal(0, 2, (2, lk)).astype(np.float32)
    bias[0, :70] = -INF  # rows that see only masked keys
    close(kernel, attention(kernel, q, k, v, causal=True, bias=bias), q, k, v, causal=True, bias=bias)


@each_kernel
def test_causal_against_exact(kernel: str) -> None:
    q, k, v = normal(1, 4, 4, 1500, 1500, 128)
    out, right = attention(kernel, q, k, v, causal=True), ref.exact(q, k, v, causal=True)
    assert ref.errors(out, right).rel_l2 <= LIMITS[kernel].rel_l2


# --- what is not finite, types, batches ------------------------------------------------------------------------------


@each_kernel
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_not_finite_arrives_as_nan(kernel: str, where: str, value: float, causal: bool) -> None:
    """In every output that depends on it, and in no other head."""
    arrays: dict[str, Any] = dict(zip("qkv", normal(2, 4, 2, 150, 150, 72), strict=True))
    clean = attention(kernel, **arrays, causal=causal)
    arrays[where][1, 1, 100, 3] = value
    out = attention(kernel, **arrays, causal=causal)
    must, may = ref.must_be_nan(**arrays, causal=causal), ref.may_be_nan(**arrays)
    assert must.any()
    assert np.isnan(out[must]).all()
    assert np.array_equal(out[~may], clean[~may])


@each_kernel
def test_a_lone_infinite_key_arrives_as_nan(kernel: str) -> None:
    q, k, v = normal(1, 1, 1, 5, 1, 64)
    k[0, 0, 0, 0] = np.inf
    assert np.isnan(attention(kernel, q, k, v)).all()


@each_kernel
@pytest.mark.parametrize(
    "dtypes",
    [
        ("f32", "f16", "f16", "f32"),  # what stable-diffusion.cpp produces
        ("f16", "f16", "f16", "f16"),
        ("bf16", "bf16", "bf16", "bf16"),
        ("bf16", "f32", "f16", "f32"),
        ("f16", "bf16", "f32", "bf16"),
        ("f32", "f32", "bf16", "f16"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("dim", [40, 63, 128])
def test_types(kernel: str, dtypes: Any, dim: int) -> None:
    """K25."""
    check(kernel, (2, 4, 2, 100, 200, dim), dtypes=dtypes)


@each_kernel
def test_output_types_are_the_same_result_rounded(kernel: str) -> None:
    from binding import rounded

    q, k, v = normal(1, 2, 2, 100, 200, 64)
    full = attention(kernel, q, k, v)
    for dtype in ("f16", "bf16"):
        out = attention(kernel, q, k, v, dtypes=("f32", "f32", "f32", dtype))
        assert np.array_equal(out, rounded(full, dtype))


@each_kernel
@pytest.mark.parametrize("causal", [False, True])
def test_each_batch_equals_its_own_run(kernel: str, causal: bool) -> None:
    """K24, bit for bit."""
    q, k, v = normal(3, 4, 2, 90, 200, 64)
    bias = np.random.default_rng(3).normal(0, 2, (3, 200)).astype(np.float32)
    bias[1, 50:] = -INF
    out = attention(kernel, q, k, v, bias=bias, causal=causal)
    for b in range(3):
        one = slice(b, b + 1)
        assert np.array_equal(attention(kernel, q[one], k[one], v[one], bias=bias[one], causal=causal), out[one])
