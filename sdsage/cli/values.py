"""From what was written, on the command line or in TOML, to a checked value; a sentence for each problem."""

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sdsage._bounds import lever_problem
from sdsage.errors import BadRequest

from .habits import VALUES
from .option import Kind, Option
from .options import WEIGHT_TYPES

MAX_FLOAT = 3.4028234663852886e38  # of the engine's 32 bits; a NaN is not below it either


class Problems:
    """What is wrong with a command, gathered so that all of it is reported at once."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    def add(self, sentence: str) -> None:
        self._found[sentence] = None

    @property
    def found(self) -> list[str]:
        return list(self._found)

    def stop_if_any(self) -> None:
        """Raises BadRequest with one line for each problem."""
        if self._found:
            raise BadRequest("\n".join(self._found))


def parse(option: Option, raw: Any, where: str = "") -> Any:
    """The value of an option.

    Args:
        raw: text from the command line, or a TOML value.
        where: " (in FILE)" for a value that was not on the command line.

    Raises:
        BadRequest: naming the option, what was asked and what is allowed.
    """
    try:
        return _many(option, raw) if option.many else _PARSERS[option.kind](option, raw)
    except (ValueError, TypeError, OverflowError):
        asked = f"{option.name} {_shown(raw)}{where}"
        raise BadRequest(f"{asked} can't be used: {_advice(option, raw)}") from None


def _shown(raw: Any) -> str:
    text = " ".join(map(str, raw)) if isinstance(raw, list) else str(raw)
    return repr(text) if text == "" or re.search(r"[\s'\"]", text) else text


def _advice(option: Option, raw: Any) -> str:
    if option.choices:
        known = VALUES.get(str(raw).casefold())
        near = [known] if known in option.choices else get_close_matches(str(raw), option.choices, n=1)
        return f"allowed is {option.allowed}" + (f"; did you mean {near[0]}?" if near else "")
    unit = f" ({option.unit})" if option.unit and option.kind in (Kind.INT, Kind.FLOAT) else ""
    return f"it takes {option.allowed}{unit}; leave it out for the default ({option.shown_default()})"


def _text(option: Option, raw: Any) -> str:
    if not isinstance(raw, str) or "\0" in raw:
        raise ValueError
    if option.kind is Kind.TEXT:
        raw.encode("utf-8")  # a path may hold other bytes, a prompt may not
    return raw


def _levers(option: Option, raw: Any) -> str:
    if lever_problem(_text(option, raw)):
        raise ValueError
    return str(raw)


def _switch(_: Option, raw: Any) -> bool:
    if not isinstance(raw, bool):
        raise ValueError
    return raw


def _in_range(option: Option, value: float) -> bool:
    low = option.low is None or (value > option.low if option.low_open else value >= option.low)
    return low and (option.high is None or value <= option.high)


def _check_number(raw: Any, kind: Any) -> None:
    """Text or a number of `kind`; TOML's true is no number, and 1_000 is one in Python only."""
    if isinstance(raw, bool) or not (isinstance(raw, kind) or (isinstance(raw, str) and "_" not in raw)):
        raise ValueError


def _int(option: Option, raw: Any) -> int:
    _check_number(raw, int)
    value = int(raw)
    if not _in_range(option, value):
        raise ValueError
    return value


def _float(option: Option, raw: Any) -> float:
    _check_number(raw, int | float)
    value = float(raw)

    if not abs(value) <= MAX_FLOAT or not _in_range(option, value):
        raise ValueError
    return value


def _choice(option: Option, raw: Any) -> str:
    for name in option.choices:
        if isinstance(raw, str) and raw.casefold() == name.casefold():
            return name
    raise ValueError


def _items(raw: Any) -> list[Any]:
    """The items of "[7, 8,9]", of "7,8,9" or of a TOML list."""
    if isinstance(raw, str):
        inner = raw.strip()
        if inner.startswith("[") != inner.endswith("]"):
            raise ValueError
        return [item for item in re.split(r"[,\s]+", inner.strip("[]")) if item]
    if not isinstance(raw, list | tuple):
        raise ValueError
    return list(raw)


def _ints(option: Option, raw: Any) -> tuple[int, ...]:
    return tuple(_int(option, item) for item in _items(raw))


def _floats(option: Option, raw: Any) -> tuple[float, ...]:
    return tuple(_float(option, item) for item in _items(raw))


def _pair(raw: Any) -> tuple[Any, Any]:
    """Both parts of "32x24"; "32" alone counts for both."""
    parts = raw.split("x") if isinstance(raw, str) else list(raw) if isinstance(raw, list | tuple) else [raw]
    if len(parts) == 1:
        parts *= 2
    if len(parts) != 2:
        raise ValueError
    return parts[0], parts[1]


def _int_pair(option: Option, raw: Any) -> tuple[int, int]:
    x, y = _pair(raw)
    return _int(option, x), _int(option, y)


def _float_pair(option: Option, raw: Any) -> tuple[float, float]:
    x, y = _pair(raw)
    return _float(option, x), _float(option, y)


def _many(option: Option, raw: Any) -> tuple[Any, ...]:
    """A repeatable option: the list of what was given."""
    given = raw if isinstance(raw, list | tuple) else [raw]
    if option.kind is Kind.FLOATS:
        given = [given] if given and not isinstance(given[0], str) else given
        return tuple(value for item in given for value in _floats(option, item))
    return tuple(_PARSERS[option.kind](option, item) for item in given)


_PARSERS = {
    Kind.TEXT: _text,
    Kind.FILE: _text,
    Kind.FOLDER: _text,
    Kind.PAIRS: _text,
    Kind.SWITCH: _switch,
    Kind.INT: _int,
    Kind.FLOAT: _float,
    Kind.CHOICE: _choice,
    Kind.LEVERS: _levers,
    Kind.INTS: _ints,
    Kind.FLOATS: _floats,
    Kind.INT_PAIR: _int_pair,
    Kind.FLOAT_PAIR: _float_pair,
}

PICKLED = (".ckpt", ".pt", ".pth")


def check_file(name: str, path: str, problems: Problems) -> None:
    """An input file must be there and be a file."""
    file = Path(path)
    if file.is_dir():
        # --model also takes a checkpoint in diffusers layout, which is a folder
        if name != "--model" or not (file / "unet").is_dir():
            problems.add(f"{name} {_shown(path)} is a folder: it takes a file; name one inside")
    elif not file.exists():
        near = get_close_matches(file.name, _names_beside(file), n=1)
        hint = f"; did you mean {str(file.with_name(near[0]))!r}?" if near else ""
        problems.add(f"{name} {_shown(path)} does not exist: it takes a file; check the path{hint}")


def check_folder(name: str, path: str, problems: Problems) -> None:
    """An input folder must be there and be a folder."""
    folder = Path(path)
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        problems.add(f"{name} {_shown(path)} {state}: it takes a folder; check the path")


def _names_beside(file: Path) -> list[str]:
    try:
        return [p.name for p in file.parent.iterdir()]
    except OSError:
        return []


def check_type_rules(rules: str, problems: Problems) -> None:
    """Each rule is REGEX=FORMAT; the engine would ignore a bad format and die of a bad expression."""
    for rule in filter(None, rules.split(",")):
        pattern, equals, weight_type = rule.partition("=")
        asked = f"--tensor-type-rules {_shown(rule)} can't be used"
        if not equals or weight_type not in WEIGHT_TYPES:
            problems.add(f"{asked}: it takes REGEX=FORMAT with a format from {', '.join(WEIGHT_TYPES)}")
        try:
            re.compile(pattern)
        except re.error as error:
            problems.add(f"{asked}: {pattern!r} is no regular expression ({error}); escape special characters")
