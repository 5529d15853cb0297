"""The protocol between a program and its worker: what is sent arrives, and nonsense is an error at once."""

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import sdsage
from sdsage import _protocol
from sdsage._fault import to_error, to_fault
from sdsage._protocol import HEADER, INLINE, MAGIC, PROTOCOL, VERSION, Channel, Place
from sdsage._shared import SharedFile
from sdsage._wire import ProtocolError


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Ends"]:
    made = Ends(tmp_path_factory.mktemp("pipe") / "pipe")
    yield made
    made.shared.close()


class Ends:
    """Both ends of a channel; what is in between is a file, so that it can be damaged."""

    def __init__(self, path: Path) -> None:
        self.path, self.shared = path, SharedFile.create()

    def send(self, message: Any) -> bytes:
        with FileIO(self.path, "w") as out, open(os.devnull, "rb") as nothing:
            Channel(FileIO(os.dup(nothing.fileno())), out, self.shared).send(message)
        return self.path.read_bytes()

    def receive(self, data: bytes) -> Any:
        self.path.write_bytes(data)
        with FileIO(self.path) as incoming, open(os.devnull, "wb") as nothing:
            return Channel(incoming, FileIO(os.dup(nothing.fileno()), "w"), self.shared).receive()


def call(value: Any) -> Any:
    return _protocol.Call(1, "name", 2, [value], {"key": value}, ["on_progress"], "/")


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.text(st.characters())
numbers = arrays.arrays(
    st.sampled_from([np.uint8, np.float32, np.int64, np.bool_, np.float16]), arrays.array_shapes(max_side=60)
)
values = st.recursive(
    plain | numbers,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    return bool(a == b)


@given(values)
def test_values_arrive_as_they_were(ends: Ends, value: Any) -> None:
    sent = call(value)
    got = ends.receive(ends.send(sent))
    assert type(got) is type(sent)
    assert all(equal(getattr(got, f.name), getattr(sent, f.name)) for f in fields(sent))
    assert ends.shared.size == 0


@pytest.mark.parametrize("size", [INLINE // 2, INLINE, 3_000_000])
def test_large_messages_go_through_the_shared_file(ends: Ends, size: int) -> None:
    array = np.random.default_rng(1).integers(0, 256, (size // 4, 2, 2), np.uint8).transpose(2, 1, 0)
    data = ends.send(call(array))
    assert len(data) <= INLINE + HEADER.size
    (first,) = ends.receive(data).args
    assert (first == array).all()
    assert ends.shared.size == 0
    with pytest.raises(ValueError, match=r"a Log of .* bytes is too large"):
        ends.send(_protocol.Log(1, 1, "x" * INLINE))


def test_numbers_that_json_lacks_and_enums(ends: Ends) -> None:
    (got,) = ends.receive(ends.send(call([math.inf, -math.inf, math.nan, np.float32(0.5), sdsage.SdType.Q8_0]))).args
    assert got[:2] == [math.inf, -math.inf]
    assert math.isnan(got[2])
    assert got[3:] == [0.5, 8]


def test_parameter_objects_keep_what_was_set_and_their_defaults(ends: Ends) -> None:
    job = sdsage.SdVidGenParams(prompt="кот 🐈", init_image=np.full((3, 5, 3), 7, np.uint8), seed=-1)
    job.sample_params.guidance.slg.layers = [1, 2]
    job.loras = [sdsage.SdLora("a.gguf", 0.5, True)]
    (got,) = ends.receive(ends.send(call(job))).args
    assert type(got) is sdsage.SdVidGenParams
    assert got == job
    assert got.was_set("seed")
    assert not got.was_set("width")
    assert got.high_noise_sample_params.sample_steps == -1  # a default of this struct, not of SdSampleParams
    assert got.loras[0].is_high_noise


@pytest.mark.parametrize("value", [{1, 2}, {3: 4}, b"bytes", object(), np.array(["text"]), np.array([None]), print])
def test_other_values_are_refused(ends: Ends, value: Any) -> None:
    with pytest.raises(ValueError, match="pass to a worker process"):
        ends.send(call(value))


MESSAGES = [
    call(np.zeros((4, 5), np.float32)),
    _protocol.Hello(PROTOCOL, "1", 2),
    _protocol.Event(3, "on_progress", [sdsage.Progress("sample", 1, 2, 0.5, None)]),
    _protocol.Failed(4, to_fault(ValueError("x"))),
    _protocol.Done(5, (1, "two", None)),
]


@given(st.sampled_from(MESSAGES), st.integers(0, 2000))
def test_a_message_cut_anywhere(ends: Ends, message: Any, length: int) -> None:
    data = ends.send(message)
    with pytest.raises(EOFError if length % len(data) == 0 else ProtocolError):
        ends.receive(data[: length % len(data)])


@given(st.sampled_from(MESSAGES), st.integers(0, 2000), st.binary(min_size=1, max_size=8))
def test_damaged_messages_are_errors_or_messages(ends: Ends, message: Any, at: int, damage: bytes) -> None:
    data = bytearray(ends.send(message))
    at %= len(data)
    data[at : at + len(damage)] = damage
    with contextlib.suppress(ProtocolError):
        assert isinstance(ends.receive(bytes(data)), _protocol.Message)


@given(st.binary(max_size=200))
def test_noise(ends: Ends, noise: bytes) -> None:
    with pytest.raises((ProtocolError, EOFError)):
        ends.receive(noise)


def framed(body: Any, kind: int = 2, blob: bytes = b"") -> bytes:
    text = json.dumps(body).encode()
    return HEADER.pack(MAGIC, PROTOCOL, kind, Place.PIPE, len(text), len(blob)) + text + blob


def array(**more: Any) -> dict[str, Any]:
    return {"#": "array", "dtype": "B", "shape": [4], "at": 0, **more}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (HEADER.pack(MAGIC, PROTOCOL + 1, 2, 0, 0, 0), "protocol 2, this package speaks 1"),
        (HEADER.pack(b"HTTP", PROTOCOL, 2, 0, 0, 0), "does not begin a message"),
        (HEADER.pack(MAGIC, PROTOCOL, 99, 0, 0, 0), "no message of kind 99"),
        (HEADER.pack(MAGIC, PROTOCOL, 2, Place.PIPE, 2**32 - 1, 0), "does not fit"),
        (HEADER.pack(MAGIC, PROTOCOL, 2, Place.PIPE, 0, 2**63), "does not fit"),
        (HEADER.pack(MAGIC, PROTOCOL, 2, Place.SHARED, 10, 2**63), "does not fit"),
        (HEADER.pack(MAGIC, PROTOCOL, 8, Place.SHARED, 0, 0), "not JSON"),  # a log line has no room there
        (HEADER.pack(MAGIC, PROTOCOL, 2, 7, 10, 0), "does not fit"),
        (framed([1, 2]), "a Call has 7 fields"),
        (framed({"a": 1}), "a Call has 7 fields"),
        (framed(["1", "x", 0, [], {"#": "dict", "items": {}}, [], ""]), "Call.call is of type str"),
        (framed([True, "x", 0, [], {"#": "dict", "items": {}}, [], ""]), "Call.call is of type bool"),
        (framed([1, {"#": "set"}], 10), "is no value"),
        (framed([1, {"#": "record", "class": "Popen", "fields": {}}], 10), "is no value"),
        (framed([1, {"#": "record", "class": "Step", "fields": {"a": 1}}], 10), "is no value"),
        (framed([1, {"#": "struct", "class": "SdLora", "parts": [["exit", "int"], [], {}]}], 10), "is no value"),
        (framed([1, {"#": "struct", "class": "SdLora", "parts": [[], [], {"path": 5}]}], 10), "is no value"),
        (framed([1, array()], 10), "outside the 0 bytes"),
        (framed([1, array(shape=[2**62, 2**62])], 10, b"1234"), "outside the 4 bytes"),
        (framed([1, array(shape=[-1])], 10, b"1234"), "no array"),
        (framed([1, array(at=1)], 10, b"1234"), "outside the 4 bytes"),
        (framed([1, array(dtype="O")], 10, b"1234"), "no array"),
        (HEADER.pack(MAGIC, PROTOCOL, 10, 0, 20_000, 0) + b"[" * 20_000, "not JSON"),
    ],
)
def test_nonsense_is_refused(ends: Ends, data: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        ends.receive(data)


@pytest.mark.parametrize(
    "error",
    [
        sdsage.BadRequest("bad"),
        sdsage.ModelError("model"),
        sdsage.NonFiniteError("nan", 3, "high-noise"),
        sdsage.MissingExtra("extra"),
        FileNotFoundError(2, "No such file or directory", "a b.gguf"),
        MemoryError(),
        KeyError("key"),
        ImportError("libcuda"),
    ],
)
def test_errors_arrive_as_they_were(ends: Ends, error: Exception) -> None:
    got = to_error(ends.receive(ends.send(_protocol.Failed(1, to_fault(error)))).fault)
    assert (type(got), str(got)) == (type(error), str(error))
    assert {k: v for k, v in vars(got).items() if k != "__notes__"} == vars(error)
    ours = isinstance(error, sdsage.SdsageError)
    assert hasattr(got, "__notes__") is not ours


def test_an_error_that_nobody_knows() -> None:
    class Odd(LookupError):
        pass

    assert type(to_error(to_fault(Odd("x")))) is LookupError


def worker(data: bytes) -> "subprocess.CompletedProcess[bytes]":
    """A worker process that gets these bytes and then the end."""
    shared = SharedFile.create()
    told, more = shared.inheritance()
    command = [sys.executable, "-P", "-m", "sdsage._worker", told, str(os.getpid())]
    return subprocess.run(command, input=data, capture_output=True, timeout=60, **more)  # type: ignore[call-overload]


def test_a_worker_ends_with_its_pipe(ends: Ends) -> None:
    done = worker(b"")
    assert (done.returncode, done.stderr) == (0, b"")
    hello = ends.receive(done.stdout)
    assert (hello.protocol, hello.version) == (PROTOCOL, VERSION)
    assert worker(ends.send(_protocol.Hello(PROTOCOL, VERSION, 1))).returncode == 0


@pytest.mark.parametrize("what", ["noise", "cut", "version", "protocol", "wrong way"])
def test_a_worker_refuses_nonsense(what: str, ends: Ends) -> None:
    hello = ends.send(_protocol.Hello(PROTOCOL, "0.0.0-other", 1))
    data, words = {
        "noise": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"does not begin a message"),
        "cut": (hello[:-1], b"ends in the middle"),
        "version": (hello, b"the program is sdsage 0.0.0-other, its worker"),
        "protocol": (HEADER.pack(MAGIC, 9, 1, 0, 0, 0), b"of protocol 9, this package speaks 1"),
        "wrong way": (ends.send(_protocol.Abort("x")), b"Abort is a message for the program"),
    }[what]
    done = worker(data)
    assert done.returncode == 70
    assert words in done.stderr
    assert b"Traceback" not in done.stderr
