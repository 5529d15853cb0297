"""What the user sees while a verb runs, all of it on stderr: progress and messages."""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from sdsage import Progress
    from sdsage.enums import LogLevel

    from .settings import Settings

STAGES = {
    "load": "load model",
    "encode_text": "encode text",
    "encode_image": "encode picture",
    "sample": "sample",
    "decode": "decode",
    "upscale": "upscale",
    "convert": "convert",
    "encode": "write file",
}
_SOURCE = re.compile(r"^\S+\.[ch]pp:\d+\s*- ")  # "wan.hpp:123 - " in front of the engine's messages
# Messages that are said better elsewhere: in the warning before the run, and in the error that ends it.
_KNOWN = re.compile(r"align (generation request|hires target) up|ampling failed")
_PICTURES = ("init_img", "end_img", "ref_image", "control_image", "control_video")
_STYLES = {"error": "bold red", "warning": "yellow", "info": "green", "debug": "dim", "note": "cyan"}
_ANSI = {"error": "1;31", "warning": "33", "info": "32", "debug": "2", "note": "36"}


def say(level: str, text: str, color: bool = False) -> None:
    """One message on stderr: "warning: ...", a line for each line of `text`."""
    for line in text.rstrip("\n").split("\n"):
        tag = f"\x1b[{_ANSI[level]}m{level}\x1b[0m" if color or sys.stderr.isatty() else level
        print(f"{tag}: {line}", file=sys.stderr)


def stage_name(progress: "Progress") -> str:
    """ "sample (high-noise expert)" and the like."""
    name = STAGES.get(progress.stage, progress.stage)
    return f"{name} ({progress.expert} expert)" if progress.expert else name


class Reporter:
    """Shows progress in a `with` block; its methods may be called from any thread.

    On a terminal each stage has a line with a bar (rich); elsewhere each event is a plain line. `quiet`
    leaves warnings and errors, `verbose` adds the engine's informative and debugging messages.
    """

    def __init__(self, settings: "Settings") -> None:
        self.quiet = bool(settings["quiet"])
        self.verbose = bool(settings["verbose"])
        self.color = bool(settings["color"])
        # the engine announces this stage even when there is no picture
        self._hidden = () if any(settings.values.get(key) for key in _PICTURES) else ("encode_image",)
        self.shown: set[str] = set()
        self._bars: Any = None
        self._task: Any = None
        self._stage: tuple[str, str | None] | None = None
        self._began = 0.0
        self._last = 0.0

    def __enter__(self) -> Self:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[detail]}"))
            self._bars = Progress(*columns, console=Console(stderr=True, highlight=False))
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_stage(failed=kind is not None)
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def message(self, level: str, text: str) -> None:
        """A message; each warning is shown once."""
        if level == "warning":
            if text in self.shown:
                return
            self.shown.add(text)
        if self._bars is None:
            say(level, text, self.color)
            return
        from rich.text import Text

        for line in text.rstrip("\n").split("\n"):
            self._bars.console.print(Text.assemble((level, _STYLES[level]), ": ", line))

    def note(self, text: str) -> None:
        """Something worth knowing that is no warning."""
        if not self.quiet:
            self.message("note", text)

    def log(self, level: "LogLevel", text: str) -> None:
        """A message of the engine: warnings and errors always, the others when asked for."""
        name = {"WARN": "warning", "ERROR": "error"}.get(level.name, level.name.lower())
        if self.verbose:
            self.message(name, text)
        elif name in ("warning", "error") and not _KNOWN.search(text):
            self.message(name, _SOURCE.sub("", text))

    def progress(self, progress: "Progress") -> None:
        """An event of the engine: a stage begins (step 0) or a step is complete."""
        if progress.stage in self._hidden:
            return
        stage = (progress.stage, progress.expert)
        if stage != self._stage or progress.step == 0:
            self._open_stage(stage, stage_name(progress), progress.steps)
        if progress.step > 0:
            self._show_step(progress)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage of our own, such as writing the file."""
        self._open_stage((name, None), STAGES[name], 0)
        yield
        self._close_stage()

    def _open_stage(self, stage: tuple[str, str | None], title: str, steps: int) -> None:
        self._close_stage()
        self._stage, self._began, self._last = stage, time.monotonic(), 0.0
        if self._bars is not None:
            self._task = self._bars.add_task(title, total=steps or None, detail="")
        elif not self.quiet:
            print(f"{title} ...", file=sys.stderr)

    def _close_stage(self, failed: bool = False) -> None:
        if self._bars is not None and self._task is not None:
            if failed:
                self._bars.update(self._task, detail="stopped")
                self._bars.stop_task(self._task)
            else:
                seconds = time.monotonic() - self._began
                total = self._bars.tasks[-1].total or 1
                self._bars.update(self._task, total=total, completed=total, detail=f"{seconds:.2f} s")
        self._stage = self._task = None

    def _show_step(self, progress: "Progress") -> None:
        step_seconds, self._last = progress.seconds - self._last, progress.seconds
        left = (progress.steps - progress.step) * progress.seconds / progress.step
        detail = f"{progress.step}/{progress.steps}, {step_seconds:.2f} s/it, {left:.0f} s left"
        if self._bars is not None:
            self._bars.update(self._task, completed=progress.step, total=progress.steps, detail=detail)
        elif not self.quiet and progress.stage == "sample":  # elsewhere steps are tiles or tensors, and many
            print(f"{stage_name(progress)} {detail}", file=sys.stderr)
