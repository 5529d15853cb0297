"""offload_worker.py: jobs whose parameters wait in the host's memory, on a device that is none; prints what came out as
JSON.

For test_offload.py; it needs the test library (SDSAGE_LIB_DIR).
A process of its own, because a process loads one libsdsage.
"""

import contextlib
import json
import re
import sys
from typing import Any

import numpy as np
from conftest import ctx_params, small_video
from sage_worker import files

import sdsage
from sdsage._ffi import lib

GIB = 2**30
LINE = re.compile(r"(\S+): \d+ MB copied (through|without) pinned memory")


class Stop(Exception):
    pass


def ends_the_first_expert(progress: sdsage.Progress) -> bool:
    return progress.expert == "high-noise" and progress.step == progress.steps > 0


def run(
    memory: int,
    can_pin: bool = True,
    stops: bool = False,
    ahead: bool = True,
    preview: sdsage.Preview | None = None,
    **fields: Any,
) -> tuple[np.ndarray, dict[str, Any]]:
    lib.sdsage_test_gpu(can_pin, memory)
    said: list[str] = []
    found: dict[str, Any] = {}

    def watch(progress: sdsage.Progress) -> None:
        if ends_the_first_expert(progress):
            found["between the experts"] = lib.sdsage_test_gpu_used(False)
            if stops and "stopped" not in found:
                found["stopped"] = True
                raise Stop

    params = ctx_params(files("tiny-random"), **fields)
    with sdsage.Context(params, copy_ahead=ahead, on_log=lambda level, line: said.append(line)) as c:
        resident = lib.sdsage_test_gpu_used(False)
        if stops:
            with contextlib.suppress(Stop):
                c.generate_video(small_video(), on_progress=watch)
            found["left"] = lib.sdsage_test_gpu_used(False) - resident
        more: dict[str, Any] = {"preview": preview, "on_preview": lambda *_: None} if preview else {}
        result = c.generate_video(small_video(), keep_latents=True, on_progress=watch, **more)
    lines = LINE.findall("\n".join(said))
    found |= {
        "resident": resident,
        "peak": lib.sdsage_test_gpu_used(True),
        "left at the end": lib.sdsage_test_gpu_used(False),
        "pieces": lib.sdsage_test_gpu_copies(),
        "through": sum(how == "through" for _, how in lines),
        "without": sum(how == "without" for _, how in lines),
        "warnings": [line for line in said if "without pinned memory" in line],
    }
    return result.latents[0], found


def main() -> None:
    offload = {"offload_params_to_cpu": True}
    expected, plain = run(8 * GIB)
    found: dict[str, Any] = {"plain": plain}
    for name, case in {
        "room": {"memory": 8 * GIB, **offload},
        "no room": {"memory": GIB, **offload},
        "not ahead": {"memory": 8 * GIB, "ahead": False, **offload},
        "not pinned": {"memory": 8 * GIB, "can_pin": False, **offload},
        "stopped": {"memory": 8 * GIB, "stops": True, **offload},
        "decoded previews": {"memory": 8 * GIB, "preview": sdsage.Preview("vae"), **offload},
        "segments": {"memory": 8 * GIB, "max_vram": 0.004, **offload},
    }.items():
        latents, found[name] = run(**case)
        found[name]["same"] = bool((latents == expected).all())
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
