"""Where the engine is: runs a problem on a device, and compares what comes out. The arrays stay in this process."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sdsage import _job
from sdsage._attention.accuracy import Array, errors, exact
from sdsage._attention.problem import ALL, NORMAL, ZERO_CHANNEL, ZERO_CHANNELS, ZERO_KEYS, Measured, Problem, Sample
from sdsage._ffi import ffi, lib, text


def measure(
    problem: Problem,
    methods: Sequence[str],
    device: str | None = None,
    repeats: int = 1,
    sample: Sample | None = None,
) -> list[Measured]:
    """Every method on the same inputs, by turns.

    Args:
        methods: "plain", "flash", "auto", "fp16", "fp8", "fp8++", "hopper".
        sample: what is compared with float64; None: nothing is.

    Raises:
        SageUnavailable: a kernel of SageAttention was asked for, and there is none on this device.
        BadRequest, GenerationError: as for any job.
    """
    arrays = problem.arrays()
    ran, outputs = run(problem, arrays, methods, device, repeats, wanted=sample is not None)
    if sample is None:
        return ran
    right = reference(problem, arrays, sample) if problem.inputs in (NORMAL, ZERO_CHANNELS) else None
    return [compare(one, out, right, problem, sample) for one, out in zip(ran, outputs, strict=True)]


def run(
    problem: Problem,
    arrays: tuple[Array, Array, Array],
    methods: Sequence[str],
    device: str | None,
    repeats: int,
    wanted: bool = True,
) -> tuple[list[Measured], list[Array | None]]:
    """What ran and how long it took, and with `wanted` the outputs [B, heads, lq, D]; None of what did not run."""
    q, k, v = arrays
    kind = np.float16 if problem.half else np.float32
    inputs = [np.ascontiguousarray(x, kind) for x in (q, k, v.transpose(0, 2, 1, 3))]
    bias = problem.bias()
    c_problem = ffi.new("sdsage_attention_problem_t *")
    for name in ("batch", "heads", "kv_heads", "lq", "lk", "head_dim", "causal", "half"):
        setattr(c_problem, name, getattr(problem, name))
    buffers = [ffi.from_buffer(x.reshape(-1).view(np.uint8)) for x in inputs]
    c_problem.q, c_problem.k, c_problem.v = (ffi.cast("void *", b) for b in buffers)
    c_bias = ffi.from_buffer("float[]", bias.reshape(-1)) if bias is not None else ffi.NULL
    c_problem.bias = c_bias
    shape = (problem.batch, problem.lq, problem.heads, problem.head_dim)
    outputs = [np.empty(shape, np.float32) for _ in methods] if wanted else []
    names = [ffi.new("char[]", method.encode()) for method in methods]
    times = [(ffi.new("double[]", repeats), ffi.new("double[]", repeats)) for _ in methods]
    c_outputs = [ffi.from_buffer("float[]", out.reshape(-1), require_writable=True) for out in outputs]
    entries = ffi.new("sdsage_attention_method_t[]", len(methods))
    for i in range(len(methods)):
        entries[i].method, entries[i].out = names[i], c_outputs[i] if wanted else ffi.NULL
        entries[i].seconds, entries[i].quantize_seconds = times[i]

    def body() -> list[Measured]:
        if not lib.sdsage_run_attention(c_problem, entries, len(methods), repeats):
            raise _job.failure()
        return [_measured(entries[i], methods[i], times[i]) for i in range(len(methods))]

    ran = _job.run(body, _job.Hooks(), device)
    if not wanted:
        return ran, []
    return ran, [out.transpose(0, 2, 1, 3) if one.kernel else None for one, out in zip(ran, outputs, strict=True)]


def _measured(entry: Any, method: str, times: tuple[Any, Any]) -> Measured:
    kernel = text(entry.kernel)
    whole, quantizers = (tuple(x) if kernel else () for x in times)
    sage = kernel not in ("plain", "flash")
    return Measured(method, kernel, text(entry.why), bool(entry.emulated), whole, quantizers if sage else ())


def reference(problem: Problem, arrays: tuple[Array, Array, Array], sample: Sample) -> Array:
    """Of the sampled rows and heads, in float64."""
    rows, heads = sample.of(problem)
    q, k, v = arrays
    share = problem.heads // problem.kv_heads
    kv = np.unique(heads // share)
    return exact(q[:, heads], k[:, kv], v[:, kv], bias=problem.bias(), causal=problem.causal, rows=rows)


def compare(one: Measured, out: Array | None, right: Array | None, problem: Problem, sample: Sample) -> Measured:
    """`one` with what can be said of its output.

    Args:
        out: [B, heads, lq, D]; None when nothing ran.
        right: what `reference` gives; None for inputs whose exact result no quantized kernel is held to.
    """
    from dataclasses import replace

    if out is None:
        return one
    finite = bool(np.isfinite(out).all())
    found = replace(
        one, finite=finite, largest=float(np.abs(out).max()) if finite else None, zeros=_zeros(out, problem)
    )
    if right is None:
        return found
    rows, heads = sample.of(problem)
    part = out[:, heads][:, :, rows] if sample != ALL else out
    off = errors(part, right)
    return replace(found, max_abs=off.max_abs, rel_l2=off.rel_l2, cosine=min(1.0, off.cosine), worst_row=off.worst_row)


def _zeros(out: Array, problem: Problem) -> bool | None:
    if problem.inputs == ZERO_KEYS:
        return bool((out == 0).all())
    if problem.inputs == ZERO_CHANNELS:
        return bool((out[..., ZERO_CHANNEL] == 0).all())
    return None
