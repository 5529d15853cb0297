"""What the tests of worker processes and of their programs share."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import CHILD_PATH, ROOT, hear_interrupts

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
    env = {**os.environ, "PYTHONPATH": CHILD_PATH}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "sdsage", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        preexec_fn=hear_interrupts,
    )


# A program that ends while a job runs in a thread of it.
AT_EXIT = """
import contextlib, sys, threading
sys.path.insert(0, sys.argv[1])
from conftest import ctx_params, small_image
import sdsage
from sdsage import presets
files = {k: v for k, v in presets.load("tiny-flux").options.items() if str(v).endswith((".gguf", ".safetensors"))}
ctx = sdsage.Context(ctx_params(files), isolated=sys.argv[2] == "isolated")
print(ctx.worker_pid, flush=True)
job = small_image()
job.sample_params.sample_steps = 5000
started = threading.Event()
def go():
    with contextlib.suppress(sdsage.SdsageError):  # Python has ended when it comes
        ctx.generate_image(job, on_progress=lambda p: started.set() if p.stage == "sample" else None)
threading.Thread(target=go, daemon=True).start()
started.wait(30)
"""


def end_with_a_running_job(kind: str) -> str:
    """What such a program prints: the process id of the worker of an "isolated" context, else None."""
    command = [sys.executable, "-P", "-c", AT_EXIT, str(ROOT / "tests"), kind]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()
