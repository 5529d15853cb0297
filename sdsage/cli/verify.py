"""`sdsage verify`: every attention kernel that a device can run, checked and timed."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sdsage.errors import BadRequest, SdsageError

from .console import console
from .option import VERIFY
from .settings import merge

if TYPE_CHECKING:
    from sdsage._attention.verify import Outcome, Report

_HEAD = ("KERNEL", "CHECK", "MAX ABS", "REL. L2", "1 - COSINE", "WORST ROW", "")
_SPEED = ("KERNEL", "MS", "QUANTIZERS", "TFLOP/S", "x PLAIN", "x FLASH")


def run(raw: Mapping[str, Any]) -> None:
    from sdsage._attention.host import facts
    from sdsage._attention.verify import Engine, examine

    settings = merge(VERIFY, raw)
    settings.problems.stop_if_any()
    seed = checked_seed(settings["seed"])
    with Engine() as ask:
        report = examine(
            ask, settings["device"], settings["kernel"], seed=seed, quick=settings["quick"], say=_tell_problems
        )
        more = facts(ask)
    finish(report, more)


def checked_seed(seed: int) -> int:
    """Raises BadRequest for one that the inputs can't have."""
    if seed < 0:
        raise BadRequest(f"--seed {seed} can't be used: it takes a whole number, 0 or more, as figures must repeat")
    return seed


def finish(report: "Report", more: Mapping[str, Any]) -> None:
    """Prints all of it.

    Raises:
        SdsageError: something is wrong.
    """
    if console().json:
        console().result({**report.as_json(), **more}, exit_code=int(report.failed))
    else:
        print("\n".join(lines(report, more)))
    if report.failed:
        failed = sum(bool(o.wrong) for o in report.outcomes)
        raise SdsageError(f"{failed} of {len(report.outcomes)} checks failed: {report.problems[0]}")


def _tell_problems(outcome: "Outcome") -> None:
    for sentence in outcome.wrong:
        console().message("warning", f"{outcome.measured.method}, {outcome.check.name}: {sentence}", show=True)


def lines(report: "Report", more: Mapping[str, Any]) -> Iterator[str]:
    """The report for people."""
    device = report.device
    build = f"CUDA {more['toolkit']}" if more["toolkit"] else "a build for the CPU"
    driver = f", driver {more['driver']['version']}" if more["driver"].get("version") else ""
    yield f"{device['name']} ({device['description']}){driver}; sdsage {more['versions']['sdsage']}, {build}"
    if report.no_sage:
        yield f"no kernel of SageAttention was run: {report.no_sage}"
    yield ""
    yield from table([_HEAD, *map(_row, report.outcomes)], left=2)
    yield ""
    yield from _speed(report)
    yield ""
    count = len(report.outcomes)
    yield f"{count} checks with seed {report.seed}: {'; '.join(report.problems) or 'all passed'}"


def _row(o: "Outcome") -> tuple[str, ...]:
    m = o.measured
    words = "wrong" if o.wrong else "ok" if m.kernel else f"not run: {m.why}"
    if m.rel_l2 is None or m.max_abs is None or m.cosine is None or m.worst_row is None:
        return m.method, o.check.name, "", "", "", "", words
    figures = (f"{m.max_abs:.2e}", f"{m.rel_l2:.2e}", f"{1 - m.cosine:.1e}", f"{m.worst_row:.2e}")
    return m.method, o.check.name, *figures, words + sampled(o)


def sampled(o: "Outcome") -> str:
    """How much of the output was compared, where it was not all of it."""
    rows, heads = o.check.sample.of(o.check.problem)
    p = o.check.problem
    if len(rows) * len(heads) == p.lq * p.heads:
        return ""
    return f" ({len(rows)} of {p.lq} rows of {len(heads)} of {p.heads} heads compared)"


def _speed(report: "Report") -> Iterator[str]:
    check = next((o.check for o in report.outcomes if o.check.group == "speed"), None)
    if check is None:
        return
    smaller = "; a smaller shape, as this is a CPU" if report.on_cpu else ""
    yield f"time of {check.problem}, median of {check.repeats}{smaller}:"
    rows = []
    for row in report.speed():
        quantizers = "" if row["quantize_ms"] is None else f"{row['quantize_ms']:g}"
        times = (f"{row[f'times_{name}']:.2f}" if row[f"times_{name}"] else "-" for name in ("plain", "flash"))
        rows.append((row["kernel"], f"{row['ms']:g}", quantizers, f"{row['tflops']:g}", *times))
    yield from table([_SPEED, *rows], left=1)


def table(rows: list[tuple[str, ...]], left: int) -> Iterator[str]:
    """Columns, the first `left` ones and the last to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if i < left or i == len(row) - 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
