"""LoRA files: for which model, of which rank, and which of their tensors fit a model."""

import re
from dataclasses import dataclass

from sdsage._headers.header import shown

from .part import Part, Role, Shapes

# Endings of LoRA tensors; what stands before them names the weight that is changed.
_DOWN = (
    ".lora_down.weight",
    ".lora_A.weight",
    ".lora_A.default.weight",
    ".lora.down.weight",
    "_lora.down.weight",
    ".lora_down",
)
_UP = (".lora_up.weight", ".lora_B.weight", ".lora_B.default.weight", ".lora.up.weight", "_lora.up.weight", ".lora_up")
_MORE = (".diff", ".diff_b", ".lora_mid.weight", ".hada_w1_a", ".hada_w1_b", ".hada_w2_a", ".hada_w2_b", ".hada_t1",
         ".hada_t2", ".lokr_w1", ".lokr_w1_a", ".lokr_w1_b", ".lokr_w2", ".lokr_w2_a", ".lokr_w2_b", ".oft_blocks",
         ".dora_scale")  # fmt: skip
_SCALES = (".alpha", ".scale", ".lora_linear")
_PREFIXES = re.compile(
    r"^(?:base[._]model[._]model[._])?(?:lora[._])?(?:lycoris[._])?(?:model[._]diffusion[._]model[._]|diffusion[._]model[._]|unet[._]|transformer\.|transformer_(?!blocks))?"
)
_ENCODER = re.compile(
    r"^(?:base_model\.model\.)?(?:lora[._])?(?:te\d?[._]|text_encoder|text_encoders|cond_stage_model|conditioner|lora_te)"
)

# Families of diffusion models by a word in the names of their weights. A word is in the names of no other family.
_WORDS = (
    ("flux", re.compile(r"(?:^|[._])(?:double_blocks|single_blocks|single_transformer_blocks)[._]")),
    ("sd", re.compile(r"(?:^|[._])(?:down_blocks|up_blocks|mid_block|input_blocks|output_blocks|middle_block)[._]")),
    ("sd3", re.compile(r"(?:^|[._])joint_blocks[._]")),
    ("wan", re.compile(r"(?:^|[._])blocks[._]\d+[._](?:self_attn|cross_attn|ffn)[._]")),
    ("wan-diffusers", re.compile(r"(?:^|[._])blocks[._]\d+[._](?:attn1|attn2|ffn[._]net)[._]")),
    ("qwen-image", re.compile(r"(?:^|[._])transformer_blocks[._]\d+[._](?:img_mod|txt_mod|img_mlp|txt_mlp)[._]")),
    ("flux", re.compile(r"(?:^|[._])transformer_blocks[._]\d+[._](?:norm1|norm1_context|ff_context)[._]")),
    ("z-image", re.compile(r"(?:^|[._])(?:layers|\w+_refiner)[._]\d+[._](?:attention|feed_forward)[._]")),
)  # fmt: skip
_TITLES = {
    "flux": "Flux or Chroma", "sd": "Stable Diffusion 1, 2 or XL", "sd3": "Stable Diffusion 3", "wan": "Wan",
    "wan-diffusers": "Wan, with names of diffusers", "qwen-image": "Qwen-Image", "z-image": "Z-Image",
}  # fmt: skip
# Families whose words a LoRA for a model of this kind may have. Kinds that are not here are not judged.
_FAMILY = {
    "wan-t2v": "wan", "wan-i2v": "wan", "wan-i2v-clip": "wan", "wan-flf2v": "wan", "wan-ti2v": "wan", "wan-vace": "wan",
    "wan": "wan", "flux": "flux", "flux-fill": "flux", "flux-control": "flux", "flex2": "flux", "chroma": "flux",
    "qwen-image": "qwen-image", "z-image": "z-image", "sd1": "sd", "sd2": "sd", "sdxl": "sd",
}  # fmt: skip


def lora(shapes: Shapes) -> Part | None:
    """The part, or None if the file holds no LoRA tensors."""
    pairs = [name for name in shapes if name.endswith(_DOWN)]
    if not pairs and not any(name.endswith(_MORE) for name in shapes):
        return None
    families = {family for name in shapes if _target(name) for family in _families(name)}
    titles = [_TITLES[f] for f in dict.fromkeys(f for f, _ in _WORDS) if f in families]
    ranks = sorted({min(shapes[name][:2]) for name in pairs if len(shapes[name]) >= 2})
    facts: dict[str, int | str] = {"changed_weights": len({_target(name) for name in shapes} - {None})}
    if ranks:
        facts["rank"] = ranks[0] if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    if any(_ENCODER.match(name) for name in shapes):
        facts["text_encoder"] = "yes"
    kind = "-".join(sorted(families)) or "unknown"
    return Part(Role.LORA, f"lora-{kind}", "LoRA for " + (" and ".join(titles) or "an unknown model"), facts=facts)


def _families(name: str) -> set[str]:
    return {family for family, word in _WORDS if word.search(name)}


def _target(name: str) -> str | None:
    """Name of the changed weight without "weight"; None for scales and for what is no LoRA tensor."""
    return next((name[: -len(end)] for end in (*_DOWN, *_UP, *_MORE) if name.endswith(end)), None)


def _plain(name: str) -> str:
    """A name in which the spellings of LoRA files are the same: no prefix, dots for underscores."""
    return _PREFIXES.sub("", name).removesuffix(".weight").removesuffix(".bias").replace("_", ".")


@dataclass(frozen=True)
class Match:
    """How a LoRA and a diffusion model fit.

    Attributes:
        fitting: weights of the LoRA that the model has.
        unknown: names of weights that the model does not have.
        unfit: a sentence for each tensor whose size is not that of the model's weight.
    """

    fitting: int
    unknown: tuple[str, ...]
    unfit: tuple[str, ...]


def match(shapes: Shapes, model: Part, weights: Shapes) -> Match | None:
    """Compares a LoRA's tensors with those of a diffusion model (without prefix).

    None when nothing certain can be said: a model or names that are not known here, or a text encoder that is changed.
    """
    family = _FAMILY.get(model.kind)
    if family is None or any(_ENCODER.match(name) for name in shapes):
        return None
    changed = {name: target for name in shapes if (target := _target(name)) is not None}
    if family != "wan":  # the others have names in several layouts: judged by their words alone
        strange = [target for name, target in changed.items() if _families(name) and family not in _families(name)]
        if not changed or len(strange) < len(changed):
            return None
        return Match(0, tuple(dict.fromkeys(strange)), ())
    known: dict[str, tuple[int, ...]] = {}
    for name, weight in weights.items():  # a weight and its bias have one name here: the weight is compared
        if not name.endswith(".bias") or _plain(name) not in known:
            known[_plain(name)] = weight
    fitting: set[str] = set()
    unknown: dict[str, None] = {}
    unfit: dict[str, None] = {}
    for name, target in changed.items():
        theirs = known.get(_plain(target))
        if theirs is None:
            unknown[target] = None
        elif _fits(name, shapes[name], theirs):
            fitting.add(target)
        else:
            unfit[f"tensor {shown(name)} is {_text(shapes[name])}, the model's is {_text(theirs)}"] = None
    return Match(len(fitting), tuple(unknown), tuple(unfit))


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _fits(name: str, mine: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    """As the engine compares: only matrices, their inputs and outputs."""
    if len(mine) != 2 or len(theirs) != 2:
        return True
    if name.endswith(_DOWN):
        return mine[1] == theirs[1]
    return not name.endswith(_UP) or mine[0] <= theirs[0]
