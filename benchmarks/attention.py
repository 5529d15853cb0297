"""Quantized attention of native/sage_cuda against PyTorch's attention on the same GPU, in one run.

    SAGE_CUDA_LIB=.../libsage_cuda.so python benchmarks/attention.py [--quick] [--out FILE]

Whole calls are timed by CUDA events, one pair a call; medians of at least 7 calls after 3 for warmth. "Kernel" and
"quantizers" are the parts of such a call as PyTorch's profiler sees them. Errors are against float64, on sampled rows
of two heads. PyTorch gets bfloat16, ours float32 and float16; all inputs are normal random numbers. TFLOP/s count
4 B H Lq Lk D operations, half of that with a causal mask. Needs torch, cffi and a GPU; prints a table and writes
benchmarks/results/attention.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "sage"))
import binding  # noqa: E402
import record  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "attention.json"
# B, H, Lq, Lk, D, causal: the table of the design notes
SHAPES: dict[str, tuple[int, int, int, int, int, bool]] = {
    "headline": (2, 24, 4096, 4096, 128, False),
    "headline, causal": (2, 24, 4096, 4096, 128, True),
    "Wan 14B, 33 frames": (1, 40, 14040, 14040, 128, False),
    "Wan 14B, 81 frames": (1, 40, 32760, 32760, 128, False),
    "Wan 1.3B, 81 frames": (1, 12, 32760, 32760, 128, False),
    "Wan 14B, 720p": (1, 40, 75600, 75600, 128, False),
    "Wan 14B, cross": (1, 40, 32760, 512, 128, False),
    "Flux": (1, 24, 4608, 4608, 128, False),
    "headline, D 64": (2, 24, 4096, 4096, 64, False),
    "SDXL": (2, 10, 4096, 4096, 64, False),
}
BACKENDS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}
TYPES = {"f32": torch.float32, "f16": torch.float16}
KERNELS = ("fp16", "fp8", "fp8++", "hopper")


def median_ms(call: Callable[[], Any]) -> tuple[float, float]:
    """Median and spread (largest less smallest of the middle half) of a call's time."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 7 or (sum(times) < 150 and len(times) < 100):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, high - low


def parts_ms(call: Callable[[], Any], rounds: int = 5) -> dict[str, float]:
    """Time of each CUDA kernel in a call, by the profiler; empty where it sees none."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(rounds):
            call()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in seen.key_averages():
        if event.self_device_time_total > 0:
            found[event.key] = event.self_device_time_total / 1000 / rounds
    return found


class Ours:
    """One sage_cuda call on torch tensors [B, H, L, D]."""

    def __init__(self, kernel: str, q: Any, k: Any, v: Any, causal: bool) -> None:
        self.out = torch.full(q.shape, float("nan"), device="cuda", dtype=torch.float32)
        batch, heads, lq, dim = q.shape
        dtype = next(name for name, kind in TYPES.items() if kind == q.dtype)
        shape = (batch, heads, k.shape[1], lq, k.shape[2], dim)
        self.desc = binding.describe(kernel, shape, causal=causal, dtypes=(dtype, dtype, dtype, "f32"))
        for name, tensor in zip("qkvo", (q, k, v, self.out), strict=True):
            getattr(self.desc, name).data = binding.ffi.cast("void *", tensor.data_ptr())
        self.choice = binding.choose(self.desc)
        self.workspace = torch.empty(max(1, self.choice.workspace), device="cuda", dtype=torch.uint8)
        self.pointer = binding.ffi.cast("void *", self.workspace.data_ptr())
        self.keep = (q, k, v)

    def __call__(self) -> None:
        stream = binding.ffi.cast("void *", torch.cuda.current_stream().cuda_stream)
        binding.check(binding.sage().sage_attn_run(self.desc, self.pointer, self.workspace.numel(), stream))


def sampled_exact(q: Any, k: Any, v: Any, causal: bool, heads: list[int], rows: Any) -> Any:
    """float64 attention of some rows of some heads of the last batch."""
    found = []
    for h in heads:
        s = q[-1, h, rows].double() @ k[-1, h].double().T * q.shape[-1] ** -0.5
        if causal:
            s.masked_fill_(torch.arange(k.shape[2], device="cuda")[None] > rows[:, None], float("-inf"))
        found.append(s.softmax(-1) @ v[-1, h].double())
    return torch.stack(found)


def error_of(out: Any, right: Any, heads: list[int], rows: Any) -> dict[str, float]:
    part = out[-1, heads][:, rows].double()
    row_off, row = (part - right).norm(dim=-1), right.norm(dim=-1)
    return {
        "rel_l2": float((part - right).norm() / right.norm()),
        "cosine": float((part * right).sum() / part.norm() / right.norm()),
        "worst_row": float((row_off / row).max()),
        "max_abs": float((part - right).abs().max()),
    }


def measure(shape: tuple[int, int, int, int, int, bool]) -> list[dict[str, Any]]:
    batch, heads, lq, lk, dim, causal = shape
    generator = torch.Generator("cuda").manual_seed(1)
    full = [torch.randn(batch, heads, n, dim, device="cuda", generator=generator) for n in (lq, lk, lk)]
    operations = 4 * batch * heads * lq * lk * dim / (2 if causal else 1)
    some = [0, heads - 1]
    rows = torch.randint(0, lq, (48,), device="cuda", generator=generator).unique()
    results: list[dict[str, Any]] = []

    def add(name: str, dtype: str, call: Callable[[], Any], errors: dict[str, float], **more: Any) -> None:
        time, spread = median_ms(call)
        entry = {"name": name, "inputs": dtype, "ms": time, "spread_ms": spread, "tflops": operations / time / 1e9}
        results.append({**entry, "errors": errors, **more})

    q, k, v = (x.bfloat16() for x in full)
    right = sampled_exact(q, k, v, causal, some, rows)
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                call = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=causal)
                add(name, "bf16", call, error_of(call(), right, some, rows))
        except RuntimeError as error:
            results.append({"name": name, "inputs": "bf16", "not_run": str(error).splitlines()[0]})
    for dtype, kind in TYPES.items():
        q, k, v = (x.to(kind) for x in full)
        right = sampled_exact(q, k, v, causal, some, rows)
        for kernel in KERNELS:
            ours = Ours(kernel, q, k, v, causal)
            if not ours.choice.supported:
                results.append({"name": kernel, "inputs": dtype, "not_run": ours.choice.reason})
                continue
            ours()
            errors = error_of(ours.out, right, some, rows)
            parts = parts_ms(ours)
            attention = sum(ms for name, ms in parts.items() if "qk_int8" in name)
            split: dict[str, Any] = {}
            if attention:
                split = {"kernel_ms": attention, "quantizers_ms": sum(parts.values()) - attention, "parts_ms": parts}
            add(kernel, dtype, ours, errors, emulated=ours.choice.emulated, **split)
    return results


def show(label: str, shape: tuple[Any, ...], results: list[dict[str, Any]]) -> None:
    print(f"\n{label}: B,H,Lq,Lk,D {','.join(map(str, shape[:5]))}{' causal' if shape[5] else ''}")
    print(
        f"  {'':16} {'in':5} {'whole ms':>9} {'TFLOP/s':>8} {'kernel':>9} {'quant.':>8}  rel. L2  1-cosine  worst row"
    )
    for r in results:
        if "not_run" in r:
            print(f"  {r['name']:16} {r['inputs']:5} not run: {r['not_run'][:80]}")
            continue
        kernel, quant = (f"{r[key]:.3f}" if key in r else "-" for key in ("kernel_ms", "quantizers_ms"))
        e = r["errors"]
        accuracy = f"{e['rel_l2']:.4f}   {1 - e['cosine']:.1e}   {e['worst_row']:.4f}"
        times = f"{r['ms']:9.3f} {r['tflops']:8.0f} {kernel:>9} {quant:>8}"
        print(f"  {r['name']:16} {r['inputs']:5} {times}  {accuracy}{'  (FP8 emulated)' if r.get('emulated') else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without 720p")
    parser.add_argument("--out", type=Path, default=RESULT, help=f"default {RESULT.relative_to(ROOT)}")
    args = parser.parse_args()
    if binding.why_no_gpu():
        sys.exit(f"attention.py: {binding.why_no_gpu()}")
    on = binding.real_device()
    clocks = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader", "-i", "0"]
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "driver": record.gpu()["driver"],
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "sage_toolkit": on.toolkit,
        "sage_architectures": binding.text(on.architectures),
        "tree": record.tree_hash(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": "python benchmarks/attention.py" + (" --quick" if args.quick else ""),
        "shapes": {},
    }
    for label, shape in SHAPES.items():
        if args.quick and shape[1] * shape[2] * shape[3] > 10**11:
            continue
        torch.cuda.empty_cache()
        results = measure(shape)
        state = subprocess.run(clocks, capture_output=True, text=True).stdout.strip()
        keys = ("B", "H", "Lq", "Lk", "D", "causal")
        report["shapes"][label] = {
            **dict(zip(keys, shape, strict=True)),
            "clock_power_temperature": state,
            "results": results,
        }
        show(label, shape, results)
        args.out.parent.mkdir(parents=True, exist_ok=True)  # after each shape: what is measured stays
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\n{report['device']}, driver {report['driver']}, torch {report['torch']}; written to {args.out}")


if __name__ == "__main__":
    main()
