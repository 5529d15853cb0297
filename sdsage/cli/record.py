"""What is written down about a run: the metadata inside the files, and the summary."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .job import Job
from .option import IMG, Kind
from .options import of_verb

if TYPE_CHECKING:
    from sdsage import Attention, Timings
    from sdsage.media import Metadata

FORMAT = 1  # of the JSON object in the files


@dataclass
class Run:
    """A finished generation.

    Attributes:
        size: width and height in px as generated, before --upscale-model.
        stored: width and height in px as written.
        adjusted: one sentence for each size or frame count that the model could not take.
        attention: which kernels computed it, how often.
        encode: seconds that writing the files took; `upscale` those of --upscale-model.
    """

    job: Job
    size: tuple[int, int]
    stored: tuple[int, int]
    frames: int
    seeds: tuple[int, ...]
    timings: "Timings"
    adjusted: tuple[str, ...]
    attention: "tuple[Attention, ...]"
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    upscale: float = 0.0
    encode: float = 0.0


def recorded_options(job: Job) -> dict[str, Any]:
    """Options that the result depends on, as plain values; files by their name without folder."""
    found: dict[str, Any] = {}
    for option in of_verb(job.settings.verb):
        value = job.settings[option.key]
        idle = option.only not in (None, job.settings.verb) or (
            option.needs and not any(map(job.settings.is_set, option.needs))
        )
        if not option.record or idle or value in (None, False, "", ()):
            continue
        if option.kind is Kind.FILE:
            value = [os.path.basename(p) for p in value] if option.many else os.path.basename(value)
        elif option.kind is Kind.FOLDER:
            continue
        found[option.key] = list(value) if isinstance(value, tuple) else value
    return found


def metadata(run: Run) -> "list[Metadata] | Metadata":
    """For a video one record, for pictures one each, with its own seed."""
    from sdsage.media import Metadata

    records = [Metadata(_text(run, seed), _data(run, seed)) for seed in run.seeds]
    return records if run.job.settings.verb == IMG else records[0]


def _data(run: Run, seed: int) -> dict[str, Any]:
    from sdsage import __version__

    settings = run.job.settings
    data = {
        "format": FORMAT,
        "version": __version__,
        "verb": settings.verb,
        "seed": seed,
        "width": run.size[0],
        "height": run.size[1],
        "options": {**recorded_options(run.job), "seed": seed},
        "loras": [
            {
                "name": os.path.basename(lora.path),
                "multiplier": lora.multiplier,
                "high_noise": lora.is_high_noise,
            }
            for lora in run.job.loras
        ],
        "adjusted": list(run.adjusted),
        "attention": [asdict(a) for a in run.attention],
    }
    if settings.verb != IMG:
        data |= {"frames": run.frames, "fps": settings["fps"]}
    if run.stored != run.size:
        data |= {"stored_width": run.stored[0], "stored_height": run.stored[1]}
    return data


def _text(run: Run, seed: int) -> str:
    from sdsage import __version__
    from sdsage.media import parameters_text

    s = run.job.settings
    video = s.verb != IMG
    sampler = " ".join(filter(None, (s["sampling_method"], s["scheduler"] if not s["sigmas"] else None)))
    model = s["model"] or s["diffusion_model"]
    fields: dict[str, object] = {
        "Steps": s["steps"],
        "High-noise steps": s["high_noise_steps"] if video and s["high_noise_diffusion_model"] else None,
        "CFG scale": s["cfg_scale"],
        "Guidance": s["guidance"],
        "Sampler": sampler or None,
        "Flow shift": s["flow_shift"],
        "Seed": seed,
        "Size": f"{run.size[0]}x{run.size[1]}",
        "Frames": run.frames if video else None,
        "FPS": s["fps"] if video else None,
        "Clip skip": s["clip_skip"] if s["clip_skip"] > 0 else None,
        "Denoising strength": s["strength"] if s["init_img"] and not video else None,
        "Model": os.path.basename(model),
        "VAE": os.path.basename(s["vae"]) if s["vae"] else None,
        "Version": f"sdsage {__version__}",
    }
    return parameters_text(s["prompt"], s["negative_prompt"], fields)


def summary(run: Run) -> dict[str, Any]:
    """The summary as plain values; seconds are rounded to milliseconds."""
    t = run.timings
    seconds = {
        "load": t.load,
        "encode_text": t.encode_text,
        "encode_image": t.encode_image,
        "first_step": t.first_step,
        "mean_later_steps": t.mean_later_steps,
        "decode": t.decode,
        "upscale": run.upscale,
        "encode": run.encode,
    }
    return {
        "verb": run.job.settings.verb,
        "files": [str(path) for path in run.files],
        "seeds": list(run.seeds),
        "width": run.stored[0],
        "height": run.stored[1],
        "frames": run.frames,
        **({"fps": run.job.settings["fps"]} if run.job.settings.verb != IMG else {}),
        "steps": len(t.steps),
        "seconds": {name: None if value is None else round(value, 3) for name, value in seconds.items()},
        "adjusted": list(run.adjusted),
        "attention": [asdict(a) for a in run.attention],
        "notes": list(run.notes),
        "options": recorded_options(run.job) | {"seed": run.job.seed},
    }


_ROWS = (
    ("load", "model load"),
    ("encode_text", "text encoder"),
    ("encode_image", "picture encoder"),
    ("first_step", "first step"),
    ("mean_later_steps", "later steps, mean"),
    ("decode", "decode"),
    ("upscale", "upscale"),
    ("encode", "write file"),
)


_DIFFUSION = ("diffusion", "low-noise", "high-noise")


def attention_lines(entries: list[dict[str, Any]]) -> list[str]:
    """The kernels of the diffusion models, one line each; the other parts stand in --json."""
    return [
        f"{e['module']}: {e['kernel']}, {e['calls']} calls" + (f" ({e['why']})" if e["why"] else "")
        for e in entries
        if e["module"] in _DIFFUSION
    ]


def summary_lines(values: dict[str, Any]) -> list[str]:
    """The summary for people, one line each; stages that did not run are left out."""
    rows = [(title, f"{values['seconds'][key]:.2f} s") for key, title in _ROWS if values["seconds"][key]]
    what = f"{values['width']}x{values['height']}"
    if "fps" in values:
        frames = values["frames"]
        what += f", {frames} frame{'s' if frames > 1 else ''}, {values['fps']} frames per second"
    files = values["files"]
    name = files[0] if len(files) == 1 else f"{files[0]} ... {files[-1]} ({len(files)} files)"
    rows.append(("file", f"{name} ({what})"))
    seeds = values["seeds"]
    rows.append(("seed", str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} ... {seeds[-1]}"))
    rows += [("attention", sentence) for sentence in attention_lines(values["attention"])]
    rows += [("changed", sentence) for sentence in values["adjusted"]]
    rows += [("note", sentence) for sentence in values["notes"]]
    width = max(len(title) for title, _ in rows)
    return [f"{title:<{width}}  {text}" for title, text in rows]
