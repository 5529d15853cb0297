"""`sdsage convert`: a model file in another number format or container."""

import time
from collections.abc import Mapping
from typing import Any

from .console import begin, console
from .engine import engine
from .job import check_inputs
from .option import CONVERT
from .prepare import check_mode
from .report import Reporter
from .settings import Settings, merge
from .values import check_type_rules


def run(raw: Mapping[str, Any]) -> None:
    import sdsage

    settings = merge(CONVERT, raw)
    begin(settings)
    check(settings)
    began = time.monotonic()
    with engine(settings), Reporter(settings) as reporter:
        path = sdsage.convert(
            settings["model"],
            settings["output"] or "output.gguf",
            vae_path=settings["vae"],
            type=settings["type"] or sdsage.SdType.COUNT,
            tensor_type_rules=settings["tensor_type_rules"],
            convert_name=settings["convert_name"],
            overwrite=settings["overwrite"],
            allow_pickle=settings["allow_pickle"],
            on_progress=reporter.progress,
            on_log=reporter.log,
            isolated=settings.worker or True,
        )
    seconds = round(time.monotonic() - began, 3)
    values = {"file": str(path), "bytes": path.stat().st_size, "seconds": seconds}
    console().result(values)
    if not settings["json"]:
        print(path)


def check(settings: Settings) -> None:
    """Judges what was given before the model is read.

    Raises:
        BadRequest: with a line for each problem.
    """
    check_mode(settings, "convert")
    check_inputs(settings)
    if not settings["model"]:
        settings.problems.add("no model was given: give --model FILE")
    check_type_rules(settings["tensor_type_rules"], settings.problems)
    settings.problems.stop_if_any()
