"""Wan 2.1/2.2 diffusion transformer; the tiny one is two blocks deep: T2V, I2V (36 input channels) and TI2V (48)."""

from dataclasses import dataclass

from sdsage.tiny.layers import Layers
from sdsage.tiny.tensors import DType, Tensor, Uniform


@dataclass(frozen=True)
class Size:
    """What tells the Wans apart; heads have 128 channels in each of them.

    Attributes:
        dim: channels of a token.
        ffn: channels inside the feed-forward layers.
        text_dim: width of the text encoder.
    """

    dim: int
    ffn: int
    blocks: int
    text_dim: int


TINY = Size(dim=256, ffn=512, blocks=2, text_dim=64)
TIME_DIM = 256
PATCH = 2 * 2  # latent pixels of one token

# Gains chosen with the engine, so that every part shows in the picture.
QK_GAIN = 1.5  # of the q and k norms: attention logits have deviation QK_GAIN^2
TEXT_QK_GAIN = 2.0  # a few prompt tokens compete with 500 of padding, whose logits are 0
SELF_OUT_GAIN = 3.0
CROSS_OUT_GAIN = 3.0
FFN_GAIN = 3.0
HEAD_GAIN = 0.8


def wan(in_channels: int, out_channels: int, size: Size = TINY) -> list[Tensor]:
    """Tensors of one expert."""
    dim = size.dim
    net = Layers(DType.Q8_0)
    # 4-d as ggml takes it: input and output channels share a dimension
    net.add("patch_embedding.weight", (dim * in_channels, 1, 2, 2), Uniform((in_channels * PATCH) ** -0.5), DType.F16)
    net.bias("patch_embedding", dim)
    # no bias from the text to the values: padding is zeros and stays so
    net.linear("text_embedding.0", size.text_dim, dim, bias=0.0)
    net.linear("text_embedding.2", dim, dim, gain=1.5, bias=0.0)
    net.linear("time_embedding.0", TIME_DIM, dim)
    net.linear("time_embedding.2", dim, dim)
    net.linear("time_projection.1", dim, 6 * dim)
    for i in range(size.blocks):
        _block(net, f"blocks.{i}.", size)
    net.add("head.modulation", (1, 2, dim), Uniform(dim**-0.5))
    net.linear("head.head", dim, out_channels * PATCH, gain=HEAD_GAIN)
    return net.tensors


def _block(net: Layers, block: str, size: Size) -> None:
    dim = size.dim
    net.add(f"{block}modulation", (1, 6, dim), Uniform(dim**-0.5))
    for attn, qk_gain, out_gain in (
        ("self_attn", QK_GAIN, SELF_OUT_GAIN),
        ("cross_attn", TEXT_QK_GAIN, CROSS_OUT_GAIN),
    ):
        net.linear(f"{block}{attn}.q", dim, dim)
        net.linear(f"{block}{attn}.k", dim, dim, bias=0.0)
        net.linear(f"{block}{attn}.v", dim, dim, bias=0.0)
        net.linear(f"{block}{attn}.o", dim, dim, gain=out_gain)
        net.norm(f"{block}{attn}.norm_q.weight", dim, gain=qk_gain)
        net.norm(f"{block}{attn}.norm_k.weight", dim, gain=qk_gain)
    net.norm(f"{block}norm3.weight", dim)
    net.bias(f"{block}norm3", dim)
    net.linear(f"{block}ffn.0", dim, size.ffn)
    net.linear(f"{block}ffn.2", size.ffn, dim, gain=FFN_GAIN)
