"""From settings to files: what vid-gen and img-gen share."""

import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdsage.errors import BadRequest, WorkerDied

from . import video
from .codecs import show_codecs
from .console import begin, console
from .engine import ask, engine
from .eta import estimate
from .job import Job, Resolved, build, resolve
from .keeping import Keeping, keep, resumed
from .memory import fit
from .option import IMG
from .places import plan
from .record import Run, merged, metadata, summary, summary_lines
from .repeat import differences, locate
from .report import Reporter, say
from .seeds import choose
from .settings import Settings, merge

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
        check_sage(settings)
        resolved = resolve(settings)
        look_ahead(settings, resolved)
        seeds = choose(settings)
        places = None if settings["print_params"] else plan(settings, resolved.prompt, seeds)
        settings.problems.stop_if_any()
        for sentence in settings.warnings:
            say("warning", sentence)
        job = build(settings, resolved, seeds)
        if places is None:
            print_params(job)
            return
        for place in places:
            place.check_size(job.gen.width, job.gen.height)
        if verb != IMG and not settings["high_noise_diffusion_model"]:
            # sd-cli's default of 20 high-noise steps is meant for two experts only
            job.gen.high_noise_sample_params.sample_steps = -1
        done = generate(job, places)
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


def look_ahead(settings: Settings, resolved: Resolved) -> None:
    """Whether the model files fit together, from their headers; first, because it takes milliseconds.

    Raises:
        BadRequest: with a line for each problem.
    """
    if settings.problems.found or settings["print_params"]:
        return
    from sdsage._preflight import Lora, files_of, preflight

    found = preflight(
        files_of(settings.values),
        [Lora(lora.path, lora.is_high_noise) for lora in resolved.loras],
        video=settings.verb != IMG,
        preview_only_tae=settings["taesd_preview_only"],
    )
    for problem in found.problems:
        settings.problems.add(problem)
    settings.problems.stop_if_any()
    settings.warnings += found.warnings


def check_mode(settings: Settings, expected: str) -> None:
    """-M of an sd-cli command must agree with the verb."""
    mode = settings["mode"]
    if mode in (None, expected):
        return
    verbs = {"vid_gen": "vid-gen", "img_gen": "img-gen", "convert": "convert", "upscale": "upscale"}
    advice = f"run 'sdsage {verbs[mode]}'" if mode in verbs else f"it takes one of {', '.join(verbs)}"
    settings.problems.add(f"--mode {mode} is not the mode of {settings.verb}: {advice}")


def check_sage(settings: Settings) -> None:
    """--sage-attn where it can't work ends the command before any model file is looked at."""
    if settings["sage_attn"] and not settings["print_params"]:
        settings.problems.stop_if_any()
        ask(settings, "check_sage", settings["sage_kernel"], settings["device"])


def generate(job: Job, places: "list[Output]") -> list[Run]:
    """Loads the model, generates, upscales and writes; each part is written before the next one begins."""
    from sdsage import Context

    from .preview import PreviewFile, engine_preview

    settings = job.settings
    job.memory = fit(job, *ask(settings, "gpu_memory", settings["device"]))  # before the bounds: tiles may be chosen
    ask(settings, "check_memory", job.ctx, settings["device"], job.gen)
    todo = keep(job, places)
    job.ctx.free_params_immediately = len(todo) == 1 and not settings.values.get("extend")
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
        with open_upscaler(settings, reporter) as upscaler, last.watching(reporter):

            def finish(kept: Keeping, result: "Result") -> None:
                for sentence in result.adjusted:
                    reporter.message("warning", sentence)
                done.append(write(job, result, kept.place, reporter, upscaler))
                done[-1].latents = kept.saved

            with Context(
                job.ctx,
                device=settings["device"],
                allow_pickle=settings["allow_pickle"],
                on_progress=reporter.progress,
                on_log=reporter.log,
                isolated=settings.worker or True,
                decode_only=last.decode_only if len(todo) == 1 else None,
            ) as context:
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
                    result = last.decode_in_tiles(death, reporter)
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
    run.part_seeds = result.seeds if job.settings.verb != IMG else ()
    began = time.monotonic()
    with reporter.stage("encode"):
        info = None if job.settings["disable_image_metadata"] else metadata(run)
        files = output.write(frames, fps=job.settings["fps"] or 1, metadata=info)  # a picture has no speed
    run.files, run.notes = tuple(map(Path, files)), (*job.notes, *output.notes, *(job.inputs.notes() if info else ()))
    run.upscale, run.encode = seconds, time.monotonic() - began
    return run


def open_upscaler(settings: Settings, reporter: Reporter) -> "AbstractContextManager[Upscaler | None]":
    """The model of --upscale-model, to be closed by `with`; nothing when there is none."""
    return make_upscaler(settings, reporter) if settings["upscale_model"] else nullcontext()


def make_upscaler(settings: Settings, reporter: Reporter) -> "Upscaler":
    """The model of --upscale-model."""
    from sdsage import Upscaler

    return Upscaler(
        settings["upscale_model"],
        device=settings["device"],
        n_threads=settings["threads"],
        tile_size=settings["upscale_tile_size"],
        direct=settings["diffusion_conv_direct"],
        offload_params_to_cpu=settings["offload_to_cpu"],
        allow_pickle=settings["allow_pickle"],
        on_log=reporter.log,
        isolated=settings.worker or True,
    )


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
