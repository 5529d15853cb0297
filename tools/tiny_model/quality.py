"""The packed model's quality: SDSAGE_LIB_DIR=build/make/test-lib python -m tools.tiny_model.quality cpu

Renders the held-out captions with plain attention and with SageAttention; `gpu` does so on the first GPU, `cpu` with
the arithmetic of its kernels, which a build's test-lib has. On a GPU also without the engine's levers, and with all of
them (by default `linear` leaves out a model this small). Writes scores and PSNR to the file of results and into the
table of docs/tiny-model.md; on a CPU also the contact sheet there. Fewer captions (--count) are for a look, and write
nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from tools.tiny_model.grammar import HELD_OUT_COUNT

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "tiny_model.json"
PAGE = ROOT / "docs" / "tiny-model.md"
SHEET = ROOT / "docs" / "tiny-model.webp"
BEGIN, END = "<!-- scores: tools/tiny_model/quality.py -->", "<!-- end of scores -->"
READ = ("colour", "shape", "direction")
RIGHT, LOSS, PSNR = 0.9, 0.01, 40.0  # least share of clips, most that may be lost of it, least mean in dB
LEVERS = {"no levers": "none", "all levers": "linear,fuse,vae"}  # run: --engine-levers
COMPARED = ("sage", *LEVERS)  # with plain attention and the levers that are default


def render(out: Path, options: list[str]) -> dict[str, Any]:
    """What `evaluate` finds."""
    subprocess.run(
        [sys.executable, "-m", "tools.tiny_model.evaluate", "--package", "--out", str(out), *options], check=True
    )
    found: dict[str, Any] = json.loads((out / "scores.json").read_text(encoding="utf-8"))
    return found


def measure(a: argparse.Namespace, work: Path) -> dict[str, Any]:
    """All runs on one device."""
    import sdsage
    from sdsage._ffi import lib

    if a.where == "cpu" and not hasattr(lib, "sdsage_test_sage_cpu"):
        raise SystemExit("this library has no SageAttention on a CPU: SDSAGE_LIB_DIR=build/make/test-lib names one")
    devices = [d for d in sdsage.devices() if (d.kind == "cpu") == (a.where == "cpu")]
    if not devices:
        raise SystemExit("no GPU: this build or this machine has none")
    common = ["--device", devices[0].name, "--processes", str(a.processes), "--count", str(a.count)]
    found: dict[str, Any] = {"device": devices[0].description, "processes": a.processes}
    found["plain"] = render(work / "plain", common)
    sage = ["--sage-cpu"] if a.where == "cpu" else ["--sage"]
    common += ["--against", str(work / "plain")]
    found["sage"] = render(work / "sage", [*common, *sage])
    if a.where == "gpu":
        for name, levers in LEVERS.items():
            found[name] = render(work / name, [*common, "--engine-levers", levers])
    return found


def unmet(results: dict[str, Any]) -> list[str]:
    """Which aims were missed, in words."""
    said = []
    for where, found in results.items():
        plain = found["plain"]
        said += [f"{where}: {what} {plain[what]:.1%}, {RIGHT:.0%} wanted" for what in READ if plain[what] < RIGHT]
        for name in [n for n in COMPARED if n in found]:
            run, title = found[name], "SageAttention" if name == "sage" else name
            for what in (*READ, "all"):
                lost = plain[what] - run[what]
                if (lost if name == "sage" else abs(lost)) > LOSS + 1e-9:
                    said.append(f"{where}: {what} {plain[what]:.1%}, with {title} {run[what]:.1%}")
            if run["psnr_mean"] < PSNR:
                said.append(f"{where}: {title}: {run['psnr_mean']:.1f} dB from plain attention, {PSNR:g} wanted")
    return said


def table(results: dict[str, Any]) -> str:
    """Markdown."""
    if not results:
        return "Not measured yet."
    rows = ["| | colour | shape | direction | all three | PSNR, mean and least | seconds a clip |", "|" + "---|" * 7]
    for where, found in results.items():
        for name in [n for n in ("plain", *COMPARED) if n in found]:
            run = found[name]
            kernels = [k for k in run["attention_calls"] if k != "ordinary"]
            title = f"SageAttention ({', '.join(kernels)})" if name == "sage" else "plain attention"
            title += f", `--engine-levers {LEVERS[name]}`" if name in LEVERS else ""
            title += ", its arithmetic on the CPU" if (where, name) == ("cpu", "sage") else ""
            shares = [f"{run[what]:.1%}".replace("%", " %") for what in (*READ, "all")]
            psnr = f"{run['psnr_mean']:.1f} dB, {run['psnr_least']:.1f} dB" if name != "plain" else ""
            cells = (f"{found['device']}, {title}", *shares, psnr, f"{run['seconds_per_clip']:.2f}")
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def filled(page: str, results: dict[str, Any]) -> str:
    """The page with the table of these results."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("where", choices=("cpu", "gpu"))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--count", type=int, default=HELD_OUT_COUNT)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        results = {a.where: measure(a, Path(work))}
        if a.count == HELD_OUT_COUNT:
            kept = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
            results = dict(sorted({**kept, **results}.items()))
            RESULT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
            if a.where == "cpu":
                Image.open(Path(work) / "plain" / "sheet.png").save(SHEET, quality=85, method=6)
    print(table(results))
    if said := unmet(results):
        parser.exit(1, "\n".join(said) + "\n")


if __name__ == "__main__":
    main()
