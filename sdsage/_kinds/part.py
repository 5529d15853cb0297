"""What a file, or a part of a whole checkpoint, is."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

Shape = tuple[int, ...]
Shapes = dict[str, Shape]  # tensor names without the prefix of their part


class Role(StrEnum):
    """What a part is for, in the words of messages."""

    DIFFUSION = "diffusion model"
    TEXT = "text encoder"
    VISION = "vision encoder"
    VAE = "VAE"
    TAE = "tiny autoencoder"
    LORA = "LoRA"
    UPSCALER = "upscaler"
    CONTROL = "ControlNet"
    PHOTO_MAKER = "PhotoMaker model"
    EMBEDDING = "embedding"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        kind: short name: "wan-t2v", "umt5", "wan-vae".
        title: for people: "Wan 2.1 or 2.2 text-to-video, 14B".
        width: of the vectors inside: of a text encoder, those it gives; 0 when not known.
        text_width: of the text features that a diffusion model takes; 0 when not known.
        latents: channels of the latents that the VAE decodes; of a diffusion model, those it gives; 0 when not known.
        facts: further numbers for `sdsage info`.
    """

    role: Role
    kind: str
    title: str
    width: int = 0
    text_width: int = 0
    latents: int = 0
    facts: dict[str, int | str] = field(default_factory=dict)


def size(shapes: Shapes, name: str, axis: int = 0) -> int:
    """Length of one axis of a tensor, slowest first; 0 if there is no such tensor or axis."""
    shape = shapes.get(name, ())
    return shape[axis] if -len(shape) <= axis < len(shape) else 0


def layers(shapes: Iterable[str], first: str) -> int:
    """How many numbers follow `first` in the names: the blocks "blocks.0." to "blocks.39." are 40."""
    start = len(first)
    found = {name[start:].split(".", 1)[0] for name in shapes if name.startswith(first)}
    return sum(number.isdigit() for number in found)
