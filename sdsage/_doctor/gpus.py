"""What the driver sees beside what the engine can use, and which SageAttention kernel each GPU gets."""

import os
import re
from typing import Any

from sdsage._doctor.files import is_for_cuda, reinstall
from sdsage._doctor.report import Level, Report

NO_DEVICE = 100  # of CUDA's results
LEAST = 80  # compute capability that SageAttention needs, times ten
_ARCHITECTURE = re.compile(r"(\d+)([af]?)(-real|-virtual)?")


def look(report: Report) -> None:
    if not is_for_cuda(report):
        _unused(report)
        return
    cuda = report.facts["build"]["cuda"]
    gpus = [d for d in report.facts["devices"] if d["name"].startswith("cuda:")]
    if not gpus and report.facts["devices"]:
        _no_gpu(report, cuda)
    uncovered = [d for d in gpus if not covers(cuda.get("architectures", ""), _number(d["sage"]))]
    for device in gpus:
        if device in uncovered:
            _uncovered(report, device, cuda, Level.ERROR if len(uncovered) == len(gpus) else Level.WARNING)
        else:
            _sage(report, device)
    if flags := cuda.get("nvcc_flags"):
        told = ", ".join(f"{name}={value}" for name, value in flags.items())
        report.add(
            Level.NOTE,
            "nvcc-flags",
            f"the kernels were compiled with further flags, which may change speed and results: {told}",
            f"unset {' '.join(flags)}; {reinstall(report)}",
        )


def _unused(report: Report) -> None:
    gpus = report.facts["driver"].get("gpus", [])
    if gpus and report.facts["build"]:
        names = ", ".join(gpu["name"] for gpu in gpus)
        mend = "in a checkout: SDSAGE_CUDA=1 pip install --force-reinstall '.[cuda]'"
        report.add(Level.WARNING, "gpu-unused", f"this build is for the CPU, and there is an NVIDIA GPU: {names}", mend)


def _no_gpu(report: Report, cuda: dict[str, Any]) -> None:
    """The library loads and lists no GPU: why not."""
    driver = report.facts["driver"]
    version, toolkit = driver.get("cuda", ""), cuda.get("toolkit", "")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = f"driver {driver.get('version') or '?'}, for CUDA {version or '?'}"
    if _major(version) and _major(version) < _major(toolkit):
        text = f"the driver is too old: {shown}, and this build needs CUDA {_major(toolkit)}.0 or newer"
        mend = f"install NVIDIA's driver for CUDA {_major(toolkit)}.0 or newer, or build with CUDA {_major(version)}"
        report.add(Level.ERROR, "driver-old", text, f"{mend}, {reinstall(report, 'CUDACXX=NVCC')}")
    elif hidden is not None and driver.get("status") in (None, NO_DEVICE):
        text = f"CUDA_VISIBLE_DEVICES={hidden!r} hides the GPUs"
        report.add(Level.ERROR, "gpu-hidden", text, "unset CUDA_VISIBLE_DEVICES")
    elif driver.get("problem"):
        text = f"the driver can't be used ({shown}): {driver['problem']}"
        mend = (
            "run nvidia-smi: if it fails too, restart the machine, as an update of the driver needs; a container needs "
        )
        mend += "--gpus all"
        report.add(Level.ERROR, "driver-broken", text, mend)
    elif not driver.get("gpus"):
        text = f"this build is for CUDA, and the driver sees no GPU ({shown})"
        report.add(
            Level.ERROR,
            "gpu-missing",
            text,
            "run nvidia-smi, which should list the GPU; run on the CPU with --device cpu",
        )
    else:
        words = "; ".join(report.facts["engine_said"][-3:])
        text = f"the driver sees a GPU and the engine does not ({shown}): {words or 'it gave no reason'}"
        report.add(Level.ERROR, "gpu-not-seen", text, "install NVIDIA's current driver, then restart the machine")


def _uncovered(report: Report, device: dict[str, Any], cuda: dict[str, Any], level: Level) -> None:
    number = _number(device["sage"])
    text = (
        f"{device['name']} ({device['description']}) has compute capability {device['sage']['compute_capability']}, "
        f"and this build has code for {cuda['architectures'] or 'none'} only"
    )
    report.add(level, "gpu-architecture", text, rebuild_for(report, number))


def _sage(report: Report, device: dict[str, Any]) -> None:
    """SageAttention on a GPU that the engine runs on."""
    sage, number = device["sage"], _number(device["sage"])
    if not sage["supported"]:
        if number < LEAST:
            report.add(
                Level.NOTE, "sage-unavailable", sage["reason"], "use --diffusion-fa in place of --sage-attn here"
            )
        else:
            report.add(Level.WARNING, "sage-unavailable", sage["reason"], rebuild_for(report, number))
    elif sage["emulated"]:
        text = f"{device['name']}: {sage['why_not_better']}"
        report.add(Level.NOTE, "sage-emulated", text, "add --sage-kernel fp16 to --sage-attn")
    elif sage["why_not_better"] and number >= 89:
        text = f"{device['name']} gets the kernel {sage['kernel']}: {sage['why_not_better']}"
        report.add(Level.NOTE, "sage-not-best", text, f"with CUDA 12.8 or newer, {reinstall(report)}")


def rebuild_for(report: Report, number: int) -> str:
    return reinstall(report, f"SDSAGE_CUDA_ARCHS={number}{'a' if number >= 90 else ''}")


def covers(architectures: str, number: int) -> bool:
    """Whether code for these architectures, as CMake names them, runs on a GPU of this compute capability times ten.

    A name that CMake resolves by itself ("all", "native") tells nothing, and counts as one that does.
    """
    names = architectures.split()
    return not names or any(_covers(name, number) for name in names)


def _covers(name: str, number: int) -> bool:
    match = _ARCHITECTURE.fullmatch(name)
    if match is None:
        return True
    least, letter, kind = int(match[1]), match[2], match[3]
    if letter == "a":
        return number == least
    newer_runs = kind != "-real" and letter != "f"  # PTX is in there, which the driver compiles
    return number >= least and (newer_runs or number // 10 == least // 10)


def _number(sage: dict[str, Any]) -> int:
    return int(sage["compute_capability"].replace(".", "") or 0)


def _major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdigit() else 0
