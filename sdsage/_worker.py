"""The worker process, `python -m sdsage._worker`: runs the engine for a program, which `_supervisor` speaks for.

It lives in a session of its own (on Windows a process group) and ignores SIGINT: the program decides what Ctrl-C means.
It ends when the program closes the pipe or dies, whatever the engine is doing at that moment: a thread of its own waits
for the end of the pipe and knows no mercy. Standard output is the protocol's; what native code prints goes to standard
error.
"""

import contextlib
import faulthandler
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from sdsage import _protocol as protocol
from sdsage._fault import to_fault
from sdsage._protocol import VERSION, Channel, Closed
from sdsage._shared import SharedFile
from sdsage._wire import ProtocolError
from sdsage.errors import SdsageError

LONGEST_LINE = 4096  # characters of a log line that pass
BAD_PROTOCOL = 70  # exit code


class _Stop(Exception):
    """Raised in a callback to stop the job; the program knows why."""


def _check_memory(params: Any, device: str | None, job: Any) -> None:
    from sdsage._memory import costs

    costs(params, device).check(job)


def _gpu_memory(device: str | None) -> list[Any]:
    """The name of the device that a context gets, and the bytes that are free on it (None: nobody tells)."""
    from sdsage._memory import available, main_device

    name = main_device(device)
    return [name, available(name)]


def _check_sage(kernel: Any, device: str | None) -> None:
    from sdsage._job import check_sage

    check_sage(kernel, device)


def _check_fast_linear(levers: str | None, device: str | None) -> None:
    from sdsage._job import check_fast_linear

    check_fast_linear(levers, device)


def _estimate(ctx: Any, gen: Any, device: str | None) -> Any:
    """Without a device that of a GPU that nobody knows yet, on which no lever works: about the most that it can be."""
    from sdsage._estimate import estimate
    from sdsage._job import device_levers

    return estimate(ctx, gen, device or "a GPU", device_levers(ctx.engine_levers, device) if device else ())


def _identity(ctx: Any, gen: Any, seed: int) -> Any:
    from sdsage._identity import flat, identity

    return identity(flat(ctx, "ctx"), gen, seed)


def _preprocess_canny(image: Any) -> Any:
    from sdsage._ffi import preprocess_canny

    return preprocess_canny(image)


def _build_info() -> Any:
    import json

    from sdsage._ffi import lib, text

    return json.loads(text(lib.sdsage_build_info()))


def _devices() -> Any:
    from sdsage._job import devices

    return devices()


def _sage_info(kernel: Any, device: str | None) -> Any:
    from sdsage._job import sage_info

    return sage_info(kernel, device)


def _attention(problem: Any, methods: Any, device: str | None, repeats: int, sample: Any) -> Any:
    from sdsage._attention.engine import measure

    return measure(problem, methods, device, repeats, sample)


def _loaded_files() -> Any:
    from sdsage._doctor.child import loaded_files

    return loaded_files()


def _convert(*args: Any, **kwargs: Any) -> Any:
    from sdsage.upscaler import convert

    return str(convert(*args, **kwargs))


# What a program may ask for beside objects and their methods.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention": _attention,
    "build_info": _build_info,
    "check_fast_linear": _check_fast_linear,
    "check_memory": _check_memory,
    "check_sage": _check_sage,
    "convert": _convert,
    "devices": _devices,
    "estimate": _estimate,
    "gpu_memory": _gpu_memory,
    "identity": _identity,
    "loaded_files": _loaded_files,
    "preprocess_canny": _preprocess_canny,
    "sage_info": _sage_info,
}


def _classes() -> dict[str, Any]:
    from sdsage.context import Context
    from sdsage.upscaler import Upscaler

    return {"Context": Context, "Upscaler": Upscaler}


class _Forward(logging.Handler):
    """What the engine says while no job listens goes to the program's logging."""

    def __init__(self, service: "Service") -> None:
        super().__init__()
        self._service = service

    def emit(self, record: logging.LogRecord) -> None:
        level = 0 if record.levelno < 20 else min(3, record.levelno // 10 - 1)
        self._service.say(protocol.Log(0, level, record.getMessage()[:LONGEST_LINE]))


class Service:
    """Does what the program asks for, one call at a time."""

    def __init__(self, channel: Channel, parent: int) -> None:
        self._channel = channel
        self._parent = parent
        self._calls: queue.SimpleQueue[protocol.Call] = queue.SimpleQueue()
        self._acks: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._objects: dict[int, Any] = {}
        self._call = 0  # number of the one that is carried out
        self._cancelled = 0  # number of the last call that was cancelled
        self._partial: Path | None = None  # file that must not be left behind
        self._abort: Any = None  # keeps the C callback alive

    # ---- the thread that listens

    def listen(self) -> NoReturn:
        """Takes messages until there are no more, and then ends the process."""
        try:
            while True:
                self._take(self._channel.receive())
        except EOFError:
            self.end(0)
        except (ProtocolError, OSError) as error:
            print(f"sdsage's worker process can't go on: {error}", file=sys.stderr, flush=True)
            self.end(BAD_PROTOCOL)

    def _take(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.Call):
            self._calls.put(message)
        elif isinstance(message, protocol.Ping):
            self.say(protocol.Pong(message.number))
        elif isinstance(message, protocol.Ack):
            self._acks.put(message.stop)
        elif isinstance(message, protocol.Cancel):
            self._cancelled = message.call
            job = sys.modules.get("sdsage._job")  # not an import: it could wait for one that goes on
            if job is not None:
                job.cancel(None)
        elif isinstance(message, protocol.Hello):
            if message.version != VERSION:
                raise ProtocolError(f"the program is sdsage {message.version}, its worker {VERSION}")
        else:
            raise ProtocolError(f"{type(message).__name__} is a message for the program")

    def end(self, code: int) -> NoReturn:
        """At once, in the middle of native work too."""
        if self._partial is not None:
            with contextlib.suppress(OSError):  # Windows deletes no open file
                self._partial.unlink(missing_ok=True)
        os._exit(code)

    # ---- the main thread

    def say(self, message: protocol.Message) -> None:
        """Sends; a program that is gone ends the process."""
        try:
            self._channel.send(message)
        except Closed:
            self.end(0)

    def serve(self) -> NoReturn:
        """Carries out the calls."""
        with contextlib.suppress(ImportError):  # the call that needs it will say so
            self._prepare()
        while True:
            call = self._calls.get()
            self._call = call.call
            try:
                with contextlib.suppress(OSError):  # a deleted folder: paths must be absolute then, as for the program
                    if call.cwd and call.cwd != os.getcwd():
                        os.chdir(call.cwd)
                answer: protocol.Message = protocol.Done(call.call, self._carry_out(call))
                self.say(answer)
            except BaseException as error:
                self.say(protocol.Failed(call.call, to_fault(error)))
            call = answer = None  # type: ignore[assignment]  # frames and pictures are not kept until the next call

    def _prepare(self) -> None:
        """Loads what every call needs, while the program is still thinking."""
        from sdsage._ffi import ffi, lib, text

        def on_abort(message: Any, data: Any) -> None:
            self.say(protocol.Abort(text(message)[:LONGEST_LINE]))

        self._abort = ffi.callback("sdsage_abort_cb_t", on_abort)
        lib.sdsage_set_abort_callback(self._abort, ffi.NULL)
        _classes()

    def _carry_out(self, call: protocol.Call) -> Any:
        kwargs = call.kwargs | {name: self._callback(name) for name in call.callbacks}
        # heard in any case: where a job was, and what was said last, counts when this process dies
        heard = {name: self._callback(name) for name in ("on_progress", "on_log")}
        if call.target == 0:
            with self._guarding(call):
                return FUNCTIONS[call.name](*call.args, **(kwargs | heard if call.name == "convert" else kwargs))
        classes = _classes()
        if call.name in classes:
            made = classes[call.name](*call.args, **kwargs, **heard)
            self._objects[call.target] = made
            return {name: getattr(made, name) for name in made.FACTS}
        if call.name == "close":
            made = self._objects.pop(call.target, None)
            return made.close() if made is not None else None
        method = getattr(type(self._objects[call.target]), call.name)
        if not getattr(method, "in_worker", False):
            raise SdsageError(f"{call.name} is not for worker processes")
        return method(self._objects[call.target], *call.args, **kwargs)

    def _callback(self, name: str) -> Callable[..., None]:
        """Stands for a callback of the program. Progress and previews wait for it, log lines do not."""

        def log(level: int, line: str) -> None:
            self.say(protocol.Log(self._call, int(level), line[:LONGEST_LINE]))
            if self._cancelled == self._call:
                raise _Stop

        def event(*args: Any) -> None:
            self.say(protocol.Event(self._call, name, list(args)))
            if self._acks.get() or self._cancelled == self._call:
                raise _Stop

        return log if name == "on_log" else event

    @contextlib.contextmanager
    def _guarding(self, call: protocol.Call) -> Any:
        """While a file is converted, the end of the program leaves time to remove what is there of it."""
        if call.name != "convert":
            yield
            return
        from sdsage.upscaler import partial_path

        self._partial = partial_path(Path(call.args[1]), os.getpid())
        die_with_parent(None)
        try:
            yield
        finally:
            die_with_parent(self._parent)
            self._partial = None


def die_with_parent(parent: int | None) -> None:
    """Linux ends this process with the thread that started it, even when it is stopped. None: not any more."""
    if sys.platform != "linux":
        return
    import ctypes

    PR_SET_PDEATHSIG = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL if parent is not None else 0, 0, 0, 0)
    if parent is not None and os.getppid() != parent:  # it died before
        os._exit(0)


def main() -> NoReturn:
    """`python -m sdsage._worker SHARED_FILE PARENT [PYTHONPATH]`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = int(sys.argv[2])
    die_with_parent(parent)
    os.environ.pop("PYTHONPATH", None)  # it held the program's sys.path
    if len(sys.argv) > 3:
        os.environ["PYTHONPATH"] = sys.argv[3]
    incoming, outgoing = FileIO(os.dup(0)), FileIO(os.dup(1), "w")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    faulthandler.enable(all_threads=False)
    channel = Channel(incoming, outgoing, SharedFile.inherited(sys.argv[1]))
    service = Service(channel, parent)
    service.say(protocol.Hello(protocol.PROTOCOL, VERSION, os.getpid()))
    logging.getLogger("sdsage").addHandler(_Forward(service))
    logging.getLogger("sdsage").setLevel(logging.DEBUG)
    threading.Thread(target=service.listen, name="sdsage-listen", daemon=True).start()
    service.serve()


if __name__ == "__main__":
    main()
