"""`sdsage bench attn`: kernels of SageAttention beside the engine's FlashAttention, on shapes of common models."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from sdsage._attention import GGML, METHODS, SAGE, SHAPES
from sdsage._attention.problem import Measured, Problem
from sdsage._attention.verify import short
from sdsage.errors import GenerationError, SageUnavailable

FLASH = "flash"  # what the others are compared with


def measure(
    ask: Callable[..., Any],
    device: str | None,
    shapes: Sequence[str],
    kernels: Sequence[str],
    repeats: int,
    seed: int,
    say: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """All figures as plain values.

    Args:
        ask: calls a function of `_worker.FUNCTIONS`.
        shapes: names of SHAPES; nothing: those for the device.
        kernels: what runs beside FlashAttention; nothing: SageAttention's that the device can run.
        say: hears the entry of each shape.

    Raises:
        BadRequest: there is no such device. SageUnavailable: a kernel that was asked for can't run there.
    """
    sage = {kernel: ask("sage_info", kernel, device) for kernel in SAGE}
    for kernel in kernels:
        if kernel in SAGE and not sage[kernel].supported:
            raise SageUnavailable(sage[kernel].reason)
    runnable = [kernel for kernel in SAGE if sage[kernel].supported]
    wanted = {FLASH, *(kernels or runnable)}
    methods = [method for method in METHODS if method in wanted]
    name, _ = ask("gpu_memory", device)
    found = next(d for d in ask("devices") if d.name == name)
    on_cpu = found.kind == "cpu"
    entries = []
    for shape in shapes or (["tiny"] if on_cpu else [s for s in SHAPES if s != "tiny"]):
        entries.append(_entry(ask, device, shape, methods, repeats, seed))
        say(entries[-1])
    no_sage = "" if runnable else sage[SAGE[0]].reason
    return {"device": asdict(found), "no_sage": no_sage, "repeats": repeats, "seed": seed, "shapes": entries}


def _entry(
    ask: Callable[..., Any], device: str | None, shape: str, methods: list[str], repeats: int, seed: int
) -> dict[str, Any]:
    s = SHAPES[shape]
    problem = Problem(s.batch, s.heads, s.heads, s.lq, s.lk, s.head_dim, seed=seed)
    try:
        measured = ask("attention", problem, methods, device, repeats, None)
    except GenerationError as error:
        measured = [Measured(method, "", str(error), False, (), ()) for method in methods]
    return {"shape": shape, **s._asdict(), "kernels": rows(measured, problem)}


def rows(measured: Sequence[Measured], problem: Problem) -> list[dict[str, Any]]:
    """One entry a kernel: medians in ms, and how many times as fast as FlashAttention."""
    flash = next((statistics.median(m.seconds) for m in measured if m.kernel == FLASH), None)
    found = []
    for m in measured:
        entry: dict[str, Any] = {"kernel": m.method, "why_not": m.why, "emulated": m.emulated}
        entry |= dict.fromkeys(("ms", "spread_ms", "quantize_ms", "tflops", "times_flash"))
        if m.kernel:
            whole = statistics.median(m.seconds)
            entry |= {"ms": short(1000 * whole), "spread_ms": short(1000 * _spread(m.seconds))}
            entry["tflops"] = short(problem.operations / whole / 1e12)
            entry["times_flash"] = short(flash / whole) if flash else None
            if m.kernel not in GGML:
                entry["quantize_ms"] = short(1000 * statistics.median(m.quantize_seconds))
        found.append(entry)
    return found


def _spread(seconds: Sequence[float]) -> float:
    """Of the middle half."""
    if len(seconds) < 2:
        return 0.0
    low, _, high = statistics.quantiles(seconds, n=4)
    return high - low
