"""`sdsage bench attn|gen`: the speed of attention alone, and of a whole generation."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import typer

from sdsage.errors import BadRequest

from .app import BENCHES, CONTEXT, GROUPS, PanelCommand
from .console import console
from .option import BENCH_ATTN, BENCH_GEN, GENERATE, VID
from .options import by_key
from .settings import Settings, merge
from .signature import command
from .values import parse

if TYPE_CHECKING:
    from .job import Job

Run = Callable[[Mapping[str, Any]], None]
_GIVEN = ("preset", "model", "diffusion_model", "high_noise_diffusion_model")  # beside which --random makes no sense
_ATTN = ("KERNEL", "MS", "QUANTIZERS", "TFLOP/S", "x FLASH", "")
_PROMPT = "a lovely cat"


def add_to(app: typer.Typer, guarded: Callable[[Run], Run]) -> None:
    """Adds `bench` with its two commands."""
    bench = typer.Typer(name="bench", help=GROUPS["bench"], no_args_is_help=True, context_settings=CONTEXT)
    for verb, run in ((BENCH_ATTN, attention), (BENCH_GEN, generation)):
        help = f"{BENCHES[verb].help}\n\nExample: {BENCHES[verb].example}"
        function = command(verb, guarded(run))
        bench.command(verb.split()[1], cls=PanelCommand, help=help, context_settings=CONTEXT)(function)
    app.add_typer(bench)


# ---- attention alone


def attention(raw: Mapping[str, Any]) -> None:
    from sdsage._attention.host import facts
    from sdsage._attention.verify import Engine
    from sdsage._bench import attn, plot

    from .verify import checked_seed

    settings = merge(BENCH_ATTN, raw)
    settings.problems.stop_if_any()
    seed = checked_seed(settings["seed"])
    if settings["plot"]:
        plot.check(settings["plot"])

    def say(entry: dict[str, Any]) -> None:
        if not console().json:
            print("\n".join(shape_lines(entry)), flush=True)

    with Engine() as ask:
        found = attn.measure(
            ask, settings["device"], settings["shape"], settings["kernel"], settings["repeats"], seed, say
        )
        found |= facts(ask)
    if settings["plot"]:
        plot.attention(settings["plot"], found)
    console().result(found | {"plot": settings["plot"]})
    if not console().json:
        device = found["device"]
        print(
            f"{device['name']} ({device['description']}), medians of {found['repeats']}, by turns, quantizers included"
        )
        if found["no_sage"]:
            print(f"no kernel of SageAttention was run: {found['no_sage']}")


def shape_lines(entry: Mapping[str, Any]) -> Iterator[str]:
    """A shape with its kernels."""
    from .verify import table

    length = f"{entry['lq']}" if entry["lq"] == entry["lk"] else f"{entry['lq']}x{entry['lk']}"
    yield f"{entry['shape']} ({entry['what']}): B={entry['batch']} H={entry['heads']} L={length} D={entry['head_dim']}"
    rows: list[tuple[str, ...]] = [_ATTN]
    for row in entry["kernels"]:
        figures = (
            "" if row[key] is None else f"{row[key]:g}" for key in ("ms", "quantize_ms", "tflops", "times_flash")
        )
        note = f"not run: {row['why_not']}" if row["why_not"] else "FP8 emulated" if row["emulated"] else ""
        rows.append((row["kernel"], *figures, note))
    yield from (f"  {line}" for line in table(rows, left=1))
    yield ""


# ---- a whole generation


def generation(raw: Mapping[str, Any]) -> None:
    from sdsage._attention.host import facts
    from sdsage._bench import gen, plot

    from .engine import ask, engine

    model, raw = with_random(raw)
    settings = merge(verb_of(raw), {**raw, "sage_attn": True})
    settings.problems.stop_if_any()
    if raw.get("plot"):
        plot.check(raw["plot"])
    with engine(settings):
        job = prepared(settings)
        sage = ask(settings, "sage_info", settings["sage_kernel"], settings["device"])
        name, _ = ask(settings, "gpu_memory", settings["device"])
        device = next(vars(d) for d in ask(settings, "devices") if d.name == name)
        more = facts(lambda function, *args: ask(settings, function, *args))
    found = gen.measure(
        job.ctx,
        job.gen,
        settings["device"],
        sage.supported,
        lambda text: console().line(text),
        allow_pickle=settings["allow_pickle"],
        on_log=lambda level, line: console().log("engine", line),
    )
    found |= {"model": model or found["version_name"], "device": device, "no_sage": sage.reason, "seed": job.gen.seed}
    found |= {"steps": job.gen.sample_params.sample_steps, **more}
    if raw.get("plot"):
        plot.generation(raw["plot"], found)
    console().result(found | {"plot": raw.get("plot")})
    if not console().json:
        print("\n".join(run_lines(found)))


def with_random(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of --random, and the command with its files and settings where nothing else is given."""
    if raw.get("random") is None:
        return "", dict(raw)
    from sdsage._bench.models import MODELS, files

    name = parse(by_key()["random"], raw["random"])
    beside = [by_key()[key].name for key in _GIVEN if raw.get(key) is not None]
    if beside:
        raise BadRequest(f"--random {name} brings its own model: leave out {', '.join(beside)}, or --random")
    model = MODELS[name]
    given = {key: value for key, value in raw.items() if value is not None}
    made = {"mode": model.verb.replace("-", "_"), "prompt": _PROMPT, **model.settings, **given}
    if model.preset:
        return name, {**raw, **made, "preset": model.preset}
    return name, {**raw, **made, **files(name, _random_folder(raw.get("random_dir")), console().line)}


def _random_folder(given: str | None) -> Any:
    from pathlib import Path

    from sdsage.tiny.cache import cache_dir

    return Path(given) if given else cache_dir() / "random-models"


def verb_of(raw: Mapping[str, Any]) -> str:
    """Whether pictures or a video are made: as --mode says, else as the preset is for, else a video."""
    mode = raw.get("mode")
    if mode is None and raw.get("preset") is not None:
        from sdsage import presets

        return presets.mode(raw["preset"])
    verb = (mode or VID).replace("_", "-")
    if verb not in GENERATE:
        raise BadRequest(f"--mode {mode} can't be measured: it takes vid_gen or img_gen")
    return verb


def prepared(settings: Settings) -> "Job":
    """The job, checked as a generation is."""
    from .engine import ask
    from .memory import fit
    from .prepare import prepare, ready

    job = ready(prepare(settings, writes=False))
    if memory := fit(job, *ask(settings, "gpu_memory", settings["device"])):
        console().message("note", memory)
    ask(settings, "check_memory", job.ctx, settings["device"], job.gen)
    return job


def run_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The runs side by side."""
    from .verify import table

    runs, first = found["runs"], found["runs"]["flash"]
    device = found["device"]
    size = f"{first['width']}x{first['height']}, {first['frames']} frames, {found['steps']} steps"
    yield f"{found['model']}, {size}, seed {found['seed']}, on {device['name']} ({device['description']})"
    head = ("SECONDS", *({"flash": "FLASHATTENTION", "sage": "SAGEATTENTION"}[name] for name in runs), "")
    rows = [head]
    for stage in first["seconds"]:
        values = (run["seconds"][stage] for run in runs.values())
        rows.append((stage.replace("_", " "), *("-" if s is None else f"{s:.3f}" for s in values), ""))
    yield from table(rows, left=1)
    for name, run in runs.items():
        said = "; ".join(f"{a['module']}: {a['kernel']} {a['calls']}" for a in run["attention"])
        yield f"attention of {name}: {said}"
    if found["apart"] is None:
        yield f"SageAttention was not run: {found['no_sage']}"
    else:
        apart = found["apart"]
        words = (
            f"{k} {'the same' if apart[f'{k}_db'] is None else str(apart[f'{k}_db']) + ' dB'}"
            for k in ("frames", "latents")
        )
        yield f"PSNR between the two: {', '.join(words)}"
