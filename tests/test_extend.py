"""--extend: parts that go on from the last frame of the one before, in one video without the frame that two share."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from conftest import ctx_params, small_video
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

import sdsage
from sdsage._bounds import aligned_frames
from sdsage.cli.app import build_app
from sdsage.extend import UnfinishedError, check_extension, extended_frames, generate_extended
from sdsage.media import read_metadata

COMMON = ["-W", "64", "-H", "64", "--video-frames", "5", "--steps", "1", "-t", "1", "-p", "a cat"]


def run(*args: str, code: int = 0) -> Any:
    done = CliRunner().invoke(build_app(only="vid-gen"), ["vid-gen", *args])
    assert done.exit_code == code, done.output
    return done


def frames_in(path: str) -> int:
    with av.open(path) as file:
        return len(list(file.decode(video=0)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def ti2v(preset_files: Any) -> Any:
    with sdsage.Context(ctx_params(preset_files("tiny-ti2v"), vae_decode_only=False)) as context:
        yield context


def job(**more: Any) -> Any:
    made = small_video(**{"width": 64, "height": 64, **more})
    made.sample_params.sample_steps = 1
    made.high_noise_sample_params.sample_steps = -1
    return made


@given(frames=st.integers(5, 200), times=st.integers(0, 50))
def test_every_seam_drops_one_frame(frames: int, times: int) -> None:
    check_extension(frames, times, control=False)
    part = aligned_frames(frames)
    assert extended_frames(frames, times) == part * (times + 1) - times


def test_each_part_can_be_made_alone_from_the_frame_before(ti2v: Any) -> None:
    """TI2V begins with text alone; parts after it begin with the last frame, and their first frame is dropped."""
    asked = job(seed=11)
    told: list[tuple[int, int]] = []
    result = generate_extended(ti2v, asked, 2, on_part=lambda *part: told.append(part))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert result.frames.shape == (13, 64, 64, 3)
    assert result.seeds == (11, 12, 13)
    assert len(result.timings.steps) == 3
    assert (asked.seed, asked.init_image, asked.width) == (11, None, 64)

    first = ti2v.generate_video(job(seed=11))
    assert np.array_equal(result.frames[:5], first.frames)
    second = ti2v.generate_video(job(seed=12, init_image=first.frames[-1]))
    assert np.array_equal(result.frames[5:9], second.frames[1:])
    third = ti2v.generate_video(job(seed=13, init_image=result.frames[8]))
    assert np.array_equal(result.frames[9:], third.frames[1:])
    calls = [sum(a.calls for a in part.attention) for part in (first, second, third, result)]
    assert calls[3] == sum(calls[:3])


def test_a_size_that_was_aligned_stays(ti2v: Any) -> None:
    result = generate_extended(ti2v, job(width=50), 1)
    assert result.frames.shape == (9, 64, 64, 3)
    assert len(result.adjusted) == 1


def test_the_end_picture_is_for_the_last_part(preset_files: Any) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
    with sdsage.Context(ctx_params(preset_files("tiny-random-i2v"), vae_decode_only=False)) as context:
        asked = job(init_image=pictures[0], end_image=pictures[1])
        whole = generate_extended(context, asked, 1)
        first = context.generate_video(job(init_image=pictures[0]))
        last = context.generate_video(job(init_image=first.frames[-1], end_image=pictures[1], seed=8))
    assert np.array_equal(whole.frames, np.concatenate([first.frames, last.frames[1:]]))
    assert asked.end_image is not None


@pytest.mark.parametrize(
    ("frames", "times", "control", "words"),
    [(4, 1, False, "4 frames can't be extended"), (5, -1, False, "-1 times"), (5, 1, True, "control frames")],
)
def test_what_can_not_be_extended(frames: int, times: int, control: bool, words: str) -> None:
    with pytest.raises(sdsage.BadRequest, match=words):
        check_extension(frames, times, control)


def test_a_model_that_takes_no_picture_is_refused_before_anything_is_made(video_context: Any) -> None:
    begun: list[Any] = []
    with pytest.raises(sdsage.BadRequest, match=r"Wan 2\.x\) can't go on.*Wan2.2 I2V or TI2V.*--extend"):
        generate_extended(video_context, job(), 1, on_progress=begun.append)
    assert begun == []


def test_a_decoder_alone_is_refused_before_anything_is_made(preset_files: Any) -> None:
    with sdsage.Context(ctx_params(preset_files("tiny-ti2v"))) as context:
        begun: list[Any] = []
        with pytest.raises(sdsage.BadRequest, match="vae_decode_only = False"):
            generate_extended(context, job(), 1, on_progress=begun.append)
        assert begun == []
        assert len(generate_extended(context, job(), 0).frames) == 5


def test_one_file(folder: Path) -> None:
    done = run("--preset", "tiny-ti2v", *COMMON, "--extend", "2", "-o", "cat.mp4", "-s", "5")
    assert "part 3 of 3" in done.stderr
    assert frames_in("cat.mp4") == 13
    metadata = read_metadata("cat.mp4")
    assert metadata is not None
    assert metadata.data["frames"] == 13
    assert metadata.data["part_seeds"] == [5, 6, 7]
    assert metadata.data["options"]["extend"] == 2
    found = json.loads(run("--preset", "tiny-ti2v", *COMMON, "--extend", "1", "-o", "f_%d.png", "--json", "-q").stdout)
    assert found["seeds"] == [42]
    assert found["part_seeds"] == [42, 43]
    assert len(found["files"]) == found["frames"] == 9


def test_the_verb_refuses(folder: Path) -> None:
    words = "can't go on from a last frame"
    assert words in run("--preset", "tiny-random", *COMMON, "--extend", "1", "-o", "a.mp4", code=2).stderr
    assert "from 0 to 1000" in run("--preset", "tiny-ti2v", *COMMON, "--extend", "-1", "-o", "a.mp4", code=2).stderr
    few = [*COMMON, "--video-frames", "3"]
    assert "--video-frames 5 or more" in run("--preset", "tiny-ti2v", *few, "--extend", "1", code=2).stderr
    (folder / "control").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "control" / "a.png")
    steered = [*COMMON, "--control-video", "control", "--extend", "1"]
    assert "control frames" in run("--preset", "tiny-ti2v", *steered, code=2).stderr
    assert [p.name for p in folder.iterdir()] == ["control"]


def test_parts_that_were_made_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device runs out of memory in the third part."""
    real = sdsage.Context.generate_video

    def generate(self: Any, params: Any, **how: Any) -> Any:
        if params.seed == 44:
            raise sdsage.GenerationError("out of memory")
        return real(self, params, **how)

    monkeypatch.setattr(sdsage.Context, "generate_video", generate)
    done = run("--preset", "tiny-ti2v", *COMMON, "--extend", "3", "-o", "cat.webm", code=1)
    assert "part 3 of 4 failed" in done.stderr
    assert "kept in cat_first_2_parts.webm" in done.stderr
    assert [p.name for p in folder.iterdir()] == ["cat_first_2_parts.webm"]
    assert frames_in("cat_first_2_parts.webm") == 9


def test_the_error_holds_the_parts(ti2v: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ti2v.generate_video
    made: list[Any] = []

    def generate(params: Any, **how: Any) -> Any:
        if len(made) == 2:
            raise sdsage.GenerationError("out of memory")
        made.append(real(params, **how))
        return made[-1]

    monkeypatch.setattr(ti2v, "generate_video", generate)
    with pytest.raises(UnfinishedError, match="part 3 of 3 failed: out of memory") as caught:
        generate_extended(ti2v, job(), 2)
    assert caught.value.parts == 2
    assert np.array_equal(caught.value.result.frames, np.concatenate([made[0].frames, made[1].frames[1:]]))
    assert replace(caught.value.result, frames=made[0].frames).seeds == (7, 8)
