"""A worker process that can be asked to do what no worker should: run with the arguments of Python itself."""

import ctypes
import os
import sys
from typing import Any

import numpy as np

import sdsage
from sdsage import _worker


def abort(params: Any) -> None:
    """An assertion of ggml fails: the VAE has no encoder for the picture."""
    from sdsage import _ffi
    from sdsage._ffi import ffi, lib

    with sdsage.Context(params) as ctx:
        keep: list[Any] = []
        job = sdsage.SdImgGenParams(prompt="x", width=64, height=64, init_image=np.zeros((64, 64, 3), np.uint8))
        assert ctx._native != ffi.NULL
        assert lib.generate_image(ctx._native, job.to_c(keep)) is _ffi  # not reached


def hold_the_gil() -> None:
    """No other thread of Python runs any more."""
    ctypes.PyDLL(None).sleep(10_000)


def work_for(seconds: int) -> None:
    """Native work, as a long step is: other threads of Python run."""
    ctypes.CDLL(None).sleep(seconds)


def leave() -> None:
    """What exit() in a library does."""
    print("I have had enough")
    sys.stdout.flush()
    os._exit(7)


_worker.FUNCTIONS |= {"abort": abort, "hold_the_gil": hold_the_gil, "leave": leave, "work_for": work_for}

if __name__ == "__main__":
    sys.argv[1:] = sys.argv[4:]  # without -P -m sdsage._worker
    _worker.main()
