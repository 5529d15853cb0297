"""`sdsage verify`: real outputs of the engine against float64, what is taken for wrong, and the command."""

import json
import os
import re
import signal
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from tiny_cli import run, sage_on_cpu

import sdsage
from sdsage._attention import GGML, METHODS, SAGE
from sdsage._attention.accuracy import LIMITS
from sdsage._attention.checks import Check, checks, judge
from sdsage._attention.engine import compare, measure, reference
from sdsage._attention.engine import run as run_engine
from sdsage._attention.problem import ALL, LARGE, ZERO_CHANNELS, ZERO_KEYS, Problem, Sample
from sdsage._attention.verify import Engine, Outcome, Report, examine
from sdsage.cli.console import new_console
from sdsage.cli.verify import finish, lines
from sdsage.errors import BadRequest, SdsageError

NO_SAGE = not sdsage.sage_info(device="cpu").supported
FACTS = {"toolkit": "", "driver": {}, "versions": {"sdsage": "1"}}


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small ones of every kind; with a causal mask no row is without a key."""
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    causal = draw(st.booleans())
    lk = draw(st.integers(1, 150))
    lq = draw(st.integers(1, lk if causal else 90))
    masked = 0 if causal else draw(st.integers(0, lk - 1))
    head_dim = draw(st.sampled_from([1, 8, 24, 40, 64, 80, 128, 160]))
    batch, half, seed = draw(st.integers(1, 2)), draw(st.booleans()), draw(st.integers(0, 9))
    return Problem(batch, heads, kv_heads, lq, lk, head_dim, causal, half=half, masked=masked, seed=seed)


@given(problems())
def test_any_shape(problem: Problem) -> None:
    """ggml's two ways against float64: grouped heads, tails, causal, masked keys, FP16 inputs."""
    found = {m.method: m for m in measure(problem, GGML, "cpu", sample=ALL)}
    assert (found["plain"].kernel, found["plain"].why) == ("plain", "")
    for m in found.values():
        if m.kernel:
            # the CPU's FlashAttention adds up FP16 numbers in FP16
            assert m.rel_l2 is not None
            assert m.rel_l2 < {"plain": 1e-3, "flash": 0.02}[m.kernel], (problem, m)
            assert len(m.seconds) == 1
            assert m.quantize_seconds == ()
        else:
            assert m.why


@cache
def real(method: str = "plain", **more: Any) -> tuple[Any, Any, Any]:
    """A real result: what ran, its output, and the exact one."""
    problem = Problem(1, 4, 2, 70, 130, 64, **more)
    arrays = problem.arrays()
    (one,), (out,) = run_engine(problem, arrays, [method], "cpu", 1)
    return one, out, reference(problem, arrays, ALL)


def judged(change: Any, method: str = "plain", **more: Any) -> list[str]:
    """What is said of a real output that `change` has spoiled."""
    one, out, right = real(method, **more)
    out = out.copy()
    change(out)
    check = Check("real", "exact", Problem(1, 4, 2, 70, 130, 64, **more))
    exact = None if check.problem.inputs in (LARGE, ZERO_KEYS) else right
    return judge(compare(one, out, exact, check.problem, ALL), check)


def set_to(value: float, *where: Any) -> Any:
    def change(out: Any) -> None:
        out[where] = value

    return change


@pytest.mark.parametrize("method", GGML)
def test_what_is_right_passes(method: str) -> None:
    assert judged(lambda out: None, method) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_to(np.nan, 0, 1, 2, 3), "NaN"),
        (set_to(np.inf, 0, 3, 69, 63), "NaN or infinity"),
        (set_to(0.0, 0, 2, 69), "worst row"),  # one row that was left out
        (lambda out: np.multiply(out, 1.01, out), "relative L2"),
        (lambda out: out.__setitem__(slice(None), out[:, ::-1].copy()), "cosine"),  # heads in another order
        (lambda out: out.__setitem__(slice(None), out[:, :, ::-1].copy()), "relative L2"),
    ],
)
def test_what_is_wrong_is_seen(change: Any, words: str) -> None:
    assert words in "; ".join(judged(change))


def test_zeros_and_large_values() -> None:
    assert judged(lambda out: None, inputs=ZERO_CHANNELS) == []
    assert "not zero" in "; ".join(judged(set_to(1e-6, 0, 0, 0, 3), inputs=ZERO_CHANNELS))
    assert judged(lambda out: None, inputs=ZERO_KEYS) == []
    assert judged(set_to(1e-30, 0, 0, 0, 0), inputs=ZERO_KEYS) == ["not zero where everything that counts is zero"]
    assert judged(lambda out: None, inputs=LARGE, size=100.0) == []
    assert "no value is larger" in judged(set_to(900.0, 0, 0, 0, 0), inputs=LARGE, size=100.0)[0]


def test_a_sample_sees_its_rows_alone() -> None:
    one, out, _ = real()
    problem, sample = Problem(1, 4, 2, 70, 130, 64), Sample(rows=5, heads=1)
    rows, heads = sample.of(problem)
    assert (list(rows), list(heads)) == ([0, 17, 34, 52, 69], [0])
    exact = reference(problem, problem.arrays(), sample)
    assert exact.shape == (1, 1, 5, 64)
    check = Check("real", "exact", problem, sample=sample)
    assert judge(compare(one, out, exact, problem, sample), check) == []
    spoiled = out.copy()
    spoiled[0, 0, 17] = 0
    assert judge(compare(one, spoiled, exact, problem, sample), check)


def test_a_kernel_that_is_not_the_one_asked_for() -> None:
    one, _, _ = real()
    check = Check("real", "exact", Problem(1, 4, 2, 70, 130, 64))
    assert judge(replace(one, method="fp16"), check) == ["plain ran instead"]
    refused = replace(one, method="fp16", kernel="", why="no")
    assert judge(refused, check) == ["it did not run: no"]
    assert judge(refused, replace(check, group="speed")) == []


def test_every_method_has_its_limit_and_checks_of_each_kind() -> None:
    assert tuple(LIMITS) == METHODS
    for quick in (False, True):
        found = list(checks(seed=3, quick=quick))
        assert {check.group for check in found} == {"exact", "large", "zeros", "masked", "tails", "speed"}
        assert {check.problem.seed for check in found} == {3}
        for method in METHODS:
            assert {c.group for c in found if method in c.methods} == {c.group for c in found}
    exact = [c for c in checks() if c.group == "exact"]
    assert len(exact) == 6
    assert sum(c.problem.causal for c in exact) == 3
    speed = next(c for c in checks() if c.group == "speed").problem
    assert (speed.batch, speed.heads, speed.lq, speed.lk, speed.head_dim) == (2, 24, 4096, 4096, 128)


def test_the_limits_are_told_as_they_are() -> None:
    text = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
    for method, limit in LIMITS.items():
        row = next(
            line for line in text.splitlines() if line.startswith("|") and f"`{method}`" in line and "0.99" in line
        )
        assert [float(cell) for cell in row.split("|")[2:5]] == pytest.approx(
            [limit.rel_l2, limit.cosine, limit.worst_row]
        )


# ---- the native entry point


def test_what_the_engine_refuses() -> None:
    for problem, words in (
        (Problem(1, 3, 2, 8, 8, 16), "not a multiple of kv_heads 2"),
        (Problem(0, 1, 1, 8, 8, 16), "batch is 0"),
    ):
        with pytest.raises(BadRequest, match=words):
            measure(problem, ["plain"], "cpu")
    with pytest.raises(BadRequest, match="no method 'quick': it takes plain, flash, auto"):
        measure(Problem(1, 1, 1, 8, 8, 16), ["plain", "quick"], "cpu")
    with pytest.raises(BadRequest, match="there is no device 'tpu'"):
        measure(Problem(1, 1, 1, 8, 8, 16), ["plain"], "tpu")
    assert measure(Problem(1, 1, 1, 8, 8, 16), ["plain"], "cpu")[0].kernel == "plain"


@pytest.mark.skipif(not NO_SAGE, reason="SageAttention runs here")
def test_sage_where_it_can_t_run() -> None:
    with pytest.raises(sdsage.SageUnavailable, match="SageAttention can't run on cpu"):
        measure(Problem(1, 1, 1, 8, 8, 16), ["plain", "fp16"], "cpu")


def test_times_are_taken_by_turns() -> None:
    found = measure(Problem(1, 2, 2, 64, 64, 64), GGML, "cpu", repeats=4)
    assert [len(m.seconds) for m in found] == [4, 4]
    assert all(s > 0 for m in found for s in m.seconds)
    assert found[0].rel_l2 is None


# ---- the command


def report(*args: str, code: int = 0) -> Any:
    done = run("verify", "--device", "cpu", "--quick", "--json", *args, code=code)
    (line,) = done.stdout.splitlines()
    return json.loads(line)


@pytest.fixture(scope="module")
def on_cpu() -> Any:
    return report()


def test_on_a_machine_without_a_gpu(on_cpu: Any) -> None:
    assert (on_cpu["form"], on_cpu["schema"], on_cpu["event"], on_cpu["exit_code"]) == (1, 1, "result", 0)
    assert (on_cpu["kernels"], on_cpu["problems"], on_cpu["seed"]) == (list(GGML), [], 42)
    assert on_cpu["device"]["name"] == "cpu"
    assert "SageAttention can't run on cpu" in on_cpu["no_sage"]
    assert {"date", "versions", "driver", "toolkit", "build", "sage", "quick"} <= set(on_cpu)
    assert all(c["passed"] for c in on_cpu["checks"])
    assert {s["kernel"] for s in on_cpu["speed"]} == set(GGML)
    speed = [c for c in on_cpu["checks"] if c["group"] == "speed"]
    assert all((c["rows_compared"], c["rows"]) == (128, 2048) for c in speed)


def test_the_same_seed_gives_the_same_figures(on_cpu: Any) -> None:
    def figures(found: Any) -> Any:
        return [(c["check"], c["kernel"], c["rel_l2"], c["max_abs"]) for c in found["checks"] if c["kernel"] == "plain"]

    assert figures(report("--kernel", "plain")) == figures(on_cpu)
    other = figures(report("--kernel", "plain", "--seed", "7"))
    assert [o[:2] for o in other] == [o[:2] for o in figures(on_cpu)]
    assert other != figures(on_cpu)


def test_the_table() -> None:
    text = run("verify", "--device", "cpu", "--quick", "--kernel", "flash").stdout
    assert "no kernel of SageAttention was run" in text
    assert "flash   square, causal" in text
    assert "64 of 512 rows of 2 of 4 heads compared" in text
    assert "a smaller shape, as this is a CPU" in text
    assert text.rstrip().endswith("all passed")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--device", "cuda:99"], "there is no device 'cuda:99' here; devices of this build: "),
        (["--kernel", "fp4"], "--kernel fp4 can't be used: allowed is one of plain, flash, fp16"),
        (["--seed", "-1"], "--seed -1 can't be used: it takes a whole number, 0 or more"),
        (["--seed", "many"], "--seed many can't be used"),
        (["--device", "cpu", "--kernel", "fp16"], "SageAttention can't run on cpu"),
    ],
)
def test_bad_input(args: list[str], words: str, empty_folder: Path) -> None:
    if "fp16" in args and not NO_SAGE:
        pytest.skip("SageAttention runs here")
    done = run("verify", *args, code=2)
    assert words in done.stderr
    assert done.stdout == ""


def a_report(outcome: Outcome) -> Report:
    device = {"name": "cpu", "description": "a CPU", "kind": "cpu"}
    return Report(device, {}, "there is none", ["plain"], 42, True, [outcome])


def test_a_wrong_result_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    """A real output of the engine with one row of zeros, through everything that follows."""
    one, out, right = real()
    check = Check("real", "exact", Problem(1, 4, 2, 70, 130, 64))
    for spoiled, code in ((out, 0), (np.where(np.arange(70)[:, None] == 69, 0, out), 1)):
        measured = compare(one, spoiled, right, check.problem, ALL)
        found = a_report(Outcome(check, measured, judge(measured, check)))
        new_console({"json": True})
        if code:
            with pytest.raises(SdsageError, match="1 of 1 checks failed: plain, real: relative L2") as raised:
                finish(found, FACTS)
            assert raised.value.exit_code == 1
        else:
            finish(found, FACTS)
        assert json.loads(capsys.readouterr().out)["exit_code"] == code
        assert ("wrong" in "\n".join(lines(found, FACTS))) is bool(code)
    new_console({})


def test_nothing_that_ran_is_no_success() -> None:
    assert a_report(Outcome(Check("x", "exact", Problem(1, 1, 1, 1, 1, 1)), replace(real()[0], kernel=""), [])).failed


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_process_that_dies_is_one_more_thing_that_is_wrong() -> None:
    """As by a kernel that faults: the other checks go on in a new process."""
    with Engine() as ask:

        def say(outcome: Outcome) -> None:
            if outcome.check.name == "zero channels" and outcome.measured.method == "flash":
                assert ask._worker is not None
                os.kill(ask._worker.pid, signal.SIGSEGV)

        found = examine(ask, "cpu", quick=True, say=say)
    assert len(found.problems) == 1
    assert "plain and flash, all keys and values zero" in found.problems[0]
    assert "SIGSEGV" in found.problems[0]
    assert sum(bool(o.measured.kernel) for o in found.outcomes) == 2 * len([*checks(quick=True)]) - 2 * 3


def test_the_kernels_parts_are_called_as_they_are_declared() -> None:
    """attention_run.cpp says again what a header of CUDA says, as the engine is compiled without it."""
    pattern = re.compile(r"sage_status run_parts\(.*?\);")
    native = ROOT / "native"
    found = [
        pattern.findall((native / path).read_text())
        for path in ("sage_cuda/src/launch.h", "sd_cli/src/attention_run.cpp")
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 1
    assert "enum Parts { QUANTIZE = 1, ATTEND = 2 };" in (native / "sage_cuda/src/launch.h").read_text()
    assert "QUANTIZE = 1, ATTEND = 2;" in (native / "sd_cli/src/attention_run.cpp").read_text()


# ---- SageAttention's arithmetic, on the CPU


def test_every_kernel_of_sage_attention_passes() -> None:
    """With the test library: every kernel passes its own limits, causal or not."""
    found = sage_on_cpu("verify")
    assert found["problems"] == []
    assert found["kernels"] == list(METHODS)
    assert {(c["kernel"], c["ran"]) for c in found["checks"]} == {(m, m) for m in METHODS}
    assert all(row["quantize_ms"] is not None for row in found["speed"] if row["kernel"] in SAGE)


def test_kernels_of_a_broken_card_fail() -> None:
    found = sage_on_cpu("verify", "broken")
    failed = {c["kernel"] for c in found["checks"] if c["passed"] is False}
    assert failed == set(SAGE)
    for group in ("exact", "zeros", "masked", "tails", "speed"):
        assert {c["kernel"] for c in found["checks"] if c["group"] == group and not c["passed"]} == set(SAGE)
