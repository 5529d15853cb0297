"""How many steps a second each stage makes on this machine: python -m tools.tiny_model.speed

With and without torch.compile, and for each layout of the VAE; a line each, with the seconds of the first steps, in
which kernels are compiled and chosen. "issued" is the time until the processor has asked for a step's work: where it is
near the whole, the GPU waits for the processor. The best for the VAE comes last, as options of train.py.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tools.tiny_model import data, grammar, scenes, sizes, state, tokens, train
from tools.tiny_model.vae import WanVae

WARM = 33  # the thirtieth batch is the third of one frame


def measure(module: nn.Module, made: train.Steps, share: float, steps: int) -> tuple[float, float, float]:
    """Seconds of the first steps; of a later one, and until its work is issued."""
    trainer = state.Trainer("speed", module, Path(), 1e-4, 0.99)
    trainer.steps = 1000

    def several(first: int, last: int) -> None:
        for number in range(first, last):
            trainer.update(made.loss, made.feed(number, share))

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    with train.own_stream(trainer.weights[0].device):
        begun = time.monotonic()
        several(0, WARM)
        wait()
        warm, begun = time.monotonic() - begun, time.monotonic()
        several(WARM, WARM + steps)
        issued = (time.monotonic() - begun) / steps
        wait()
    return warm, (time.monotonic() - begun) / steps, issued


def noise_pool(n: int, frames: int, device: torch.device) -> data.Pool:
    """As `data.pool` makes it, of noise."""
    rng = np.random.default_rng(0)
    shape = sizes.latent_shape(frames, scenes.SIZE, scenes.SIZE)
    latents = torch.randn((n, sizes.LATENT, *shape), device=device).bfloat16()
    rows, lengths = tokens.rows(list(grammar.captions(grammar.sample(rng, n), rng)))
    tables = (torch.from_numpy(a).to(device) for a in (rows, lengths))
    return data.Pool(latents, latents[:: data.FIRST_FRAME_EVERY], *tables)


def said(name: str, found: tuple[float, float, float]) -> None:
    warm, whole, issued = found
    text = (
        f"{1 / whole:6.1f} steps/s, {whole * 1e3:6.1f} ms, issued {issued * 1e3:6.1f} ms, first {WARM} in {warm:.1f} s"
    )
    print(f"{name:32} {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="that are measured")
    parser.add_argument("--batch", type=int, default=0, help="clips a step; 0: the stage's own")
    parser.add_argument("--layouts", nargs="+", default=["3d", "3d-last"], help="of the VAE")
    parser.add_argument("--only", nargs="+", default=["pictures", "vae", "whole", "stills", "trunk"], help="stages")
    a = parser.parse_args()
    if a.steps < 1 or a.batch < 0:
        parser.error("--steps from 1 and --batch from 0 are possible")
    device = train.prepared()
    kinds = (False, True) if hasattr(nn.Module, "compile") else (False,)
    best: dict[tuple[str, bool], float] = {}
    shot = data.footage(np.random.default_rng(0), 2 * (a.batch or 64), device)
    for layout in a.layouts:
        for compiled in kinds:
            vae = WanVae(sizes.VAE).to(device)
            vae.lay_out(layout, compiled)
            for stage, share in (("pictures", 0.0), ("vae", 0.0), ("whole", 1.0)):
                if stage not in a.only:
                    continue
                real = "pictures" if stage == "pictures" else "vae"
                made = train.vae_steps(vae, real, shot, a.batch or train.BATCHES[real], 0, device)
                found = measure(vae, made, share, a.steps)
                said(f"{stage} {layout}{' compiled' * compiled}", found)
                best[layout, compiled] = best.get((layout, compiled), 0.0) + found[1]
    flow: list[tuple[str, Callable[[], data.Pool]]] = [
        ("stills", lambda: noise_pool(4096, 1, device)),
        ("trunk", lambda: noise_pool(4096, scenes.FRAMES, device)),
    ]
    for stage, pool in flow:
        for compiled in kinds if stage in a.only else ():
            both = train.Trunk().to(device)
            if compiled:
                train.quicken(both)
            batch = a.batch or train.BATCHES[stage]
            made = train.flow_steps(both.dit, both.text, stage, pool(), batch, 0, device)
            said(f"{stage}{' compiled' * compiled}", measure(both, made, 0.0, a.steps))
    if best:
        layout, compiled = min(best, key=lambda kind: best[kind])
        print(f"--layout {layout}{' --compile' * compiled}")


if __name__ == "__main__":
    main()
