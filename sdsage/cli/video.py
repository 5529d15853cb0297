"""What vid-gen does beyond one call of the engine: the speed of the model, and parts that go on from one another."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sdsage.extend import UnfinishedError, generate_extended

from .job import Job
from .report import Reporter
from .settings import Settings

if TYPE_CHECKING:
    from sdsage import Context, Result
    from sdsage.media import Output


def settle_fps(settings: Settings, context: "Context") -> str:
    """Fills in the speed of the model where none was given; says where it comes from."""
    if settings["fps"] is not None:
        return "as asked" if "fps" in settings.given else "as recorded" if settings.recorded else "as in the preset"
    settings.values["fps"] = context.fps
    return f"the speed of {context.version_name}"


def generate(context: "Context", job: Job, more: dict[str, Any], reporter: Reporter, output: "Output") -> "Result":
    """One video, with --extend of several parts. When a later part fails, those before it are written on their own."""

    def tell(number: int, count: int) -> None:
        reporter.note(f"part {number} of {count}")

    try:
        return generate_extended(context, job.gen, job.settings["extend"], on_part=tell, **more)  # type: ignore[arg-type]
    except UnfinishedError as error:
        _keep(job, error, output, reporter)
        raise


def _keep(job: Job, error: UnfinishedError, output: "Output", reporter: Reporter) -> None:
    from .generate import write  # which imports this module

    stem, suffix = os.path.splitext(output.template)
    beside = replace(output, template=f"{stem}_first_{error.parts}_parts{suffix}")
    run = write(job, error.result, beside, reporter, None)
    reporter.message("warning", f"the parts before are kept in {run.files[0]}")
