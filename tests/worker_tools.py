"""What the tests of worker processes share."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import hear_interrupts

import sdsage

LONG = 60  # seconds: no measure, only the end of waiting


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(true: Callable[[], Any]) -> Any:
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        if value := true():
            return value
        time.sleep(0.01)
    return true()


def workers_of(pid: int) -> list[int]:
    """Worker processes of a program."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"sdsage._worker" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def sdsage_command(*args: str) -> "subprocess.Popen[str]":
    env = {**os.environ, "PYTHONPATH": str(Path(sdsage.__file__).parent.parent)}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "sdsage", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        preexec_fn=hear_interrupts,
    )
