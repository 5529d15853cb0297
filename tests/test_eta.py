"""The time that is left, from steps whose seconds are known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdsage import Progress
from sdsage.cli.eta import Estimate, Pass, duration


def run(estimate: Estimate, expert: str | None, seconds: list[float]) -> list[float | None]:
    """A pass whose steps take so long; what is said to be left after each."""
    estimate.hear(Progress("sample", 0, len(seconds), 0.0, expert))
    said = []
    for i in range(len(seconds)):
        estimate.hear(Progress("sample", i + 1, len(seconds), sum(seconds[: i + 1]), expert))
        said.append(estimate.left())
    return said


def test_the_first_step_does_not_count() -> None:
    assert run(Estimate([Pass("sample", 4)]), None, [100.0, 2.0, 4.0, 3.0]) == [None, 4.0, 3.0, 0.0]


def test_both_experts_count() -> None:
    estimate = Estimate([Pass("high-noise", 2), Pass("low-noise", 3)])
    assert run(estimate, "high-noise", [50.0, 2.0]) == [None, 6.0]
    assert (estimate.step, estimate.steps) == (2, 5)
    assert run(estimate, "low-noise", [80.0, 4.0, 4.0]) == [4.0, 4.0, 0.0]
    assert (estimate.step, estimate.steps) == (5, 5)


def test_an_expert_with_half_the_calls_takes_half_the_time() -> None:
    estimate = Estimate([Pass("high-noise", 2, cost=2.0), Pass("low-noise", 3, cost=1.0)])
    assert run(estimate, "high-noise", [5.0, 4.0])[-1] == 6.0


def test_steps_that_the_engine_divides() -> None:
    estimate = Estimate([Pass("high-noise", 0), Pass("low-noise", 10)], divided=10)
    assert run(estimate, "high-noise", [9.0, 1.0, 1.0])[-1] == 7.0
    assert estimate.steps == 10


def test_an_expert_that_is_not_needed() -> None:
    estimate = Estimate([Pass("high-noise", 0), Pass("low-noise", 3)], divided=3)
    assert run(estimate, "low-noise", [9.0, 1.0, 1.0])[1:] == [1.0, 0.0]
    assert estimate.steps == 3


def test_all_pictures_and_their_second_pass_count() -> None:
    plan = [Pass("sample", 2), Pass("sample", 2), Pass("hires", 3, cost=4.0), Pass("hires", 3, cost=4.0)]
    estimate = Estimate(plan)
    assert run(estimate, None, [9.0, 1.0])[-1] == 2.0 + 6 * 4.0
    assert run(estimate, None, [1.0, 1.0])[-1] == 6 * 4.0
    assert run(estimate, None, [9.0, 5.0, 5.0])[-1] == 3 * 5.0
    assert (estimate.step, estimate.steps) == (7, 10)


def test_fewer_steps_than_planned_hold_for_the_next_picture() -> None:
    estimate = Estimate([Pass("sample", 20), Pass("sample", 20)])  # --strength leaves out some
    assert run(estimate, None, [2.0, 1.0])[-1] == 2.0
    assert estimate.steps == 4


def test_without_a_plan_the_running_pass_counts() -> None:
    estimate = Estimate()
    assert run(estimate, "high-noise", [3.0, 1.0, 1.0]) == [None, 1.0, 0.0]
    assert run(estimate, "low-noise", [3.0, 1.0, 1.0]) == [2.0, 1.0, 0.0]


@given(st.lists(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), min_size=1, max_size=4), st.booleans())
def test_it_ends_with_nothing_left(passes: list[list[float]], planned: bool) -> None:
    estimate = Estimate([Pass("sample", len(p)) for p in passes] if planned else None)
    left: list[float | None] = []
    for seconds in passes:
        left = run(estimate, None, seconds)
        assert all(x is None or x >= 0 for x in left)
    assert left[-1] == 0.0
    assert estimate.step == estimate.steps


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (99.4, "99 s"),
        (100, "1 min 40 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (9000, "2 h 30 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
