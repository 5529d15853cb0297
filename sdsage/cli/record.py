"""What is written down about a run: the metadata inside the files, and the summary."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .job import Job
from .option import IMG, Kind
from .options import of_verb
from .prompt import shown_prompt
from .settings import Settings, is_idle

if TYPE_CHECKING:
    from sdsage import Attention, Lever, Timings
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
        part_seeds: of a video that was extended, the seed of each part.
        encode: seconds that writing the files took; `upscale` those of --upscale-model.
        latents: the files of --save-latents.
        levers: what sdsage computed in place of the engine, how often.
    """

    job: Job
    size: tuple[int, int]
    stored: tuple[int, int]
    frames: int
    seeds: tuple[int, ...]  # of the pictures, or of the one video
    timings: "Timings"
    adjusted: tuple[str, ...]
    attention: "tuple[Attention, ...]"
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    part_seeds: tuple[int, ...] = ()
    upscale: float = 0.0
    encode: float = 0.0
    latents: tuple[Path, ...] = ()
    levers: "tuple[Lever, ...]" = ()


def recorded_options(job: Job) -> dict[str, Any]:
    """Options that the result depends on, as plain values; files by their name without folder."""
    found: dict[str, Any] = {}
    for option in of_verb(job.settings.verb):
        value = job.settings[option.key]
        empty = value is None or value is False or value in ("", ())
        default = False if option.kind is Kind.SWITCH else option.default
        if not option.record or is_idle(option, job.settings) or (empty and value == default):
            continue
        if option.kind is Kind.FILE:
            value = [os.path.basename(p) for p in value] if option.many else os.path.basename(value)
        elif option.kind is Kind.FOLDER and value:  # an empty one says that nothing is looked up
            continue
        found[option.key] = list(value) if isinstance(value, tuple) else value
    return found | {"prompt": shown_prompt(job.settings["prompt"]), "width": job.gen.width, "height": job.gen.height}


def metadata(run: Run) -> "list[Metadata] | Metadata":
    """For a video one record, for pictures one each, with its own seed."""
    from sdsage.media import Metadata

    run.job.inputs.finish_hashing()
    records = [Metadata(_text(run, seed), _data(run, seed)) for seed in run.seeds]
    return records if run.job.settings.verb == IMG else records[0]


def enlarged(metadata: "Metadata | None", settings: Settings, size: tuple[int, int]) -> "Metadata | None":
    """What `sdsage upscale` hands on, with the mark that it was at work; `size` is width and height in px."""
    if metadata is None:
        return None
    mark = {
        "model": os.path.basename(settings["upscale_model"]),
        "repeats": settings["upscale_repeats"],
        "width": size[0],
        "height": size[1],
    }
    return replace(metadata, data=metadata.data | {"enlarged": mark})


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
        "preset": settings["preset"],
        "files": run.job.inputs.described(),
        "engine": run.job.engine,
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
        "levers": [asdict(lever) for lever in run.levers],
    }
    if settings.verb != IMG:
        data |= {"frames": run.frames, "fps": settings["fps"]}
        if len(run.part_seeds) > 1:
            data["part_seeds"] = list(run.part_seeds)
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
    digest = run.job.inputs.hash_of(model)
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
        "Model hash": digest[:10] if digest else None,
        "VAE": os.path.basename(s["vae"]) if s["vae"] else None,
        "Version": f"sdsage {__version__}",
    }
    return parameters_text(shown_prompt(s["prompt"]), s["negative_prompt"], fields)


def merged(runs: Sequence[Run]) -> Run:
    """Several runs of one job as one, for the summary: times and counts are sums, `frames` is that of one video."""
    from sdsage import Timings
    from sdsage.extend import added

    if len(runs) == 1:
        return runs[0]
    names = ("encode_text", "encode_image", "sample", "decode", "total", "replayed")
    times = {name: sum(getattr(run.timings, name) for run in runs) for name in names}
    steps = tuple(step for run in runs for step in run.timings.steps)
    return replace(
        runs[0],
        frames=sum(run.frames for run in runs) if runs[0].job.settings.verb == IMG else runs[0].frames,
        seeds=tuple(seed for run in runs for seed in run.seeds),
        timings=Timings(load=runs[0].timings.load, steps=steps, **times),
        adjusted=tuple(dict.fromkeys(sentence for run in runs for sentence in run.adjusted)),
        attention=added(entry for run in runs for entry in run.attention),
        levers=added(entry for run in runs for entry in run.levers),
        files=tuple(path for run in runs for path in run.files),
        latents=tuple(path for run in runs for path in run.latents),
        notes=tuple(dict.fromkeys(sentence for run in runs for sentence in run.notes)),
        upscale=sum(run.upscale for run in runs),
        encode=sum(run.encode for run in runs),
    )


def results(run: Run) -> list[dict[str, Any]]:
    """Each picture or video with its seed and its files."""
    share = len(run.files) // len(run.seeds)  # files of one result: its frames, or itself
    files = [str(path) for path in run.files]
    return [{"seed": seed, "files": files[i * share : (i + 1) * share]} for i, seed in enumerate(run.seeds)]


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
        "results": results(run),
        "width": run.stored[0],
        "height": run.stored[1],
        "frames": run.frames,
        **({"part_seeds": list(run.part_seeds)} if len(run.part_seeds) > 1 else {}),
        **({"fps": run.job.settings["fps"], "fps_why": run.job.fps_why} if run.job.settings.verb != IMG else {}),
        "steps": len(t.steps) + t.replayed,
        "replayed_steps": t.replayed,
        "seconds": {name: None if value is None else round(value, 3) for name, value in seconds.items()},
        "adjusted": list(run.adjusted),
        "attention": [asdict(a) for a in run.attention],
        "levers": [asdict(lever) for lever in run.levers],
        "notes": list(run.notes),
        "latents": [str(path) for path in run.latents],
        "memory": run.job.memory,
        "options": recorded_options(run.job) | {"seed": run.job.seeds[0]},
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


def lever_lines(entries: list[dict[str, Any]]) -> list[str]:
    """How often levers computed something, one line for each diffusion model."""
    said: dict[str, list[str]] = {}
    for e in entries:
        said.setdefault(e["module"], []).append(f"{e['lever']} {e['calls']}" + (f" ({e['why']})" if e["why"] else ""))
    return [f"{module}: {', '.join(counts)}" for module, counts in said.items() if module in _DIFFUSION]


def summary_lines(values: dict[str, Any]) -> list[str]:
    """The summary for people, one line each; stages that did not run are left out."""
    rows = [(title, f"{values['seconds'][key]:.2f} s") for key, title in _ROWS if values["seconds"][key]]
    what = f"{values['width']}x{values['height']}"
    if "fps" in values:
        frames = values["frames"]
        what += f", {frames} frame{'s' if frames > 1 else ''}, {values['fps']} frames per second, {values['fps_why']}"
    files = values["files"]
    name = files[0] if len(files) == 1 else f"{files[0]} ... {files[-1]} ({len(files)} files)"
    rows.append(("file", f"{name} ({what})"))
    rows += [("latents", path) for path in values["latents"]]
    if values["replayed_steps"]:
        rows.append(("resumed", f"{values['replayed_steps']} of {values['steps']} steps came from the checkpoint"))
    seeds = values["seeds"]
    in_turn = list(range(seeds[0], seeds[0] + len(seeds))) == seeds
    rows.append(("seed", f"{seeds[0]} ... {seeds[-1]}" if in_turn and seeds[1:] else ", ".join(map(str, seeds))))
    rows += [("attention", sentence) for sentence in attention_lines(values["attention"])]
    rows += [("levers", sentence) for sentence in lever_lines(values["levers"])]
    rows += [("changed", sentence) for sentence in values["adjusted"]]
    rows += [("note", sentence) for sentence in values["notes"]]
    rows += [("memory", values["memory"])] if values["memory"] else []
    width = max(len(title) for title, _ in rows)
    return [f"{title:<{width}}  {text}" for title, text in rows]
