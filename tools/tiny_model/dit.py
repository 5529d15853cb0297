"""The Wan diffusion transformer with small widths, for batches.

The engine hands over 512 text tokens, all behind the prompt's being zeros. They share keys and values, so one of them
with the logarithm of their number added to its logit stands for all: the same result with a tenth of the work.
"""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.tiny_model.sizes import HEAD, LATENT, PATCH, PROMPT_TOKENS, TIME_DIM, DitSize, TextSize

AXES = (44, 42, 42)  # channels of a head that tell frame, row and column
THETA = 10000.0


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """b x heads x tokens x channels; bias is added to the logits."""
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return (logits if bias is None else logits + bias).softmax(-1) @ v


class RmsNorm(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * self.weight).to(x.dtype)


class SelfAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = RmsNorm(dim), RmsNorm(dim)

    def forward(self, x: Tensor, context: Tensor, turn: Tensor | None, bias: Tensor | None) -> Tensor:
        q, k, v = self.norm_q(self.q(x)), self.norm_k(self.k(context)), self.v(context)
        q, k, v = (a.unflatten(-1, (-1, HEAD)).transpose(1, 2) for a in (q, k, v))
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        return self.o(attend(q, k, v, bias).transpose(1, 2).flatten(2))


@cache
def positions(t: int, h: int, w: int, device: torch.device) -> Tensor:
    """Angles of the rotary embedding, cos and sin: 2 x tokens x HEAD/2."""
    grid = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in (t, h, w)), indexing="ij")
    parts = [
        axis.reshape(-1, 1) * THETA ** (-torch.arange(0, n, 2, dtype=torch.float64) / n)
        for axis, n in zip(grid, AXES, strict=True)
    ]
    angle = torch.cat(parts, 1)
    return torch.stack((angle.cos(), angle.sin())).float().to(device)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turns neighbouring channels as pairs."""
    cos, sin = turn
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


class Block(nn.Module):
    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, 1e-6, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(dim, 1e-6, elementwise_affine=False)
        self.norm3 = nn.LayerNorm(dim, 1e-6)
        self.self_attn, self.cross_attn = SelfAttention(dim), SelfAttention(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn), nn.GELU(approximate="tanh"), nn.Linear(ffn, dim))
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) * dim**-0.5)

    def forward(self, x: Tensor, e: Tensor, turn: Tensor, context: Tensor, bias: Tensor) -> Tensor:
        e = (e + self.modulation).unsqueeze(2).unbind(1)
        y = self.norm1(x) * (1 + e[1]) + e[0]
        x = x + self.self_attn(y, y, turn, None) * e[2]
        x = x + self.cross_attn(self.norm3(x), context, None, bias)
        return x + self.ffn(self.norm2(x) * (1 + e[4]) + e[3]) * e[5]


class Head(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, 1e-6, elementwise_affine=False)
        self.head = nn.Linear(dim, LATENT * PATCH**2)
        self.modulation = nn.Parameter(torch.randn(1, 2, dim) * dim**-0.5)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        shift, scale = (e.unsqueeze(1) + self.modulation).unsqueeze(2).unbind(1)
        return self.head(self.norm(x) * (1 + scale) + shift)


class Wan(nn.Module):
    """Latents b x inputs x t x h x w and sigmas b to velocities b x 16 x t x h x w."""

    def __init__(self, size: DitSize, text: TextSize) -> None:
        super().__init__()
        dim = size.dim
        self.patch_embedding = nn.Conv3d(size.inputs, dim, (1, PATCH, PATCH), (1, PATCH, PATCH))
        gelu = nn.GELU(approximate="tanh")
        self.text_embedding = nn.Sequential(nn.Linear(text.dim, dim), gelu, nn.Linear(dim, dim))
        self.time_embedding = nn.Sequential(nn.Linear(TIME_DIM, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(Block(dim, size.ffn) for _ in range(size.blocks))
        self.head = Head(dim)
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """First weights. Padding counts as hundreds of tokens (`padding_bias`) and would get 95 % of the attention to
        the prompt, so that little is learned of words. Here words and padding lie on either side of 0 in one direction,
        and all queries look to the side of the words.
        """
        nn.init.zeros_(self.head.head.weight)
        nn.init.zeros_(self.head.head.bias)
        first, _, last = self.text_embedding
        nn.init.zeros_(first.bias)  # padding is 0 behind it, words' channels are above 0 on average
        dim = last.weight.shape[0]
        last.weight += 4 / dim
        nn.init.constant_(last.bias, -0.25)
        for block in self.blocks:
            side = torch.randn(dim).sign()
            block.cross_attn.q.bias.copy_(0.2 * side)
            block.cross_attn.k.weight += side[:, None] / dim

    def forward(self, x: Tensor, sigma: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        """`text` is b x L x width with zeros behind the `lengths` tokens of each prompt, and at least one such."""
        b, _, t, h, w = x.shape
        h, w = h // PATCH, w // PATCH
        x = self.patch_embedding(x).flatten(2).transpose(1, 2)
        e = self.time_embedding(wave(sigma * 1000))
        e0 = self.time_projection(e).unflatten(1, (6, -1))
        context, bias = self.text_embedding(text), padding_bias(lengths, text.shape[1]).to(x.dtype)
        turn = positions(t, h, w, x.device)
        for block in self.blocks:
            x = block(x, e0, turn, context, bias)
        x = self.head(x, e).reshape(b, t, h, w, PATCH, PATCH, LATENT)
        return x.permute(0, 6, 1, 2, 4, 3, 5).reshape(b, LATENT, t, h * PATCH, w * PATCH)


def wave(t: Tensor) -> Tensor:
    """Sines and cosines of a time: b x TIME_DIM."""
    half = TIME_DIM // 2
    angle = t.float()[:, None] * torch.exp(-math.log(10000.0) * torch.arange(half, device=t.device) / half)
    return torch.cat((angle.cos(), angle.sin()), 1)


def padding_bias(lengths: Tensor, columns: int) -> Tensor:
    """b x 1 x 1 x columns: the first padding token stands for all PROMPT_TOKENS - length of them."""
    at = torch.arange(columns, device=lengths.device)[None]
    n = lengths[:, None]
    many = (PROMPT_TOKENS - n).float().log()
    bias = torch.where(at < n, torch.zeros_like(many), torch.where(at == n, many, -1e4))
    return bias[:, None, None]
