"""Python, the system, and the packages that sdsage is installed with."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from sdsage._doctor.report import Level, Report

NEEDED = ("cffi", "numpy", "pillow", "typer")
OPTIONAL = ("av", "nvidia-cublas", "nvidia-cuda-runtime")
# Variables that change what is found, loaded or used.
_PREFIXES = ("SDSAGE_", "GGML_", "CUDA_", "NVIDIA_")
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "XDG_CACHE_HOME", "OMP_NUM_THREADS")


def look(report: Report) -> None:
    libc, release = platform.libc_ver()
    report.facts["versions"] = {
        "sdsage": installed("sdsage") or "of a checkout",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": f"{libc} {release}".strip(),
        "packages": {name: installed(name) for name in (*NEEDED, *OPTIONAL)},
    }
    report.facts["environment"] = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES) or name in _NAMES
    }
    report.facts["python"] = sys.executable
    missing = [name for name in NEEDED if not installed(name)]
    if missing:
        report.add(
            Level.ERROR,
            "package-missing",
            f"{', '.join(missing)}: not installed, and sdsage needs it",
            "pip install " + " ".join(f"'{_wanted(name)}'" for name in missing),
        )


def installed(name: str) -> str:
    """Its version, "" if it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _wanted(name: str) -> str:
    """With the range that this package asks for."""
    try:
        lines = requires("sdsage") or []
    except PackageNotFoundError:
        return name
    return next((line for line in lines if line.startswith(name) and "extra ==" not in line), name)
