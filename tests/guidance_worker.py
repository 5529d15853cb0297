"""guidance_worker.py UNET: pictures with guidance, by two forwards a step and by one of both; prints what came out as
JSON.

For test_guidance.py; it needs the test library (SDSAGE_LIB_DIR).
A process of its own, because a process loads one libsdsage.
"""

import json
import re
import sys
from typing import Any

import numpy as np
from conftest import ctx_params, small_image, small_video
from sage_worker import files, psnr

import sdsage

STEPS = 3
LINE = re.compile(r"guidance: (\d+) steps with both forwards in one batch, (\d+) forwards alone")


def job(**more: Any) -> Any:
    job = small_image(width=64, height=64, **more)
    job.sample_params.sample_steps = STEPS
    job.sample_params.guidance.txt_cfg = 5.0
    return job


def counts(said: list[str]) -> list[list[int]]:
    return [[int(n) for n in match] for match in LINE.findall("\n".join(said))]


def pictures(unet: str, levers: str, jobs: dict[str, Any]) -> dict[str, Any]:
    """Name -> latents and [pairs, forwards alone]."""
    found = {}
    said: list[str] = []
    params = sdsage.SdCtxParams(n_threads=2, model_path=unet, engine_levers=levers)
    with sdsage.Context(params, on_log=lambda level, line: said.append(line)) as context:
        for name, params in jobs.items():
            said.clear()
            latents = context.generate_image(params, keep_latents=True).latents[0]
            found[name] = latents, counts(said)
    return found


def main() -> None:
    long = "a lovely cat " * 40  # more than the 77 tokens of a chunk
    cached = job()
    cached.sample_params.sample_steps = 8
    cached.cache.mode = "ucache"
    cached.cache.reuse_threshold = 1.0
    unguided = job()
    unguided.sample_params.guidance.txt_cfg = 1.0
    jobs = {
        "plain": job(negative_prompt="a dog"),
        "long": job(prompt=long, negative_prompt="a dog"),
        "cached": cached,
        "unguided": unguided,
    }
    alone, joined = (pictures(sys.argv[1], levers, jobs) for levers in ("none", "batch"))
    found: dict[str, Any] = {
        name: {"counts": joined[name][1], "psnr": psnr(joined[name][0], alone[name][0]), "off": alone[name][1]}
        for name in jobs
    }
    swapped = job(prompt="a dog", negative_prompt="a lovely cat")
    found["swapped"] = psnr(pictures(sys.argv[1], "batch", {"": swapped})[""][0], joined["plain"][0])

    said: list[str] = []
    latents: list[np.ndarray] = []
    for levers in ("none", "batch"):
        params = ctx_params(files("tiny-random"), engine_levers=levers)
        with sdsage.Context(params, on_log=lambda level, line: said.append(line)) as context:
            latents.append(context.generate_video(small_video(), keep_latents=True).latents[0])
    found["video"] = {
        "same": bool((latents[0] == latents[1]).all()),
        "said": sum("guidance: this model takes one picture at a time" in line for line in said),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
