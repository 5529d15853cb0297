"""`sdsage img-gen`: pictures from text, or from pictures and text."""

from collections.abc import Mapping
from typing import Any

from .generate import run_verb
from .option import IMG


def run(raw: Mapping[str, Any]) -> None:
    run_verb(IMG, raw)
