"""What the change from the high-noise expert of a Wan 2.2 pair to the low-noise one costs with --offload-to-cpu, beside
what the bus takes for its bytes; on random weights of the real size.

    python benchmarks/expert_switch.py [--size 14b] [--shape 832x480x33] [--models /dev/shm/random-models]

Two jobs of 2 + 2 steps, one forward a step, on one context. In the first most of the GPU's memory is taken, so that
one expert fits and the other waits in the host's memory; in the second there is room for both, and the second expert is
copied while the first computes its last step. The switch is what the two steps at the change take beyond two others;
the bus is measured in the same run, by copies of pinned memory. Results go to benchmarks/results/expert_switch.json.
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from step import PROMPT, SEED, Enough, Shape

import sdsage
from sdsage._bench import random_models

RESULT = Path(__file__).parent / "results" / "expert_switch.json"
GIB = 2**30
COPY = re.compile(r"(\S+): (\d+) MB copied (\w+) pinned memory,? at ([\d.]+) GB/s(?:.*?(\d+) ms were waited for)?")
LIMIT = 1.2  # of what the bus takes


class Runtime:
    """The few functions of the CUDA runtime that are needed, from the library that the engine has loaded."""

    def __init__(self) -> None:
        maps = Path("/proc/self/maps").read_text()
        found = re.search(r"/\S*libcudart\.so\S*", maps)
        if found is None:
            sys.exit("the engine has no libcudart: this measures CUDA builds")
        self._lib = ctypes.CDLL(found[0])

    def _call(self, name: str, *args: Any) -> None:
        if code := getattr(self._lib, name)(*args):
            sys.exit(f"{name} failed with CUDA error {code}")

    def alloc(self, size: int, pinned: bool = False) -> ctypes.c_void_p:
        at = ctypes.c_void_p()
        self._call("cudaMallocHost" if pinned else "cudaMalloc", ctypes.byref(at), ctypes.c_size_t(size))
        return at

    def free(self, at: ctypes.c_void_p, pinned: bool = False) -> None:
        self._call("cudaFreeHost" if pinned else "cudaFree", at)

    def memory(self) -> tuple[int, int]:
        """Free and all bytes of the current device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def to_device(self, to: ctypes.c_void_p, at: ctypes.c_void_p, size: int) -> None:
        self._call("cudaMemcpy", to, at, ctypes.c_size_t(size), ctypes.c_int(1))


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def bus(cuda: Runtime) -> dict[str, float]:
    """GB/s from pinned memory to the GPU, and what pinning takes."""
    size = 2 * GIB
    start = time.perf_counter()
    source = cuda.alloc(size, pinned=True)
    pinning = time.perf_counter() - start
    target = cuda.alloc(size)
    rates = [size / 1e9 / seconds(lambda: cuda.to_device(target, source, size)) for _ in range(6)][1:]
    freeing = seconds(lambda: cuda.free(source, pinned=True))
    cuda.free(target)
    return {
        "GB/s": round(statistics.median(rates), 2),
        "pinning, GB/s": round(size / 1e9 / pinning, 2),
        "unpinning, GB/s": round(size / 1e9 / freeing, 2),
    }


def job(shape: Shape) -> sdsage.SdVidGenParams:
    params = sdsage.SdVidGenParams(prompt=PROMPT, seed=SEED)
    params.width, params.height, params.video_frames = shape
    for expert in (params.sample_params, params.high_noise_sample_params):
        expert.sample_steps = 2
        expert.sample_method = "euler"
        expert.guidance.txt_cfg = 1.0
    return params


def run(context: Any, shape: Shape, said: list[str], rate: float) -> dict[str, Any]:
    """Figures of one job, up to its last step."""
    ends: list[float] = []
    said.clear()

    def watch(progress: sdsage.Progress) -> None:
        if progress.stage == "sample" and (progress.step > 0 or not ends):
            ends.append(time.perf_counter())  # the first entry is the beginning
            if progress.expert == "low-noise" and progress.step == progress.steps:
                raise Enough

    with contextlib.suppress(Enough):
        context.generate_video(job(shape), on_progress=watch)
    first, last_high, first_low, later = (b - a for a, b in itertools.pairwise(ends))
    copies = [m.groups() for line in said if (m := COPY.search(line))]
    _, megabytes, how, copied, waited = copies[-1]
    needed = int(megabytes) * 2**20 / 1e9 / rate
    switch = last_high + first_low - 2 * later
    return {
        "steps": [round(s, 3) for s in (first, last_high, first_low, later)],
        "expert, MB": int(megabytes),
        "copied": f"{how} pinned memory at {copied} GB/s" + (f", {waited} ms waited for" if waited else ""),
        "switch, s": round(switch, 3),
        "bus needs, s": round(needed, 3),
        "ratio": round(switch / needed, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(random_models.WAN), default="14b")
    parser.add_argument("--shape", type=Shape.parse, default=Shape(832, 480, 33), metavar="WxHxFRAMES")
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/random-models"))
    parser.add_argument("--leave", type=float, default=26, help="GiB of the GPU in the first job")
    args = parser.parse_args()
    start = time.perf_counter()
    files = random_models.make(args.models, args.size)
    written = time.perf_counter()
    files["high_noise_diffusion_model_path"] = files["diffusion_model_path"]  # each expert has memory of its own
    said: list[str] = []
    params = sdsage.SdCtxParams(**files, sage_attn=True, offload_params_to_cpu=True)
    entry: dict[str, Any] = {
        "device": next(d.description for d in sdsage.devices() if d.kind == "gpu"),
        "engine": {k: sdsage.build_info()[k] for k in ("version", "upstream", "cuda")},
        "date": time.strftime("%Y-%m-%d"),
        "job": f"{args.size}, Q8_0, {args.shape}, 2 + 2 steps, one forward a step",
    }
    cuda = Runtime()
    with sdsage.Context(params, on_log=lambda level, text: said.append(text)) as context:
        loaded = time.perf_counter()
        entry["seconds"] = {"writing files": round(written - start, 1), "loading": round(loaded - written, 1)}
        entry["bus"] = bus(cuda)
        free, _ = cuda.memory()
        filler = cuda.alloc(max(GIB, free - int(args.leave * GIB)))
        entry["room for one expert"] = run(context, args.shape, said, entry["bus"]["GB/s"])
        cuda.free(filler)
        entry["room for both"] = run(context, args.shape, said, entry["bus"]["GB/s"])
    entry["seconds"]["in all"] = round(time.perf_counter() - start, 1)
    for name, value in entry.items():
        print(f"{name}: {json.dumps(value)}", flush=True)
    RESULT.write_text(json.dumps(entry, indent=2) + "\n")
    if entry["room for one expert"]["ratio"] > LIMIT:
        sys.exit(f"the switch costs more than {LIMIT} times what the bus takes")


if __name__ == "__main__":
    main()
