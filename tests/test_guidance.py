"""Guidance's two forwards of a step in one batch (the lever `batch`): on a UNet of an eighth of the real width."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import BUILD

from sdsage._bench import random_unet

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    unet = random_unet.make(tmp_path_factory.mktemp("unet") / "unet.safetensors", width=64)
    path = os.pathsep.join([str(HERE), *sys.path])
    env = {**os.environ, "SDSAGE_LIB_DIR": str(BUILD / "test-lib"), "PYTHONPATH": path}
    command = [sys.executable, str(HERE / "guidance_worker.py"), str(unet)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    unet.unlink()
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_both_forwards_are_one(found: Any) -> None:
    assert found["plain"]["counts"] == [[3, 0]]
    assert found["plain"]["off"] == []


def test_latents_are_those_of_two_forwards(found: Any) -> None:
    """Up to the order of sums; with the prompts in each other's place they are not."""
    assert found["plain"]["psnr"] > 80
    assert found["swapped"] < 40


def test_prompts_of_different_lengths_go_alone(found: Any) -> None:
    assert found["long"]["counts"] == [[0, 6]]
    assert found["long"]["psnr"] > 80


def test_a_step_cache_leaves_out_both_or_none(found: Any) -> None:
    ((pairs, alone),) = found["cached"]["counts"]
    assert 0 < pairs < 8
    assert alone == 0
    assert found["cached"]["psnr"] > 80


def test_without_guidance_there_is_nothing_to_join(found: Any) -> None:
    assert found["unguided"]["counts"] == [[0, 3]]


def test_a_model_of_one_picture_says_so(found: Any) -> None:
    assert found["video"] == {"same": True, "said": 2}
