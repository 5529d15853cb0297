"""Wan 2.1/2.2 diffusion transformer, two blocks deep: T2V, I2V (36 input channels) and TI2V (48)."""

from sdsage.tiny.layers import Layers
from sdsage.tiny.tensors import DType, Tensor, Uniform

DIM = 256  # two heads of 128, the head size of every Wan
FFN = 512
BLOCKS = 2
TEXT_DIM = 64  # width of the tiny umt5
TIME_DIM = 256
PATCH = 2 * 2  # latent pixels of one token

# Gains chosen with the engine, so that every part shows in the picture.
QK_GAIN = 1.5  # of the q and k norms: attention logits have deviation QK_GAIN^2
TEXT_QK_GAIN = 2.0  # a few prompt tokens compete with 500 of padding, whose logits are 0
SELF_OUT_GAIN = 3.0
CROSS_OUT_GAIN = 3.0
FFN_GAIN = 3.0
HEAD_GAIN = 0.8


def wan(in_channels: int, out_channels: int) -> list[Tensor]:
    """Tensors of one expert."""
    net = Layers(DType.Q8_0)
    # 4-d as ggml takes it: input and output channels share a dimension
    net.add("patch_embedding.weight", (DIM * in_channels, 1, 2, 2), Uniform((in_channels * PATCH) ** -0.5), DType.F16)
    net.bias("patch_embedding", DIM)
    # no bias from the text to the values: padding is zeros and stays so
    net.linear("text_embedding.0", TEXT_DIM, DIM, bias=0.0)
    net.linear("text_embedding.2", DIM, DIM, gain=1.5, bias=0.0)
    net.linear("time_embedding.0", TIME_DIM, DIM)
    net.linear("time_embedding.2", DIM, DIM)
    net.linear("time_projection.1", DIM, 6 * DIM)
    for i in range(BLOCKS):
        _block(net, f"blocks.{i}.")
    net.add("head.modulation", (1, 2, DIM), Uniform(DIM**-0.5))
    net.linear("head.head", DIM, out_channels * PATCH, gain=HEAD_GAIN)
    return net.tensors


def _block(net: Layers, block: str) -> None:
    net.add(f"{block}modulation", (1, 6, DIM), Uniform(DIM**-0.5))
    for attn, qk_gain, out_gain in (
        ("self_attn", QK_GAIN, SELF_OUT_GAIN),
        ("cross_attn", TEXT_QK_GAIN, CROSS_OUT_GAIN),
    ):
        net.linear(f"{block}{attn}.q", DIM, DIM)
        net.linear(f"{block}{attn}.k", DIM, DIM, bias=0.0)
        net.linear(f"{block}{attn}.v", DIM, DIM, bias=0.0)
        net.linear(f"{block}{attn}.o", DIM, DIM, gain=out_gain)
        net.norm(f"{block}{attn}.norm_q.weight", DIM, gain=qk_gain)
        net.norm(f"{block}{attn}.norm_k.weight", DIM, gain=qk_gain)
    net.norm(f"{block}norm3.weight", DIM)
    net.bias(f"{block}norm3", DIM)
    net.linear(f"{block}ffn.0", DIM, FFN)
    net.linear(f"{block}ffn.2", FFN, DIM, gain=FFN_GAIN)
