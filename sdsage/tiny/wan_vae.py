"""Wan VAEs with a base width of 8: 2.1 (16 latent channels, 8x) and 2.2 (48 channels, 16x with its patches of 2 x 2).

Convolutions blur and mix channels at random, so that latents decode to soft moving clouds instead of noise.
"""

from dataclasses import dataclass

from sdsage.tiny.layers import RECENT, SMOOTH, Layers
from sdsage.tiny.tensors import DType, Tensor

LEVELS = (1, 2, 4, 4)  # widths of the encoder's levels, in units of the base width; the decoder's come in reverse

BLUR_3D = (RECENT, SMOOTH, SMOOTH)
BLUR_2D = (SMOOTH, SMOOTH)
BLUR_TIME = (RECENT, (1.0,), (1.0,))
BLUR_PIXELS = ((0.0, 0.0, 1.0), SMOOTH, SMOOTH)  # this frame only: the first frame has no older ones and would be pale
MIX_3D = ((1.0,), (1.0,), (1.0,))
MIX_2D = ((1.0,), (1.0,))

PIXEL_GAIN = 0.7  # pictures are -1 to 1


@dataclass(frozen=True)
class Kind:
    """What tells the two VAEs apart.

    Attributes:
        z: latent channels.
        pixel: channels of the picture as the network sees it, after its patches.
        width, decoder_width: base widths of encoder and decoder (the real 2.1 has 96 and 96, 2.2 has 160 and 256).
        grouped: layers are numbered within their level, and a layer that doubles the size keeps the width.
    """

    z: int
    pixel: int
    width: int
    decoder_width: int
    grouped: bool


WAN21 = Kind(z=16, pixel=3, width=8, decoder_width=8, grouped=False)
WAN22 = Kind(z=48, pixel=3 * 2 * 2, width=8, decoder_width=8, grouped=True)


def wan_vae(kind: Kind) -> list[Tensor]:
    """Tensors of encoder and decoder."""
    net = Layers(DType.F16)
    _encoder(net, kind)
    net.blur("conv1", 2 * kind.z, 2 * kind.z, MIX_3D)
    net.blur("conv2", kind.z, kind.z, MIX_3D)
    _decoder(net, kind)
    return net.tensors


def _encoder(net: Layers, kind: Kind) -> None:
    n = kind.width
    net.blur("encoder.conv1", kind.pixel, n, BLUR_3D)
    for level, names in enumerate(_names(kind, "encoder.downsamples", (3, 3, 3, 2))):
        for name in names[:2]:
            _residual(net, name, n, kind.width * LEVELS[level])
            n = kind.width * LEVELS[level]
        for name in names[2:]:  # halves the size
            net.blur(f"{name}.resample.1", n, n, BLUR_2D)
            if level > 0:  # and the frames
                net.carry(f"{name}.time_conv", n, n, BLUR_TIME)
    _middle(net, "encoder", n)
    net.norm("encoder.head.0.gamma", n, 1, 1, 1)
    net.blur("encoder.head.2", n, 2 * kind.z, BLUR_3D)


def _decoder(net: Layers, kind: Kind) -> None:
    n = kind.decoder_width * LEVELS[-1]
    net.blur("decoder.conv1", kind.z, n, BLUR_3D)
    _middle(net, "decoder", n)
    for level, names in enumerate(_names(kind, "decoder.upsamples", (4, 4, 4, 3))):
        for name in names[:3]:
            _residual(net, name, n, kind.decoder_width * LEVELS[-1 - level])
            n = kind.decoder_width * LEVELS[-1 - level]
        for name in names[3:]:  # doubles the size
            n_out = n if kind.grouped else n // 2
            net.blur(f"{name}.resample.1", n, n_out, BLUR_2D)
            if level < 2:  # and the frames: the second half of its output is the frame after
                net.carry(f"{name}.time_conv", n, 2 * n, BLUR_TIME)
            n = n_out
    net.norm("decoder.head.0.gamma", n, 1, 1, 1)
    net.blur("decoder.head.2", n, kind.pixel, BLUR_PIXELS, PIXEL_GAIN, repeat=kind.pixel // 3, centred=True)


def _names(kind: Kind, path: str, sizes: tuple[int, ...]) -> list[list[str]]:
    """Names of the layers of each level; `sizes` are the numbers of layers."""
    if kind.grouped:
        inner = path.split(".")[1]
        return [[f"{path}.{level}.{inner}.{i}" for i in range(size)] for level, size in enumerate(sizes)]
    return [[f"{path}.{sum(sizes[:level]) + i}" for i in range(size)] for level, size in enumerate(sizes)]


def _residual(net: Layers, name: str, n_in: int, n_out: int) -> None:
    net.norm(f"{name}.residual.0.gamma", n_in, 1, 1, 1)
    net.blur(f"{name}.residual.2", n_in, n_out, BLUR_3D, centred=True)
    net.norm(f"{name}.residual.3.gamma", n_out, 1, 1, 1)
    net.blur(f"{name}.residual.6", n_out, n_out, BLUR_3D, centred=True)
    if n_in != n_out:
        net.blur(f"{name}.shortcut", n_in, n_out, MIX_3D)


def _middle(net: Layers, part: str, n: int) -> None:
    _residual(net, f"{part}.middle.0", n, n)
    net.norm(f"{part}.middle.1.norm.gamma", n, 1, 1)
    net.blur(f"{part}.middle.1.to_qkv", n, 3 * n, MIX_2D)
    net.blur(f"{part}.middle.1.proj", n, n, MIX_2D)
    _residual(net, f"{part}.middle.2", n, n)
