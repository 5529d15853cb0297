"""`sdsage decode`: the video or the pictures of latents that were kept."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdsage._fps import model_fps
from sdsage.errors import BadRequest

from .console import begin, console
from .engine import engine
from .job import check_inputs, set_path
from .option import DECODE, Kind
from .options import of_verb
from .prepare import check_mode
from .report import Reporter
from .settings import Settings, merge

if TYPE_CHECKING:
    from sdsage import Latents, Result
    from sdsage.media import Metadata, Output
    from sdsage.params import SdCtxParams, SdTilingParams


def run(raw: Mapping[str, Any]) -> None:
    from sdsage import Context

    settings = merge(DECODE, raw)
    begin(settings)
    check(settings)
    kept = read(settings["latents"])
    output = plan(settings, kept)
    ctx, tiling = parameters(settings)
    with engine(settings), Reporter(settings) as reporter:
        with Context(
            ctx,
            device=settings["device"],
            allow_pickle=settings["allow_pickle"],
            on_progress=reporter.progress,
            on_log=reporter.log,
            decode_only=kept.model,
            isolated=settings.worker or True,
        ) as context:
            result = context.decode_all(kept.tensors, tiling)
        for sentence in result.adjusted:
            reporter.message("warning", sentence)
        with reporter.stage("encode"):
            files = output.write(result.frames, fps=fps(settings, kept), metadata=metadata(settings, kept, result))
    show(settings, kept, result, [str(path) for path in files])


def check(settings: Settings) -> None:
    """Judges what was given before a file is read.

    Raises:
        BadRequest: with a line for each problem.
    """
    check_mode(settings, "decode")
    check_inputs(settings)
    if not settings["latents"]:
        settings.problems.add("LATENTS is missing: give the file, such as NAME.latents.safetensors")
    if not any(settings[key] for key in ("vae", "taesd", "model")):
        settings.problems.add(
            "no VAE was given: give the --vae of the model (or --taesd), or --model of a checkpoint that has one inside"
        )
    settings.problems.stop_if_any()


def read(path: str) -> "Latents":
    """The latents, unless it is the file of a run that is not so far."""
    from pathlib import Path

    from sdsage import load_latents
    from sdsage._answers import read_header

    if read_header(Path(path)) is not None:
        raise BadRequest(f"{path} is of a run that is still sampling or was ended: go on with it with --resume")
    return load_latents(path)


def plan(settings: Settings, kept: "Latents") -> "Output":
    from sdsage.media import plan_output

    frames = kept.tensors[0].shape[2] if kept.video else len(kept.tensors)  # of a video at least so many
    return plan_output(
        settings["output"] or ("output.mp4" if kept.video else "output.png"),
        video=kept.video,
        count=4 * (frames - 1) + 1 if kept.video else frames,
        overwrite=settings["overwrite"],
        begin_index=settings["output_begin_idx"],
    )


def parameters(settings: Settings) -> "tuple[SdCtxParams, SdTilingParams]":
    """The structs, from the same table as those of a generation."""
    from sdsage.params import SdCtxParams, SdTilingParams

    ctx, tiling = SdCtxParams(), SdTilingParams()
    for option in of_verb(DECODE):
        value = settings[option.key]
        if option.kind is Kind.SWITCH:
            value = option.sets is value
        if option.target and value not in (None, "", ()):
            root, _, path = option.target.partition(".")
            set_path(ctx if root == "ctx" else tiling, path.removeprefix("vae_tiling_params."), value)
    if settings["threads"] > 0:
        ctx.n_threads = settings["threads"]
    ctx.circular_x = settings["circular"] or settings["circularx"]
    ctx.circular_y = settings["circular"] or settings["circulary"]
    tiling.tile_size_x, tiling.tile_size_y = settings["vae_tile_size"]
    tiling.rel_size_x, tiling.rel_size_y = settings["vae_relative_tile_size"]
    return ctx, tiling


def fps(settings: Settings, kept: "Latents") -> int:
    """As given, else that of the run, else that of the model."""
    recorded = kept.info.get("fps")
    return int(settings["fps"] or (recorded if isinstance(recorded, int) else model_fps(kept.model)))


def metadata(settings: Settings, kept: "Latents", result: "Result") -> "list[Metadata] | Metadata | None":
    """What the run would have written, with the sizes that came out."""
    from sdsage.media import Metadata

    records = kept.info.get("metadata")
    if settings["disable_image_metadata"] or not isinstance(records, list) or not records:
        return None
    height, width = result.frames.shape[1:3]
    more: dict[str, Any] = {"width": width, "height": height, "adjusted": list(result.adjusted)}
    if kept.video:
        more |= {"frames": len(result.frames), "fps": fps(settings, kept)}
    found = [Metadata(str(r["parameters"]), {**r["data"], **more}) for r in records]
    return found if len(found) == len(result.frames) and not kept.video else found[0]


def show(settings: Settings, kept: "Latents", result: "Result", files: list[str]) -> None:
    """The file names on stdout, or all of it as JSON."""
    height, width = result.frames.shape[1:3]
    values: dict[str, Any] = {"verb": DECODE, "files": files, "width": width, "height": height}
    values["frames"] = len(result.frames)
    if kept.video:
        values["fps"] = fps(settings, kept)
    values["seconds"] = {"load": round(result.timings.load, 3), "decode": round(result.timings.decode, 3)}
    values["adjusted"] = list(result.adjusted)
    console().result(values)
    if not settings["json"]:
        console().line(f"{width}x{height}, {len(result.frames)} frames, decoded in {result.timings.decode:.2f} s")
        print("\n".join(files))
