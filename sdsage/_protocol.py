"""What the program and its worker process say to each other, and how it looks on the pipe.

A message is a header (magic, protocol version, kind, place, length of the JSON, length of the arrays), JSON with one
item for each field, and the bytes of its arrays. A large message lies in the shared file (`_shared`) and only its
header is on the pipe: the pipe never fills up, so that a worker that has stopped can't make the program wait for it.

The shared file belongs to whoever sends; the receiver has read and emptied it before it answers. So only messages that
are answered may be large.
"""

import contextlib
import json
import struct
import threading
from dataclasses import dataclass, fields
from enum import IntEnum
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

from sdsage._shared import SharedFile
from sdsage._wire import Arrays, ProtocolError, pack, unpack

PROTOCOL = 1
HEADER = struct.Struct("<4sBBBxIQ")
MAGIC = b"SDSG"
INLINE = 32 * 1024  # bytes that a message may have on the pipe, which holds 64 KiB
MAX_JSON = 64 * 1024 * 1024


def _package_version() -> str:
    """From the name of the folder beside the package: `importlib.metadata` takes 30 ms."""
    found = sorted(path.name for path in Path(__file__).parent.parent.glob("sdsage-*.dist-info"))
    return found[-1].removeprefix("sdsage-").removesuffix(".dist-info") if found else "of a checkout"


VERSION = _package_version()  # now, not later: the package may be replaced while a program runs


class Place(IntEnum):
    PIPE = 0
    SHARED = 1


_KINDS: dict[int, type["Message"]] = {}


class Message:
    """A message is a dataclass of its own, with a number."""

    kind: ClassVar[int]
    answered: ClassVar[bool] = False
    """The sender waits for an answer, so the message may lie in the shared file."""

    def __init_subclass__(cls, kind: int, answered: bool = False) -> None:
        cls.kind, cls.answered = kind, answered
        _KINDS[kind] = cls


@dataclass
class Hello(Message, kind=1):
    """First from both sides. A worker of another package version is not used."""

    protocol: int
    version: str
    pid: int


@dataclass
class Call(Message, kind=2, answered=True):
    """Do something; answered by Done or Failed.

    Attributes:
        name: a class, a function, or a method of the object `target`.
        target: number of an object, given by the program; 0 for a function.
        callbacks: keyword arguments that are callbacks: the worker sends an Event for each of their calls.
        cwd: current folder of the program.
    """

    call: int
    name: str
    target: int
    args: list[Any]
    kwargs: dict[str, Any]
    callbacks: list[str]
    cwd: str


@dataclass
class Cancel(Message, kind=3):
    """Stop this call."""

    call: int


@dataclass
class Ack(Message, kind=4):
    """The callback has returned. `stop`: it raised, or somebody cancelled the job."""

    stop: bool


@dataclass
class Ping(Message, kind=5):
    """Answered at once, by a thread that does nothing else."""

    number: int


@dataclass
class Pong(Message, kind=6):
    number: int


@dataclass
class Event(Message, kind=7, answered=True):
    """A callback of a call; the job waits for the Ack."""

    call: int
    callback: str
    args: list[Any]


@dataclass
class Log(Message, kind=8):
    """A line of the engine; call 0: no job had asked for it."""

    call: int
    level: int
    line: str


@dataclass
class Abort(Message, kind=9):
    """ggml is about to end the process."""

    text: str


@dataclass
class Done(Message, kind=10, answered=True):
    """A call's result. The next Call is the answer."""

    call: int
    value: Any


@dataclass
class Failed(Message, kind=11, answered=True):
    """A call raised. The next Call is the answer, as with Done: an error may hold latents."""

    call: int
    fault: Any  # a `_fault.Fault`


class Closed(Exception):
    """Nobody reads any more what is sent."""


class Channel:
    """One end: messages out from any thread, messages in from one.

    Args:
        incoming, outgoing: unbuffered files.
    """

    def __init__(self, incoming: FileIO, outgoing: FileIO, shared: SharedFile) -> None:
        self._in, self._out, self._shared = incoming, outgoing, shared
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Sends a message whole.

        Raises:
            ValueError: it holds what can't be sent. OSError: no room in the shared file. Nothing has been sent then.
            Closed: nobody reads.
        """
        blobs = Arrays()
        body = json.dumps([pack(getattr(message, f.name), blobs) for f in fields(message)]).encode()  # type: ignore[arg-type]
        place = Place.SHARED if len(body) + blobs.size > INLINE else Place.PIPE
        if len(body) > MAX_JSON or (place is Place.SHARED and not message.answered):
            raise ValueError(f"a {type(message).__name__} of {len(body) + blobs.size} bytes is too large")
        header = HEADER.pack(MAGIC, PROTOCOL, message.kind, place, len(body), blobs.size)
        if place is Place.SHARED:
            self._shared.write([body, *blobs.parts])
            self._write(header)
        else:
            self._write(b"".join([header, body, *blobs.parts]))

    def _write(self, data: bytes) -> None:
        with self._lock:
            view = memoryview(data)
            try:
                while view:
                    view = view[self._out.write(view) :]
            except (OSError, ValueError) as error:  # ValueError: closed here
                raise Closed from error

    def receive(self) -> Message:
        """The next message.

        Raises:
            EOFError: the other side has ended, between two messages.
            ProtocolError: what came is no message of this protocol.
        """
        head = self._read(HEADER.size, begun=False)
        magic, version, kind, place, json_size, blob_size = HEADER.unpack(head)
        if magic != MAGIC:
            raise ProtocolError(f"{magic!r} does not begin a message")
        if version != PROTOCOL:
            raise ProtocolError(f"the message is of protocol {version}, this package speaks {PROTOCOL}")
        if kind not in _KINDS:
            raise ProtocolError(f"there is no message of kind {kind}")
        if place == Place.PIPE and json_size + blob_size <= INLINE:
            data = self._read(json_size + blob_size)
            return _message(_KINDS[kind], data[:json_size], Arrays.of_bytes(data[json_size:]))
        room = self._shared.size if place == Place.SHARED and _KINDS[kind].answered else 0
        if json_size > MAX_JSON or json_size + blob_size > room:
            raise ProtocolError(f"a message of {json_size} + {blob_size} bytes does not fit")
        try:
            body = self._shared.read(0, json_size)
            return _message(_KINDS[kind], body, Arrays.of_file(self._shared, json_size, blob_size))
        finally:
            self._shared.clear()

    def _read(self, size: int, begun: bool = True) -> bytes:
        data = b""
        while len(data) < size:
            more = self._in.read(size - len(data))
            if not more:
                if begun or data:
                    raise ProtocolError("the message ends in the middle")
                raise EOFError
            data += more
        return data

    def close(self) -> None:
        """The other side sees the end of the messages."""
        with self._lock, contextlib.suppress(OSError):
            self._out.close()


def _message(cls: type[Message], body: bytes, blobs: Arrays) -> Message:
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    try:
        items = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the message is not JSON: {error}") from None
    if not isinstance(items, list) or len(items) != len(names):
        raise ProtocolError(f"a {cls.__name__} has {len(names)} fields")
    values = {name: unpack(item, blobs) for name, item in zip(names, items, strict=True)}
    for name, value in values.items():
        wanted = getattr(hints[name], "__origin__", hints[name])
        if wanted is not Any and type(value) is not wanted:
            raise ProtocolError(f"{cls.__name__}.{name} is of type {type(value).__name__}")
    return cls(**values)
