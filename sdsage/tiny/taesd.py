"""TAESD autoencoder for 16 latent channels; its width of 64 is fixed in the engine."""

from sdsage.tiny.layers import SMOOTH, Layers
from sdsage.tiny.tensors import Constant, DType, Tensor

WIDTH = 64
Z = 16
BLUR = (SMOOTH, SMOOTH)

# There are no norms: gains keep the deviation between 0.5 and 2 from layer to layer, and ReLUs take a part of it.
RELU_GAIN = 1.4  # before a ReLU
STAGE_GAIN = 2.0  # after one
PIXEL_GAIN = 0.18
GREY = 0.5  # pictures are 0 to 1


def taesd() -> list[Tensor]:
    """Tensors of encoder and decoder; the numbers are positions in the original sequential networks."""
    net = Layers(DType.F16)
    net.blur("encoder.layers.0", 3, WIDTH, BLUR)
    for i in (1, 3, 4, 5, 7, 8, 9, 11, 12, 13):
        _block(net, f"encoder.layers.{i}")
    for i in (2, 6, 10):  # each halves the size
        _resize(net, f"encoder.layers.{i}")
    net.blur("encoder.layers.14", WIDTH, Z, BLUR, centred=True)

    net.blur("decoder.layers.0", Z, WIDTH, BLUR, gain=STAGE_GAIN)
    for i in (2, 3, 4, 7, 8, 9, 12, 13, 14, 17):
        _block(net, f"decoder.layers.{i}")
    for i in (6, 11, 16):  # each follows a doubling of the size
        _resize(net, f"decoder.layers.{i}")
    net.blur("decoder.layers.18", WIDTH, 3, BLUR, gain=PIXEL_GAIN, bias=None, centred=True)
    net.add("decoder.layers.18.bias", (3,), Constant(GREY))
    return net.tensors


def _block(net: Layers, name: str) -> None:
    for i, gain in ((0, RELU_GAIN), (2, RELU_GAIN), (4, 1.0)):
        net.blur(f"{name}.conv.{i}", WIDTH, WIDTH, BLUR, gain=gain, centred=True)


def _resize(net: Layers, name: str) -> None:
    net.blur(name, WIDTH, WIDTH, BLUR, gain=STAGE_GAIN, bias=None, centred=True)
