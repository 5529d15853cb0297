"""Where the jobs of a batch run: what a place is, and the places of this machine, a worker process each."""

import hashlib
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sdsage._budget import next_way
from sdsage._estimate import Way
from sdsage.batch.kept import KeptModels
from sdsage.batch.sheet import poster
from sdsage.cli.app import explained
from sdsage.cli.console import Console, speaking_to
from sdsage.cli.generate import generate
from sdsage.cli.inputs import Inputs, input_files
from sdsage.cli.keeping import checkpoint_path, for_memory, resumed
from sdsage.cli.option import Panel
from sdsage.cli.options import by_key
from sdsage.cli.prepare import Looked, check_device, prepare, ready
from sdsage.cli.record import merged, summary
from sdsage.cli.repeat import locate
from sdsage.cli.report import say
from sdsage.cli.settings import Settings, merge
from sdsage.errors import BadRequest, Cancelled, ContextClosed, ResumeError, WorkerDied
from sdsage.media import naming

if TYPE_CHECKING:
    from sdsage import Worker

Tell = Callable[[str, Mapping[str, Any]], None]  # an event of docs/json.md, and its fields
DONE, FAILED, CRASHED, STOPPED, LOST = "done", "failed", "crashed", "stopped", "lost"
_CPU = "cpu"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Task:
    """A job as it goes to a place: plain values, which can go to another machine.

    Attributes:
        key: of the job.
        raw: what a command line would have given, by parameter name.
        output: the file, or the pattern of numbered ones.
        models: option, name and bytes of the files that must be the same everywhere.
        resume: a run before may have left work.
    """

    number: int
    key: str
    verb: str
    raw: dict[str, Any]
    output: str
    models: list[list[Any]] = field(default_factory=list)
    resume: bool = False

    def moved(self, output: str, **more: Any) -> "Task":
        """The same with another output, and with more options."""
        return replace(self, output=output, raw={**self.raw, **more})


@dataclass
class Outcome:
    """What became of a task: plain values too.

    Attributes:
        state: DONE, FAILED, CRASHED (the worker process died), STOPPED (by `Place.stop`), or LOST: the place is gone,
            through no fault of the task.
        files: path, bytes and SHA-256 of each.
        memory: memory did not suffice, and with these options the job may fit.
        loaded: the model was loaded for this job.
    """

    state: str
    message: str = ""
    files: list[list[Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    memory: dict[str, Any] = field(default_factory=dict)
    poster: bytes | None = None
    loaded: bool = False


class Place(Protocol):
    """Runs one task at a time; `stop` may come from another thread."""

    name: str

    def run(self, task: Task, tell: Tell) -> Outcome: ...

    def stop(self) -> None:
        """Ends what runs, at once: the work so far stays on disk."""

    def close(self) -> None: ...


class Source(Protocol):
    """Gives places, some of them later."""

    def fresh(self) -> Sequence[Place] | None:
        """Those that were not there before; None when no more will come. Does not wait.

        Raises:
            SdsageError: there is no place any more, or never was.
        """


class Fixed:
    """Places that are all there from the start."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places: Sequence[Place] | None = places

    def fresh(self) -> Sequence[Place] | None:
        places, self._places = self._places, None
        return places


class JobConsole(Console):
    """What a job says becomes events."""

    def __init__(self, tell: Tell) -> None:
        super().__init__({"quiet": True})
        self._tell = tell

    def event(self, event: str, **fields: Any) -> None:
        self._tell(event, fields)

    def log(self, level: str, text: str) -> None:
        self._tell("said", {"level": level, "text": text})

    def show(self, level: str, text: str, color: bool = False) -> None:
        """Whoever hears the events shows it."""


class LocalPlace:
    """A worker process of this machine.

    Args:
        device: on which it works, as the process sees it.
        environment: variables of the process.
        threads: of a job that does not say how many.
    """

    def __init__(
        self, name: str, device: str, environment: Mapping[str, str] | None = None, threads: int | None = None
    ) -> None:
        self.name, self._device = name, device
        self._environment, self._threads = dict(environment or {}), threads
        self._lock = threading.Lock()
        self._process: Worker | None = None
        self._stopped = False
        self._models = KeptModels(self._worker, self._renewed)
        self._looked: Looked = {}
        self._settings: Settings | None = None

    def run(self, task: Task, tell: Tell) -> Outcome:
        self._settings = None
        with speaking_to(JobConsole(tell)):
            try:
                return self._make(task)
            except Exception as error:
                return self._failed(error)

    def _make(self, task: Task) -> Outcome:
        try:
            return self._made(task)
        except ResumeError as error:
            if not task.resume:
                raise
            say("warning", f"the work that was kept can't be used, so the job begins anew: {error}")
            return self._made(replace(task, resume=False))

    def _made(self, task: Task) -> Outcome:
        output = naming.literal(task.output)
        resume = task.resume and checkpoint_path(output).is_file()
        raw = {**task.raw, "quiet": True, "device": self._device, "output": output, "resume": resume}
        if self._threads is not None:
            raw.setdefault("threads", str(self._threads))
        self._settings = settings = merge(task.verb, resumed(task.verb, raw))
        settings.worker = self._worker()
        locate(settings)
        check_device(settings)
        prepared = prepare(settings, self._looked)
        check_same(task.models, models_of(input_files(settings, prepared.resolved)))
        job = ready(prepared)
        assert prepared.places is not None
        before = self._models.loads
        run = merged(generate(job, prepared.places, self._models))
        loaded = self._models.loads > before
        if not loaded:
            run = replace(run, timings=replace(run.timings, load=0.0))
        seconds = run.timings.total + run.upscale + run.encode
        files = [whole(path) for path in run.files]
        return Outcome(DONE, "", files, summary(run), seconds, poster=poster(run.files[0]), loaded=loaded)

    def _failed(self, error: Exception) -> Outcome:
        died = isinstance(error, WorkerDied)
        if died or not self._worker_is_alive():
            self._models.forget()
        text, _ = explained(error)
        with self._lock:
            if self._stopped:
                return Outcome(STOPPED)
        if isinstance(error, Cancelled | ContextClosed):  # the process died while nothing ran
            return Outcome(CRASHED, text)
        less = self._less_memory(error) if for_memory(error) or isinstance(error, MemoryError) else {}
        return Outcome(CRASHED if died else FAILED, text, memory=less)

    def _less_memory(self, error: Exception) -> dict[str, Any]:
        """Options with which the job needs less."""
        s = self._settings
        if s is None:
            return {}
        free = None
        if self._device != _CPU:
            _, free = self._worker().run("gpu_memory", self._device)
        given = Way(s["offload_to_cpu"], s["vae_tiling"], s["max_vram"])
        way = next_way(given, getattr(error, "stage", ""), free)
        if way is None:
            return {}
        found: dict[str, Any] = {"vram": None}  # it has chosen what did not suffice
        found |= {"offload_to_cpu": True} if way.offload else {}
        found |= {"vae_tiling": True} if way.tiling else {}
        return found | ({"max_vram": f"{way.max_vram:g}"} if way.max_vram else {})

    def _worker_is_alive(self) -> bool:
        return self._process is not None and self._process.alive

    def _worker(self) -> "Worker":
        with self._lock:
            if self._stopped:
                raise Cancelled("the batch was stopped")
            if self._process is None or not self._process.alive:
                from sdsage._supervisor import Worker

                self._models.forget()
                self._process = Worker(environment=self._environment)
            return self._process

    def _renewed(self) -> "Worker":
        if self._process is not None:
            self._process.kill()
        return self._worker()

    def devices(self) -> list[str]:
        """Names of the devices that the process sees."""
        return [device.name for device in self._worker().run("devices")]

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()


def models_of(inputs: Inputs) -> list[list[Any]]:
    """Option, name and bytes of each file that is no picture."""
    named = [(file, by_key()[file.option]) for file in inputs.files]
    return [
        [file.option, os.path.basename(file.path.rstrip("/")), file.size]
        for file, option in named
        if option.panel != Panel.PICTURES
    ]


def check_same(planned: list[list[Any]], here: list[list[Any]]) -> None:
    """Raises BadRequest when a machine has other model files than the one that planned the job."""
    for was, found in zip_longest(planned, here):
        if was != found:
            raise BadRequest(
                f"the batch was planned with {_said(was, 'no other file')}, and {socket.gethostname()} has "
                f"{_said(found, 'no such file')}: put the same files on every machine"
            )


def _said(entry: list[Any] | None, nothing: str) -> str:
    if entry is None:
        return nothing
    option, name, size = entry
    return f"{by_key()[option].name} {name}" + ("" if size is None else f" of {size} bytes")


def whole(path: Path) -> list[Any]:
    """Path, bytes and SHA-256 of a file, which is on the disk itself then. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with open(path, "r+b", buffering=0) as file:  # Windows brings nothing to the disk that is open for reading alone
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
        os.fsync(file.fileno())
    with suppress(OSError):  # not every file system does that
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return [str(path), size, digest.hexdigest()]


def is_whole(folder: Path, entry: list[Any]) -> bool:
    """Whether a recorded file is there, with its size and its hash."""
    name, size, digest = entry
    try:
        with open(folder / name, "rb", buffering=0) as file:
            same = os.fstat(file.fileno()).st_size == size
            return same and hashlib.file_digest(file, "sha256").hexdigest() == str(digest)
    except OSError:
        return False


def local_places(gpus: Sequence[int] = (), cpu_workers: int | None = None) -> list[LocalPlace]:
    """The places of this machine: the GPUs that are named, so many processes on the CPU, or all GPUs, else the CPU.

    Raises:
        BadRequest: there is no such GPU.
    """
    if cpu_workers is not None and not gpus:
        return _cpu_places(cpu_workers)
    from sdsage._supervisor import Worker

    with Worker() as worker:
        there = [d for d in worker.run("devices") if d.kind in ("gpu", "igpu")]
    if not there and not gpus:
        return _cpu_places(1)
    missing = [gpu for gpu in gpus if gpu >= len(there)]
    if missing or len(set(gpus)) < len(gpus):
        known = f"0 to {len(there) - 1}" if there else "none, or this build has no CUDA; see 'sdsage doctor'"
        what = "a GPU twice" if not missing else f"GPU {missing[0]}"
        raise BadRequest(f"--gpus {','.join(map(str, gpus))} names {what}: there are {known}")
    return [_gpu_place(gpu, there[gpu].name) for gpu in gpus or range(len(there))]


def _cpu_places(count: int) -> list[LocalPlace]:
    share = max(1, (os.cpu_count() or 1) // count) if count > 1 else None
    return [LocalPlace(_CPU if count == 1 else f"{_CPU} {i + 1}", _CPU, threads=share) for i in range(count)]


def _gpu_place(number: int, name: str) -> LocalPlace:
    """Its process sees that GPU alone: CUDA keeps hundreds of megabytes on each GPU that a process has looked at."""
    kind = name.split(":")[0]
    if kind != "cuda":
        return LocalPlace(name, name)
    return LocalPlace(f"gpu {number}", "cuda:0", {"CUDA_VISIBLE_DEVICES": visible_gpu(number)})


def visible_gpu(number: int) -> str:
    """What CUDA calls the GPU that is the one of this number among those which this process may use."""
    visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    return visible[number] if visible else str(number)
