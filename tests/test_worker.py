"""The worker process: the same results and errors as without, and what happens when it, or the program, is killed."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, ctx_params, small_image, small_video
from PIL import Image
from test_upscale import picture, repeated, write_repeater
from worker_tools import LONG, gone, wait_until

import sdsage
from sdsage import Cancelled, ContextClosed, Preview, PreviewMode, Worker, WorkerDied, _death
from sdsage._headers import read_header

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture(scope="module")
def isolated(preset_files: Any) -> Iterator[Any]:
    """The tiny Wan with both experts, in a worker."""
    with sdsage.Context(ctx_params(preset_files("tiny-random")), isolated=True) as ctx:
        yield ctx


def same(a: Any, b: Any) -> None:
    """Two results, but for their timings."""
    assert (a.frames == b.frames).all()
    assert (a.seeds, a.adjusted, a.attention) == (b.seeds, b.adjusted, b.attention)
    assert len(a.latents) == len(b.latents)
    assert all((x == y).all() and x.dtype == y.dtype for x, y in zip(a.latents, b.latents, strict=True))


# ---- the same as without


def test_a_video_is_the_same(isolated: Any, video_context: Any) -> None:
    seen: dict[str, list[Any]] = {"here": [], "there": []}
    results = [
        context.generate_video(small_video(width=50), on_progress=seen[where].append, keep_latents=True)
        for where, context in (("here", video_context), ("there", isolated))
    ]
    same(*results)
    assert results[0].adjusted
    assert [(p.stage, p.step, p.steps, p.expert) for p in seen["here"]] == [
        (p.stage, p.step, p.steps, p.expert) for p in seen["there"]
    ]
    t = results[1].timings
    assert [s.expert for s in t.steps] == ["high-noise"] * 2 + ["low-noise"] * 2
    assert sum(s.seconds for s in t.steps) <= t.sample <= t.total
    assert t.load > 0
    (latents,) = results[1].latents
    assert (isolated.decode(latents) == video_context.decode(latents)).all()


def test_pictures_are_the_same(preset_files: Any, flux_context: Any) -> None:
    init = picture(40, 32)
    params = ctx_params(preset_files("tiny-flux"), vae_decode_only=False)
    with sdsage.Context(params, isolated=True) as there, sdsage.Context(params) as here:
        for job in (small_image(batch_count=3, width=36), small_image(init_image=init, strength=0.6)):
            same(here.generate_image(job, keep_latents=True), there.generate_image(job, keep_latents=True))
        assert (there.supports_image, there.supports_video, there.two_experts) == (True, False, False)
        assert (there.version_name, there.size_multiple) == (here.version_name, here.size_multiple)
        job = small_image(width=36, height=50)
        assert there.check_size(job) == here.check_size(job) != []
        first = there.generate_image(small_image(seed=-1, batch_count=2)).seeds
        assert first[1] == first[0] + 1


def test_previews_are_the_same(isolated: Any, video_context: Any) -> None:
    seen: dict[str, list[Any]] = {"here": [], "there": []}
    for where, context in (("here", video_context), ("there", isolated)):
        take = seen[where].append
        context.generate_video(
            small_video(width=64, height=64),  # more than goes through the pipe
            on_preview=lambda step, frames, noisy, take=take: take((step, frames, noisy)),
            preview=Preview(PreviewMode.VAE),
        )
    assert [(a[0], a[2]) for a in seen["here"]] == [(b[0], b[2]) for b in seen["there"]]
    assert all((a[1] == b[1]).all() for a, b in zip(seen["here"], seen["there"], strict=True))


@pytest.mark.parametrize("kind", ["numpy", "pillow"])
def test_upscaling_is_the_same(kind: str, tmp_path: Path) -> None:
    pixels = picture(64, 96)  # more than goes through the pipe
    with sdsage.Upscaler(write_repeater(tmp_path / "m.safetensors", 2), n_threads=1, isolated=True) as upscaler:
        assert upscaler.factor == 2
        made = upscaler.upscale(pixels if kind == "numpy" else Image.fromarray(pixels))
    assert np.abs(made.astype(int) - repeated(pixels, 2)).max() <= 1
    with pytest.raises(ContextClosed, match="this upscaler is closed"):
        upscaler.upscale(pixels)


def tensors(path: str) -> dict[str, Any]:
    """Shape and type by name: the order in the file comes from threads."""
    return {name: (tensor.shape, tensor.type) for name, tensor in read_header(Path(path)).tensors.items()}


def test_a_conversion_is_the_same(preset_files: Any, empty_folder: Path) -> None:
    vae, seen = preset_files("tiny-random")["vae"], []
    sdsage.convert(vae, "a.gguf", type="f16")
    made = sdsage.convert(vae, Path("b.gguf"), type="f16", isolated=True, on_progress=seen.append)
    assert (made, seen[0].stage) == (Path("b.gguf"), "convert")
    assert tensors("a.gguf") == tensors("b.gguf") != {}
    assert os.path.getsize("a.gguf") == os.path.getsize("b.gguf")
    with pytest.raises(sdsage.OutputError, match="exists"):
        sdsage.convert(vae, "b.gguf", isolated=True)
    assert sorted(os.listdir(empty_folder)) == ["a.gguf", "b.gguf"]


def failing(files: dict[str, str], tmp: Path) -> dict[str, Callable[[Any], Any]]:
    """What goes wrong, by name: a function of the `isolated` that is passed on."""
    cut = tmp / "cut.gguf"
    cut.write_bytes(Path(files["diffusion_model"]).read_bytes()[:1_000_000])
    data = bytearray(Path(files["diffusion_model"]).read_bytes())
    data[-256:] = np.full(64, np.nan, np.float32).tobytes()
    (tmp / "nan.gguf").write_bytes(data)
    latents = np.zeros((1, 48, 2, 8, 8), np.float32)

    def context(isolated: Any, **more: Any) -> Any:
        return sdsage.Context(ctx_params({**files, **more}), isolated=isolated)

    def job(isolated: Any, files: dict[str, str] | None = None, **more: Any) -> Any:
        with context(isolated, **(files or {})) as ctx:
            return ctx.generate_video(small_video(**more))

    return {
        "missing file": lambda w: context(w, vae="none.safetensors"),
        "damaged file": lambda w: context(w, diffusion_model=str(cut)),
        "another kind of file": lambda w: context(w, vae=files["t5xxl"]),
        "no such device": lambda w: sdsage.Context(ctx_params(files), device="tpu:1", isolated=w),
        "no SageAttention": lambda w: sdsage.Context(ctx_params({}, sage_attn=True), isolated=w),
        "threads": lambda w: sdsage.Context(ctx_params(files, n_threads=5000), isolated=w),
        "width": lambda w: job(w, width=0),
        "memory": lambda w: job(w, width=16384, height=16384),
        "not finite": lambda w: job(w, {"diffusion_model": str(tmp / "nan.gguf")}),
        "latents": lambda w: context(w).decode(latents),
        "image": lambda w: context(w).generate_image(small_image()),
        "upscaler": lambda w: sdsage.Upscaler(files["vae"], isolated=w),
        "tile": lambda w: sdsage.Upscaler(files["vae"], tile_size=0, isolated=w),
    }


def plain(error: Exception) -> str:
    """Its message without what is measured: free memory, seconds."""
    return re.sub(r"has \S+ GiB|after \S+s", "", str(error))


def test_errors_are_the_same(preset_files: Any, tmp_path: Path) -> None:
    with Worker() as worker:
        for name, attempt in failing(preset_files("tiny-random"), tmp_path).items():
            caught = []
            for isolated in (False, worker):
                with pytest.raises(sdsage.SdsageError) as info:
                    attempt(isolated)
                caught.append(info.value)
            a, b = caught
            assert type(a) is type(b), name
            assert plain(a) == plain(b)
            assert vars(a) == vars(b)
        assert worker.alive


def test_one_worker_for_several_objects(preset_files: Any, tmp_path: Path, flux_context: Any) -> None:
    """A context and an upscaler in one process, which outlives both; paths follow the current folder."""
    with Worker() as worker:
        os.mkdir("models")
        os.chdir("models")
        write_repeater(Path("m.safetensors"), 2)
        with sdsage.Upscaler("m.safetensors", n_threads=1, isolated=worker) as upscaler:
            with sdsage.Context(ctx_params(preset_files("tiny-flux")), isolated=worker) as ctx:
                assert ctx.worker_pid == upscaler.worker_pid == worker.pid != os.getpid()
                frame = ctx.generate_image(small_image()).frames[0]
            assert (frame == flux_context.generate_image(small_image()).frames[0]).all()
            assert (upscaler.upscale(frame) == repeated(frame, 2)).all()
        assert worker.alive
    assert gone(worker.pid)
    assert flux_context.worker_pid is None
    with pytest.raises(ContextClosed):
        sdsage.Context(ctx_params(preset_files("tiny-flux")), isolated=worker)


def test_what_can_t_pass_is_refused(isolated: Any) -> None:
    with pytest.raises(sdsage.BadRequest, match="a set can't pass to a worker process"):
        isolated.decode({1, 2})
    with pytest.raises(sdsage.BadRequest, match="an array of object can't pass"):
        isolated.decode(np.array([None]))
    assert len(isolated.generate_video(small_video()).frames) == 5


# ---- callbacks and cancelling


def test_callbacks_run_here_and_their_exceptions_surface(preset_files: Any) -> None:
    armed = ""
    pids = set()

    def on(which: str) -> Callable[..., None]:
        def the_culprit(*args: Any) -> None:
            pids.add(os.getpid())
            if armed == which:
                raise KeyError(which)

        return the_culprit

    with sdsage.Context(ctx_params(preset_files("tiny-flux")), isolated=True, on_log=on("log")) as ctx:
        for armed in ("log", "progress", "preview"):
            with pytest.raises(KeyError, match=armed) as caught:
                ctx.generate_image(
                    small_image(),
                    on_progress=on("progress"),
                    on_preview=on("preview"),
                    preview=Preview(PreviewMode.PROJ),
                )
            assert "the_culprit" in "".join(traceback.format_tb(caught.value.__traceback__))
        armed = ""
        assert len(ctx.generate_image(small_image()).frames) == 1
    assert pids == {os.getpid()}


def test_an_exception_while_loading(preset_files: Any) -> None:
    def on_log(level: Any, line: str) -> None:
        if "loading tensors from" in line:
            raise KeyError("culprit")

    with Worker() as worker:
        with pytest.raises(KeyError, match="culprit"):
            sdsage.Context(ctx_params(preset_files("tiny-flux")), isolated=worker, on_log=on_log)
        assert worker.alive


def test_cancel_stops_within_a_step_and_leaves_the_context_usable(isolated: Any) -> None:
    steps: list[int] = []

    def on_progress(p: Any) -> None:
        if p.stage == "sample" and p.step:
            steps.append(p.step)
            isolated.cancel()

    pid = isolated.worker_pid
    for _ in range(3):
        with pytest.raises(Cancelled, match=r"^the job was cancelled$"):
            isolated.generate_video(small_video(), on_progress=on_progress)
    assert steps == [1, 1, 1]
    isolated.cancel()  # nothing to stop
    assert len(isolated.generate_video(small_video()).frames) == 5
    assert isolated.worker_pid == pid


def test_a_waiting_job_can_be_cancelled(preset_files: Any) -> None:
    outcome: list[str] = []
    with Worker() as worker:
        a, b = (sdsage.Context(ctx_params(preset_files("tiny-flux")), isolated=worker) for _ in range(2))

        def wait_in_vain() -> None:
            try:
                b.generate_image(small_image())
            except Cancelled as error:
                outcome.append(str(error))

        waiting = threading.Thread(target=wait_in_vain)

        def on_progress(p: Any) -> None:
            if p.stage == "sample" and p.step == 1:
                waiting.start()
                wait_until(lambda: len(worker._queue) == 2)
                b.cancel()
                waiting.join(LONG)

        assert len(a.generate_image(small_image(), on_progress=on_progress).frames) == 1
        assert outcome == ["the job was cancelled before it began"]


def test_a_callback_can_t_start_a_job(isolated: Any) -> None:
    for start in (isolated.close, lambda: isolated.generate_video(small_video())):
        with pytest.raises(sdsage.SdsageError, match="callback can't start another native job"):
            isolated.generate_video(small_video(), on_progress=lambda p, start=start: start())
    seen: list[Any] = []
    isolated.generate_video(small_video(), on_progress=lambda p: seen.append(isolated.version_name))
    assert set(seen) == {"Wan 2.x"}


def test_a_job_that_does_not_stop_ends_with_its_worker(preset_files: Any) -> None:
    """A process that was stopped does not hear that it shall stop."""
    with sdsage.Context(ctx_params(preset_files("tiny-random")), isolated=True) as ctx:
        pid = ctx.worker_pid

        def on_progress(p: Any) -> None:
            if p.stage == "decode":
                os.kill(pid, signal.SIGSTOP)
                ctx.cancel()

        with pytest.raises(Cancelled, match="did not stop in time, so its worker process was ended"):
            ctx.generate_video(small_video(), on_progress=on_progress)
        assert gone(pid)
        with pytest.raises(ContextClosed, match="its worker process has ended"):
            ctx.generate_video(small_video())
        with pytest.raises(ContextClosed):
            _ = ctx.version_name


def test_two_workers_run_at_the_same_time(preset_files: Any, flux_context: Any) -> None:
    """Each waits in its callback for the other: with one job at a time neither would come."""
    together = threading.Barrier(2)
    made: dict[int, Any] = {}
    heard: dict[int, set[int]] = {1: set(), 2: set()}

    def work(seed: int) -> None:
        def on_progress(p: Any) -> None:
            heard[seed].add(threading.get_ident())
            if p.stage == "sample" and p.step == 1:
                together.wait(LONG)

        with sdsage.Context(ctx_params(preset_files("tiny-flux")), isolated=True) as ctx:
            made[seed] = ctx.generate_image(small_image(seed=seed), on_progress=on_progress).frames

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (1, 2):
        assert (made[seed] == flux_context.generate_image(small_image(seed=seed)).frames).all()
    assert not heard[1] & heard[2]


# ---- the worker dies

STAGES = {
    "loading": ("load", 0, None),
    "text": ("encode_text", 0, None),
    "step 1": ("sample", 0, "high-noise"),
    "step 2": ("sample", 0, "low-noise"),
    "step 3": ("sample", 1, "low-noise"),
    "decode": ("decode", 0, None),
}


@pytest.mark.parametrize("end", ["SIGKILL", "SIGSEGV", "SIGABRT"])
@pytest.mark.parametrize("where", STAGES)
def test_a_worker_that_dies_at_a_stage(where: str, end: str, preset_files: Any) -> None:
    """The signal comes while the job waits for a callback, so that the stage is certain."""
    stage, step, expert = STAGES[where]
    worker = Worker()

    def on_progress(p: Any) -> None:
        if (p.stage, p.step, p.expert) == (stage, step, expert):
            os.kill(worker.pid, getattr(signal, end))
            wait_until(lambda: gone(worker.pid))

    job = small_video()
    job.high_noise_sample_params.sample_steps = 1
    context = None
    with pytest.raises(WorkerDied) as caught:  # noqa: PT012
        context = sdsage.Context(ctx_params(preset_files("tiny-random")), isolated=worker, on_progress=on_progress)
        context.generate_video(job)
    error = caught.value
    assert isinstance(error, sdsage.GenerationError)
    assert (error.exit_code, error.pid, error.signal) == (1, worker.pid, end)
    assert error.returncode == -getattr(signal, end)
    assert (error.stage, error.expert) == (stage, expert)
    assert error.step == (step + 1 if stage == "sample" else 0)
    assert f"was ended by {end} while " in str(error)
    assert not worker.alive
    if context is not None:
        with pytest.raises(ContextClosed):
            context.generate_video(job)
        context.close()
    worker.close()


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are those of odd_worker.py."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT}/tests/odd_worker.py" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.usefixtures("odd")
def test_a_native_abort_has_its_reason(preset_files: Any) -> None:
    with pytest.raises(WorkerDied, match=r"SIGABRT.* its last words: .*GGML_ASSERT") as caught, Worker() as worker:
        worker.run("abort", ctx_params(preset_files("tiny-random")))
    assert any("GGML_ASSERT" in line for line in caught.value.last_words)


@pytest.mark.usefixtures("odd")
def test_a_library_that_calls_exit() -> None:
    with pytest.raises(WorkerDied, match=r"ended with exit code 7; its last words: I have had enough$"):
        Worker().run("leave")


@pytest.mark.usefixtures("odd")
def test_a_dead_lock_is_a_hang() -> None:
    with pytest.raises(WorkerDied, match=r"no sign of life for 1 seconds"), Worker(hang_after=1) as worker:
        worker.run("hold_the_gil")
    assert gone(worker.pid)


DEAD_LOCK = """
import os, signal, sys, threading, time
import sdsage
sys.executable = sys.argv[1]
worker = sdsage.Worker()
threading.Thread(target=lambda: worker.run("hold_the_gil"), daemon=True).start()
time.sleep(2)
print(worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("odd")
@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_dead_locked_worker_does_not_outlive_the_program() -> None:
    python = Path(sys.executable).read_text().split('"')[1]
    done = subprocess.run([python, "-P", "-c", DEAD_LOCK, sys.executable], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert wait_until(lambda: gone(int(done.stdout)))


def test_a_worker_that_dies_between_two_jobs(preset_files: Any) -> None:
    with sdsage.Context(ctx_params(preset_files("tiny-flux")), isolated=True) as ctx:
        os.kill(ctx.worker_pid, signal.SIGKILL)
        wait_until(lambda: gone(ctx.worker_pid))
        with pytest.raises(WorkerDied, match="was ended by SIGKILL; ") as caught:
            ctx.generate_image(small_image())
        assert caught.value.stage == ""
        with pytest.raises(ContextClosed):
            ctx.generate_image(small_image())


@pytest.mark.parametrize("stage", ["sample", "decode"])
def test_a_hung_worker_is_noticed(stage: str, preset_files: Any) -> None:
    with Worker(hang_after=3) as worker:

        def on_progress(p: Any) -> None:
            if p.stage == stage:
                os.kill(worker.pid, signal.SIGSTOP)

        ctx = sdsage.Context(ctx_params(preset_files("tiny-flux")), isolated=worker, on_progress=on_progress)
        with pytest.raises(WorkerDied, match=r"gave no sign of life for 3 seconds and was ended while") as caught:
            ctx.generate_image(small_image())
        assert caught.value.stage == stage
        assert gone(worker.pid)


@pytest.mark.usefixtures("odd")
def test_a_long_native_call_is_no_hang() -> None:
    with Worker(hang_after=3) as worker:
        worker.run("work_for", 4)


def test_a_slow_callback_is_no_hang(preset_files: Any) -> None:
    slept = threading.Event()

    def on_progress(p: Any) -> None:
        if p.stage == "sample" and not slept.is_set():
            time.sleep(4)
            slept.set()

    with Worker(hang_after=3) as worker:
        ctx = sdsage.Context(ctx_params(preset_files("tiny-flux")), isolated=worker)
        ctx.generate_image(small_image(), on_progress=on_progress)
    assert slept.is_set()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_a_time_out_that_is_none(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDSAGE_WORKER_TIMEOUT", seconds)
    with pytest.raises(sdsage.BadRequest, match="SDSAGE_WORKER_TIMEOUT"):
        Worker()


def test_a_worker_that_can_t_start(preset_files: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(WorkerDied, match=r"could not be started.*none"), Worker() as worker:
        sdsage.Context(ctx_params(preset_files("tiny-random")), isolated=worker)
    program = tmp_path / "program"
    for text, words in (
        ("#!/bin/sh\necho once upon a time, there was a program", "does not begin a message"),
        ("#!/bin/sh\necho no such thing >&2\nexit 3", "ended with exit code 3 while starting; its last words: no such"),
    ):
        program.write_text(text)
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        with pytest.raises(WorkerDied, match=words), Worker() as worker:
            sdsage.Context(ctx_params(preset_files("tiny-random")), isolated=worker)


def test_workers_leave_no_files_and_threads_behind(preset_files: Any) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with Worker() as worker:
        assert worker.alive
    before = count()
    for _ in range(5):
        with Worker() as worker:
            worker.run("check_memory", ctx_params(preset_files("tiny-random")), None, small_video())
    assert count() <= before


def test_why_a_kill_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_death, "oom_kills", lambda: (3, 5))
    monkeypatch.setattr(_death, "host_memory", lambda: 2**33)
    watch = _death.MemoryWatch()
    assert "somebody sent that signal" in watch.verdict()
    monkeypatch.setattr(_death, "host_memory", lambda: 2**28)
    watch.look()
    monkeypatch.setattr(_death, "host_memory", lambda: 2**33)  # it is free again when we ask
    watch.look()
    assert "memory was low (0.2 GiB free)" in watch.verdict()
    monkeypatch.setattr(_death, "oom_kills", lambda: (4, 6))
    assert "ends processes so when memory runs out, and did: free memory, or" in watch.verdict()


def test_the_counters_of_this_system() -> None:
    group, system = _death.oom_kills()
    assert 0 <= group <= max(group, system)
    assert _death.signal_name(-9) == "SIGKILL"
    assert _death.signal_name(3) == _death.signal_name(None) == ""
    assert _death.signal_name(0xC0000005) == "an access violation"  # Windows
