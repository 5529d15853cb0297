"""The estimate of GPU memory beside the measured peak, on random weights of Wan's real sizes.

    python benchmarks/memory.py [--models FOLDER] [--only 14b-33-plain ...]

Each run is one step and the decode of 832x480 pixels, in a process of its own, with weights given back once they are
done with, as the command line does. The peak is that of nvidia-smi twice a second. Results go to
benchmarks/results/memory.json; a difference beyond 15 % ends the script with an error. Where max_vram cuts a network
into parts the estimate is that limit, which whole blocks fill only in part: a peak above it is the error there.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from step import Memory

import sdsage
from sdsage._bench import random_models
from sdsage._estimate import CONTEXT, ERROR, Way, estimate

RESULT = Path(__file__).parent / "results" / "memory.json"
MIB = 2**20
WIDTH, HEIGHT = 832, 480
PLAIN, TILED = Way(False, False), Way(False, True)
# name: size of the model, frames, how memory is used, SageAttention
RUNS: dict[str, tuple[str, int, Way, bool]] = {
    "1.3b-33-plain": ("1.3b", 33, PLAIN, False),
    "14b-33-plain": ("14b", 33, PLAIN, False),
    "14b-81-plain": ("14b", 81, PLAIN, False),
    "14b-81-sage-tiled": ("14b", 81, TILED, True),
    "1.3b-81-tiled": ("1.3b", 81, TILED, False),
    "14b-33-offload-tiled": ("14b", 33, Way(True, True), False),
    "14b-33-cut": ("14b", 33, Way(True, True, 6.0), False),
}


def params(name: str, files: dict[str, str]) -> tuple[sdsage.SdCtxParams, sdsage.SdVidGenParams]:
    _, frames, way, sage = RUNS[name]
    context = sdsage.SdCtxParams(**files, diffusion_flash_attn=not sage, sage_attn=sage, free_params_immediately=True)
    context.offload_params_to_cpu, context.max_vram = way.offload, way.max_vram
    job = sdsage.SdVidGenParams(prompt="a lovely cat", width=WIDTH, height=HEIGHT, video_frames=frames, seed=42)
    job.sample_params.sample_steps = 1
    job.sample_params.sample_method = "euler"
    job.sample_params.guidance.txt_cfg = 1.0
    job.vae_tiling_params.enabled = way.tiling
    return context, job


def used() -> int:
    """MiB in use on the first GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def one(name: str, models: Path) -> None:
    """A run in this process; prints its figures as JSON."""
    context_params, job = params(name, random_models.make(models, RUNS[name][0]))
    device = next(d.name for d in sdsage.devices() if d.kind == "gpu")
    found = estimate(context_params, job, device)
    assert found is not None
    before, way = used(), RUNS[name][2]
    with Memory() as memory:
        stages: dict[str, int] = {}

        def watch(progress: sdsage.Progress) -> None:  # the peak so far, when a stage begins
            stages.setdefault(progress.stage, memory.peak - before)

        with sdsage.Context(context_params, device=device, on_progress=watch) as context:
            context.generate_video(job)
    print(
        json.dumps(
            {
                "estimate MiB": (found.peak(way).bytes + CONTEXT) // MIB,
                "peak MiB": memory.peak - before,
                "estimate by stage": {s.name: (s.bytes + CONTEXT) // MIB for s in found.stages(way)},
                "peak before stage": stages,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("build/random-models"))
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--one", choices=list(RUNS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one, args.models)
        return
    entry: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.is_file() else {"runs": {}}
    entry |= {
        "device": next(d.description for d in sdsage.devices() if d.kind == "gpu"),
        "engine": {k: sdsage.build_info()[k] for k in ("version", "upstream", "cuda")},
        "date": time.strftime("%Y-%m-%d"),
        "job": f"{WIDTH}x{HEIGHT}, 1 step and decode, Q8_0",
    }
    wrong = []
    for size in {RUNS[name][0] for name in args.only}:
        random_models.make(args.models, size)
    for name in args.only:
        command = [sys.executable, __file__, "--one", name, "--models", str(args.models)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            entry["runs"][name] = {"failed": done.stderr.strip().splitlines()[-1:]}
            wrong.append(name)
        else:
            values = json.loads(done.stdout.splitlines()[-1])
            difference = values["estimate MiB"] / values["peak MiB"] - 1
            entry["runs"][name] = {"difference": f"{100 * difference:+.1f} %"} | values
            if difference < 0 if RUNS[name][2].max_vram else abs(difference) > ERROR:
                wrong.append(name)
        print(name, json.dumps(entry["runs"][name]), flush=True)
        RESULT.write_text(json.dumps(entry, indent=2) + "\n")
    if wrong:
        sys.exit(f"beyond {100 * ERROR:.0f} % or failed: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
