"""One attention on the GPU, checked: what the GPU tests have in common."""

from collections.abc import Sequence
from typing import Any

import binding
import numpy as np
import pytest
import reference as ref
from binding import DENSE, Array, Case, Layout, describe
from reference import KERNELS, LIMITS, TWIN_LIMITS

gpu = [pytest.mark.gpu, pytest.mark.skipif(bool(binding.why_no_gpu()), reason=binding.why_no_gpu() or "-")]
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
# Rounding of the output's own type.
OUTPUT_ROUNDING = {"f32": 0.0, "f16": 5e-4, "bf16": 4e-3}


def need(kernel: str) -> None:
    """Skips where the device has no such kernel; on no other ground."""
    choice = binding.choose(describe(kernel))
    if not choice.supported:
        pytest.skip(choice.reason)


def available() -> list[str]:
    return [kernel for kernel in KERNELS if binding.choose(describe(kernel)).supported]


def normal(
    batch: int, heads: int, kv_heads: int, lq: int, lk: int, dim: int, seed: int = 0
) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng([seed, batch, heads, kv_heads, lq, lk, dim])
    sizes = ((heads, lq), (kv_heads, lk), (kv_heads, lk))
    q, k, v = (rng.standard_normal((batch, n, length, dim), np.float32) for n, length in sizes)
    return q, k, v


def attention(
    kernel: str,
    q: Array,
    k: Array,
    v: Array,
    dtypes: Sequence[str] = ("f32",) * 4,
    layouts: Sequence[Layout] = (DENSE,) * 4,
    **more: Any,
) -> Array:
    """The output, after checks that hold for every call: nothing else was written, nothing left unwritten."""
    need(kernel)
    with Case(q, k, v, kernel, dtypes=dtypes, layouts=layouts, **more) as case:
        out = case.run()
        case.assert_clean()
    return out


def close(
    kernel: str, out: Array, q: Array, k: Array, v: Array, dtypes: Sequence[str] = ("f32",) * 4, **more: Any
) -> None:
    """Within the twin limit of the kernel's own mathematics. One code that falls to the other side of a rounding weighs
    the more the fewer outputs there are, hence the allowance for small ones."""
    q, k, v = (binding.rounded(x, dtype) for x, dtype in zip((q, k, v), dtypes, strict=False))
    right = ref.quantized(kernel, q, k, v, **more)
    off = ref.errors(out, right)
    limit = TWIN_LIMITS[kernel] * (1 + 20 / out.size**0.5) + OUTPUT_ROUNDING[dtypes[3]]
    assert off.rel_l2 <= limit, f"{kernel}, against its own mathematics: {off}, allowed {limit:.1e}"


def within_table(kernel: str, out: Array, right: Array) -> None:
    """Within the error table, against exact attention on normal inputs."""
    off, limit = ref.errors(out, right), LIMITS[kernel]
    assert off.rel_l2 <= limit.rel_l2, f"{kernel}, against exact attention: {off}"
    assert off.cosine >= limit.cosine, f"{kernel}, against exact attention: {off}"
    assert off.worst_row <= limit.worst_row, f"{kernel}, against exact attention: {off}"


def check(kernel: str, shape: tuple[int, int, int, int, int, int], **more: Any) -> None:
    """Normal inputs of (B, heads, kv_heads, Lq, Lk, D) against the kernel's own mathematics."""
    q, k, v = normal(*shape)
    close(kernel, attention(kernel, q, k, v, **more), q, k, v, **more)
