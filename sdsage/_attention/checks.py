"""What `sdsage verify` computes, and what it takes for right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sdsage._attention import DEFAULT_SEED, GGML, METHODS
from sdsage._attention.accuracy import FEW_OUTPUTS, LIMITS, Limit
from sdsage._attention.problem import ALL, CLIP, LARGE, NORMAL, ZERO_CHANNELS, ZERO_KEYS, Measured, Problem, Sample

SHAPES = {
    "square": Problem(1, 4, 4, 1024, 1024, 128),
    "grouped heads": Problem(2, 6, 2, 200, 1000, 64),
    "odd sizes": Problem(1, 3, 3, 777, 1345, 80),
}
# No multiples of a tile; each with a head size of its own.
TAILS = ((1, 1, 64), (1, 9, 128), (7, 63, 72), (65, 65, 128), (129, 77, 64), (33, 193, 128), (200, 503, 40))
QUICK_TAILS = TAILS[2:4]
# How large inputs are that must give finite outputs. ggml computes in FP32 and FP16 what the kernels scale first.
LARGE_SIZES = {method: (100.0,) if method in GGML else (1e3, 1e10, 1e30) for method in METHODS}
ROUNDED_UP = 1.07  # P is rounded to 8 bits, its sum is not: how far an output may exceed the largest of V
# The headline of docs/attention.md, and what a CPU does in the time of a check.
TIMED, TIMED_ON_CPU = Problem(2, 24, 24, 4096, 4096, 128), Problem(1, 4, 4, 512, 512, 128)
TIMED_SAMPLE = Sample(rows=64, heads=2)
REPEATS, QUICK_REPEATS = 15, 3


@dataclass(frozen=True)
class Check:
    """One problem that all methods get.

    Attributes:
        group: what it is about, the same for several.
        methods: those that it is for; the others are left out.
        sample: what of the output is compared with float64.
    """

    name: str
    group: str
    problem: Problem
    methods: tuple[str, ...] = METHODS
    sample: Sample = ALL
    few_outputs: bool = False
    repeats: int = 1


def checks(seed: int = DEFAULT_SEED, quick: bool = False, on_cpu: bool = False) -> Iterator[Check]:
    """All of them, or with `quick` one shape, fewer tails and fewer repeats."""
    for check in _checks(quick, on_cpu):
        yield replace(check, problem=replace(check.problem, seed=seed))


def _checks(quick: bool, on_cpu: bool) -> Iterator[Check]:
    for name, problem in list(SHAPES.items())[: 1 if quick else None]:
        for causal in (False, True):
            yield Check(f"{name}{', causal' if causal else ''}", "exact", replace(problem, causal=causal))
    for size in dict.fromkeys(s for sizes in LARGE_SIZES.values() for s in sizes):
        methods = tuple(method for method in METHODS if size in LARGE_SIZES[method])
        problem = Problem(1, 2, 2, 200, 200, 64, causal=True, inputs=LARGE, size=size)
        yield Check(f"inputs up to {CLIP * size:.0e}, causal", "large", problem, methods)
    yield Check("zero channels", "zeros", Problem(1, 2, 2, 200, 300, 64, inputs=ZERO_CHANNELS))
    yield Check("all keys and values zero", "zeros", Problem(2, 2, 2, 100, 77, 80, inputs=ZERO_KEYS))
    yield Check("40 masked keys", "masked", Problem(1, 4, 4, 256, 1000, 64, masked=40))
    for lq, lk, dim in QUICK_TAILS if quick else TAILS:
        yield Check(f"tail {lq}x{lk}, head size {dim}", "tails", Problem(1, 4, 4, lq, lk, dim), few_outputs=True)
    problem = TIMED_ON_CPU if on_cpu else TIMED
    yield Check("speed", "speed", problem, sample=TIMED_SAMPLE, repeats=QUICK_REPEATS if quick else REPEATS)


def limit_of(method: str, few_outputs: bool = False) -> Limit:
    """What a kernel is held to; of few outputs the cosine follows from the wider error."""
    limit = LIMITS[method]
    if not few_outputs:
        return limit
    return Limit(limit.rel_l2 * FEW_OUTPUTS, 1 - (1 - limit.cosine) * FEW_OUTPUTS**2)


def judge(one: Measured, check: Check) -> list[str]:
    """What is wrong with a result, one sentence each. ggml need not take every shape, and a timed one need not fit."""
    if not one.kernel:
        return [] if one.method in GGML or check.group == "speed" else [f"it did not run: {one.why}"]
    if one.kernel != one.method:
        return [f"{one.kernel} ran instead"]
    if not one.finite:
        return ["NaN or infinity in the output"]
    wrong = []
    if check.problem.inputs == LARGE:
        top = CLIP * check.problem.size * ROUNDED_UP
        if one.largest is None or one.largest > top:
            wrong.append(f"an output of {one.largest:.3g}, where no value is larger than {top:.3g}")
    if one.zeros is False:
        wrong.append("not zero where everything that counts is zero")
    if check.problem.inputs in (NORMAL, ZERO_CHANNELS):
        limit = limit_of(one.kernel, check.few_outputs)
        for name, value, most in (
            ("relative L2 error", one.rel_l2, limit.rel_l2),
            ("error of the worst row", one.worst_row, limit.worst_row),
        ):
            if value is None or not value <= most:
                wrong.append(f"{name} {_number(value)}, at most {most:.4g} is allowed")
        if one.cosine is None or not one.cosine >= limit.cosine:
            wrong.append(f"cosine {_number(one.cosine)}, at least {limit.cosine:.6g} is wanted")
    return wrong


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def for_methods(check: Check, methods: Sequence[str]) -> list[str]:
    """Which of these the check is for."""
    return [method for method in methods if method in check.methods]
