"""Where everything that a command says goes: text on stderr, JSON lines on stdout, and the log file."""

import contextlib
import json
import math
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from .settings import Settings

SCHEMA = 1  # of the lines of --json: docs/json.md
_ANSI = {"error": "1;31", "warning": "33", "info": "32", "debug": "2", "note": "36"}
_FIRST = "sdsage"  # the word after the time in the first line of each command in a log file


class Console:
    """The outlets of one command; its methods may be called from any thread.

    Attributes:
        json: lines on stdout; stderr then has only what `quiet` leaves.
        printer: prints a message on the terminal while bars are drawn there.
    """

    def __init__(self, raw: Mapping[str, Any] | None = None) -> None:
        raw = raw or {}
        self.json, self.quiet = bool(raw.get("json")), bool(raw.get("quiet"))
        self.verbose, self.color = bool(raw.get("verbose")), bool(raw.get("color"))
        self.printer: Callable[[str, str], None] | None = None
        self._log: TextIO | None = None
        self._lock = threading.RLock()
        self._began = time.monotonic()
        self._started = self._ended = False

    @property
    def silent(self) -> bool:
        """No progress, notes and summary on stderr."""
        return self.quiet or self.json

    def message(self, level: str, text: str, *, color: bool = False, show: bool = True) -> None:
        """ "warning: ...", a line for each line of `text`: on stderr (with `show`), in JSON and in the log."""
        self.log(level, text)
        if level in ("warning", "note"):
            self.event(level, text=text)
        else:
            self.event("log", level=level, text=text)
        if show and not (level == "note" and self.silent):
            self.show(level, text, color)

    def show(self, level: str, text: str, color: bool = False) -> None:
        """On the terminal alone."""
        if self.printer is not None:
            self.printer(level, text)
            return
        tag = f"\x1b[{_ANSI[level]}m{level}\x1b[0m" if color or self.color or sys.stderr.isatty() else level
        for line in text.rstrip("\n").split("\n"):
            print(f"{tag}: {line}", file=sys.stderr)

    def line(self, text: str, *, kind: str = "info") -> None:
        """A line of progress or of the summary."""
        self.log(kind, text)
        if not self.silent:
            print(text, file=sys.stderr)

    # ---- JSON lines

    def start(self, verb: str) -> None:
        """The first line of a verb that does work."""
        if self.json and not self._started:
            from sdsage import __version__

            self._started = True
            self.event("start", verb=verb, version=__version__)

    def event(self, event: str, **fields: Any) -> None:
        """A line of --json; --quiet leaves the last one alone."""
        if self.json and (event in ("result", "error") or not self.quiet):
            self._print(event, fields)

    def result(self, values: Mapping[str, Any], exit_code: int = 0) -> None:
        """The last line of a command that worked, at least in part. Without --json nothing is printed."""
        self.log("result", as_json(values))
        self.event("result", exit_code=exit_code, **values)

    def failure(self, text: str, code: int, error: BaseException, *, show: bool = True) -> None:
        """The end of a command that did not: the message on stderr, and the last line."""
        known = {name: getattr(error, name) for name in ("stage", "step", "expert") if hasattr(error, name)}
        if show:
            self.show("error", text)
        self.log("error", text)
        for words in getattr(error, "last_words", ()):
            self.log("worker", words)
        self.log("exit", str(code))
        kind = "UsageError" if hasattr(error, "format_message") else type(error).__name__  # one of typer's
        self.event("error", exit_code=code, type=kind, text=text, **known)

    def _print(self, event: str, fields: Mapping[str, Any]) -> None:
        elapsed = round(time.monotonic() - self._began, 3)
        text = as_json({"schema": SCHEMA, "event": event, "elapsed": elapsed, **fields})
        with self._lock:
            if not self._ended:
                self._ended = event in ("result", "error")
                print(text, flush=True)

    # ---- the log file

    def open_log(self, path: str, verb: str) -> None:
        """Everything goes to the end of this file too. Raises OSError, and ValueError for a file that is no text."""
        if os.path.isfile(path):
            with open(path, "rb") as there:
                if b"\0" in there.read(4096):
                    raise ValueError("it holds something else than text")
        self._log = open(path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        from sdsage import __version__

        self.log(_FIRST, f"{__version__} {verb}: {shlex.join(sys.argv)}")

    def log(self, level: str, text: str) -> None:
        """Lines for the log file alone. A disk that is full ends the log and not the run."""
        with self._lock:
            if self._log is None:
                return
            now = datetime.now().astimezone().isoformat(timespec="milliseconds")
            try:
                for line in text.rstrip("\n").split("\n"):
                    self._log.write(f"{now} {level:<8} {line}\n")
                self._log.flush()
            except OSError as error:
                name, log, self._log = self._log.name, self._log, None
                _close(log)
                self.message("warning", f"--log-file {name} can't be written any more: {error.strerror}")

    def close(self) -> None:
        with self._lock:
            if self._log is not None:
                _close(self._log)
            self._log = None


def _close(log: TextIO) -> None:
    with contextlib.suppress(OSError):  # what was not written yet can't be
        log.close()


def as_json(values: Mapping[str, Any]) -> str:
    """One line in every sense, in ASCII: text of any language and file names of any bytes are escaped."""
    try:
        return json.dumps(values, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(values), allow_nan=False)


def _finite(value: Any) -> Any:
    """JSON has no word for the numbers that are none."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_console = Console()
_own: ContextVar[Console | None] = ContextVar("console", default=None)


def console() -> Console:
    """That of the running command, or of the job of a batch that this thread works at."""
    return _own.get() or _console


@contextlib.contextmanager
def speaking_to(own: Console) -> Iterator[None]:
    """In this block, and this thread, everything that is said goes to `own`."""
    token = _own.set(own)
    try:
        yield
    finally:
        _own.reset(token)


def new_console(raw: Mapping[str, Any]) -> Console:
    """For a command that begins, from what stands on the command line."""
    global _console
    _console.close()
    _console = Console(raw)
    return _console


def begin(settings: "Settings") -> None:
    """A verb that does work begins. A log file that can't be written becomes one of the settings' problems."""
    c = console()
    c.json, c.quiet = settings["json"], settings["quiet"]
    c.verbose, c.color = settings.values.get("verbose", False), settings["color"]
    path = settings["log_file"]
    if path:
        try:
            if any(_same(path, settings.values.get(key)) for key in ("output", "preview_path")):
                raise ValueError("it is also the file of --output or --preview-path")
            c.open_log(path, settings.verb)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            settings.problems.add(f"--log-file {path} can't be written: {why}; name another file")
    c.start(settings.verb)


def _same(path: str, other: str | None) -> bool:
    return other is not None and os.path.realpath(path) == os.path.realpath(other)
