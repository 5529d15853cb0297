"""From settings to a job that can run: all that is judged before a model is loaded."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .engine import ask
from .job import Job, Resolved, build, resolve
from .option import IMG
from .places import plan
from .report import say
from .seeds import choose
from .settings import Settings

if TYPE_CHECKING:
    from sdsage.media import Output

Looked = dict[str, Any]  # what is known of sets of model files: `_preflight.Findings`


@dataclass
class Prepared:
    """Settings that were judged.

    Attributes:
        seeds: one for each picture or video.
        places: where each part goes; None when nothing is to be written.
    """

    settings: Settings
    resolved: Resolved
    seeds: tuple[int, ...]
    places: "list[Output] | None"


def prepare(settings: Settings, looked: Looked | None = None, *, writes: bool = True) -> Prepared:
    """Judges everything but the contents of pictures, without the engine; nothing is written.

    Args:
        looked: what was found in model files before, for many jobs with the same ones.
        writes: the result goes to files.

    Raises:
        BadRequest: with a line for each problem.
    """
    resolved = resolve(settings)
    look_ahead(settings, resolved, {} if looked is None else looked)
    seeds = choose(settings)
    places = plan(settings, resolved.prompt, seeds) if writes and not settings["print_params"] else None
    settings.problems.stop_if_any()
    return Prepared(settings, resolved, seeds, places)


def ready(prepared: Prepared) -> Job:
    """The job with its pictures, after the warnings."""
    settings = prepared.settings
    for sentence in settings.warnings:
        say("warning", sentence)
    job = build(settings, prepared.resolved, prepared.seeds)
    if settings["print_params"]:  # as sd-cli would have them
        return job
    for place in prepared.places or ():
        place.check_size(job.gen.width, job.gen.height)
    if settings.verb != IMG and not settings["high_noise_diffusion_model"]:
        # sd-cli's default of 20 high-noise steps is meant for two experts only
        job.gen.high_noise_sample_params.sample_steps = -1
    return job


def look_ahead(settings: Settings, resolved: Resolved, looked: Looked) -> None:
    """Whether the model files fit together, from their headers; first, because it takes milliseconds.

    Raises:
        BadRequest: with a line for each problem.
    """
    if settings.problems.found or settings["print_params"]:
        return
    from sdsage._preflight import Lora, files_of, preflight

    files, loras = files_of(settings.values), [Lora(lora.path, lora.is_high_noise) for lora in resolved.loras]
    video, preview_only = settings.verb != IMG, settings["taesd_preview_only"]
    paths = [*files.values(), *(lora.path for lora in loras)]
    key = repr((files, loras, video, preview_only, [stamp(path) for path in paths]))
    if key not in looked:
        looked[key] = preflight(files, loras, video=video, preview_only_tae=preview_only)
    for problem in looked[key].problems:
        settings.problems.add(problem)
    settings.problems.stop_if_any()
    settings.warnings += looked[key].warnings


def stamp(path: str) -> tuple[int, int] | None:
    """Size and time of a file, which tell whether it has changed; None when it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def check_mode(settings: Settings, expected: str) -> None:
    """-M of an sd-cli command must agree with the verb."""
    mode = settings["mode"]
    if mode in (None, expected):
        return
    verbs = {"vid_gen": "vid-gen", "img_gen": "img-gen", "convert": "convert", "upscale": "upscale"}
    advice = f"run 'sdsage {verbs[mode]}'" if mode in verbs else f"it takes one of {', '.join(verbs)}"
    settings.problems.add(f"--mode {mode} is not the mode of {settings.verb}: {advice}")


def check_device(settings: Settings) -> None:
    """--sage-attn or --fast-linear where it can't work ends the command before any model file is looked at."""
    if settings["print_params"]:
        return
    if settings["sage_attn"]:
        settings.problems.stop_if_any()
        ask(settings, "check_sage", settings["sage_kernel"], settings["device"])
    if settings["fast_linear"]:
        settings.problems.stop_if_any()
        ask(settings, "check_fast_linear", settings["engine_levers"], settings["device"])
