"""Whether the code of a build fits where it runs: the GPU's architecture, the ggml that is loaded, SageAttention."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BUILD, PACKAGE
from hypothesis import given
from hypothesis import strategies as st

from sdsage._doctor import gpus

CARDS = (75, 80, 86, 87, 89, 90, 100, 103, 120, 121)


def told(*words: object) -> str:
    program = BUILD / "bin" / "probe_coverage"
    return subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=True).stdout.rstrip("\n")


NAMES = st.builds(
    "{}{}{}".format, st.sampled_from(CARDS), st.sampled_from(["", "a", "f"]), st.sampled_from(["", "-real", "-virtual"])
)


@given(st.lists(NAMES, max_size=4).map(" ".join))
def test_the_engine_and_doctor_agree_on_which_gpus_code_runs(architectures: str) -> None:
    expected = "".join(str(int(gpus.covers(architectures, card))) for card in CARDS)
    assert told("code", architectures, *CARDS) == expected


def test_a_gpu_without_code_is_refused_with_the_list_and_the_command() -> None:
    """ggml-cuda's own kernels."""
    text = told("device", "cuda:0 (A card)", 86, "89-real 90a-real")
    assert text.startswith("this build can't run on cuda:0 (A card): the GPU has compute capability 8.6")
    assert "there is code for 89-real 90a-real only" in text
    assert "SDSAGE_CUDA=1 SDSAGE_CUDA_ARCHS=86 pip install" in text
    assert "-DSDSAGE_CUDA_ARCHS=86" in text
    assert "SDSAGE_CUDA_ARCHS=120a " in told("device", "x", 120, "90a-real")
    assert "kernel image" not in text
    for fits in ("86-real", "80-real", "80-virtual", "75"):
        assert told("device", "x", 86, fits) == ""
    assert told("device", "x", 0, "90a-real") == ""  # a device that does not say what it is


def test_kernels_without_code_for_the_gpu_name_the_option_of_this_build() -> None:
    text = told("sage", "patched", 86, "89 90a compute_90")
    assert text.startswith("SageAttention can't run on cuda:0 (A card): the GPU has compute capability 8.6")
    assert "kernels for 89 90a compute_90 only" in text
    assert "SDSAGE_CUDA_ARCHS=86 pip install" in text
    # covered, or below what any kernel needs: the kernels' own reason
    for capability, architectures in ((86, "80 90a"), (90, "compute_80"), (75, "80 90a"), (0, "")):
        assert told("sage", "patched", capability, architectures) == "REASON"


@pytest.mark.parametrize(("capability", "architectures"), [(90, "90a"), (86, "90a"), (0, "")])
def test_a_build_with_upstreams_ggml_says_that_it_lacks_sage_attention(capability: int, architectures: str) -> None:
    text = told("sage", "upstream", capability, architectures)
    assert "this build lacks it" in text
    assert "SD_USE_UPSTREAM_GGML" in text


def test_another_ggml_is_noticed_by_the_size_of_its_tensors() -> None:
    assert told("loaded") == ""
    assert told("ggml", 400, 400) == ""
    text = told("ggml", 336, 400)
    assert "a tensor has 336 bytes there and 400 here" in text
    assert "GGML_MAX_NAME" in text


@pytest.mark.gpu
@pytest.mark.skipif(
    "SDSAGE_FOREIGN_LIB_DIR" not in os.environ,
    reason="SDSAGE_FOREIGN_LIB_DIR names no library that was built for other GPUs than this machine's",
)
def test_a_gpu_that_the_library_has_no_code_for(tmp_path: Path) -> None:
    """Context creation fails with the list; nothing aborts, and nothing is written."""
    env = {**os.environ, "PYTHONPATH": PACKAGE, "SDSAGE_LIB_DIR": os.environ["SDSAGE_FOREIGN_LIB_DIR"]}
    for more, code in (([], 1), (["--sage-attn"], 2)):
        words = ["img-gen", "--preset", "tiny-flux", "-W", "64", "-H", "64", "--steps", "1", "-p", "a cat", *more]
        command = [sys.executable, "-P", "-m", "sdsage", *words, "-o", str(tmp_path / "a.png")]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == code
        assert "the GPU has compute capability" in done.stderr
        assert "SDSAGE_CUDA_ARCHS=" in done.stderr
        assert "kernel image" not in done.stderr
    assert not [*tmp_path.iterdir()]
