"""A Stable Diffusion 1.5 checkpoint with random weights: the UNet, CLIP-L and the VAE's decoder at their real sizes,
or with a UNet of another width.

    python -m sdsage._bench.random_unet FILE.safetensors          2.1 GB

Names and shapes are those of the public checkpoints (one file, LDM names).
"""

import sys
from collections.abc import Iterator
from math import sqrt
from pathlib import Path

from sdsage._bench.random_models import write
from sdsage.tiny.layers import Layers
from sdsage.tiny.tensors import DType, Tensor, Uniform

ATTENTION = (True, True, True, False)  # which levels have it
TEXT = 768
WIDTH = 320  # of the outermost of four levels; each has two blocks on the way down and three on the way up


class Net(Layers):
    """Adds convolutions with random kernels, and normalisations with a bias."""

    def conv(self, name: str, n_in: int, n_out: int, kernel: int = 3, gain: float = 1.0) -> None:
        fill = Uniform(gain / (kernel * sqrt(n_in)))
        self.add(f"{name}.weight", (n_out, n_in, kernel, kernel), fill, DType.F16)
        self.bias(name, n_out)

    def scale(self, name: str, n: int) -> None:
        self.norm(f"{name}.weight", n)
        self.bias(name, n)


def residual(net: Net, name: str, n_in: int, n_out: int, time: int) -> None:
    net.scale(f"{name}.in_layers.0", n_in)
    net.conv(f"{name}.in_layers.2", n_in, n_out)
    net.linear(f"{name}.emb_layers.1", time, n_out)
    net.scale(f"{name}.out_layers.0", n_out)
    net.conv(f"{name}.out_layers.3", n_out, n_out, gain=0.3)
    if n_in != n_out:
        net.conv(f"{name}.skip_connection", n_in, n_out, kernel=1)


def transformer(net: Net, name: str, n: int) -> None:
    block = f"{name}.transformer_blocks.0"
    net.scale(f"{name}.norm", n)
    net.conv(f"{name}.proj_in", n, n, kernel=1)
    for attention, keys in (("attn1", n), ("attn2", TEXT)):
        net.linear(f"{block}.{attention}.to_q", n, n, bias=None)
        net.linear(f"{block}.{attention}.to_k", keys, n, bias=None)
        net.linear(f"{block}.{attention}.to_v", keys, n, bias=None)
        net.linear(f"{block}.{attention}.to_out.0", n, n)
    net.linear(f"{block}.ff.net.0.proj", n, 8 * n)
    net.linear(f"{block}.ff.net.2", 4 * n, n, gain=0.3)
    for norm in ("norm1", "norm2", "norm3"):
        net.scale(f"{block}.{norm}", n)
    net.conv(f"{name}.proj_out", n, n, kernel=1, gain=0.3)


def unet(net: Net, width: int) -> None:
    root, widths, time = "model.diffusion_model", (width, 2 * width, 4 * width, 4 * width), 4 * width
    net.linear(f"{root}.time_embed.0", widths[0], time)
    net.linear(f"{root}.time_embed.2", time, time)
    net.conv(f"{root}.input_blocks.0.0", 4, widths[0])
    at, n, kept = 1, widths[0], [widths[0]]
    for level, width in enumerate(widths):
        for _ in range(2):
            residual(net, f"{root}.input_blocks.{at}.0", n, width, time)
            if ATTENTION[level]:
                transformer(net, f"{root}.input_blocks.{at}.1", width)
            at, n = at + 1, width
            kept.append(n)
        if level < len(widths) - 1:
            net.conv(f"{root}.input_blocks.{at}.0.op", n, n)
            at += 1
            kept.append(n)
    residual(net, f"{root}.middle_block.0", n, n, time)
    transformer(net, f"{root}.middle_block.1", n)
    residual(net, f"{root}.middle_block.2", n, n, time)
    for at in range(3 * len(widths)):
        level = len(widths) - 1 - at // 3
        width, block = widths[level], f"{root}.output_blocks.{at}"
        residual(net, f"{block}.0", n + kept.pop(), width, time)
        n = width
        if ATTENTION[level]:
            transformer(net, f"{block}.1", n)
        if at % 3 == 2 and level:
            net.conv(f"{block}.{1 + ATTENTION[level]}.conv", n, n)
    net.scale(f"{root}.out.0", n)
    net.conv(f"{root}.out.2", n, 4)


def clip_l(net: Net) -> None:
    root = "cond_stage_model.transformer.text_model"
    net.add(f"{root}.embeddings.token_embedding.weight", (49408, TEXT), Uniform(1.0), DType.F16)
    net.add(f"{root}.embeddings.position_embedding.weight", (77, TEXT), Uniform(0.5), DType.F16)
    for i in range(12):
        layer = f"{root}.encoder.layers.{i}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            net.linear(f"{layer}.self_attn.{part}", TEXT, TEXT)
        net.linear(f"{layer}.mlp.fc1", TEXT, 4 * TEXT)
        net.linear(f"{layer}.mlp.fc2", 4 * TEXT, TEXT)
        net.scale(f"{layer}.layer_norm1", TEXT)
        net.scale(f"{layer}.layer_norm2", TEXT)
    net.scale(f"{root}.final_layer_norm", TEXT)


def vae_block(net: Net, name: str, n_in: int, n_out: int) -> None:
    net.scale(f"{name}.norm1", n_in)
    net.conv(f"{name}.conv1", n_in, n_out)
    net.scale(f"{name}.norm2", n_out)
    net.conv(f"{name}.conv2", n_out, n_out, gain=0.3)
    if n_in != n_out:
        net.conv(f"{name}.nin_shortcut", n_in, n_out, kernel=1)


def vae_decoder(net: Net) -> None:
    root, n = "first_stage_model.decoder", 512
    net.conv("first_stage_model.post_quant_conv", 4, 4, kernel=1)
    net.conv(f"{root}.conv_in", 4, n)
    vae_block(net, f"{root}.mid.block_1", n, n)
    net.scale(f"{root}.mid.attn_1.norm", n)
    for part in ("q", "k", "v", "proj_out"):
        net.conv(f"{root}.mid.attn_1.{part}", n, n, kernel=1)
    vae_block(net, f"{root}.mid.block_2", n, n)
    for level, width in ((3, 512), (2, 512), (1, 256), (0, 128)):
        for i in range(3):
            vae_block(net, f"{root}.up.{level}.block.{i}", n, width)
            n = width
        if level:
            net.conv(f"{root}.up.{level}.upsample.conv", n, n)
    net.scale(f"{root}.norm_out", n)
    net.conv(f"{root}.conv_out", n, 3, gain=0.3)


def tensors(width: int = WIDTH) -> Iterator[Tensor]:
    net = Net(DType.F16)
    unet(net, width)
    clip_l(net)
    vae_decoder(net)
    yield from net.tensors


def make(path: Path, width: int = WIDTH) -> Path:
    """The file, written unless it is there already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, list(tensors(width)))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(make(Path(sys.argv[1])))
