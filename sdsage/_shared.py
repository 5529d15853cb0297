"""Memory that the program and its worker process share: a file without a name.

It is read and written, not mapped: a full disk is then an error and not a SIGBUS, and a worker that makes the file
shorter can't hurt the program. On Linux its pages are memory (memfd), elsewhere those of a temporary file that its
owner has deleted already, or that Windows deletes with the last handle: nobody leaves it behind, however it ends.
"""

import os
import sys
from collections.abc import Iterable
from io import FileIO


class SharedFile:
    """Bytes from 0 on; one side at a time uses them (`_protocol` says when)."""

    def __init__(self, file: FileIO) -> None:
        self._file = file

    @classmethod
    def create(cls) -> "SharedFile":
        """A new one, empty."""
        if sys.platform == "linux":
            try:
                return cls(FileIO(os.memfd_create("sdsage"), "r+"))
            except OSError:  # a sandbox may forbid it
                pass
        import tempfile  # 15 ms

        with tempfile.TemporaryFile() as file:
            return cls(FileIO(os.dup(file.fileno()), "r+"))

    def inheritance(self) -> tuple[str, dict[str, object]]:
        """What a child process is told, and what `subprocess.Popen` needs for it."""
        fd = self._file.fileno()
        if sys.platform == "win32":
            import msvcrt
            import subprocess

            handle = msvcrt.get_osfhandle(fd)
            os.set_handle_inheritable(handle, True)
            info = subprocess.STARTUPINFO(lpAttributeList={"handle_list": [handle]})
            return str(handle), {"startupinfo": info}
        return str(fd), {"pass_fds": (fd,)}

    @classmethod
    def inherited(cls, told: str) -> "SharedFile":
        """The file of the parent process."""
        number = int(told)
        if sys.platform == "win32":
            import msvcrt

            number = msvcrt.open_osfhandle(number, os.O_RDWR | os.O_BINARY)
        return cls(FileIO(number, "r+"))

    @property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def write(self, parts: Iterable[bytes | memoryview]) -> None:
        """Replaces what is there."""
        self._file.seek(0)
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[self._file.write(view) :]

    def read(self, at: int, size: int) -> bytes:
        data = bytearray(size)
        self.read_into(at, memoryview(data))
        return bytes(data)

    def read_into(self, at: int, target: memoryview) -> None:
        """Raises EOFError if that much is not there."""
        self._file.seek(at)
        while target:
            count = self._file.readinto(target)
            if not count:
                raise EOFError("the shared file is shorter than the message said")
            target = target[count:]

    def clear(self) -> None:
        """Gives the memory back."""
        self._file.truncate(0)

    def close(self) -> None:
        self._file.close()
