"""What the worker process costs: `Context(..., isolated=True)` against the same context in the program itself.

    python benchmarks/worker.py [--rounds 15]

Both contexts are loaded, and then take turns at one job of the tiny preset, so that a slow moment of the machine meets
both. Sampling is what the engine measured; the whole job is wall time, with the frames on their way. Start-up is the
time from the start of an interpreter until the model is loaded, engine and all. The least of the rounds counts, for
sampling step by step: what other programs do only makes a round longer. Results go to benchmarks/results/worker.json.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import sdsage
from sdsage import presets

RESULT = Path(__file__).parent / "results" / "worker.json"
START = """
import sys, time
begun = float(sys.argv[2])
import sdsage
sys.path.insert(0, sys.argv[1])
from worker import params
with sdsage.Context(params(), isolated=sys.argv[3] == "isolated"):
    print(time.monotonic() - begun)
"""


def params() -> Any:
    """The tiny Wan2.2 with both experts, on one thread."""
    made = sdsage.SdCtxParams(n_threads=1)
    options = presets.load("tiny-random").options
    names = {"diffusion_model", "high_noise_diffusion_model", "vae", "t5xxl"}
    for name in names:
        setattr(made, f"{name}_path", options[name])
    return made


def job() -> Any:
    """The preset's own size and steps."""
    options = presets.load("tiny-random").options
    made = sdsage.SdVidGenParams(prompt="a lovely cat", seed=42)
    made.width, made.height, made.video_frames = options["width"], options["height"], options["video_frames"]
    made.sample_params.sample_steps = 4
    made.high_noise_sample_params.sample_steps = 2
    made.sample_params.guidance.txt_cfg = made.high_noise_sample_params.guidance.txt_cfg = 3.5
    return made


def jobs(rounds: int) -> dict[str, dict[str, list[Any]]]:
    """Seconds of sampling, of its steps one after the other, and of the whole job, for each way."""
    found: dict[str, dict[str, list[Any]]] = {k: {"sample": [], "steps": [], "job": []} for k in ("here", "isolated")}
    with sdsage.Context(params()) as here, sdsage.Context(params(), isolated=True) as isolated:
        for i in range(rounds + 1):
            pair = [("here", here), ("isolated", isolated)]
            for name, context in pair if i % 2 else reversed(pair):
                begun = time.monotonic()
                result = context.generate_video(job(), on_progress=lambda p: None)
                if i:  # the first round warms up
                    found[name]["job"].append(time.monotonic() - begun)
                    found[name]["sample"].append(result.timings.sample)
                    found[name]["steps"].append([step.seconds for step in result.timings.steps])
    return found


def starts(rounds: int) -> dict[str, list[float]]:
    """Seconds from the start of an interpreter until the model is loaded."""
    found: dict[str, list[float]] = {"here": [], "isolated": []}
    for i in range(rounds + 1):
        for name in found:
            command = [sys.executable, "-P", "-c", START, str(Path(__file__).parent), str(time.monotonic()), name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            if i:
                found[name].append(float(done.stdout))
    return found


def measure(rounds: int) -> dict[str, Any]:
    """Everything, and the two numbers in question."""
    load = os.getloadavg()[0]
    ran, started = jobs(rounds), starts(rounds)
    sample = {name: sum(map(min, zip(*times["steps"], strict=True))) for name, times in ran.items()}
    start = {name: min(times) for name, times in started.items()}
    return {
        "device": "cpu",
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(load, 2),
        "python": platform.python_version(),
        "sdsage": sdsage.__version__,
        "rounds": rounds,
        "least_seconds": {
            "sample": sample,
            "job": {name: min(times["job"]) for name, times in ran.items()},
            "start": start,
        },
        "median_seconds": {
            "sample": {name: statistics.median(times["sample"]) for name, times in ran.items()},
            "job": {name: statistics.median(times["job"]) for name, times in ran.items()},
            "start": {name: statistics.median(times) for name, times in started.items()},
        },
        "sampling_overhead": sample["isolated"] / sample["here"] - 1,
        "start_overhead_seconds": start["isolated"] - start["here"],
        "seconds": {"jobs": ran, "starts": started},
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="times each way is measured")
    result = measure(max(parser.parse_args().rounds, 1))
    print(f"{result['cores']} cores, load {result['load_before']}, least (median) seconds of {result['rounds']} rounds")
    for what in ("sample", "job", "start"):
        cells = [
            f"{name} {result['least_seconds'][what][name]:.3f} ({result['median_seconds'][what][name]:.3f})"
            for name in ("here", "isolated")
        ]
        print(f"  {what:<8} {'   '.join(cells)}")
    print(f"  sampling overhead {100 * result['sampling_overhead']:+.2f} % (aim: under 2)")
    print(f"  start-up overhead {result['start_overhead_seconds']:+.3f} s (aim: under 0.3)")
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
