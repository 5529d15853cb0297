"""The umt5 encoder with small widths. Its module names are the engine's; `export` gives them llama.cpp's."""

from functools import cache

import torch
from torch import Tensor, nn

from tools.tiny_model.dit import RmsNorm
from tools.tiny_model.sizes import TextSize

BUCKETS, FAR = 32, 128


class Layer(nn.Module):
    """Every layer has a table of relative positions of its own: that is what umt5 has over T5."""

    def __init__(self, size: TextSize) -> None:
        super().__init__()
        dim, self.heads = size.dim, size.heads
        self.attn_norm, self.ffn_norm = RmsNorm(dim), RmsNorm(dim)
        self.attn_q, self.attn_k, self.attn_v, self.attn_o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.attn_rel_b = nn.Embedding(BUCKETS, size.heads)
        self.ffn_gate, self.ffn_up = (nn.Linear(dim, size.ffn, bias=False) for _ in range(2))
        self.ffn_down = nn.Linear(size.ffn, dim, bias=False)
        nn.init.normal_(self.attn_q.weight, std=(dim * dim // size.heads) ** -0.5)  # logits are not divided
        nn.init.zeros_(self.attn_rel_b.weight)

    def forward(self, x: Tensor, buckets: Tensor, mask: Tensor) -> Tensor:
        y = self.attn_norm(x)
        q, k, v = (
            a(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for a in (self.attn_q, self.attn_k, self.attn_v)
        )
        logits = (q @ k.transpose(-1, -2)).float() + self.attn_rel_b(buckets).permute(2, 0, 1) + mask
        x = x + self.attn_o((logits.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.ffn_down(nn.functional.gelu(self.ffn_gate(y), approximate="tanh") * self.ffn_up(y))


class Umt5(nn.Module):
    """Rows of the vocabulary that are used (`ids`: their token ids), to text for the diffusion transformer.

    A token that is none of `ids` has a row of zeros in the file; row 0 stands for it here and stays zero.
    """

    def __init__(self, size: TextSize, used: int) -> None:
        super().__init__()
        self.token_embd = nn.Embedding(used + 1, size.dim, padding_idx=0)
        self.blk = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.output_norm = RmsNorm(size.dim)

    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """b x L rows of the table; zeros behind the lengths, as the engine makes them."""
        n = rows.shape[1]
        inside = torch.arange(n, device=rows.device)[None] < lengths[:, None]
        mask = torch.where(inside, 0.0, -1e9)[:, None, None]
        x = self.token_embd.weight.index_select(0, rows.flatten()).view(*rows.shape, -1)
        x, where = x * (rows > 0)[..., None], buckets(n, rows.device)  # nothing is learned for row 0
        for layer in self.blk:
            x = layer(x, where, mask)
        return self.output_norm(x) * inside[..., None]


@cache
def buckets(n: int, device: torch.device) -> Tensor:
    """[query, key]: distances up to 7 each on their own, farther ones in steps of growing width, either side apart."""
    distance = torch.arange(n)[None] - torch.arange(n)[:, None]
    half, near = BUCKETS // 2, BUCKETS // 4
    away = distance.abs()
    steps = torch.log(away.clamp(min=1).float() / near) / torch.log(torch.tensor(FAR / near)) * (half - near)
    far = (near + steps.long()).clamp(max=half - 1)
    return (torch.where(away < near, away, far) + half * (distance > 0)).to(device)
