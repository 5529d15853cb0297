"""File names of results: printf patterns and numbered names, as sd-cli makes them."""

import os
import re

# %d, %3d, %03d; a pair of percent signs stands for one and hides what follows it.
_SPECIFIER = re.compile(r"%%|(%\d{0,3}d)")


def is_pattern(path: str) -> bool:
    """Whether `path` has a place for an index: "frame_%04d.png" has, "100%%d.png" has not."""
    return any(match.group(1) for match in _SPECIFIER.finditer(path))


def fill(pattern: str, index: int) -> str:
    """Put `index` into each place of a pattern, and turn each %% into %."""
    return _SPECIFIER.sub(lambda match: match.group(1) % index if match.group(1) else "%", pattern)


def file_names(path: str, count: int, begin_index: int) -> list[str]:
    """Names of `count` single-image files.

    A pattern gets one index after the other; a plain name stands for one file, and "name.png" becomes
    "name_0.png", "name_1.png" for more.
    """
    if is_pattern(path):
        return [fill(path, begin_index + i) for i in range(count)]
    if count == 1:
        return [path]
    stem, suffix = os.path.splitext(path)
    return [f"{stem}_{begin_index + i}{suffix}" for i in range(count)]
