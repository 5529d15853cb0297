"""Which codecs a container takes, how each is asked for, and what the installed PyAV can write."""

import os
from dataclasses import dataclass
from fractions import Fraction
from types import ModuleType
from typing import Any, NamedTuple

from sdsage.errors import BadRequest, MissingExtra, OutputError


@dataclass(frozen=True)
class Codec:
    """How one codec is written.

    Attributes:
        encoder: FFmpeg's name of the encoder.
        stream: FFmpeg's name of the codec, which a finished file has.
        crf: quality when none is asked for; lower is better and larger, from `least` to `most`.
        side: fewest pixels of a side. With PyAV 18.1 x265 damages memory below 32, and SVT-AV1 hangs below 48.
        tag: four letters that MP4 players look for, when they are not FFmpeg's own.
    """

    encoder: str
    stream: str
    crf: int
    least: int
    most: int
    options: dict[str, str]
    side: int = 1
    tag: str = ""


class Container(NamedTuple):
    """A kind of file.

    Attributes:
        name: FFmpeg's.
        codecs: what it takes, the default first.
        options: of the muxer.
        sound: FFmpeg's names of the sound codecs that can be copied into it and are played.
    """

    name: str
    codecs: tuple[str, ...]
    options: dict[str, str]
    sound: tuple[str, ...]


CODECS = {
    # 0 would be lossless, in a profile that browsers and most players do not show
    "h264": Codec("libx264", "h264", 17, 1, 51, {"preset": "medium"}),
    # One thread: with more, one file in a hundred comes out damaged (PyAV 18.1). Apple knows HEVC by this tag only.
    "h265": Codec(
        "libx265",
        "hevc",
        20,
        0,
        51,
        {"preset": "medium", "x265-params": "log-level=none:pools=none:frame-threads=1"},
        64,
        "hvc1",
    ),
    "vp9": Codec("libvpx-vp9", "vp9", 18, 0, 63, {"b": "0", "deadline": "good", "cpu-used": "4", "row-mt": "1"}),
    "av1": Codec("libsvtav1", "av1", 24, 1, 63, {"preset": "6"}, 64),
}
CONTAINERS = {
    ".mp4": Container("mp4", ("h264", "h265", "av1"), {"movflags": "+faststart"}, ("aac", "mp3", "ac3", "opus")),
    ".webm": Container("webm", ("vp9", "av1"), {}, ("opus", "vorbis")),
}


def import_av(what: str) -> ModuleType:
    """PyAV. Raises MissingExtra, saying that `what` needs it."""
    # errors only: SVT-AV1 else tells its settings on stderr, and it looks once, when it is first used
    os.environ.setdefault("SVT_LOG", "1")
    try:
        import av
    except ImportError as error:
        raise MissingExtra(
            f"{what} needs PyAV ({error}): run pip install 'sdsage[video]', "
            "or choose .webp, .gif or numbered images such as frame_%04d.png"
        ) from error
    return av


def choose_codec(suffix: str, name: str | None, crf: int | None) -> str:
    """The codec of a file that ends in `suffix`; `name` and `crf` are what was asked for, or None.

    Raises BadRequest for one that does not fit, MissingExtra without PyAV, OutputError without the encoder.
    """
    allowed = CONTAINERS[suffix].codecs
    chosen = name or allowed[0]
    if chosen not in allowed:
        fits = [other for other, container in CONTAINERS.items() if chosen in container.codecs]
        where = f", or name the file {' or '.join(fits)}" if fits else ""
        raise BadRequest(f"codec {chosen} does not go into {suffix}: use {' or '.join(allowed)}{where}")
    codec = CODECS[chosen]
    if crf is not None and not codec.least <= crf <= codec.most:
        raise BadRequest(
            f"crf {crf} is not possible with {chosen}: it takes {codec.least} (best) to {codec.most}, "
            f"and {codec.crf} when left out"
        )
    av = import_av(suffix)
    if codec.encoder not in av.codecs_available:
        present = sorted({c.encoder for c in CODECS.values()} & av.codecs_available)
        others = [n for n in allowed if CODECS[n].encoder in av.codecs_available]
        advice = f"choose --codec {others[0]}" if others else "choose .webp or .gif"
        raise OutputError(
            f"{suffix} needs the encoder {codec.encoder}, which the installed PyAV {av.__version__} lacks "
            f"(present: {', '.join(present) or 'none'}): install a PyAV wheel, or {advice}"
        )
    return chosen


def check_side(name: str, width: int, height: int) -> None:
    """Raises OutputError for frames that are too small for a codec."""
    least = CODECS[name].side
    if min(width, height) < least:
        raise OutputError(f"codec {name} needs {least}x{least} px or more, not {width}x{height}: use another")


def why_not(av: ModuleType, codec: Codec) -> str:
    """Empty when the encoder makes a frame here; otherwise the reason, in a few words."""
    if codec.encoder not in av.codecs_available:
        return f"not in this build of PyAV {av.__version__}"
    try:
        context = av.CodecContext.create(codec.encoder, "w")
        context.width = context.height = 128
        context.pix_fmt, context.framerate, context.time_base = "yuv420p", 16, Fraction(1, 16)
        context.options = codec.options
        frame = av.VideoFrame(128, 128, "yuv420p")
        frame.pts = 0
        made = [*context.encode(frame), *context.encode(None)]
    except (av.FFmpegError, ValueError) as error:
        return f"does not work here: {error}"
    return "" if made else "does not work here: it made nothing"


def listing() -> list[dict[str, Any]]:
    """Every codec as plain values; each encoder is tried with a frame. Raises MissingExtra without PyAV."""
    av = import_av("writing .mp4 and .webm")
    rows = []
    for name, codec in CODECS.items():
        reason = why_not(av, codec)
        files = [suffix for suffix, container in CONTAINERS.items() if name in container.codecs]
        rows.append(
            {
                "codec": name,
                "encoder": codec.encoder,
                "files": files,
                "default_of": [s for s in files if CONTAINERS[s].codecs[0] == name],
                "crf": codec.crf,
                "crf_range": [codec.least, codec.most],
                "present": not reason,
                "why_not": reason,
            }
        )
    return rows
