"""Sizes past 32 bits, past the grid's limits, and 131,072 tokens; rows are sampled where all would take too long."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import binding
import numpy as np
import pytest
import reference as ref
from binding import STORAGE, Array, Memory, describe, ffi, synchronize
from checked import attention, available, each_kernel, gpu, need, normal
from reference import LIMITS

pytestmark = gpu


def need_memory(size: int) -> None:
    if binding.free_memory() < size + 2**30:
        pytest.skip(f"needs {size / 2**30:.0f} GiB of device memory, {binding.free_memory() / 2**30:.0f} free")


def within(kernel: str, out: Array, right: Array, slack: float = 1.0) -> None:
    off = ref.errors(out, right)
    assert off.rel_l2 <= slack * LIMITS[kernel].rel_l2, f"{kernel}: {off}"


@each_kernel
@pytest.mark.parametrize("causal", [False, True])
def test_131072_tokens(kernel: str, causal: bool) -> None:
    """K10."""
    length = 2**17
    q, k, v = normal(1, 2, 2, length, length, 64)
    rows = np.unique(np.concatenate([np.random.default_rng(0).integers(0, length, 60), [0, 63, 64, length - 1]]))
    out = attention(kernel, q, k, v, causal=causal)
    assert np.isfinite(out).all()
    within(kernel, out[:, :, rows], ref.exact(q, k, v, causal=causal, rows=rows), 1.1)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads"), [(70000, 1, 1), (1, 70000, 70000), (250, 280, 40), (1, 70000, 7)], ids=str
)
def test_70000_heads(batch: int, heads: int, kv_heads: int) -> None:
    """K32: a grid's y and z end at 65,535."""
    q, k, v = normal(batch, heads, kv_heads, 9, 9, 8)
    right = ref.exact(q, k, v)
    for kernel in available():
        within(kernel, attention(kernel, q, k, v), right)


@each_kernel
def test_more_keys_than_a_grid_has_rows(kernel: str) -> None:
    """K32: L = 66,000."""
    q, k, v = normal(1, 1, 1, 66000, 66000, 16)
    rows = np.array([0, 1, 32767, 65534, 65535, 65536, 65999])
    within(kernel, attention(kernel, q, k, v)[:, :, rows], ref.exact(q, k, v, rows=rows), 1.5)


@contextmanager
def fused(x: dict[str, Array], dtype: str, strides: tuple[int, int, int], at: dict[str, int]) -> Iterator[Any]:
    """q, k, v and o as views of one poisoned buffer with (batch, head, token) strides, at the element offsets `at`;
    gives the description and a function that reads o's rows."""
    kind = np.dtype(STORAGE[dtype])
    batch, heads, lq, dim = x["q"].shape
    size = max(at.values()) + dim
    for stride, n in zip(strides, (batch, heads, max(lq, x["k"].shape[2])), strict=True):
        size += stride * (n - 1)
    need_memory(size * kind.itemsize)
    memory = Memory(size * kind.itemsize)
    desc = describe("auto", (batch, heads, x["k"].shape[1], lq, x["k"].shape[2], dim), dtypes=(dtype,) * 4)
    for name in "qkvo":
        tensor = getattr(desc, name)
        tensor.data = ffi.cast("void *", memory.address + at[name] * kind.itemsize)
        tensor.batch_stride, tensor.head_stride, tensor.token_stride = strides
    pitch = strides[2] * kind.itemsize
    starts = {
        (name, b, h): (at[name] + b * strides[0] + h * strides[1]) * kind.itemsize
        for name in "qkvo"
        for b, h in np.ndindex(batch, heads)
    }
    for name in "qkv":
        for b, h in np.ndindex(x[name].shape[:2]):
            memory.write_rows(starts[name, b, h], pitch, binding.store(x[name][b, h], dtype))

    def read() -> Array:
        out = np.empty((batch, heads, lq, dim), np.float32)
        for b, h in np.ndindex(batch, heads):
            rows = memory.read_rows(starts["o", b, h], pitch, lq, dim * kind.itemsize)
            out[b, h] = binding.load(rows.view(kind), dtype)
        return out

    try:
        yield desc, read
    finally:
        memory.free()


def run(desc: Any, kernel: str) -> None:
    desc.kernel = binding.KERNELS[kernel]
    workspace = Memory(binding.choose(desc).workspace)
    binding.check(binding.sage().sage_attn_run(desc, ffi.cast("void *", workspace.address), workspace.size, ffi.NULL))
    synchronize()
    assert workspace.guards_whole()
    workspace.free()


@each_kernel
def test_a_fused_qkv_of_100000_tokens(kernel: str) -> None:
    """K03: (L - 1) * row stride passes 2^31. Two of the 56 heads are run: the first and the last."""
    need(kernel)
    dim, length, row = 128, 100000, 56 * 128 * 3
    q, k, v = normal(1, 2, 2, 300, length, dim)
    q, k, v = (binding.rounded(x, "f16") for x in (q, k, v))
    at = {"q": 0, "k": 56 * dim, "v": 2 * 56 * dim, "o": 10 * dim}
    with fused({"q": q, "k": k, "v": v}, "f16", (0, 55 * dim, row), at) as (desc, read):
        run(desc, kernel)
        out = read()
    right = attention(kernel, q, k, v, dtypes=("f16",) * 4)
    assert np.array_equal(out, right)
    rows = np.arange(0, 300, 7)
    within(kernel, out[:, :, rows], ref.exact(q, k, v, rows=rows), 1.1)


FAR = 2**32 + 4096  # elements


@each_kernel
@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("far", ["batch", "head", "token", "token, not aligned"])
def test_offsets_past_32_bits(kernel: str, far: str, dtype: str) -> None:
    need(kernel)
    q, k, v = (binding.rounded(x, dtype) for x in normal(2, 2, 2, 70, 150, 64))
    tokens = FAR // 149 + (1 if far == "token, not aligned" else 8) - FAR // 149 % 8
    strides = {
        "batch": (FAR, 150 * 256, 256),
        "head": (150 * 256, FAR, 256),
    }.get(far, (1024, 512, tokens))
    with fused({"q": q, "k": k, "v": v}, dtype, strides, {"q": 0, "k": 64, "v": 128, "o": 192}) as (desc, read):
        run(desc, kernel)
        out = read()
    assert np.array_equal(out, attention(kernel, q, k, v, dtypes=(dtype,) * 4))
