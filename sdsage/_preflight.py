"""Whether the files of a run fit together, from their headers alone: before anything is loaded.

What is refused here the engine could not run with: it goes on checking by itself, tensor by tensor. A file whose kind
is not known passes. Two things are refused that the engine would do: a second expert that is the first one's file, and
experts of different widths, for which there is no use.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdsage._headers import Header, TooLarge, read_header, sniff
from sdsage._kinds import Contents, Part, Role, contents, match_lora
from sdsage.errors import ModelError

MODEL, LOW, HIGH = "--model", "--diffusion-model", "--high-noise-diffusion-model"
T5, CLIP_L, CLIP_G, LLM = "--t5xxl", "--clip_l", "--clip_g", "--llm"
VAE, TAE = "--vae", "--taesd"

# Option -> roles that fit, and what it takes in words.
_TAKES = {
    MODEL: ((Role.DIFFUSION,), "a whole checkpoint"),
    LOW: ((Role.DIFFUSION,), "a diffusion model"),
    HIGH: ((Role.DIFFUSION,), "a diffusion model"),
    T5: ((Role.TEXT,), "a T5 text encoder"),
    CLIP_L: ((Role.TEXT, Role.VISION), "a CLIP-L text encoder"),
    CLIP_G: ((Role.TEXT, Role.VISION), "a CLIP-G text encoder"),
    LLM: ((Role.TEXT,), "a language model"),
    "--clip_vision": ((Role.VISION, Role.TEXT), "a CLIP vision encoder"),
    "--llm_vision": ((Role.VISION, Role.TEXT), "the vision part of a language model"),
    VAE: ((Role.VAE,), "a VAE"),
    TAE: ((Role.TAE,), "a tiny autoencoder"),
    "--control-net": ((Role.CONTROL,), "a ControlNet"),
    "--photo-maker": ((Role.PHOTO_MAKER, Role.LORA), "a PhotoMaker model"),
    "--upscale-model": ((Role.UPSCALER,), "an ESRGAN upscaler"),
}
_TEXT_KINDS = {
    T5: ("t5", "umt5"),
    CLIP_L: ("clip", "clip-l", "clip-g", "clip-h"),
    CLIP_G: ("clip", "clip-l", "clip-g", "clip-h"),
    LLM: ("llm",),
}
_PLACES = {
    Role.DIFFUSION: LOW,
    Role.VAE: VAE,
    Role.TAE: TAE,
    Role.CONTROL: "--control-net",
    Role.PHOTO_MAKER: "--photo-maker",
    Role.UPSCALER: "--upscale-model",
    Role.EMBEDDING: "--embd-dir, as its folder",
    Role.LORA: "<lora:NAME:1> in the prompt, with its folder in --lora-model-dir",
}
_TEXT_PLACES = {"umt5": T5, "t5": T5, "clip-l": CLIP_L, "clip-g": CLIP_G, "clip": CLIP_L, "llm": LLM}
_VIDEOS = "videos: run 'sdsage vid-gen', with one frame for a picture"
_PICTURES = "images, not videos: run 'sdsage img-gen'"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.(?:safetensors|gguf)$")


@dataclass(frozen=True)
class _Needs:
    """What a kind of diffusion model works with.

    Attributes:
        text: option of the text encoder, its kind, and the usual file in words.
        vae: kind and usual file of the VAE; None when there is none.
    """

    text: tuple[str, str, str] | None
    vae: tuple[str, str] | None
    video: bool = False


_UMT5 = (T5, "umt5", "umt5-xxl")
_WAN_21, _WAN_22 = ("wan-vae", "the Wan 2.1 VAE (wan_2.1_vae)"), ("wan-vae", "the Wan 2.2 VAE (wan2.2_vae)")
_FLUX_VAE = ("kl-vae", "the Flux VAE (ae.safetensors)")
_T5XXL = (T5, "t5", "t5xxl (T5 v1.1), with --clip_l for Flux")
_SD_VAE = ("kl-vae", "a VAE of Stable Diffusion")
_NEEDS = {
    **dict.fromkeys(("wan-t2v", "wan-i2v", "wan-i2v-clip", "wan-flf2v", "wan-vace"), _Needs(_UMT5, _WAN_21, True)),
    "wan-ti2v": _Needs(_UMT5, _WAN_22, True),
    **dict.fromkeys(("flux", "flux-fill", "flux-control", "flex2"), _Needs(_T5XXL, _FLUX_VAE)),
    "chroma": _Needs((T5, "t5", "t5xxl (T5 v1.1)"), _FLUX_VAE),
    "sd3": _Needs((T5, "t5", "t5xxl (T5 v1.1), with --clip_l and --clip_g"), ("kl-vae", "the VAE of SD3")),
    "qwen-image": _Needs((LLM, "llm", "Qwen2.5-VL-7B"), ("wan-vae", "the Qwen-Image VAE")),
    "z-image": _Needs((LLM, "llm", "Qwen3-4B"), _FLUX_VAE),
    "flux2": _Needs((LLM, "llm", "Mistral Small 3"), ("kl-vae", "the Flux.2 VAE")),
    "flux2-klein": _Needs((LLM, "llm", "Qwen3"), ("kl-vae", "the Flux.2 VAE")),
    **dict.fromkeys(("sd1", "sd2", "sdxl"), _Needs(None, _SD_VAE)),
}
_CHECKED_WIDTH = ("wan", "flux", "flex", "chroma", "sd3", "qwen", "z-image")  # kinds that take the vectors as they are


@dataclass
class Findings:
    """What is wrong, and what is only strange."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Lora:
    """A LoRA of the run. `high`: it is for the high-noise expert."""

    path: str
    high: bool


@dataclass(frozen=True)
class _File:
    flag: str
    path: str
    header: Header
    holds: Contents

    @property
    def name(self) -> str:
        return f"{self.flag} {self.path}"


def files_of(values: Mapping[str, Any]) -> dict[str, str]:
    """The files among the values of options, by option."""
    found = {flag: values.get(flag.removeprefix("--").replace("-", "_")) for flag in _TAKES}
    return {flag: path for flag, path in found.items() if path}


def preflight(
    files: Mapping[str, str], loras: Iterable[Lora] = (), *, video: bool | None = None, preview_only_tae: bool = False
) -> Findings:
    """Looks at all files of a run.

    Args:
        files: option -> path; files that do not exist are left to others.
        video: the run makes a video, or pictures; None when not known.
        preview_only_tae: the tiny autoencoder is not for the result.
    """
    found = Findings()
    known: dict[str, _File] = {}
    for flag, path in files.items():
        file = _look(flag, path, found)
        if file is not None:
            known[flag] = file
    changes = [(lora, _look("LoRA", lora.path, found)) for lora in loras]
    if found.problems:
        return found
    wrong = [text for file in known.values() if (text := _wrong_place(file, files))]
    found.problems += wrong
    found.problems += [text for _, file in changes if file is not None and (text := _no_lora(file))]
    if not found.problems:
        _fit(known, files, found, video, preview_only_tae)
        for lora, file in changes:
            model = known.get(HIGH if lora.high else LOW) or known.get(MODEL)
            if file is not None and model is not None:
                found.problems += _unfit_lora(file, model)
    return found


def _look(flag: str, path: str, found: Findings) -> _File | None:
    """The file, or None if it says nothing; damage becomes a problem."""
    if not os.path.exists(path) or os.path.isdir(path):
        return None
    split = _PART.search(path)
    if split and int(split[2]) > 1:
        found.problems.append(
            f"{flag} {path} is part {int(split[1])} of a model in {int(split[2])} files, and the engine reads one "
            "file: fetch the model as one, or merge its parts"
        )
        return None
    try:
        if os.path.isfile(path) and not path.endswith(".json") and sniff(Path(path)) in ("pickle", "unknown"):
            return None  # opening it has checks of its own
        header = read_header(path)
    except TooLarge:
        return None
    except (ModelError, OSError) as error:
        found.problems.append(f"{flag}: {error}")
        return None
    if len(header.parts) > 1:
        found.problems.append(
            f"{flag} {path} is the index of a model in {len(header.parts)} files, and the engine reads one file: fetch "
            "the model as one, or merge its parts"
        )
        return None
    return _File(flag, path, header, contents(header))


def _wrong_place(file: _File, files: Mapping[str, str]) -> str:
    """Why a file can't be what its option takes; empty if it may be."""
    holds, flag = file.holds, file.flag
    roles, takes = _TAKES[flag]
    if not holds.parts or (holds.prefixed and flag != LOW and flag != MODEL):
        return ""  # unknown; or part of a checkpoint under the names that the engine itself would give
    part = holds.parts[0][0]
    if flag == MODEL:
        if LOW in files or holds.prefixed:
            return ""
        if part.role is Role.DIFFUSION:
            return (
                f"{file.name} holds a diffusion model alone ({part.title}): give it as {LOW}, with its text encoder "
                f"and {VAE}{_usual(part)}"
            )
    kinds = _TEXT_KINDS.get(flag)
    if holds.roles & set(roles) and not (kinds and part.role is Role.TEXT and part.kind not in kinds):
        return ""
    place = _TEXT_PLACES.get(part.kind) if part.role is Role.TEXT else _PLACES.get(part.role)
    return f"{file.name} is {_a(part)}: {flag} takes {takes}" + (f"; give this file as {place}" if place else "")


def _a(part: Part) -> str:
    """ "a VAE (Wan 2.1 VAE, 16 channels)"."""
    role = str(part.role)
    return f"{'an' if role[0] in 'aeiou' else 'a'} {role} ({part.title})"


def _usual(part: Part) -> str:
    """ " (umt5-xxl in --t5xxl, the Wan 2.1 VAE)" for the model's kind."""
    needs = _NEEDS.get(part.kind)
    if needs is None or needs.text is None or needs.vae is None:
        return ""
    return f" ({needs.text[2]} in {needs.text[0]}, {needs.vae[1]})"


def _no_lora(file: _File) -> str:
    """Why a LoRA is none; empty if it may be one."""
    holds = file.holds
    if not holds.parts or Role.LORA in holds.roles:
        return ""
    part = holds.parts[0][0]
    return f"LoRA {file.path} is {_a(part)}, and no LoRA: name a LoRA file in the prompt"


def _unfit_lora(file: _File, model: _File) -> list[str]:
    found = match_lora(file.holds, model.holds)
    if found is None:
        return []
    if found.unfit:
        return [f"LoRA {file.path} does not fit {model.name} ({model.holds.title}): {found.unfit[0]}"]
    if found.fitting == 0:
        return [
            f"LoRA {file.path} ({file.holds.title}) fits no tensor of {model.name} ({model.holds.title}): use a LoRA "
            "that was made for this model"
        ]
    return []


def _fit(
    known: Mapping[str, _File], files: Mapping[str, str], found: Findings, video: bool | None, preview_only_tae: bool
) -> None:
    """The files against the diffusion model."""
    model = known.get(LOW) or known.get(MODEL)
    part = model.holds.part(Role.DIFFUSION) if model is not None else None
    if model is None or part is None:
        return
    needs = _NEEDS.get(part.kind)
    if needs is not None and video is not None and video != needs.video:
        found.problems.append(f"{model.name} ({part.title}) makes {_VIDEOS if needs.video else _PICTURES}")
        return
    found.problems += _experts(model, part, known.get(HIGH))
    if needs is None:
        return
    decodes_tiny = TAE in files and not preview_only_tae
    missing = _missing(model, part, needs, known, files, decodes_tiny)
    found.problems += missing
    if not missing:
        _text_fits(model, part, needs, known, found)
        _vae_fits(model, part, needs, known, found, decodes_tiny)


def _experts(low: _File, part: Part, file: _File | None) -> list[str]:
    if file is None:
        return []
    high = file.holds.part(Role.DIFFUSION)
    if not part.kind.startswith("wan"):
        return [f"{file.name} has no place beside {low.name} ({part.title}), which has no second expert: leave it out"]
    pair = f"{low.name} and {file.name} are not the two experts of one model: "
    if os.path.samefile(low.path, file.path):
        return [
            pair + "they are the same file; give the low-noise model to the first and the high-noise one to the other"
        ]
    if high is None:
        return []
    compared = {"input channels": "input_channels", "output channels": "output_channels", "blocks": "blocks"}
    sizes = [(what, part.facts.get(key, 0), high.facts.get(key, 0)) for what, key in compared.items()]
    sizes += [("text features", part.text_width, high.text_width), ("values of width", part.width, high.width)]
    for what, a, b in sizes:
        if a and b and a != b:
            return [
                f"{pair}the first ({part.title}) has {a} {what}, the second ({high.title}) {b}; give the two files of "
                "one model"
            ]
    return []


def _missing(
    model: _File, part: Part, needs: _Needs, known: Mapping[str, _File], files: Mapping[str, str], decodes_tiny: bool
) -> list[str]:
    """What must be there and is not, with the option to give it in."""
    whole = known.get(MODEL)
    unread = MODEL in files and whole is None  # a folder or a pickle: nobody knows what is in it
    inside = whole.holds if whole is not None and model.flag == MODEL else None
    found = []
    encoders = [flag for flag in (T5, CLIP_L, CLIP_G, LLM) if flag in files]
    if needs.text is not None and not unread and not (inside and inside.has_text):
        flag, _, usual = needs.text
        strict = part.kind.startswith("wan") or flag == LLM
        if (flag not in files) if strict else not encoders:
            found.append(f"no text encoder was given for {model.name} ({part.title}): give {usual} in {flag}")
    names = model.header.tensors if inside else ()
    has_vae = any(name.startswith(("first_stage_model.", "vae.")) for name in names)
    if needs.vae is not None and not (unread or has_vae or decodes_tiny or VAE in files):
        found.append(f"no VAE was given for {model.name} ({part.title}): give {needs.vae[1]} in {VAE}")
    if part.kind in ("wan-i2v-clip", "wan-flf2v") and "--clip_vision" not in files and not unread:
        found.append(
            f"no vision encoder was given for {model.name} ({part.title}): give clip_vision_h in --clip_vision"
        )
    if found and model.flag == LOW and model.holds.prefixed and {Role.TEXT, Role.VAE} & model.holds.roles:
        return [f"{model.name} is a whole checkpoint ({model.holds.title}): give it as {MODEL}"]
    return found


def _text_fits(model: _File, part: Part, needs: _Needs, known: Mapping[str, _File], found: Findings) -> None:
    if needs.text is None:
        return
    flag, kind, usual = needs.text
    file = known.get(flag)
    encoder = file.holds.part(Role.TEXT) if file is not None else None
    if file is not None and encoder is not None:
        fits = f"{file.name} ({encoder.title}) does not fit {model.name} ({part.title})"
        widths = part.kind.startswith(_CHECKED_WIDTH) and part.text_width and encoder.width
        if widths and encoder.width != part.text_width:
            found.problems.append(
                f"{fits}: its text features are {encoder.width} wide, the model takes {part.text_width}; give {usual}"
            )
        elif kind == "umt5" and encoder.kind == "t5":
            found.problems.append(f"{fits}, which takes {usual}: its vocabulary is another one")
        elif kind == "t5" and encoder.kind == "umt5":
            found.warnings.append(f"{fits}, which was made for {usual}: the prompt will not be understood")
    pooled = part.facts.get("pooled_text_width", 0)
    clip = known.get(CLIP_L)
    vectors = clip.holds.part(Role.TEXT) if clip is not None else None
    if clip is not None and vectors is not None and pooled and vectors.width and vectors.width != pooled:
        found.problems.append(
            f"{clip.name} ({vectors.title}) does not fit {model.name} ({part.title}): its text features are "
            f"{vectors.width} wide, the model takes {pooled}; give CLIP-L"
        )


def _vae_fits(
    model: _File, part: Part, needs: _Needs, known: Mapping[str, _File], found: Findings, decodes_tiny: bool
) -> None:
    for flag, role in ((VAE, Role.VAE), (TAE, Role.TAE)):
        file = known.get(flag)
        vae = file.holds.part(role) if file is not None else None
        if file is None or vae is None or needs.vae is None or (flag == VAE and decodes_tiny):
            continue
        videos = needs.vae[0] == "wan-vae"
        kind = needs.vae[0] if flag == VAE else "taehv" if videos else "taesd"
        latents = part.latents
        if vae.kind == "diffusers-video-vae":
            continue  # the engine says what it thinks of that layout
        if vae.kind == kind and (not latents or not vae.latents or vae.latents == latents):
            continue
        usual = needs.vae[1] if flag == VAE else f"a tiny autoencoder for {'videos' if videos else 'pictures'}"
        takes = f"takes latents of {latents} channels" if latents else "takes another kind"
        found.problems.append(
            f"{file.name} ({vae.title}) does not fit {model.name} ({part.title}), which {takes}: give {usual}"
        )
