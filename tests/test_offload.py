"""Parameters that wait in the host's memory: on a device that is none, whose copies run beside the caller, and late."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import BUILD

HERE = Path(__file__).parent
OFFLOADED = ("room", "no room", "not ahead", "not pinned", "stopped", "decoded previews", "segments")


@pytest.fixture(scope="module")
def found() -> Any:
    path = os.pathsep.join([str(HERE), *sys.path])
    env = {**os.environ, "SDSAGE_LIB_DIR": str(BUILD / "test-lib"), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(HERE / "offload_worker.py")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", OFFLOADED)
def test_latents_are_those_of_parameters_that_stay_on_the_device(found: Any, case: str) -> None:
    assert found[case]["same"]


@pytest.mark.parametrize("case", OFFLOADED)
def test_nothing_is_left_on_the_device(found: Any, case: str) -> None:
    assert found[case]["left at the end"] == 0


def test_every_copy_goes_through_pinned_memory(found: Any) -> None:
    assert found["plain"]["through"] == found["plain"]["pieces"] == 0
    for case in ("room", "no room", "not ahead"):
        assert found[case]["through"] == 5, case  # text encoder for two prompts, two experts, VAE
        assert found[case]["pieces"] > 100
        assert found[case]["without"] == 0


def test_the_second_expert_comes_early_where_there_is_room(found: Any) -> None:
    """Then it is there before the first one goes. A preview that is decoded needs the room."""
    weights = found["plain"]["resident"] // 20  # less than an expert
    between = {case: found[case]["between the experts"] for case in OFFLOADED}
    assert between["room"] == between["stopped"] > between["no room"] + weights
    assert between["decoded previews"] == between["not ahead"] == between["no room"]


def test_without_pinned_memory_each_copy_says_so(found: Any) -> None:
    warnings = found["not pinned"]["warnings"]
    assert found["not pinned"]["pieces"] == 0
    assert len(warnings) == 5
    assert all("the system has none to give" in line for line in warnings)
    assert [line.rsplit("(copy ")[1][0] for line in warnings] == list("12345")


def test_a_job_that_ends_between_the_experts_gives_the_memory_back(found: Any) -> None:
    assert found["stopped"]["stopped"]
    assert found["stopped"]["left"] == 0


def test_segments_of_a_limited_memory_are_copied_at_every_step(found: Any) -> None:
    assert found["segments"]["through"] > 20
    assert found["segments"]["between the experts"] < found["no room"]["between the experts"]
