"""Which seeds a run has: `--seed`, `--batch-count` and `--seeds`, one seed for each picture or video."""

import secrets
from dataclasses import dataclass

from .option import IMG
from .settings import Settings

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Part:
    """Results that the engine makes in one job: `count` pictures from number `first` on, or one video."""

    first: int
    count: int


def choose(settings: Settings) -> tuple[int, ...]:
    """The seed of every result; a negative --seed is drawn. What can't be becomes one of the settings' problems."""
    more = settings.values.get("extend") or 0  # each part of a video has the next seed
    if settings["seeds"]:
        if max(settings["seeds"]) + more > MAX_SEED:
            settings.problems.add(f"--seeds has {max(settings['seeds'])}: seed + parts must stay below 2^63")
        for seed in sorted(set(settings["seeds"])):
            if settings["seeds"].count(seed) > 1:
                settings.problems.add(f"--seeds has {seed} more than once: the results would be the same")
        return tuple(settings["seeds"])
    count = settings["batch_count"]
    first = settings["seed"] if settings["seed"] >= 0 else secrets.randbits(31)
    if first + count + more > MAX_SEED:
        what = "pictures" if settings.verb == IMG else "videos"
        settings.problems.add(f"--seed {first} is too large: seed + {what} must stay below 2^63")
    return tuple(first + i for i in range(count))


def parts(settings: Settings, seeds: tuple[int, ...]) -> list[Part]:
    """How the results are divided into jobs: pictures of neighbouring seeds in one, all others one by one."""
    if settings.verb == IMG and not settings["seeds"]:
        return [Part(0, len(seeds))]
    return [Part(i, 1) for i in range(len(seeds))]
