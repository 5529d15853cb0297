"""The files of the native side: whether they are there, of one build, and what they were built for."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from sdsage import _library
from sdsage._doctor.report import Level, Report
from sdsage._doctor.versions import installed

PATIENCE = 30  # seconds
_BUILD_INFO = re.compile(rb'\{"version": "[^\0]*\}(?=\0)')


def reinstall(report: Report, variables: str = "") -> str:
    """The command that builds and installs again, in a checkout: for CUDA if this one was."""
    cuda = "SDSAGE_CUDA=1 " if is_for_cuda(report) else ""
    return f"in a checkout: {cuda}{variables + ' ' if variables else ''}pip install --force-reinstall --no-deps ."


def is_for_cuda(report: Report) -> bool:
    return bool((report.facts["build"] or {}).get("cuda"))


def look(report: Report) -> None:
    paths = (_library.library_path(), _library.cdef_path(), _library.sd_cli_path())
    report.facts["files"] = [
        {"file": str(path), "bytes": path.stat().st_size if path.is_file() else None} for path in paths
    ]
    report.facts["build"] = build_info_in(paths[0])
    try:
        _library.check()
    except (ImportError, OSError, UnicodeDecodeError) as error:
        missing = not (paths[0].is_file() and paths[1].is_file())
        report.add(Level.ERROR, "library-missing" if missing else "library-abi", str(error), reinstall(report))
    theirs, ours = (report.facts["build"] or {}).get("version"), installed("sdsage").partition("+")[0]
    if theirs and ours and theirs != ours:
        text = f"{paths[0]} is of version {theirs}, and the package of {ours}"
        report.add(Level.WARNING, "version-differs", text, reinstall(report))


def build_info_in(library: Path) -> dict[str, Any] | None:
    """What the library would say of its build, read out of the file: it may be unable to load here."""
    try:
        found = _BUILD_INFO.search(library.read_bytes())
        info: dict[str, Any] | None = json.loads(found[0]) if found else None
    except (OSError, ValueError):
        return None
    return info


def look_at_program(report: Report) -> None:
    """sd-cli, which loads the same library: it says nothing new where that can't be loaded."""
    if not report.facts["devices"]:
        return
    program = _library.sd_cli_path()
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, timeout=PATIENCE, stdin=subprocess.DEVNULL, check=False
        )
        words = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
        why = (
            "" if done.returncode == 0 else f"exit code {done.returncode}: {words[-1] if words else 'it said nothing'}"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if why:
        text = f"the native program {program} does not run ('sdsage' works without it): {why}"
        report.add(Level.WARNING, "sd-cli-broken", text, reinstall(report))


def look_at_code(report: Report) -> None:
    """--sass: the GPU code in the files themselves."""
    from sdsage._doctor.machine_code import gpu_code

    report.facts["gpu_code"] = rows = []
    for path in (_library.library_path(), _library.sd_cli_path()):
        try:
            code = gpu_code(path)
        except (OSError, ValueError) as error:
            rows.append({"file": str(path), "machine_code": [], "ptx": [], "problem": str(error)})
            continue
        rows.append({"file": str(path), "machine_code": [*code.machine_code], "ptx": [*code.ptx], "problem": ""})
    _compare(report, rows[0])


def _compare(report: Report, row: dict[str, Any]) -> None:
    """What the kernels and the build say of themselves must be in the file."""
    there = {*row["machine_code"], *(f"compute_{name}" for name in row["ptx"])}
    told = {name for device in report.facts["devices"] for name in device["sage"].get("architectures", ())}
    cuda = (report.facts["build"] or {}).get("cuda") or {}
    told |= {a.removesuffix("-real") for a in cuda.get("architectures", "").split() if a.endswith("-real")}
    if lacking := sorted(told - there):
        report.add(
            Level.WARNING,
            "gpu-code-differs",
            f"{row['file']} says that it has code for {', '.join(lacking)}, "
            f"and holds {row['problem'] or ', '.join(sorted(there)) or 'none'}",
            reinstall(report),
        )
