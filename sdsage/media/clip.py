"""Reading a video frame by frame, so that its length does not matter for memory."""

from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from sdsage.errors import BadRequest
from sdsage.media.codecs import import_av
from sdsage.media.load import DAMAGED, formats
from sdsage.media.pyav import BT709, FULL, LIMITED

_BT601, _UNSPECIFIED = 5, 2
_HD = 720  # rows from which on videos without a tag are BT.709
_JITTER = 0.0011  # seconds; WebM rounds times to milliseconds


class Picture(NamedTuple):
    """One frame: H x W x 3 uint8, and when it is shown in units of `Clip.time_base`."""

    time: int
    rgb: NDArray[np.uint8]


class Clip:
    """A video that PyAV reads, or an animated GIF or WebP, in a `with` block.

    Attributes:
        count: frames, as the file lists them.
        fps: frames per second; of an uneven clip the mean.
        time_base: seconds of one unit of `Picture.time` in an uneven clip; None in an even one, whose k-th frame is at
            k / fps.
        sound: the stream of the first sound track, or None.
        notes: one sentence for each thing in the file that is not taken.

    Raises:
        BadRequest: naming the file, which is not a video, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self._times = _times(path, self.notes)
        self.count = len(self._times.shown)
        self.fps, self.time_base = _speed(self._times)
        self.sound: Any = None
        self._file: Any = None

    def __enter__(self) -> Self:
        if self._times.av is not None:
            self._file = _open(self._times.av, self.path)
            self.sound = next(iter(self._file.streams.audio), None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def pictures(self, on_sound: Callable[[Any], None] | None = None) -> Iterator[Picture]:
        """All frames in the order in which they are shown, once; packets of `sound` go to `on_sound` on the way."""
        source = self._animation() if self._file is None else self._video(on_sound)
        index, shape = -1, None
        for index, (time, rgb) in enumerate(source):
            shape = shape or rgb.shape
            if rgb.shape != shape:
                raise BadRequest(f"{self.path}: frame {index + 1} has another size than those before it")
            yield Picture(index if self.time_base is None else time, rgb)
        if index < 0:
            raise BadRequest(f"{self.path} has no frame that can be read")

    def _animation(self) -> Iterator[Picture]:
        with Image.open(self.path, formats=formats()) as image:
            for index, time in enumerate(self._times.shown):
                image.seek(index)
                layer = image.convert("RGBA")
                below = Image.new("RGBA", layer.size, (255, 255, 255, 255))
                below.alpha_composite(layer)
                yield Picture(time, np.asarray(below.convert("RGB")))

    def _video(self, on_sound: Callable[[Any], None] | None) -> Iterator[Picture]:
        av, first = self._times.av, self._times.first
        assert av is not None
        stream = self._file.streams.video[0]
        stream.thread_type = "AUTO"
        try:
            for packet in self._file.demux([stream] if on_sound is None else [stream, self.sound]):
                if packet.stream is stream:
                    for frame in packet.decode():
                        yield Picture(frame.pts - first, _rgb(frame))
                elif packet.dts is not None and on_sound is not None:
                    early = int(first * self._times.unit / packet.time_base)
                    packet.pts, packet.dts = packet.pts - early, packet.dts - early
                    on_sound(packet)
        except av.FFmpegError as error:
            raise BadRequest(f"{self.path} is damaged: {error}") from error


class _Times(NamedTuple):
    """When frames are shown, in units of `unit` seconds after `first`, sorted; `av` is None for an animated image."""

    shown: list[int]
    unit: Fraction
    fps: Fraction
    first: int = 0
    av: ModuleType | None = None


def kind_of(path: Path) -> Literal["picture", "animation", "video"]:
    """What a file is; a video is what Pillow does not know."""
    try:
        with Image.open(path, formats=formats()) as image:
            moves = image.format in ("GIF", "WEBP", "PNG") and getattr(image, "n_frames", 1) > 1
    except UnidentifiedImageError:
        return "video"
    except (*DAMAGED, Image.DecompressionBombError):
        return "picture"  # load_image says what is wrong
    return "animation" if moves else "picture"


def _times(path: Path, notes: list[str]) -> _Times:
    try:
        with Image.open(path, formats=formats()) as image:
            durations = []
            for index in range(getattr(image, "n_frames", 1)):
                image.seek(index)
                image.load()  # an animated WebP knows the time after decoding only
                durations.append(max(1, round(image.info.get("duration", 0))))
    except UnidentifiedImageError:
        return _video_times(path, notes)
    except DAMAGED as error:
        raise BadRequest(f"{path} can't be read: {error}") from error
    shown = [sum(durations[:k]) for k in range(len(durations))]
    return _Times(shown, Fraction(1, 1000), Fraction(1000 * len(durations), sum(durations)))


def _video_times(path: Path, notes: list[str]) -> _Times:
    """Walks over the packets, which costs no decoding."""
    av = import_av(f"reading {path.name}")
    with _open(av, path) as file:
        if not file.streams.video:
            raise BadRequest(f"{path} has no pictures in it: a video or a picture is needed")
        stream = file.streams.video[0]
        left_out = len(file.streams) - 1 - bool(file.streams.audio)
        if left_out:
            notes.append(f"{path} has {left_out} more streams than one of pictures and one of sound: they are left out")
        try:
            stamps = sorted(p.pts for p in file.demux(stream) if p.size and p.pts is not None and not p.is_discard)
        except av.FFmpegError as error:
            raise BadRequest(f"{path} is damaged: {error}") from error
        if not stamps:
            raise BadRequest(f"{path} has no frame that can be read")
        rate = Fraction(stream.average_rate or stream.guessed_rate or len(stamps))
        end, seconds = float((stamps[-1] - stamps[0]) * stream.time_base + 1 / rate), _seconds(stream)
        if stream.frames > len(stamps) or seconds - end > 2 / rate + _JITTER:
            whole = (
                f"{len(stamps)} of {stream.frames} frames" if stream.frames else f"{end:.2f} of {seconds:.2f} seconds"
            )
            raise BadRequest(f"{path} is cut short: it has {whole}")
        return _Times([t - stamps[0] for t in stamps], Fraction(stream.time_base), rate, stamps[0], av)


def _seconds(stream: Any) -> float:
    """How long a stream says that it is, in Matroska's tag "00:00:01.500"; 0 where it does not say."""
    try:
        hours, minutes, seconds = stream.metadata.get("DURATION", "").split(":")
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    except ValueError:
        return 0.0


def _speed(times: _Times) -> tuple[Fraction, Fraction | None]:
    """Frames per second, and None when the frames are evenly spaced, else the unit of their times."""
    shown, unit = times.shown, times.unit
    spread, rates = max(_JITTER, float(unit)), [times.fps]
    if times.av is None:  # a GIF counts in 10 ms, so the mean of a few frames is not the speed that was meant
        spread, rates = 0.0101, [Fraction(round(times.fps)), times.fps]
    for fps in rates:
        if fps > 0 and all(abs(float(t * unit) - float(k / fps)) <= spread for k, t in enumerate(shown)):
            return fps, None
    return times.fps, unit


def _open(av: ModuleType, path: Path) -> Any:
    try:
        return av.open(f"file:{path}", metadata_errors="replace")
    except av.FFmpegError as error:
        raise BadRequest(f"{path} is neither a picture nor a video that can be read: {error}") from error


def _rgb(frame: Any) -> NDArray[np.uint8]:
    """H x W x 3, upright, from the colours that the frame is tagged with."""
    matrix = frame.colorspace
    if matrix == _UNSPECIFIED:
        matrix = BT709 if frame.height >= _HD else _BT601
    full = frame.color_range == FULL or frame.format.name.startswith("yuvj")
    shown = frame.reformat(
        format="rgb24",
        src_colorspace=matrix,
        dst_colorspace=matrix,
        src_color_range=FULL if full else LIMITED,
        dst_color_range=FULL,
    )
    turns = round(frame.rotation / 90) % 4  # a telephone's video stored sideways
    pixels: NDArray[np.uint8] = np.ascontiguousarray(np.rot90(shown.to_ndarray(), turns))
    return pixels


def sound_name(sound: Any) -> str:
    """FFmpeg's name of the codec of a sound track."""
    return str(sound.codec_context.codec.canonical_name)
