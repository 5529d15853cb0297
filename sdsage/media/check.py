"""Files opened again after writing: is in them what was to be written? What fails here is an error, never a result."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from sdsage.errors import SdsageError
from sdsage.media.codecs import CODECS, import_av
from sdsage.media.load import DAMAGED
from sdsage.media.stills import STILL_FORMATS

_TICK = 0.0011  # seconds; WebM counts in milliseconds, and so does the shortest other clock


class Expected(NamedTuple):
    """What a moving file must hold.

    Attributes:
        frames: how many; size: width and height in px as stored.
        fps: frames per second; None where they are not evenly spaced.
    """

    frames: int
    size: tuple[int, int]
    fps: Fraction | None


def check_video(path: Path, suffix: str, codec: str, expected: Expected) -> None:
    """Decodes every frame of an MP4 or WebM file. Raises SdsageError with all that is not as expected."""
    av = import_av(suffix)
    wrong: list[str] = []
    try:
        with av.open(f"file:{path}") as file:
            streams = file.streams.video
            if len(streams) != 1:
                raise _failed(suffix, [f"it has {len(streams)} video streams, not 1"])
            context = streams[0].codec_context
            streams[0].thread_type = "AUTO"
            _compare(wrong, "codec", _stream_codec(context), CODECS[codec].stream)
            _compare(wrong, "pixel format", context.pix_fmt, "yuv420p")
            times = []
            for frame in file.decode(video=0):
                times.append(float(frame.time))
                if (frame.width, frame.height) != expected.size:
                    _compare(wrong, f"size of frame {len(times)}", (frame.width, frame.height), expected.size)
                    break
            else:
                _compare(wrong, "number of frames", len(times), expected.frames)
    except av.FFmpegError as error:
        raise _failed(suffix, [f"it can't be read: {error}"]) from error
    if expected.fps is not None and not wrong:
        wrong += _uneven(times, float(expected.fps))
    if suffix == ".mp4" and not _index_first(path):
        wrong.append("its index is at the end, so it can't play before it is loaded whole")
    if wrong:
        raise _failed(suffix, wrong)


def _stream_codec(context: object) -> str:
    """FFmpeg's name of the codec; the context has that of the decoder, such as libdav1d."""
    return str(getattr(context, "codec").canonical_name)  # noqa: B009 - PyAV has no types


def _uneven(times: list[float], fps: float) -> list[str]:
    off = [k for k, time in enumerate(times) if abs(time - times[0] - k / fps) > _TICK]
    if not off:
        return []
    at = off[0]
    return [f"frame {at + 1} is shown at {times[at]:.4f} s, not at {at / fps:.4f} s ({fps:g} frames per second)"]


def _index_first(path: Path) -> bool:
    """Whether the index of an MP4 (moov) comes before the pictures (mdat)."""
    with path.open("rb") as file:
        while len(head := file.read(8)) == 8:
            size, name = int.from_bytes(head[:4]), head[4:]
            if name in (b"moov", b"mdat"):
                return name == b"moov"
            if size == 1:  # a 64-bit size follows
                size = int.from_bytes(file.read(8)) - 8
            if size < 8:
                break
            file.seek(size - 8, 1)
    return False


def check_clip(path: Path, suffix: str, expected: Expected, milliseconds: int) -> None:
    """Decodes a GIF or an animated WebP, which store equal frames in a row once: the time they take must be right."""

    def look(image: Image.Image) -> list[str]:
        wrong: list[str] = []
        count, total = getattr(image, "n_frames", 1), 0
        for index in range(count):
            image.seek(index)
            image.load()
            _compare(wrong, f"size of frame {index + 1}", image.size, expected.size)
            total += int(image.info.get("duration", 0))
        if not 1 <= count <= expected.frames:
            wrong.append(f"number of frames is {count}, not {expected.frames}")
        if expected.frames > 1 and count > 1:
            _compare(wrong, "length in ms", total, milliseconds)
        return wrong

    _look(path, suffix, {".gif": "GIF", ".webp": "WEBP"}[suffix], look)


def check_still(path: Path, suffix: str, frame: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    """Decodes one image; a PNG must hold the very pixels of `frame` (H x W x 3)."""

    def look(image: Image.Image) -> list[str]:
        wrong: list[str] = []
        _compare(wrong, "size", image.size, (frame.shape[1], frame.shape[0]))
        _compare(wrong, "pixel format", image.mode, "RGB")
        pixels = np.asarray(image)
        if not wrong and image.format == "PNG" and not np.array_equal(pixels, frame):
            wrong.append("its pixels are not those that were written")
        return wrong

    _look(path, suffix, STILL_FORMATS[suffix], look)


def _look(path: Path, suffix: str, format: str, look: Callable[[Image.Image], list[str]]) -> None:
    try:
        with Image.open(path, formats=[format]) as image:
            wrong = look(image)
    except DAMAGED as error:
        raise _failed(suffix, [f"it can't be read: {error}"]) from error
    if wrong:
        raise _failed(suffix, wrong)


def _compare(wrong: list[str], what: str, found: object, expected: object) -> None:
    if found != expected:
        wrong.append(f"{what} is {_shown(found)}, not {_shown(expected)}")


def _shown(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _failed(suffix: str, wrong: list[str]) -> SdsageError:
    return SdsageError(f"the {suffix} file was written and does not hold what it should: {'; '.join(wrong)}")
