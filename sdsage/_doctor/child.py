"""`python -m sdsage._doctor.child QUESTION`: answers in a process of its own, which may end while it looks.

The answer is one line of JSON on stdout. It asks NVIDIA's driver and PyAV, which are other people's native code.
"""

import contextlib
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sdsage._death import signal_name

PATIENCE = 60  # seconds
_MAJOR, _MINOR = 75, 76  # CUdevice_attribute: compute capability


class ChildFailed(Exception):
    """The process did not answer; the text says how it ended."""


def ask(question: str) -> Any:
    """One of `QUESTIONS`, from another process.

    Raises:
        ChildFailed: it crashed, or took longer than a minute.
    """
    from sdsage._supervisor import module_environment

    command = [sys.executable, "-P", "-m", "sdsage._doctor.child", question]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=PATIENCE, env=module_environment(), stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"no answer within {PATIENCE} seconds") from None
    words = done.stderr.decode("utf-8", "replace").strip().splitlines()
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        how = signal_name(done.returncode) or f"exit code {done.returncode}"
        raise ChildFailed(
            f"the process that looked ended with {how}: {words[-1] if words else 'it said nothing'}"
        ) from None


# ---- the child's side


def driver() -> dict[str, Any]:
    """What NVIDIA's driver says about itself and its GPUs."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        cuda = ctypes.CDLL(name)
    except OSError as error:
        return {"library": "", "problem": str(error)}
    found: dict[str, Any] = {"library": loaded_as(name), "problem": "", "version": _driver_version(), "gpus": []}
    number = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        found["cuda"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
    status = cuda.cuInit(0)
    if status == 0:
        status = cuda.cuDeviceGetCount(ctypes.byref(number))
    if status != 0:
        found["problem"], found["status"] = _error_text(cuda, status), status
        return found
    found["gpus"] = [_gpu(cuda, i) for i in range(number.value)]
    return found


def _gpu(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    device, number, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    capability = []
    for attribute in (_MAJOR, _MINOR):
        cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        capability.append(str(number.value))
    return {"name": name.value.decode("utf-8", "replace"), "compute_capability": ".".join(capability)}


def _error_text(cuda: ctypes.CDLL, status: int) -> str:
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    cuda.cuGetErrorName(status, ctypes.byref(name))
    cuda.cuGetErrorString(status, ctypes.byref(text))
    return f"{(text.value or b'unknown error').decode()} ({(name.value or b'').decode()}, {status})"


def _driver_version() -> str:
    """As nvidia-smi shows it; "" when nobody tells."""
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0:
            return text.value.decode("ascii", "replace")
    return ""


def loaded_as(name: str) -> str:
    """The file behind a library of this process; its name where nobody tells. libcuda.so.1 is a link to
    libcuda.so.580.95.05."""
    stem = name.removesuffix(".1")
    return next((path for path in loaded_files() if Path(path).name.startswith(stem)), name)


def loaded_files() -> list[str]:
    """Files that are mapped into this process, in order; none where the system has no /proc."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[5] for line in lines if line.count(" ") >= 5 and "/" in line)
    return list(dict.fromkeys(path for path in paths if path.startswith("/")))


def media() -> dict[str, Any]:
    """Which video codecs can be written: `sdsage.media.codecs.listing`; `missing` says why there is none."""
    from sdsage.errors import MissingExtra
    from sdsage.media.codecs import listing

    try:
        return {"missing": "", "codecs": listing()}
    except MissingExtra as error:
        return {"missing": str(error), "codecs": []}


QUESTIONS: dict[str, Callable[[], Any]] = {"driver": driver, "media": media}

if __name__ == "__main__":
    print(json.dumps(QUESTIONS[sys.argv[1]]()), flush=True)
