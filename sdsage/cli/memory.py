"""--vram, and what a run without it is told: how the job fits the GPU's memory, before anything is loaded."""

import math
from typing import TYPE_CHECKING

from sdsage.errors import BadRequest

from .engine import ask
from .values import Problems

if TYPE_CHECKING:
    from sdsage._estimate import Way

    from .job import Job

_GIB = 2**30
AUTO = "auto"


def check_vram(text: str | None, problems: Problems) -> None:
    """A number of GiB above 0, or auto."""
    if text not in (None, AUTO) and not _gib(str(text)) > 0:
        problems.add(f"--vram {text} can't be used: it takes a number of GiB above 0, such as 12, or auto")


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def fit(job: "Job", device: str, free: int | None) -> str:
    """Sets what --vram chooses in the job, and says it; "" when there was nothing to choose.

    Args:
        device: the one that the model will be on.
        free: bytes that are free there; None when nobody tells.

    Raises:
        BadRequest: the job can't fit; names the options with which it would.
    """
    from sdsage._budget import budget_bytes, check, choose, options
    from sdsage._estimate import CPU, Way
    from sdsage._host import host_memory

    wanted = job.settings["vram"]
    if device == CPU:
        told = wanted and job.settings["device"] is None  # otherwise a warning has said it
        return "--vram has no effect: everything runs on the CPU" if told else ""
    if free is None and (wanted in (None, AUTO)):
        if wanted:
            raise BadRequest(f"--vram auto can't be used: {device} does not tell how much memory it has; give a number")
        return ""
    found = ask(job.settings, "estimate", job.ctx, job.gen, device)
    if found is None:
        if wanted:
            raise BadRequest("--vram can't be used with these files: what they need can't be told from their headers")
        return ""
    given = Way(job.ctx.offload_params_to_cpu, job.gen.vae_tiling_params.enabled, job.ctx.max_vram)
    host, what = host_memory(), _words(job)
    if not wanted:
        check(found, free or 0, given, host, what)
        return ""
    budget = (free or 0) if wanted == AUTO else budget_bytes(_gib(wanted))
    if free is not None and budget > free:
        raise BadRequest(f"--vram {wanted} is more than {device} has free, {free / _GIB:.1f} GiB: use --vram auto")
    choice = choose(found, budget, given, host, f"{what} with --vram {wanted}")
    _apply(job, choice.way)
    chosen = " ".join(options(choice.way, given)) or "nothing had to change"
    return f"--vram {wanted}: {chosen}; {choice.peak.name} takes most, about {choice.peak.bytes / _GIB:.1f} GiB"


def _words(job: "Job") -> str:
    frames = getattr(job.gen, "video_frames", 0)
    return f"{job.gen.width}x{job.gen.height} pixels" + (f" and {frames} frames" if frames else "")


def _apply(job: "Job", way: "Way") -> None:
    """The structs that the engine gets, and the settings that are recorded."""
    job.ctx.offload_params_to_cpu, job.ctx.max_vram = way.offload, way.max_vram
    job.gen.vae_tiling_params.enabled = way.tiling
    job.settings.values |= {"offload_to_cpu": way.offload, "vae_tiling": way.tiling, "max_vram": way.max_vram}
