"""umt5 encoder, the tiny one two layers deep. Its vocabulary is compiled into the engine: the real 256384 rows."""

from dataclasses import dataclass

from sdsage.tiny.layers import Layers
from sdsage.tiny.tensors import DType, Tensor, Uniform


@dataclass(frozen=True)
class Size:
    """What tells umt5 encoders apart: channels of a token, heads, channels inside the feed-forward layers, layers."""

    dim: int
    heads: int
    ffn: int
    layers: int


TINY = Size(dim=64, heads=2, ffn=128, layers=2)
VOCABULARY = 256384
BUCKETS = 32  # of relative positions


def umt5(size: Size = TINY) -> list[Tensor]:
    """Tensors under the names of llama.cpp, as in the files that people use."""
    dim, heads, ffn = size.dim, size.heads, size.ffn
    net = Layers(DType.Q8_0)
    net.add("token_embd.weight", (VOCABULARY, dim), Uniform(1.0), DType.Q8_0)
    for i in range(size.layers):
        block = f"enc.blk.{i}."
        # T5 does not divide the logits by sqrt(head size): q is small instead
        net.linear(f"{block}attn_q", dim, dim, gain=(dim // heads) ** -0.5, bias=None)
        for part in "kvo":
            net.linear(f"{block}attn_{part}", dim, dim, bias=None)
        net.add(f"{block}attn_rel_b.weight", (BUCKETS, heads), Uniform(0.5))
        net.norm(f"{block}attn_norm.weight", dim)
        net.linear(f"{block}ffn_gate", dim, ffn, bias=None)
        net.linear(f"{block}ffn_up", dim, ffn, bias=None)
        net.linear(f"{block}ffn_down", ffn, dim, bias=None)
        net.norm(f"{block}ffn_norm.weight", dim)
    net.norm("enc.output_norm.weight", dim)
    return net.tensors
