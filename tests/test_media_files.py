"""Every container, read back through a decoder: codec, format, size, speed, frame count, colours, pixels."""

import itertools
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from sdsage.errors import BadRequest
from sdsage.media import plan_output
from sdsage.media.stills import frame_times

PATCHES = np.array(
    [
        [255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [0, 0, 0], [128, 128, 128],
        [255, 255, 0], [0, 255, 255], [255, 0, 255], [200, 100, 50], [20, 60, 180], [240, 200, 180],
    ],
    np.uint8,
)  # fmt: skip


def clip(count: int, height: int, width: int) -> NDArray[np.uint8]:
    """Soft moving waves, N x H x W x 3; no two frames are equal."""
    t, y, x = np.mgrid[0:count, 0:height, 0:width].astype(np.float32)
    red, green = np.sin(x / 31 + t / 2), np.cos(y / 23 - t / 3)
    return np.stack([127 + 90 * red, 127 + 90 * green, 127 + 90 * red * green], axis=-1).astype(np.uint8)


def write(path: Path, frames: NDArray[np.uint8], fps: int = 16) -> list[str]:
    output = plan_output(path, video=True, count=len(frames))
    assert output.write(frames, fps=fps) == [path]
    return output.notes


def read_av(path: Path) -> NDArray[np.uint8]:
    """Frames as a player shows them, from BT.709 in limited range."""
    tags = {"src_colorspace": 1, "dst_colorspace": 1, "src_color_range": 1, "dst_color_range": 2}
    with av.open(str(path)) as container:
        return np.stack([f.reformat(format="rgb24", **tags).to_ndarray() for f in container.decode(video=0)])


def read_pillow(path: Path) -> tuple[NDArray[np.uint8], list[int]]:
    """Frames and how many milliseconds each lasts."""
    frames, times = [], []
    with Image.open(path) as image:
        for index in range(getattr(image, "n_frames", 1)):
            image.seek(index)
            image.load()  # an animated WebP knows the time after decoding only
            frames.append(np.asarray(image.convert("RGB")))
            times.append(image.info["duration"])
    return np.stack(frames), times


def rmse(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> float:
    return float(np.sqrt(np.mean((a.astype(np.float64) - b) ** 2)))


def boxes(path: Path) -> list[bytes]:
    """Names of an MP4's outermost boxes in file order."""
    data, names, at = path.read_bytes(), [], 0
    while at < len(data):
        names.append(data[at + 4 : at + 8])
        at += int.from_bytes(data[at : at + 4])
    return names


@pytest.mark.parametrize(("suffix", "codec"), [(".mp4", "h264"), (".webm", "vp9")])
@pytest.mark.parametrize("fps", [1, 16, 24, 30, 60])
def test_video_stream(tmp_path: Path, suffix: str, codec: str, fps: int) -> None:
    path = tmp_path / f"out{suffix}"
    frames = clip(9, 48, 80)
    assert write(path, frames, fps) == []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        assert context.name == codec
        assert context.pix_fmt == "yuv420p"
        assert (context.width, context.height) == (80, 48)
        assert stream.average_rate == Fraction(fps)
        assert (context.colorspace, context.color_primaries, context.color_trc, context.color_range) == (
            1,
            1,
            1,
            1,
        )
        decoded = list(container.decode(video=0))
        assert container.duration == pytest.approx(9e6 / fps, abs=1500)  # microseconds; WebM counts in ms
    times = [frame.time for frame in decoded]
    assert times == pytest.approx([k / fps for k in range(9)], abs=1e-3)
    assert rmse(read_av(path), frames) < 3


def test_mp4_starts_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.mp4"
    write(path, clip(5, 64, 64))
    names = boxes(path)
    assert names.index(b"moov") < names.index(b"mdat")


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".webp", ".gif"])
def test_colour_patches(tmp_path: Path, suffix: str) -> None:
    """BT.601 on one side only would move pure green by more than 20 levels."""
    path = tmp_path / f"out{suffix}"
    picture = PATCHES.reshape(3, 4, 3).repeat(32, 0).repeat(32, 1)
    write(path, np.stack([picture, np.roll(picture, 4, 1)]))
    shown = read_av(path) if suffix in (".mp4", ".webm") else read_pillow(path)[0]
    middles = shown[0][16::32, 16::32].reshape(-1, 3)
    assert np.abs(middles.astype(int) - PATCHES).max() <= 4


@pytest.mark.parametrize("suffix", [".mp4", ".webm"])
def test_odd_sizes_are_padded_and_noted(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"
    frames = clip(3, 481, 833)
    (note,) = write(path, frames)
    assert "833x481" in note
    assert "834x482" in note
    shown = read_av(path)
    assert shown.shape == (3, 482, 834, 3)
    assert rmse(shown[:, :481, :833], frames) < 3
    assert rmse(shown[:, 481, :833], frames[:, 480]) < 6


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_pillow_clip(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"
    frames = clip(17, 33, 47)
    write(path, frames, 16)
    shown, times = read_pillow(path)
    assert shown.shape == frames.shape
    assert sum(times) == pytest.approx(17e3 / 16, abs=5 if suffix == ".gif" else 1)
    assert set(times) <= ({60, 70} if suffix == ".gif" else {62, 63})
    assert rmse(shown, frames) < (8 if suffix == ".gif" else 3)
    with Image.open(path) as image:
        assert image.info["loop"] == 0


def test_gif_notes_what_it_rounds(tmp_path: Path) -> None:
    assert write(tmp_path / "a.gif", clip(3, 8, 8), 25) == []
    (rounded,) = write(tmp_path / "b.gif", clip(3, 8, 8), 16)
    assert "60 or 70 ms" in rounded
    (slowed,) = write(tmp_path / "c.gif", clip(3, 8, 8), 60)
    assert "plays at 50" in slowed
    assert read_pillow(tmp_path / "c.gif")[1] == [20, 20, 20]


def test_gif_has_one_palette(tmp_path: Path) -> None:
    path = tmp_path / "out.gif"
    write(path, clip(6, 32, 32))
    colours = np.unique(read_pillow(path)[0].reshape(-1, 3), axis=0)
    assert 64 < len(colours) <= 256


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".gif", ".webp", ".png", ".jpg"])
def test_one_frame(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"
    frames = clip(1, 16, 24)
    write(path, frames)
    if suffix in (".mp4", ".webm"):
        with av.open(str(path)) as container:
            assert container.duration == pytest.approx(1e6 / 16, abs=1000)
        shown = read_av(path)
    else:
        with Image.open(path) as image:
            shown = np.asarray(image.convert("RGB"))[None]
    assert shown.shape == frames.shape
    assert rmse(shown, frames) < 8


@pytest.mark.parametrize(("suffix", "limit"), [(".png", 0.0), (".jpg", 2.0), (".jpeg", 2.0), (".webp", 3.0)])
def test_image_sequence(tmp_path: Path, suffix: str, limit: float) -> None:
    frames = clip(17, 24, 40)
    pattern = tmp_path / "new folder" / f"frame_%04d{suffix}"
    written = plan_output(pattern, video=True, count=17, begin_index=3).write(frames)
    assert [path.name for path in written] == [f"frame_{k:04d}{suffix}" for k in range(3, 20)]
    for path, frame in zip(written, frames, strict=True):
        with Image.open(path) as image:
            assert image.format == {".png": "PNG", ".webp": "WEBP"}.get(suffix, "JPEG")
            assert rmse(np.asarray(image), frame) <= limit


def test_equal_frames_give_equal_files(tmp_path: Path) -> None:
    frames = clip(5, 32, 32)
    for suffix in (".mp4", ".webm", ".gif", ".webp"):
        write(tmp_path / f"a{suffix}", frames)
        write(tmp_path / f"b{suffix}", frames)
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_still_clip_keeps_its_length(tmp_path: Path) -> None:
    """A GIF stores equal frames once; the time they are shown must not be lost."""
    frames = np.full((10, 16, 16, 3), 200, np.uint8)
    write(tmp_path / "out.gif", frames, 10)
    shown, times = read_pillow(tmp_path / "out.gif")
    assert sum(times) == 1000
    assert np.abs(shown.astype(int) - 200).max() <= 1


@given(
    count=st.integers(1, 5),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    fps=st.integers(1, 120),
    suffix=st.sampled_from([".mp4", ".webm", ".gif", ".webp"]),
)
def test_any_small_clip(
    tmp_path_factory: pytest.TempPathFactory, count: int, height: int, width: int, fps: int, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("clip") / f"out{suffix}"
    noise = np.random.default_rng(count).integers(0, 256, (count, height, width, 3), np.uint8)
    write(path, noise, fps)
    if suffix in (".mp4", ".webm"):
        shown = read_av(path)
        assert shown.shape == (count, height + height % 2, width + width % 2, 3)
    else:
        with Image.open(path) as image:
            assert image.size == (width, height)
            assert 1 <= getattr(image, "n_frames", 1) <= count


@given(count=st.integers(1, 300), fps=st.integers(1, 240), unit=st.sampled_from([100, 1000]))
def test_frame_times_never_drift(count: int, fps: int, unit: int) -> None:
    ends = list(itertools.accumulate(frame_times(count, fps, unit)))
    assert all(abs(end - unit * (k + 1) / fps) <= 0.5 for k, end in enumerate(ends))


@pytest.mark.parametrize(
    ("frames", "fps", "text"),
    [
        (np.zeros((2, 4, 4, 3), np.float32), 16, "float32"),
        (np.zeros((4, 4, 3), np.uint8), 16, "N x H x W x 3"),
        (np.zeros((2, 4, 4, 4), np.uint8), 16, "N x H x W x 3"),
        (np.zeros((0, 4, 4, 3), np.uint8), 16, "no pixel"),
        ([1, 2], 16, "list"),
        (np.zeros((2, 4, 4, 3), np.uint8), 0, "fps=0"),
        (np.zeros((2, 4, 4, 3), np.uint8), 2.5, "fps=2.5"),
    ],
)
def test_wrong_frames_are_named(tmp_path: Path, frames: object, fps: object, text: str) -> None:
    output = plan_output(tmp_path / "out.mp4", video=True, count=2)
    with pytest.raises(BadRequest, match=text):
        output.write(frames, fps=fps)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
