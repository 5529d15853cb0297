"""reserve_worker.py CONTEXT JOB PART: prints how large a compute buffer of PART ("Wan" or "wan_vae") the engine with
its levers reserves for a job, in MiB, and ends before anything is computed in it. Fields of SdCtxParams and
SdVidGenParams as JSON.

For test_memory_estimate.py; it needs the test library (SDSAGE_LIB_DIR).
"""

import json
import os
import re
import sys

import numpy as np

import sdsage
from sdsage._ffi import lib


def main() -> None:
    fields, shape, part = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]

    def on_log(level: object, line: str) -> None:
        found = re.search(rf"{part}\S* compute buffer size: ([\d.]+) MB", line)
        if found:
            print(found[1], flush=True)
            os._exit(0)

    lib.sdsage_test_levers_cpu(True, 0)
    job = sdsage.SdVidGenParams(prompt="a cat", **shape)
    job.sample_params.sample_steps = 1
    job.sample_params.guidance.txt_cfg = 1.0
    with sdsage.Context(sdsage.SdCtxParams(**fields), device="cpu", on_log=on_log) as context:
        if part == "wan_vae":
            size = (job.video_frames - 1) // 4 + 1, job.height // 8, job.width // 8
            context.decode(np.zeros((1, 16, *size), np.float32))
        else:
            context.generate_video(job)


if __name__ == "__main__":
    main()
