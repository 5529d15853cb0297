"""How a worker process ended, in words, and what the likely reason is."""

import signal
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from sdsage._host import host_memory

LAST_WORDS = 40  # lines that are kept
SHOWN_WORDS = 3  # of them in the message
LOW = 2**29  # bytes free below which memory counts as low
_GIB = 2**30
# How Windows ends a process that did wrong, by its exit code.
_NT_STATUS = {
    0xC0000005: "an access violation",
    0xC0000017: "want of memory",
    0xC000001D: "an illegal instruction",
    0xC0000094: "a division by zero",
    0xC00000FD: "a stack overflow",
    0xC0000135: "a missing DLL",
    0xC000013A: "Ctrl-C",
    0xC0000409: "an abort",
}
_ADVICE = "free memory, or choose a smaller size, fewer frames, --vae-tiling, a smaller quantization"
_DOING = {
    "start": "starting",
    "load": "loading the model",
    "encode_text": "encoding the text",
    "encode_image": "encoding a picture",
    "sample": "sampling",
    "decode": "decoding",
    "upscale": "upscaling",
    "convert": "converting",
}


def doing(stage: str, step: int, steps: int, expert: str | None) -> str:
    """ "sampling, step 2 of 4 (high-noise expert)"; "" between jobs."""
    words = _DOING.get(stage, stage)
    if stage == "sample" and step:
        words += f", step {step} of {steps}"
    return words + (f" ({expert} expert)" if expert else "")


def signal_name(exit_code: int | None) -> str:
    """ "SIGKILL"; "" where no signal ended it. Windows has no signals: words for what ended it there."""
    if exit_code is None or exit_code >= 0:
        return _NT_STATUS.get(exit_code or 0, "")
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


class MemoryWatch:
    """Looks from time to time how much memory is left: whether a SIGKILL came for want of it."""

    def __init__(self) -> None:
        self._kills = oom_kills()
        self.least = host_memory()

    def look(self) -> None:
        free = host_memory()
        if free is not None:
            self.least = free if self.least is None else min(free, self.least)

    def verdict(self) -> str:
        """A sentence about a SIGKILL that nobody here sent."""
        if any(now > before for now, before in zip(oom_kills(), self._kills, strict=True)):
            return f"the system ends processes so when memory runs out, and did: {_ADVICE}"
        if self.least is not None and self.least < LOW:
            return f"memory was low ({self.least / _GIB:.1f} GiB free), so that is the likely reason: {_ADVICE}"
        return "somebody sent that signal, or memory ran out and the system did"


def oom_kills() -> tuple[int, ...]:
    """How many processes the system has ended for want of memory: in this control group, and at all."""
    return tuple(map(_counter, ("/sys/fs/cgroup/memory.events", "/proc/vmstat")))


def _counter(path: str) -> int:
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


class LastWords:
    """The last lines that came from the worker process: what it logged, and what it wrote to standard error."""

    def __init__(self) -> None:
        self.abort = ""
        self._logged: deque[str] = deque(maxlen=LAST_WORDS)
        self._errors: deque[str] = deque(maxlen=LAST_WORDS)
        self._written: deque[str] = deque(maxlen=LAST_WORDS)

    def logged(self, line: str, is_error: bool) -> None:
        self._logged.append(line)
        if is_error:
            self._errors.append(line)

    def written(self, line: str) -> None:
        self._written.append(line)

    def all(self) -> tuple[str, ...]:
        return tuple([*self._logged, *self._written, *filter(None, [self.abort])])

    def shown(self) -> str:
        """What fits in a message: the reason of an abort, else errors and what was written last."""
        lines = [self.abort] if self.abort else [*self._errors][-SHOWN_WORDS:] + [*_plain(self._written)][-SHOWN_WORDS:]
        if not lines:
            lines = [*self._logged][-1:]
        return "; ".join(dict.fromkeys(line.strip() for line in lines))


def _plain(lines: Iterable[str]) -> Iterable[str]:
    """Without the traceback that faulthandler adds, and its name for the signal."""
    added = ("Fatal Python error", "Stack (", "  File ", "  <", "Current thread", "Thread 0x", "Extension modules")
    return (line for line in lines if line.strip() and not line.startswith(added))
