"""Endurance of batches, as far as CI has time: `make soak` has more of it."""

import pytest
from batch_soak import endure, past_limits


@pytest.mark.usefixtures("empty_folder")
def test_ten_kills_over_fifty_jobs() -> None:
    found = endure(jobs=50, kills=10, seed=7)
    assert found["kills_of_the_driver"] + found["kills_of_a_worker"] == 10


@pytest.mark.parametrize(
    ("mean", "driver", "wrong"), [(49.9, 119, []), (50.0, 121, ["a job costs", "the driver grew"])]
)
def test_figures_past_a_limit_are_told(mean: float, driver: float, wrong: list[str]) -> None:
    first, last = {"driver": 70.0, "worker": 120.0}, {"driver": driver, "worker": 110.0}
    said = past_limits({"beyond_generation_ms": {"mean": mean}, "rss_mib": {"job 10": first, "job 1000": last}})
    assert [text[: len(begin)] for text, begin in zip(said, wrong, strict=True)] == wrong
