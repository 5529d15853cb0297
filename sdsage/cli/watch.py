"""What is seen of a batch while it runs: a table on a terminal, plain lines elsewhere, or JSON lines."""

import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .console import console
from .eta import duration
from .settings import Settings

if TYPE_CHECKING:
    from sdsage.batch import Progress

_SHOWN_STATES = {"done": "is done", "failed": "failed", "aside": "was set aside: it ended its worker twice"}


class Watcher:
    """Shows a batch in a `with` block; `hear` takes its events."""

    def __init__(self, settings: Settings) -> None:
        self._console = console()
        self._progress: Progress | None = None
        self._live: Any = None
        self._table = not self._console.silent and sys.stderr.isatty()
        self._lock = threading.Lock()
        self._shown: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._console.printer = None
        if self._live is not None:
            self._live.stop()

    def watch(self, progress: "Progress") -> None:
        """The batch begins."""
        self._progress = progress
        if not self._table:
            return
        from rich.console import Console
        from rich.live import Live

        out = Console(stderr=True, highlight=False)
        self._live = Live(console=out, get_renderable=self._drawn, refresh_per_second=4, transient=True)
        self._console.printer = lambda level, text: out.print(f"{level}: {text}", markup=False)
        self._live.start()

    def hear(self, event: Mapping[str, Any]) -> None:
        fields = dict(event)
        name = str(fields.pop("event"))
        if name == "said":  # for the log file
            self._console.log(fields["level"], f"job {fields['job']}: {fields['text']}")
            return
        if name in ("warning", "note", "log"):
            self._message(name, fields)
            return
        self._console.event(name, **fields)
        if name == "job":
            self._job(fields)

    def _message(self, name: str, fields: dict[str, Any]) -> None:
        """Messages of jobs have been logged; each warning is shown once, for the first job that has it."""
        level, text = fields.get("level", name), str(fields["text"])
        job = fields.get("job")
        if job is None:
            self._console.message(level, text)
            return
        self._console.event(name, **fields)
        if level in ("warning", "error") and text not in self._shown:
            self._shown.add(text)
            self._console.show(level, f"job {job}: {text}")

    def _job(self, fields: Mapping[str, Any]) -> None:
        what = _SHOWN_STATES.get(fields["state"])
        if what is None:
            if fields["state"] == "waiting" and fields["text"]:
                self._console.show("warning", f"job {fields['job']} is tried again: {fields['text']}")
            return
        name = f"job {fields['job']} ({fields['output']})"
        if fields["state"] != "done":
            self._console.show("error", f"{name} {what}: {fields['text']}")
        elif not self._table:
            counts = f"{fields['done']} done, {fields['failed']} failed, {fields['left']} left"
            self._console.line(f"{name} {what}, {fields['seconds']:.1f} s; {counts}", kind="job")
        else:
            self._console.log("job", f"{name} {what}, {fields['seconds']:.1f} s")

    def _drawn(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        from .report import STAGES

        p = self._progress
        assert p is not None
        table = Table(box=None, pad_edge=False)
        for title in ("worker", "model", "job", "output", "stage", "step", "left"):
            table.add_column(title, justify="right" if title in ("job", "step", "left") else "left", no_wrap=True)
        for doing in p.workers:
            busy = doing.job is not None
            left = "" if doing.seconds_left is None or not busy else duration(doing.seconds_left)
            step = f"{doing.step}/{doing.steps}" if doing.steps and busy else ""
            stage = STAGES.get(doing.stage, doing.stage) if busy else "waits"
            row = (doing.worker, doing.model, str(doing.job or ""), doing.output if busy else "", stage, step, left)
            table.add_row(*map(Text, row))
        total = f"{p.done} of {p.total} done, {p.failed} failed, {p.left} left"
        total += f", about {duration(p.seconds_left)}" if p.seconds_left is not None else ""
        return Group(table, Text(total))
