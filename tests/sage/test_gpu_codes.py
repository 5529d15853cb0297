"""Codes and scales of a run, one by one against the reference of the quantized mathematics: scales within 1 ulp, codes
equal in 99.99 %, the others off by one."""

from typing import Any

import binding
import numpy as np
import pytest
import reference as ref
from binding import DENSE, Array, Case, Layout
from checked import each_kernel, gpu, need, normal
from codes import E4M3, Codes, read_codes

pytestmark = gpu

SHAPES = [(2, 4, 2, 333, 500, 128), (1, 3, 3, 65, 1000, 64), (1, 2, 1, 200, 77, 80), (1, 1, 1, 7, 1, 40)]
ORDERED_E4M3 = np.unique(E4M3[np.isfinite(E4M3)])


def run(kernel: str, q: Array, k: Array, v: Array, **more: Any) -> Codes:
    need(kernel)
    with Case(q, k, v, kernel, **more) as case:
        case.run()
        return read_codes(case)


def steps_apart(kernel: str, name: str, a: Array, b: Array) -> Array:
    """How many codes lie between."""
    if name != "v":
        return np.abs(a - b)
    if kernel == "fp16":
        bits = [x.astype(np.float16).view(np.int16).astype(np.int32) for x in (a, b)]
        ordered = [np.where(x < 0, -(x & 0x7FFF), x) for x in bits]
        return np.abs(ordered[0] - ordered[1])
    return np.abs(np.searchsorted(ORDERED_E4M3, a) - np.searchsorted(ORDERED_E4M3, b))


def same_scales(name: str, found: Array, right: Array) -> None:
    ulps = np.abs(found.view(np.int32).astype(np.int64) - right.astype(np.float32).view(np.int32))
    assert ulps.max() <= 1, f"scales of {name} are up to {ulps.max()} ulp off"


def compare(
    kernel: str, codes: Codes, q: Array, k: Array, v: Array, bias: Array | None = None, negative: bool = False
) -> None:
    """float32 inputs as the kernel read them."""
    lq, (lk, dim) = q.shape[2], k.shape[2:]
    live = ref.live_keys(bias, q.shape[0], lk)
    for name, x, found, right in (
        ("K", k, codes.k_mean, ref.mean_of(k, live)),
        ("V", v, codes.v_mean, ref.mean_of_v(kernel, v, live)),
    ):
        off = np.abs(found[..., :dim].astype(np.float64) - right)
        size = np.abs(np.where(live[:, None, :, None], x, 0)).max(2)
        assert (off <= 1e-6 * size).all(), f"the mean of {name} is up to {off.max()} off"
        assert not found[..., dim:].any()
    # what follows from a mean, from the kernel's own: its last bit is nobody's error
    smooth = ref.less(k, codes.k_mean[..., :dim], live)
    tile = ref.TILES[kernel]
    q8, q_scale = ref._int8(q, ref.q_groups(lq, tile.wq))
    k8, k_scale = ref._int8(smooth, ref.k_groups(lk, tile.bk))
    vq, v_scale = ref.quantize_v(kernel, ref.less(v, codes.v_mean[..., :dim], live), live)
    same_scales("q", codes.q_scale[:, :, :lq], q_scale)
    same_scales("k", codes.k_scale[:, :, :lk], k_scale)
    same_scales("v", codes.v_scale[..., :dim], v_scale)
    for name, found, right in (("q", codes.q, -q8 if negative else q8), ("k", codes.k, k8), ("v", codes.v, vq)):
        rows = right.shape[2]
        assert not found[:, :, rows:].any(), f"rows of {name} past the last are not zeros"
        assert not found[..., dim:].any(), f"channels of {name} past head_dim are not zeros"
        apart = steps_apart(kernel, name, found[:, :, :rows, :dim], right)
        assert apart.max() <= 1, f"codes of {name} are up to {apart.max()} steps off"
        assert (apart > 0).mean() <= 1e-4, f"{(apart > 0).mean():.1e} of the codes of {name} differ"


@each_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_codes_and_scales(kernel: str, shape: Any, dtype: str) -> None:
    q, k, v = normal(*shape)
    for x in (k, v):
        x += np.linspace(-20, 20, x.shape[-1], dtype=np.float32)  # something for the mean to take away
    codes = run(kernel, q, k, v, dtypes=(dtype,) * 3 + ("f32",))
    compare(kernel, codes, *(binding.rounded(x, dtype) for x in (q, k, v)))


@each_kernel
@pytest.mark.parametrize("dtypes", [("f32", "f16", "bf16", "f32"), ("bf16", "f32", "f16", "f32")], ids="-".join)
@pytest.mark.parametrize("layouts", [(DENSE,) * 4, (Layout("bth", (3, 5, 7), 1),) * 4], ids=["dense", "unaligned"])
def test_mixed_types_and_strides(kernel: str, dtypes: Any, layouts: Any) -> None:
    q, k, v = normal(1, 4, 2, 130, 300, 128)
    codes = run(kernel, q, k, v, dtypes=dtypes, layouts=layouts)
    compare(kernel, codes, *(binding.rounded(x, t) for x, t in zip((q, k, v), dtypes, strict=False)))


@each_kernel
def test_masked_keys_count_for_nothing(kernel: str) -> None:
    q, k, v = normal(2, 2, 2, 70, 400, 64)
    bias = np.random.default_rng(0).normal(0, 1, (2, 400)).astype(np.float32)
    bias[0, 100:200], bias[1, ::3] = -np.inf, -np.inf
    gone = np.isneginf(bias)[:, None, :, None]
    codes = run(kernel, q, np.where(gone, np.float32(np.nan), k), np.where(gone, np.float32(np.inf), v), bias=bias)
    compare(kernel, codes, q, k, v, bias)


@each_kernel
def test_zero_groups_have_scale_one(kernel: str) -> None:
    q, k, v = normal(1, 2, 2, 96, 256, 64)
    q[:, :, 32:64], v[..., 3] = 0, 0
    codes = run(kernel, q, k * 0, v)
    assert (codes.q_scale[:, :, 32:64] == 1).all()
    assert (codes.k_scale == 1).all()
    assert (codes.v_scale[..., 3] == 1).all()
    compare(kernel, codes, q, k * 0, v)


@each_kernel
def test_a_negative_softmax_scale_is_in_the_codes(kernel: str) -> None:
    q, k, v = normal(1, 2, 2, 70, 130, 64)
    compare(kernel, run(kernel, q, k, v, scale=-0.125), q, k, v, negative=True)


@each_kernel
def test_large_and_small_values(kernel: str) -> None:
    q, k, v = normal(1, 2, 2, 70, 300, 128)
    for factor in (6e4, 1e-6, 1e30):
        compare(kernel, run(kernel, q, k, v * np.float32(factor)), q, k, v * np.float32(factor))
    compare(kernel, run(kernel, q * 1000, k * np.float32(1e-3), v), q * 1000, k * np.float32(1e-3), v)


def wrong(codes: Codes, what: str) -> Codes:
    changed = {name: np.array(getattr(codes, name)) for name in codes.__dataclass_fields__}
    if what == "a code two off":
        changed["k"][0, 0, 5, 5] += 2 if changed["k"][0, 0, 5, 5] < 100 else -2
    elif what == "two keys of V swapped":
        changed["v"][:, :, [2, 8]] = changed["v"][:, :, [8, 2]]
    elif what == "a scale of Q two ulp off":
        changed["q_scale"].view(np.int32)[0, 0, 3] += 2
    elif what == "V's mean off":
        changed["v_mean"][0, 0, 3] += 1e-3
    else:
        changed["k_scale"] = np.roll(changed["k_scale"], 2, -1)
    return Codes(**changed)


@each_kernel
@pytest.mark.parametrize(
    "what",
    ["a code two off", "two keys of V swapped", "a scale of Q two ulp off", "K's groups one off", "V's mean off"],
)
def test_the_comparison_sees_a_mistake(kernel: str, what: str) -> None:
    q, k, v = normal(1, 2, 2, 70, 300, 64)
    codes = run(kernel, q, k, v)
    compare(kernel, codes, q, k, v)
    with pytest.raises(AssertionError):
        compare(kernel, wrong(codes, what), q, k, v)
