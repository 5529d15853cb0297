"""levers_worker.py MODEL LEVERS...: runs jobs with the engine's levers on the CPU and prints what came out as JSON.

In place of levers the name of a fault makes all of them work, one of them wrongly; "fast linear" makes them work with
linear layers in FP8.

For test_levers.py; it needs the test library (SDSAGE_LIB_DIR).
A process of its own, because a process loads one libsdsage.
"""

import json
import sys
from typing import Any

import numpy as np
from conftest import ctx_params, small_image, small_video
from sage_worker import files, psnr

import sdsage
from sdsage._ffi import lib, text

FAULTS = {
    "no bias": 1,
    "no shift": 2,
    "turned the other way": 3,
    "no bias in convolutions": 4,
    "a wrong scale": 5,
    "no FP8 for 512": 6,
    "no gate": 8,
    "scale 1 % off": 9,
}
SCRATCH = 1 << 20
FAST = ("fast linear", "a wrong scale", "no FP8 for 512")
Run = tuple[Any, Any, dict[str, int], list[list[Any]]]


def run(
    model: str, levers: str | None, on: bool = True, fault: int = 0, latents: Any = None, fast: bool = False
) -> Run:
    """Latents of one job, frames decoded from `latents` (or its own), what the levers computed how often, and what the
    result says about that."""
    lib.sdsage_test_levers_cpu(on, fault)
    lib.sdsage_test_levers()
    with sdsage.Context(ctx_params(files(model), engine_levers=levers, fast_linear=fast)) as context:
        if model == "tiny-random":
            result = context.generate_video(small_video(), keep_latents=True)
        else:
            result = context.generate_image(small_image(), keep_latents=True)
        lines = text(lib.sdsage_test_levers()).splitlines()
        frames = context.decode(result.latents[0] if latents is None else latents)
    counts = {line.split(": ")[0]: int(line.split(": ")[1]) for line in lines}
    return result.latents[0], frames, counts, [[x.module, x.lever, x.calls, x.why] for x in result.levers]


def chain(pulled: bool, scratch: int = 0) -> tuple[float, int]:
    """The result of two linear layers, and how much memory their graph reserved."""
    lib.sdsage_test_lever_scratch(scratch, 0)
    return lib.sdsage_test_lever_chain(pulled), lib.sdsage_test_lever_reserved()


def without_memory() -> dict[str, Any]:
    """A decode whose scratch memory is there for tiles of 256 x 32 pixels, and not for all of 320 x 32 at once."""
    latents = np.random.default_rng(1).normal(size=(1, 16, 1, 4, 40)).astype(np.float32)
    tiling = sdsage.SdTilingParams(enabled=True, tile_size_x=32, tile_size_y=32)
    with sdsage.Context(ctx_params(files("tiny-random"))) as context:
        tiled = context.decode_all([latents], tiling)
        lib.sdsage_test_lever_scratch(1 << 50, 300_000)  # a result: 320 x 32 x 8 x 4 bytes, or 256 x 32 x 8 x 4
        retried = context.decode_all([latents])
    return {"adjusted": retried.adjusted, "same": bool((retried.frames == tiled.frames).all())}


def refused() -> str:
    """What a context says on a GPU that has no FP8."""
    lib.sdsage_test_levers_cpu(True, 7)
    try:
        sdsage.Context(sdsage.SdCtxParams(diffusion_model_path="/no/such/file.gguf", fast_linear=True), device="cpu")
    except sdsage.BadRequest as error:
        return str(error)
    return ""


def main() -> None:
    model, *names = sys.argv[1:]
    plain, decoded, _, _ = run(model, "none", on=False)
    found: dict[str, Any] = {}
    for name in names:
        levers = "default" if name in (*FAULTS, *FAST) else name
        latents, frames, counts, said = run(model, levers, fault=FAULTS.get(name, 0), latents=plain, fast=name in FAST)
        found[name] = {
            "latents": psnr(latents, plain),
            "frames": psnr(frames.astype(np.float64), decoded.astype(np.float64)),
            "same": bool((latents == plain).all() and (frames == decoded).all()),
            "counts": counts,
            "said": said,
        }
    lib.sdsage_test_levers_cpu(True, 0)
    found["chain"] = [chain(pulled)[0] for pulled in (False, True)]
    found["scratch"] = [chain(True, bytes_) for bytes_ in (0, SCRATCH)]
    found["without memory"] = without_memory() if model == "tiny-random" else None
    found["refused"] = refused()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
