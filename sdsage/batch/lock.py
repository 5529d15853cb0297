"""One batch at a time works on a folder; who does stands in the lock, and what its workers do beside it."""

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from sdsage._filelock import try_lock
from sdsage.batch.journal import FOLDER
from sdsage.errors import BadRequest, OutputError

STALE = 60.0  # seconds without a sign of life, after which a lock of another machine counts as left behind
BEAT = 1.0  # seconds between two signs of life


class Busy(BadRequest):
    """Another batch works on the folder."""


class Lock:
    """The lock of a folder, held from its making to `release`.

    The kernel gives it back when the process dies in any way. On a file system that several machines share, the
    signs of life of its holder count as well.

    Attributes:
        left_behind: who held it last, when that one died without giving it back.

    Raises:
        Busy: another batch works on the folder.
        OutputError: the folder can't be written.
    """

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        self._path, self._live = folder / FOLDER / "lock", folder / FOLDER / "live.json"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115 - the object keeps it
        except OSError as error:
            raise OutputError(f"the folder {folder} of the batch can't be used: {error.strerror}") from None
        if not _locked(self._file.fileno()):
            holder = self._holder()
            self._file.close()
            raise _busy(folder, holder)
        self.left_behind = self._holder()
        if shared and self.left_behind.get("host") not in (None, socket.gethostname()) and self._fresh():
            self._file.close()
            raise _busy(folder, self.left_behind)
        self._write({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()})
        self._told = 0.0

    def _holder(self) -> dict[str, Any]:
        self._file.seek(0)
        try:
            found = json.loads(self._file.read(4096))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _fresh(self) -> bool:
        """By the clock of the file system: that of the other machine may differ from ours."""
        probe = self._path.with_name(f"clock-{os.getpid()}")
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now - self._path.stat().st_mtime < STALE

    def _write(self, holder: dict[str, Any]) -> None:
        self._file.truncate(0)
        self._file.write(json.dumps(holder).encode() if holder else b"")

    def live(self, what: Callable[[], Any]) -> None:
        """Tells others what is going on, once a second at most; a sign of life."""
        if time.monotonic() - self._told < BEAT:
            return
        self._told = time.monotonic()
        part = self._live.with_suffix(".part")
        with suppress(OSError):  # a full disk is noticed elsewhere
            part.write_text(json.dumps(what()), encoding="utf-8")
            os.replace(part, self._live)
            os.utime(self._path)

    def release(self) -> None:
        """Gives it back."""
        with suppress(OSError):
            self._live.unlink(missing_ok=True)
            self._write({})
        self._file.close()


def _locked(fd: int, times: int = 4) -> bool:
    """Whether the lock is ours now. `sdsage batch status` may have it for a moment."""
    for i in range(times):
        try:
            try_lock(fd)
        except OSError:
            time.sleep(0.1 if i < times - 1 else 0)
        else:
            return True
    return False


def _busy(folder: Path, holder: dict[str, Any]) -> Busy:
    since = holder.get("since")
    at = datetime.fromtimestamp(since).strftime("%Y-%m-%d %H:%M:%S") if isinstance(since, int | float) else "now"
    who = f"process {holder.get('pid', '?')} on {holder.get('host', 'this machine')}, since {at}"
    return Busy(
        f"another batch works on {folder}: {who}. Wait for it, watch it with 'sdsage batch status {folder}', or give "
        "this one another --folder"
    )


def live(folder: Path) -> dict[str, Any] | None:
    """Who works on a folder, and what its workers do; None when nobody does."""
    path = folder / FOLDER / "lock"
    try:
        with open(path, "r+b") as file:
            if _locked(file.fileno(), 1):
                return None
            found = json.loads(file.read() or b"{}")
        with suppress(OSError, ValueError):
            found |= json.loads((folder / FOLDER / "live.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
