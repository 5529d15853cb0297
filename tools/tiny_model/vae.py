"""The Wan 2.1 VAE with small widths, for whole clips at once.

The engine goes through a clip in pieces and keeps the last frames of each layer; over a whole clip that is the same as
convolutions padded with two frames of zeros before the first. Only the layers that change the number of frames treat
the first frame apart, and so do they here.

Convolutions can be computed in several ways (`LAYOUTS`), of which the fastest depends on the GPU (`speed`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.tiny_model.sizes import LATENT, PIXEL, VaeSize

# Mean and deviation that the engine takes the VAE's latents to have, in every Wan 2.1.
MEAN = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508)
MEAN += (0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
STD = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743)
STD += (3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)

FACTORS = (1, 2, 4, 4)
LAYOUTS = ("3d", "3d-last", "2d-last")  # "last": channels are next to each other in memory
SPREAD = -4.0  # logarithm of the latents' variance in the beginning: there is little noise to see through


class CausalConv(nn.Conv3d):
    """Sees a frame and those before it. If `flat`, one frame at a time, with the frames that it sees as channels.

    `padded` is for an input that has the frames before the first already.
    """

    flat = False

    def __init__(
        self, n_in: int, n_out: int, kernel: tuple[int, int, int], stride: int = 1, causal: bool = True
    ) -> None:
        super().__init__(n_in, n_out, kernel, (stride, 1, 1), (0, kernel[1] // 2, kernel[2] // 2))
        self.before = kernel[0] - 1 if causal else 0

    def forward(self, x: Tensor) -> Tensor:
        return self.padded(F.pad(x, (0, 0, 0, 0, self.before, 0)) if self.before else x)

    def padded(self, x: Tensor) -> Tensor:
        if not self.flat:
            return super().forward(x)
        step, reach = self.stride[0], self.kernel_size[0]
        n = (x.shape[2] - reach) // step + 1
        seen = torch.cat([x[:, :, k : k + step * (n - 1) + 1 : step] for k in range(reach)], 1)
        weight = self.weight.transpose(1, 2).flatten(1, 2)
        y = F.conv2d(seen.transpose(1, 2).flatten(0, 1), weight, self.bias, padding=self.padding[1:])
        return y.unflatten(0, (len(x), n)).transpose(1, 2)


def ready(x: Tensor, gamma: Tensor) -> Tensor:
    """What a convolution of 3 frames gets: root mean square over channels, SiLU, two frames of zeros before the first.

    Three passes over memory by torch.compile, ten times as many without.
    """
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.square().mean(1, keepdim=True) + 1e-12) * gamma
    return F.pad(F.silu(y).to(x.dtype), (0, 0, 0, 0, 2, 0))


class Norm(nn.Module):
    """Root mean square over channels. `dims` is how many dimensions of size 1 the file has after the channels."""

    def __init__(self, n: int, dims: int = 3) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(n, *[1] * dims))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-12)
        return (x.float() * scale * self.gamma.view(1, -1, *[1] * (x.dim() - 2))).to(x.dtype)


class Residual(nn.Module):
    ready = staticmethod(ready)

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        first, second = (CausalConv(n, n_out, (3, 3, 3)) for n in (n_in, n_out))
        layers = (Norm(n_in), nn.SiLU(), first, Norm(n_out), nn.SiLU(), nn.Identity(), second)
        self.residual = nn.Sequential(*layers)
        self.shortcut = CausalConv(n_in, n_out, (1, 1, 1)) if n_in != n_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        norm, _, first, norm2, _, _, second = self.residual
        y = first.padded(self.ready(x, norm.gamma))
        return self.shortcut(x) + second.padded(self.ready(y, norm2.gamma))


class Last(nn.Sequential):
    ready = staticmethod(ready)

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(Norm(n_in), nn.SiLU(), CausalConv(n_in, n_out, (3, 3, 3)))

    def forward(self, x: Tensor) -> Tensor:
        norm, _, conv = self
        return conv.padded(self.ready(x, norm.gamma))


class Attention(nn.Module):
    """One head, inside each frame."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.norm, self.to_qkv, self.proj = Norm(n, 2), nn.Conv2d(n, 3 * n, 1), nn.Conv2d(n, n, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, t, h, w = x.shape
        frames = self.norm(x).transpose(1, 2).reshape(b * t, c, h, w)
        q, k, v = self.to_qkv(frames).reshape(b * t, 3, c, h * w).unbind(1)
        logits = torch.einsum("ncq,nck->nqk", q, k).float() * c**-0.5
        y = torch.einsum("nqk,nck->ncq", logits.softmax(-1).to(v.dtype), v)
        return x + self.proj(y.reshape(b * t, c, h, w)).reshape(b, t, c, h, w).transpose(1, 2)


class Down(nn.Module):
    """Half the rows and columns, and perhaps the frames behind the first."""

    def __init__(self, n: int, frames: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(n, n, 3, stride=2))
        if frames:
            self.time_conv = CausalConv(n, n, (3, 1, 1), stride=2, causal=False)

    def forward(self, x: Tensor) -> Tensor:
        x = _by_frame(self.resample, x)
        if hasattr(self, "time_conv") and x.shape[2] > 1:
            x = torch.cat((x[:, :, :1], self.time_conv(x)), 2)
        return x


class Up(nn.Module):
    """Twice the rows and columns with half the channels, and perhaps two frames for each behind the first."""

    def __init__(self, n: int, frames: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(n, n // 2, 3, padding=1))
        if frames:
            self.time_conv = CausalConv(n, 2 * n, (3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "time_conv") and x.shape[2] > 1:
            b, c, t, h, w = x.shape
            later = self.time_conv(x[:, :, 1:])  # the first frame is not among those that it sees
            later = later.reshape(b, 2, c, t - 1, h, w).permute(0, 2, 3, 1, 4, 5).reshape(b, c, 2 * (t - 1), h, w)
            x = torch.cat((x[:, :, :1], later), 2)
        return _by_frame(self.resample, x)


def _by_frame(layer: nn.Module, x: Tensor) -> Tensor:
    b, c, t, h, w = x.shape
    y = layer(x.transpose(1, 2).reshape(b * t, c, h, w))
    return y.reshape(b, t, *y.shape[1:]).transpose(1, 2)


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        n, layers = width, []
        self.conv1 = CausalConv(PIXEL, n, (3, 3, 3))
        for level, factor in enumerate(FACTORS):
            layers += [Residual(n, width * factor), Residual(width * factor, width * factor)]
            n = width * factor
            if level < 3:
                layers.append(Down(n, frames=level > 0))
        self.downsamples = nn.Sequential(*layers)
        self.middle = nn.Sequential(Residual(n, n), Attention(n), Residual(n, n))
        self.head = Last(n, 2 * LATENT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.downsamples(self.conv1(x))))


class Decoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        n, layers = width * FACTORS[-1], []
        self.conv1 = CausalConv(LATENT, n, (3, 3, 3))
        self.middle = nn.Sequential(Residual(n, n), Attention(n), Residual(n, n))
        for level, factor in enumerate(reversed(FACTORS)):
            layers += [Residual(n if k == 0 else width * factor, width * factor) for k in range(3)]
            n = width * factor
            if level < 3:
                layers.append(Up(n, frames=level < 2))
                n //= 2
        self.upsamples = nn.Sequential(*layers)
        self.head = Last(n, PIXEL)

    def forward(self, z: Tensor) -> Tensor:
        return self.head(self.upsamples(self.middle(self.conv1(z))))


class WanVae(nn.Module):
    """Clips b x 3 x t x h x w, -1 to 1; latents b x 16 x (t-1)/4+1 x h/8 x w/8."""

    def __init__(self, size: VaeSize) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(size.encoder), Decoder(size.decoder)
        self.conv1 = CausalConv(2 * LATENT, 2 * LATENT, (1, 1, 1))
        self.conv2 = CausalConv(LATENT, LATENT, (1, 1, 1))
        self.last = False
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """First weights: a frame doesn't see those before it, those between the kept ones are copies of these, and
        residual layers add nothing. What is learned from pictures holds for clips then.
        """
        for name, weight in self.named_parameters():
            if weight.dim() > 3:
                there = weight[:, :, -1] if weight.dim() > 4 else weight
                nn.init.kaiming_normal_(there, nonlinearity="linear")
                if weight.dim() > 4:
                    weight[:, :, :-1] = 0
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        self.conv1.weight[LATENT:] *= 0.1
        self.conv1.bias[LATENT:] = SPREAD
        for module in self.modules():
            if isinstance(module, Residual):
                nn.init.zeros_(module.residual[-1].weight)
            elif isinstance(module, Down | Up) and hasattr(module, "time_conv"):
                weight = nn.init.zeros_(module.time_conv.weight)[..., 0, 0]
                same = torch.eye(weight.shape[1])
                if isinstance(module, Down):
                    weight[..., 1] = weight[..., 2] = same / 2
                else:
                    weight[..., 2] = same.repeat(2, 1)

    def lay_out(self, layout: str, compiled: bool = False) -> None:
        """One of LAYOUTS, and whether what is between convolutions is compiled. Nothing but rounding depends on it."""
        quick = torch.compile(ready, dynamic=True, fullgraph=True) if compiled else ready
        self.last = layout != "3d"
        for module in self.modules():
            if isinstance(module, CausalConv):
                module.flat = layout == "2d-last"
            if isinstance(module, Residual | Last):
                module.ready = quick

    def _laid(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last_3d) if self.last else x

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the variance of the latents, as the network has them."""
        mean, spread = self.conv1(self.encoder(self._laid(x))).float().chunk(2, 1)
        return mean, spread.clamp(-20, 10)

    def decode(self, z: Tensor) -> Tensor:
        """Of latents as the network has them."""
        return self.decoder(self.conv2(self._laid(z)))

    def diffusion_latents(self, x: Tensor) -> Tensor:
        """What the diffusion transformer works on."""
        mean, _ = self.moments(x)
        return (mean - _channels(MEAN, mean)) / _channels(STD, mean)

    def decode_diffusion(self, z: Tensor) -> Tensor:
        return self.decode(z * _channels(STD, z) + _channels(MEAN, z))

    @torch.no_grad()
    def normalise(self, mean: Tensor, std: Tensor) -> None:
        """Makes latents with this mean and deviation those that the engine expects, in the two 1 x 1 convolutions.

        The decoder gives the same pictures as before, and the latents for the diffusion transformer have mean 0 and
        deviation 1 in every channel.
        """
        scale, wanted, target = std.new_tensor(STD) / std, std.new_tensor(MEAN), torch.arange(LATENT)
        shift = wanted - mean * scale
        self.conv1.weight[target] *= scale.view(-1, 1, 1, 1, 1)
        self.conv1.bias[target] = self.conv1.bias[target] * scale + shift
        self.conv1.bias[LATENT:] += 2 * scale.log()
        self.conv2.bias -= (self.conv2.weight[..., 0, 0, 0] * (shift / scale)).sum(1)
        self.conv2.weight /= scale.view(1, -1, 1, 1, 1)


def _channels(values: tuple[float, ...], like: Tensor) -> Tensor:
    return like.new_tensor(values).view(1, -1, 1, 1, 1)
