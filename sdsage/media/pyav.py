"""MP4 and WebM through PyAV, which is imported here only, when one of them is asked for.

Frames are sRGB; they become yuv420p in limited range with the BT.709 matrix and are tagged so. Without being
told, the converter would use BT.601 and players would show shifted colours.
"""

from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdsage.errors import BadRequest, MissingExtra, OutputError, SdsageError
from sdsage.media.metadata import Metadata

_BT709, _LIMITED, _FULL = 1, 1, 2  # the numbers of ISO/IEC 23091-2 and of FFmpeg's colour ranges


class Codec(NamedTuple):
    """How one container is written."""

    container: str
    encoder: str
    options: dict[str, str]
    container_options: dict[str, str]


CODECS = {
    ".mp4": Codec("mp4", "libx264", {"crf": "17", "preset": "medium"}, {"movflags": "+faststart"}),
    ".webm": Codec(
        "webm", "libvpx-vp9", {"crf": "18", "b": "0", "deadline": "good", "cpu-used": "4", "row-mt": "1"}, {}
    ),
}


def _av(suffix: str) -> ModuleType:
    try:
        import av
    except ImportError as error:
        raise MissingExtra(
            f"{suffix} needs PyAV ({error}): run pip install 'sdsage[video]', "
            "or choose .webp, .gif or numbered images such as frame_%04d.png"
        ) from error
    return av


def check_encoder(suffix: str) -> None:
    """Make sure that `suffix` can be written: MissingExtra without PyAV, OutputError without the encoder."""
    av = _av(suffix)
    wanted = CODECS[suffix].encoder
    if wanted not in av.codecs_available:
        present = sorted({codec.encoder for codec in CODECS.values()} & av.codecs_available)
        raise OutputError(
            f"{suffix} needs the encoder {wanted}, which the installed PyAV {av.__version__} lacks "
            f"(present: {', '.join(present) or 'none'}): install a PyAV wheel, or choose .webp or .gif"
        )


def padding(height: int, width: int) -> tuple[int, int]:
    """Rows and columns to add: yuv420p keeps one colour for 2 x 2 pixels, so both sizes must be even."""
    return height % 2, width % 2


def write_video(path: Path, suffix: str, frames: NDArray[np.uint8], fps: int, metadata: Metadata | None) -> None:
    """Frames N x H x W x 3 at exactly `fps`; an odd edge is repeated once.

    Raises SdsageError when the encoder or the muxer fails.
    """
    av = _av(suffix)
    codec = CODECS[suffix]
    bottom, right = padding(*frames.shape[1:3])
    try:
        # "file:" keeps a colon in the folder's name from being read as a protocol.
        with av.open(f"file:{path}", "w", format=codec.container, options=codec.container_options) as container:
            container.flags |= av.container.Flags.bitexact.value  # equal frames give equal files
            if metadata:
                container.metadata["comment"] = metadata.to_json()
            stream = container.add_stream(codec.encoder, rate=fps, options=codec.options)
            stream.height, stream.width = frames.shape[1] + bottom, frames.shape[2] + right
            stream.pix_fmt = "yuv420p"
            context = stream.codec_context
            context.time_base = Fraction(1, fps)
            context.colorspace = context.color_primaries = context.color_trc = _BT709
            context.color_range = _LIMITED
            for index, rgb in enumerate(frames):
                padded = np.pad(rgb, ((0, bottom), (0, right), (0, 0)), mode="edge")
                container.mux(stream.encode(_yuv(av, padded, index, fps)))
            container.mux(stream.encode())
    except av.FFmpegError as error:
        raise SdsageError(f"encoding {suffix} with {codec.encoder} failed: {error}") from error


def _yuv(av: ModuleType, rgb: NDArray[np.uint8], index: int, fps: int) -> Any:
    frame = av.VideoFrame.from_ndarray(rgb, format="rgb24").reformat(
        format="yuv420p",
        src_colorspace=_BT709,
        dst_colorspace=_BT709,
        src_color_range=_FULL,
        dst_color_range=_LIMITED,
        interpolation="BICUBIC",
    )
    frame.pts, frame.time_base = index, Fraction(1, fps)
    return frame


def read_tags(path: Path) -> dict[str, str]:
    """Container tags of a video. Raises BadRequest when PyAV can't read the file either."""
    av = _av(path.suffix or str(path))
    try:
        with av.open(f"file:{path}", metadata_errors="replace") as container:
            return dict(container.metadata)
    except av.FFmpegError as error:
        raise BadRequest(f"{path} is neither an image nor a video that can be read: {error}") from error
