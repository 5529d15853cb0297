"""Contexts: many jobs, cancel, exceptions of callbacks, closing, devices, latents, the guard against NaN."""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, ctx_params, hear_interrupts, small_image, small_video
from worker_tools import end_with_a_running_job

import sdsage
from sdsage import BadRequest, Cancelled, ContextClosed, NonFiniteError, Preview, PreviewMode, _ffi, _job

SAMPLERS = sdsage.SampleMethod.choices()


def test_timings_cover_every_stage_and_step(video_context: Any) -> None:
    result = video_context.generate_video(small_video())
    t = result.timings
    assert [s.expert for s in t.steps] == ["high-noise"] * 2 + ["low-noise"] * 2
    assert all(s.seconds > 0 for s in t.steps)
    assert t.load > 0
    assert t.encode_text > 0
    assert t.decode > 0
    assert sum(s.seconds for s in t.steps) <= t.sample <= t.total
    assert t.first_step == t.steps[0].seconds
    assert t.mean_later_steps == pytest.approx(sum(s.seconds for s in t.steps[1:]) / 3)


def test_progress_tells_stages_and_steps_in_order(video_context: Any) -> None:
    seen: list[Any] = []
    video_context.generate_video(small_video(), on_progress=seen.append)
    sampling = [(p.expert, p.step, p.steps) for p in seen if p.stage == "sample"]
    assert sampling == [(e, i, 2) for e in ("high-noise", "low-noise") for i in (0, 1, 2)]
    stages = [p.stage for p in seen if p.step == 0]
    assert stages == ["encode_image", "encode_text", "sample", "sample", "decode"]


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(video_context: Any) -> None:
    first = video_context.generate_video(small_video())
    assert (video_context.generate_video(small_video()).frames == first.frames).all()
    assert (video_context.generate_video(small_video(seed=8)).frames != first.frames).any()
    assert first.seeds == (7,)
    assert first.frames.shape == (5, 32, 32, 3)
    assert first.frames.dtype == np.uint8


def test_a_negative_seed_is_drawn_and_reported(flux_context: Any) -> None:
    result = flux_context.generate_image(small_image(seed=-1, batch_count=3))
    first = result.seeds[0]
    assert result.seeds == (first, first + 1, first + 2)
    assert 0 <= first < 2**31
    again = flux_context.generate_image(small_image(seed=result.seeds[2]))
    assert (again.frames[0] == result.frames[2]).all()


def test_another_prompt_gives_another_picture(video_context: Any) -> None:
    a = video_context.generate_video(small_video(prompt="a red ball")).frames
    b = video_context.generate_video(small_video(prompt="a forest at night")).frames
    assert np.abs(a.astype(int) - b.astype(int)).mean() > 2


@pytest.mark.parametrize("method", SAMPLERS)
def test_cancel_stops_within_one_step_with_every_sampler(method: str, flux_context: Any) -> None:
    """One context for all of them: each finds it usable after the one before."""
    steps: list[int] = []

    def on_progress(p: Any) -> None:
        if p.stage == "sample" and p.step:
            steps.append(p.step)
            if p.step == 2:
                flux_context.cancel()

    job = small_image()
    job.sample_params.sample_method = method
    job.sample_params.sample_steps = 8
    with pytest.raises(Cancelled):
        flux_context.generate_image(job, on_progress=on_progress)
    assert steps
    assert max(steps) <= 3


def test_cancel_from_another_thread(video_context: Any) -> None:
    started = threading.Event()
    job = small_video()
    job.sample_params.sample_steps = 500

    def cancel() -> None:
        started.wait(30)
        video_context.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    begun = time.monotonic()
    with pytest.raises(Cancelled):
        video_context.generate_video(job, on_progress=lambda p: started.set() if p.stage == "sample" else None)
    thread.join()
    assert time.monotonic() - begun < 20
    reference = video_context.generate_video(small_video()).frames
    assert (video_context.generate_video(small_video()).frames == reference).all()


def test_cancel_stops_the_own_job_only(preset_files: Any, flux_context: Any) -> None:
    """Another context's cancel() does nothing to a running job; a job that waits for its turn can be cancelled."""
    outcome: list[str] = []
    with sdsage.Context(ctx_params(preset_files("tiny-flux"))) as other:

        def wait_in_vain() -> None:
            try:
                other.generate_image(small_image())
            except Cancelled:
                outcome.append("cancelled")

        waiting = threading.Thread(target=wait_in_vain)

        def on_progress(p: Any) -> None:
            if p.stage == "sample" and p.step == 1 and not outcome and not waiting.is_alive():
                other.cancel()  # it has no job
                waiting.start()
                while not any(h.owner is other for h in _job._asked):
                    time.sleep(0.01)
                other.cancel()

        assert len(flux_context.generate_image(small_image(), on_progress=on_progress).frames) == 1
        waiting.join()
        assert outcome == ["cancelled"]


@pytest.mark.parametrize("tiling", [False, True])
def test_cancel_stops_inside_a_decode(tiling: bool, video_context: Any) -> None:
    """On the CPU the graph itself stops: the engine says that the job was cancelled, and no error is shown."""
    heard: list[str] = []
    job = small_video()
    job.vae_tiling_params.enabled = tiling
    reference = video_context.generate_video(job, keep_latents=True)

    def on_progress(p: Any) -> None:
        if p.stage == "decode" and p.step == 0:
            video_context.cancel()

    video_context._on_log = lambda level, line: heard.append(line) if level is sdsage.LogLevel.ERROR else None
    try:
        for attempt in (
            lambda: video_context.generate_video(job, on_progress=on_progress),
            lambda: video_context.decode(reference.latents[0], job.vae_tiling_params, on_progress=on_progress),
        ):
            with pytest.raises(Cancelled) as caught:
                attempt()
            assert str(caught.value) == "the job was cancelled"  # not "... too far to stop earlier"
    finally:
        video_context._on_log = None
    assert heard == []
    assert (video_context.generate_video(job).frames == reference.frames).all()


def test_cancel_stops_inside_the_decode_of_a_batch(flux_context: Any) -> None:
    def on_progress(p: Any) -> None:
        if p.stage == "decode":
            flux_context.cancel()

    reference = flux_context.generate_image(small_image(batch_count=2)).frames
    with pytest.raises(Cancelled, match=r"^the job was cancelled$"):
        flux_context.generate_image(small_image(batch_count=2), on_progress=on_progress)
    assert (flux_context.generate_image(small_image(batch_count=2)).frames == reference).all()


def test_closing_in_a_callback_is_refused_and_the_model_stays(preset_files: Any) -> None:
    with sdsage.Context(ctx_params(preset_files("tiny-flux"))) as ctx:
        with pytest.raises(sdsage.SdsageError, match="callback can't start another native job"):
            ctx.generate_image(small_image(), on_progress=lambda p: ctx.close())
        assert len(ctx.generate_image(small_image()).frames) == 1


def test_the_program_may_end_while_a_thread_generates() -> None:
    assert end_with_a_running_job("plain") == "None"


def test_cancel_without_a_job_is_harmless(video_context: Any) -> None:
    video_context.cancel()
    assert len(video_context.generate_video(small_video()).frames) == 5


@pytest.mark.parametrize("which", ["progress", "log", "preview"])
def test_an_exception_of_a_callback_surfaces_with_its_traceback(which: str, preset_files: Any) -> None:
    armed = False

    def the_culprit(*args: Any) -> None:
        if armed:
            raise KeyError("from the callback")

    with sdsage.Context(ctx_params(preset_files("tiny-flux")), on_log=the_culprit if which == "log" else None) as ctx:
        armed = True
        more: dict[str, Any] = {}
        if which == "progress":
            more = {"on_progress": the_culprit}
        elif which == "preview":
            more = {"on_preview": the_culprit, "preview": Preview(PreviewMode.PROJ)}
        with pytest.raises(KeyError, match="from the callback") as caught:
            ctx.generate_image(small_image(), **more)
        assert "the_culprit" in "".join(traceback.format_tb(caught.value.__traceback__))
        armed = False
        assert len(ctx.generate_image(small_image()).frames) == 1


def test_preview_gives_pictures_of_every_step(video_context: Any) -> None:
    seen: list[tuple[int, tuple[int, ...], bool]] = []
    video_context.generate_video(
        small_video(),
        on_preview=lambda step, frames, noisy: seen.append((step, frames.shape, noisy)),
        preview=Preview(PreviewMode.PROJ),
    )
    assert [step for step, _, _ in seen] == [1, 2, 1, 2]
    assert all(shape[-1] == 3 and len(shape) == 4 for _, shape, _ in seen)
    # a job without a preview is not followed by the callback of the one before
    count = len(seen)
    video_context.generate_video(small_video())
    assert len(seen) == count


def test_closing(preset_files: Any) -> None:
    ctx = sdsage.Context(ctx_params(preset_files("tiny-flux")))
    with ctx:
        assert ctx.version_name == "Flux"
    ctx.close()
    ctx.close()
    for use in (lambda: ctx.generate_image(small_image()), lambda: ctx.version_name, lambda: ctx.size_multiple):
        with pytest.raises(ContextClosed, match="closed"):
            use()


@pytest.mark.parametrize("stop", ["cancel", "exception"])
def test_loading_can_be_stopped(stop: str, preset_files: Any) -> None:
    """Weights are read tensor by tensor: none is read after the stop, and what was loaded is freed."""

    def on_log(level: Any, line: str) -> None:
        if "loading tensors from" in line:
            if stop == "exception":
                raise KeyError("from the callback")
            _ffi.lib.sdsage_cancel()

    with pytest.raises(Cancelled if stop == "cancel" else KeyError):
        sdsage.Context(ctx_params(preset_files("tiny-flux")), on_log=on_log)
    with sdsage.Context(ctx_params(preset_files("tiny-flux"))) as ctx:
        assert len(ctx.generate_image(small_image()).frames) == 1


def test_a_context_that_nobody_gets_is_freed(preset_files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception after the last tensor: the context exists, and no caller will ever close it."""
    freed: list[Any] = []

    class Lib:
        def __getattr__(self, name: str) -> Any:
            return getattr(_ffi.lib, name)

        def free_sd_ctx(self, ctx: Any) -> None:
            freed.append(ctx)
            _ffi.lib.free_sd_ctx(ctx)

    monkeypatch.setattr("sdsage._handle.lib", Lib())

    def on_log(level: Any, line: str) -> None:
        if "FLOW mode" in line:
            raise KeyError("too late")

    with pytest.raises(KeyError):
        sdsage.Context(ctx_params(preset_files("tiny-flux")), on_log=on_log)
    assert len(freed) == 1


def test_a_context_that_gives_back_its_weights_is_used_once(preset_files: Any) -> None:
    params = ctx_params(preset_files("tiny-flux"), free_params_immediately=True)
    with sdsage.Context(params) as ctx:
        ctx.generate_image(small_image())
        with pytest.raises(ContextClosed, match="free_params_immediately"):
            ctx.generate_image(small_image())


@pytest.mark.parametrize("device", ["cpu", None])
def test_the_engine_asks_for_the_chosen_device(device: str | None, preset_files: Any, flux_context: Any) -> None:
    heard: list[str] = []
    files = preset_files("tiny-flux")
    with sdsage.Context(ctx_params(files), device=device, on_log=lambda level, line: heard.append(line)) as ctx:
        assert (ctx.generate_image(small_image()).frames == flux_context.generate_image(small_image()).frames).all()
    assert any("device cpu, as asked for" in line for line in heard) == (device == "cpu")


def test_an_unknown_device_names_the_known(preset_files: Any) -> None:
    with pytest.raises(BadRequest, match=r"no device 'cuda:7' here; devices of this build: .*cpu"):
        sdsage.Context(ctx_params(preset_files("tiny-random")), device="cuda:7")


def test_latents_are_kept_and_decode_to_the_same_frames(video_context: Any, flux_context: Any) -> None:
    result = video_context.generate_video(small_video(), keep_latents=True)
    (latents,) = result.latents
    assert latents.shape == (1, 16, 2, 4, 4)
    assert (video_context.decode(latents) == result.frames).all()
    pictures = flux_context.generate_image(small_image(batch_count=2), keep_latents=True)
    assert [x.shape for x in pictures.latents] == [(1, 16, 4, 4)] * 2
    for x, frame in zip(pictures.latents, pictures.frames, strict=True):
        assert (flux_context.decode(x)[0] == frame).all()
    assert video_context.generate_video(small_video()).latents == ()


def test_latents_of_another_model_are_refused(video_context: Any) -> None:
    with pytest.raises(BadRequest, match="16 channels"):
        video_context.decode(np.zeros((1, 48, 2, 8, 8), np.float32))
    with pytest.raises(BadRequest, match="shape"):
        video_context.decode(np.zeros((16, 8, 8), np.float32))
    with pytest.raises(BadRequest, match="finite"):
        video_context.decode(np.full((1, 16, 2, 8, 8), np.nan, np.float32))


@pytest.mark.parametrize("expert", ["low-noise", "high-noise"])
def test_latents_that_are_not_finite_stop_with_step_and_expert(expert: str, preset_files: Any, tmp_path: Path) -> None:
    """One weight of one expert is NaN: the job stops at that expert's first step, not after the last."""
    files = preset_files("tiny-random")
    key = "diffusion_model" if expert == "low-noise" else "high_noise_diffusion_model"
    data = bytearray(Path(files[key]).read_bytes())
    bias = np.full(64, np.nan, np.float32).tobytes()
    at = data.index(b"head.head.bias")
    assert at > 0
    data[-len(bias) :] = bias  # head.head.bias is the last tensor, F32
    broken = tmp_path / "nan.gguf"
    broken.write_bytes(data)
    with sdsage.Context(ctx_params({**files, key: str(broken)})) as ctx:
        with pytest.raises(
            NonFiniteError, match=f"not finite after step . in the {expert} expert .attention: ordinary"
        ) as caught:
            ctx.generate_video(small_video())
        assert caught.value.expert == expert
        assert caught.value.step == (3 if expert == "low-noise" else 1)
        assert caught.value.exit_code == 1


def test_a_given_prediction_keeps_the_model_s_flow_shift(preset_files: Any, flux_context: Any) -> None:
    """Upstream's shift is infinite then, and every latent NaN."""
    frames = {}
    for prediction in ("flux_flow", "sd3_flow", "flux2_flow"):
        with sdsage.Context(ctx_params(preset_files("tiny-flux"), prediction=prediction)) as ctx:
            frames[prediction] = ctx.generate_image(small_image()).frames
    assert (frames["flux_flow"] == flux_context.generate_image(small_image()).frames).all()
    assert (frames["sd3_flow"] != frames["flux_flow"]).any()


def test_the_size_of_a_hires_pass_is_adjusted_and_said(flux_context: Any) -> None:
    """It counts from the aligned size of the first pass; one target side counts for both."""
    job = small_image(width=36, height=32)
    job.hires.enabled = True
    job.hires.scale = 1.7
    job.hires.steps = 1
    result = flux_context.generate_image(job)
    assert result.adjusted == (
        "width 36 is not possible with this model: using 40",
        "hires width 68 is not possible with this model: using 72",
        "hires height 54 is not possible with this model: using 56",
    )
    assert result.frames.shape == (1, 56, 72, 3)
    job = small_image(width=32, height=32)
    job.hires.enabled = True
    job.hires.target_height = 70
    found = flux_context.check_size(job)
    assert [(a.what, a.neighbours) for a in found] == [("hires width", (64, 72)), ("hires height", (64, 72))]
    job.hires.upscaler = "None"
    assert flux_context.check_size(job) == []


@pytest.mark.parametrize(("height", "width"), [(2000, 1), (1, 2000), (3000, 2)])
def test_reference_pictures_that_would_have_no_pixel_left(height: int, width: int, preset_files: Any) -> None:
    picture = np.zeros((height, width, 3), np.uint8)
    with sdsage.Context(ctx_params(preset_files("tiny-flux"), vae_decode_only=False)) as ctx:
        with pytest.raises(BadRequest, match=rf"ref_images\[0\] has {width}x{height} pixels, too narrow") as caught:
            ctx.generate_image(small_image(ref_images=[picture], auto_resize_ref_image=True))
        assert caught.value.exit_code == 2
        assert len(ctx.generate_image(small_image(ref_images=[picture[:64, :64]])).frames) == 1


def test_sizes_are_adjusted_and_said(video_context: Any) -> None:
    result = video_context.generate_video(small_video(width=50, height=64, video_frames=7))
    assert result.frames.shape == (5, 64, 64, 3)
    assert result.adjusted == (
        "width 50 is not possible with this model: using 64",
        "frame count 7 is not possible with this model: using 5",
    )
    neighbours = [a.neighbours for a in video_context.check_size(small_video(width=50, video_frames=7))]
    assert neighbours == [(48, 64), (5, 9)]


def test_what_has_no_effect_is_said(video_context: Any, preset_files: Any) -> None:
    picture = np.zeros((32, 32, 3), np.uint8)
    with sdsage.Context(ctx_params(preset_files("tiny-random"), vae_decode_only=False)) as ctx:
        job = small_video(init_image=picture, control_frames=[picture])
        job.sample_params.guidance.txt_cfg = 1.0
        said = ctx.generate_video(job).adjusted
    assert said[:2] == (
        "init_image has no effect with this model (Wan 2.x)",
        "control_frames has no effect with this model (Wan 2.x)",
    )
    assert "high-noise expert works with guidance.txt_cfg 1 instead of 3.5" in said[2]
    assert video_context.generate_video(small_video()).adjusted == ()


def test_a_preview_takes_the_name_of_its_mode() -> None:
    assert Preview("vae").mode is PreviewMode.VAE  # type: ignore[arg-type]


INTERRUPTED = """
import sys
sys.path.insert(0, sys.argv[1])
from conftest import ctx_params, small_image
import sdsage
from sdsage import presets
files = {k: v for k, v in presets.load("tiny-flux").options.items() if str(v).endswith((".gguf", ".safetensors"))}
ctx = sdsage.Context(ctx_params(files))
job = small_image()
job.sample_params.sample_steps = 2000
def on_progress(p):
    if p.stage == "sample" and p.step == 2:
        print("READY", flush=True)
try:
    ctx.generate_image(job, on_progress=on_progress)
except KeyboardInterrupt:
    print("INTERRUPTED", len(ctx.generate_image(small_image()).frames), flush=True)
"""


def test_ctrl_c_stops_within_a_step_and_leaves_the_context_usable() -> None:
    command = [sys.executable, "-P", "-c", INTERRUPTED, str(ROOT / "tests")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hear_interrupts) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "READY\n"
        os.kill(child.pid, signal.SIGINT)
        assert child.stdout.readline() == "INTERRUPTED 1\n"
        assert child.wait(30) == 0


def test_contexts_leave_no_memory_behind(preset_files: Any) -> None:
    """What each context left would add up; the weights alone are 20 MB.

    The least of three sizes: what malloc keeps for a thread comes and goes.
    """

    def resident() -> int:
        fields = Path("/proc/self/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    sizes = []
    for _ in range(6):
        with sdsage.Context(ctx_params(preset_files("tiny-flux"))) as ctx:
            ctx.generate_image(small_image())
        sizes.append(resident())
    assert min(sizes[3:]) - sizes[1] < 10 * 2**20, sizes
