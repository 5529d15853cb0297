"""Batches for training, made on the device as they are needed; the same seed gives the same ones."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tools.tiny_model import grammar, scenes, tokens
from tools.tiny_model.sizes import I2V_EXTRA
from tools.tiny_model.vae import WanVae

CHUNK, CHUNK_PICTURES = 128, 2048  # clips and single frames drawn and encoded at once
FIRST_FRAME_EVERY = 4  # one clip in so many can be given with its first frame


def draw(
    rng: np.random.Generator, n: int, device: torch.device, frames: int = scenes.FRAMES
) -> tuple[Tensor, Iterator[str]]:
    """Clips n x 3 x frames x 96 x 96 and their captions."""
    chosen = grammar.sample(rng, n)
    objects, grounds = scenes.layout(chosen, rng)

    def there(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(device)

    return scenes.draw(torch, objects.to(there), grounds.to(there), frames), grammar.captions(chosen, rng)


def objects(clips: Tensor) -> Tensor:
    """1 where a clip (n x 3 x frames x rows x columns) is far from its middle colour, else 0: n x 1 x ..."""
    middle = clips.flatten(2).median(-1).values[..., None, None, None]
    return ((clips - middle).abs().amax(1, keepdim=True) > scenes.OBJECT / 127.5).to(clips)


@dataclass(frozen=True)
class Footage:
    """Clips for the VAE: bytes n x 4 x 17 x 96 x 96, the fourth channel being where objects are."""

    frames: Tensor

    def some(self, n: int, rng: np.random.Generator, generator: torch.Generator, *part: int) -> tuple[Tensor, Tensor]:
        """A part (frames, rows, columns) of n clips, the same for all, and where objects are in it."""
        t, h, w = (int(rng.integers(have - k + 1)) for have, k in zip(self.frames.shape[2:], part, strict=True))
        which = torch.randint(len(self.frames), (n,), generator=generator, device=self.frames.device)
        seen = self.frames[:, :, t : t + part[0], h : h + part[1], w : w + part[2]][which].float()
        return seen[:, :3] / 127.5 - 1, seen[:, 3:]


def footage(rng: np.random.Generator, n: int, device: torch.device) -> Footage:
    """Draws n clips."""
    found = []
    for begin in range(0, n, CHUNK):
        clips, _ = draw(rng, min(CHUNK, n - begin), device)
        found.append(torch.cat((((clips + 1) * 127.5).round(), objects(clips)), 1).byte())
    return Footage(torch.cat(found))


@dataclass(frozen=True)
class Pool:
    """Encoded clips: latents n x 16 x 5 x 12 x 12 in bfloat16 (of pictures n x 16 x 1 x 12 x 12), rows of the text
    encoder's table, prompts' lengths.

    `first` holds the latents of the first frame's condition for clips 0, FIRST_FRAME_EVERY, ...; of pictures nothing.
    """

    latents: Tensor
    first: Tensor
    rows: Tensor
    lengths: Tensor


@torch.no_grad()
def pool(vae: WanVae, rng: np.random.Generator, n: int, device: torch.device, frames: int = scenes.FRAMES) -> Pool:
    """Draws and encodes n clips, or pictures if they have one frame."""
    chunk = CHUNK_PICTURES if frames == 1 else CHUNK
    latents, first, texts = [], [], []
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for begin in range(0, n, chunk):
            clips, captions = draw(rng, min(chunk, n - begin), device, frames)
            texts += captions
            latents.append(vae.diffusion_latents(clips).to(torch.bfloat16))
            known = torch.zeros_like(clips[::FIRST_FRAME_EVERY] if frames > 1 else clips[:0])
            known[:, :, 0] = clips[::FIRST_FRAME_EVERY, :, 0][: len(known)]
            first.append(vae.diffusion_latents(known).to(torch.bfloat16) if len(known) else latents[-1][:0])
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


NO_PROMPT, NO_WORD, WITH_FIRST = 0.12, 0.02, 0.8  # shares of prompts, words and clips


def batch(
    source: Pool, n: int, generator: torch.Generator, empty: tuple[Tensor, Tensor], pictures: bool = False
) -> Batch:
    """n clips of the pool, some without prompt, some with their first frame; or first frames alone."""
    device = source.latents.device

    def chance(p: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device) < p

    which = torch.randint(len(source.latents), (n,), generator=generator, device=device)
    kept = source.latents[:, :, :1] if pictures else source.latents
    latents, rows, lengths = kept[which].float(), source.rows[which], source.lengths[which]
    if pictures:
        extra = latents.new_zeros(1).expand(n, I2V_EXTRA, *latents.shape[2:])
    else:
        known = (which % FIRST_FRAME_EVERY == 0) & chance(WITH_FIRST, n)
        extra = condition(source.first[which // FIRST_FRAME_EVERY].float()) * known.view(-1, 1, 1, 1, 1)
    rows = torch.where(chance(NO_WORD, *rows.shape), torch.zeros_like(rows), rows)
    without = chance(NO_PROMPT, n)
    rows = torch.where(without[:, None], empty[0], rows)
    lengths = torch.where(without, empty[1], lengths)
    return Batch(latents, extra, rows, lengths)
