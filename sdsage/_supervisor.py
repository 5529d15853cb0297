"""The program's side of a worker process: starts it, asks it to do things, hears what it says, and outlives it."""

import atexit
import contextlib
import math
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import FileIO
from typing import Any

from sdsage import _death, _protocol
from sdsage._fault import to_error
from sdsage._protocol import VERSION, Channel, Closed
from sdsage._shared import SharedFile
from sdsage._wire import ProtocolError
from sdsage.enums import LogLevel
from sdsage.errors import BadRequest, Cancelled, ContextClosed, SdsageError, WorkerDied

HANG_AFTER = 60.0  # seconds without a sign of life
GRACE = 0.5  # seconds that a cancelled job has to stop by itself
TICK = 0.1  # seconds between two looks at a running job
END = 1.0  # seconds that a process has to end by itself
LONGEST = 65536  # bytes of a line


@dataclass(eq=False)
class Job:
    """A call that a worker carries out, or that waits for its turn.

    Attributes:
        callbacks: by the name of their keyword argument.
        owner: whose `cancel` it hears.
        progress: the last `Progress`.
        raised: the first exception of a callback.
        stopping: when it was asked to stop (monotonic seconds); None while it was not.
    """

    number: int
    name: str
    callbacks: dict[str, Callable[..., None]]
    owner: object
    done: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    error: BaseException | None = None
    progress: Any = None
    raised: BaseException | None = None
    stopping: float | None = None


class Worker:
    """A process of its own that runs the engine, for contexts and upscalers that are made with `isolated`.

    What happens to the engine there (an abort, want of memory, a signal) is an error here. One job runs at a time per
    worker; others wait. Two workers run at the same time.

    Args:
        hang_after: seconds without any sign of life after which a running job's worker counts as hung and is ended:
            it was stopped, or is dead-locked; a long step is no reason. None: SDSAGE_WORKER_TIMEOUT, else 60.
        environment: variables of the process, beside those of this one.
    """

    def __init__(self, *, hang_after: float | None = None, environment: Mapping[str, str] | None = None) -> None:
        self.hang_after = _hang_after(hang_after)
        self._environment = dict(environment or {})
        self._turn = threading.Condition()
        self._queue: list[Job] = []  # the first one runs
        self._count = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._greeted = self._closing = self._hung = self._killed = False
        self._in_callback = False
        self._death: WorkerDied | None = None
        self._told = False  # somebody got the WorkerDied
        self._heard = self._pinged = 0.0
        self._words = _death.LastWords()
        self._memory = _death.MemoryWatch()
        self._started = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sdsage-worker", daemon=True)
        self._thread.start()
        _alive.add(self)

    @property
    def pid(self) -> int:
        """The process; also after its end."""
        self._started.wait()
        return self._process.pid if self._process is not None else 0

    @property
    def alive(self) -> bool:
        return not (self._ended.is_set() or self._closing or self._killed)

    @property
    def death_is_known(self) -> bool:
        """Somebody got the WorkerDied, or it was ended on purpose."""
        return self._told or self._closing

    @property
    def last_words(self) -> tuple[str, ...]:
        """The last lines that the engine and the process wrote."""
        return self._words.all()

    # ---- jobs

    def run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a function of `_worker.FUNCTIONS`; keyword arguments that can be called are callbacks."""
        return self.call(name, 0, args, kwargs, owner=self)

    def call(
        self,
        name: str,
        target: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        owner: object,
        heard: dict[str, Callable[..., None]] | None = None,
    ) -> Any:
        """Has something done and returns what it returns; raises what it raises.

        An interrupt (Ctrl-C) or an exception of a callback stops the job and is raised. A job that does not stop
        in time ends with its worker. `heard` are callbacks that the object already has.

        Raises:
            WorkerDied: the process has ended. ContextClosed: it had ended before, and that was said.
            SdsageError: called from within a callback.
        """
        self._refuse_in_callback()
        callbacks = {k: v for k, v in kwargs.items() if callable(v)}
        with self._turn:
            self._count += 1
            job = Job(self._count, name, {**(heard or {}), **callbacks}, owner)
        rest = {k: v for k, v in kwargs.items() if k not in callbacks}
        message = _protocol.Call(job.number, name, target, list(args), rest, list(callbacks), _folder())
        with self._my_turn(job):
            if job.stopping is not None:
                raise Cancelled("the job was cancelled before it began")
            return self._carry_out(job, message)

    def _refuse_in_callback(self) -> None:
        if threading.current_thread() is self._thread:
            raise SdsageError("a callback can't start another native job: return first, then start it")

    @contextlib.contextmanager
    def _my_turn(self, job: Job) -> Iterator[None]:
        try:
            with self._turn:
                self._queue.append(job)
                self._turn.wait_for(lambda: self._queue[0] is job or job.stopping is not None)
            yield
        finally:
            with self._turn:
                if job in self._queue:
                    self._queue.remove(job)
                self._turn.notify_all()

    def _carry_out(self, job: Job, message: _protocol.Call) -> Any:
        self._started.wait()
        self._heard = self._pinged = time.monotonic()
        try:
            self._send(message)
            interrupt = self._wait(job)
        except ValueError as unfit:  # an argument; nothing was sent
            raise BadRequest(str(unfit)) from None
        except OSError:  # no room for the arguments; nothing was sent
            raise
        except BaseException:  # an interrupt between two lines of ours: what the worker knows is unknown
            self.kill()
            raise
        error = interrupt or job.raised or job.error
        if job.stopping is not None and interrupt is None and job.raised is None:
            late = "; it was too far to stop earlier" if job.error is None else ""
            ended = "; it did not stop in time, so its worker process was ended" if self._killed else ""
            error = Cancelled(f"the job was cancelled{late or ended}")
        if error is not None:
            raise error
        return job.value

    def _send(self, message: _protocol.Message) -> None:
        if self._channel is not None:
            with contextlib.suppress(Closed):  # the end of the process is noticed by the thread that reads
                self._channel.send(message)

    def _wait(self, job: Job) -> BaseException | None:
        """Waits for the job; an interrupt stops it and is returned once it has stopped."""
        interrupt: BaseException | None = None
        while not job.done.is_set():
            try:
                if self._ended.is_set():
                    self._end_job(job)
                elif not job.done.wait(TICK):
                    self._look_after(job, interrupt is not None)
            except BaseException as error:
                if interrupt is not None:  # somebody is in a hurry
                    self.kill()
                interrupt = interrupt or error
                self._stop(job)
        return interrupt

    def _look_after(self, job: Job, interrupted: bool) -> None:
        """Ends a worker whose job won't stop, or that gives no sign of life."""
        now = time.monotonic()
        if job.stopping is not None and now - job.stopping > GRACE and (interrupted or not self._in_callback):
            self.kill()
            if self._in_callback:  # the program's own code hangs: it is left alone
                self._end_job(job)
            return
        self._memory.look()
        pause = min(1.0, self.hang_after / 4)
        # It waits for a callback, or we have slept (stopped, suspended) and did not ask: silence tells nothing.
        if self._in_callback or now - self._pinged > pause + 10 * TICK:
            self._heard = now
        if now - self._pinged > pause:
            self._pinged = now
            self._send(_protocol.Ping(0))
        if now - self._heard > self.hang_after:
            self._hung = True
            self.kill()

    def cancel(self, owner: object) -> None:
        """Stops the jobs of `owner`, running or waiting."""
        with self._turn:
            jobs = [job for job in self._queue if job.owner is owner]
        for job in jobs:
            self._stop(job)

    def _stop(self, job: Job) -> None:
        with self._turn:
            job.stopping = job.stopping or time.monotonic()
            running = bool(self._queue) and self._queue[0] is job
            self._turn.notify_all()
        if running:
            self._send(_protocol.Cancel(job.number))

    # ---- the thread that starts the process and hears it

    def _run(self) -> None:
        """The process is a child of this thread: where Linux ends a child with its parent, it means the thread."""
        shared = SharedFile.create()
        try:
            self._start(shared)
            assert self._channel is not None
            self._started.set()
            while True:
                self._take(self._channel.receive())
        except EOFError:
            pass
        except (OSError, ProtocolError) as error:
            self._give_up(error)
        except BaseException as error:  # a fault of ours must not leave anybody waiting
            self._give_up(error)
            raise
        finally:
            self._started.set()
            self._bury()
            shared.close()

    def _give_up(self, error: BaseException) -> None:
        self._words.abort = f"{type(error).__name__}: {error}"
        if self._process is not None:
            self._process.kill()

    def _start(self, shared: SharedFile) -> None:
        told, more = shared.inheritance()
        command = [sys.executable, "-P", "-m", "sdsage._worker", told, str(os.getpid())]
        command += filter(None, [os.environ.get("PYTHONPATH")])
        self._process = process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=module_environment() | self._environment,
            **(more | _apart()),  # type: ignore[call-overload]
        )
        assert isinstance(process.stdin, FileIO)
        assert isinstance(process.stdout, FileIO)
        assert isinstance(process.stderr, FileIO)
        self._errors = threading.Thread(target=self._hear_errors, args=(process.stderr,), daemon=True)
        self._errors.start()
        self._channel = Channel(process.stdout, process.stdin, shared)
        self._send(_protocol.Hello(_protocol.PROTOCOL, VERSION, os.getpid()))

    def _hear_errors(self, stream: FileIO) -> None:
        """Standard error of the process: for the last words, and with SDSAGE_DEBUG=1 for ours."""
        show = os.environ.get("SDSAGE_DEBUG") == "1"
        rest = b""
        while data := stream.read(LONGEST):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) >= LONGEST:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._words.written(line.decode("utf-8", "replace"))
                if show:
                    print(f"worker: {line.decode('utf-8', 'replace')}", file=sys.stderr)
        self._words.written(rest.decode("utf-8", "replace"))
        stream.close()

    def _take(self, message: _protocol.Message) -> None:
        self._heard = time.monotonic()
        job = self._queue[0] if self._queue else None
        if not self._greeted:
            self._greet(message)
        elif isinstance(message, _protocol.Log):
            self._words.logged(message.line, message.level == LogLevel.ERROR)
            self._hear_log(job if job is not None and message.call == job.number else None, message)
        elif isinstance(message, _protocol.Abort):
            self._words.abort = message.text
        elif isinstance(message, _protocol.Event) and job is not None and job.number == message.call:
            if message.callback == "on_progress":
                (job.progress,) = message.args
            self._call_back(job, message.callback, *message.args)
            self._send(_protocol.Ack(job.stopping is not None))
        elif isinstance(message, _protocol.Done | _protocol.Failed) and job is not None and job.number == message.call:
            if isinstance(message, _protocol.Done):
                job.value = message.value
            else:
                job.error = to_error(message.fault)
            job.done.set()
        elif not isinstance(message, _protocol.Pong):
            raise ProtocolError(f"a {type(message).__name__} was not expected")

    def _greet(self, message: _protocol.Message) -> None:
        if not isinstance(message, _protocol.Hello) or message.version != VERSION:
            raise ProtocolError(f"the worker is not of sdsage {VERSION}: {message}")
        self._greeted = True

    def _hear_log(self, job: Job | None, message: _protocol.Log) -> None:
        level = LogLevel.parse(message.level)
        if job is not None and "on_log" in job.callbacks:
            self._call_back(job, "on_log", level, message.line)
        else:
            from sdsage._job import log_unheard  # late: a worker is started before anything heavy is imported

            log_unheard(level, message.line)

    def _call_back(self, job: Job, name: str, *args: Any) -> None:
        """A callback's exception is kept, stops the job, and is raised by `call`."""
        callback = job.callbacks.get(name)
        if callback is None or job.raised is not None:
            return
        before, self._in_callback = job.stopping, True
        try:
            callback(*args)
        except BaseException as error:
            job.raised = error
            self._stop(job)
        finally:
            self._in_callback = False
            if before is None and job.stopping is not None:
                job.stopping = time.monotonic()  # only now can it hear that

    # ---- the end

    def kill(self) -> None:
        """Ends the process at once, whatever it does."""
        self._started.wait()
        if self._process is not None and not self._ended.is_set():
            self._killed = True
            self._process.kill()

    def close(self) -> None:
        """Ends the process, after a job that still runs. Harmless when it has ended already."""
        self._refuse_in_callback()
        with contextlib.nullcontext() if self._ended.is_set() else self._my_turn(Job(0, "close", {}, None)):
            self._closing = True
            self._started.wait()
            if self._channel is not None:
                self._channel.close()  # it ends when there is nothing more to read
            if not self._ended.wait(END):
                self.kill()
            self._thread.join()
        _alive.discard(self)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _bury(self) -> None:
        """Takes the exit code of the process, and ends the job that it had."""
        code = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(END)
            if code is None:
                self._process.kill()
                code = self._process.wait()
            self._errors.join(END)
            for stream in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]
        with self._turn:
            job = self._queue[0] if self._queue else None
        self._death, self._told = self._obituary(code, job), self._killed and not self._hung
        self._ended.set()
        if job is not None:
            self._end_job(job)

    def _end_job(self, job: Job) -> None:
        if not job.done.is_set():
            job.error = self._farewell()
            job.done.set()

    def _farewell(self) -> SdsageError:
        """What a call gets when the process is gone: the whole story once."""
        if self._death is None or self._closing or self._told:
            return ContextClosed("the worker process of this object has ended: make a new one")
        self._told = True
        return self._death

    def _obituary(self, code: int | None, job: Job | None) -> WorkerDied:
        p = job.progress if job is not None else None
        early = "load" if job is not None and job.name in ("Context", "Upscaler") else ""
        stage = p.stage if p is not None else early if self._greeted else "start"
        step = min(p.step + 1, p.steps) if p is not None and p.stage == "sample" else 0
        expert = p.expert if p is not None else None
        name = _death.signal_name(code)
        if self._hung:
            how = f"gave no sign of life for {self.hang_after:g} seconds and was ended"
        elif name:
            how = f"was ended by {name}"
        else:
            how = f"ended with exit code {code}" if code is not None else "could not be started"
        where = _death.doing(stage, step, p.steps if p is not None else 0, expert)
        text = f"the worker process {how}" + (f" while {where}" if where else "")
        if name == "SIGKILL" and not self._killed:
            text += f"; {self._memory.verdict()}"
        words = self._words.shown()
        text += f"; its last words: {words}" if words else ""
        return WorkerDied(
            text,
            pid=self._process.pid if self._process is not None else 0,
            returncode=code,
            signal=name,
            stage=stage,
            step=step,
            expert=expert,
            last_words=self._words.all(),
        )


def _hang_after(asked: float | None) -> float:
    text = os.environ.get("SDSAGE_WORKER_TIMEOUT") or str(HANG_AFTER)
    try:
        seconds = float(text) if asked is None else float(asked)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise BadRequest(f"a worker's time-out is {asked or text}: seconds above 0 are needed (SDSAGE_WORKER_TIMEOUT)")
    return seconds


def _apart() -> dict[str, object]:
    """What `subprocess.Popen` needs so that Ctrl-C in the terminal does not reach the process."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return ""


def module_environment() -> dict[str, str]:
    """Ours; modules are found where we find them, which the current folder is no part of (-P)."""
    path = [os.path.abspath(p) for p in sys.path if p]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


_alive: "weakref.WeakSet[Worker]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """What they do they leave as at the end of their pipe; one that does not hear that is killed."""
    for worker in list(_alive):
        worker._closing = True
        if worker._channel is not None:
            worker._channel.close()
        if not worker._ended.wait(END):
            worker.kill()


if hasattr(os, "register_at_fork"):  # a fork of this process does not own its workers
    os.register_at_fork(after_in_child=_alive.clear)
