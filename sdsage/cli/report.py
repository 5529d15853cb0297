"""What is told while a verb runs: progress and messages."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .console import console
from .eta import Estimate, duration

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
_PAUSE = 0.2  # seconds between two lines about the tiles or tensors of a stage, which are many


def say(level: str, text: str, color: bool = False) -> None:
    """One message: "warning: ...", a line for each line of `text`."""
    console().message(level, text, color=color)


def stage_name(progress: "Progress") -> str:
    """ "sample (high-noise expert)" and the like."""
    name = STAGES.get(progress.stage, progress.stage)
    return f"{name} ({progress.expert} expert)" if progress.expert else name


class Reporter:
    """Shows progress in a `with` block; its methods may be called from any thread.

    On a terminal each stage has a line with a bar (rich); elsewhere each event is a plain line. `quiet`
    leaves warnings and errors, `verbose` adds the engine's informative and debugging messages.

    Args:
        estimate: of the steps that a generation takes.
    """

    def __init__(self, settings: "Settings", estimate: Estimate | None = None) -> None:
        self.quiet = bool(settings["quiet"] or settings["json"])
        self.verbose = bool(settings["verbose"])
        self.color = bool(settings["color"])
        # the engine announces this stage even when there is no picture
        self._hidden = () if any(settings.values.get(key) for key in _PICTURES) else ("encode_image",)
        self._settings = settings
        self._draw: Callable[[NDArray[np.uint8]], None] | None = None
        self._console = console()
        self._json = bool(settings["json"])
        self.shown: set[str] = set()
        self._estimate = estimate or Estimate()
        self._bars: Any = None
        self._task: Any = None
        self._stage: tuple[str, str | None] | None = None
        self._began = self._last = self._told = 0.0

    def __enter__(self) -> Self:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[detail]}"))
            self._bars = Progress(*columns, console=Console(stderr=True, highlight=False))
            self._bars.start()
            self._console.printer = self._print
        if self._settings.values.get("preview", "none") != "none":
            from .inline import can_draw

            self._draw = can_draw(self._settings, self._bars, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_stage(failed=kind is not None)
        self._console.printer = None
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _print(self, level: str, text: str) -> None:
        """A message above the bars."""
        from rich.text import Text

        for line in text.rstrip("\n").split("\n"):
            self._bars.console.print(Text.assemble((level, _STYLES[level]), ": ", line))

    def message(self, level: str, text: str, *, show: bool = True) -> None:
        """A message; each warning is shown once."""
        if level == "warning":
            if text in self.shown:
                return
            self.shown.add(text)
        self._console.message(level, text, color=self.color, show=show)

    def note(self, text: str) -> None:
        """Something worth knowing that is no warning."""
        self.message("note", text, show=not self.quiet)

    def log(self, level: "LogLevel", text: str) -> None:
        """A message of the engine: warnings and errors always, the others when asked for."""
        name = {"WARN": "warning", "ERROR": "error"}.get(level.name, level.name.lower())
        if self.verbose:
            self.message(name, text, show=not self._json or name in ("warning", "error"))
        elif name in ("warning", "error") and not _KNOWN.search(text):
            self.message(name, _SOURCE.sub("", text))
        else:
            self._console.log(name, text)

    def progress(self, progress: "Progress") -> None:
        """An event of the engine: a stage begins (step 0) or a step is complete."""
        if progress.stage in self._hidden:
            return
        if progress.stage == "sample":
            self._estimate.hear(progress)
        stage = (progress.stage, progress.expert)
        if stage != self._stage or progress.step == 0:
            self._open_stage(stage, stage_name(progress), progress.steps)
        if progress.step > 0:
            self._show_step(progress)

    def preview(self, step: int, path: Path, frames: "NDArray[np.uint8]") -> None:
        """A preview of N x H x W x 3 was written."""
        height, width = frames.shape[1:3]
        self._console.log("preview", f"{path} after step {step}")
        fields = {"step": step, "file": str(path), "frames": len(frames), "width": width, "height": height}
        self._console.event("preview", **fields)
        if self._draw is not None:
            self._draw(frames)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage of our own, such as writing the file."""
        self._open_stage((name, None), STAGES[name], 0)
        yield
        self._close_stage()

    def _open_stage(self, stage: tuple[str, str | None], title: str, steps: int) -> None:
        self._close_stage()
        self._stage, self._began, self._last, self._told = stage, time.monotonic(), 0.0, 0.0
        self._console.event("stage", stage=stage[0], expert=stage[1], steps=steps)
        self._line("stage", f"{title} ...")
        if self._bars is not None:
            self._task = self._bars.add_task(title, total=steps or None, detail="")

    def _line(self, kind: str, text: str) -> None:
        """For the log, and for stderr where no bar shows the same."""
        if self._bars is not None or self.quiet:
            self._console.log(kind, text)
        else:
            self._console.line(text, kind=kind)

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
        sampling = progress.stage == "sample"
        step_seconds, self._last = progress.seconds - self._last, progress.seconds
        if sampling:
            left = self._estimate.left()
        else:
            left = (progress.steps - progress.step) * progress.seconds / progress.step
        detail = f"{progress.step}/{progress.steps}" + (f", {step_seconds:.2f} s/it" if sampling else "")
        detail += "" if left is None else f", {duration(left)} left"
        replayed = progress.step <= progress.replayed
        if replayed:
            detail = f"{progress.step}/{progress.steps} from the checkpoint"
        if self._bars is not None:
            self._bars.update(self._task, completed=progress.step, total=progress.steps, detail=detail)
        now = time.monotonic()
        if not sampling and now - self._told < _PAUSE and progress.step < progress.steps:
            return
        self._told = now
        if sampling:
            self._line("step", f"{stage_name(progress)} {detail}")
        else:
            self._console.log("step", f"{stage_name(progress)} {detail}")
        fields: dict[str, Any] = {"stage": progress.stage, "expert": progress.expert}
        fields |= {"step": progress.step, "steps": progress.steps}
        fields |= {"seconds": round(step_seconds, 3) if sampling and not replayed else None}
        fields |= {"seconds_left": None if left is None else round(left, 3)}
        if sampling:
            fields |= {"overall_step": self._estimate.step, "overall_steps": self._estimate.steps, "replayed": replayed}
        self._console.event("step", **fields)
