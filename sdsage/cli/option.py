"""What the table in options.py is made of: an `Option` for each one, and the texts that follow from it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from sdsage._bounds import LEVERS


class Kind(Enum):
    """How a value is written: `metavar` is for usage lines, `unit` for the help, `words` for error messages."""

    TEXT = ("TEXT", "text", "text")
    INT = ("INT", "whole number", "a whole number")
    FLOAT = ("NUMBER", "number", "a number")
    SWITCH = ("", "switch", "true or false")
    FILE = ("FILE", "file", "a file")
    FOLDER = ("FOLDER", "folder", "a folder")
    CHOICE = ("NAME", "name", "a name")
    INTS = ("[N,N,...]", "whole numbers", "whole numbers such as [7,8,9],")
    FLOATS = ("X,X,...", "numbers", "numbers such as 14.6,7.8,0")
    INT_PAIR = ("XxY", "two whole numbers", "one or two whole numbers such as 32x24,")
    FLOAT_PAIR = ("XxY", "two numbers", "one or two numbers such as 0.5x0.25,")
    LEVERS = ("NAME,...", "names", f"none, or some of default, {', '.join(LEVERS)} joined by commas,")
    PAIRS = ("KEY=VALUE,...", "settings", "settings such as threshold=0.25")

    def __init__(self, metavar: str, unit: str, words: str) -> None:
        self.metavar = metavar
        self.unit = unit
        self.words = words


class Panel:
    """Titles of the help panels, in the order in which they are shown."""

    MODEL = "Model"
    PROMPT = "Prompt"
    PICTURES = "Input pictures"
    SAMPLING = "Sampling"
    HIGH_NOISE = "High-noise expert"
    SIZE = "Size and frames"
    MEMORY = "Memory"
    SPEED = "Speed"
    UPSCALING = "Upscaling"
    PREVIEW = "Preview"
    OUTPUT = "Output"
    RUN = "Run"

    ORDER = (
        MODEL,
        PROMPT,
        PICTURES,
        SAMPLING,
        HIGH_NOISE,
        SIZE,
        MEMORY,
        SPEED,
        UPSCALING,
        PREVIEW,
        OUTPUT,
        RUN,
    )


_LIMITS: dict[float, str] = {-(2**63): "-2^63", 2**63 - 1: "2^63 - 1"}  # how the ends of a range are written

VID, IMG, CONVERT, UPSCALE, DEVICES, INFO = "vid-gen", "img-gen", "convert", "upscale", "devices", "info"
DOCTOR, DECODE, VERIFY, BATCH = "doctor", "decode", "verify", "batch"
BENCH_ATTN, BENCH_GEN = "bench attn", "bench gen"
GENERATE = frozenset({VID, IMG})


@dataclass(frozen=True)
class Option:
    """One option of the command line, and what it stands for.

    Attributes:
        name: long name with dashes; `key` is the same as a config key, preset key and metadata key.
        help: one sentence without default, unit and full stop.
        default: value when nothing is given; None leaves the engine's own default.
        target: where the value goes: "ctx.", "gen." (both modes), "img." or "vid." and the path in the
            parameter struct; empty when the value needs more than a copy.
        only: the one verb in which the option has an effect, though both take it.
        needs: the option has no effect unless one of these is given.
        beaten_by: the option has no effect when one of these is given.
        low, high: allowed range, ends included unless `low_open`.
        sets: what a switch writes to its target.
        in_verb: (verb, help, default_text) where an option shared by several verbs is told in other words.
        positional: the value stands without a name, as the only such one of its verb.
        record: False keeps the option out of metadata (how a file was made does not depend on it).
    """

    name: str
    help: str
    panel: str
    kind: Kind = Kind.TEXT
    default: Any = None
    short: str | None = None
    aliases: tuple[str, ...] = ()
    unit: str = ""
    default_text: str = ""
    target: str = ""
    verbs: frozenset[str] = GENERATE
    only: str | None = None
    needs: tuple[str, ...] = ()
    beaten_by: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    choices: Sequence[str] = ()
    many: bool = False
    sets: bool = True
    positional: bool = False
    record: bool = True
    in_verb: tuple[tuple[str, str, str], ...] = ()

    @property
    def key(self) -> str:
        return self.name.removeprefix("--").replace("-", "_").lower()

    def told_in(self, verb: str) -> "Option":
        """The same option in the words of a verb."""
        for name, help, default_text in self.in_verb:
            if name == verb:
                return replace(self, help=help, default_text=default_text, in_verb=())
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """All spellings on the command line, long name first."""
        return (self.name, *((self.short,) if self.short else ()), *self.aliases)

    @property
    def allowed(self) -> str:
        """What a value may be, in words: "a whole number from 1 to 16384"."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return f"{self.kind.words} {self.span('of ')}".rstrip(" ,")

    def span(self, more: str = "") -> str:
        """The allowed range in words, empty when there is none; `more` goes before "0 or more"."""
        low, high = (None if v is None else _LIMITS.get(v, f"{v:g}") for v in (self.low, self.high))
        if low is not None and high is not None:
            return f"above {low}, up to {high}" if self.low_open else f"from {low} to {high}"
        if high is not None:
            return f"up to {high}"
        if low is not None:
            return f"above {low}" if self.low_open else f"{more}{low} or more"
        return ""

    def shown_default(self) -> str:
        """The default in words."""
        if self.default_text:
            return self.default_text
        if self.kind is Kind.SWITCH:
            return "off"
        if self.default is None or self.default == "":
            return "none"
        if self.kind is Kind.INTS:
            return "[" + ",".join(map(str, self.default)) + "]"
        return str(self.default)

    def sentence(self) -> str:
        """Help text: sentence, range or choices, unit, default."""
        if self.kind is Kind.SWITCH:
            return f"{self.help} (switch; default off)."
        extra = [", ".join(self.choices) if self.choices else self.unit or self.kind.unit]
        extra += filter(None, (self.span(), "may be repeated" if self.many else ""))
        return f"{self.help} ({'; '.join(extra)}; default {self.shown_default()})."
