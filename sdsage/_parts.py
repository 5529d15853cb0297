"""Names of files that are not whole yet, and what is left of them after their process was killed."""

import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_NAME = re.compile(r"\.sdsage-(\d+)-[0-9a-f]{16}\.part")


def part_of(target: Path) -> Path:
    """A temporary name beside `target`, which tells its process."""
    return target.parent / f".sdsage-{os.getpid()}-{secrets.token_hex(8)}.part"


def orphans(folder: Path) -> Iterator[Path]:
    """Unfinished files in a folder whose process has ended: of this machine, so not for a shared file system.

    On Windows nobody tells, and there are none.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match and not alive(int(match.group(1))):
                yield Path(entry.path)


def alive(pid: int) -> bool:
    if sys.platform == "win32":  # where asking in this way would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
