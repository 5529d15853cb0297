"""File names of results: printf numbers as sd-cli makes them, and fields such as {seed} and {prompt}.

A template is split at its slashes and filled one component at a time. What fields bring in can't leave its component,
hide the file, clash with a device name of Windows, or make the component longer than a file system takes.
"""

import os
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence

from sdsage.errors import OutputError

FIELDS = ("seed", "index", "prompt", "date")
COMPONENT_BYTES = 255  # of a file name, in every file system in use
PROMPT_BYTES = 80  # of a prompt where there is room; below LEAST_BYTES it would say nothing
LEAST_BYTES = 8

# %d, %3d, %03d; a pair of percent signs stands for one and hides what follows it.
_SPECIFIER = re.compile(r"%%|(%\d{0,3}d)")
_FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_]+)\}")
_TOKEN = re.compile(f"{_SPECIFIER.pattern}|{_FIELD.pattern}")
_FORBIDDEN = re.compile(r'[\s<>:"/\\|?*%]+')  # separators, what Windows refuses, and what a pattern would take
_RESERVED = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])\s*(\.|$)", re.IGNORECASE)


def is_pattern(path: str) -> bool:
    """Whether `path` has a place for a number: "frame_%04d.png" has, "100%%d.png" has not."""
    return any(match.group(1) for match in _SPECIFIER.finditer(path))


def fields_of(template: str, more: Collection[str] = ()) -> set[str]:
    """Names of the fields in a template.

    Args:
        more: names that are known here beside those of every output.

    Raises:
        OutputError: one of them is unknown.
    """
    found = {match.group(1) for match in _FIELD.finditer(template) if match.group(1)}
    for name in sorted(found.difference(FIELDS, more)):
        known = ", ".join(f"{{{field}}}" for field in FIELDS) + (", an option such as {steps}" if more else "")
        raise OutputError(
            f"output {template!r}: {{{name}}} is not known: use {known}, or write {{{{{name}}}}} for plain braces"
        )
    return found


def literal(path: str) -> str:
    """The template that stands for `path` itself, braces included."""
    return path.replace("{", "{{").replace("}", "}}")


def numbered(template: str) -> str:
    """The template with the index in front of its extension: "cat.png" becomes "cat_{index}.png"."""
    stem, suffix = os.path.splitext(template)
    return f"{stem}_{{index}}{suffix}"


def fill(template: str, number: int | None, fields: Mapping[str, str]) -> str:
    """The name that a template stands for.

    Args:
        number: for %d and the like, with %% for a percent sign; None leaves percent signs alone.
        fields: text for each field that the template has.
    """
    return "/".join(_component(part, number, fields) for part in template.replace(os.sep, "/").split("/"))


def file_names(template: str, count: int, begin_index: int, fields: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of `count` single-image files; `fields` is one for all files, or one for each."""
    first = begin_index if is_pattern(template) else None
    each = fields if len(fields) == count else [fields[0]] * count
    return [fill(template, None if first is None else first + i, f) for i, f in enumerate(each)]


def _component(part: str, number: int | None, fields: Mapping[str, str]) -> str:
    def filled(prompt: str) -> str:
        return _TOKEN.sub(lambda match: _replacement(match, number, {**fields, "prompt": prompt}), part)

    named = [match.group(1) for match in _FIELD.finditer(part) if match.group(1)]
    if not named:
        return filled("")
    prompts = max(named.count("prompt"), 1)
    room = (COMPONENT_BYTES - 1 - len(os.fsencode(filled("")))) // prompts  # 1: perhaps for the mark below
    name = filled(safe_text(fields.get("prompt", ""), max(min(room, PROMPT_BYTES), LEAST_BYTES)))
    return f"_{name}" if _RESERVED.match(name) else name


def _replacement(match: re.Match[str], number: int | None, fields: Mapping[str, str]) -> str:
    text: str = match.group()
    if text[0] == "%":
        if number is None:
            return text
        return match.group(1) % number if match.group(1) else "%"
    return fields[match.group(2)] if match.group(2) else text[0]


def safe_text(text: str, limit: int) -> str:
    """`text` as a part of a file name that every system takes, in at most `limit` bytes of UTF-8; never empty.

    Words are joined by "_"; control and formatting characters are gone, and so are dots, dashes and tildes at the
    beginning, which would hide the file or look like something else to a shell.
    """
    kept = "".join(
        " " if category == "Cc" else "" if category in ("Cf", "Cs", "Co") else character
        for character in unicodedata.normalize("NFC", text)
        for category in (unicodedata.category(character),)
    )
    words = _FORBIDDEN.sub("_", kept).strip("._-~")
    cut = words.encode("utf-8")[:limit].decode("utf-8", "ignore").rstrip("._-~")
    return cut or "untitled"
