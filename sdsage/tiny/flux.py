"""Flux.1 (dev) diffusion transformer with two double and two single blocks."""

from sdsage.tiny import clip
from sdsage.tiny.layers import Layers
from sdsage.tiny.tensors import DType, Tensor

DIM = 256  # two heads of 128
HEAD = 128
MLP = 4 * DIM
BLOCKS = 2  # of each sort
PATCH = 64  # 16 latent channels, 2 x 2 latent pixels of one token
TEXT_DIM = 4096  # the engine feeds zeros of this width when there is no T5
TIME_DIM = 256

QK_GAIN = 1.5  # attention logits have deviation QK_GAIN^2
OUT_GAIN = 3.0  # attention outweighs the token's own input
HEAD_GAIN = 0.6


def flux() -> list[Tensor]:
    """Tensors under the names of the original files."""
    net = Layers(DType.Q8_0)
    net.linear("img_in", PATCH, DIM)
    net.linear("txt_in", TEXT_DIM, DIM, bias=1.0)  # all that reaches the text stream without T5
    for name, n_in in (("time_in", TIME_DIM), ("guidance_in", TIME_DIM), ("vector_in", clip.DIM)):
        net.linear(f"{name}.in_layer", n_in, DIM)
        net.linear(f"{name}.out_layer", DIM, DIM)
    for i in range(BLOCKS):
        for stream in ("img", "txt"):
            _stream(net, f"double_blocks.{i}.{stream}_")
    for i in range(BLOCKS):
        _single(net, f"single_blocks.{i}.")
    net.linear("final_layer.adaLN_modulation.1", DIM, 2 * DIM)
    net.linear("final_layer.linear", DIM, PATCH, gain=HEAD_GAIN)
    return net.tensors


def _stream(net: Layers, stream: str) -> None:
    net.linear(f"{stream}mod.lin", DIM, 6 * DIM)
    net.linear(f"{stream}attn.qkv", DIM, 3 * DIM)
    _qk_norms(net, f"{stream}attn.norm.")
    net.linear(f"{stream}attn.proj", DIM, DIM, gain=OUT_GAIN)
    net.linear(f"{stream}mlp.0", DIM, MLP)
    net.linear(f"{stream}mlp.2", MLP, DIM)


def _single(net: Layers, block: str) -> None:
    net.linear(f"{block}modulation.lin", DIM, 3 * DIM)
    net.linear(f"{block}linear1", DIM, 3 * DIM + MLP)  # q, k, v and the MLP's first layer
    _qk_norms(net, f"{block}norm.")
    net.linear(f"{block}linear2", DIM + MLP, DIM, gain=OUT_GAIN)  # of attention and MLP together


def _qk_norms(net: Layers, norms: str) -> None:
    net.norm(f"{norms}query_norm.scale", HEAD, gain=QK_GAIN)
    net.norm(f"{norms}key_norm.scale", HEAD, gain=QK_GAIN)
