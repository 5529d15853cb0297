"""What a batch has done: a SQLite file beside the outputs, written by one process, whole at any moment."""

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from sdsage.errors import SdsageError

FOLDER = ".sdsage-batch"  # in the folder of the outputs
NAME = "journal.sqlite"
WORK = "work"  # outputs that are not in the storage yet
STORAGE = "storage"  # its address, when outputs go to one
FORMAT = 1
# A job waits until it is done; a running one was interrupted when nobody works at it. "aside": it crashed twice.
WAITING, RUNNING, DONE, FAILED, ASIDE = "waiting", "running", "done", "failed", "aside"
# File systems that several machines share: SQLite's shared memory does not reach the others.
SHARED = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs",
          "glusterfs", "virtiofs", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.gcsfuse",
          "fuse.rclone", "fuse.juicefs"}  # fmt: skip


@dataclass
class Row:
    """A job in the journal.

    Attributes:
        number: in the job file of the last run; None when it is not in that any more.
        output: name below the folder of the batch.
        seed: the real one.
        files: name, bytes and SHA-256 of each, when it is done.
        before: what was at the place of the output when the job began: bytes, time and inode, or None.
        crashes: how often its worker process died.
        memory: options that were added because memory did not suffice.
        kind: jobs of one kind take about the same time.
        seconds: that it took, loading left out.
        summary: what `sdsage vid-gen --json` says at its end, as JSON.
    """

    key: str
    number: int | None
    verb: str
    model: str
    output: str
    seed: int
    options: dict[str, Any]
    state: str = WAITING
    message: str = ""
    files: list[list[Any]] = field(default_factory=list)
    before: list[int] | None = None
    attempts: int = 0
    crashes: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    kind: str = ""
    worker: str = ""
    began: float = 0.0
    ended: float = 0.0
    seconds: float = 0.0
    summary: str = "{}"


_JSON = {"options", "files", "before", "memory"}
_NAMES = [f.name for f in fields(Row)]
_TABLES = f"""
CREATE TABLE jobs ({", ".join(f"{name} PRIMARY KEY" if name == "key" else name for name in _NAMES)}) WITHOUT ROWID;
CREATE TABLE attempts (key, began REAL, ended REAL, worker, state, message, memory);
CREATE TABLE posters (key PRIMARY KEY, jpeg BLOB) WITHOUT ROWID;
"""
_PUT = f"INSERT OR REPLACE INTO jobs ({', '.join(_NAMES)}) VALUES ({', '.join('?' * len(_NAMES))})"


def file_system(path: Path, table: str | None = None) -> str:
    """The type of the file system that holds `path`, or will; "" when nobody tells. `table`: as in mountinfo."""
    if table is None:
        try:
            table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return ""
    real = os.path.realpath(path)
    best, found = -1, ""
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        words = before.split(" ")
        if len(words) < 5 or not after:
            continue
        mount = words[4].encode().decode("unicode_escape")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= best:  # a later one lies on top
            best, found = len(mount), after.split(" ")[0]
    return found


def is_shared(path: Path) -> bool:
    return file_system(path) in SHARED


class Journal:
    """The journal of a folder, for one thread.

    Raises:
        SdsageError: it is damaged, or of another version.
    """

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        """Opens it, or makes it; the folder is there. `shared`: without the memory that other machines can't see."""
        self.path = folder / FOLDER / NAME
        self._db = sqlite3.connect(self.path, isolation_level=None, timeout=30)
        try:
            self._db.execute(f"PRAGMA journal_mode={'DELETE' if shared else 'WAL'}")
            self._db.execute("PRAGMA synchronous=FULL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={FORMAT}; COMMIT;")
            _check(self.path, version or FORMAT)
        except sqlite3.Error as error:
            self._db.close()
            raise damaged(self.path, error) from None
        except BaseException:
            self._db.close()
            raise

    def rows(self) -> dict[str, Row]:
        return {row.key: row for row in _read(self._db)}

    def put(self, rows: Iterable[Row]) -> None:
        """All of them, or after a power cut none."""
        with self._all_or_nothing():
            self._db.executemany(_PUT, map(_plain, rows))

    def begin(self, rows: Iterable[Row]) -> None:
        """The jobs of a run; those of other job files stay, without a number."""
        with self._all_or_nothing():
            self._db.execute("UPDATE jobs SET number = NULL")
            self._db.executemany(_PUT, map(_plain, rows))

    def ended(self, row: Row, poster: bytes | None = None) -> None:
        """An attempt is over: the job as it is now, a line in the history, and a small picture of the result (JPEG)."""
        with self._all_or_nothing():
            self._db.execute(_PUT, _plain(row))
            self._db.execute("INSERT OR REPLACE INTO posters VALUES (?, ?)", (row.key, poster))
            values = (row.key, row.began, time.time(), row.worker, row.state, row.message, json.dumps(row.memory))
            self._db.execute("INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def poster(self, key: str) -> bytes | None:
        found = self._db.execute("SELECT jpeg FROM posters WHERE key = ?", (key,)).fetchone()
        return found[0] if found else None

    def _all_or_nothing(self) -> "_Transaction":
        return _Transaction(self._db)

    def close(self) -> None:
        self._db.close()


class _Transaction:
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")


def read(folder: Path) -> list[Row]:
    """What is in the journal of a folder, which another process may write to.

    Raises:
        FileNotFoundError: there is none.
        SdsageError: it is damaged, or of another version.
    """
    path = folder / FOLDER / NAME
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=30)
        try:
            _check(path, db.execute("PRAGMA user_version").fetchone()[0])
            return list(_read(db))
        finally:
            db.close()
    except sqlite3.Error as error:
        raise damaged(path, error) from None


def outputs_of(folder: Path) -> str:
    """Where the outputs of a batch go: the address of its storage, else its folder."""
    try:
        return (folder / FOLDER / STORAGE).read_text(encoding="utf-8").strip()
    except OSError:
        return str(folder)


def _check(path: Path, version: int) -> None:
    if version != FORMAT:
        raise SdsageError(f"{path} has format {version}, this version of sdsage reads {FORMAT}: choose another folder")


def damaged(path: Path, error: Exception) -> SdsageError:
    return SdsageError(f"the journal {path} can't be used: {error}; move {path.parent} away to begin anew")


def _read(db: sqlite3.Connection) -> Iterator[Row]:
    for values in db.execute(f"SELECT {', '.join(_NAMES)} FROM jobs ORDER BY number"):
        found = dict(zip(_NAMES, values, strict=True))
        yield Row(**{k: json.loads(v) if k in _JSON else v for k, v in found.items()})


def _plain(row: Row) -> list[Any]:
    return [json.dumps(getattr(row, n)) if n in _JSON else getattr(row, n) for n in _NAMES]
