"""Which job a place gets: each once, and no model more often than needed; and what memory settings come next."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from batch_tools import VIDEO
from hypothesis import given
from hypothesis import strategies as st
from test_bad_models import attention_lora

from sdsage._budget import next_way
from sdsage._estimate import Way
from sdsage.batch import plan
from sdsage.batch.expand import Wanted
from sdsage.batch.plan import Job
from sdsage.batch.schedule import Queue

GIB = 2**30


def jobs(groups: list[int]) -> list[Job]:
    return [
        Job(Wanted(i, "", "img-gen", {}, {}, ""), str(i), str(group), "", "", "", {}, 1, 1, False)
        for i, group in enumerate(groups, 1)
    ]


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(1, 4), st.randoms())
def test_every_job_is_taken_once(groups: list[int], places: int, random: Any) -> None:
    """Whichever place is free next; some jobs are put back once."""
    queue, taken = Queue(jobs(groups)), Counter[int]()
    loads: list[tuple[int, str]] = []
    loaded: dict[int, str] = {}
    while len(queue):
        place = random.randrange(places)
        job = queue.take(str(place))
        assert job is not None
        if loaded.get(place) != job.group:
            loaded[place] = job.group
            loads.append((place, job.group))
        if random.random() < 0.1 and not taken[-job.number]:
            taken[-job.number] += 1
            queue.put_back(job)
        else:
            taken[job.number] += 1
    assert queue.take("0") is None
    assert {number: count for number, count in taken.items() if number > 0} == dict.fromkeys(
        range(1, len(groups) + 1), 1
    )
    assert len(set(loads)) == len(loads)  # a place never loads a model again
    if places == 1:
        assert len(loads) == len(set(groups))


def test_places_begin_with_models_of_their_own() -> None:
    queue = Queue(jobs([1, 1, 1, 1, 2, 2]))
    first, second, third = queue.take("a"), queue.take("b"), queue.take("c")
    assert [job and job.group for job in (first, second, third)] == [
        "1",
        "2",
        "1",
    ]  # the third helps where most is left


@pytest.mark.parametrize(("mode", "groups"), [("auto", 2), ("immediately", 2), ("at_runtime", 1)])
def test_loras_that_are_merged_need_a_load_of_their_own(mode: str, groups: int, tmp_path: Path) -> None:
    attention_lora(tmp_path / "style.safetensors", 256)
    entry = {**VIDEO, "lora_model_dir": str(tmp_path), "lora_apply_mode": mode, "output": "{index}.png"}
    found = plan.make([{**entry, "prompt": [f"a cat <lora:style:{weight}>" for weight in (0.5, 1, 1)]}])
    assert len({job.group for job in found.jobs}) == groups


@pytest.mark.parametrize(
    ("given_way", "stage", "free", "expected"),
    [
        (Way(False, False), "decode", None, Way(False, True)),  # on the CPU there are tiles alone
        (Way(False, True), "decode", None, None),
        (Way(False, False), "sample", None, None),
        (Way(False, False), "decode", 16 * GIB, Way(False, True)),
        (Way(False, True), "decode", 16 * GIB, Way(True, True)),
        (Way(False, False), "sample", 16 * GIB, Way(True, False)),
        (Way(True, False), "sample", 16 * GIB, Way(True, False, 15.1)),
        (Way(True, True, 4.0), "sample", 16 * GIB, None),
        (Way(False, False), "load", 16 * GIB, Way(True, False)),
    ],
)
def test_what_is_tried_when_memory_does_not_suffice(
    given_way: Way, stage: str, free: int | None, expected: Way
) -> None:
    assert next_way(given_way, stage, free) == expected
