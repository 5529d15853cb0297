"""LoRA tags of a prompt: <lora:NAME:WEIGHT>, and <lora:|high_noise|NAME:WEIGHT> for the high-noise expert."""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from .values import Problems

_TAG = re.compile(r"<lora:([^:>]+):([^>]+)>")
_HIGH_NOISE = "|high_noise|"
_SUFFIXES = ("", ".gguf", ".safetensors", ".pt")  # tried in this order, as sd-cli does


@dataclass(frozen=True)
class Lora:
    path: str
    multiplier: float
    is_high_noise: bool


def extract_loras(prompt: str, folder: str, problems: Problems) -> tuple[str, list[Lora]]:
    """The prompt without its tags, and the LoRAs: those of the low-noise expert first, each group by path.

    A LoRA that is named twice gets the sum of its weights. An empty `folder` leaves the prompt as it is.
    """
    if not folder:
        return prompt, []
    found: dict[tuple[bool, str], float] = {}
    for name, weight in _TAG.findall(prompt):
        high = name.startswith(_HIGH_NOISE)
        path = _find(name.removeprefix(_HIGH_NOISE), folder, problems)
        multiplier = _weight(name, weight, problems)
        if path is not None and multiplier is not None:
            found[high, path] = found.get((high, path), 0.0) + multiplier
    return _TAG.sub("", prompt), [Lora(path, found[high, path], high) for high, path in sorted(found)]


def _find(name: str, folder: str, problems: Problems) -> str | None:
    base = os.path.join(folder, name)  # an absolute name stays as it is
    for suffix in _SUFFIXES:
        if Path(base + suffix).is_file():
            return os.path.normpath(base + suffix)
    problems.add(
        f"LoRA {name!r} of the prompt is not in {os.path.dirname(base) or '.'}: put {os.path.basename(base)}"
        f".safetensors or .gguf there, or name its folder with --lora-model-dir"
    )
    return None


def _weight(name: str, text: str, problems: Problems) -> float | None:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if math.isfinite(weight):
        return weight
    problems.add(f"LoRA {name!r} of the prompt has weight {text!r}: it takes a number, such as <lora:{name}:0.8>")
    return None
