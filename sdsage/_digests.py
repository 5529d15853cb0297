"""SHA-256 of whole files, remembered by path, size and times, so that a model of 14 GB is read for it once."""

import hashlib
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sdsage.errors import OutputError
from sdsage.tiny.cache import cache_dir

_CHUNK = 1 << 20  # bytes
_MOST = 2000  # entries that are remembered
_LOCK = threading.Lock()


def known(path: str | os.PathLike[str]) -> str | None:
    """The hash of a file that was hashed before and has not changed since, in hexadecimal.

    Raises:
        OSError: the file can't be looked at.
    """
    entry = _read().get(os.path.realpath(path))
    return str(entry[-1]) if entry is not None and entry[:-1] == _stamp(path) else None


def sha256(path: str | os.PathLike[str]) -> str | None:
    """The hash of a file, which is remembered; None when the file changed meanwhile.

    Raises:
        OSError: the file can't be read.
    """
    found = known(path)
    if found is not None:
        return found
    stamp, digest = _stamp(path), hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if _stamp(path) != stamp:
        return None
    _remember(os.path.realpath(path), [*stamp, digest.hexdigest()])
    return digest.hexdigest()


def learn(path: str | os.PathLike[str], digest: str) -> None:
    """Remembers the hash of a file that was computed elsewhere.

    Raises:
        OSError: the file can't be looked at.
    """
    _remember(os.path.realpath(path), [*_stamp(path), digest])


class Digests:
    """Hashes files on a thread of the lowest priority beside other work, and never makes that work wait for long.

    Attributes:
        ready: path -> hash of the files that are done.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self.ready: dict[str, str] = {}
        self._paths = list(dict.fromkeys(paths))
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="sdsage-digests", daemon=True)

    def start(self) -> None:
        """Begins. To be called when models are loaded: their bytes then come from memory, not from the disk again."""
        self._began = time.monotonic()
        self._thread.start()

    def finish(self, longest: float = 1.0) -> None:
        """Waits for what is not ready yet: at most `longest` seconds, and at most as long as the work took."""
        if self._thread.is_alive():
            self._thread.join(min(longest, time.monotonic() - self._began))

    def _work(self) -> None:
        if sys.platform == "linux":  # elsewhere it would be the priority of the whole process
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for path in self._paths:
            with suppress(OSError):  # then the file has no hash, which is said
                found = sha256(path)
                if found is not None:
                    self.ready[path] = found


def _stamp(path: str | os.PathLike[str]) -> list[int]:
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _file() -> Path | None:
    try:
        return cache_dir() / "hashes.json"
    except OutputError:
        return None


def _read() -> dict[str, list[Any]]:
    """What is remembered; nothing when the file is missing or damaged, which costs time only."""
    file = _file()
    try:
        table = json.loads(file.read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in table.items() if isinstance(v, list) and v} if isinstance(table, dict) else {}


def _remember(path: str, entry: list[Any]) -> None:
    """Other processes may do the same: the last one wins, and the file is whole at any time."""
    file = _file()
    if file is None:
        return
    with _LOCK:
        table = _read()
        table.pop(path, None)
        table[path] = entry
        kept = dict(list(table.items())[-_MOST:])
        part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
        with suppress(OSError):  # a cache that can't be written costs time only
            file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(kept), encoding="utf-8")
            os.replace(part, file)
        with suppress(OSError):
            part.unlink(missing_ok=True)
