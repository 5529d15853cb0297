"""What a journal and a plan say together: which jobs are done, and how the others go on."""

import fnmatch
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sdsage._parts import orphans
from sdsage.batch.journal import ASIDE, DONE, FAILED, FOLDER, RUNNING, WAITING, WORK, Journal, Row
from sdsage.batch.places import is_whole, whole
from sdsage.batch.plan import Job, Plan, check_distinct, relative
from sdsage.batch.sheet import poster
from sdsage.cli.keeping import checkpoint_path
from sdsage.errors import BadRequest
from sdsage.media import naming

_SHOWN = 20  # lines of one kind of problem
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


class Shelf(Protocol):
    """Where the outputs are. Names are seen from the folder of the batch."""

    def stamp(self, name: str) -> list[Any] | None:
        """What is there, so that it can be told from what was there before."""

    def is_whole(self, entry: list[Any]) -> bool:
        """Whether a recorded file is there as it was recorded."""

    def entry(self, name: str) -> list[Any]:
        """What is to be recorded of a file."""

    def recorded(self, files: list[list[Any]]) -> list[list[Any]]:
        """The same of the files of an outcome."""

    def poster(self, name: str) -> bytes | None: ...


class Disk:
    """The folder itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def stamp(self, name: str) -> list[Any] | None:
        """Bytes, time and inode."""
        try:
            found = os.stat(self._folder / name)
        except OSError:
            return None
        return [found.st_size, found.st_mtime_ns, found.st_ino]

    def is_whole(self, entry: list[Any]) -> bool:
        return is_whole(self._folder, entry)

    def entry(self, name: str) -> list[Any]:
        return [name, *whole(self._folder / name)[1:]]

    def recorded(self, files: list[list[Any]]) -> list[list[Any]]:
        return [[relative(path, self._folder), *rest] for path, *rest in files]

    def poster(self, name: str) -> bytes | None:
        return poster(self._folder / name)


@dataclass
class State:
    """A plan beside its journal.

    Attributes:
        rows: of all jobs of the plan, by key.
        redone: outputs that were recorded, and are missing or damaged now.
        adopted: jobs that were done, but for a word in the journal.
    """

    plan: Plan
    rows: dict[str, Row]
    shelf: Shelf
    redone: list[str] = field(default_factory=list)
    adopted: list[Row] = field(default_factory=list)

    def row(self, job: Job) -> Row:
        return self.rows[job.key]

    def count(self, *states: str) -> int:
        return sum(row.state in states for row in self.rows.values())

    def todo(self, only: str | None = None, limit: int | None = None, retry_failed: bool = False) -> list[Job]:
        """The jobs to run now, in their order. Raises BadRequest for an `only` that names none."""
        chosen = select(self.plan.jobs, only) if only else self.plan.jobs
        states = {WAITING, RUNNING} | ({FAILED, ASIDE} if retry_failed else set())
        found = self.plan.ordered(job for job in chosen if self.row(job).state in states)
        return found[:limit]


def settle(plan: Plan, known: Mapping[str, Row], overwrite: bool, shelf: Shelf) -> State:
    """Gives each job its row, its seed and its output; looks at what is there, and writes nothing.

    Raises:
        BadRequest: two jobs would write one file, or one would replace a file that is not its own.
    """
    state = State(plan, {}, shelf)
    date = time.strftime("%Y-%m-%d")
    conflicts = []
    for job in plan.jobs:
        row = known.get(job.key)
        if row is None:
            seed = secrets.randbits(31) if job.seed is None else job.seed
            name = relative(job.name(seed, date), plan.folder)
            row = Row(job.key, job.number, job.wanted.verb, job.model, name, seed, job.wanted.options, kind=job.kind)
        row.number, row.model, row.kind = job.number, job.model, job.kind
        job.seed, job.output = row.seed, os.path.normpath(os.path.join(plan.folder, row.output))
        state.rows[job.key] = row
        job.overwrite = False
        settled = _look(job, row, state)
        job.overwrite = job.overwrite or overwrite or bool(job.wanted.raw.get("overwrite"))
        if not settled and not job.overwrite and any(shelf.stamp(name) for name in names_of(job, plan)):
            conflicts.append(f"{job.output} ({job.wanted.where})")
    check_distinct(plan.jobs)
    if conflicts:
        shown = "\n".join(f"output {name} exists, and is not of this job as it is now" for name in conflicts[:_SHOWN])
        more = f"\nand {len(conflicts) - _SHOWN} more" if conflicts[_SHOWN:] else ""
        raise BadRequest(f"{shown}{more}: choose other names, move the files away, or replace them (--overwrite)")
    return state


def names_of(job: Job, plan: Plan) -> list[str]:
    """Its files, as they are seen from the folder of the batch."""
    return [relative(path, plan.folder) for path in job.paths]


def _look(job: Job, row: Row, state: State) -> bool:
    """Whether the job is done, or will be when it is adopted."""
    names = names_of(job, state.plan)
    if row.state == DONE:
        if all(map(state.shelf.is_whole, row.files)):
            return True
        state.redone.append(job.output)
        row.state = WAITING
    elif row.state == RUNNING:
        there = [found for found in map(state.shelf.stamp, names) if found]
        if len(names) == 1 and there and there[0] != row.before:  # it got its name when it was whole
            state.adopted.append(row)
            return True
        if len(names) > 1 and there and row.before is None:
            job.overwrite = True  # some of its frames
    if row.files:  # from the time when it was done
        job.overwrite = True
    return False


def adopt(state: State, journal: Journal) -> None:
    """Takes in what was written by a run that was killed before it could say so."""
    for row in state.adopted:
        row.files, row.state, row.message = [state.shelf.entry(row.output)], DONE, ""
        row.ended = time.time()
        journal.ended(row, state.shelf.poster(row.output))


def tidy(state: State, shared: bool) -> None:
    """Removes what killed runs have left: unfinished files, and checkpoints of jobs that are done."""
    for job in state.plan.jobs:
        if state.row(job).state == DONE:
            checkpoint_of(job).unlink(missing_ok=True)
            shutil.rmtree(state.plan.folder / FOLDER / WORK / job.key, ignore_errors=True)
    if not shared:
        for folder in {path.parent for job in state.plan.jobs for path in job.paths[:1]}:
            for path in orphans(folder):
                path.unlink(missing_ok=True)


def checkpoint_of(job: Job) -> Path:
    """Where the command line keeps the work of this output."""
    return checkpoint_path(naming.literal(job.output))


def select(jobs: Iterable[Job], only: str) -> list[Job]:
    """Jobs by number ("3,7-9") or by a pattern of their output's name.

    Raises:
        BadRequest: there is none.
    """
    found: dict[int, Job] = {}
    everyone = list(jobs)
    for word in filter(None, (part.strip() for part in only.split(","))):
        match = _RANGE.fullmatch(word)
        if match:
            first, last = int(match.group(1)), int(match.group(2) or match.group(1))
            chosen = [job for job in everyone if first <= job.number <= last]
        else:
            names = ((job, os.path.normpath(job.output)) for job in everyone)
            chosen = [job for job, name in names if fnmatch.fnmatch(name, word) or os.path.basename(name) == word]
        if not chosen:
            raise BadRequest(
                f"--only {word} names no job: there are 1 to {len(everyone)}, or give a pattern of output names"
            )
        found |= {job.number: job for job in chosen}
    return [found[number] for number in sorted(found)]
