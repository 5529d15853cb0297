"""Steps so small that what lies between the kernels counts: guidance's two forwards alone and in one batch, with CUDA
graphs and without, on random weights of the real sizes.

    python benchmarks/small_steps.py [--models /dev/shm/random-models] [--steps 20]

Stable Diffusion 1.5 at 512x512 with guidance, and Wan 1.3B at 480x480, one frame, without. Wan has no batches: a
picture of twice the size has the rows of two, and more attention, so that its time is what a batch would take at most.
CUDA graphs are there where
ggml was built with GGML_CUDA_GRAPHS=ON; a process of its own with GGML_CUDA_DISABLE_GRAPHS=1 goes without. Prints the
median time of the later steps in ms. Results go to benchmarks/results/small_steps.json.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from step import PROMPT, SEED, Enough

import sdsage
from sdsage._bench import random_models, random_unet

RESULT = Path(__file__).parent / "results" / "small_steps.json"
ALL = "linear,fuse,vae"
# name: model, width and height, levers
RUNS = {
    "SD 1.5 512x512, two forwards": ("sd1.5", (512, 512), ALL),
    "SD 1.5 512x512, one of both": ("sd1.5", (512, 512), f"{ALL},batch"),
    "Wan 1.3B 480x480x1": ("1.3b", (480, 480), ALL),
    "Wan 1.3B 960x480x1": ("1.3b", (960, 480), ALL),
}


def files(folder: Path, model: str) -> dict[str, str]:
    if model == "sd1.5":
        return {"model_path": str(random_unet.make(folder / "sd15.safetensors"))}
    return random_models.make(folder, model)


def job(model: str, size: tuple[int, int], steps: int) -> Any:
    params: Any
    if model == "sd1.5":
        params = sdsage.SdImgGenParams(prompt=PROMPT, negative_prompt="blurry", seed=SEED)
        params.sample_params.guidance.txt_cfg = 7.0
    else:
        params = sdsage.SdVidGenParams(prompt=PROMPT, seed=SEED, video_frames=1)
        params.sample_params.guidance.txt_cfg = 1.0
    params.width, params.height = size
    params.sample_params.sample_steps = steps
    params.sample_params.sample_method = "euler"
    return params


def run(folder: Path, name: str, steps: int) -> dict[str, Any]:
    model, size, levers = RUNS[name]
    said: list[str] = []
    ends: list[float] = []

    def watch(progress: sdsage.Progress) -> None:
        if progress.stage == "sample":
            ends.append(time.perf_counter())
            if progress.step == steps:
                raise Enough

    params = sdsage.SdCtxParams(**files(folder, model), diffusion_flash_attn=True, engine_levers=levers)
    with sdsage.Context(params, on_log=lambda level, text: said.append(text)) as context, contextlib.suppress(Enough):
        make = context.generate_image if model == "sd1.5" else context.generate_video
        make(job(model, size, steps), on_progress=watch)
    later = [1e3 * (b - a) for a, b in itertools.pairwise(ends)][4:]  # CUDA graphs are there from the fourth forward on
    return {
        "ms a step": round(statistics.median(later), 2),
        "fastest, slowest": [round(min(later), 2), round(max(later), 2)],
        "CUDA graphs ready, given up": [sum(f"graph warmup {w}" in s for s in said) for w in ("complete", "reset")],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/random-models"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps({name: run(args.models, name, args.steps) for name in RUNS}))
        return
    for model, _, _ in RUNS.values():
        files(args.models, model)
    entry: dict[str, Any] = {
        "device": next(d.description for d in sdsage.devices() if d.kind == "gpu"),
        "engine": {k: sdsage.build_info()[k] for k in ("version", "upstream", "cuda")},
        "date": time.strftime("%Y-%m-%d"),
    }
    command = [sys.executable, __file__, "--one", "--models", str(args.models), "--steps", str(args.steps)]
    for way, more in (("with CUDA graphs", {}), ("without", {"GGML_CUDA_DISABLE_GRAPHS": "1"})):
        done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        entry[way] = json.loads(done.stdout.splitlines()[-1])
        for name, values in entry[way].items():
            print(f"{name}, {way}: {json.dumps(values)}", flush=True)
    RESULT.write_text(json.dumps(entry, indent=2) + "\n")


if __name__ == "__main__":
    main()
