"""Batches: many pictures and videos, one load for each model, on all GPUs; stopped and resumed at any time."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from sdsage.batch import journal, plan
from sdsage.batch.journal import Journal, Row
from sdsage.batch.lock import Lock
from sdsage.batch.places import Fixed, LocalPlace, Place, Source, local_places
from sdsage.batch.run import RESULTS, Doing, Done, Driver, Event, Limits, Progress, described
from sdsage.batch.sheet import NAME as SHEET
from sdsage.batch.state import Disk, State, adopt, settle, tidy
from sdsage.batch.storage import Copies, Storage, StoredPlace
from sdsage.errors import BadRequest

__all__ = ["Batch", "Doing", "Done", "Limits", "Place", "Progress", "Row", "described", "local_places"]


class Batch:
    """A list of jobs, checked as a whole when it is made.

    Args:
        jobs: path of a job file (.jsonl, .yaml, .json, .csv), a list of entries, or an object with `jobs`, `defaults`
            and `models`; entries are as in a job file.
        folder: of the journal; None takes the one that all outputs are in.
        storage: address of the storage that outputs go to, as they lie below `folder`.
        on_note: called with a sentence before something that takes seconds.

    Raises:
        BadRequest: with a line for each fault of each entry; nothing was written.
        MissingExtra: sdsage[batch], or with `storage` sdsage[storage], is not installed.
    """

    def __init__(
        self,
        jobs: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | Mapping[str, Any],
        *,
        folder: str | os.PathLike[str] | None = None,
        storage: str | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self.plan = plan.make(jobs, folder, on_note)
        self.storage = Storage(storage) if storage is not None else None

    @property
    def folder(self) -> Path:
        return self.plan.folder

    def look(self, *, overwrite: bool = False) -> State:
        """The jobs beside what the journal knows of them; writes nothing.

        Raises:
            BadRequest: two jobs would write one file, or one would replace a file that is not its own.
        """
        with tempfile.TemporaryDirectory() as copy:
            fetched = self.storage is not None and not (self.folder / journal.FOLDER / journal.NAME).exists()
            if fetched and self.storage is not None:
                self.storage.fetch_journal(Path(copy))
            try:
                known = {row.key: row for row in journal.read(Path(copy) if fetched else self.folder)}
            except FileNotFoundError:
                known = {}
        return self._settled(known, overwrite)

    def _settled(self, known: Mapping[str, Row], overwrite: bool) -> State:
        where = str(self.folder) if self.storage is None else self.storage.url
        begun = known and (self.folder / journal.FOLDER / journal.NAME).exists()
        before = journal.outputs_of(self.folder) if begun else where
        if before != where:
            raise BadRequest(
                f"the outputs of the batch in {self.folder} are in {before}, and not in {where}: give --storage as "
                "before, or another --folder"
            )
        if self.storage is None:
            return settle(self.plan, known, overwrite, Disk(self.folder))
        self.storage.look()
        state = settle(self.plan, known, overwrite, self.storage)
        outside = [
            row.output for row in state.rows.values() if os.path.isabs(row.output) or row.output.startswith("..")
        ]
        if outside:
            raise BadRequest(
                f"output {outside[0]} is not below {self.folder}, and has no place in {where}: name a --folder that "
                "all outputs are in"
            )
        return state

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

                source = stack.enter_context(closing(Cluster(ray, cpu_workers, self.folder, tell, self.storage)))
            elif places is None:
                source = Fixed([self._stored(place) for place in local_places(gpus, cpu_workers)])
            else:
                source = Fixed(places)
            shared = journal.is_shared(self.folder)
            lock = Lock(self.folder, shared=shared)
            stack.callback(lock.release)
            if shared:
                text = f"{self.folder} is on a file system that several machines share: the journal is kept without WAL"
                tell({"event": "warning", "text": text})
            if self.storage is not None:
                self.storage.hold(self.folder)
                stack.callback(self.storage.release)
                if self.storage.fetch_journal(self.folder):
                    tell({"event": "note", "text": f"the journal comes from {self.storage.url}"})
            book = stack.enter_context(closing(Journal(self.folder, shared=shared)))
            state = self._settled(book.rows(), overwrite)
            if self.storage is not None:
                self.storage.remember(self.folder)
            adopt(state, book)
            tidy(state, shared)
            if self.storage is not None:
                self.storage.tidy()
                stack.enter_context(Copies(self.storage, self.folder, tell, (RESULTS, SHEET)))
            for name in state.redone:
                tell({"event": "note", "text": f"{name} is missing or damaged, and is made again"})
            for row in state.adopted:
                tell({"event": "note", "text": f"{row.output} was finished by the run before"})
            book.begin(state.rows.values())
            where = journal.outputs_of(self.folder)
            on_row = None if on_result is None else (lambda row: on_result(described(where, row)))
            driver = Driver(state, source, book, lock, tell, on_row)
            if watch is not None:
                watch(driver.progress)
            done = driver.run(Limits(only, limit, max_failures, retry_failed))
        if done.stopped:
            raise KeyboardInterrupt
        return done

    def _stored(self, place: LocalPlace) -> Place:
        return place if self.storage is None else StoredPlace(place, self.storage, self.folder)


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
