"""The estimate of memory: what it counts, that it refuses before the work, and that it is below what is used."""

import subprocess
import sys
from typing import Any

import pytest
from conftest import ROOT, ctx_params, small_image, small_video

from sdsage import BadRequest, _memory

GIB = 2**30


@pytest.mark.parametrize(("preset", "last"), [("tiny-random", (8, 1)), ("tiny-ti2v", (8, 2)), ("tiny-flux", None)])
def test_the_last_layer_of_the_vae(preset: str, last: tuple[int, int] | None, preset_files: Any) -> None:
    params = ctx_params(preset_files(preset))
    assert _memory.costs(params, "cpu") == _memory.Costs(True, last, "cpu", "cpu")
    params.diffusion_flash_attn = params.keep_vae_on_cpu = True
    assert _memory.costs(params, "cuda:0") == _memory.Costs(False, last, "cuda:0", "cpu")


def test_what_a_job_needs() -> None:
    costs = _memory.Costs(True, (96, 1), "cuda:0", "cpu")
    job = small_video(width=640, height=320, video_frames=23)  # 21 are made
    needs = {n.device + " " + n.what: n.bytes for n in costs.needs(job)}
    assert needs == {
        "cpu the finished pictures": 640 * 320 * 3 * 21 * 5,
        "cuda:0 the attention of the diffusion model": 4 * (20 * 10 * 3) ** 2,
        "cpu the last layer of the VAE": 640 * 320 * 4 * (96 * 4 + 3 * 17),
    }
    picture = small_image(width=512, height=256, batch_count=2)
    picture.hires.enabled = True
    picture.hires.scale = 1.5
    assert [n.bytes for n in costs.needs(picture)] == [768 * 384 * 3 * 2 * 5, 4 * (24 * 12) ** 2, 768 * 384 * 4 * 96]
    picture.vae_tiling_params.enabled = True
    assert len(_memory.Costs(False, (96, 1), "cpu", "cpu").needs(picture)) == 1


def test_a_job_that_can_t_fit_is_refused_with_numbers(preset_files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was free before the model was loaded counts as well: its weights may be given back."""
    job, params = (
        small_video(width=4096, height=4096),
        ctx_params(preset_files("tiny-random"), diffusion_flash_attn=True),
    )
    most = max(need.bytes for need in _memory.costs(params, "cpu").needs(job))
    monkeypatch.setattr(_memory, "available", lambda device: most - 1)
    costs = _memory.costs(params, "cpu")
    words = (
        r"4096x4096 pixels and 5 frames: the last layer of the VAE needs at least 2\.2 GiB, and cpu has 2\.2 GiB free"
    )
    with pytest.raises(BadRequest, match=words):
        costs.check(job)
    monkeypatch.setattr(_memory, "available", lambda device: most)
    costs.check(job)
    costs = _memory.costs(params, "cpu")
    monkeypatch.setattr(_memory, "available", lambda device: 1)
    costs.check(job)
    monkeypatch.setattr(_memory, "available", lambda device: None)
    _memory.costs(params, "cpu").check(job)


def test_16384_pixels_square_are_refused(video_context: Any, flux_context: Any) -> None:
    words = (
        r"the attention of the diffusion model needs at least 256\.0 GiB, and cpu has .* GiB free; choose .*--diffusion"
    )
    with pytest.raises(BadRequest, match=words):
        video_context.generate_video(small_video(width=16384, height=16384))
    with pytest.raises(BadRequest, match=words):
        flux_context.generate_image(small_image(width=16384, height=16384))


def test_memory_that_is_there() -> None:
    there = _memory.available("cpu")
    assert there is not None
    assert 2**27 < there < 2**50
    assert _memory.available("tpu:0") is None


PEAK = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import ctx_params, small_image, small_video
import sdsage
from sdsage import presets
def status(name):
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024
options = presets.load(sys.argv[2]).options
files = {k: v for k, v in options.items() if str(v).endswith((".gguf", ".safetensors"))}
with sdsage.Context(ctx_params(files)) as ctx:
    video = ctx.supports_video
    job = small_video(width=96, height=96) if video else small_image(width=96, height=96)
    job.sample_params.sample_steps = job.sample_params.guidance.txt_cfg = 1
    if video:
        job.high_noise_sample_params.sample_steps = 1
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak of loading is forgotten
    (ctx.generate_video if video else ctx.generate_image)(job)
    print(max(n.bytes for n in ctx._costs.needs(job)), status("VmHWM") - before)
"""


@pytest.mark.parametrize("preset", ["tiny-random", "tiny-flux"])
def test_a_job_takes_more_than_the_estimate(preset: str) -> None:
    command = [sys.executable, "-P", "-c", PEAK, str(ROOT / "tests"), preset]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    estimate, taken = map(int, done.stdout.split())
    assert 0 < estimate <= taken
