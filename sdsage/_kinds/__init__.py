"""What a model file is, from the names and shapes in its header."""

from dataclasses import dataclass

from sdsage._headers import Header

from .diffusion import diffusion_model
from .lora import Match, lora, match
from .others import others, text_encoder, tiny_autoencoder, vae, vision_encoder
from .part import Part, Role, Shapes

__all__ = ["Contents", "Match", "Part", "Role", "Shapes", "contents", "match_lora"]

# Prefixes of the parts of a whole checkpoint, and the one place in which each is looked for.
_PREFIXES = (
    ("model.diffusion_model.", "diffusion"),
    ("model.high_noise_diffusion_model.", "diffusion"),
    ("unet.", "diffusion"),
    ("first_stage_model.", "vae"),
    ("vae.", "vae"),
    ("conditioner.embedders.1.model.", "text 1"),
    ("conditioner.embedders.1.transformer.", "text 1"),
    ("conditioner.embedders.0.transformer.", "text 0"),
    ("conditioner.embedders.0.model.", "text 0"),
    ("cond_stage_model.1.transformer.", "text 1"),
    ("cond_stage_model.1.model.", "text 1"),
    ("cond_stage_model.transformer.", "text 0"),
    ("cond_stage_model.model.", "text 0"),
    ("text_encoders.clip_l.transformer.", "text clip_l"),
    ("text_encoders.clip_g.transformer.", "text clip_g"),
    ("text_encoders.t5xxl.transformer.", "text t5xxl"),
    ("text_encoders.llm.", "text llm"),
    ("control_model.", "control"),
    ("tae.", "tae"),
)
_ENCODERS = ("cond_stage_model.", "conditioner.", "text_encoders.", "te.")


@dataclass(frozen=True)
class Contents:
    """The parts of one file.

    Attributes:
        parts: each with the shapes of its tensors, by their names without prefix.
        prefixed: the names have prefixes, as in a whole checkpoint.
        has_text: some text encoder is in it, known here or not.
    """

    parts: tuple[tuple[Part, Shapes], ...]
    prefixed: bool
    has_text: bool

    def part(self, role: Role) -> Part | None:
        """The first part of a role."""
        return next((part for part, _ in self.parts if part.role is role), None)

    def shapes(self, role: Role) -> Shapes:
        return next((shapes for part, shapes in self.parts if part.role is role), {})

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset(part.role for part, _ in self.parts)

    @property
    def title(self) -> str:
        """The parts in words."""
        return ", ".join(dict.fromkeys(part.title for part, _ in self.parts)) or "a file of an unknown kind"


def contents(header: Header) -> Contents:
    """What a file holds; a file of unknown kind has no parts."""
    groups: dict[str, Shapes] = {}
    for name, tensor in header.tensors.items():
        prefix, group = next(((p, g) for p, g in _PREFIXES if name.startswith(p)), ("", ""))
        groups.setdefault(group, {})[name[len(prefix) :]] = tensor.shape
    architecture = str(header.metadata.get("general.architecture", ""))
    has_text = any(name.startswith(_ENCODERS) for name in header.tensors)
    bare = groups.pop("", {})
    found = [(_prefixed(group, shapes, architecture), shapes) for group, shapes in groups.items()]
    parts = [(part, shapes) for part, shapes in found if part is not None]
    # LoRA files have prefixes of all sorts, and one that changes nothing else is no checkpoint
    change = lora({name: tensor.shape for name, tensor in header.tensors.items()})
    if change is not None:
        return Contents(((change, {n: t.shape for n, t in header.tensors.items()}),), False, False)
    rest = _bare(bare, architecture) if bare else None
    if rest is not None and not parts:
        parts.append((rest, bare))
    return Contents(tuple(parts), bool(groups), has_text or (rest is not None and rest.role is Role.TEXT))


def _prefixed(group: str, shapes: Shapes, architecture: str) -> Part | None:
    if group == "diffusion":
        return diffusion_model(shapes)
    if group == "vae":
        return vae(shapes)
    if group == "control":
        return others(shapes)
    if group == "tae":
        return tiny_autoencoder(shapes)
    return text_encoder(shapes, architecture) or vision_encoder(shapes)


def _bare(shapes: Shapes, architecture: str) -> Part | None:
    return (
        others(shapes)
        or diffusion_model(shapes)
        or text_encoder(shapes, architecture)
        or vae(shapes)
        or tiny_autoencoder(shapes)
        or vision_encoder(shapes)
    )


def match_lora(file: Contents, model: Contents) -> Match | None:
    """How a LoRA file and the diffusion model of another file fit; None when nothing certain can be said."""
    part = model.part(Role.DIFFUSION)
    if part is None or file.part(Role.LORA) is None:
        return None
    return match(file.shapes(Role.LORA), part, model.shapes(Role.DIFFUSION))
