"""The engine's flow schedule and its Euler sampler, for torch."""

from itertools import pairwise

import torch
from torch import Tensor

from tools.tiny_model.dit import Wan
from tools.tiny_model.sizes import BOUNDARY, I2V_EXTRA, SHIFT

MARGIN = 0.025  # each expert learns a little of the other's part: steps of a preset needn't fall on the boundary


def shifted(u: Tensor) -> Tensor:
    """Sigma of a time from 0 to 1."""
    return SHIFT * u / (1 + (SHIFT - 1) * u)


def time_of(sigma: float) -> float:
    """The time whose sigma it is."""
    return sigma / (SHIFT - (SHIFT - 1) * sigma)


def times(stage: str, u: Tensor) -> Tensor:
    """Times to learn, from numbers that are spread evenly over 0 to 1. Outlines are there before the noise is gone: the
    last of the way gets less than its share, but from the high-noise expert, which ends before.
    """
    first, last = part_of(stage)
    return first + (last - first) * (u if stage == "high" else u**0.7)


def part_of(stage: str) -> tuple[float, float]:
    """Times that a stage learns."""
    match stage:
        case "high":
            return time_of(BOUNDARY - MARGIN), 1.0
        case "low":
            return 0.0, time_of(BOUNDARY + MARGIN)
        case _:
            return 0.0, 1.0


def sigmas(steps: int) -> Tensor:
    """Of the engine's discrete scheduler: from 1 to 0, steps + 1 of them."""
    t = torch.linspace(999, 0, steps) if steps > 1 else torch.tensor([999.0])
    return torch.cat((shifted((t + 1) / 1000), torch.zeros(1)))


@torch.no_grad()
def sample(
    low: Wan,
    high: Wan,
    noise: Tensor,
    text: tuple[Tensor, Tensor],
    empty: tuple[Tensor, Tensor],
    steps: int,
    guidance: float,
    condition: Tensor | None = None,
) -> Tensor:
    """Latents. `text` and `empty` are what the text encoder makes of prompts and of none, with their lengths."""
    x, schedule = noise, sigmas(steps).to(noise.device)
    extra = torch.zeros_like(noise[:, :1]).repeat(1, I2V_EXTRA, 1, 1, 1) if condition is None else condition
    for sigma, after in pairwise(schedule):
        model = high if sigma >= BOUNDARY else low
        inputs, at = torch.cat((x, extra), 1), sigma.expand(len(x))
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            v = model(inputs, at, *text).float()
            if guidance != 1:
                away = model(inputs, at, *empty).float()
                v = away + guidance * (v - away)
        x = x + (after - sigma) * v
    return x
