"""What the Python command line costs: `sdsage` against native `sd-cli`, and `sdsage --help` against importing typer.

    python benchmarks/overhead.py [--rounds 9]

Every round runs all commands one after the other, so that a slow moment of the machine meets all of them. The medians
are printed and written to benchmarks/results/overhead.json with what they were measured on. Wall time is what counts;
processor time tells whether the machine was busy with something else.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sdsage
from sdsage import presets

RESULT = Path(__file__).parent / "results" / "overhead.json"
JOB = ["-p", "a lovely cat", "-s", "42"]
VIDEO, MP4, HELP = "sdsage vid-gen / sd-cli", "the same, sdsage writing MP4", "sdsage --help / import typer"
AIMS = {VIDEO: "aim: wall under 1.15", HELP: "aim: wall under 2"}


def commands(folder: Path) -> dict[str, list[str]]:
    """Command lines by name; the video jobs write the same animated WebP, one more writes sdsage's MP4."""
    python = sys.executable
    options: list[str] = []
    for name, value in presets.load("tiny-random").options.items():
        options += [f"--{name.replace('_', '-')}", str(value)]
    video = [python, "-P", "-m", "sdsage", "vid-gen", "--preset", "tiny-random", *JOB, "--overwrite", "-q", "-o"]
    return {
        "python -c pass": [python, "-c", "pass"],
        "sd-cli": [sdsage.build_info()["sd_cli"], "-M", "vid_gen", *options, *JOB, "-o", str(folder / "a.webp")],
        "sdsage vid-gen": [*video, str(folder / "b.webp")],
        "sdsage vid-gen, mp4": [*video, str(folder / "c.mp4")],
        "import typer": [python, "-c", "import typer"],
        "sdsage --help": [python, "-P", "-m", "sdsage", "--help"],
    }


def seconds(command: list[str]) -> tuple[float, float]:
    """Wall time and processor time of one run; what it says is shown only when it fails."""
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{command} gave {process.returncode}:\n{errors.read()[-2000:].decode(errors='replace')}")
    return wall, usage.ru_utime + usage.ru_stime


def cpu_name() -> str:
    """Model of the first processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def ratios(median: dict[str, float]) -> dict[str, float]:
    """The costs in question; for a video what starting an interpreter takes is left out."""
    start = median["python -c pass"]
    return {
        VIDEO: (median["sdsage vid-gen"] - start) / median["sd-cli"],
        MP4: (median["sdsage vid-gen, mp4"] - start) / median["sd-cli"],
        HELP: median["sdsage --help"] / median["import typer"],
    }


def measure(rounds: int) -> dict[str, Any]:
    """Run everything `rounds` times after one warm-up round, and sum it up."""
    load = os.getloadavg()[0]  # a machine that has other work gives wide spreads
    with tempfile.TemporaryDirectory() as folder:
        jobs = commands(Path(folder))
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
        for count in range(rounds + 1):
            for name, command in jobs.items():
                taken = seconds(command)
                if count:
                    runs[name].append(taken)
    wall = {name: statistics.median(run[0] for run in taken) for name, taken in runs.items()}
    processor = {name: statistics.median(run[1] for run in taken) for name, taken in runs.items()}
    return {
        "device": "cpu",
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(load, 2),
        "versions": {
            "python": platform.python_version(),
            "sdsage": sdsage.__version__,
            **{name: version(name) for name in ("numpy", "pillow", "typer", "cffi", "av")},
        },
        "build": {key: value for key, value in sdsage.build_info().items() if key not in ("sd_cli", "library")},
        "job": ["--preset", "tiny-random", *JOB],
        "rounds": rounds,
        "median_wall_seconds": wall,
        "median_processor_seconds": processor,
        "wall_ratios": ratios(wall),
        "processor_ratios": ratios(processor),
        "wall_and_processor_seconds": runs,
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{result['cpu']}, {result['cores']} cores, load {result['load_before']}, {result['rounds']} rounds, medians")
    print(f"  {'seconds':<36} {'wall':>8} {'processor':>10}   wall from .. to")
    for name, wall in result["median_wall_seconds"].items():
        walls = [run[0] for run in result["wall_and_processor_seconds"][name]]
        processor = result["median_processor_seconds"][name]
        print(f"  {name:<36} {wall:8.3f} {processor:10.3f}   {min(walls):.3f} .. {max(walls):.3f}")
    print("  ratio (the first two beyond interpreter start)")
    for name, ratio in result["wall_ratios"].items():
        print(f"  {name:<36} {ratio:8.3f} {result['processor_ratios'][name]:10.3f}   {AIMS.get(name, '')}")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="times each command is measured")
    result = measure(max(parser.parse_args().rounds, 1))
    show(result)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
