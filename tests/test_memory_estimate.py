"""The estimate of --vram: against what the engine plans here, against peaks measured on a GPU; and what is chosen."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import BUILD, ROOT, ctx_params, small_image, small_video
from hypothesis import given
from hypothesis import strategies as st

import sdsage
from sdsage import BadRequest
from sdsage._bench import random_models
from sdsage._budget import budget_bytes, check, choose, options, ways
from sdsage._estimate import CONTEXT, ERROR, Estimate, Module, Way, estimate
from sdsage.tiny import gguf, safetensors, umt5, wan, wan_vae
from sdsage.tiny.tensors import Tensor

GIB, MIB = 2**30, 2**20
PLAIN = Way(False, False)
BUFFER = re.compile(r"(\S+) compute buffer size: ([\d.]+) MB")
WEIGHTS = re.compile(r"(\S+) params backend buffer size = +([\d.]+) MB")


def sparse(path: Path, tensors: list[Tensor], architecture: str = "") -> str:
    """A model file of which only the header is on the disk."""
    is_gguf = path.suffix == ".gguf"
    general: dict[str, str | int] = {"general.architecture": architecture}
    head = gguf.header(tensors, general) if is_gguf else safetensors.header(tensors, {})
    size = sum(gguf.padded(t.nbytes) if is_gguf else t.nbytes for t in tensors)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + size)
    return str(path)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Wan 14B and 1.3B with their text encoder and VAE, in the formats of sdsage/_bench/random_models.py."""
    folder = tmp_path_factory.mktemp("stock")
    return {
        **{n: sparse(folder / f"{n}.gguf", wan.wan(16, 16, size), "wan") for n, size in random_models.WAN.items()},
        "t5xxl_path": sparse(folder / "umt5.gguf", umt5.umt5(random_models.UMT5_XXL), "t5encoder"),
        "vae_path": sparse(folder / "vae.safetensors", wan_vae.wan_vae(random_models.VAE)),
    }


def stock_context(stock: dict[str, str], size: str, **more: Any) -> Any:
    files = {name: stock[name] for name in ("t5xxl_path", "vae_path")}
    return sdsage.SdCtxParams(diffusion_model_path=stock[size], **files, **more)


def stock_estimate(stock: dict[str, str], size: str, frames: int, **more: Any) -> Estimate:
    job = sdsage.SdVidGenParams(width=832, height=480, video_frames=frames)
    found = estimate(stock_context(stock, size, diffusion_flash_attn=True, **more), job, "cuda:0")
    assert found is not None
    return found


# ---- against what was measured


def test_peaks_of_a_gpu(stock: dict[str, str]) -> None:
    """Runs of benchmarks/step.py, whose contexts keep their weights; one of 81 frames ends before it decodes."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "step.json").read_text())
    compared = 0
    for size in ("14b", "1.3b"):
        for name, more in (("flash", {}), ("sage fp16", {"sage_attn": True})):
            for job, values in measured[size]["methods"][name].items():
                if not job.endswith(" frames"):
                    continue
                found = stock_estimate(stock, size, int(job.split()[0]), **more)
                stages = [s for s in found.stages(PLAIN) if "VAE" in values or s.name != "decode"]
                peak = (max(s.bytes for s in stages) + CONTEXT) / MIB
                assert abs(peak / values["peak MiB"] - 1) < ERROR, (size, name, job)
                compared += 1
    assert compared >= 6


@pytest.mark.parametrize(
    ("preset", "flash", "side", "frames"),
    [
        ("tiny-random", True, 192, 9),
        ("tiny-random", False, 256, 13),
        ("tiny-random-i2v", True, 192, 9),
        ("tiny-ti2v", True, 256, 13),
    ],
)
def test_weights_and_compute_buffers_of_the_engine(
    preset: str, flash: bool, side: int, frames: int, preset_files: Any
) -> None:
    """What the engine reserves, from its own messages."""
    planned: dict[str, float] = {}
    held: dict[str, float] = {}

    def on_log(level: object, line: str) -> None:
        for pattern, into in ((BUFFER, planned), (WEIGHTS, held)):
            if found := pattern.search(line):
                into[found[1]] = max(into.get(found[1], 0.0), float(found[2]))

    params = ctx_params(preset_files(preset), vae_decode_only=preset == "tiny-random", diffusion_flash_attn=flash)
    job = small_video(width=side, height=side, video_frames=frames)
    job.sample_params.sample_steps = job.sample_params.guidance.txt_cfg = 1
    job.high_noise_sample_params.sample_steps = 1 if "high_noise_diffusion_model" in preset_files(preset) else -1
    if preset == "tiny-random-i2v":
        import numpy as np

        job.init_image = np.zeros((side, side, 3), np.uint8)
    with sdsage.Context(params, device="cpu", on_log=on_log) as ctx:
        ctx.generate_video(job)
    found = estimate(params, job, "cpu")
    assert found is not None
    assert found.text is not None
    assert found.vae is not None
    model = next(name for name in planned if name.startswith("Wan"))
    assert found.diffusion[0].compute / MIB == pytest.approx(planned[model], rel=ERROR)
    assert found.vae.compute / MIB == pytest.approx(planned["wan_vae"], rel=ERROR)
    for module, name in ((found.text, "t5"), (found.diffusion[0], model), (found.vae, "wan_vae")):
        assert module.weights / MIB == pytest.approx(held[name], rel=0.05), name


@pytest.mark.parametrize(
    ("part", "levers", "fast", "frames"),
    [
        ("Wan", "default", False, 33),
        ("Wan", "fuse", False, 81),
        ("Wan", "default", True, 81),
        ("wan_vae", "default", False, 33),
    ],
)
def test_compute_buffers_with_levers(
    part: str, levers: str, fast: bool, frames: int, tmp_path: Path, preset_files: Any
) -> None:
    """What the engine reserves for two blocks of Wan 14B and for its VAE, with the scratch memory of linear layers and
    convolutions."""
    size = replace(random_models.WAN["14b"], blocks=2, text_dim=wan.TINY.text_dim)
    files = {
        "diffusion_model_path": sparse(tmp_path / "wan.gguf", wan.wan(16, 16, size), "wan"),
        "t5xxl_path": preset_files("tiny-random")["t5xxl"],
        "vae_path": sparse(tmp_path / "vae.safetensors", wan_vae.wan_vae(random_models.VAE)),
    }
    fields = {**files, "engine_levers": levers, "fast_linear": fast, "diffusion_flash_attn": True}
    shape = {"width": 416, "height": 240, "video_frames": frames}
    env = {**os.environ, "SDSAGE_LIB_DIR": str(BUILD / "test-lib"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(ROOT / "tests" / "reserve_worker.py"), json.dumps(fields), json.dumps(shape), part]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    working = ("linear", "fuse", "vae") if levers == "default" else (levers,)
    found = estimate(sdsage.SdCtxParams(**fields), sdsage.SdVidGenParams(**shape), "cuda:0", working)
    assert found is not None
    assert found.vae is not None
    module = found.vae if part == "wan_vae" else found.diffusion[0]
    assert module.compute / MIB == pytest.approx(float(done.stdout), rel=ERROR)


def test_levers_take_less(stock: dict[str, str]) -> None:
    job = sdsage.SdVidGenParams(width=832, height=480, video_frames=81)
    context = stock_context(stock, "14b", diffusion_flash_attn=True)
    plain, with_levers = (estimate(context, job, "cuda:0", levers) for levers in ((), ("linear", "fuse", "vae")))
    on_cpu = estimate(stock_context(stock, "14b", keep_vae_on_cpu=True), job, "cuda:0", ("vae",))
    assert plain is not None
    assert with_levers is not None
    assert on_cpu is not None
    for a, b in ((plain.vae, with_levers.vae), (plain.diffusion[0], with_levers.diffusion[0])):
        assert a is not None
        assert b is not None
        assert b.compute + b.pool < a.compute + a.pool
    assert on_cpu.vae is not None
    assert plain.vae is not None
    assert on_cpu.vae.compute == plain.vae.compute  # levers are for the GPU


def test_what_can_t_be_told() -> None:
    assert estimate(sdsage.SdCtxParams(model_path="none.safetensors"), small_image(), "cuda:0") is None
    assert estimate(sdsage.SdCtxParams(), small_video(), "cuda:0") is None


# ---- what changes it


def test_more_takes_more(stock: dict[str, str]) -> None:
    less = stock_estimate(stock, "14b", 33)
    more = stock_estimate(stock, "14b", 81)
    assert less.diffusion[0].compute < more.diffusion[0].compute
    context = stock_context(stock, "14b")  # without flash attention
    plain = estimate(context, sdsage.SdVidGenParams(width=832, height=480, video_frames=33), "cuda:0")
    assert plain is not None
    assert plain.diffusion[0].compute > 14040**2 * 40 * 4
    half = stock_estimate(stock, "14b", 33, wtype="q4_0")
    assert half.diffusion[0].weights < 0.6 * less.diffusion[0].weights
    freed = stock_estimate(stock, "14b", 81, free_params_immediately=True)
    assert freed.peak(PLAIN).bytes < more.peak(PLAIN).bytes
    host = stock_estimate(stock, "14b", 81, keep_clip_on_cpu=True, keep_vae_on_cpu=True)
    assert {s.name for s in host.stages(PLAIN)} == {"sampling", "loading"}
    assert host.host(PLAIN) == less.text.weights + less.vae.weights  # type: ignore[union-attr]


def test_two_experts_and_pictures(stock: dict[str, str]) -> None:
    one = stock_estimate(stock, "14b", 33)
    two = stock_estimate(stock, "14b", 33, high_noise_diffusion_model_path=stock["14b"])
    assert len(two.diffusion) == 2
    assert two.peak(PLAIN).bytes - one.peak(PLAIN).bytes == one.diffusion[0].weights
    assert two.peak(Way(True, True)).bytes == one.peak(Way(True, True)).bytes
    job = sdsage.SdVidGenParams(width=832, height=480, video_frames=33)
    import numpy as np

    job.init_image = np.zeros((8, 8, 3), np.uint8)
    found = estimate(stock_context(stock, "14b", vae_decode_only=False), job, "cuda:0")
    assert found is not None
    assert 15_000 < found.encode / MIB < 16_000  # the engine: 15501.5
    assert "encode picture" in {s.name for s in found.stages(PLAIN)}


def test_tiles(stock: dict[str, str]) -> None:
    job = sdsage.SdVidGenParams(width=832, height=480, video_frames=33)
    context = stock_context(stock, "14b")
    sizes = []
    for fields in ({}, {"tile_size_x": 64, "tile_size_y": 60}, {"rel_size_x": 1.0, "rel_size_y": 1.0}):
        for name, value in fields.items():
            setattr(job.vae_tiling_params, name, value)
        found = estimate(context, job, "cuda:0")
        assert found is not None
        assert found.tiled is not None
        assert found.vae is not None
        sizes.append(found.tiled.compute / found.vae.compute)
    assert sizes == pytest.approx([32 * 32 / (104 * 60), 64 * 60 / (104 * 60), 1.0], rel=0.001)


# ---- what is chosen


def test_the_fastest_way_that_fits(stock: dict[str, str]) -> None:
    """Wan 14B with 33 frames: everything, tiles, weights in RAM, and in the end a calculation in parts."""
    found = stock_estimate(stock, "14b", 33, free_params_immediately=True)
    chosen = {gib: choose(found, budget_bytes(gib), PLAIN, None, "job") for gib in (48, 18, 8)}
    assert [c.options for c in chosen.values()] == [
        (),
        ("--offload-to-cpu", "--vae-tiling"),
        ("--offload-to-cpu", "--vae-tiling", f"--max-vram {chosen[8].way.max_vram:g}"),
    ]
    small = stock_estimate(stock, "1.3b", 33, free_params_immediately=True)
    assert choose(small, budget_bytes(12), PLAIN, None, "job").options == ("--vae-tiling",)
    assert 0 < chosen[8].way.max_vram < 8
    for gib, choice in chosen.items():
        assert choice.peak.bytes + CONTEXT <= gib * GIB
    with pytest.raises(
        BadRequest, match=r"decode takes about 3\.\d GiB on cuda:0 whatever is chosen, and 1\.4 GiB are"
    ):
        choose(found, budget_bytes(2), PLAIN, None, "job")
    with pytest.raises(BadRequest, match=r"with the weights in RAM they need 19\.9 GiB, and there are 8\.0 GiB free"):
        choose(found, budget_bytes(18), PLAIN, 8 * GIB, "job")


@given(st.floats(1, 80), st.booleans(), st.booleans())
def test_what_was_given_stays(gib: float, offload: bool, tiling: bool) -> None:
    given_way = Way(offload, tiling)
    for way in ways(given_way, int(gib * GIB)):
        assert way.offload >= offload
        assert way.tiling >= tiling
    assert next(iter(ways(given_way, int(gib * GIB)))) == given_way
    modules = [Module(n, "cuda:0", 4 * GIB, 2 * GIB, 2**28, block=2**28) for n in ("text", "diffusion", "VAE")]
    found = Estimate(modules[0], (modules[1],), modules[2], modules[2], "cuda:0", True)
    try:
        choice = choose(found, budget_bytes(gib), given_way, None, "job")
    except BadRequest:
        assert gib < 7
    else:
        assert choice.peak.bytes <= gib * GIB - CONTEXT
        assert choice.way.offload >= offload


def test_without_a_budget_only_what_can_t_fit_is_refused(stock: dict[str, str]) -> None:
    found = stock_estimate(stock, "14b", 33, free_params_immediately=True)
    peak = found.peak(PLAIN).bytes
    check(found, int(peak * (1 - ERROR)) + 1, PLAIN, None, "job")
    words = (
        r"^832x480: text encoder takes about \d+\.\d GiB, and cuda:0 has \d+\.\d GiB free; "
        r"add --offload-to-cpu --vae-tiling, or let --vram auto choose$"
    )
    with pytest.raises(BadRequest, match=words):
        check(found, 17 * GIB, PLAIN, None, "832x480")
    with pytest.raises(BadRequest, match="choose a smaller size, fewer frames or smaller files"):
        check(found, GIB, PLAIN, None, "832x480")
    assert options(Way(True, True, 3.5), Way(True, False)) == ("--vae-tiling", "--max-vram 3.5")


# ---- on the command line


def command_job(*args: str) -> Any:
    """The job of a command, as it would run."""
    from typer.testing import CliRunner

    from sdsage.cli import generate
    from sdsage.cli.app import build_app

    jobs: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "generate", lambda job, output: jobs.append(job))
        patch.setattr(generate, "merged", lambda done: None)
        patch.setattr(generate, "show", lambda run: None)
        result = CliRunner().invoke(build_app("vid-gen"), ["vid-gen", *args])
    assert result.exit_code == 0, result.output
    return jobs[0]


def test_vram_sets_the_job(stock: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sdsage.cli.memory import fit

    monkeypatch.chdir(tmp_path)
    files = ["--diffusion-model", stock["14b"], "--t5xxl", stock["t5xxl_path"], "--vae", stock["vae_path"]]
    size = ["-W", "832", "-H", "480", "--video-frames", "33", "--diffusion-fa", "-p", "x"]
    device = ("cuda:0", 40 * GIB)
    monkeypatch.setattr("sdsage._host.host_memory", lambda: 64 * GIB)
    monkeypatch.setattr("sdsage._job.device_levers", lambda levers, device: ())  # there is no such device here
    job = command_job(*files, *size, "--vram", "18")
    sentence = fit(job, *device)
    words = r"^--vram 18: --offload-to-cpu --vae-tiling; sampling takes most, about 1\d\.\d GiB$"
    assert re.match(words, sentence), sentence
    assert job.ctx.offload_params_to_cpu
    assert job.gen.vae_tiling_params.enabled
    assert job.settings["vae_tiling"]
    assert fit(command_job(*files, *size), *device) == ""
    auto = command_job(*files, *size, "--vram", "auto")
    assert re.match(r"^--vram auto: nothing had to change; \w.* takes most, about 20\.\d GiB$", fit(auto, *device))
    with pytest.raises(BadRequest, match=r"--vram 60 is more than cuda:0 has free, 40\.0 GiB: use --vram auto"):
        fit(command_job(*files, *size, "--vram", "60"), *device)
    with pytest.raises(BadRequest, match="add --offload-to-cpu --vae-tiling, or let --vram auto choose"):
        fit(command_job(*files, *size), "cuda:0", 17 * GIB)
    with pytest.raises(BadRequest, match="gpu:0 does not tell how much memory it has; give a number"):
        fit(auto, "gpu:0", None)


def test_vram_on_the_cpu_is_said(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from sdsage.cli.app import build_app

    args = ["vid-gen", "--preset", "tiny-random", "-p", "x", "-W", "32", "-H", "32", "--video-frames", "1",
            "--steps", "1", "--high-noise-steps", "1"]  # fmt: skip
    for i, (more, said) in enumerate(
        ((["--vram", "auto", "--device", "cpu"], "warning: --vram has no effect with --device cpu"),)
    ):
        result = CliRunner().invoke(build_app("vid-gen"), [*args, *more, "-o", str(tmp_path / f"{i}.png")])
        assert result.exit_code == 0, result.output
        assert said in result.stderr
    for value in ("0", "-3", "nan", "inf", "much", ""):
        result = CliRunner().invoke(build_app("vid-gen"), [*args, "--vram", value, "-o", str(tmp_path / "x.png")])
        assert result.exit_code == 2, value
        assert f"--vram {value} can't be used: it takes a number of GiB above 0, such as 12, or auto" in result.stderr
