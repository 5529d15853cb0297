"""Building blocks shared by the tiny architectures: each call adds one layer's tensors."""

from math import sqrt

from sdsage.tiny.tensors import Blur, Carry, Constant, DType, Fill, Kernel, Tensor, Uniform

BIAS = 0.02  # small, yet large enough that a forgotten bias changes the picture

SMOOTH = (0.25, 0.5, 0.25)  # blur over one image dimension
RECENT = (0.125, 0.25, 0.625)  # blur over the frames t-2, t-1, t of a causal convolution


class Layers:
    """Collects the tensors of a network.

    `gain` is the deviation of a layer's output when its inputs have deviation 1 and are independent (for a blur:
    equal under the kernel, independent over the channels); `bias` that of its bias, None for a layer without one.
    """

    def __init__(self, weights: DType) -> None:
        """`weights` is the type of linear layers; convolutions are F16 and the rest F32, as the engine keeps them."""
        self.weights = weights
        self.tensors: list[Tensor] = []

    def add(self, name: str, shape: tuple[int, ...], fill: Fill, dtype: DType = DType.F32) -> None:
        self.tensors.append(Tensor(name, shape, dtype, fill))

    def bias(self, name: str, n: int, std: float | None = BIAS) -> None:
        if std is not None:
            self.add(f"{name}.bias", (n,), Uniform(std) if std else Constant(0.0))

    def linear(self, name: str, n_in: int, n_out: int, gain: float = 1.0, bias: float | None = BIAS) -> None:
        self.add(f"{name}.weight", (n_out, n_in), Uniform(gain / sqrt(n_in)), self.weights)
        self.bias(name, n_out, bias)

    def blur(
        self,
        name: str,
        n_in: int,
        n_out: int,
        kernel: Kernel,
        gain: float = 1.0,
        bias: float | None = BIAS,
        repeat: int = 1,
        centred: bool = False,
    ) -> None:
        """A convolution that mixes channels at random and blurs; see `Blur`."""
        shape = (n_out, n_in, *map(len, kernel))
        self.add(f"{name}.weight", shape, Blur(gain / sqrt(n_in), kernel, repeat, centred), DType.F16)
        self.bias(name, n_out, bias)

    def carry(self, name: str, n_in: int, n_out: int, kernel: Kernel) -> None:
        """A convolution that blurs each channel for itself; see `Carry`."""
        self.add(f"{name}.weight", (n_out, n_in, *map(len, kernel)), Carry(kernel), DType.F16)
        self.bias(name, n_out)

    def norm(self, name: str, *shape: int, gain: float = 1.0) -> None:
        """The scale of a normalisation, under its full name."""
        self.add(name, shape, Constant(gain))
