"""Runs a batch: hands jobs to places, and writes down what became of them. The engine is in the places."""

import contextlib
import json
import os
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdsage.batch import sheet
from sdsage.batch.journal import ASIDE, DONE, FAILED, RUNNING, WAITING, Journal, Row, outputs_of
from sdsage.batch.lock import Lock
from sdsage.batch.places import CRASHED, LOST, STOPPED, Outcome, Place, Source, Task
from sdsage.batch.places import DONE as MADE
from sdsage.batch.plan import Job
from sdsage.batch.schedule import Queue
from sdsage.batch.state import State, names_of
from sdsage.cli.app import explained
from sdsage.cli.console import as_json
from sdsage.errors import SdsageError
from sdsage.latents import write_whole

RESULTS = "results.jsonl"
MOST_CRASHES = 2  # of one job
_TICK = 0.25  # seconds between two looks at the clock while nothing happens
_LOOK = 2.0  # seconds between two looks for new places
Event = Mapping[str, Any]


@dataclass
class Doing:
    """What a place does. `seconds_left`: of the sampling; None when nobody knows."""

    worker: str
    model: str = ""
    job: int | None = None
    output: str = ""
    stage: str = ""
    step: int = 0
    steps: int = 0
    seconds_left: float | None = None
    since: float = 0.0


@dataclass
class Progress:
    """How far a batch is; what the watchers see.

    Attributes:
        total, done, failed, left: jobs of the whole job file; jobs that were set aside count as failed.
        seconds_left: of the whole batch, from jobs of the same kind that are done; None when nobody knows.
        loads: models that were loaded in this run.
    """

    workers: list[Doing]
    total: int = 0
    done: int = 0
    failed: int = 0
    left: int = 0
    seconds_left: float | None = None
    loads: int = 0


@dataclass(frozen=True)
class Limits:
    """What ends a run before its time."""

    only: str | None = None
    limit: int | None = None
    max_failures: int | None = None
    retry_failed: bool = False


@dataclass
class Done:
    """How a run ended.

    Attributes:
        ran: rows of the jobs that were tried, in the order of their ends.
        stopped: by Ctrl-C.
    """

    folder: Path
    progress: Progress
    rows: list[Row]
    ran: list[Row] = field(default_factory=list)
    stopped: bool = False
    sheet: Path | None = None


class Tally:
    """Jobs by state, and what is left by kind. A job is removed before it changes, and added again."""

    def __init__(self) -> None:
        self.states: Counter[str] = Counter()
        self._left: Counter[str] = Counter()
        self._known: dict[str, tuple[float, int]] = {}  # kind -> seconds of jobs that are done, and their number

    def add(self, row: Row, by: int = 1) -> None:
        self.states[row.state] += by
        if row.state in (WAITING, RUNNING):
            self._left[row.kind] += by
        elif row.state == DONE and row.seconds:
            seconds, count = self._known.get(row.kind, (0.0, 0))
            self._known[row.kind] = seconds + by * row.seconds, count + by

    def remove(self, row: Row) -> None:
        self.add(row, -1)

    def seconds_left(self) -> float | None:
        """Of all jobs that are left; None when there are none, or none of some kind is done."""
        left = {kind: count for kind, count in self._left.items() if count}
        if not left or not all(self._known.get(kind, (0.0, 0))[1] for kind in left):
            return None
        return sum(count * self._known[kind][0] / self._known[kind][1] for kind, count in left.items())


class Driver:
    """One run of a batch, from the first job to the last."""

    def __init__(
        self,
        state: State,
        source: Source,
        journal: Journal,
        lock: Lock,
        on_event: Callable[[Event], None],
        on_result: Callable[[Row], None] | None = None,
    ) -> None:
        self._state, self._source, self._journal, self._lock = state, source, journal, lock
        self._tell, self._on_result = on_event, on_result
        self._where = outputs_of(state.plan.folder)
        self._events: queue.SimpleQueue[tuple[str, str, Any]] = queue.SimpleQueue()
        self._places: dict[str, Place] = {}
        self._inboxes: dict[str, queue.SimpleQueue[Task | None]] = {}
        self._threads: list[threading.Thread] = []
        self._busy: dict[str, Job] = {}
        self._free: dict[str, None] = {}  # names of places, in order
        self._doing: dict[str, Doing] = {}
        self._looked = -_LOOK
        self._tally = Tally()
        self._stop = 0  # how often somebody asked
        self._failures = 0
        self.progress = Progress([])
        self.done = Done(state.plan.folder, self.progress, [])

    def run(self, limits: Limits) -> Done:
        """Returns when all is done that can be, or when it was stopped."""
        todo = self._state.todo(limits.only, limits.limit, limits.retry_failed)
        for job in todo:
            row = self._state.row(job)
            if row.state in (FAILED, ASIDE):
                row.crashes, row.memory, row.state = 0, {}, WAITING
        self._waiting = Queue(todo)
        for row in self._state.rows.values():
            self._tally.add(row)
        self._count()
        results = self._state.plan.folder / RESULTS
        self._write_results(results)
        try:
            with self._hearing_interrupts(), open(results, "a", encoding="utf-8") as self._results:
                self._drive(limits)
        finally:
            self._end()
        self.done.rows = list(self._state.rows.values())
        self._write_results(results)
        self.done.stopped = self._stop > 0
        if not self.done.stopped:
            self.done.sheet = sheet.write(self._state.plan.folder, self.done.rows, self._journal.poster)
        return self.done

    # ---- the thread of a place

    def _work(self, place: Place) -> None:
        while (task := self._inboxes[place.name].get()) is not None:
            number = task.number

            def tell(event: str, fields: Mapping[str, Any], number: int = number) -> None:
                self._events.put((place.name, event, {"job": number, **fields}))

            try:
                outcome = place.run(task, tell)
            except Exception as error:  # a fault of the place must not leave the batch waiting
                outcome = Outcome(FAILED, explained(error)[0])
            self._events.put((place.name, "", outcome))

    # ---- the thread of the batch

    def _drive(self, limits: Limits) -> None:
        while True:
            goes_on = not self._stop and (limits.max_failures is None or self._failures < limits.max_failures)
            if goes_on:
                self._look_for_places()
                self._hand_out()
            if not self._busy and not (goes_on and self._waiting):
                return
            with suppress(queue.Empty):
                name, event, what = self._events.get(timeout=_TICK)
                if event:
                    self._heard(name, event, what)
                else:
                    self._finished(name, what)
            self._show()
            if self._stop > 1:
                return

    def _look_for_places(self) -> None:
        if not self._waiting or (self._places and time.monotonic() - self._looked < _LOOK):
            return
        self._looked = time.monotonic()
        found = self._source.fresh()
        if found is None and not self._places:
            raise SdsageError(f"no place to work at is left, and {len(self._waiting)} jobs are: give the command again")
        for place in found or ():
            name = place.name
            self._places[name], self._inboxes[name] = place, queue.SimpleQueue()
            self._free[name], self._doing[name] = None, Doing(name)
            self._threads.append(threading.Thread(target=self._work, args=(place,), daemon=True))
            self._threads[-1].start()
        self.progress.workers = list(self._doing.values())

    def _lost(self, name: str) -> None:
        """The place is gone."""
        self._inboxes.pop(name).put(None)
        self._places.pop(name).close()
        del self._doing[name], self._free[name]
        self._waiting.forget(name)
        self.progress.workers = list(self._doing.values())

    def _hand_out(self) -> None:
        for name in list(self._free):
            job = self._waiting.take(name)
            if job is None:
                return
            del self._free[name]
            row = self._state.row(job)
            self._tally.remove(row)
            row.state, row.worker, row.began, row.message = RUNNING, name, time.time(), ""
            self._tally.add(row)
            row.attempts += 1
            row.before = self._state.shelf.stamp(names_of(job, self._state.plan)[0])
            self._journal.put([row])
            self._busy[name] = job
            doing = self._doing[name]
            doing.model, doing.job, doing.output, doing.since = job.model, job.number, job.output, row.began
            doing.stage, doing.step, doing.steps, doing.seconds_left = "start", 0, 0, None
            fields = {"job": job.number, "output": job.output, "worker": name, "state": RUNNING}
            self._tell({"event": "job", **fields, "model": job.model, "attempt": row.attempts})
            self._inboxes[name].put(self._task(job, row))

    def _task(self, job: Job, row: Row) -> Task:
        raw = {**job.wanted.raw, **row.memory, "seed": str(row.seed)}
        if job.overwrite:
            raw["overwrite"] = True
        return Task(job.number, job.key, job.wanted.verb, raw, job.output, job.models, row.attempts > 1)

    def _heard(self, name: str, event: str, fields: Mapping[str, Any]) -> None:
        doing = self._doing[name]
        if event in ("stage", "step"):
            doing.stage = fields["stage"]
            doing.step, doing.steps = fields.get("overall_step", fields.get("step", 0)), fields["steps"]
            doing.steps = fields.get("overall_steps", doing.steps)
            doing.seconds_left = fields.get("seconds_left") if event == "step" else None
        self._tell({"event": event, "worker": name, **fields})

    def _finished(self, name: str, outcome: Outcome) -> None:
        job = self._busy.pop(name)
        self._free[name] = None
        row = self._state.row(job)
        row.ended = time.time()
        self.progress.loads += outcome.loaded
        self._tally.remove(row)
        self._judge(row, outcome)
        self._tally.add(row)
        self._journal.ended(row, outcome.poster)
        doing = self._doing[name]
        doing.job, doing.stage, doing.seconds_left = None, "", None
        if outcome.state == LOST:
            self._lost(name)
        self._count()
        again = row.state == WAITING
        if again and outcome.state != STOPPED:
            self._waiting.put_back(job)
        fields = {"job": job.number, "output": job.output, "worker": name, "state": row.state, "text": row.message}
        counts = {"done": self.progress.done, "failed": self.progress.failed, "left": self.progress.left}
        self._tell({"event": "job", **fields, "files": self._names(row), "seconds": round(row.seconds, 3), **counts})
        if not again:
            self.done.ran.append(row)
            print(_line(self._where, row), file=self._results, flush=True)
            if self._on_result is not None:
                self._on_result(row)

    def _judge(self, row: Row, outcome: Outcome) -> None:
        row.message = outcome.message
        if outcome.state == MADE:
            row.files = self._state.shelf.recorded(outcome.files)
            row.state, row.summary, row.seconds = DONE, as_json(outcome.summary), outcome.seconds
            return
        if outcome.state in (STOPPED, LOST):
            row.state = WAITING
            return
        row.crashes += outcome.state == CRASHED
        if outcome.memory and not row.memory:
            row.memory, row.state = outcome.memory, WAITING
        elif outcome.state == CRASHED and row.crashes < MOST_CRASHES:
            row.state = WAITING
        else:
            row.state = ASIDE if outcome.state == CRASHED else FAILED
            self._failures += 1

    def _names(self, row: Row) -> list[str]:
        return [address(self._where, name) for name, *_ in row.files]

    def _count(self) -> None:
        p, states = self.progress, self._tally.states
        p.total, p.done, p.failed = len(self._state.rows), states[DONE], states[FAILED] + states[ASIDE]
        p.left = p.total - p.done - p.failed
        seconds = self._tally.seconds_left()
        p.seconds_left = None if seconds is None else seconds / max(1, len(self._places))

    def _show(self) -> None:
        self._lock.live(self._seen)

    def _seen(self) -> dict[str, Any]:
        fields = {**vars(self.progress), "workers": [vars(doing) for doing in self.progress.workers]}
        return {**fields, "updated": time.time()}

    def _write_results(self, path: Path) -> None:
        rows = sorted(self._state.rows.values(), key=lambda row: row.number or 0)
        over = (row for row in rows if row.state not in (WAITING, RUNNING))
        lines = "".join(f"{_line(self._where, row)}\n" for row in over)
        write_whole(path, [lines.encode()])

    # ---- the end

    @contextlib.contextmanager
    def _hearing_interrupts(self) -> Iterator[None]:
        """Ctrl-C stops the jobs where they are; a second one does not wait for files that are being written."""

        def hear(number: int, frame: Any) -> None:
            self._stop += 1
            if self._stop == 1:
                for place in list(self._places.values()):
                    threading.Thread(target=place.stop, daemon=True).start()

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, hear)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _end(self) -> None:
        if self._busy:  # an error of ours, or a second Ctrl-C
            for place in self._places.values():
                place.stop()
        for name in self._places:
            self._inboxes[name].put(None)
        if self._stop < 2:
            for thread in self._threads:
                thread.join()
        for place in self._places.values():
            place.close()


def _line(where: str, row: Row) -> str:
    """A job as a line of results.jsonl."""
    return as_json(described(where, row))


def address(where: str, name: str) -> str:
    """A file of the batch, in its folder or its storage."""
    return f"{where}/{name}" if "://" in where else os.path.join(where, name)


def described(where: str, row: Row) -> dict[str, Any]:
    """A job as plain values: for results.jsonl, `sdsage batch status --json` and Python."""
    return {
        "job": row.number,
        "key": row.key,
        "state": row.state,
        "mode": row.verb,
        "model": row.model,
        "output": address(where, row.output),
        "files": [{"file": address(where, n), "bytes": size, "sha256": sha} for n, size, sha, *_ in row.files],
        "seed": row.seed,
        "options": row.options,
        "message": row.message,
        "attempts": row.attempts,
        "crashes": row.crashes,
        "memory": row.memory,
        "worker": row.worker,
        "began": row.began,
        "ended": row.ended,
        "seconds": round(row.seconds, 3),
        "summary": json.loads(row.summary),
    }
