"""`sdsage vid-gen`: a video from text, from a picture, or from both ends."""

from collections.abc import Mapping
from typing import Any

from .generate import run_verb
from .option import VID


def run(raw: Mapping[str, Any]) -> None:
    run_verb(VID, raw)
