"""A lock on an open file, that one process at a time can have; the system gives it back when that dies."""

import os
import sys

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_LOCKED = 2**31 - 2  # Windows locks bytes, and keeps others from reading them: one that no file of ours has


def try_lock(fd: int) -> None:
    """Until `unlock`, or until the file is closed. Raises OSError where another process has it."""
    if sys.platform == "win32":
        at = os.lseek(fd, 0, os.SEEK_CUR)
        os.lseek(fd, _LOCKED, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(fd, at, os.SEEK_SET)
    else:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(fd: int) -> None:
    """For a file that something else, a map of it say, still holds open; Windows has no such thing."""
    if sys.platform != "win32":
        fcntl.flock(fd, fcntl.LOCK_UN)
