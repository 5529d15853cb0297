"""`sdsage verify`: every kernel that a device can run, compared with float64 and timed.

The engine is in a worker process: a kernel that faults ends that process, which is one more thing that is wrong.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sdsage._attention import DEFAULT_SEED, GGML, METHODS, SAGE
from sdsage._attention.checks import Check, checks, for_methods, judge, limit_of
from sdsage._attention.problem import NORMAL, ZERO_CHANNELS, Measured
from sdsage._doctor.engine import Collector
from sdsage._supervisor import Worker
from sdsage.errors import BadRequest, GenerationError, SageUnavailable, WorkerDied

FORM = 1  # of `as_json`: docs/verify.md


Ask = Callable[..., Any]  # calls a function of `_worker.FUNCTIONS`, by its name


class Engine:
    """A worker process, and another one after each that has died."""

    def __init__(self) -> None:
        self._quiet = Collector()
        self._worker: Worker | None = None

    def __enter__(self) -> "Engine":
        self._quiet.attach()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()
        self._quiet.detach()

    def __call__(self, function: str, *args: Any) -> Any:
        self._worker = self._worker or Worker()
        try:
            return self._worker.run(function, *args)
        except WorkerDied:
            self._end()
            raise

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None


@dataclass
class Outcome:
    """What one method gave in one check."""

    check: Check
    measured: Measured
    wrong: list[str]


@dataclass
class Report:
    """All that was found.

    Attributes:
        device: as `sdsage devices` has it.
        sage: what the chooser says of the device, for each kernel of SageAttention.
        no_sage: why none of them was run; "" if one was.
        methods: what was run.
    """

    device: dict[str, Any]
    sage: dict[str, dict[str, Any]]
    no_sage: str
    methods: list[str]
    seed: int
    quick: bool
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def on_cpu(self) -> bool:
        return bool(self.device["kind"] == "cpu")

    @property
    def problems(self) -> list[str]:
        """One sentence for each thing that is wrong."""
        found = [f"{o.measured.method}, {o.check.name}: {w}" for o in self.outcomes for w in o.wrong]
        return found or ([] if any(o.measured.kernel for o in self.outcomes) else ["nothing could be run"])

    @property
    def failed(self) -> bool:
        return bool(self.problems)

    def speed(self) -> list[dict[str, Any]]:
        """Medians in ms, and how many times as fast as ggml's two ways."""
        rows = [o for o in self.outcomes if o.check.group == "speed" and o.measured.kernel]
        medians = {o.measured.method: 1000 * statistics.median(o.measured.seconds) for o in rows}
        found = []
        for o in rows:
            m, ms = o.measured, medians[o.measured.method]
            quantizers = 1000 * statistics.median(m.quantize_seconds) if m.quantize_seconds else None
            entry = {"kernel": m.kernel, "ms": short(ms), "quantize_ms": quantizers and short(quantizers)}
            entry |= {"tflops": short(o.check.problem.operations / ms / 1e9), "repeats": len(m.seconds)}
            entry |= {f"times_{name}": short(medians[name] / ms) if name in medians else None for name in GGML}
            found.append(entry)
        return found

    def as_json(self) -> dict[str, Any]:
        """What docs/verify.md describes."""
        return {
            "form": FORM,
            "device": self.device,
            "sage": self.sage,
            "no_sage": self.no_sage,
            "seed": self.seed,
            "quick": self.quick,
            "kernels": self.methods,
            "checks": [_entry(o) for o in self.outcomes],
            "speed": self.speed(),
            "problems": self.problems,
        }


def short(x: float) -> float:
    """Four digits."""
    return float(f"{x:.4g}")


def _entry(o: Outcome) -> dict[str, Any]:
    p, m = o.check.problem, o.measured
    rows, heads = o.check.sample.of(p)
    entry: dict[str, Any] = {
        "check": o.check.name,
        "group": o.check.group,
        "kernel": m.method,
        "passed": not o.wrong if m.kernel or o.wrong else None,
    }
    entry |= {"ran": m.kernel, "why_not": m.why, "wrong": o.wrong, "problem": asdict(p)}
    entry |= {name: getattr(m, name) for name in ("max_abs", "rel_l2", "cosine", "worst_row", "finite", "largest")}
    if p.inputs in (NORMAL, ZERO_CHANNELS) and m.kernel:
        limit = limit_of(m.kernel, o.check.few_outputs)
        entry["limits"] = {"rel_l2": limit.rel_l2, "cosine": limit.cosine, "worst_row": limit.worst_row}
        entry |= {"rows_compared": len(rows) * len(heads) * p.batch, "rows": p.lq * p.heads * p.batch}
    return entry


def examine(
    ask: Ask,
    device: str | None = None,
    kernels: Sequence[str] = (),
    *,
    seed: int = DEFAULT_SEED,
    quick: bool = False,
    say: Callable[[Outcome], None] = lambda outcome: None,
) -> Report:
    """Runs all checks.

    Args:
        kernels: what is to be run; nothing: ggml's two ways, and every kernel of SageAttention that the device has.
        say: hears each outcome.

    Raises:
        BadRequest: there is no such device or kernel. SageUnavailable: a kernel that was asked for can't run there.
    """
    report = _begin(ask, device, list(dict.fromkeys(kernels)), seed, quick)
    for check in checks(seed, quick, report.on_cpu):
        if methods := for_methods(check, report.methods):
            for outcome in _carry_out(ask, check, methods, device):
                report.outcomes.append(outcome)
                say(outcome)
    return report


def _begin(ask: Ask, device: str | None, kernels: list[str], seed: int, quick: bool) -> Report:
    for name in kernels:
        if name not in METHODS:
            raise BadRequest(f"there is no kernel {name!r}: it takes {', '.join(METHODS)}")
    sage = {kernel: asdict(ask("sage_info", kernel, device)) for kernel in SAGE}
    name, _ = ask("gpu_memory", device)
    found = next(asdict(d) for d in ask("devices") if d.name == name)
    runnable = [kernel for kernel in SAGE if sage[kernel]["supported"]]
    for kernel in kernels:
        if kernel in SAGE and kernel not in runnable:
            raise SageUnavailable(sage[kernel]["reason"])
    methods = kernels or [*GGML, *runnable]
    no_sage = ""
    if not set(methods) & set(SAGE):
        no_sage = f"none was asked for ({', '.join(kernels)})" if runnable else sage[SAGE[0]]["reason"]
    return Report(found, sage, no_sage, methods, seed, quick)


def _carry_out(ask: Ask, check: Check, methods: list[str], device: str | None) -> list[Outcome]:
    """All methods side by side; where that fails, one by one, to see which."""
    try:
        found = ask("attention", check.problem, methods, device, check.repeats, check.sample)
        return [Outcome(check, one, judge(one, check)) for one in found]
    except GenerationError as error:
        failed = Outcome(check, Measured(" and ".join(methods), "", "", False, (), ()), [str(error)])
        if len(methods) == 1:
            return [failed]
    alone = [outcome for method in methods for outcome in _carry_out(ask, check, [method], device)]
    return alone if any(o.wrong for o in alone) else [failed, *alone]
