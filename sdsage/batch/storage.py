"""Outputs in a storage that fsspec reaches, such as an object store; the journal stays here, and is copied there."""

import hashlib
import json
import os
import secrets
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from sdsage._parts import alive
from sdsage.batch.journal import FOLDER, NAME, STORAGE, WORK
from sdsage.batch.lock import Busy
from sdsage.batch.places import DONE, FAILED, LocalPlace, Outcome, Task, Tell
from sdsage.batch.scratch import Scratch, Sent, parted
from sdsage.cli.app import explained
from sdsage.errors import BadRequest, MissingExtra, OutputError, SdsageError

BEAT = 60.0  # seconds between two copies of the journal, which are signs of life
STALE = 3 * BEAT
# What tells one version of a file from another, by the words of the file systems: the best first.
_VERSIONS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "generation",
    "mtime",
    "LastModified",
    "last_modified",
    "created",
)
_CHUNK = 1 << 20
_PARTS, _DRIVER = f"{FOLDER}/parts", f"{FOLDER}/driver.json"


class Storage:
    """A folder in it, which goes to other machines as its address alone.

    Raises:
        BadRequest: there is no such kind of storage, or it can't be reached.
        MissingExtra: fsspec, or what it needs for this kind, is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._known: dict[str, list[Any]] = {}

    def __reduce__(self) -> Any:
        return Storage, (self.url,)

    @cached_property
    def _place(self) -> tuple[Any, str]:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise MissingExtra(
                "--storage needs fsspec, which is not installed: pip install 'sdsage[storage]'"
            ) from None
        try:
            fs, root = url_to_fs(self.url, use_listings_cache=False)
        except ImportError as error:
            raise MissingExtra(f"--storage {self.url}: {error}") from None
        except ValueError as error:
            raise BadRequest(f"--storage {self.url}: {error}; it takes an address such as s3://bucket/folder") from None
        return fs, str(root).rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._place[1]}/{name}"

    @contextmanager
    def _doing(self, what: str) -> Iterator[Any]:
        """Errors of the many libraries behind fsspec have no class in common."""
        fs = self._place[0]
        try:
            yield fs
        except SdsageError:
            raise
        except Exception as error:
            text = str(error) or type(error).__name__
            raise OutputError(f"{self.url}: {what} did not work: {text}") from error

    def look(self) -> None:
        """Takes in which files there are. Raises OutputError."""
        with self._doing("listing the files") as fs:
            found = fs.find(self._place[1], detail=True) if fs.exists(self._place[1]) else {}
        top = len(self._place[1]) + 1
        self._known = {path[top:]: _stamp(info) for path, info in found.items()}

    # ---- what State asks

    def stamp(self, name: str) -> list[Any] | None:
        return self._known.get(name.replace(os.sep, "/"))

    def is_whole(self, entry: list[Any]) -> bool:
        """A file of the version that was recorded is not read again."""
        name, size, digest, version = entry
        known = self._known.get(name)
        if known is None or known[0] != size:
            return False
        if known[1] != version:
            if self._digest(name) != digest:
                return False
            entry[3] = known[1]
        return True

    def entry(self, name: str) -> list[Any]:
        size, version = self._known[name]
        return [name, size, self._digest(name), version]

    def poster(self, name: str) -> bytes | None:
        return None

    def recorded(self, files: list[list[Any]]) -> list[list[Any]]:
        return files

    # ---- outputs

    def send(self, path: Path, token: str, name: str) -> None:
        """Brings a file there, under a name that nobody looks at, and reads it again. Raises OutputError."""
        part = f"{_PARTS}/{token}/{name}"
        self._put(path, part)
        with open(path, "rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == self._digest(part)
        if not same:
            raise OutputError(f"{self.url}/{name} did not arrive whole: try again with --retry-failed")

    def deliver(self, token: str, below: str, outcome: Outcome, names: Iterable[str], overwrite: bool) -> None:
        """The files that were sent get their names below the folder `below`, the recorded ones last.

        Raises OutputError.
        """
        recorded = {name: rest for name, *rest in outcome.files}
        files = {}
        for name in sorted(names, key=lambda name: name in recorded):
            whole = os.path.normpath(os.path.join(below, name)).replace(os.sep, "/")
            if whole in self._known and not overwrite:
                raise OutputError(f"{self.url}/{whole} exists: choose another name, or --overwrite")
            target = self._path(whole)
            with self._doing(f"writing {whole}") as fs:
                fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                fs.mv(self._path(f"{_PARTS}/{token}/{name}"), target)
                stamp = _stamp(fs.info(target))
            if name in recorded and recorded[name][0] != stamp[0]:
                raise OutputError(f"{self.url}/{whole} did not arrive whole: {stamp[0]} bytes of {recorded[name][0]}")
            self._known[whole] = stamp
            files[name] = whole
        outcome.files = [[files[name], *rest, self._known[files[name]][1]] for name, rest in recorded.items()]
        outcome.summary["files"] = [f"{self.url}/{files[name]}" for name in recorded]
        outcome.summary["latents"] = [f"{self.url}/{whole}" for name, whole in files.items() if name not in recorded]

    def tidy(self) -> None:
        """Removes what killed runs have left."""
        with self._doing("removing unfinished files") as fs:
            if fs.exists(self._path(_PARTS)):
                fs.rm(self._path(_PARTS), recursive=True)

    def _put(self, path: Path, name: str) -> None:
        target = self._path(name)
        with self._doing(f"writing {name}") as fs:
            fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(path), target)

    def _digest(self, name: str) -> str:
        digest = hashlib.sha256()
        with self._doing(f"reading {name}") as fs, fs.open(self._path(name), "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest()

    # ---- the journal, and who writes it

    def fetch_journal(self, folder: Path) -> bool:
        """Brings its copy to a folder that has none; whether there is one. Raises OutputError."""
        path, name = folder / FOLDER / NAME, f"{FOLDER}/{NAME}"
        with self._doing("reading the journal") as fs:
            if path.exists() or not fs.exists(self._path(name)):
                return False
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            fs.get_file(self._path(name), str(part))
            os.replace(part, path)
        self.remember(folder)
        return True

    def remember(self, folder: Path) -> None:
        """The folder knows where its outputs are."""
        (folder / FOLDER / STORAGE).write_text(self.url, encoding="utf-8")

    def copy(self, folder: Path, *names: str) -> None:
        """The journal as it is now, and files beside it. Raises OutputError."""
        path = folder / FOLDER / "journal.copy"
        path.unlink(missing_ok=True)
        with closing(sqlite3.connect(folder / FOLDER / NAME)) as db, closing(sqlite3.connect(path)) as into:
            db.backup(into)
        self._swap(path, f"{FOLDER}/{NAME}")
        path.unlink()
        for name in names:
            if (folder / name).is_file():
                self._swap(folder / name, name)

    def _swap(self, path: Path, name: str) -> None:
        """Replaces a file by one that is whole."""
        part = f"{_PARTS}/{secrets.token_hex(8)}"
        self._put(path, part)
        with self._doing(f"writing {name}") as fs:
            fs.mv(self._path(part), self._path(name))

    def hold(self, folder: Path) -> None:
        """Raises Busy while a batch of another machine, or of another folder here, writes there."""
        with self._doing("reading who works there") as fs:
            found = json.loads(fs.cat_file(self._path(_DRIVER))) if fs.exists(self._path(_DRIVER)) else {}
        here = found.get("host") == socket.gethostname()
        at_work = (
            alive(found["pid"]) and found["pid"] != os.getpid() if here else time.time() - found.get("seen", 0) < STALE
        )
        if at_work:
            raise Busy(
                f"another batch works on {self.url}: process {found['pid']} on {found['host']}, in {found['folder']}. "
                "Wait for it, or give this one another --storage"
            )
        self.beat(folder)

    def beat(self, folder: Path) -> None:
        """A sign of life."""
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "folder": str(folder.resolve()),
            "seen": time.time(),
        }
        with self._doing("writing who works there") as fs:
            fs.makedirs(self._path(FOLDER), exist_ok=True)
            fs.pipe_file(self._path(_DRIVER), json.dumps(holder).encode())

    def release(self) -> None:
        with suppress(OutputError), self._doing("removing who works there") as fs:
            fs.rm_file(self._path(_DRIVER))


def _stamp(info: Mapping[str, Any]) -> list[Any]:
    """Bytes and version of a file."""
    return [info["size"], next((f"{info[key]}".strip('"') for key in _VERSIONS if info.get(key)), "")]


class Copies:
    """Copies the journal regularly, in a `with` block, and at its end with what else is to lie beside the outputs."""

    def __init__(
        self, storage: Storage, folder: Path, tell: Callable[[Mapping[str, Any]], None], names: tuple[str, ...]
    ) -> None:
        self._storage, self._folder, self._tell, self._names = storage, folder, tell, names
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        wait = BEAT
        while not self._end.wait(wait):
            begun = time.monotonic()
            try:
                self._storage.beat(self._folder)
                self._storage.copy(self._folder)
            except SdsageError as error:
                self._tell({"event": "warning", "text": f"the journal was not copied, and will be later: {error}"})
            wait = max(BEAT, 10 * (time.monotonic() - begun))  # a large journal, or a slow network

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
        self._storage.copy(self._folder, *self._names)


class Shipment:
    """The files of one job, which lie in the storage already."""

    def __init__(self, storage: Storage, below: str, overwrite: bool, token: str) -> None:
        self._storage, self._below, self._overwrite, self._token = storage, below, overwrite, token
        self._names: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """What was not delivered goes when the batch is run again."""

    def take(self, name: str, chunk: bytes) -> None:
        self._names.append(name)

    def finish(self, outcome: Outcome) -> None:
        self._storage.deliver(self._token, self._below, outcome, self._names, self._overwrite)


class StoredPlace:
    """A worker process of this machine whose outputs go to a storage."""

    def __init__(self, place: LocalPlace, storage: Storage, folder: Path) -> None:
        self.name = place.name
        self._place, self._storage, self._folder = place, storage, folder
        self._scratch = Scratch(place, folder / FOLDER / WORK)

    def run(self, task: Task, tell: Tell) -> Outcome:
        above, below = parted(task.output)
        sent = Sent(task.moved(below), token=secrets.token_hex(8))
        outcome = self._scratch.run(sent, tell)
        if outcome.state != DONE:
            return outcome
        try:
            above = os.path.relpath(above or ".", self._folder)
            shipment = Shipment(self._storage, above, bool(task.raw.get("overwrite")), sent.token)
            for name, path in self._scratch.written(task):
                self._storage.send(path, sent.token, name)
                shipment.take(name, b"")
            shipment.finish(outcome)
        except SdsageError as error:
            return Outcome(FAILED, explained(error)[0])
        self._scratch.remove(task)
        return outcome

    def stop(self) -> None:
        self._place.stop()

    def close(self) -> None:
        self._place.close()
