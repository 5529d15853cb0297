"""`sdsage bench gen`: the same generation with FlashAttention and with SageAttention, each in a process of its own."""

import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from sdsage._bench.quality import psnr
from sdsage.context import Context, Result
from sdsage.params import SdCtxParams, SdImgGenParams, SdVidGenParams

OFF, ON = "flash", "sage"


def measure(
    ctx: SdCtxParams,
    gen: SdImgGenParams | SdVidGenParams,
    device: str | None,
    with_sage: bool,
    say: Callable[[str], None],
    **more: Any,
) -> dict[str, Any]:
    """Runs by name, and how far their results are apart.

    Args:
        ctx: its `sage_attn` and `diffusion_flash_attn` are set here, and its weights are kept for one job.
        more: of the contexts; each has a process of its own unless `isolated` is False.
    """
    results: dict[str, Result] = {}
    for name in (OFF, ON) if with_sage else (OFF,):
        ctx.sage_attn, ctx.diffusion_flash_attn = name == ON, True
        say(f"with {'SageAttention' if name == ON else 'FlashAttention'}")
        with Context(ctx, device=device, **{"isolated": True, **more}) as context:
            make = context.generate_image if isinstance(gen, SdImgGenParams) else context.generate_video
            results[name] = make(gen, keep_latents=True)  # type: ignore[arg-type]
            model = context.version_name
        say(f"  {results[name].timings.total:.2f} s")
    found: dict[str, Any] = {"version_name": model, "runs": {name: figures(r) for name, r in results.items()}}
    return found | {"apart": apart(results[OFF], results[ON]) if with_sage else None}


def figures(result: Result) -> dict[str, Any]:
    """Seconds by stage, and which kernels ran how often."""
    t = result.timings
    later = [step.seconds for step in t.steps[1:]]
    seconds = {name: getattr(t, name) for name in ("load", "encode_text", "first_step", "mean_later_steps", "decode")}
    seconds |= {"median_later_steps": statistics.median(later) if later else None, "total": t.total}
    return {
        "seconds": {name: None if s is None else round(s, 4) for name, s in seconds.items()},
        "later_steps": [round(s, 4) for s in later],
        "attention": [asdict(a) for a in result.attention],
        "levers": [asdict(lever) for lever in result.levers],
        "frames": len(result.frames),
        "width": result.frames.shape[2],
        "height": result.frames.shape[1],
        "adjusted": list(result.adjusted),
        "finite": all(bool(np.isfinite(x).all()) for x in result.latents),
    }


def apart(a: Result, b: Result) -> dict[str, Any]:
    """PSNR of the frames, whose peak is 255, and of the latents, whose peak is their range; null: the same."""
    first, second = a.latents[0], b.latents[0]
    return {
        "frames_db": psnr(a.frames, b.frames, 255),
        "latents_db": psnr(first, second, float(np.ptp(first))),
        "same": bool(np.array_equal(a.frames, b.frames)),
    }
