"""The worker process on a GPU: memory that comes back, Ctrl-C, resumed runs, and a decode that has too little memory.

What tests/test_worker_cli.py and tests/test_decode.py try on the CPU; tools/gpu_engine.sh runs this on a GPU.
"""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_gpu_engine import GPU, MIB, pytestmark
from test_worker_cli import LINES, pixels, read_until
from tiny_cli import frames_of
from worker_tools import gone, sdsage_command, wait_until, workers_of

import sdsage

__all__ = ["pytestmark"]  # marker and condition

VIDEO = ["vid-gen", "--preset", "tiny-random", "-p", "a cat", "--steps", "2", "--high-noise-steps", "1"]
# A size whose decode takes more memory than anything before it, and steps enough to stop the worker in one of them.
LARGE = ["vid-gen", "--preset", "tiny-random", "-p", "a cat", "--high-noise-steps", "1"]
LARGE += ["-W", "832", "-H", "480", "--video-frames", "33", "--steps"]
HELD_BACK = 64 * MIB  # that a GPU's free memory may differ by between two looks, with nothing of ours left


def free() -> int:
    return next(d.memory_free for d in sdsage.devices() if d.name == GPU)


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    with sdsage_command(*args) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(args, process.returncode, out, err)


@pytest.fixture(scope="module")
def nothing_runs() -> int:
    """Free memory beside this process alone."""
    return free()


@pytest.mark.parametrize("where", LINES)
def test_a_killed_worker_gives_its_memory_back(where: str, empty_folder: Path, nothing_runs: int) -> None:
    with sdsage_command(*VIDEO, "-o", "cat.gif") as process:
        read_until(process, LINES[where])
        (worker,) = workers_of(process.pid)
        os.kill(worker, signal.SIGKILL)
        _, err = process.communicate()
    assert process.returncode == 1, err
    assert gone(worker)
    assert wait_until(lambda: nothing_runs - free() < HELD_BACK)


@pytest.mark.parametrize("where", ["loading", "step 2", "decode"])
def test_ctrl_c_gives_its_memory_back(where: str, empty_folder: Path, nothing_runs: int, show: list[str]) -> None:
    """A decode on a GPU hears nothing until it is done: its process ends."""
    with sdsage_command(*LARGE, "40", "-o", "cat.gif") as process:
        read_until(process, LINES[where])
        workers = workers_of(process.pid)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        show.append(f"Ctrl-C while {where}: ended after {time.monotonic() - start:.2f} s")
    assert (process.returncode, out) == (130, ""), err
    assert all(map(gone, workers))
    assert os.listdir(empty_folder) == []
    assert wait_until(lambda: nothing_runs - free() < HELD_BACK)


@pytest.mark.parametrize("attention", [["--diffusion-fa"], ["--sage-attn"]], ids=str)
@pytest.mark.parametrize("where", ["step 2", "step 3", "decode"])
def test_a_killed_run_goes_on_bit_for_bit(where: str, attention: list[str], empty_folder: Path) -> None:
    assert run(*VIDEO, *attention, "-o", "whole.gif").returncode == 0
    with sdsage_command(*VIDEO, *attention, "-o", "cat.gif") as process:
        read_until(process, LINES[where])
        os.kill(workers_of(process.pid)[0], signal.SIGKILL)
        process.communicate()
    again = run("vid-gen", "-o", "cat.gif", "--resume")
    assert again.returncode == 0, again.stderr
    assert pixels(Path("cat.gif")) == pixels(Path("whole.gif"))


# ---- memory that ends when decoding begins

HOG = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def check(code):
    if code:
        sys.exit(f"CUDA error {code}")
check(cuda.cuInit(0))
context, pointer, room, whole = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_size_t()
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), int(sys.argv[1])))
check(cuda.cuCtxSetCurrent(context))
check(cuda.cuMemGetInfo_v2(ctypes.byref(room), ctypes.byref(whole)))
taken = room.value - int(sys.argv[2])
piece = taken
while taken > 0 and piece >= 2**20:  # free memory need not be one piece
    if cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(piece)) == 0:
        taken -= piece
    else:
        piece //= 2
    piece = min(piece, taken)
print("READY", flush=True)
sys.stdin.read()
"""


@contextmanager
def leaving(room: int) -> Iterator[None]:
    """Another process takes the GPU's memory but for `room` bytes."""
    command = [sys.executable, "-c", HOG, GPU.partition(":")[2], str(room)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as hog:
        assert hog.stdout is not None
        assert hog.stdin is not None
        assert hog.stdout.readline() == "READY\n"
        try:
            yield
        finally:
            hog.stdin.close()


class Watch:
    """The least free memory of the GPU, looked at again and again."""

    def __enter__(self) -> "Watch":
        self.least, self._over = free(), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.least = min(self.least, free())

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def stopped_before_decoding(*args: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A run whose worker stands still after a step of its last expert, which then has all the memory that it takes."""
    with sdsage_command(*args) as process:
        read_until(process, "sample (low-noise expert) 1/")
        (worker,) = workers_of(process.pid)
        os.kill(worker, signal.SIGSTOP)
        yield process, worker


def decode_takes(*args: str) -> int:
    """Bytes that a decode takes beyond what a step has."""
    with stopped_before_decoding(*LARGE, "3", *args) as (process, worker):
        before = free()
        with Watch() as watch:
            os.kill(worker, signal.SIGCONT)
            _, err = process.communicate()
        assert process.returncode == 0, err
    return before - watch.least


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("whole") / "cat.webp"
    assert run(*LARGE, "3", "-o", str(path)).returncode == 0
    return frames_of(path)


def test_a_decode_without_memory_is_tried_again_in_tiles(empty_folder: Path, show: list[str], whole: Any) -> None:
    at_once, tiled = decode_takes("-o", "once.webp"), decode_takes("-o", "tiles.webp", "--vae-tiling")
    show.append(f"decoding takes {at_once // MIB} MiB at once, {tiled // MIB} MiB in tiles")
    assert tiled < at_once
    room = (at_once + tiled) // 2
    with stopped_before_decoding(*LARGE, "3", "-o", "cat.webp") as (process, worker), leaving(room):
        os.kill(worker, signal.SIGCONT)
        _, err = process.communicate()
    assert process.returncode == 0, err
    adjusted = [line for line in err.splitlines() if "in tiles" in line and "for want of memory" in line]
    assert adjusted, err
    show.append(adjusted[0])
    assert frames_of("cat.webp").shape == whole.shape


def test_latents_outlive_a_decode_without_memory(empty_folder: Path, whole: Any) -> None:
    with stopped_before_decoding(*LARGE, "3", "-o", "cat.webp") as (process, worker), leaving(0):
        os.kill(worker, signal.SIGCONT)
        _, err = process.communicate()
    assert process.returncode == 1, err
    assert os.listdir(empty_folder) == ["cat.latents.safetensors"]
    (command,) = [line for line in err.splitlines() if "sdsage decode" in line]
    again = run(*shlex.split(command.removeprefix("error: "))[1:])
    assert again.returncode == 0, again.stderr
    assert (frames_of("cat.webp") == whole).all()
