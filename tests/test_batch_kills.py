"""Endurance of batches, as far as CI has time: `make soak` has more of it."""

import pytest
from batch_soak import endure


@pytest.mark.usefixtures("empty_folder")
def test_ten_kills_over_fifty_jobs() -> None:
    found = endure(jobs=50, kills=10, seed=7)
    assert found["kills_of_the_driver"] + found["kills_of_a_worker"] == 10
