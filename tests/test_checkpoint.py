"""Nothing is lost: a run that was killed goes on from its last kept call, and comes to the same pictures."""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ctx_params, small_image, small_video
from hypothesis import given
from hypothesis import strategies as st
from tiny_cli import frames_of, run

import sdsage
from sdsage import Checkpoint, _answers, _identity, checkpoint
from sdsage._answers import Answer, AnswerFile
from sdsage.cli import keeping
from sdsage.errors import BadRequest, ResumeError, SdsageError

VIDEO = ["vid-gen", "--preset", "tiny-random", "-W", "32", "-H", "32", "--video-frames", "5", "-t", "1", "-p", "a cat"]
PICTURES = ["img-gen", "--preset", "tiny-flux", "-W", "32", "-H", "32", "-t", "1", "-p", "a cat", "-b", "2"]


class Stop(Exception):
    """Raised by a callback, to end a job as from outside."""


def stop_after(calls: int) -> Callable[[Any], None]:
    """A progress callback that ends the job when this many steps were computed."""
    left = [calls]

    def on_progress(p: Any) -> None:
        if p.stage == "sample" and p.step > p.replayed:
            left[0] -= 1
            if left[0] == 0:
                raise Stop

    return on_progress


def video(method: str, **more: Any) -> Any:
    job = small_video(**more)
    for sample in (job.sample_params, job.high_noise_sample_params):
        sample.sample_steps, sample.sample_method = 3, method
    return job


# ---- the same pictures


@pytest.mark.parametrize("method", ["euler", "dpm++2m", "euler_a", "heun", "dpm2", "lcm", "res_multistep", "er_sde"])
def test_every_sampler_goes_on_where_it_was(video_context: Any, tmp_path: Path, method: str) -> None:
    """Over both experts: ended in the first and in the second, and resumed twice."""
    job, path = video(method), tmp_path / "kept"
    whole = video_context.generate_video(job)
    with pytest.raises(Stop):
        video_context.generate_video(job, checkpoint=Checkpoint(path), on_progress=stop_after(2))
    with pytest.raises(Stop):
        video_context.generate_video(job, checkpoint=Checkpoint(path, resume=True), on_progress=stop_after(3))
    seen: list[Any] = []
    resumed = video_context.generate_video(job, checkpoint=Checkpoint(path, resume=True), on_progress=seen.append)
    assert (resumed.frames == whole.frames).all()
    assert 3 <= resumed.timings.replayed <= 4
    assert len(resumed.timings.steps) == 6 - resumed.timings.replayed
    shown = [(p.expert, p.step) for p in seen if p.stage == "sample" and p.step]
    assert [s for i, s in enumerate(shown) if s not in shown[:i]] == [
        (expert, step) for expert in ("high-noise", "low-noise") for step in (1, 2, 3)
    ]
    assert any(p.replayed == 3 for p in seen if p.expert == "high-noise" and p.step == 3)
    computed = {a.module for a in resumed.attention if "noise" in a.module}
    assert computed == {"low-noise"} or method in ("heun", "dpm2")  # those were ended inside a step


def whole_and_resumed(ctx: Any, job: Any, folder: Path, after: int) -> tuple[Any, Any]:
    """A job at once, and one that was ended after some steps and resumed."""
    whole = ctx.generate_image(job)
    with pytest.raises(Stop):
        ctx.generate_image(job, checkpoint=Checkpoint(folder / "kept"), on_progress=stop_after(after))
    return whole, ctx.generate_image(job, checkpoint=Checkpoint(folder / "kept", resume=True))


def test_a_batch_goes_on_in_its_second_picture(flux_context: Any, tmp_path: Path) -> None:
    job = small_image(batch_count=2)
    job.sample_params.sample_steps = 3
    whole, resumed = whole_and_resumed(flux_context, job, tmp_path, after=5)
    assert resumed.timings.replayed == 4
    assert (resumed.frames == whole.frames).all()
    assert resumed.seeds == whole.seeds


def test_a_second_pass_goes_on(flux_context: Any, tmp_path: Path) -> None:
    job = small_image()
    job.hires.enabled, job.hires.steps = True, 3
    whole, resumed = whole_and_resumed(flux_context, job, tmp_path, after=4)
    assert resumed.timings.replayed == 3
    assert (resumed.frames == whole.frames).all()


def test_latents_that_are_finished_are_only_decoded(flux_context: Any, tmp_path: Path) -> None:
    job, path = small_image(batch_count=2, seed=-1), tmp_path / "kept"
    whole = flux_context.generate_image(job, checkpoint=Checkpoint(path))
    stages: list[str] = []
    again = Checkpoint(path, resume=True)
    assert again.read().finished
    resumed = flux_context.generate_image(job, checkpoint=again, on_progress=lambda p: stages.append(p.stage))
    assert set(stages) == {"decode"}
    assert (resumed.frames == whole.frames).all()
    assert resumed.seeds == whole.seeds  # they were drawn


def test_a_step_cache_begins_anew_and_says_so(video_context: Any, tmp_path: Path) -> None:
    job, path = video("euler"), tmp_path / "kept"
    job.cache.mode = "easycache"
    with pytest.raises(Stop):
        video_context.generate_video(job, checkpoint=Checkpoint(path), on_progress=stop_after(2))
    resumed = video_context.generate_video(job, checkpoint=Checkpoint(path, resume=True))
    assert any("step cache (easycache) began anew after 1 steps" in sentence for sentence in resumed.adjusted)


# ---- what is kept, and what is not


def test_answers_are_written_in_bunches(video_context: Any, tmp_path: Path) -> None:
    path, sizes = tmp_path / "kept", []

    def on_progress(p: Any) -> None:
        if p.stage == "sample" and p.step:
            sizes.append(path.stat().st_size if path.exists() else 0)

    result = video_context.generate_video(video("euler"), checkpoint=Checkpoint(path, every=4), on_progress=on_progress)
    assert sizes[:4] == [0, 0, 0, 0]
    assert sizes[4] == sizes[5] > 4 * result.frames.shape[0]
    for bad in (0, -1, 1.5, True):
        with pytest.raises(BadRequest, match="a whole number of model calls"):
            Checkpoint(path, every=bad)  # type: ignore[arg-type]


def test_an_early_cancel_leaves_nothing_and_a_late_one_its_work(
    video_context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "kept"

    def on_progress(p: Any) -> None:
        if p.stage == "sample" and p.step == 3:
            video_context.cancel()

    for worth, there in ((3600.0, False), (0.0, True)):
        monkeypatch.setattr(checkpoint, "WORTH_KEEPING", worth)
        with pytest.raises(sdsage.Cancelled):
            video_context.generate_video(video("euler"), checkpoint=Checkpoint(path), on_progress=on_progress)
        assert path.exists() == there
        assert path.parent.exists() == there


def test_what_became_nan_is_not_kept(preset_files: Any, tmp_path: Path) -> None:
    files, path = preset_files("tiny-random"), tmp_path / "kept"
    data = bytearray(Path(files["diffusion_model"]).read_bytes())
    data[-256:] = np.full(64, np.nan, np.float32).tobytes()  # head.head.bias is the last tensor, F32
    broken = tmp_path / "nan.gguf"
    broken.write_bytes(data)
    seen = []
    params = ctx_params(files | {"diffusion_model": str(broken)})
    with sdsage.Context(params) as context, pytest.raises(sdsage.NonFiniteError):
        context.generate_video(
            small_video(), checkpoint=Checkpoint(path), on_progress=lambda p: seen.append(path.exists())
        )
    assert any(seen)  # what the high-noise expert did
    assert not path.exists()


def test_a_full_disk_does_not_end_the_run(preset_files: Any, tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "kept"
    with sdsage.Context(
        ctx_params(preset_files("tiny-random")), on_log=lambda level, line: said.append(line)
    ) as context:
        whole = context.generate_video(video("euler"))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, hard))
        try:
            result = context.generate_video(video("euler"), checkpoint=Checkpoint(path))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (result.frames == whole.frames).all()
        assert len([line for line in said if "is not kept any more" in line]) == 1
        path.unlink(missing_ok=True)


def test_two_runs_do_not_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_answers, "_LOCK_SECONDS", 0.0)
    first = AnswerFile.create(tmp_path / "kept", {})
    with pytest.raises(SdsageError, match="in use by another run"):
        AnswerFile.create(tmp_path / "kept", {})
    with pytest.raises(SdsageError, match="in use by another run"):
        AnswerFile.open(tmp_path / "kept")
    first.close()
    again = AnswerFile.open(tmp_path / "kept")
    assert again is not None
    again.close()


# ---- other settings


def test_another_setting_is_named(video_context: Any, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    with pytest.raises(Stop):
        video_context.generate_video(video("euler"), checkpoint=Checkpoint(path), on_progress=stop_after(3))
    size = path.stat().st_size
    for job, said in (
        (video("euler", prompt="a dog"), "gen.prompt was a lovely cat and is a dog now"),
        (video("heun"), "gen.sample_params.sample_method was euler and is heun now"),
        (video("euler", seed=8), "gen.seed was 7 and is 8 now"),
    ):
        with pytest.raises(ResumeError) as raised:
            video_context.generate_video(job, checkpoint=Checkpoint(path, resume=True))
        assert said in str(raised.value)
        assert raised.value.differences
    assert path.stat().st_size == size
    tiled = video("euler")
    tiled.vae_tiling_params.enabled = True  # decides nothing before decoding
    assert video_context.generate_video(tiled, checkpoint=Checkpoint(path, resume=True)).timings.replayed == 2


def test_pictures_are_told_apart_and_decide_on_tiles() -> None:
    def of(value: int | None, tiles: bool = False) -> dict[str, Any]:
        job = small_video(init_image=None if value is None else np.full((32, 32, 3), value, np.uint8))
        job.vae_tiling_params.enabled = tiles
        return _identity.identity({}, job, 7)

    assert _identity.differences(of(None), of(None, tiles=True)) == []
    (found,) = _identity.differences(of(1), of(2))
    assert found.name == "gen.init_image"
    assert _identity.text(found.now).startswith("32x32x3 (sha256 ")
    assert [d.name for d in _identity.differences(of(1), of(1, tiles=True))] == ["gen.vae_tiling_params.enabled"]


def test_another_model_file_is_noticed(preset_files: Any, tmp_path: Path) -> None:
    files, path = preset_files("tiny-random"), tmp_path / "kept"
    own = tmp_path / "other-name.gguf"
    shutil.copy(files["diffusion_model"], own)
    with sdsage.Context(ctx_params(files)) as context, pytest.raises(Stop):
        context.generate_video(video("euler"), checkpoint=Checkpoint(path), on_progress=stop_after(3))
    renamed = ctx_params(files | {"diffusion_model": str(own)})
    with sdsage.Context(renamed) as context, pytest.raises(Stop):
        context.generate_video(video("euler"), checkpoint=Checkpoint(path, resume=True), on_progress=stop_after(1))
    data = bytearray(own.read_bytes())
    data[-4] ^= 1
    own.write_bytes(data)
    with sdsage.Context(renamed) as context, pytest.raises(ResumeError, match=r"was .*gguf .* and is other-name.gguf"):
        context.generate_video(video("euler"), checkpoint=Checkpoint(path, resume=True))


def test_nothing_to_resume(video_context: Any, tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="there is nothing to resume"):
        video_context.generate_video(video("euler"), checkpoint=Checkpoint(tmp_path / "none", resume=True))
    (tmp_path / "text").write_text("no checkpoint, but more than a few bytes of text")
    with pytest.raises(BadRequest, match="holds no latents"):
        video_context.generate_video(video("euler"), checkpoint=Checkpoint(tmp_path / "text", resume=True))


# ---- the file


def answers(count: int) -> list[Answer]:
    random = np.random.default_rng(count)
    return [Answer(random.normal(size=(1, 4, 3, 5)).astype(np.float32), 1.0 / (i + 1), i + 1) for i in range(count)]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of three answers."""
    path = tmp_path_factory.mktemp("answers") / "three"
    file = AnswerFile.create(path, {"seeds": [1]})
    file.append(answers(3))
    file.close()
    return path


@given(data=st.data())
def test_a_file_that_was_cut_or_damaged_gives_what_is_whole(three: Path, data: st.DataObject) -> None:
    content = bytearray(three.read_bytes())
    record = (len(content) - 64) // 3 // 64 * 64
    begin = len(content) - 3 * record
    at = data.draw(st.integers(begin, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:at]
    else:
        content[at] ^= data.draw(st.integers(1, 255))
    path = three.with_name("damaged")
    path.unlink(missing_ok=True)  # the file of the example before is mapped perhaps
    path.write_bytes(content)
    file = AnswerFile.open(path)
    assert file is not None
    expected = answers(3)
    whole = (at - begin) // record
    assert whole <= len(file.answers) <= 3  # a byte of the padding does no harm
    for found, was in zip(file.answers, expected, strict=False):
        assert (found.values == was.values).all()
        assert (found.step, np.float32(found.sigma)) == (was.step, np.float32(was.sigma))
    file.append(expected[len(file.answers) :])
    file.close()
    again = AnswerFile.open(path)
    assert again is not None
    assert len(again.answers) == 3
    again.close()


@given(content=st.binary(max_size=200))
def test_a_damaged_header_is_one_error(three: Path, content: bytes) -> None:
    path = three.with_name("header")
    path.write_bytes(_answers.MAGIC + content)
    with pytest.raises(BadRequest, match=r"format|cut off|damaged"):
        AnswerFile.open(path)


# ---- the command line


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(sdsage.__file__).parent.parent), **more}


def kill_when(pattern: str, *args: str) -> None:
    """Runs a command and ends it with SIGKILL when a line of its progress matches."""
    command = [sys.executable, "-P", "-m", "sdsage", *args]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None
        seen = ""
        for line in lines(process.stderr):
            seen += line
            if re.search(pattern, line):
                break
        else:
            pytest.fail(seen)
        process.kill()
        assert process.wait() == -signal.SIGKILL


def lines(stream: Any) -> Iterator[str]:
    while line := stream.readline():
        yield line


@pytest.mark.parametrize(
    ("method", "pattern"),
    [
        ("euler", r"high-noise expert\) 3/"),
        ("dpm++2m", r"low-noise expert\) 4/"),
        ("euler_a", r"low-noise expert\) 2/"),
        ("heun", r"high-noise expert\) 2/"),
    ],
)
def test_a_killed_video_goes_on(empty_folder: Path, method: str, pattern: str) -> None:
    args = [*VIDEO, "--steps", "40", "--high-noise-steps", "4", "--sampling-method", method]
    args += ["--high-noise-sampling-method", method]
    kill_when(pattern, *args, "-o", "cat.webp")
    assert os.listdir(empty_folder) == [".cat.webp.sdsage-checkpoint"]
    result = run(*args, "-o", "cat.webp", "--resume")
    assert re.search(r"resumed +[1-9]\d* of 44 steps came from the checkpoint", result.stderr)
    run(*args, "-o", "whole.webp", "-q")
    assert (frames_of("cat.webp") == frames_of("whole.webp")).all()
    assert sorted(os.listdir(empty_folder)) == ["cat.webp", "whole.webp"]


def test_killed_pictures_go_on_by_the_name_of_the_output(empty_folder: Path) -> None:
    args = [*PICTURES, "--steps", "60", "-s", "-1"]
    kill_when(r"sample 5/60, ", *args, "-o", "cat.png")
    result = run("img-gen", "-o", "cat.png", "--resume")
    (seed,) = re.findall(r"^seed +(\d+)", result.stderr, re.M)
    run(*PICTURES, "--steps", "60", "-s", seed, "-o", "whole.png", "-q")
    for i in range(2):
        assert (frames_of(f"cat_{i}.png") == frames_of(f"whole_{i}.png")).all()


def test_a_run_that_was_killed_twice(empty_folder: Path) -> None:
    args = [*VIDEO, "--steps", "40", "--high-noise-steps", "1", "-o", "cat.webp"]
    kill_when(r"low-noise expert\) 3/", *args)
    size = (empty_folder / ".cat.webp.sdsage-checkpoint").stat().st_size
    kill_when(r"low-noise expert\) [5-9]/40, ", *args, "--resume")
    assert (empty_folder / ".cat.webp.sdsage-checkpoint").stat().st_size > size
    run(*args, "--resume", "-q")
    run(*args[:-1], "whole.webp", "-q")
    assert (frames_of("cat.webp") == frames_of("whole.webp")).all()


def test_resume_names_the_option_that_is_not_the_same(empty_folder: Path) -> None:
    args = [*VIDEO, "--steps", "40", "--high-noise-steps", "1", "-o", "cat.webp"]
    kill_when(r"low-noise expert\) 2/", *args)
    asked = ["--steps", "41", "--cfg-scale", "3", "-s", "9", "--resume"]
    said = run(*args, *asked, code=2).stderr
    assert "--steps was 40 and is 41 now" in said
    assert "--cfg-scale was 3.5 and is 3.0 now" in said
    assert "--seed was 42 and is 9 now" in said
    assert os.listdir(empty_folder) == [".cat.webp.sdsage-checkpoint"]
    assert "run 'sdsage" not in said
    assert "--resume would go on with it" in run(*args, "-q").stderr
    assert os.listdir(empty_folder) == ["cat.webp"]


def test_there_is_nothing_to_resume(empty_folder: Path) -> None:
    said = run("vid-gen", "-o", "cat.webp", "--resume", code=2).stderr
    assert "there is nothing to resume: .cat.webp.sdsage-checkpoint does not exist" in said
    assert os.listdir(empty_folder) == []
    said = run(*VIDEO, "--steps", "1", "--high-noise-steps", "1", "-o", "cat.webp", "--resume").stderr
    assert (
        "warning: there is nothing to resume (.cat.webp.sdsage-checkpoint does not exist): the run begins anew" in said
    )
    assert os.listdir(empty_folder) == ["cat.webp"]


def test_several_videos_go_on_with_the_one_that_was_ended(empty_folder: Path) -> None:
    args = [*VIDEO, "--steps", "20", "--high-noise-steps", "1", "-b", "3", "-s", "5", "-o", "{seed}.webp"]
    kill_when(r"note: 5.webp is written", *args)
    before = (empty_folder / "5.webp").stat().st_mtime_ns
    run(*args, "--resume", "-q")
    assert sorted(os.listdir(empty_folder)) == ["5.webp", "6.webp", "7.webp"]
    assert (empty_folder / "5.webp").stat().st_mtime_ns == before
    said = run(*args, "--resume", code=2).stderr
    assert "all 3 results are there" in said


@pytest.mark.parametrize(("stage", "kept"), [("load", False), ("sample", True), ("decode", True)])
def test_a_killed_worker_is_resumed(empty_folder: Path, stage: str, kept: bool) -> None:
    """The engine's process dies, and the command tells how to go on."""
    args = [*VIDEO, "-W", "64", "-H", "64", "--steps", "6", "--high-noise-steps", "2", "-o", "cat.webp"]
    pattern = {"load": "load model", "sample": r"low-noise expert\) 2/", "decode": "decode"}[stage]
    command = [sys.executable, "-P", "-m", "sdsage", *args]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None
        for line in lines(process.stderr):
            if re.search(pattern, line):
                (worker,) = children(process.pid)
                os.kill(int(worker), signal.SIGKILL)
                break
        rest = process.stderr.read()
        assert process.wait() == 1, rest
    assert ("sdsage vid-gen -o cat.webp --resume" in rest) == kept
    assert os.listdir(empty_folder) == [".cat.webp.sdsage-checkpoint"] * kept
    run(*(args if not kept else ["vid-gen", "-o", "cat.webp"]), "--resume", "-q")
    run(*args[:-1], "whole.webp", "-q")
    assert (frames_of("cat.webp") == frames_of("whole.webp")).all()


def children(pid: int) -> list[str]:
    """Also those that other threads started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += (task / "children").read_text().split()
    return found


def test_a_checkpoint_can_be_declined(empty_folder: Path) -> None:
    kill_when(r"low-noise expert\) 3/", *VIDEO, "--steps", "40", "-o", "cat.webp", "--checkpoint-every", "0")
    assert os.listdir(empty_folder) == []


@given(name=st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=255))
def test_names_beside_an_output_fit_in_a_folder(name: str) -> None:
    for path in (keeping.checkpoint_path(f"out/{name}"), keeping.latents_path(f"out/{name}")):
        assert path.parent == Path("out")
        assert len(os.fsencode(path.name)) <= 255 - len(".part") - 20
