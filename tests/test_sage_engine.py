"""SageAttention inside the engine, on the CPU: graphs, counts, precedence and refusals are those of a GPU."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import BUILD

import sdsage
from sdsage._library import sd_cli_path

HERE = Path(__file__).parent
MODULES = {"wan": ["low-noise", "high-noise"], "flux": ["diffusion"]}
# Tiny Wan: 2 layers with self- and cross-attention, 2 steps an expert, 2 forwards a step with guidance.
# Tiny Flux: 2 double and 2 single blocks, 2 steps without guidance.
CALLS = {"wan": 2 * 2 * 2 * 2, "flux": 4 * 2}
SAGE = ("fp16", "fp8", "fp8++", "hopper")


@cache
def found_of(model: str) -> Any:
    """What tests/sage_worker.py found."""
    path = os.pathsep.join([str(HERE), *sys.path])
    env = {**os.environ, "SDSAGE_LIB_DIR": str(BUILD / "test-lib"), "PYTHONPATH": path}
    command = [sys.executable, str(HERE / "sage_worker.py"), model]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture
def runs(model: str) -> Any:
    return found_of(model)["runs"]


@pytest.fixture
def found() -> Any:
    return found_of("flux")


def diffusion(run: Any) -> dict[str, Any]:
    """module -> (kernel, calls), of the diffusion models; more than one kernel a module is a failure."""
    entries = [a for a in run["attention"] if a[0] in ("low-noise", "high-noise", "diffusion")]
    assert len({a[0] for a in entries}) == len(entries), entries
    return {module: (kernel, calls) for module, kernel, calls, _ in entries}


@pytest.mark.parametrize("model", MODULES)
class TestModels:
    @pytest.mark.parametrize("kernel", SAGE)
    def test_close_to_plain_attention(self, runs: Any, model: str, kernel: str) -> None:
        run, zeroed = runs[kernel], runs["zeroed"]
        assert run["psnr"] > 35 > zeroed["psnr"] + 5

    @pytest.mark.parametrize("kernel", SAGE)
    def test_counts(self, runs: Any, model: str, kernel: str) -> None:
        """Every attention of every forward of every step, and none anywhere else."""
        run = runs[kernel]
        counts = diffusion(run)
        assert list(counts) == MODULES[model] or list(counts) == MODULES[model][::-1]
        ordinary = {m: calls for m, (_, calls) in diffusion(runs["plain"]).items()}
        assert {m: calls for m, (_, calls) in counts.items()} == ordinary
        assert set(ordinary.values()) == {CALLS[model]}
        assert {k for k, _ in counts.values()} == {kernel}
        assert not [a for a in run["attention"] if a[1] in SAGE and a[0] not in MODULES[model]]

    def test_auto_is_the_best_of_the_device(self, runs: Any, model: str) -> None:
        """Compute capability 8.9 with CUDA 13: fp8++."""
        assert runs["auto"]["hash"] == runs["fp8++"]["hash"]
        assert runs["fp8"]["hash"] != runs["fp8++"]["hash"]
        assert runs["auto on Hopper"]["hash"] == runs["hopper"]["hash"]
        assert len({runs[kernel]["hash"] for kernel in SAGE}) == len(SAGE)

    def test_precedes_flash_attention(self, runs: Any, model: str) -> None:
        assert runs["with diffusion_flash_attn"]["hash"] == runs["auto"]["hash"]

    def test_text_encoder_and_vae_keep_flash_attention(self, runs: Any, model: str) -> None:
        run = runs["with flash_attn"]
        assert {k for k, _ in diffusion(run).values()} == {"fp8++"}
        other = {(a[0], a[1]) for a in run["attention"] if a[0] not in MODULES[model]}
        plain = {(a[0], a[1]) for a in runs["auto"]["attention"] if a[0] not in MODULES[model]}
        assert not any(kernel in SAGE for _, kernel in other | plain)
        if model == "wan":  # the tiny Flux decodes without attention
            assert ("VAE", "flash") in other
            assert ("VAE", "ordinary") in plain

    def test_the_prompt_counts_as_without_it(self, model: str) -> None:
        plain, sage = found_of(model)["another prompt"]
        assert plain < 40
        assert abs(plain - sage) < 1

    def test_a_decode_is_the_same(self, runs: Any, model: str) -> None:
        """The VAE's attention, one head of all channels, is none of its."""
        kinds = ("plain", "plain again", "fp16", "fp8", "fp8++", "hopper", "auto")
        assert len({runs[kind]["decoded"] for kind in kinds}) == 1

    def test_off_means_off(self, runs: Any, model: str) -> None:
        """Also after other contexts of the process used it."""
        assert runs["plain again"]["hash"] == runs["plain"]["hash"]
        assert {k for k, _ in diffusion(runs["plain again"]).values()} == {"ordinary"}
        assert {k for k, _ in diffusion(runs["flash"]).values()} == {"flash"}

    def test_nothing_is_copied(self, runs: Any, model: str) -> None:
        """Between projection, norm or rope and the node, and after it."""
        ops = {tuple(line.split()[:2]) for line in runs["fp16"]["neighbours"]}
        assert {side for side, _ in ops} == {"q", "k", "v", "o"}
        assert not ops & {(side, op) for side in "qkvo" for op in ("CONT", "CPY", "DUP", "PAD", "CAST")}
        assert {op for side, op in ops if side == "o"} <= {"MUL_MAT", "CONCAT"}


class TestRefusals:
    def test_no_cuda(self, found: Any) -> None:
        assert "this build has no CUDA" in found["no CUDA"]

    def test_new_sd_ctx_gives_null(self, found: Any) -> None:
        was_off, is_null, status, error = found["native"]
        assert was_off
        assert is_null
        assert status
        assert "this build has no CUDA" in error

    def test_old_card(self, found: Any) -> None:
        assert "below 8.0" in found["old card"]
        assert "compute capability 7.5" in found["old card"]
        assert "cpu (" in found["old card"]  # the card by name

    def test_architecture_not_in_this_build(self, found: Any) -> None:
        assert "compute capability 12.0" in found["not compiled"]
        assert "kernels for 80 89" in found["not compiled"]

    def test_old_toolkit(self, found: Any) -> None:
        assert "older than 12.0" in found["old toolkit"]
        assert "CUDA 11.8" in found["old toolkit"]

    def test_pinned_kernel(self, found: Any) -> None:
        assert "FP8 needs compute capability 8.9" in found["fp8 on Ampere"]

    def test_broken_card(self, found: Any) -> None:
        assert "self-test failed" in found["broken card"]
        assert "fp8++" in found["broken card"]


def test_sage_info(found: Any) -> None:
    info = found["sage_info"]
    assert info["supported"]
    assert (info["kernel"], info["compute_capability"], info["toolkit"]) == ("fp8++", "8.9", "13.0")
    assert info["architectures"] == ["80", "89"]


def test_previews_are_the_vae_s(found: Any) -> None:
    """What decodes a preview between two steps is no part of the expert."""
    calls = {module: (kernel, n) for module, kernel, n in found["with previews"]}
    assert calls["high-noise"] == calls["low-noise"] == ("fp8++", CALLS["wan"])
    assert calls["VAE"][0] == "ordinary"
    assert calls["VAE"][1] > 2  # those of the decode alone
    assert len(found["with previews"]) == 4


def test_sage_info_can_be_asked_by_many_threads() -> None:
    with ThreadPoolExecutor(8) as pool:
        reasons = set(pool.map(lambda _: sdsage.sage_info(device="cpu").reason, range(2000)))
    assert len(reasons) == 1


@pytest.mark.parametrize(("kernel", "device"), [("COUNT", None), ("fp4", None), ("auto", 5), ("auto", "cuda:99")])
def test_sage_info_of_what_does_not_exist(kernel: Any, device: Any) -> None:
    with pytest.raises(sdsage.BadRequest):
        sdsage.sage_info(kernel, device)


def test_sd_cli_says_why(tmp_path: Path) -> None:
    command = [str(sd_cli_path()), "-M", "vid_gen", "--diffusion-model", "no.gguf", "-p", "a cat", "--sage-attn"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "SageAttention can't run on" in done.stdout + done.stderr
    assert "no.gguf" not in done.stdout + done.stderr


def test_command_without_cuda(tmp_path: Path) -> None:
    """Exit 2 before any file is looked at: those named here do not exist."""
    command = [sys.executable, "-P", "-m", "sdsage", "vid-gen", "--diffusion-model", "no.gguf"]
    command += [
        "--vae",
        "no.safetensors",
        "--t5xxl",
        "no.gguf",
        "--sage-attn",
        "-p",
        "a cat",
        "-o",
        str(tmp_path / "x.gif"),
        "--device",
        "cpu",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "SageAttention can't run on cpu" in done.stderr
    assert "no.gguf" not in done.stderr
    assert not list(tmp_path.iterdir())
