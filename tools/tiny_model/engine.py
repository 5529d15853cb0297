"""What the engine's modules answer, one by one, as float32: text encoder, diffusion transformer, VAE. No torch.

The library runs whole jobs; a job of one step that ends at sigma 0 gives its first answer back as its latents, and
small hand-made weight files pass on what other modules hand to the diffusion transformer ("probes").
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import sdsage
from sdsage.tiny.tensors import DType
from tools.tiny_model import export
from tools.tiny_model.sizes import HEAD, LATENT, PATCH, PROMPT_TOKENS, TEXT, TIME_DIM, latent_shape

Weights = dict[str, NDArray]
PAD_VALUE = 4.0  # of a probe's constant channels; makes its last normalisation invertible
LIFT = 20.0  # the engine's GELU passes values from 10 up as they are
ZOOM = 16.0


def context(dit: Path, text: Path, vae: Path, threads: int = 1) -> sdsage.Context:
    params = sdsage.SdCtxParams(n_threads=threads)
    params.diffusion_model_path, params.t5xxl_path, params.vae_path = str(dit), str(text), str(vae)
    params.vae_decode_only = False
    return sdsage.Context(params)


def answer(
    model: sdsage.Context,
    prompt: str,
    sigma: float,
    *,
    seed: int = 0,
    frames: int = 17,
    size: tuple[int, int] = (96, 96),
    first: NDArray[np.uint8] | None = None,
) -> NDArray[np.float32]:
    """Latents x - sigma v of one step from noise x = sigma e to 0, 1 x 16 x t x h x w. `size` is width and height."""
    job = sdsage.SdVidGenParams(prompt=prompt, width=size[0], height=size[1], video_frames=frames, seed=seed)
    job.sample_params.custom_sigmas = [sigma, 0.0]
    job.sample_params.sample_steps = 1
    job.sample_params.sample_method = sdsage.SampleMethod.EULER
    job.sample_params.guidance.txt_cfg = 1.0
    if first is not None:
        job.init_image = first
    return model.generate_video(job, keep_latents=True).latents[0]


# ---- probes


def zero_dit(inputs: int, dim: int = HEAD, text_dim: int = TEXT.dim) -> Weights:
    """A diffusion transformer of one block whose velocity is 0: its answer is the noise."""
    shapes = {
        "patch_embedding.weight": (dim, inputs, 1, PATCH, PATCH),
        "patch_embedding.bias": (dim,),
        "head.modulation": (1, 2, dim),
        "blocks.0.modulation": (1, 6, dim),
    }
    linear = {
        "text_embedding.0": (dim, text_dim),
        "text_embedding.2": (dim, dim),
        "time_embedding.0": (dim, TIME_DIM),
        "time_embedding.2": (dim, dim),
        "time_projection.1": (6 * dim, dim),
        "blocks.0.norm3": (dim,),
        "blocks.0.ffn.0": (dim, dim),
        "blocks.0.ffn.2": (dim, dim),
        "head.head": (LATENT * PATCH**2, dim),
    }
    for attention in ("self_attn", "cross_attn"):
        linear |= {f"blocks.0.{attention}.{part}": (dim, dim) for part in "qkvo"}
        shapes |= {f"blocks.0.{attention}.norm_{part}.weight": (dim,) for part in "qk"}
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def text_probe() -> Weights:
    """Its velocity tells the sum of the text encoder's output over all tokens (`text_sum`)."""
    n = TEXT.dim
    w = zero_dit(LATENT, 4 * n)
    one = np.eye(n, dtype=np.float32)
    w["text_embedding.0.weight"][:n], w["text_embedding.0.bias"][:n] = one, LIFT
    w["text_embedding.2.weight"][:n, :n], w["text_embedding.2.bias"][:n] = one, -LIFT
    w["blocks.0.cross_attn.v.weight"][:n, :n] = one * PROMPT_TOKENS  # all tokens get the same weight
    w["blocks.0.cross_attn.o.weight"][:n, :n] = one
    w["blocks.0.cross_attn.o.weight"][n : 2 * n, :n] = -one
    return _ended(w, n)


def _ended(w: Weights, n: int) -> Weights:
    """Channels are c, -c, constants and minus constants, n each: their mean is 0, and the last layer takes c out."""
    w["patch_embedding.bias"][2 * n : 3 * n] = PAD_VALUE
    w["patch_embedding.bias"][3 * n :] = -PAD_VALUE
    w["head.head.weight"][np.arange(n), np.arange(n)] = 1.0
    return w


def _undone(y: NDArray) -> NDArray:
    """A probe's channels c from the normalised ones (last axis): their variance was (K^2 + mean c^2) / 2."""
    y = y.astype(np.float64)
    scale = PAD_VALUE**2 / 2 / (1 - (y**2).mean(-1, keepdims=True) / 2)
    return (y * np.sqrt(scale)).astype(np.float32)


def _patches(v: NDArray) -> NDArray:
    """Velocities 1 x 16 x t x h x w as the last layer gave them: tokens x 64."""
    _, c, t, h, w = v.shape
    v = v.reshape(c, t, h // PATCH, PATCH, w // PATCH, PATCH).transpose(1, 2, 4, 3, 5, 0)
    return v.reshape(-1, PATCH * PATCH * c)


def frame_probe() -> Weights:
    """Its velocity tells the latents of the first frame's condition (`condition`); for files of 36 channels."""
    n = LATENT * PATCH**2
    w = zero_dit(2 * LATENT + 4, 4 * n)
    cells = np.arange(n)
    pixel, channel = cells // LATENT, cells % LATENT
    for sign, start in ((1.0, 0), (-1.0, n)):
        w["patch_embedding.weight"][start + cells, LATENT + 4 + channel, 0, pixel // PATCH, pixel % PATCH] = sign
    return _ended(w, n)


def write_dit(path: Path, weights: Weights, linear: DType = DType.F32) -> Path:
    inputs = weights["patch_embedding.weight"].shape[1]
    path.write_bytes(export.as_gguf(export.dit(weights, linear, inputs), "wan", path.stem))
    return path


class Modules:
    """The engine's modules with given files; probes and altered files are written to `folder`."""

    def __init__(self, text: Path, vae: Path, folder: Path) -> None:
        self.text, self.vae, self.folder = text, vae, folder

    def noise(self, sigma: float, seed: int, frames: int, size: tuple[int, int]) -> NDArray[np.float32]:
        """What a job of this seed begins with."""
        dit = write_dit(self.folder / "probe-zero.gguf", zero_dit(LATENT))
        with context(dit, self.text, self.vae) as model:
            return answer(model, "", sigma, seed=seed, frames=frames, size=size)

    def velocity(
        self, dit: Path, prompt: str, sigma: float, seed: int, frames: int, size: tuple[int, int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The noise x = sigma e, and what the diffusion transformer makes of it."""
        x = self.noise(sigma, seed, frames, size)
        with context(dit, self.text, self.vae) as model:
            return x, (x - answer(model, prompt, sigma, seed=seed, frames=frames, size=size)) / np.float32(sigma)

    def text_sum(self, prompts: list[str]) -> NDArray[np.float32]:
        """Sum of the text encoder's output over a prompt's tokens: prompts x width."""
        x = self.noise(1.0, 0, 1, (16, 16))
        dit = write_dit(self.folder / "probe-text.gguf", text_probe())
        with context(dit, self.text, self.vae) as model:
            found = [x - answer(model, prompt, 1.0, frames=1, size=(16, 16)) for prompt in prompts]
        return np.concatenate([_undone(_patches(v)[:, : TEXT.dim]) for v in found])

    def condition(self, first: NDArray[np.uint8], frames: int) -> NDArray[np.float32]:
        """The VAE's encoder on a first frame and gray ones behind it: 1 x 16 x t x h x w, as diffusion latents."""
        height, width = first.shape[:2]
        size = (width, height)
        x = self.noise(1.0, 0, frames, size)
        dit = write_dit(self.folder / "probe-frame.gguf", frame_probe())
        with context(dit, self.text, self.vae) as model:
            v = x - answer(model, "", 1.0, frames=frames, size=size, first=first)
        c = _undone(_patches(v))
        t, h, w = latent_shape(frames, height, width)
        c = c.reshape(t, h // PATCH, w // PATCH, PATCH, PATCH, LATENT)
        return c.transpose(5, 0, 1, 3, 2, 4).reshape(1, LATENT, t, h, w)

    def decoded(self, weights: Weights, latents: NDArray[np.float32]) -> NDArray[np.float32]:
        """The VAE's decoder, 3 x frames x height x width, NaN where it can't be seen.

        Frames have 8 bits: the last layer is made ZOOM times as steep, and moved over the range window by window.
        """
        seen: NDArray[np.float32] | None = None
        for step in range(round(ZOOM)):
            middle = (2 * step + 1) / ZOOM - 1
            path = self.folder / "probe-vae.safetensors"
            zoomed = dict(weights)
            zoomed["decoder.head.2.weight"] = weights["decoder.head.2.weight"] * ZOOM
            zoomed["decoder.head.2.bias"] = (weights["decoder.head.2.bias"] - middle) * ZOOM
            path.write_bytes(export.as_safetensors(export.vae(zoomed)))
            params = sdsage.SdCtxParams(n_threads=1)
            params.vae_path = str(path)
            with sdsage.Context(params, decode_only="Wan 2.x") as model:
                frames = model.decode(latents)
            values = ((frames.astype(np.float32) / 127.5 - 1) / ZOOM + middle).transpose(3, 0, 1, 2)
            values[((frames == 0) | (frames == 255)).transpose(3, 0, 1, 2)] = np.nan
            seen = values if seen is None else np.where(np.isnan(seen), values, seen)
        assert seen is not None
        return seen
