"""`sdsage upscale`: one picture through an ESRGAN model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .console import begin, console
from .engine import engine
from .generate import check_mode, make_upscaler, upscaled
from .job import check_inputs
from .option import UPSCALE
from .record import enlarged
from .report import Reporter
from .settings import Settings, merge

if TYPE_CHECKING:
    from sdsage.media import Output


def run(raw: Mapping[str, Any]) -> None:
    from sdsage.media import load_image, read_metadata

    settings = merge(UPSCALE, raw)
    begin(settings)
    output = check(settings)
    with engine(settings), Reporter(settings) as reporter:
        picture = load_image(settings["init_img"])
        with make_upscaler(settings, reporter) as upscaler, reporter.stage("upscale"):
            frames = upscaled(picture[None], upscaler, settings["upscale_repeats"])
        with reporter.stage("encode"):
            size = frames.shape[2], frames.shape[1]
            files = output.write(frames, metadata=enlarged(read_metadata(settings["init_img"]), settings, size))
    height, width = frames.shape[1:3]
    values = {"files": [str(path) for path in files], "width": width, "height": height}
    console().result(values)
    if not settings["json"]:
        print(files[0])


def check(settings: Settings) -> "Output":
    """Judges what was given before a model is read.

    Raises:
        BadRequest: with a line for each problem.
    """
    from sdsage.media import plan_output

    check_mode(settings, "upscale")
    check_inputs(settings)
    for name in ("--init-img", "--upscale-model"):
        if not settings.is_set(name):
            settings.problems.add(f"{name} FILE is missing: upscale needs a picture and a model")
    settings.problems.stop_if_any()
    name = settings["output"] or "output.png"
    return plan_output(name, video=False, count=1, overwrite=settings["overwrite"])
