"""A few small runs of every kernel, for compute-sanitizer: ragged sizes, bias, causal, grouped heads, odd strides.

    compute-sanitizer --tool memcheck|racecheck|initcheck python tests/sage/small.py

Nothing is poisoned here, unlike in the tests: what nobody wrote stays unwritten for initcheck.
"""

import sys
from typing import Any

import binding
import numpy as np
import reference as ref
from binding import Memory, describe, ffi, sage, synchronize


def upload(x: Any, dtype: str) -> Memory:
    image = binding.store(x, dtype)
    memory = Memory(image.nbytes, poison=False)
    memory.write(image)
    return memory


def run(kernel: str, shape: tuple[int, int, int, int, int, int], dtype: str, causal: bool, biased: bool) -> None:
    batch, heads, kv_heads, lq, lk, dim = shape
    rng = np.random.default_rng(0)
    sizes = ((heads, lq), (kv_heads, lk), (kv_heads, lk))
    q, k, v = (binding.rounded(rng.standard_normal((batch, n, m, dim), np.float32), dtype) for n, m in sizes)
    bias = np.where(rng.random((1, lk)) < 0.3, -np.inf, 0).astype(np.float32) if biased else None
    desc = describe(kernel, shape, causal=causal, dtypes=(dtype, dtype, dtype, "f32"))
    held = [upload(x, dtype) for x in (q, k, v)]
    held.append(Memory(q.size * 4, poison=False))
    for name, memory in zip("qkvo", held, strict=True):
        getattr(desc, name).data = ffi.cast("void *", memory.address)
    if bias is not None:
        held.append(upload(bias, "f32"))
        desc.bias = ffi.cast("const float *", held[-1].address)
    workspace = Memory(binding.choose(desc).workspace, poison=False)
    binding.check(sage().sage_attn_run(desc, ffi.cast("void *", workspace.address), workspace.size, ffi.NULL))
    synchronize()
    out = held[3].read().view(np.float32).reshape(q.shape)
    off = ref.errors(out, ref.quantized(kernel, q, k, v, bias=bias, causal=causal))
    print(kernel, shape, dtype, "causal" if causal else "", "bias" if biased else "", off, flush=True)
    assert off.rel_l2 < 0.02, off
    for memory in (*held, workspace):
        memory.free()


def main() -> None:
    if binding.why_no_gpu():
        sys.exit(f"small.py: {binding.why_no_gpu()}")
    for kernel in ref.KERNELS:
        if not binding.choose(describe(kernel)).supported:
            continue
        run(kernel, (1, 2, 1, 65, 129, 64), "f32", False, False)
        run(kernel, (2, 2, 2, 130, 200, 128), "f16", True, False)
        run(kernel, (1, 2, 2, 33, 77, 40), "bf16", False, True)
        run(kernel, (1, 1, 1, 100, 30, 63), "f32", True, True)
        run(kernel, (1, 3, 1, 7, 1, 128), "f32", False, False)


if __name__ == "__main__":
    main()
