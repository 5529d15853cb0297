"""Which way of computing the VAE is fastest on this machine: python -m tools.tiny_model.speed

Prints the options that train.py takes for it; the measurements go to the error output. "issued" is the time until the
processor has asked for a step's work: where it is near the whole, the GPU waits for the processor.
"""

import argparse
import sys
import time

import torch

from tools.tiny_model import train
from tools.tiny_model.sizes import VAE
from tools.tiny_model.vae import LAYOUTS, WanVae

WARM = 3


def measure(layout: str, stage: str, batch: int, steps: int, device: torch.device) -> tuple[float, float]:
    """Seconds a step, and until its work is issued."""
    torch.manual_seed(0)
    vae = WanVae(VAE).to(device)
    vae.lay_out(layout)
    step, adam = train.vae_steps(vae, stage, batch, 0, device), torch.optim.AdamW(vae.parameters())

    def several(first: int, last: int) -> None:
        for number in range(first, last):
            adam.zero_grad()
            step(number, 0.0).backward()
            adam.step()

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    several(0, WARM)
    wait()
    begun = time.monotonic()
    several(WARM, WARM + steps)
    issued = time.monotonic() - begun
    wait()
    return (time.monotonic() - begun) / steps, issued / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15, help="that are measured")
    parser.add_argument("--batch", type=int, default=0, help="clips a step; 0: the stage's own")
    a = parser.parse_args()
    if a.steps < 1 or a.batch < 0:
        parser.error("--steps from 1 and --batch from 0 are possible")
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, float] = {}
    for layout in LAYOUTS:
        for stage in ("pictures", "vae"):
            seconds, issued = measure(layout, stage, a.batch or train.BATCHES[stage], a.steps, device)
            print(f"{layout:8} {stage:9} {seconds * 1e3:8.1f} ms a step, issued {issued * 1e3:.1f}", file=sys.stderr)
            found[layout] = seconds  # of the last, on clips
    print(f"--layout {min(found, key=lambda layout: found[layout])}")


if __name__ == "__main__":
    main()
