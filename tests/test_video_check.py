"""Files are opened again after writing: what does not hold what it should is an error, and older files stay."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import sdsage
from sdsage._fps import model_fps
from sdsage.cli.app import build_app
from sdsage.errors import BadRequest, OutputError, SdsageError
from sdsage.media import check, codecs, plan_output, pyav, stills

FRAMES = np.random.default_rng(0).integers(0, 256, (4, 64, 96, 3), np.uint8)
VIDEOS = [(suffix, codec) for suffix, container in codecs.CONTAINERS.items() for codec in container.codecs]


def write(path: Path, frames: Any, fps: int = 16, codec: str = "", size: tuple[int, int] = (96, 64)) -> None:
    codec = codec or codecs.CONTAINERS[path.suffix].codecs[0]
    pyav.write_video(path, path.suffix, frames, codec=codec, crf=None, size=size, fps=fps, metadata=None)


def expected(frames: int = 4, size: tuple[int, int] = (96, 64), fps: int = 16) -> check.Expected:
    return check.Expected(frames, size, Fraction(fps))


# ---- codecs


@pytest.mark.parametrize(("suffix", "codec"), VIDEOS)
@pytest.mark.parametrize("fps", [16, 24])
def test_every_codec(tmp_path: Path, suffix: str, codec: str, fps: int) -> None:
    path = tmp_path / f"out{suffix}"
    output = plan_output(path, video=True, count=4, codec=codec)
    assert output.write(FRAMES, fps=fps) == [path]
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        assert stream.codec_context.codec.canonical_name == codecs.CODECS[codec].stream
        assert stream.codec_context.pix_fmt == "yuv420p"
        assert stream.average_rate == fps
        assert len(list(file.decode(video=0))) == 4
        if codec == "h265":
            assert stream.codec_context.codec_tag == "hvc1"


@pytest.mark.parametrize(("suffix", "codec"), VIDEOS)
def test_a_larger_crf_gives_a_smaller_file(tmp_path: Path, suffix: str, codec: str) -> None:
    sizes = []
    for crf in (10, 45):
        path = tmp_path / f"{crf}{suffix}"
        plan_output(path, video=True, count=4, codec=codec, crf=crf).write(FRAMES)
        sizes.append(path.stat().st_size)
    assert sizes[1] < sizes[0] / 2


@pytest.mark.parametrize(
    ("name", "codec", "crf", "words"),
    [
        ("a.mp4", "vp9", None, ["vp9", ".mp4", "h264", ".webm"]),
        ("a.webm", "h264", None, ["h264", ".webm", "vp9", ".mp4"]),
        ("a.mp4", "h264", 52, ["crf 52", "1 (best) to 51", "17"]),
        ("a.mp4", None, 0, ["crf 0", "1 (best) to 51"]),
        ("a.webm", "av1", 64, ["crf 64", "63"]),
    ],
)
def test_codecs_that_do_not_fit(
    tmp_path: Path, name: str, codec: str | None, crf: int | None, words: list[str]
) -> None:
    with pytest.raises(BadRequest) as caught:
        plan_output(tmp_path / name, video=True, count=5, codec=codec, crf=crf)
    assert all(word in str(caught.value) for word in words)


def test_small_frames_are_refused_where_the_encoder_is_not_safe(tmp_path: Path) -> None:
    for codec in ("h265", "av1"):
        with pytest.raises(OutputError, match=rf"codec {codec} needs 64x64 px or more, not 96x62"):
            plan_output(tmp_path / "a.mp4", video=True, count=2, codec=codec).write(FRAMES[:2, :62])
    assert list(tmp_path.iterdir()) == []


def test_the_listing_tries_each_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row["codec"] for row in codecs.listing() if row["present"]] == list(codecs.CODECS)
    broken = codecs.CODECS["h264"].__class__("libx264", "h264", 17, 1, 51, {"preset": "no such preset"})
    monkeypatch.setitem(codecs.CODECS, "h264", broken)
    monkeypatch.setattr(av, "codecs_available", {"libx264", "libvpx-vp9"})
    states = {row["codec"]: (row["present"], row["why_not"]) for row in codecs.listing()}
    assert states["vp9"] == (True, "")
    assert states["h264"][1].startswith("does not work here")
    assert states["h265"][1].startswith("not in this build")


def test_the_table_of_options_has_these_codecs() -> None:
    from sdsage.cli.options import CODECS, by_key

    assert tuple(codecs.CODECS) == CODECS
    assert by_key()["crf"].default_text.endswith(", ".join(f"{n} {c.crf}" for n, c in codecs.CODECS.items()))


@pytest.mark.parametrize("verb", ["vid-gen", "upscale"])
def test_codec_list(verb: str) -> None:
    plain = CliRunner().invoke(build_app(only=verb), [verb, "--codec", "list"])
    assert plain.exit_code == 0, plain.output
    lines = plain.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(codecs.CODECS)
    assert all("present" in line for line in lines)
    found = json.loads(CliRunner().invoke(build_app(only=verb), [verb, "--codec", "list", "--json", "-q"]).stdout)
    assert [row["codec"] for row in found["codecs"]] == list(codecs.CODECS)


# ---- what is found


@pytest.mark.parametrize(("suffix", "codec"), VIDEOS)
def test_whole_files_pass(tmp_path: Path, suffix: str, codec: str) -> None:
    write(tmp_path / f"a{suffix}", FRAMES, codec=codec)
    check.check_video(tmp_path / f"a{suffix}", suffix, codec, expected())


@pytest.mark.parametrize("suffix", [".mp4", ".webm"])
@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (expected(frames=5), "number of frames is 4, not 5"),
        (expected(frames=3), "number of frames is 4, not 3"),
        (expected(fps=24), "frame 2 is shown at 0.06.* s, not at 0.0417 s .24 frames per second."),
        (expected(size=(96, 66)), "size of frame 1 is 96x64, not 96x66"),
    ],
)
def test_differences_are_found(tmp_path: Path, suffix: str, wanted: check.Expected, words: str) -> None:
    path = tmp_path / f"a{suffix}"
    write(path, FRAMES)
    with pytest.raises(SdsageError, match=words) as caught:
        check.check_video(path, suffix, codecs.CONTAINERS[suffix].codecs[0], wanted)
    assert caught.value.exit_code == 1


def test_another_codec_or_pixel_format_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w", options={"movflags": "+faststart"}) as file:
        stream = file.add_stream("libx264", rate=16)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv444p"
        for rgb in FRAMES:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(rgb, format="rgb24")))
        file.mux(stream.encode())
    with pytest.raises(SdsageError, match="pixel format is yuv444p, not yuv420p"):
        check.check_video(path, ".mp4", "h264", expected())
    write(path, FRAMES)
    with pytest.raises(SdsageError, match="codec is h264, not av1"):
        check.check_video(path, ".mp4", "av1", expected())


def test_an_index_at_the_end_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codecs.CONTAINERS, ".mp4", codecs.CONTAINERS[".mp4"]._replace(options={}))
    write(tmp_path / "a.mp4", FRAMES)
    with pytest.raises(SdsageError, match="its index is at the end"):
        check.check_video(tmp_path / "a.mp4", ".mp4", "h264", expected())


@given(suffix=st.sampled_from([".mp4", ".webm", ".gif", ".webp"]), keep=st.floats(0, 0.98))
def test_cut_files_never_pass(tmp_path_factory: pytest.TempPathFactory, suffix: str, keep: float) -> None:
    path = tmp_path_factory.mktemp("cut") / f"a{suffix}"
    plan_output(path, video=True, count=4).write(FRAMES)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(SdsageError, match="does not hold what it should"):
        look(path)


def look(path: Path) -> None:
    if path.suffix in codecs.CONTAINERS:
        check.check_video(path, path.suffix, codecs.CONTAINERS[path.suffix].codecs[0], expected())
    else:
        check.check_clip(path, path.suffix, expected(), sum(stills.frame_times(4, 16, 1000)))


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_clips_of_another_length_are_found(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    plan_output(path, video=True, count=4).write(FRAMES)
    with pytest.raises(SdsageError, match=r"length in ms is 250, not 500|length in ms is 2.0, not 500"):
        check.check_clip(path, suffix, expected(), 500)
    with pytest.raises(SdsageError, match="number of frames is 4, not 3"):
        check.check_clip(path, suffix, expected(frames=3), 250)


def test_stills(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    stills.write_still(path, ".png", FRAMES[0], None)
    check.check_still(path, ".png", FRAMES[0])
    with pytest.raises(SdsageError, match="pixels are not those"):
        check.check_still(path, ".png", FRAMES[1])
    with pytest.raises(SdsageError, match="size is 96x64, not 95x64"):
        check.check_still(path, ".png", FRAMES[0, :, :95])
    with pytest.raises(SdsageError, match="can't be read"):
        check.check_still(path, ".jpg", FRAMES[0])


# ---- what happens then


@pytest.mark.parametrize("name", ["out.mp4", "out.webm"])
def test_an_encoder_that_loses_a_frame_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The real encoder, from which one packet is taken away."""
    (tmp_path / name).write_bytes(b"older file")
    real = pyav.VideoWriter.add

    def add(self: pyav.VideoWriter, rgb: Any, time: int | None = None) -> None:
        if self.count == 2:
            self.count += 1
        else:
            real(self, rgb, time)

    monkeypatch.setattr(pyav.VideoWriter, "add", add)
    with pytest.raises(SdsageError, match="number of frames is 3, not 4") as caught:
        plan_output(tmp_path / name, video=True, count=4, overwrite=True).write(FRAMES)
    assert caught.value.exit_code == 1
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == b"older file"


@pytest.mark.parametrize("name", ["out.gif", "out.webp", "out_%d.png", "out_%d.jpg", "out.mp4"])
def test_a_file_that_is_damaged_on_its_way_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A disk that loses the second half of the last file."""
    first = tmp_path / name.replace("%d", "0")
    first.write_bytes(b"older file")

    def lossy(real: Any) -> Any:
        def write(path: Path, *args: Any, **options: Any) -> Any:
            made = real(path, *args, **options)
            if len(list(path.parent.glob(".sdsage-*"))) == (4 if "%" in name else 1):
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            return made

        return write

    for module, function in ((stills, "write_gif"), (stills, "write_webp_clip"), (stills, "write_still")):
        monkeypatch.setattr(module, function, lossy(getattr(module, function)))
    monkeypatch.setattr(pyav, "write_video", lossy(pyav.write_video))
    with pytest.raises(SdsageError, match="does not hold what it should"):
        plan_output(tmp_path / name, video=True, count=4, overwrite=True).write(FRAMES)
    assert list(tmp_path.iterdir()) == [first]
    assert first.read_bytes() == b"older file"


# ---- speed


@pytest.mark.parametrize(
    ("name", "fps"),
    [("Wan 2.x", 16), ("Wan 2.2 I2V", 16), ("Wan 2.2 TI2V", 24), ("LTX", 24), ("LTX-Video 2", 24), ("SVD", 16)],
)
def test_speed_of_a_model(name: str, fps: int) -> None:
    assert model_fps(name) == fps


SMALL = ["-W", "64", "-H", "64", "--video-frames", "5", "--steps", "1", "-t", "1", "-p", "a cat"]


@pytest.mark.parametrize(
    ("preset", "more", "fps", "why"),
    [
        ("tiny-random", ["--high-noise-steps", "1"], 16, "the speed of Wan 2.x"),
        ("tiny-ti2v", [], 24, "the speed of Wan 2.2 TI2V"),
        ("tiny-ti2v", ["--fps", "8"], 8, "as asked"),
    ],
)
def test_the_model_decides_the_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str, more: list[str], fps: int, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["vid-gen", "--preset", preset, *SMALL, *more, "-o", "a.mp4"]
    done = CliRunner().invoke(build_app(only="vid-gen"), command)
    assert done.exit_code == 0, done.output
    assert f"5 frames, {fps} frames per second, {why}" in done.stderr
    with av.open("a.mp4") as file:
        assert file.streams.video[0].average_rate == fps
    metadata = sdsage.media.read_metadata("a.mp4")
    assert metadata is not None
    assert metadata.data["fps"] == fps
    assert f"FPS: {fps}" in metadata.parameters
    done = CliRunner().invoke(build_app(only="vid-gen"), [*command, "--overwrite", "--json", "-q"])
    found = json.loads(done.stdout)
    assert (found["fps"], found["fps_why"]) == (fps, why)


def test_a_speed_in_a_config_file_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("fps = 12\n")
    command = ["vid-gen", "--preset", "tiny-ti2v", *SMALL, "--config", "run.toml", "-o", "a.webm", "--json", "-q"]
    found = json.loads(CliRunner().invoke(build_app(only="vid-gen"), command).stdout)
    assert (found["fps"], found["fps_why"]) == (12, "as asked")
