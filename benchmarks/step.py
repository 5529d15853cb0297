"""What a sampling step and a decode cost with SageAttention, FlashAttention and the engine's levers, on random weights
of Wan's real sizes.

    python benchmarks/step.py [--size 14b] [--shapes 832x480x33 832x480x81] [--steps 3] [--unpatched SD_CLI] [--kernels]

Every method is one context, in which all shapes run one after the other: one forward a step (guidance 1), the same
seed. `--unpatched` names an sd-cli of upstream's own sources: it runs the same jobs with
--diffusion-fa and is stopped after its last step; its first step holds the text encoder. `--kernels METHOD ...` adds
GPU time by kernel (benchmarks/cupti), each method in a process of its own. Results go to benchmarks/results/step.json
(or --result NAME), one entry per size and method, beside those of other sizes.
"""

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import sdsage
from sdsage._bench import random_models
from sdsage._bench.quality import psnr

HERE = Path(__file__).parent
METHODS: dict[str, dict[str, Any]] = {
    "flash, no levers": {"diffusion_flash_attn": True, "engine_levers": "none"},
    "sage fp16, no levers": {"sage_attn": True, "sage_kernel": "fp16", "engine_levers": "none"},
    "sage, no levers": {"sage_attn": True, "engine_levers": "none"},
    "sage, linear": {"sage_attn": True, "engine_levers": "linear"},
    "sage, linear and fuse": {"sage_attn": True, "engine_levers": "linear,fuse"},
    "flash": {"diffusion_flash_attn": True},
    "sage fp16": {"sage_attn": True, "sage_kernel": "fp16"},
    "sage": {"sage_attn": True},
    "sage, fast linear": {"sage_attn": True, "fast_linear": True},
}
DEFAULT_METHODS = ("flash, no levers", "sage, no levers", "sage, linear", "sage, linear and fuse", "sage")
SEED, PROMPT = 42, "a lovely cat walking in the garden"
BUFFER = re.compile(r"(\S+) compute buffer size: +([\d.]+) MB")
BAR = re.compile(rb"\|[=> ]*\|\s+(\d+)/(\d+) - ")


class Shape(NamedTuple):
    """Of a video, in px and frames."""

    width: int
    height: int
    frames: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return "x".join(map(str, self))


class Enough(Exception):
    """The last step is done; what follows is not measured here."""


class Memory:
    """Highest GPU memory in use while the block runs, MiB, by nvidia-smi twice a second."""

    def __enter__(self) -> "Memory":
        self.peak, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
        while not self._stop.wait(0.5):
            self.peak = max(self.peak, int(subprocess.run(command, capture_output=True, text=True).stdout))

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


def job(shape: Shape, steps: int) -> sdsage.SdVidGenParams:
    params = sdsage.SdVidGenParams(prompt=PROMPT, seed=SEED)
    params.width, params.height, params.video_frames = shape
    params.sample_params.sample_steps = steps
    params.sample_params.sample_method = "euler"
    params.sample_params.guidance.txt_cfg = 1.0
    return params


def run_job(context: Any, shape: Shape, steps: int, decode: bool) -> dict[str, Any]:
    """One job; without `decode` it ends with its last step and has no latents."""
    ends: list[float] = []

    def watch(progress: sdsage.Progress) -> None:
        if progress.stage == "sample":
            ends.append(time.time())  # the first entry is the beginning
            if progress.step == steps and not decode:
                raise Enough

    pictures: list[Any] = []
    preview = sdsage.Preview("proj")
    more: dict[str, Any] = {"on_preview": lambda step, frames, noisy: pictures.append(frames), "preview": preview}
    found: dict[str, Any] = {}
    with Memory() as memory:
        try:
            result = context.generate_video(
                job(shape, steps), on_progress=watch, keep_latents=True, **(more if decode else {})
            )
            found = {"latents": result.latents[0], "pictures": pictures, "frames": result.frames}
            found["seconds"] = {"text encoder": result.timings.encode_text, "VAE": result.timings.decode}
            found["attention"] = {a.kernel: a.calls for a in result.attention if a.module == "diffusion"}
            found["levers"] = {x.lever: x.calls for x in result.levers if x.module == "diffusion"}
        except Enough:
            pass
    seconds = [b - a for a, b in itertools.pairwise(ends)]
    return found | {"steps": seconds, "peak MiB": memory.peak, "times": [*ends[-2:], time.time()]}


def figures(run: dict[str, Any]) -> dict[str, Any]:
    steps = run["steps"]
    return {
        "first step": round(steps[0], 3),
        "later steps": [round(s, 3) for s in steps[1:]],
        "median of the later steps": round(statistics.median(steps[1:]), 3),
        "peak MiB": run["peak MiB"],
        **{k: round(v, 3) for k, v in run.get("seconds", {}).items()},
        **{name: run[name] for name in ("attention", "levers") if name in run},
    }


def frame_statistics(a: dict[str, Any], b: dict[str, Any]) -> dict[str, float]:
    """Of the frames' means and deviations, in steps of 255."""
    x, y = (run["frames"].astype(np.float32).reshape(len(run["frames"]), -1) for run in (a, b))
    return {
        "mean": round(float(abs(x.mean(1) - y.mean(1)).max()), 3),
        "deviation": round(float(abs(x.std(1) - y.std(1)).max()), 3),
    }


def measure(files: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    reference: dict[Shape, Any] = {}
    for name in args.methods:
        params = sdsage.SdCtxParams(**files, **METHODS[name])
        start, said = time.time(), []
        with sdsage.Context(params, on_log=lambda level, text: said.append(text)) as context:  # noqa: B023
            entry: dict[str, Any] = {"load": round(time.time() - start, 2)}
            for shape in args.shapes:
                said.clear()
                decode = shape in args.decode
                run = run_job(context, shape, args.steps, decode)
                entry[str(shape)] = values = figures(run)
                values["compute buffers, MiB"] = {
                    m[1]: round(float(m[2])) for m in BUFFER.finditer("\n".join(said)) if float(m[2]) > 1
                }
                if decode:
                    first = reference.setdefault(shape, run)
                    values["finite"] = bool(np.isfinite(run["latents"]).all())
                    if first is not run:
                        values["frame statistics, largest difference"] = frame_statistics(run, first)
                        values[f"PSNR to {args.methods[0]}"] = {
                            "latents": psnr(run["latents"], first["latents"], float(np.ptp(first["latents"]))),
                            "frames": psnr(run["frames"], first["frames"], 255),
                            "preview by step": [
                                psnr(a, b, 255) for a, b in zip(run["pictures"], first["pictures"], strict=True)
                            ],
                        }
                print(name, shape, json.dumps(values), flush=True)
        found[name] = entry
    return found


def unpatched(program: str, files: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    """Steps of upstream's sd-cli, timed by when its progress bar moves."""
    found: dict[str, Any] = {}
    for shape in args.shapes:
        command = [program, "-M", "vid_gen", "--diffusion-model", files["diffusion_model_path"]]
        command += ["--t5xxl", files["t5xxl_path"], "--vae", files["vae_path"], "-p", PROMPT, "--cfg-scale", "1.0"]
        command += ["--steps", str(args.steps), "-W", str(shape.width), "-H", str(shape.height)]
        command += ["--video-frames", str(shape.frames)]
        command += ["-s", str(SEED), "--sampling-method", "euler", "--diffusion-fa", "-v", "-o", os.devnull + ".avi"]
        ends: list[float] = []
        with Memory() as memory:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0)
            assert process.stdout is not None
            text, seen, sampling = b"", 0, False
            while piece := os.read(process.stdout.fileno(), 65536):
                text += piece
                if not sampling and b"generate_video " in text:
                    sampling, text = True, text[text.rindex(b"generate_video ") :]
                    ends.append(time.time())
                for match in BAR.finditer(text) if sampling else ():
                    if int(match[2]) == args.steps and int(match[1]) > seen:
                        seen = int(match[1])
                        ends.append(time.time())
                if seen == args.steps:
                    process.send_signal(signal.SIGKILL)
            process.wait()
        if seen < args.steps:
            sys.exit(f"{' '.join(command)}\n{text[-3000:].decode(errors='replace')}")
        steps = [b - a for a, b in itertools.pairwise(ends)]
        found[str(shape)] = figures({"steps": steps, "peak MiB": memory.peak})
        print("unpatched", shape, json.dumps(found[str(shape)]), flush=True)
    return found


GROUPS = (  # first match wins
    ("attention", r"flash_attn|qk_int8|fattn"),
    ("attention: quantizers", r"\bquantize<\d|kv_stats"),
    ("convolutions", r"im2col|conv_gemm|pack_"),
    ("linear layers", r"mul_mat_q|mmq|gemm|cutlass|cublas|nvjet|to_bf16|to_fp8|gated_bias|finish_kernel"),
    ("norms and rotary embedding", r"norm|rope"),
    ("copies and casts", r"cpy|concat|pad|memcpy|convert|dup|cont"),
)


def kernel_table(path: Path, window: tuple[float, float]) -> dict[str, Any]:
    """ms by group and by kernel between two times."""
    groups: dict[str, float] = defaultdict(float)
    kernels: dict[str, float] = defaultdict(float)
    for line in path.read_text().splitlines():
        begin, end, name = line.split("\t")
        if window[0] <= int(begin) / 1e9 < window[1]:
            ms = (int(end) - int(begin)) / 1e6
            kernels[name[:100]] += ms
            groups[next((g for g, pattern in GROUPS if re.search(pattern, name)), "everything else")] += ms
    top = sorted(kernels.items(), key=lambda item: -item[1])[:14]
    return {
        "ms by group": {g: round(ms, 1) for g, ms in sorted(groups.items(), key=lambda item: -item[1])},
        "ms by kernel": {name: round(ms, 1) for name, ms in top},
    }


def kernels(args: argparse.Namespace) -> dict[str, Any]:
    """The last of two steps and the decode of the largest job under CUPTI, each method in a process of its own."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = build_collector(Path(folder))
        for name in args.kernels:
            for shape in args.shapes[-1:]:
                table = Path(folder) / "times.tsv"
                env = {**os.environ, "CUDA_INJECTION64_PATH": str(library), "KERNEL_TIMES": str(table)}
                command = [sys.executable, __file__, "--one", name, "--size", args.size, "--models", str(args.models)]
                command += ["--shapes", str(shape), "--steps", "2"]
                done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(done.stderr[-3000:])
                step, sampled, decoded = json.loads(done.stdout.splitlines()[-1])
                for what, window in (("step", (step, sampled)), ("decode", (sampled, decoded))):
                    values = kernel_table(table, window)
                    found.setdefault(name, {}).setdefault(str(shape), {})[what] = values
                    print(name, shape, what, json.dumps(values["ms by group"]), flush=True)
    return found


def build_collector(folder: Path) -> Path:
    """CUPTI comes with the toolkit or with NVIDIA's wheels."""
    roots = [Path("/usr/local/cuda"), Path("/usr/local/cuda/extras/CUPTI")]
    roots += [p for entry in sys.path for p in Path(entry).glob("nvidia/*") if p.is_dir()]
    header = next((r for r in roots if (r / "include" / "cupti.h").is_file()), None)
    libraries = [p for r in roots for d in ("lib64", "lib") for p in sorted((r / d).glob("libcupti.so*"))]
    if header is None or not libraries:
        sys.exit("--kernels needs CUPTI: cupti.h and libcupti.so were not found")
    library = folder / "libkernel_times.so"
    command = [
        "g++",
        "-O2",
        "-std=c++17",
        "-shared",
        "-fPIC",
        str(HERE / "cupti" / "kernel_times.cpp"),
        "-o",
        str(library),
    ]
    command += [f"-I{r / 'include'}" for r in roots if (r / "include").is_dir()]
    command += [str(libraries[0]), f"-Wl,-rpath,{libraries[0].parent}"]
    subprocess.run(command, check=True)
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(random_models.WAN), default="14b")
    shapes = [Shape(832, 480, 33), Shape(832, 480, 81)]
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", default=shapes, metavar="WxHxFRAMES")
    parser.add_argument("--decode", type=Shape.parse, nargs="*", default=shapes[:1], help="which are decoded, compared")
    parser.add_argument("--result", default="step", help="name of the file in benchmarks/results")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--models", type=Path, default=Path("build/random-models"))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(DEFAULT_METHODS))
    parser.add_argument("--unpatched")
    parser.add_argument("--kernels", nargs="*", choices=list(METHODS), help="which are measured by kernel as well")
    parser.add_argument(
        "--one", help=argparse.SUPPRESS
    )  # one method under CUPTI: prints when the last step began, sampling ended, all ended
    args = parser.parse_args()
    files = random_models.make(args.models, args.size)
    if args.one:
        with sdsage.Context(sdsage.SdCtxParams(**files, **METHODS[args.one])) as context:
            print(json.dumps(run_job(context, args.shapes[0], args.steps, True)["times"]))
        return
    entry: dict[str, Any] = {
        "device": next(d.description for d in sdsage.devices()),
        "engine": {k: sdsage.build_info()[k] for k in ("version", "upstream", "cuda")},
        "sage": vars(sdsage.sage_info()),
        "date": time.strftime("%Y-%m-%d"),
        "job": f"{args.steps} steps, one forward a step, Q8_0",
    }

    def save() -> None:  # what is measured stays, whatever comes after
        result = HERE / "results" / f"{args.result}.json"
        known = json.loads(result.read_text()) if result.is_file() else {}
        result.write_text(json.dumps(known | {args.size: entry}, indent=2) + "\n")

    entry["methods"] = measure(files, args)
    save()
    if args.unpatched:
        entry["methods"]["flash, unpatched engine"] = unpatched(args.unpatched, files, args)
        save()
    if args.kernels:
        entry["last step and decode by kernel"] = kernels(args)
        save()


if __name__ == "__main__":
    main()
