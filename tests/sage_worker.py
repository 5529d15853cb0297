"""sage_worker.py MODEL: runs jobs with SageAttention on the CPU and prints what came out as JSON.

For test_sage_engine.py; it needs the test library (SDSAGE_LIB_DIR).
A process of its own, because a process loads one libsdsage.
"""

import hashlib
import json
import sys
from typing import Any

import numpy as np
from conftest import ctx_params, small_image, small_video

import sdsage
from sdsage import presets
from sdsage._ffi import lib, text

ADA, AMPERE, HOPPER = (89, 13000, b"80 89"), (80, 13000, b"80 89"), (90, 13000, b"90a")


def files(name: str) -> dict[str, str]:
    from pathlib import Path

    options = presets.load(name).options
    return {k: str(v) for k, v in options.items() if isinstance(v, str) and Path(v).is_file()}


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """dB of latents, peak being the range of `b`."""
    error = float(np.mean((a.astype(np.float64) - b) ** 2))
    return 999.0 if error == 0 else 10 * float(np.log10(float(np.ptp(b)) ** 2 / error))


def run(model: str, break_it: bool = False, prompt: str = "a lovely cat", **fields: Any) -> dict[str, Any]:
    """One job on a context of its own."""
    with sdsage.Context(ctx_params(MODELS[model], **fields)) as context:
        lib.sdsage_test_break_sage(break_it)
        if model == "flux":
            result = context.generate_image(small_image(prompt=prompt), keep_latents=True)
        else:
            result = context.generate_video(small_video(prompt=prompt), keep_latents=True)
        lib.sdsage_test_break_sage(False)
        latents = result.latents[0]
        decoded = hashlib.sha256(context.decode(DECODED[0] if DECODED else latents).tobytes()).hexdigest()
        DECODED.append(latents)
    return {
        "latents": latents,
        "decoded": decoded,
        "hash": hashlib.sha256(latents.tobytes() + result.frames.tobytes()).hexdigest(),
        "frames": result.frames,
        "attention": [[a.module, a.kernel, a.calls, a.why] for a in result.attention],
        "neighbours": text(lib.sdsage_test_neighbours()).split("\n")[:-1],
    }


def refusal(fake: tuple[int, int, bytes], kernel: str) -> str:
    lib.sdsage_test_sage_cpu(*fake)
    params = sdsage.SdCtxParams(diffusion_model_path="/no/such/file.gguf", sage_attn=True, sage_kernel=kernel)
    try:
        sdsage.Context(params)
    except sdsage.SageUnavailable as error:
        return str(error)
    return ""


def native_refusal() -> list[Any]:
    """What new_sd_ctx itself does, without Python's own check before it."""
    from sdsage._ffi import ffi
    from sdsage._job import Hooks
    from sdsage._job import run as run_job

    def body() -> list[Any]:
        params = ffi.new("sd_ctx_params_t *")
        lib.sd_ctx_params_init(params)
        was_off = not params.sage_attn
        params.sage_attn = True
        ctx = lib.new_sd_ctx(params)
        return [
            was_off,
            ctx == ffi.NULL,
            lib.sdsage_last_status() == lib.SDSAGE_SAGE_UNAVAILABLE,
            text(lib.sdsage_last_error()),
        ]

    return run_job(body, Hooks())


def with_previews() -> list[list[Any]]:
    """A job that decodes a preview after every step; both experts."""
    with sdsage.Context(ctx_params(MODELS["wan"], sage_attn=True)) as context:
        result = context.generate_video(
            small_video(), on_preview=lambda step, frames, noisy: None, preview=sdsage.Preview("vae")
        )
    return [[a.module, a.kernel, a.calls] for a in result.attention]


def broken() -> str:
    lib.sdsage_test_break_sage(True)
    try:
        sdsage.Context(ctx_params(MODELS["wan"], sage_attn=True))
    except sdsage.GenerationError as error:
        return str(error)
    finally:
        lib.sdsage_test_break_sage(False)
    return ""


DECODED: list[np.ndarray] = []  # the latents of the first run, which every context decodes
MODELS = {"wan": files("tiny-random"), "flux": files("tiny-flux")}


def main() -> None:
    model = sys.argv[1]
    found: dict[str, Any] = {"no CUDA": refusal((0, 0, b""), "auto"), "native": native_refusal()}
    found["old card"] = refusal((75, 13000, b"80 89"), "auto")
    found["not compiled"] = refusal((120, 13000, b"80 89"), "auto")
    found["old toolkit"] = refusal((89, 11080, b"80 89"), "auto")
    found["fp8 on Ampere"] = refusal(AMPERE, "fp8")
    lib.sdsage_test_sage_cpu(*ADA)
    found["with previews"] = with_previews()
    found["sage_info"] = vars(sdsage.sage_info())
    found["broken card"] = broken()
    plain = run(model)
    runs = {"plain": plain, "zeroed": run(model, break_it=True, sage_attn=True)}
    for kernel in ("auto", "fp16", "fp8", "fp8++"):
        runs[kernel] = run(model, sage_attn=True, sage_kernel=kernel)
    lib.sdsage_test_sage_cpu(*HOPPER)
    runs["hopper"] = run(model, sage_attn=True, sage_kernel="hopper")
    runs["auto on Hopper"] = run(model, sage_attn=True)
    lib.sdsage_test_sage_cpu(*ADA)
    runs["with diffusion_flash_attn"] = run(model, sage_attn=True, diffusion_flash_attn=True)
    runs["with flash_attn"] = run(model, sage_attn=True, flash_attn=True)
    runs["flash"] = run(model, diffusion_flash_attn=True)
    runs["plain again"] = run(model)
    for one in runs.values():
        one["psnr"] = psnr(one["latents"], plain["latents"])
    other = "eight black horses at night"
    far, far_sage = run(model, prompt=other), run(model, prompt=other, sage_attn=True)
    found["another prompt"] = [
        psnr(far["latents"], plain["latents"]),
        psnr(far_sage["latents"], runs["auto"]["latents"]),
    ]
    for one in runs.values():
        del one["latents"], one["frames"]
    found["runs"] = runs
    print(json.dumps(found))


if __name__ == "__main__":
    main()
