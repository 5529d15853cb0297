"""`sdsage upscale`: a picture, or a video frame by frame, through an ESRGAN model."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdsage.errors import BadRequest

from .codecs import show_codecs
from .console import begin, console
from .engine import engine
from .generate import upscaled
from .job import check_inputs
from .loaded import make_upscaler
from .option import UPSCALE
from .prepare import check_mode
from .record import enlarged
from .report import Reporter
from .settings import Settings, merge

if TYPE_CHECKING:
    from sdsage import Upscaler
    from sdsage.media import Output
    from sdsage.media.clip import Clip
    from sdsage.media.pyav import VideoWriter

_VIDEO = (".mp4", ".webm")


def run(raw: Mapping[str, Any]) -> None:
    settings = merge(UPSCALE, raw)
    if settings["codec"] == "list":
        settings.problems.stop_if_any()
        show_codecs(settings)
        return
    begin(settings)
    video, output = check(settings)
    with engine(settings), Reporter(settings) as reporter:
        values = upscale_video(settings, output, reporter) if video else upscale_picture(settings, output, reporter)
        for sentence in values["notes"]:
            reporter.note(sentence)
    console().result(values)
    if not settings["json"]:
        print(values["files"][0])


def check(settings: Settings) -> "tuple[bool, Output]":
    """Judges what was given before a model is read; whether it is about a video, and where it goes.

    Raises:
        BadRequest: with a line for each problem.
    """
    from sdsage.media import plan_output
    from sdsage.media.clip import kind_of

    check_mode(settings, "upscale")
    check_inputs(settings)
    for name in ("--init-img", "--upscale-model"):
        if not settings.is_set(name):
            settings.problems.add(f"{name} FILE is missing: upscale needs a picture or a video, and a model")
    settings.problems.stop_if_any()
    kind = kind_of(Path(settings["init_img"]))
    name = settings["output"] or ("output.png" if kind == "picture" else "output.mp4")
    into_video = name.lower().endswith(_VIDEO)
    if into_video == (kind == "picture") and kind != "animation":
        such = "out.png" if into_video else "out.mp4 or out.webm"
        what = "one picture" if into_video else "no picture; for a video"
        raise BadRequest(f"--init-img {settings['init_img']} is {what}: name an output such as {such}")
    if not into_video:
        for option in ("codec", "crf"):
            if settings[option] is not None:
                raise BadRequest(f"--{option} is for .mp4 and .webm: leave it out, or name such an output")
    plan = {"count": 1, "overwrite": settings["overwrite"], "codec": settings["codec"], "crf": settings["crf"]}
    return into_video, plan_output(name, video=into_video, **plan)


def upscale_picture(settings: Settings, output: "Output", reporter: Reporter) -> dict[str, Any]:
    """One picture; of an animation the first. Returns the results as plain values."""
    from sdsage.media import load_image, read_metadata

    notes: list[str] = []
    picture = load_image(settings["init_img"], notes=notes)
    with make_upscaler(settings, reporter) as upscaler, reporter.stage("upscale"):
        frames = upscaled(picture[None], upscaler, settings["upscale_repeats"])
    with reporter.stage("encode"):
        size = frames.shape[2], frames.shape[1]
        files = output.write(frames, metadata=enlarged(read_metadata(settings["init_img"]), settings, size))
    return {"files": [str(path) for path in files], "width": size[0], "height": size[1], "notes": notes + output.notes}


def upscale_video(settings: Settings, output: "Output", reporter: Reporter) -> dict[str, Any]:
    """A video, one frame in memory at a time: same speed, same times, its sound and what is written in it."""
    from sdsage.media import read_metadata
    from sdsage.media.clip import Clip

    path = Path(settings["init_img"])
    with Clip(path) as clip, make_upscaler(settings, reporter) as upscaler:
        sound = _Sound(clip, output)
        tell = _frames_told(clip.count, reporter)
        pictures = clip.pictures(sound if sound.fits else None)
        first = next(pictures)
        rgb = _enlarged(first.rgb, upscaler, settings)
        tell(1)
        size = rgb.shape[1], rgb.shape[0]
        how: dict[str, Any] = {"metadata": enlarged(read_metadata(path), settings, size), "time_base": clip.time_base}
        how["sound"] = clip.sound if sound.fits else None
        with output.stream(size, clip.fps, **how) as stream:
            stream.add(rgb, first.time)
            sound.into(stream)
            for shown, picture in pictures:
                stream.add(_enlarged(picture, upscaler, settings), shown)
                tell(stream.count)
    values = {"files": [str(p) for p in output.paths(1)], "width": size[0], "height": size[1], "frames": stream.count}
    return values | {"fps": float(clip.fps), "notes": clip.notes + sound.notes + output.notes}


class _Sound:
    """Hands the packets of the sound track on to the new file, which is open after the first picture only."""

    def __init__(self, clip: "Clip", output: "Output") -> None:
        from sdsage.media.clip import sound_name
        from sdsage.media.codecs import CONTAINERS

        self.notes: list[str] = []
        self.fits = clip.sound is not None and sound_name(clip.sound) in CONTAINERS[output.suffix].sound
        if clip.sound is not None and not self.fits:
            self.notes = [f"the sound ({sound_name(clip.sound)}) is left out: {output.suffix} does not take it"]
        self._waiting: list[Any] = []
        self._writer: VideoWriter | None = None

    def into(self, writer: "VideoWriter") -> None:
        self._writer = writer
        for packet in self._waiting:
            writer.add_sound(packet)
        self._waiting.clear()

    def __call__(self, packet: Any) -> None:
        if self._writer is None:
            self._waiting.append(packet)
        else:
            self._writer.add_sound(packet)


def _frames_told(count: int, reporter: Reporter) -> Callable[[int], None]:
    """What is to be called after each frame: it shows how many are done."""
    from sdsage import Progress

    began = time.monotonic()
    reporter.progress(Progress("upscale", 0, count, 0.0, None))
    return lambda done: reporter.progress(Progress("upscale", done, count, time.monotonic() - began, None))


def _enlarged(picture: Any, upscaler: "Upscaler", settings: Settings) -> Any:
    return upscaled(picture[None], upscaler, settings["upscale_repeats"])[0]
