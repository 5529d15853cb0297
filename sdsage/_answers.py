"""The file of a run that is not over: what the model answered to the sampler, call by call.

Line of magic; length and CRC of a JSON header, the header; then one record for each call, at multiples of 64 bytes:
CRC of what follows, step, sigma, number of dimensions, dimensions (width first), values. Only appended to: a record is
whole, which its CRC tells, or the first of those that are not there. So a process may be killed at any time.
"""

import json
import mmap
import os
import struct
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdsage._filelock import try_lock, unlock
from sdsage.errors import BadRequest, SdsageError

FORMAT = 1
MAGIC = b"sdsage answers\n"
_HEAD = struct.Struct("<15sBII")  # magic, format, bytes and CRC of the header
_RECORD = struct.Struct("<IifI5q")  # CRC, step, sigma, dimensions
_ALIGN = 64
_SYNC_SECONDS = 10.0
_LOCK_SECONDS = 5.0


@dataclass(frozen=True)
class Answer:
    """What the model gave back: `values` 1 x C x ... x H x W; `step` is negative at the second call of a step."""

    values: NDArray[np.float32]
    sigma: float
    step: int


def _padding(at: int) -> bytes:
    return bytes(-at % _ALIGN)


def read_header(path: Path) -> dict[str, Any] | None:
    """The header of a file of answers; None if it is another kind of file.

    Raises:
        BadRequest: it is of another format, or damaged.
        OSError: it can't be read.
    """
    with path.open("rb") as file:
        return _header(file.read(2**24), path)


def _header(data: bytes | mmap.mmap, path: Path) -> dict[str, Any] | None:
    if data[: len(MAGIC)] != MAGIC:
        return None
    if len(data) < _HEAD.size:
        raise BadRequest(f"{path} is cut off in its header: delete it and begin anew")
    _, version, length, crc = _HEAD.unpack_from(data)
    text = data[_HEAD.size : _HEAD.size + length]
    if version != FORMAT:
        raise BadRequest(f"{path} has format {version}, this version of sdsage reads {FORMAT}: begin anew")
    if len(text) != length or zlib.crc32(text) != crc:
        raise BadRequest(f"{path} is damaged in its header: delete it and begin anew")
    header: dict[str, Any] = json.loads(text)
    return header


class AnswerFile:
    """A file of answers, open for more of them; nobody else may write to it meanwhile.

    Attributes:
        header: plain JSON values.
        answers: what was there when it was opened; the values are views of the file.
    """

    def __init__(self, path: Path, header: dict[str, Any], answers: Sequence[Answer], file: Any, end: int) -> None:
        self.path, self.header, self.answers = path, header, tuple(answers)
        self._file, self._end, self._synced = file, end, time.monotonic()

    @classmethod
    def create(cls, path: Path, header: dict[str, Any]) -> "AnswerFile":
        """A new file without answers; an older one of the name is replaced.

        Raises:
            SdsageError: another process works with the older one.
        """
        text = json.dumps(header).encode()
        head = _HEAD.pack(MAGIC, FORMAT, len(text), zlib.crc32(text)) + text
        head += _padding(len(head))
        file = open(path, "a+b", buffering=0)  # noqa: SIM115 - the object keeps it
        _lock(file, path)
        file.truncate(0)
        _write_all(file, head)
        return cls(path, header, (), file, len(head))

    @classmethod
    def open(cls, path: Path) -> "AnswerFile | None":
        """The file of an earlier run; None if it is another kind of file. What was not written to its end is cut off.

        Raises:
            BadRequest: the header is damaged, or of another format.
            SdsageError: another process works with it.
            OSError: it can't be read or written.
        """
        file = open(path, "r+b", buffering=0)  # noqa: SIM115 - the object keeps it
        try:
            _lock(file, path)
            data = _content(file)
            header = _header(data, path)
            if header is None:
                file.close()
                return None
            answers, end = _records(data)
            file.truncate(end)
            file.seek(end)
        except BaseException:
            file.close()
            raise
        return cls(path, header, answers, file, end)

    def append(self, answers: Sequence[Answer]) -> None:
        """Writes answers; they are there as soon as this returns, and on the disk itself ten seconds later at most.

        Raises:
            OSError: the disk is full, say; the file is as it was before.
        """
        try:
            for answer in answers:
                _write_all(self._file, _record(answer))
        except OSError:
            self._file.truncate(self._end)
            self._file.seek(self._end)
            raise
        self._end = self._file.tell()
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Lets others write; `answers` can still be read."""
        unlock(self._file.fileno())  # the map holds another descriptor
        self._file.close()


def _content(file: Any) -> mmap.mmap | bytes:
    """A file that is mapped can be neither cut off nor replaced on Windows."""
    size = os.fstat(file.fileno()).st_size
    if sys.platform == "win32" or not size:
        content: bytes = file.readall()
        return content
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def _write_all(file: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:  # a file without a buffer may take a part
        view = view[file.write(view) :]


def _record(answer: Answer) -> bytes:
    values = np.ascontiguousarray(answer.values, "<f4")
    ne = [*reversed(values.shape), 0, 0, 0, 0][:5]
    head = _RECORD.pack(0, answer.step, answer.sigma, values.ndim, *ne)
    body = values.tobytes()
    crc = zlib.crc32(body, zlib.crc32(head[4:]))
    record = struct.pack("<I", crc) + head[4:] + _padding(_RECORD.size) + body
    return record + _padding(len(record))


def _records(data: mmap.mmap | bytes) -> tuple[list[Answer], int]:
    """All whole records, and where they end."""
    length = _HEAD.unpack_from(data)[2]
    at = _HEAD.size + length
    at += -at % _ALIGN
    found = []
    while len(data) - at >= _ALIGN:
        crc, step, sigma, dims, *ne = _RECORD.unpack_from(data, at)
        count = 1
        for n in ne[:dims]:
            count *= n
        body = at + _ALIGN
        end = body + 4 * count + -(4 * count) % _ALIGN
        if not 1 <= dims <= 5 or any(n < 1 for n in ne[:dims]) or end > len(data):
            break
        view = memoryview(data)
        if zlib.crc32(view[body : body + 4 * count], zlib.crc32(view[at + 4 : at + _RECORD.size])) != crc:
            break
        values = np.frombuffer(data, "<f4", count, body).reshape(tuple(reversed(ne[:dims])))
        found.append(Answer(values, sigma, step))
        at = end
    return found, at


def _lock(file: Any, path: Path) -> None:
    """A process that was just told to end may hold it a moment longer."""
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            try_lock(file.fileno())
            return
        except OSError:
            if time.monotonic() > until:
                file.close()
                raise SdsageError(f"{path} is in use by another run: wait for it, or choose another output") from None
            time.sleep(0.05)
