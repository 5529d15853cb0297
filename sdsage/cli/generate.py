"""From settings to files: what vid-gen and img-gen share."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdsage.errors import BadRequest, WorkerDied

from . import video
from .codecs import show_codecs
from .console import begin, console
from .engine import ask, engine
from .eta import estimate
from .job import Job
from .keeping import Keeping, keep, resumed
from .loaded import Models
from .memory import fit
from .option import IMG
from .prepare import check_device, check_mode, prepare, ready
from .record import Run, merged, metadata, summary, summary_lines
from .repeat import differences, locate
from .report import Reporter
from .settings import merge

if TYPE_CHECKING:
    from sdsage import Adjustment, Context, Result, Upscaler
    from sdsage.media import Output


def run_verb(verb: str, raw: Mapping[str, Any]) -> None:
    """Runs a generation from typer's values to the printed file names."""
    settings = merge(verb, resumed(verb, raw))
    begin(settings)
    if settings.values.get("codec") == "list":
        settings.problems.stop_if_any()
        show_codecs(settings)
        return
    check_mode(settings, verb.replace("-", "_"))
    locate(settings)
    with engine(settings):
        check_device(settings)
        prepared = prepare(settings)
        job = ready(prepared)
        if prepared.places is None:
            print_params(job)
            return
        done = generate(job, prepared.places)
    show(merged(done))


def print_params(job: Job) -> None:
    """What the engine would get, as JSON."""
    from sdsage._ffi import params_json

    image = job.settings.verb == IMG
    text = params_json(job.ctx, job.gen if image else None, None if image else job.gen)
    if job.settings["json"]:
        console().result({"parameters": json.loads(text)})
    else:
        print(text)


def generate(job: Job, places: "list[Output]", models: Models | None = None) -> list[Run]:
    """Loads the model, generates, upscales and writes; each part is written before the next one begins."""
    from .preview import PreviewFile, engine_preview

    settings, models = job.settings, models or Models()
    if models.keeps:
        job.ctx.vae_decode_only = False  # the next job may have a picture
    job.memory = fit(job, *ask(settings, "gpu_memory", settings["device"]))  # before the bounds: tiles may be chosen
    ask(settings, "check_memory", job.ctx, settings["device"], job.gen)
    todo = keep(job, places)
    job.ctx.free_params_immediately = not models.keeps and len(todo) == 1 and not settings.values.get("extend")
    with Reporter(settings, estimate(job)) as reporter:
        reporter.shown.update(settings.warnings)
        if settings["seed"] < 0 and not settings["seeds"]:
            reporter.note(f"seed {job.seeds[0]} was drawn")
        for sentence in filter(None, (job.memory, *job.notes)):
            reporter.note(sentence)
        more: dict[str, Any] = {"keep_latents": settings["save_latents"]}
        if settings["preview"] != "none":
            more |= {"on_preview": PreviewFile(settings, reporter), "preview": engine_preview(settings)}
        done: list[Run] = []
        last = todo[-1]
        # first: a wrong file is found before the work
        with models.upscaler(settings, reporter) as upscaler, last.watching(reporter):

            def finish(kept: Keeping, result: "Result") -> None:
                for sentence in result.adjusted:
                    reporter.message("warning", sentence)
                done.append(write(job, result, kept.place, reporter, upscaler))
                done[-1].latents = kept.saved

            with models.context(job, reporter, last.decode_only if len(todo) == 1 else None) as context:
                check_size(context, job, reporter)
                job.fps_why = video.settle_fps(settings, context) if settings.verb != IMG else ""
                job.engine = ask(settings, "build_info")
                if settings.recorded is not None:
                    for sentence in differences(settings.recorded, job.engine):
                        reporter.message("warning", sentence)
                if not settings["disable_image_metadata"]:
                    job.inputs.start_hashing()
                for kept in todo[:-1]:
                    with kept.watching(reporter):
                        finish(kept, start(context, kept, more, reporter))
                    reporter.note(f"{done[-1].files[0]} is written, {len(done)} of {len(todo)}")
                try:
                    result = start(context, last, more, reporter)
                except WorkerDied as death:
                    result = last.decode_in_tiles(death, reporter, models)
            finish(last, result)  # the last one without the model in memory
    return done


def start(context: "Context", kept: Keeping, more: dict[str, Any], reporter: Reporter) -> "Result":
    """Runs one part of the job; `more` holds what belongs to previews."""
    from sdsage.params import SdImgGenParams

    job = kept.job
    job.gen.seed = job.seeds[kept.part.first]
    if isinstance(job.gen, SdImgGenParams):
        if not context.supports_image:
            raise BadRequest(f"{context.version_name} makes videos: run 'sdsage vid-gen', with one frame for a picture")
        result = context.generate_image(job.gen, checkpoint=kept.checkpoint, **more)
    else:
        result = video.generate(context, job, more | {"checkpoint": kept.checkpoint}, reporter, kept.place)
    if job.settings["save_latents"]:
        kept.save(result.latents, context.version_name)
    return result


def check_size(context: "Context", job: Job, reporter: Reporter) -> None:
    """One warning, or with --strict one error, for each size or frame count that the model can't take."""
    found = context.check_size(job.gen)
    if found and job.settings["strict"]:
        raise BadRequest("\n".join(map(_strict, found)))
    for a in found:
        reporter.message("warning", str(a))


def _strict(adjustment: "Adjustment") -> str:
    neighbours = " or ".join(map(str, adjustment.neighbours))
    return f"{adjustment.what} {adjustment.asked} is not possible with this model: use {neighbours}"


def write(job: Job, result: "Result", output: "Output", reporter: Reporter, upscaler: "Upscaler | None") -> Run:
    """Upscales where asked for, and writes the files."""
    frames, seconds = result.frames, 0.0
    size = frames.shape[2], frames.shape[1]
    if upscaler is not None:
        began = time.monotonic()
        with reporter.stage("upscale"):
            frames = upscaled(frames, upscaler, job.settings["upscale_repeats"])
        seconds = time.monotonic() - began
    stored = frames.shape[2], frames.shape[1]
    seeds = result.seeds if job.settings.verb == IMG else result.seeds[:1]
    run = Run(job, size, stored, len(frames), seeds, result.timings, result.adjusted, result.attention)
    run.levers = result.levers
    run.part_seeds = result.seeds if job.settings.verb != IMG else ()
    began = time.monotonic()
    with reporter.stage("encode"):
        info = None if job.settings["disable_image_metadata"] else metadata(run)
        files = output.write(frames, fps=job.settings["fps"] or 1, metadata=info)  # a picture has no speed
    run.files, run.notes = tuple(map(Path, files)), (*job.notes, *output.notes, *(job.inputs.notes() if info else ()))
    run.upscale, run.encode = seconds, time.monotonic() - began
    return run


def upscaled(frames: Any, upscaler: "Upscaler", repeats: int) -> Any:
    """Frames N x H x W x 3, enlarged `repeats` times."""
    import numpy as np

    done = []
    for frame in frames:
        for _ in range(repeats):
            frame = upscaler.upscale(frame)
        done.append(frame)
    return np.stack(done)


def show(run: Run) -> None:
    """The summary on stderr and the file names on stdout, or all of it as JSON on stdout."""
    values = summary(run)
    for line in summary_lines(values):
        console().line(line, kind="summary")
    console().result(values)
    if not run.job.settings["json"]:
        for path in run.files:
            print(path)
