"""`sdsage upscale` of a video: every frame, at its time, with the sound and what is written in the file."""

import json
import struct
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from test_upscale import write_repeater
from typer.testing import CliRunner

from sdsage.cli.app import build_app
from sdsage.errors import BadRequest
from sdsage.media import Metadata, plan_output, read_metadata
from sdsage.media.clip import Clip, kind_of

META = Metadata("a cat\nSeed: 7", {"seed": 7, "fps": 16})


def soft(count: int, height: int, width: int) -> np.ndarray[Any, Any]:
    """Waves that a codec keeps nearly as they are; no two frames are equal."""
    t, y, x = np.mgrid[0:count, 0:height, 0:width].astype(np.float32)
    red, green = np.sin(x / 9 + t), np.cos(y / 7 - t)
    return np.stack([127 + 90 * red, 127 + 90 * green, 127 + 60 * red * green], axis=-1).astype(np.uint8)


def write(path: Path, frames: np.ndarray[Any, Any], fps: int = 24) -> Path:
    plan_output(path, video=True, count=len(frames)).write(frames, fps=fps, metadata=META)
    return path


def read(path: Path) -> tuple[np.ndarray[Any, Any], list[float]]:
    with Clip(path) as clip:
        pictures = list(clip.pictures())
        unit = clip.time_base or 1 / clip.fps
    return np.stack([p.rgb for p in pictures]), [float(p.time * unit) for p in pictures]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    return write_repeater(tmp_path / "models" / "model.safetensors", 2)


def upscale(model: Path, source: Path, output: str, *more: str, code: int = 0) -> Any:
    command = ["upscale", "-i", str(source), "--upscale-model", str(model), "-t", "1", "-o", output, *more]
    done = CliRunner().invoke(build_app(only="upscale"), command)
    assert done.exit_code == code, done.output
    return done


def check_metadata(path: str, size: tuple[int, int]) -> None:
    """That of the source, and the mark that it was enlarged."""
    found = read_metadata(path)
    assert found is not None
    mark = {"model": "model.safetensors", "repeats": 1, "width": size[0], "height": size[1]}
    assert (found.parameters, found.data) == (META.parameters, META.data | {"enlarged": mark})


@pytest.mark.parametrize(("source", "output"), [("a.mp4", "b.mp4"), ("a.webm", "b.mp4"), ("a.mp4", "b.webm")])
@pytest.mark.parametrize("fps", [16, 24])
def test_same_frames_speed_and_metadata(model: Path, tmp_path: Path, source: str, output: str, fps: int) -> None:
    frames = soft(5, 16, 16)
    path = write(tmp_path / source, frames, fps)
    before, _ = read(path)
    found = json.loads(upscale(model, path, output, "--json", "-q").stdout)
    wanted = {"files": [output], "width": 32, "height": 32, "frames": 5, "fps": fps, "notes": []}
    assert {key: found[key] for key in wanted} == wanted
    after, times = read(Path(output))
    large = before.repeat(2, 1).repeat(2, 2)
    assert float(np.sqrt(np.mean((after.astype(float) - large) ** 2))) < 4
    assert times == pytest.approx([k / fps for k in range(5)], abs=1e-6)
    with av.open(output) as file:
        assert file.streams.video[0].average_rate == fps
    check_metadata(output, (32, 32))


@pytest.mark.parametrize("name", ["a.gif", "a.webp"])
def test_animated_pictures(model: Path, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, soft(4, 24, 32), 16)
    assert kind_of(path) == "animation"
    found = json.loads(upscale(model, path, "b.mp4", "--json", "-q").stdout)
    assert (found["frames"], found["fps"]) == (4, 16)
    check_metadata("b.mp4", (64, 48))
    done = upscale(model, path, "b.png")
    assert "holds 4 images: the first is used" in done.stderr
    with Image.open("b.png") as image:
        assert image.size == (64, 48)


def with_sound(path: Path, frames: np.ndarray[Any, Any], codec: str) -> Path:
    """A video with half a second of a tone."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264" if path.suffix == ".mp4" else "libvpx-vp9", rate=16)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        tone = file.add_stream(codec, rate=48000, layout="mono")
        for rgb in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(rgb, format="rgb24")))
        file.mux(stream.encode())
        samples = (np.sin(np.arange(24000) / 20) * 8000).astype(np.int16)[None]
        sound = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        sound.sample_rate, sound.pts = 48000, 0
        for packet in tone.encode(sound):
            file.mux(packet)
        file.mux(tone.encode())
    return path


def sound_of(path: str | Path) -> tuple[str, np.ndarray[Any, Any]]:
    with av.open(str(path)) as file:
        stream = file.streams.audio[0]
        samples = [f.to_ndarray().astype(np.float32) for f in file.decode(stream)]
        return stream.codec_context.codec.canonical_name, np.concatenate(samples, axis=1)


@pytest.mark.parametrize(("source", "codec", "output"), [("a.mp4", "aac", "b.mp4"), ("a.webm", "libopus", "b.mp4")])
def test_sound_is_carried_over(model: Path, tmp_path: Path, source: str, codec: str, output: str) -> None:
    path = with_sound(tmp_path / source, soft(4, 16, 16), codec)
    upscale(model, path, output)
    before, after = sound_of(path), sound_of(output)
    assert before[0] == after[0]
    tone, offsets = before[1][0, 8000:16000], range(7000, 9000)  # opus in MP4 is timed to the sample, in WebM to 1 ms
    match = next(o for o in offsets if np.array_equal(after[1][0, o : o + 8000], tone))
    assert abs(match - 8000) <= 48
    assert len(read(Path(output))[0]) == 4


def test_sound_that_does_not_fit_is_said(model: Path, tmp_path: Path) -> None:
    path = with_sound(tmp_path / "a.mp4", soft(4, 24, 32), "aac")
    assert "the sound (aac) is left out: .webm does not take it" in upscale(model, path, "b.webm").stderr
    with av.open("b.webm") as file:
        assert not file.streams.audio


def test_uneven_times_stay(model: Path, tmp_path: Path) -> None:
    """A screen recording: frames come when something happens."""
    path, ticks = tmp_path / "a.mp4", [0, 40, 200, 240, 1000]
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for tick, rgb in zip(ticks, soft(5, 16, 32), strict=True):
            frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
            frame.pts, frame.time_base = tick, Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    upscale(model, path, "b.mp4")
    _, times = read(Path("b.mp4"))
    assert times == pytest.approx([t / 1000 for t in ticks], abs=1e-3)


def test_a_video_that_was_filmed_sideways(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", soft(2, 16, 32))
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 40  # the matrix of the track
    data[at : at + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)  # a quarter turn right
    before, _ = read(path)
    path.write_bytes(data)
    upscale(model, path, "b.mp4")
    after, _ = read(Path("b.mp4"))
    assert after.shape == (2, 64, 32, 3)
    turned = np.rot90(before, 3, axes=(1, 2)).repeat(2, 1).repeat(2, 2)
    assert float(np.sqrt(np.mean((after.astype(float) - turned) ** 2))) < 4


def test_codec_and_crf(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", soft(4, 32, 32))
    upscale(model, path, "b.mp4", "--codec", "h265", "--crf", "30")
    with av.open("b.mp4") as file:
        assert file.streams.video[0].codec_context.name == "hevc"


@pytest.mark.parametrize(
    ("source", "output", "more", "words"),
    [
        ("a.mp4", "b.png", [], "no picture; for a video: name an output such as out.mp4 or out.webm"),
        ("a.png", "b.mp4", [], "one picture: name an output such as out.png"),
        ("a.mp4", "b.avi", [], "name an output such as out.mp4 or out.webm"),
        ("a.png", "b.avi", [], ".avi is not possible"),
        ("a.mp4", "b.mp4", ["--codec", "vp9"], "vp9 does not go into .mp4"),
        ("a.png", "b.png", ["--crf", "20"], "--crf is for .mp4 and .webm"),
        ("text.mp4", "b.mp4", [], "neither a picture nor a video"),
        ("sound.mp4", "b.mp4", [], "no pictures in it"),
    ],
)
def test_refusals(model: Path, tmp_path: Path, source: str, output: str, more: list[str], words: str) -> None:
    write(tmp_path / "a.mp4", soft(3, 24, 32))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "text.mp4").write_text("not a video")
    with av.open(str(tmp_path / "sound.mp4"), "w") as file:
        tone = file.add_stream("aac", rate=48000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4800), np.int16), format="s16", layout="mono")
        frame.sample_rate, frame.pts = 48000, 0
        file.mux(tone.encode(frame))
        file.mux(tone.encode())
    before = sorted(p.name for p in tmp_path.iterdir())
    assert words in upscale(model, tmp_path / source, output, *more, code=2).stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["a.mp4", "a.webm"])
@pytest.mark.parametrize("damage", ["cut", "zeros"])
def test_damage_replaces_nothing(model: Path, tmp_path: Path, name: str, damage: str) -> None:
    path = write(tmp_path / name, np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), np.uint8))
    (tmp_path / "b.mp4").write_bytes(b"older file")
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes(data[:half] + (b"" if damage == "cut" else bytes(len(data) - half)))
    assert name in upscale(model, path, "b.mp4", "--overwrite", code=2).stderr
    assert (tmp_path / "b.mp4").read_bytes() == b"older file"
    assert not list(tmp_path.glob(".sdsage-*"))


def test_memory_does_not_grow_with_the_length(tmp_path: Path) -> None:
    """What the verb does, with a repeater in numpy for the model; 600 frames of 256x256 would be 118 MB."""
    code = """
import re, sys
from pathlib import Path
from sdsage.media import plan_output
from sdsage.media.clip import Clip
with Clip(Path(sys.argv[1])) as clip, plan_output(sys.argv[2], video=True, count=1).stream((256, 256), clip.fps) as out:
    for time, rgb in clip.pictures():
        out.add(rgb.repeat(2, 0).repeat(2, 1), time)
print(re.search("VmHWM: *(.*) kB", Path("/proc/self/status").read_text().replace(chr(9), " "))[1])
"""
    peaks = []
    for count in (60, 600):
        path = write(tmp_path / f"{count}.mp4", soft(count, 128, 128))
        command = [sys.executable, "-P", "-c", code, str(path), str(tmp_path / f"{count}-2x.mp4")]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    assert peaks[1] - peaks[0] < 30e3  # kB


def test_a_clip_without_frames(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", soft(3, 24, 32))
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"mdat") + 4])
    with pytest.raises(BadRequest, match=r"a\.mp4"), Clip(path) as clip:
        list(clip.pictures())
