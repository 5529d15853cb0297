"""Folders that are written to: the cache, temporary files, the current folder."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from sdsage._doctor.report import Level, Report
from sdsage._host import host_memory


def look(report: Report) -> None:
    from sdsage.errors import OutputError
    from sdsage.tiny.cache import cache_dir

    folders: dict[str, Path | None] = {"cache": None, "temporary": None, "current": None}
    why: dict[str, str] = {}
    for name, find in (("cache", cache_dir), ("temporary", _temporary), ("current", Path.cwd)):
        try:
            folders[name] = find()
        except (OutputError, OSError) as error:
            why[name] = str(error)
    rows = [_row(name, path, why.get(name, "")) for name, path in folders.items()]
    report.facts["folders"] = rows
    report.facts["host_memory_free"] = host_memory()
    mends = {
        "cache": "set SDSAGE_CACHE_DIR to a folder that can be written",
        "temporary": "set TMPDIR to a folder that can be written",
        "current": "change to a folder that can be written, or name another with --output",
    }
    for row in rows:
        if row["why_not"]:
            level = Level.NOTE if row["name"] == "current" else Level.WARNING
            text = f"the {row['name']} folder {row['path'] or ''} can't be written: {row['why_not']}"
            report.add(level, "folder-unwritable", text.replace("  ", " "), mends[row["name"]])


def _temporary() -> Path:
    return Path(tempfile.gettempdir())


def _row(name: str, path: Path | None, why: str) -> dict[str, Any]:
    there = path
    while there is not None and not there.exists() and there != there.parent:
        there = there.parent  # it is made when it is first used
    free = None
    if there is not None:
        try:
            _try_writing(there)
            free = shutil.disk_usage(there).free
        except OSError as error:
            why = error.strerror or str(error)
    return {"name": name, "path": str(path or ""), "writable": not why, "why_not": why, "bytes_free": free}


def _try_writing(folder: Path) -> None:
    """Permissions alone don't tell: a disk may be read-only or full. Nothing is left behind."""
    handle, name = tempfile.mkstemp(prefix=".sdsage-doctor-", dir=folder)
    try:
        os.write(handle, bytes(4096))
    finally:
        os.close(handle)
        os.unlink(name)
