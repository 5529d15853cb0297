"""Whether the engine's levers change no more than rounding explains: latents after each of four steps of random models.

    python benchmarks/lever_quality.py [--size 1.3b] [--shape 480x480x9] [--weights q8_0 f16] [--models FOLDER]

The yardstick is the same model with its weights as F32 and products of F32, without levers: "exact". What rounding to
BF16 changes is measured without levers, too: the same with weights rounded to BF16. `judge` compares every lever with
both; docs/performance.md has the derivation. A file without a bias is what a lever computes that forgets the bias: such
faults have to be found. Results go to benchmarks/results/lever_quality.json.
"""

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sdsage
from sdsage._bench import random_models
from sdsage._bounds import LEVERS
from sdsage.latents import load_latents
from sdsage.tiny import umt5, wan, wan_vae
from sdsage.tiny.tensors import Constant, DType, Tensor, Uniform

RESULT = Path(__file__).parent / "results" / "lever_quality.json"
SIGMAS = [1.0, 0.9, 0.75, 0.5, 0.0]  # Wan's four steps with a shift of 3
STEPS = range(1, len(SIGMAS))
SEED, PROMPT = 42, "a lovely cat walking in the garden"
TYPES = {"q8_0": DType.Q8_0, "f16": DType.F16}

Values = NDArray[np.float32]
Steps = list[Values]  # latents after each step


@dataclass(frozen=True)
class Size:
    """Wan with a text encoder of its width, a few layers deep, and the smallest VAE: they are not judged."""

    net: wan.Size
    text: umt5.Size
    shape: tuple[int, int, int]  # px and frames


SIZES = {
    "1.3b": Size(random_models.WAN["1.3b"], replace(random_models.UMT5_XXL, layers=1), (480, 480, 9)),
    "tiny": Size(replace(wan.TINY, blocks=4), umt5.TINY, (256, 256, 5)),
}


# ---- models


def same(values: Values) -> Values:
    return values


def to_bf16(values: Values) -> Values:
    """To the nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def as_is(tensor: Tensor) -> Tensor:
    return tensor


def ending(end: str, value: float) -> Callable[[Tensor], Tensor]:
    """Makes tensors whose names end so the same value everywhere."""
    return lambda tensor: replace(tensor, fill=Constant(value)) if tensor.name.endswith(end) else tensor


def right(tensor: Tensor) -> Tensor:
    """As it should be; biases ten times those of the tiny models, so that a missing one outweighs rounding to BF16."""
    if tensor.name.endswith(".bias") and isinstance(tensor.fill, Uniform):
        return replace(tensor, fill=Uniform(10 * tensor.fill.std))
    return tensor


# By name: how weights are changed, and the levers.
RUNS: dict[str, tuple[random_models.Change | None, str]] = {
    "exact": (same, "none"),
    "exact, default": (same, "default"),
    "weights in BF16": (to_bf16, "none"),
    "none": (None, "none"),
    "default": (None, "default"),
    **{lever: (None, lever) for lever in LEVERS},
}
# By name: the run that goes wrong, and what is wrong in its file.
Faults = Mapping[str, tuple[str, Callable[[Tensor], Tensor]]]
FAULTS: Faults = {
    "no bias in the feed-forward": ("default", ending("ffn.2.bias", 0.0)),
    "a norm's scale 1 % off": ("exact, default", ending("norm3.weight", 1.01)),
}


def files(folder: Path, size: Size) -> dict[str, str]:
    """Fields of SdCtxParams beside the diffusion model."""
    text = random_models.write(folder / "umt5.gguf", umt5.umt5(size.text), "t5encoder")
    vae = random_models.write(folder / "vae.safetensors", wan_vae.wan_vae(wan_vae.WAN21))
    return {"t5xxl_path": str(text), "vae_path": str(vae)}


def diffusion(
    path: Path, size: Size, dtype: DType, change: random_models.Change | None, fault: Callable[[Tensor], Tensor]
) -> Path:
    tensors = [replace(t, dtype=dtype) if t.dtype is DType.Q8_0 else t for t in wan.wan(16, 16, size.net)]
    return random_models.write(path, [fault(right(t)) for t in tensors], "wan", change)


# ---- runs


class Sampled(Exception):
    """What follows is not wanted."""


def stop_before_decoding(progress: sdsage.Progress) -> None:
    if progress.stage == "decode":
        raise Sampled


def latents(folder: Path, model: Mapping[str, Any], levers: str, shape: tuple[int, int, int]) -> Steps:
    """After each step: those of a job that ends there."""
    found = []
    kept = sdsage.Checkpoint(folder / "latents")
    with sdsage.Context(sdsage.SdCtxParams(**model, engine_levers=levers)) as context:
        for step in STEPS:
            job = sdsage.SdVidGenParams(prompt=PROMPT, seed=SEED)
            job.width, job.height, job.video_frames = shape
            job.sample_params.sample_method = "euler"
            job.sample_params.sample_steps = step
            job.sample_params.custom_sigmas = SIGMAS[: step + 1]
            job.sample_params.guidance.txt_cfg = 1.0
            with suppress(Sampled):
                context.generate_video(job, checkpoint=kept, on_progress=stop_before_decoding)
            found.append(load_latents(kept.path).tensors[0].copy())
    return found


def run_all(
    folder: Path,
    size: Size,
    dtype: DType,
    shape: tuple[int, int, int],
    faults: Faults = FAULTS,
    before: Callable[[str], None] = lambda name: None,
    **fields: Any,
) -> tuple[dict[str, Steps], dict[str, Steps]]:
    """Latents by run, and by fault. One file of the diffusion model is there at a time.

    Args:
        before: is told the name of each run and fault.
        fields: more of SdCtxParams.
    """
    fields |= files(folder, size)
    found: dict[str, Steps] = {}
    faulty: dict[str, Steps] = {}
    wanted = [
        (change, as_is, found, {run: levers for run, (c, levers) in RUNS.items() if c is change})
        for change in (same, to_bf16, None)
    ]
    for name, (run, fault) in faults.items():
        change, levers = RUNS[run]
        wanted.append((change, fault, faulty, {name: levers}))
    for change, fault, into, runs in wanted:
        path = diffusion(folder / "wan.gguf", size, dtype, change, fault)
        for name, levers in runs.items():
            before(name)
            into[name] = latents(folder, {**fields, "diffusion_model_path": str(path)}, levers, shape)
        path.unlink()
    return found, faulty


# ---- what is allowed: docs/performance.md, "What they change"

SAFETY = 2.0  # limits are this much above what is expected


def errors(a: Steps, b: Steps) -> list[float]:
    """Root mean square of the difference, relative to `b`, by step."""
    x, y = ([v.astype(np.float64) for v in steps] for steps in (a, b))
    return [float(np.linalg.norm(p - q) / np.linalg.norm(q)) for p, q in zip(x, y, strict=True)]


@dataclass(frozen=True)
class Limit:
    """How far the latents of `run` may be from those of `other` after each step."""

    run: str
    other: str
    by_step: list[float]


BF16 = 1.6e-3  # what rounding to it is off by, root mean square, relative
F16_STEP = 2**-3 * BF16 * math.sqrt(12)  # from one F16 number to the next


def reordered(weights: list[float], terms: int) -> list[float]:
    """Errors by step where F32 sums of so many terms have another order; `weights`: those of weights in BF16."""
    result: list[float] = []
    sums = math.sqrt(terms) * 2**-16 * BF16
    for error in weights:
        apart = max([sums, *result[-1:]])  # of numbers that are rounded to F16
        result.append(error / BF16 * math.hypot(sums, math.sqrt(0.8 * apart * F16_STEP)))
    return result


def limits(found: Mapping[str, Steps], size: Size) -> list[Limit]:
    none, weights = (errors(found[run], found["exact"]) for run in ("none", "weights in BF16"))
    rounding = [math.sqrt(2) * w for w in weights]  # of weights, and of what they multiply
    left_to_ggml = not any(errors(found["default"], found["fuse"]))  # linear layers, on a device that prefers that
    result = [Limit("exact, default", "exact", [SAFETY * e for e in reordered(weights, size.net.ffn)])]
    expected = {"default": none if left_to_ggml else rounding, "linear": rounding, "fuse": none}
    for run, error in expected.items():
        result.append(Limit(run, "exact", [SAFETY * e for e in error]))
        result.append(Limit(run, "none", [SAFETY * math.hypot(n, e) for n, e in zip(none, error, strict=True)]))
    return [*result, Limit("vae", "none", [0.0] * len(none))]


def judge(found: Mapping[str, Steps], size: Size, run: str = "") -> list[str]:
    """What is beyond its limit, of one run or of all; nothing if they are as they should be."""
    said = []
    for limit in limits(found, size):
        if run in ("", limit.run):
            apart = errors(found[limit.run], found[limit.other])
            said += [
                f"{limit.run} is {a:.2e} from {limit.other} after step {step}: {most:.2e} are explained"
                for step, a, most in zip(STEPS, apart, limit.by_step, strict=True)
                if not a <= most  # also where one is NaN
            ]
    return said


def unseen(found: Mapping[str, Steps], faulty: Mapping[str, Steps], size: Size, faults: Faults = FAULTS) -> list[str]:
    """Faults that no limit tells."""
    return [name for name, (run, _) in faults.items() if not judge({**found, run: faulty[name]}, size, run)]


def figures(found: Mapping[str, Steps], faulty: Mapping[str, Steps], size: Size) -> dict[str, Any]:
    """For the file of results."""

    def rounded(values: list[float]) -> list[float]:
        return [float(f"{v:.3g}") for v in values]

    exact = found["exact"]
    return {
        "from exact": {run: rounded(errors(steps, exact)) for run, steps in found.items() if run != "exact"},
        "from none": {run: rounded(errors(found[run], found["none"])) for run in ("default", *LEVERS)},
        "limits": {f"{lim.run}, from {lim.other}": rounded(lim.by_step) for lim in limits(found, size)},
        "faults, from exact": {name: rounded(errors(steps, exact)) for name, steps in faulty.items()},
    }


# ----


def shape_of(text: str) -> tuple[int, int, int]:
    width, height, frames = map(int, text.split("x"))
    return width, height, frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="1.3b")
    parser.add_argument("--shape", type=shape_of, metavar="WxHxFRAMES")
    parser.add_argument("--weights", nargs="+", choices=list(TYPES), default=list(TYPES))
    parser.add_argument("--models", type=Path, help="a folder with room for 8 GB; default: one for temporary files")
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args()
    # what should be exact is not to be rounded to TF32, by attention's products either
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    size = SIZES[args.size]
    shape = args.shape or size.shape
    entry: dict[str, Any] = {
        "device": sdsage.devices()[0].description,
        "engine": {k: sdsage.build_info()[k] for k in ("version", "upstream", "cuda")},
        "date": time.strftime("%Y-%m-%d"),
        "job": f"{'x'.join(map(str, shape))}, sigmas {SIGMAS}, euler, one forward a step",
        "safety": SAFETY,
    }
    problems = []
    with tempfile.TemporaryDirectory(dir=args.models) as folder:
        for weights in args.weights:
            start = time.time()
            found, faulty = run_all(Path(folder), size, TYPES[weights], shape)
            entry[weights] = figures(found, faulty, size)
            print(f"{weights}: {time.time() - start:.0f} s", flush=True)
            problems += [f"{weights}: {text}" for text in judge(found, size)]
            problems += [f"{weights}: '{name}' passes" for name in unseen(found, faulty, size)]
            print(json.dumps(entry[weights]), flush=True)
    known = json.loads(args.result.read_text()) if args.result.is_file() else {}
    args.result.write_text(json.dumps(known | {args.size: entry}, indent=1) + "\n")
    if problems:
        parser.exit(1, "\n".join(problems) + "\n")


if __name__ == "__main__":
    main()
