"""Chooses how a run uses a GPU's memory, so that it fits a budget; and refuses what can't fit in any way."""

from collections.abc import Iterator
from dataclasses import dataclass

from sdsage._estimate import CONTEXT, ERROR, Estimate, Stage, Way
from sdsage.errors import BadRequest

_GIB = 2**30
_ROOM = 0.95  # of a budget is planned with
_LEAST_CUT = 0.5  # GiB; a segment of a calculation needs some


@dataclass(frozen=True)
class Choice:
    """A way that fits, and the stage that then takes most. `budget`: bytes."""

    way: Way
    peak: Stage
    budget: int

    @property
    def options(self) -> tuple[str, ...]:
        return options(self.way)


def options(way: Way, given: Way | None = None) -> tuple[str, ...]:
    """The options of the command line that make a way out of `given` (default: out of none)."""
    base = given or Way(False, False)
    found = ["--offload-to-cpu"] if way.offload and not base.offload else []
    found += ["--vae-tiling"] if way.tiling and not base.tiling else []
    return (*found, *([f"--max-vram {way.max_vram:g}"] if way.max_vram and not base.max_vram else ()))


def ways(given: Way, budget: int) -> Iterator[Way]:
    """From the fastest to the one that needs least; what was given stays. `budget`: bytes for one calculation."""
    cut = given.max_vram or max(_LEAST_CUT, int(budget / _GIB * 10) / 10)
    for offload, max_vram in ((given.offload, given.max_vram), (True, given.max_vram), (True, cut)):
        for tiling in (False, True):
            yield Way(offload, tiling or given.tiling, max_vram)


def choose(found: Estimate, budget: int, given: Way, host: int | None, what: str) -> Choice:
    """The fastest way whose peak is within a budget of bytes, CUDA's context left out.

    Args:
        host: bytes free in the computer's own memory; None when nobody tells.
        what: the job in words.

    Raises:
        BadRequest: there is none.
    """
    room = int(budget * _ROOM)
    tried = list(ways(given, room - found.pool))
    for way in tried:
        peak = found.peak(way)
        if peak.bytes <= room and (host is None or found.host(way) <= host):
            return Choice(way, peak, budget)
    best = min((found.peak(way) for way in tried), key=lambda stage: stage.bytes)
    if best.bytes <= room:  # then it is the weights in RAM
        raise BadRequest(
            f"{what}: with the weights in RAM they need {found.host(tried[-1]) / _GIB:.1f} GiB, and there are "
            f"{(host or 0) / _GIB:.1f} GiB free; choose smaller files, such as q4_K, or more GPU memory"
        )
    raise BadRequest(
        f"{what}: {best.name} takes about {best.bytes / _GIB:.1f} GiB on {found.device} whatever is chosen, and "
        f"{budget / _GIB:.1f} GiB are there; choose a smaller size, fewer frames or smaller files"
    )


def check(found: Estimate, free: int, given: Way, host: int | None, what: str) -> None:
    """For a run without a budget. `free`: bytes on the device, from which CUDA's context is taken already.

    Raises:
        BadRequest: it can't fit even if the estimate is as wrong as it may be; names the options with which it fits.
    """
    peak = found.peak(given)
    if not peak.known or peak.bytes * (1 - ERROR) <= free:
        return
    there = f"{found.device} has {free / _GIB:.1f} GiB free"
    text = f"{what}: {peak.name} takes about {peak.bytes / _GIB:.1f} GiB, and {there}"
    try:
        way = choose(found, free, given, host, what).way
    except BadRequest:
        raise BadRequest(f"{text}; choose a smaller size, fewer frames or smaller files") from None
    raise BadRequest(f"{text}; add {' '.join(options(way, given))}, or let --vram auto choose")


def next_way(given: Way, stage: str, free: int | None) -> Way | None:
    """What a job is tried with after memory did not suffice for it; None: there is nothing left to try.

    Args:
        stage: in which it failed, as in `Progress.stage`.
        free: bytes free on the GPU; None on the CPU, where weights have no other place.
    """
    pictures = stage in ("decode", "encode_image")
    if free is None:
        return Way(given.offload, True, given.max_vram) if pictures and not given.tiling else None
    for way in ways(given, int(free * _ROOM)):
        less = way.offload > given.offload or way.max_vram > given.max_vram
        if less or (pictures and way.tiling > given.tiling):
            return way
    return None


def budget_bytes(vram: float) -> int:
    """What is left of so many GiB beside CUDA's context."""
    return max(0, int(vram * _GIB) - CONTEXT)
