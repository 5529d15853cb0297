"""Where tensors lie must not matter: any strides, any alignment, bit for bit."""

from typing import Any

import numpy as np
import pytest
from binding import DENSE, Case, Layout, synchronize
from checked import attention, close, each_kernel, gpu, need, normal

pytestmark = gpu

LAYOUTS = {
    "tokens outside heads": Layout("bth"),
    "batch innermost": Layout("thb"),
    "heads outermost": Layout("hbt"),
    "rows padded by 8": Layout("bht", (8, 0, 0)),
    "rows padded by 1": Layout("bht", (1, 0, 0)),
    "odd everywhere": Layout("bth", (3, 5, 7), 1),
    "fused, a row of many heads": Layout("bth", (128, 64, 0), 64),
    "starts at 2": Layout("bht", (0, 0, 0), 2),
    "starts at 1": Layout("bht", (0, 0, 0), 1),
}


@each_kernel
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("dim", [64, 77, 128])
def test_a_view_gives_the_contiguous_copys_bits(kernel: str, name: str, dtype: str, dim: int) -> None:
    q, k, v = normal(2, 4, 2, 70, 150, dim)
    right = attention(kernel, q, k, v, dtypes=(dtype,) * 4)
    close(kernel, right, q, k, v, dtypes=(dtype,) * 4)
    assert np.array_equal(attention(kernel, q, k, v, dtypes=(dtype,) * 4, layouts=(LAYOUTS[name],) * 4), right)


@each_kernel
@pytest.mark.parametrize("which", range(4))
def test_each_tensor_on_its_own(kernel: str, which: int) -> None:
    q, k, v = normal(2, 2, 2, 70, 150, 72)
    layouts: list[Any] = [DENSE] * 4
    layouts[which] = Layout("tbh", (3, 5, 7), 1)
    assert np.array_equal(attention(kernel, q, k, v, layouts=layouts), attention(kernel, q, k, v))


@each_kernel
def test_a_stride_of_zero_repeats(kernel: str) -> None:
    """One K and V for all batches, and one Q for all heads."""
    need(kernel)
    q, k, v = normal(3, 4, 2, 70, 150, 64)
    k[...], v[...], q[...] = k[:1], v[:1], q[:, :1]
    right = attention(kernel, q, k, v)
    with Case(q, k, v, kernel) as case:
        case.desc.k.batch_stride = case.desc.v.batch_stride = case.desc.q.head_stride = 0
        case.launch()
        synchronize()
        case.assert_clean()
        assert np.array_equal(case.values(), right)


@each_kernel
def test_q_k_and_v_may_be_one_tensor(kernel: str) -> None:
    q, _, _ = normal(1, 2, 2, 150, 150, 64)
    right = attention(kernel, q, q, q)
    need(kernel)
    with Case(q, q, q, kernel) as case:
        case.desc.k.data = case.desc.v.data = case.desc.q.data
        assert np.array_equal(case.run(), right)
        case.assert_clean()
