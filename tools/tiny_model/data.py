"""Batches for training, made on the device as they are needed; the same seed gives the same ones."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tools.tiny_model import grammar, scenes, tokens
from tools.tiny_model.vae import WanVae

CHUNK = 128  # clips drawn and encoded at once
FIRST_FRAME_EVERY = 4  # one clip in so many can be given with its first frame


def draw(
    rng: np.random.Generator, n: int, device: torch.device, frames: int = scenes.FRAMES
) -> tuple[Tensor, list[str]]:
    """Clips n x 3 x frames x 96 x 96 and their captions."""
    chosen = grammar.sample(rng, n)
    objects, grounds = scenes.layout(chosen, rng)

    def there(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(device)

    return scenes.draw(torch, objects.to(there), grounds.to(there), frames), list(grammar.captions(chosen, rng))


def crop(clips: Tensor, rng: np.random.Generator, frames: int, size: int) -> Tensor:
    """A part of each clip, the same for all."""
    t, h, w = (int(rng.integers(n - k + 1)) for n, k in zip(clips.shape[2:], (frames, size, size), strict=True))
    return clips[:, :, t : t + frames, h : h + size, w : w + size]


def objects(clips: Tensor) -> Tensor:
    """1 where a clip (n x 3 x frames x rows x columns) is far from its middle colour, else 0: n x 1 x ..."""
    middle = clips.flatten(2).median(-1).values[..., None, None, None]
    return ((clips - middle).abs().amax(1, keepdim=True) > scenes.OBJECT / 127.5).to(clips)


@dataclass(frozen=True)
class Pool:
    """Encoded clips: latents n x 16 x 5 x 12 x 12 in bfloat16, rows of the text encoder's table, prompts' lengths.

    `first` holds the latents of the first frame's condition for clips 0, FIRST_FRAME_EVERY, ...
    """

    latents: Tensor
    first: Tensor
    rows: Tensor
    lengths: Tensor


@torch.no_grad()
def pool(vae: WanVae, rng: np.random.Generator, n: int, device: torch.device) -> Pool:
    """Draws and encodes n clips."""
    latents, first, texts = [], [], []
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for begin in range(0, n, CHUNK):
            clips, captions = draw(rng, min(CHUNK, n - begin), device)
            texts += captions
            latents.append(vae.diffusion_latents(clips).to(torch.bfloat16))
            frames = torch.zeros_like(clips[::FIRST_FRAME_EVERY])
            frames[:, :, 0] = clips[::FIRST_FRAME_EVERY, :, 0]
            first.append(vae.diffusion_latents(frames).to(torch.bfloat16))
    rows, lengths = tokens.rows(texts)
    tables = (torch.from_numpy(a).to(device) for a in (rows, lengths))
    return Pool(torch.cat(latents), torch.cat(first), *tables)


def condition(first: Tensor) -> Tensor:
    """What the engine puts beside the noisy latents: four channels that mark the first frame, and its latents."""
    mask = torch.zeros_like(first[:, :4])
    mask[:, :, 0] = 1
    return torch.cat((mask, first), 1)


def empty_prompt(device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and length of no prompt at all."""
    rows, lengths = tokens.rows([""])
    return torch.from_numpy(rows).to(device), torch.from_numpy(lengths).to(device)


@dataclass(frozen=True)
class Batch:
    latents: Tensor
    condition: Tensor
    rows: Tensor
    lengths: Tensor


NO_PROMPT, NO_WORD, WITH_FIRST, PICTURES = 0.12, 0.02, 0.8, 0.1  # shares of prompts, words, clips and batches


def batch(source: Pool, n: int, generator: torch.Generator, empty: tuple[Tensor, Tensor]) -> Batch:
    """n clips of the pool, some without prompt, some with their first frame; now and then of one frame."""
    device = source.latents.device

    def chance(p: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device) < p

    which = torch.randint(len(source.latents), (n,), generator=generator, device=device)
    latents, rows, lengths = source.latents[which].float(), source.rows[which], source.lengths[which]
    known = (which % FIRST_FRAME_EVERY == 0) & chance(WITH_FIRST, n)
    extra = condition(source.first[which // FIRST_FRAME_EVERY].float()) * known.view(-1, 1, 1, 1, 1)
    rows = torch.where(chance(NO_WORD, *rows.shape), torch.zeros_like(rows), rows)
    without = chance(NO_PROMPT, n)
    rows = torch.where(without[:, None], empty[0], rows)
    lengths = torch.where(without, empty[1], lengths)
    if chance(PICTURES, 1).item():
        latents, extra = latents[:, :, :1], extra[:, :, :1] * 0
    return Batch(latents, extra, rows, lengths)
