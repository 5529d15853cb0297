"""Sizes of the tiny model's networks, and what follows from them: weights, bytes, work. No torch, no NumPy."""

from dataclasses import dataclass

HEAD = 128  # channels of a head of the diffusion transformer, as in every Wan
LATENT, PIXEL, PATCH = 16, 3, 2
TIME_SCALE, SPACE_SCALE = 4, 8  # frames and pixels of one latent
I2V_EXTRA = 4 + LATENT  # mask and latents of the first frame
PROMPT_TOKENS = 512  # the engine pads every prompt to this, with zeros behind the text encoder
TIME_DIM = 256

STEPS, GUIDANCE = 12, 3.5  # --steps and --cfg-scale of the presets
SHIFT = 3.0  # their --flow-shift
BOUNDARY = 0.875  # from this sigma up the high-noise expert answers


@dataclass(frozen=True)
class TextSize:
    """umt5 encoder."""

    dim: int = 64
    heads: int = 2
    ffn: int = 192
    layers: int = 3
    vocabulary: int = 256384

    @property
    def weights(self) -> int:
        """Without the vocabulary."""
        return self.layers * (4 * self.dim**2 + 3 * self.dim * self.ffn + 32 * self.heads + 2 * self.dim) + self.dim


@dataclass(frozen=True)
class DitSize:
    """One expert. `inputs` are its latent channels: 16 for text alone, 36 with a first frame."""

    dim: int = 256
    ffn: int = 512
    blocks: int = 4
    inputs: int = LATENT

    @property
    def linear(self) -> int:
        """Weights in the blocks."""
        return self.blocks * (8 * self.dim**2 + 2 * self.dim * self.ffn)

    def weights(self, text: TextSize) -> int:
        """Roughly all: biases and norms are left out."""
        d = self.dim
        ends = d * self.inputs * PATCH**2 + d * LATENT * PATCH**2
        return self.linear + ends + d * text.dim + d * d + TIME_DIM * d + d * d + 6 * d * d

    def macs(self, tokens: int) -> int:
        """Multiplications of one call for one prompt."""
        d = self.dim
        own = self.linear - self.blocks * 2 * d * d  # keys and values of the text are not of the tokens
        attention = self.blocks * 2 * d * tokens * (tokens + PROMPT_TOKENS)
        return own * tokens + attention + self.blocks * 2 * d * d * PROMPT_TOKENS


@dataclass(frozen=True)
class VaeSize:
    """Base widths; levels are 1, 2, 4 and 4 times as wide."""

    encoder: int = 8
    decoder: int = 16

    def decoder_layers(self) -> list[tuple[int, int]]:
        """(weights, latents scale of its output) for each convolution: scale is positions per latent position."""
        n, found = self.decoder, []
        top = 4 * n
        found += [(LATENT * top * 27, 1)] + [(top * top * 27, 1)] * 4 + [(top * top * 4, 1)]
        n_in = top
        for level, factor in enumerate((4, 4, 2, 1)):
            n_out = factor * n
            scale = (1, 8, 64, 256)[level]  # about: the first frame has no twin
            found.append((n_in * n_out * 27, scale))
            found += [(n_out * n_out * 27, scale)] * 5
            if level < 3:
                found.append((n_out * n_out // 2 * 9, (8, 64, 256)[level]))
            if level < 2:
                found.append((n_out * 2 * n_out * 3, scale))
            n_in = n_out // 2
        return [*found, (n * PIXEL * 27, 256)]

    def decoder_weights(self) -> int:
        return sum(weights for weights, _ in self.decoder_layers())

    def decoder_macs(self, latents: int) -> int:
        """Multiplications for so many latent positions (frames x rows x columns)."""
        return sum(weights * scale for weights, scale in self.decoder_layers()) * latents

    def encoder_weights(self) -> int:
        n, total, n_in = self.encoder, PIXEL * self.encoder * 27, self.encoder
        for level, factor in enumerate((1, 2, 4, 4)):
            n_out = factor * n
            total += n_in * n_out * 27 + 3 * n_out * n_out * 27
            total += n_out * n_out * 9 if level < 3 else 0
            total += n_out * n_out * 3 if level in (1, 2) else 0
            n_in = n_out
        return total + 4 * n_in * n_in * 27 + 4 * n_in * n_in + n_in * 2 * LATENT * 27


TEXT, DIT, VAE = TextSize(), DitSize(), VaeSize()
I2V = DitSize(inputs=LATENT + I2V_EXTRA)  # what is trained: its first 16 input channels are the text-only expert


def latent_shape(frames: int, height: int, width: int) -> tuple[int, int, int]:
    return (frames - 1) // TIME_SCALE + 1, height // SPACE_SCALE, width // SPACE_SCALE


def tokens(frames: int, height: int, width: int) -> int:
    t, h, w = latent_shape(frames, height, width)
    return t * (h // PATCH) * (w // PATCH)
