"""Batches: many pictures and videos, one load for each model, on all GPUs; stopped and resumed at any time."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from sdsage.batch import journal, plan
from sdsage.batch.journal import Journal, Row
from sdsage.batch.lock import Lock
from sdsage.batch.places import Fixed, Place, Source, local_places
from sdsage.batch.run import Doing, Done, Driver, Event, Limits, Progress, described
from sdsage.batch.state import State, adopt, settle, tidy
from sdsage.errors import BadRequest

__all__ = ["Batch", "Doing", "Done", "Limits", "Place", "Progress", "Row", "described", "local_places"]


class Batch:
    """A list of jobs, checked as a whole when it is made.

    Args:
        jobs: path of a job file (.jsonl, .yaml, .json, .csv), a list of entries, or an object with `jobs`, `defaults`
            and `models`; entries are as in a job file.
        folder: of the journal; None takes the one that all outputs are in.
        on_note: called with a sentence before something that takes seconds.

    Raises:
        BadRequest: with a line for each fault of each entry; nothing was written.
        MissingExtra: sdsage[batch] is not installed.
    """

    def __init__(
        self,
        jobs: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | Mapping[str, Any],
        *,
        folder: str | os.PathLike[str] | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self.plan = plan.make(jobs, folder, on_note)

    @property
    def folder(self) -> Path:
        return self.plan.folder

    def look(self, *, overwrite: bool = False) -> State:
        """The jobs beside what the journal knows of them; writes nothing.

        Raises:
            BadRequest: two jobs would write one file, or one would replace a file that is not its own.
        """
        try:
            known = {row.key: row for row in journal.read(self.folder)}
        except FileNotFoundError:
            known = {}
        return settle(self.plan, known, overwrite)

    def run(
        self,
        *,
        on_result: Callable[[dict[str, Any]], None] | None = None,
        on_event: Callable[[Event], None] | None = None,
        watch: Callable[[Progress], None] | None = None,
        gpus: Sequence[int] = (),
        cpu_workers: int | None = None,
        ray: str | None = None,
        places: Sequence[Place] | None = None,
        only: str | None = None,
        limit: int | None = None,
        max_failures: int | None = None,
        retry_failed: bool = False,
        overwrite: bool = False,
    ) -> Done:
        """Makes what is not there yet. A job that fails is written down, and the next one runs.

        Args:
            on_result: called with each job that is done, has failed or was set aside, as in results.jsonl.
            on_event: called with every event of docs/json.md.
            watch: called with the progress when it begins.
            gpus, cpu_workers, ray: as on the command line; `places` in their stead.
            only, limit, max_failures, retry_failed, overwrite: as on the command line.

        Raises:
            BadRequest: another batch works on the folder; outputs are in the way.
            KeyboardInterrupt: Ctrl-C; the journal knows all that was done.
        """
        self.look(overwrite=overwrite).todo(only)  # whatever is wrong is said before anything is written or started
        if ray is not None and (gpus or places is not None):
            raise BadRequest("--ray takes the GPUs that the nodes have given to Ray: leave --gpus out")
        tell = on_event or (lambda event: None)
        with ExitStack() as stack:
            source: Source
            if ray is not None:
                from sdsage.batch.cluster import Cluster

                source = stack.enter_context(closing(Cluster(ray, cpu_workers, self.folder, tell)))
            else:
                source = Fixed(local_places(gpus, cpu_workers) if places is None else places)
            shared = journal.is_shared(self.folder)
            lock = Lock(self.folder, shared=shared)
            stack.callback(lock.release)
            if shared:
                text = f"{self.folder} is on a file system that several machines share: the journal is kept without WAL"
                tell({"event": "warning", "text": text})
            book = stack.enter_context(closing(Journal(self.folder, shared=shared)))
            state = settle(self.plan, book.rows(), overwrite)
            adopt(state, book)
            tidy(state, shared)
            for name in state.redone:
                tell({"event": "note", "text": f"{name} is missing or damaged, and is made again"})
            for row in state.adopted:
                tell({"event": "note", "text": f"{row.output} was finished by the run before"})
            book.begin(state.rows.values())
            on_row = None if on_result is None else (lambda row: on_result(described(self.folder, row)))
            driver = Driver(state, source, book, lock, tell, on_row)
            if watch is not None:
                watch(driver.progress)
            done = driver.run(Limits(only, limit, max_failures, retry_failed))
        if done.stopped:
            raise KeyboardInterrupt
        return done


def status(folder: str | os.PathLike[str]) -> list[Row]:
    """The jobs of the last run in a folder, from its journal.

    Raises:
        BadRequest: there is no batch in it.
    """
    try:
        return [row for row in journal.read(Path(folder)) if row.number is not None]
    except FileNotFoundError:
        raise BadRequest(
            f"there is no batch in {os.fspath(folder)}: name the folder of its outputs, or that of --folder"
        ) from None
