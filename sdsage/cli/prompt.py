"""LoRA tags of a prompt: <lora:NAME:WEIGHT>, and <lora:|high_noise|NAME:WEIGHT> for the high-noise expert."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from .values import Problems

_TAG = re.compile(r"<lora:([^:>]+):([^>]+)>")
_HIGH_NOISE = "|high_noise|"
_NONE: Mapping[str, str] = MappingProxyType({})
_SUFFIXES = ("", ".gguf", ".safetensors", ".pt")  # tried in this order, as sd-cli does


@dataclass(frozen=True)
class Lora:
    """A LoRA file.

    Attributes:
        names: what tags call it, as `shown_prompt` has them.
    """

    path: str
    multiplier: float
    is_high_noise: bool
    names: tuple[str, ...] = ()


def extract_loras(
    prompt: str, folder: str, problems: Problems, known: Mapping[str, str] = _NONE
) -> tuple[str, list[Lora]]:
    """The prompt without its tags, and the LoRAs: those of the low-noise expert first, each group by path.

    A LoRA that is named twice gets the sum of its weights. An empty `folder` leaves the prompt as it is. `known` has
    paths of LoRAs that were found elsewhere, by name.
    """
    if not folder:
        return prompt, []
    found: dict[tuple[bool, str], float] = {}
    names: dict[tuple[bool, str], dict[str, None]] = {}
    for written, weight in _TAG.findall(prompt):
        high, name = written.startswith(_HIGH_NOISE), written.removeprefix(_HIGH_NOISE)
        path = known.get(name) or _find(name, folder, problems)
        multiplier = _weight(written, weight, problems)
        if path is not None and multiplier is not None:
            found[high, path] = found.get((high, path), 0.0) + multiplier
            names.setdefault((high, path), {})[_without_folder(name)] = None
    loras = [Lora(path, found[high, path], high, tuple(names[high, path])) for high, path in sorted(found)]
    return _TAG.sub("", prompt), loras


def lora_names(prompt: str) -> set[str]:
    """What the tags of a prompt name."""
    return {name.removeprefix(_HIGH_NOISE) for name, _ in _TAG.findall(prompt)}


def shown_prompt(prompt: str) -> str:
    """The prompt as it is recorded: its tags name LoRAs without the folders of this machine."""

    def shown(match: re.Match[str]) -> str:
        name = match.group(1)
        mark = _HIGH_NOISE if name.startswith(_HIGH_NOISE) else ""
        return f"<lora:{mark}{_without_folder(name.removeprefix(_HIGH_NOISE))}:{match.group(2)}>"

    return _TAG.sub(shown, prompt)


def _without_folder(name: str) -> str:
    """A name below the folder of LoRAs stays as it is."""
    return os.path.basename(name) if os.path.isabs(name) or ".." in name.split("/") else name


def _find(name: str, folder: str, problems: Problems) -> str | None:
    base = os.path.join(folder, name)  # an absolute name stays as it is
    if not _inside(base, folder):
        problems.add(
            f"LoRA {name!r} of the prompt leads out of {folder}: put the file there, or name its folder with "
            "--lora-model-dir"
        )
        return None
    for suffix in _SUFFIXES:
        if Path(base + suffix).is_file():
            return os.path.normpath(base + suffix)
    problems.add(
        f"LoRA {name!r} of the prompt is not in {os.path.dirname(base) or '.'}: put {os.path.basename(base)}"
        f".safetensors or .gguf there, or name its folder with --lora-model-dir"
    )
    return None


def _inside(path: str, folder: str) -> bool:
    """By the names alone: a link inside the folder may lead anywhere."""
    top = os.path.abspath(folder)
    return os.path.commonpath([top, os.path.abspath(path)]) == top


def _weight(name: str, text: str, problems: Problems) -> float | None:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if math.isfinite(weight):
        return weight
    problems.add(f"LoRA {name!r} of the prompt has weight {text!r}: it takes a number, such as <lora:{name}:0.8>")
    return None
