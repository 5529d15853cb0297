"""Writing MP4 and WebM through PyAV, frame by frame, and reading their tags.

Frames are sRGB; they become yuv420p in limited range with the BT.709 matrix and are tagged so. Without being
told, the converter would use BT.601 and players would show shifted colours.
"""

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sdsage.errors import BadRequest, SdsageError
from sdsage.media.codecs import CODECS, CONTAINERS, check_side, import_av
from sdsage.media.metadata import Metadata

BT709, LIMITED, FULL = 1, 1, 2  # the numbers of ISO/IEC 23091-2 and of FFmpeg's colour ranges


def padding(height: int, width: int) -> tuple[int, int]:
    """Rows and columns to add: yuv420p keeps one colour for 2 x 2 pixels, so both sizes must be even."""
    return height % 2, width % 2


class VideoWriter:
    """One file, frame by frame, in a `with` block; it is whole when the block ends without an exception.

    Args:
        codec, crf: see `choose_codec`; None takes the codec's own quality.
        size: width and height of the frames in px; an odd edge is repeated once.
        fps: frame k is shown at k / fps, unless `add` is given a time.
        time_base: seconds of one unit of the times that `add` is given.
        sound: a stream of another file whose packets `add_sound` copies.

    Raises:
        OutputError: the frames are too small for the codec. SdsageError: the encoder or the muxer failed.
    """

    def __init__(
        self,
        path: Path,
        suffix: str,
        *,
        codec: str,
        crf: int | None,
        size: tuple[int, int],
        fps: Fraction | int,
        metadata: Metadata | None,
        time_base: Fraction | None = None,
        sound: Any = None,
    ) -> None:
        self._av = import_av(suffix)
        self._suffix, self._encoder = suffix, CODECS[codec].encoder
        self._time_base = time_base or 1 / Fraction(fps)
        self._pad = padding(size[1], size[0])
        self.count = 0
        check_side(codec, *size)
        container = CONTAINERS[suffix]
        try:
            # "file:" keeps a colon in the folder's name from being read as a protocol.
            self._file = self._av.open(f"file:{path}", "w", format=container.name, options=container.options)
            self._file.flags |= self._av.container.Flags.bitexact.value  # equal frames give equal files
            if metadata:
                self._file.metadata["comment"] = metadata.to_json()
            self._stream = self._add_stream(codec, crf, size, Fraction(fps))
            self._sound = None if sound is None else self._file.add_stream_from_template(sound)
        except self._av.FFmpegError as error:
            raise self._failure(error) from error

    def _add_stream(self, codec: str, crf: int | None, size: tuple[int, int], fps: Fraction) -> Any:
        how = CODECS[codec]
        options = how.options | {"crf": str(how.crf if crf is None else crf)}
        stream = self._file.add_stream(how.encoder, rate=fps, options=options)
        stream.width, stream.height = size[0] + self._pad[1], size[1] + self._pad[0]
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        context.time_base = self._time_base
        context.colorspace = context.color_primaries = context.color_trc = BT709
        context.color_range = LIMITED
        if how.tag and self._suffix == ".mp4":
            context.codec_tag = how.tag
        return stream

    def add(self, rgb: NDArray[np.uint8], time: int | None = None) -> None:
        """The next frame, H x W x 3; `time` in units of `time_base`, else one unit after the last."""
        bottom, right = self._pad
        padded = np.pad(rgb, ((0, bottom), (0, right), (0, 0)), mode="edge") if bottom or right else rgb
        try:
            frame = _yuv(self._av, padded, self.count if time is None else time, self._time_base)
            self._file.mux(self._stream.encode(frame))
        except self._av.FFmpegError as error:
            raise self._failure(error) from error
        self.count += 1

    def add_sound(self, packet: Any) -> None:
        """A packet of the stream that was given as `sound`."""
        packet.stream = self._sound
        try:
            self._file.mux(packet)
        except self._av.FFmpegError as error:
            raise self._failure(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            try:
                if kind is None:
                    self._file.mux(self._stream.encode())
            finally:
                self._file.close()
        except self._av.FFmpegError as failed:
            if kind is None:  # else the first exception tells more
                raise self._failure(failed) from failed

    def _failure(self, error: Exception) -> SdsageError:
        return SdsageError(f"encoding {self._suffix} with {self._encoder} failed: {error}")


def write_video(
    path: Path,
    suffix: str,
    frames: Iterable[NDArray[np.uint8]],
    *,
    codec: str,
    crf: int | None,
    size: tuple[int, int],
    fps: Fraction | int,
    metadata: Metadata | None,
) -> None:
    """Frames of H x W x 3 at exactly `fps`. Raises what `VideoWriter` raises."""
    with VideoWriter(path, suffix, codec=codec, crf=crf, size=size, fps=fps, metadata=metadata) as writer:
        for rgb in frames:
            writer.add(rgb)


def _yuv(av: ModuleType, rgb: NDArray[np.uint8], time: int, time_base: Fraction) -> Any:
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24").reformat(
        format="yuv420p",
        src_colorspace=BT709,
        dst_colorspace=BT709,
        src_color_range=FULL,
        dst_color_range=LIMITED,
        interpolation="BICUBIC",
    )
    frame.pts, frame.time_base = time, time_base
    return frame


def read_tags(path: Path) -> dict[str, str]:
    """Container tags of a video. Raises BadRequest when PyAV can't read the file either."""
    av = import_av(path.suffix or str(path))
    try:
        with av.open(f"file:{path}", metadata_errors="replace") as container:
            return dict(container.metadata)
    except av.FFmpegError as error:
        raise BadRequest(f"{path} is neither an image nor a video that can be read: {error}") from error
