"""What the engine computes by code of ours on CUDA, here on the CPU: graphs and counts are those of a GPU."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import BUILD, PACKAGE, ctx_params, small_video

import sdsage
from sdsage._bounds import LEVERS, lever_problem
from sdsage._library import sd_cli_path
from sdsage.cli.record import lever_lines

HERE = Path(__file__).parent
# Tiny Wan: 2 blocks, 2 steps an expert, 2 forwards a step with guidance.
FORWARDS = 8
BLOCKS = 2 * FORWARDS
WRONG = ("no bias", "no shift", "turned the other way", "no bias in convolutions")
WRONG_SCALE = "a wrong scale"
SCRATCH = 1 << 20  # bytes, as in levers_worker.py
FP8_LIMIT = 22  # dB


@cache
def found_of(*words: str, worker: str = "levers_worker.py") -> Any:
    """What a worker found that has the test library."""
    path = os.pathsep.join([str(HERE), *sys.path])
    env = {**os.environ, "SDSAGE_LIB_DIR": str(BUILD / "test-lib"), "PYTHONPATH": path}
    command = [sys.executable, str(HERE / worker), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def wan() -> Any:
    return found_of("tiny-random", "none", "default", *LEVERS, "fast linear", *WRONG, WRONG_SCALE, "no FP8 for 512")


def test_none_is_the_engine_without_them(wan: Any) -> None:
    assert wan["none"]["same"]
    assert wan["none"]["counts"] == {}


def test_each_lever_does_its_own_part(wan: Any) -> None:
    parts = {name: set(wan[name]["counts"]) for name in LEVERS}
    assert all("norm over" in p or "convolution" in p or p == "copy" for p in parts["vae"])
    assert parts["fuse"] == {"norm", "rope"}
    assert all(p.startswith("linear") or p == "to_bf16" for p in parts["linear"])


def test_what_is_found_in_a_block(wan: Any) -> None:
    counts = wan["default"]["counts"]
    assert counts["rope"] == 2 * BLOCKS  # of q and of k
    assert counts["norm in BF16"] == 3 * BLOCKS + FORWARDS  # and the head's
    assert counts["linear bias gate residual"] == 2 * BLOCKS  # after attention, and the second one of the feed-forward
    assert counts["linear bias residual"] == BLOCKS  # after cross-attention
    assert (
        counts["linear bias gelu in BF16"] == BLOCKS + FORWARDS
    )  # the first one of the feed-forward, and the prompt's
    assert counts["linear bias"] == 6 * BLOCKS + FORWARDS  # q, k and v, twice; the head


def test_every_convolution_of_the_vae_is_found(wan: Any) -> None:
    """Those of three chunks: the first knows no frames before it."""
    counts = wan["vae"]["counts"]
    convolutions = {what: n for what, n in counts.items() if what.startswith("convolution")}
    assert set(convolutions) == {"convolution", "convolution with frames before", "convolution of an enlarged picture"}
    assert counts["norm over channels, SiLU"] > 40


def test_what_rounding_explains(wan: Any) -> None:
    """BF16 rounds by up to 2^-9, weights and what they multiply: a product of many such terms is 2^-9 off, 54 dB, and
    40 of them in a row, with guidance 3.5 that trebles what differs, some 40 dB. The CPU's own products round what they
    multiply to 8 bits, so that they too differ where a norm differs in its last bit."""
    for name in ("default", *LEVERS):
        assert wan[name]["latents"] > 40, name
    assert wan["vae"]["frames"] > 60  # F16 on both sides, in another order


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_lever_is_seen(wan: Any, fault: str) -> None:
    """The limits above would tell."""
    assert wan[fault]["latents"] < 40 or wan[fault]["frames"] < 60


def test_fast_linear_is_every_layer_with_enough_inputs_and_outputs(wan: Any) -> None:
    fast, counts = wan["fast linear"], wan["default"]["counts"]
    layers = {what: n for what, n in fast["counts"].items() if what.startswith("linear")}
    assert sum(layers.values()) == sum(n for what, n in counts.items() if what.startswith("linear"))
    assert layers["linear bias"] == layers["linear bias gelu in BF16"] == FORWARDS  # the head, the prompt's first one
    assert layers["linear bias gate residual of FP8"] == 2 * BLOCKS
    assert layers["linear bias gelu of FP8 in BF16"] == BLOCKS
    assert fast["counts"]["to_fp8"] < sum(n for what, n in layers.items() if "FP8" in what)  # q, k and v share one
    said = {(module, lever, why): n for module, lever, n, why in fast["said"]}
    few = "fewer than 128 inputs or outputs"
    assert said["low-noise", "linear", few] + said["high-noise", "linear", few] == 2 * FORWARDS
    in_fp8 = said["low-noise", "linear fp8", ""] + said["high-noise", "linear fp8", ""]
    assert in_fp8 == sum(n for what, n in layers.items() if "FP8" in what)


def test_a_layer_without_fp8_is_counted_with_the_reason(wan: Any) -> None:
    said = [entry for entry in wan["no FP8 for 512"]["said"] if entry[1].startswith("linear")]
    why = "the GPU's libraries have no FP8 product of this size"
    assert sum(n for *_, n, reason in said if reason == why) == BLOCKS  # the second one of the feed-forward
    assert sum(n for *_, n, _ in said) == sum(n for _, lever, n, _ in wan["default"]["said"] if lever == "linear")
    assert wan["no FP8 for 512"]["latents"] > FP8_LIMIT


def test_a_gpu_without_fp8_is_refused(wan: Any) -> None:
    assert "cuBLASLt multiplies no FP8 matrices with a scale for each row" in wan["refused"]


def test_the_summary_has_a_line_for_each_diffusion_model() -> None:
    entries = [("diffusion", "linear fp8", 400, ""), ("diffusion", "linear", 3, "why"), ("VAE", "vae", 5, "")]
    lines = lever_lines([dict(zip(("module", "lever", "calls", "why"), entry, strict=True)) for entry in entries])
    assert lines == ["diffusion: linear fp8 400, linear 3 (why)"]


def test_what_rounding_to_fp8_explains(wan: Any) -> None:
    """E4M3 rounds by up to 2^-4, on average by 2.6 %, weights and what they multiply: a layer's result is 3.7 % off, 29
    dB. Depth and guidance cost 14 dB as with BF16, measuring against the range and not the deviation gives 10: 25."""
    assert FP8_LIMIT < wan["fast linear"]["latents"] < 40
    assert wan[WRONG_SCALE]["latents"] < FP8_LIMIT


def test_results_say_what_levers_computed(wan: Any) -> None:
    assert wan["none"]["said"] == []
    said = {(module, lever): n for module, lever, n, _ in wan["default"]["said"]}
    counts = wan["default"]["counts"]
    experts = ("low-noise", "high-noise")
    assert sum(said[m, "linear"] for m in experts) == sum(n for what, n in counts.items() if what.startswith("linear"))
    assert sum(said[m, "fuse"] for m in experts) == counts["rope"] + counts["norm in BF16"] + counts.get("norm", 0)
    assert said["VAE", "vae"] > 80
    assert set(said) == {*((m, lever) for m in experts for lever in ("linear", "fuse", "ggml")), ("VAE", "vae")}
    assert {why for *_, why in wan["default"]["said"]} == {"", "too few tokens"}
    assert sum(said[m, "ggml"] for m in experts) == 3 * FORWARDS  # those of the timestep


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """benchmarks/lever_quality.py, here on the CPU."""
    return found_of(str(tmp_path_factory.mktemp("gate")), worker="lever_quality_worker.py")


def test_latents_after_each_step_are_within_their_limits(gate: Any) -> None:
    assert gate["problems"] == []
    none, default, weights, reordered = (
        gate["from exact"][run] for run in ("none", "default", "weights in BF16", "exact, default")
    )
    for step in range(4):
        assert default[step] < none[step]  # weights are Q8_0: 2^-9 against 1/127 of the largest of 32
        assert 2 < none[step] / weights[step] < 5
        assert 0 < reordered[step] < weights[step] / 20


def test_a_wrong_lever_is_beyond_them(gate: Any) -> None:
    assert len(gate["faults, from exact"]) == 5
    assert gate["unseen"] == []


def test_a_residual_stays_exact_where_only_a_linear_layer_reads_the_sum(wan: Any) -> None:
    """As in a UNet's last block, and in VACE."""
    plain, pulled = wan["chain"]
    assert plain != pulled
    assert abs(plain - pulled) < 0.02 * max(1.0, abs(plain))


def test_scratch_memory_is_reserved_with_the_graph(wan: Any) -> None:
    """And nothing else lies there: it is overwritten before it is used."""
    (value, without), (same, reserved) = wan["scratch"]
    assert value == same
    assert without < SCRATCH <= reserved <= without + SCRATCH


def test_without_memory_for_scratch_a_decode_is_tried_again_in_tiles(wan: Any) -> None:
    found = wan["without memory"]
    assert found["same"]
    assert "the VAE decoded in tiles of 32x32 latent pixels" in found["adjusted"][0]


def test_flux() -> None:
    """Joint attention, modulation without timesteps of its own per frame, and the decoder of TAESD."""
    run = found_of("tiny-flux", "default")["default"]
    assert run["latents"] > 50
    assert run["frames"] > 55
    assert {"norm in BF16", "rope", "linear bias gate residual", "convolution"} <= set(run["counts"])


def test_the_rotary_table_is_made_once(preset_files: Any) -> None:
    """The same jobs one after another and each in a context of its own agree, also where the size changes between."""
    jobs = [small_video(), small_video(width=48), small_video()]
    with sdsage.Context(ctx_params(preset_files("tiny-random"))) as context:
        together = [context.generate_video(job).frames for job in jobs]
    for job, frames in zip(jobs[:2], together, strict=False):
        with sdsage.Context(ctx_params(preset_files("tiny-random"))) as context:
            assert (context.generate_video(job).frames == frames).all()
    assert (together[0] == together[2]).all()


@pytest.mark.parametrize("levers", ["", "linear", "linear,fuse,vae", "default", "default,batch", "none"])
def test_what_the_field_takes(levers: str) -> None:
    assert lever_problem(levers) == ""


@pytest.mark.parametrize("levers", ["fast", "linear,", "linear fuse", "none,vae", "default,none"])
def test_a_wrong_name_is_refused_before_any_file(levers: str) -> None:
    params = sdsage.SdCtxParams(diffusion_model_path="/no/such/file.gguf", engine_levers=levers)
    with pytest.raises(
        sdsage.BadRequest, match=re.escape(repr(levers)) + ".*none, or some of default, linear, fuse, vae"
    ):
        sdsage.Context(params)


def test_on_the_command_line(tmp_path: Path) -> None:
    output = str(tmp_path / "a.mp4")
    command = ["vid-gen", "--preset", "tiny-random", "-p", "a cat", "--engine-levers", "fast", "-o", output]
    env = {**os.environ, "PYTHONPATH": PACKAGE}
    done = subprocess.run([sys.executable, "-P", "-m", "sdsage", *command], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--engine-levers fast can't be used: it takes none, or some of default, linear, fuse, vae" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_native_program_refuses_too(preset_files: Any) -> None:
    model = preset_files("tiny-flux")
    command = [sd_cli_path(), "--diffusion-model", model["diffusion_model"], "-p", "a cat", "--engine-levers", "fast"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode != 0
    assert "there is no lever 'fast'" in done.stdout + done.stderr


def test_fast_linear_on_a_device_without_it() -> None:
    """Before any file is opened."""
    params = sdsage.SdCtxParams(diffusion_model_path="/no/such/file.gguf", fast_linear=True)
    with pytest.raises(sdsage.BadRequest, match=r"fast_linear \(--fast-linear\) can't be used with .*NVIDIA GPU"):
        sdsage.Context(params, device="cpu")
    params.engine_levers = "fuse,vae"
    with pytest.raises(sdsage.BadRequest, match="engine_levers 'fuse,vae' leaves out"):
        sdsage.Context(params, device="cpu")


def test_fast_linear_on_the_command_line(tmp_path: Path) -> None:
    command = [
        "img-gen",
        "--diffusion-model",
        "no.gguf",
        "-p",
        "a cat",
        "--fast-linear",
        "--device",
        "cpu",
        "-o",
        "a.png",
    ]
    env = {**os.environ, "PYTHONPATH": PACKAGE}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sdsage", *command], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--fast-linear" in done.stderr
    assert "NVIDIA GPU" in done.stderr
    assert not list(tmp_path.iterdir())
