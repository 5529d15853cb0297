"""`sdsage verify` and `sdsage bench` on a GPU: tools/gpu_engine.sh runs this."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import CHILD_PATH

import sdsage
from sdsage._attention import GGML, SAGE
from sdsage._attention.engine import measure
from sdsage._attention.problem import ALL, Problem

GPU = next((d.name for d in sdsage.devices() if d.name.startswith("cuda")), "")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="no CUDA device")]


def result(*args: str, code: int = 0) -> Any:
    command = [sys.executable, "-P", "-m", "sdsage", *args, "--device", GPU, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": CHILD_PATH})
    assert done.returncode == code, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def runnable() -> list[str]:
    return [kernel for kernel in SAGE if sdsage.sage_info(kernel, GPU).supported]


@pytest.fixture(scope="module")
def verified() -> Any:
    return result("verify")


def test_every_kernel_passes(verified: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert verified["kernels"] == [*GGML, *runnable()]
    assert (verified["problems"], verified["no_sage"], verified["exit_code"]) == ([], "", 0)
    for check in verified["checks"]:
        assert check["ran"] == check["kernel"] or (check["kernel"] in GGML and check["why_not"])
    assert verified["driver"]["version"]
    assert verified["toolkit"]
    with capsys.disabled():
        for row in verified["speed"]:
            print(f"\n  {row}", end="")


def test_quantizers_are_a_part_of_the_time(verified: Any) -> None:
    rows = {row["kernel"]: row for row in verified["speed"]}
    for kernel in runnable():
        assert 0 < rows[kernel]["quantize_ms"] < rows[kernel]["ms"]
    assert rows["flash"]["quantize_ms"] is None


def test_figures_repeat(verified: Any) -> None:
    again = result("verify", "--quick")
    first = {(c["check"], c["kernel"]): c for c in verified["checks"] if c["kernel"] in SAGE}
    for check in again["checks"]:
        if check["kernel"] in SAGE:
            assert check["rel_l2"] == first[check["check"], check["kernel"]]["rel_l2"]


@pytest.mark.parametrize("kernel", SAGE)
@pytest.mark.parametrize("half", [False, True])
def test_graph_and_library_agree(kernel: str, half: bool) -> None:
    """The engine's node and the kernels' own library, which computes what graphs can't ask for."""
    if kernel not in runnable():
        pytest.skip(sdsage.sage_info(kernel, GPU).reason)
    for causal in (False, True):
        problem = Problem(2, 6, 2, 200, 333, 80, causal, half=half)
        (found,) = measure(problem, [kernel], GPU, sample=ALL)
        assert found.kernel == kernel
        assert found.rel_l2 is not None
        assert found.rel_l2 < 0.05


def test_bench_attention(tmp_path: Path) -> None:
    found = result("bench", "attn", "--shape", "headline", "--shape", "wan-14b-cross", "--repeats", "3")
    for entry in found["shapes"]:
        rows = {row["kernel"]: row for row in entry["kernels"]}
        assert set(rows) == {"flash", *runnable()}
        assert all(row["times_flash"] for row in rows.values()), rows


def test_bench_generation() -> None:
    found = result("bench", "gen", "--random", "tiny")
    assert list(found["runs"]) == ["flash", "sage"]
    kernel = sdsage.sage_info(device=GPU).kernel
    said = {a["kernel"] for a in found["runs"]["sage"]["attention"] if "noise" in a["module"]}
    assert said == {kernel}
    assert found["apart"]["latents_db"] > 30
    assert found["no_sage"] == ""


def test_the_cpu_of_a_cuda_build() -> None:
    command = [sys.executable, "-P", "-m", "sdsage", "verify", "--quick", "--json", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": CHILD_PATH})
    assert done.returncode == 0, done.stderr
    assert "it needs an NVIDIA GPU" in json.loads(done.stdout)["no_sage"]
