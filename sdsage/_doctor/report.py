"""What `sdsage doctor` finds: facts, and problems with the command that mends each."""

from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any


class Level(IntEnum):
    """How bad a problem is; the worst are shown first."""

    ERROR = 0  # no job can run on the kind of device that this build is for
    WARNING = 1  # something that users expect does not work
    NOTE = 2  # it works; something better is possible


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes:
        name: one of the titles in docs/troubleshooting.md.
        mend: a command, or what else to do.
    """

    level: Level
    name: str
    text: str
    mend: str


def _nothing_known() -> dict[str, Any]:
    """Every fact has its place (docs/json.md), also where a part of the examination fails."""
    return {
        "versions": {},
        "python": "",
        "environment": {},
        "files": [],
        "build": None,
        "driver": {},
        "devices": [],
        "loaded": [],
        "engine_said": [],
        "codecs": [],
        "folders": [],
        "host_memory_free": None,
    }


@dataclass
class Report:
    """Grows while one thing after another is looked at."""

    facts: dict[str, Any] = field(default_factory=_nothing_known)
    found: list[Problem] = field(default_factory=list)

    def add(self, level: Level, name: str, text: str, mend: str) -> None:
        self.found.append(Problem(level, name, text, mend))

    def has(self, name: str) -> bool:
        return any(p.name == name for p in self.found)

    @property
    def problems(self) -> list[Problem]:
        """The worst first, those of one level in the order in which they were found."""
        return sorted(self.found, key=lambda p: p.level)

    @property
    def failed(self) -> bool:
        return any(p.level is Level.ERROR for p in self.found)

    def as_json(self) -> dict[str, Any]:
        return {"problems": [asdict(p) | {"level": p.level.name.lower()} for p in self.problems], **self.facts}
