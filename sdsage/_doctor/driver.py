"""NVIDIA's driver and the GPUs that it sees, whether or not this build can use them."""

from pathlib import Path
from typing import Any

from sdsage._doctor.child import ChildFailed, ask
from sdsage._doctor.report import Level, Report

KERNEL_MODULE = Path("/proc/driver/nvidia/version")
WSL = Path("/dev/dxg")  # the GPU of Windows, inside its Linux


def look(report: Report) -> None:
    facts: dict[str, Any] = {"kernel_module": KERNEL_MODULE.is_file(), "wsl": WSL.exists()}
    report.facts["driver"] = facts
    try:
        facts |= ask("driver")
    except ChildFailed as error:
        facts |= {"library": "", "problem": str(error), "gpus": []}
        text = f"NVIDIA's driver could not be asked: {error}"
        report.add(Level.WARNING, "driver-broken", text, "install the driver again and restart the machine")
