"""Runs one native job at a time, off the calling thread, and brings back what it said and how it ended."""

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sdsage._ffi import ffi, images_from_c, latents_from_c, lib, text, when_loaded
from sdsage.enums import LogLevel, PreviewMode, SageKernel
from sdsage.errors import BadRequest, Cancelled, GenerationError, NonFiniteError, SageUnavailable, SdsageError

T = TypeVar("T")
log = logging.getLogger("sdsage")

STAGES = ("load", "encode_text", "encode_image", "sample", "decode", "upscale", "convert")
EXPERTS = (None, "low-noise", "high-noise")


@dataclass(frozen=True)
class Progress:
    """Where a job is.

    Attributes:
        stage: "load", "encode_text", "encode_image", "sample", "decode", "upscale" or "convert".
        step: 0 when the stage begins, then 1..steps.
        steps: steps of the stage; 0 when it has none.
        seconds: time since the stage began.
        expert: "low-noise" or "high-noise" while sampling with two experts, else None.
        replayed: of the steps up to `step`, how many came from a checkpoint and took no time.
    """

    stage: str
    step: int
    steps: int
    seconds: float
    expert: str | None
    replayed: int = 0


@dataclass(frozen=True)
class Preview:
    """How intermediate pictures are made: see `sd_set_preview_callback`. `interval` counts steps."""

    mode: PreviewMode
    interval: int = 1
    denoised: bool = True
    noisy: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", PreviewMode.parse(self.mode))


@dataclass(frozen=True)
class Step:
    """One sampling step: its seconds and the expert that did it (None when the model has one)."""

    seconds: float
    expert: str | None


@dataclass(frozen=True)
class Attention:
    """How often one kernel computed attention in one part of a model.

    Attributes:
        module: "diffusion", or with two experts "low-noise" and "high-noise"; "text encoder", "picture encoder", "VAE",
            "ControlNet".
        kernel: "fp16", "fp8", "fp8++" or "hopper" of SageAttention, "flash" or "ordinary".
        calls: attention nodes of the graphs that were executed.
        why: why SageAttention was not used although it was asked for; "" otherwise.
    """

    module: str
    kernel: str
    calls: int
    why: str


@dataclass(frozen=True)
class Lever:
    """How often sdsage computed something in place of the engine.

    Attributes:
        module: as in `Attention`.
        lever: "linear" (linear layers in BF16), "linear fp8", "fuse" (norms, rotary embedding), "vae" (convolutions,
            norms and copies of the VAE); "ggml" for the linear layers that the lever leaves to the engine.
        calls: nodes of the graphs that were executed.
        why: why the engine, or why not FP8 although `fast_linear` is set; "" otherwise.
    """

    module: str
    lever: str
    calls: int
    why: str


OnProgress = Callable[[Progress], None]
OnLog = Callable[[LogLevel, str], None]
OnPreview = Callable[[int, NDArray[np.uint8], bool], None]


@dataclass(eq=False)
class Hooks:
    """Who listens to a job, and what was measured while it ran."""

    on_progress: OnProgress | None = None
    on_log: OnLog | None = None
    on_preview: OnPreview | None = None
    preview: Preview | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # by stage
    steps: list[Step] = field(default_factory=list)
    replayed: int = 0  # steps that came from a checkpoint
    replayed_here: int = 0  # the same in the running stage
    on_answer: Callable[[NDArray[np.float32], float, int], None] | None = None  # values, sigma, step
    on_latents: Callable[[NDArray[np.float32], int], None] | None = None  # values, picture
    stages: list[tuple[str, str | None, int, float]] = field(default_factory=list)  # stage, expert, steps, begun
    raised: BaseException | None = None  # first exception of a callback
    owner: object = None  # whose cancel() this job hears
    cancel_wanted: bool = False

    def call(self, callback: Callable[..., None] | None, *args: Any) -> None:
        """A callback never raises into C: its exception is kept, the job is stopped, and `run` raises it."""
        if callback is None or self.raised is not None:
            return
        try:
            callback(*args)
        except BaseException as error:
            self.raised = error
            self.cancel()

    def warn(self, text: str) -> None:
        """A warning of ours among the engine's messages."""
        if self.on_log is not None:
            self.call(self.on_log, LogLevel.WARN, text)
        else:
            log_unheard(LogLevel.WARN, text)

    def cancel(self) -> None:
        """Stops this job. If the native one has not begun yet, its first event does it."""
        self.cancel_wanted = True
        if _running is self:
            lib.sdsage_cancel()


_turn = threading.Lock()  # held by the running job
_running: Hooks | None = None
_asked: list[Hooks] = []  # running or waiting for the turn
_worker: int | None = None  # thread id of the running job


def log_unheard(level: LogLevel, line: str) -> None:
    log.log({LogLevel.DEBUG: 10, LogLevel.INFO: 20, LogLevel.WARN: 30}.get(level, 40), "%s", line)


@ffi.callback("sd_log_cb_t")  # type: ignore[untyped-decorator]
def _on_log(level: int, line: Any, data: Any) -> None:
    hooks, message = _running, text(line).rstrip("\n")
    if hooks is not None and hooks.on_log is not None:
        hooks.call(hooks.on_log, LogLevel(level), message)
    else:
        log_unheard(LogLevel(level), message)


@ffi.callback("sdsage_event_cb_t")  # type: ignore[untyped-decorator]
def _on_event(event: Any, data: Any) -> None:
    hooks = _running
    if hooks is None:
        return
    if hooks.cancel_wanted:
        lib.sdsage_cancel()
    stage, expert = STAGES[event.stage], EXPERTS[event.expert]
    if event.kind == lib.SDSAGE_EVENT_BEGIN:
        hooks.stages.append((stage, expert, event.steps, time.monotonic()))
        hooks.replayed_here = 0
        hooks.call(hooks.on_progress, Progress(stage, 0, event.steps, 0.0, expert))
    elif event.kind == lib.SDSAGE_EVENT_STEP:
        hooks.steps.append(Step(event.seconds, expert))
    elif event.kind == lib.SDSAGE_EVENT_REPLAYED:
        hooks.replayed += 1
        hooks.replayed_here += 1
        _tell_step(hooks, event.step, event.steps)
    else:
        hooks.stages.pop()
        hooks.seconds[stage] = hooks.seconds.get(stage, 0.0) + event.seconds


@ffi.callback("sd_progress_cb_t")  # type: ignore[untyped-decorator]
def _on_progress(step: int, steps: int, seconds: float, data: Any) -> None:
    hooks = _running
    if hooks is not None and hooks.stages and step > 0:
        _tell_step(hooks, step, steps)


def _tell_step(hooks: Hooks, step: int, steps: int) -> None:
    stage, expert, _, begun = hooks.stages[-1]
    seconds = time.monotonic() - begun
    hooks.call(hooks.on_progress, Progress(stage, step, steps, seconds, expert, hooks.replayed_here))


@ffi.callback("sdsage_answer_cb_t")  # type: ignore[untyped-decorator]
def _on_answer(answer: Any, data: Any) -> None:
    hooks = _running
    if hooks is not None and hooks.on_answer is not None:
        hooks.call(hooks.on_answer, latents_from_c(answer.latents), answer.sigma, answer.step)


@ffi.callback("sdsage_latents_cb_t")  # type: ignore[untyped-decorator]
def _on_latents(latents: Any, index: int, data: Any) -> None:
    hooks = _running
    if hooks is not None and hooks.on_latents is not None:
        hooks.call(hooks.on_latents, latents_from_c(latents[0]), index)


@ffi.callback("sd_preview_cb_t")  # type: ignore[untyped-decorator]
def _on_preview(step: int, count: int, frames: Any, noisy: bool, data: Any) -> None:
    hooks = _running
    if hooks is not None and hooks.on_preview is not None:
        hooks.call(hooks.on_preview, step, images_from_c(frames, count), bool(noisy))


@when_loaded
def _listen() -> None:
    """The engine's callbacks are process-wide: they are set once and find the running job themselves."""
    lib.sd_set_log_callback(_on_log, ffi.NULL)
    lib.sd_set_progress_callback(_on_progress, ffi.NULL)
    lib.sdsage_set_event_callback(_on_event, ffi.NULL)
    lib.sdsage_set_answer_callback(_on_answer, ffi.NULL)
    lib.sdsage_set_latents_callback(_on_latents, ffi.NULL)


def _set_preview(hooks: Hooks) -> None:
    p = hooks.preview
    if p is None or hooks.on_preview is None:
        lib.sd_set_preview_callback(ffi.NULL, PreviewMode.NONE, 1, False, False, ffi.NULL)
    else:
        lib.sd_set_preview_callback(_on_preview, p.mode, max(1, p.interval), p.denoised, p.noisy, ffi.NULL)


@dataclass
class _Outcome:
    """What the worker thread brings back."""

    result: Any = None
    error: BaseException | None = None


def attention() -> tuple[Attention, ...]:
    """What computed attention in the last job of this thread."""
    found = []
    entry = ffi.new("sdsage_attention_t *")
    for i in range(lib.sdsage_attention_count()):
        lib.sdsage_get_attention(i, entry)
        found.append(Attention(text(entry.module), text(entry.kernel), entry.calls, text(entry.why)))
    return tuple(found)


def levers() -> tuple[Lever, ...]:
    """What levers computed in the last job of this thread."""
    found = []
    entry = ffi.new("sdsage_lever_t *")
    for i in range(lib.sdsage_lever_count()):
        lib.sdsage_get_lever(i, entry)
        found.append(Lever(text(entry.module), text(entry.lever), entry.calls, text(entry.why)))
    return tuple(found)


def failure() -> SdsageError:
    """The last job of this thread as an exception."""
    status, message = lib.sdsage_last_status(), text(lib.sdsage_last_error())
    if status == lib.SDSAGE_CANCELLED:
        return Cancelled("the job was cancelled")
    if status == lib.SDSAGE_NON_FINITE:
        return NonFiniteError(message, lib.sdsage_last_step(), EXPERTS[lib.sdsage_last_expert()])
    if status == lib.SDSAGE_SAGE_UNAVAILABLE:
        return SageUnavailable(message)
    if status == lib.SDSAGE_BAD_REQUEST:
        return BadRequest(message)
    return GenerationError(message)


@contextlib.contextmanager
def _the_turn() -> Iterator[None]:
    if _worker == threading.get_ident():
        raise SdsageError("a callback can't start another native job: return first, then start it")
    with _turn:
        yield


def run(
    body: Callable[[], T], hooks: Hooks, device: str | None = None, discard: Callable[[T], None] | None = None
) -> T:
    """Runs `body` on a thread of its own and returns what it returns.

    Waits for its turn: one native job runs per process. An interrupt (Ctrl-C) cancels the job, waits until it has
    stopped, and is raised again. An exception of a callback stops the job and is raised with its own traceback.
    `discard` frees a result that nobody gets because one of these came after the body was done.

    Raises:
        BadRequest: there is no such device.
        SdsageError: called from within a callback.
    """
    _asked.append(hooks)
    try:
        with _the_turn():
            if hooks.cancel_wanted:
                raise Cancelled("the job was cancelled before it began")
            return _run(body, hooks, device, discard)
    finally:
        _asked.remove(hooks)


def cancel(owner: object) -> None:
    """Stops the jobs of `owner`, running or waiting; with None those of everybody."""
    for hooks in list(_asked):
        if owner is None or hooks.owner is owner:
            hooks.cancel()


def _run(body: Callable[[], T], hooks: Hooks, device: str | None, discard: Callable[[T], None] | None) -> T:
    """`run` while it is this job's turn."""
    global _running
    outcome, done = _Outcome(), threading.Event()

    def work() -> None:
        global _worker
        _worker = threading.get_ident()
        try:
            select_device(device)
            outcome.result = body()
        except BaseException as error:
            outcome.error = error
        finally:
            _worker = None
            done.set()

    _set_preview(hooks)
    _running = hooks
    thread = threading.Thread(target=work, name="sdsage-job", daemon=True)
    try:
        thread.start()
        interrupt = _wait(done, hooks)
        thread.join()
    finally:
        _running = None
        lib.sd_set_preview_callback(ffi.NULL, PreviewMode.NONE, 1, False, False, ffi.NULL)
    error = interrupt or hooks.raised or outcome.error
    if error is None and hooks.cancel_wanted:
        error = Cancelled("the job was cancelled; it was too far to stop earlier")
    if error is not None:
        if outcome.result is not None and discard is not None:
            discard(outcome.result)
        raise error
    result: T = outcome.result
    return result


def _wait(done: threading.Event, hooks: Hooks) -> BaseException | None:
    """Waits for the job; an interrupt stops it and is returned once it has stopped.

    An event, not Thread.join: an interrupted join takes the running thread for a finished one (CPython 3.11).
    """
    interrupt: BaseException | None = None
    while not done.is_set():
        try:
            done.wait(0.5)  # in a wait without a limit Windows hears no Ctrl-C
        except BaseException as error:
            interrupt = interrupt or error
            hooks.cancel()
    return interrupt


@atexit.register
def _stop_at_exit() -> None:
    """A job that a thread of the program still runs must not be in C++ when the process takes itself apart."""
    cancel(None)
    if _turn.acquire(timeout=60):
        _turn.release()


def select_device(name: str | None) -> None:
    """The device of what this thread makes next; None leaves it to the engine (the first GPU, else the CPU)."""
    if name is not None and not isinstance(name, str):
        raise BadRequest(f"a device is named by text such as 'cpu' or 'cuda:0', got {name!r}")
    if not lib.sdsage_set_device(ffi.NULL if name is None else name.encode()):
        known = ", ".join(d.name for d in devices())
        raise BadRequest(f"there is no device {name!r} here; devices of this build: {known}")


@dataclass(frozen=True)
class Device:
    """A compute device. `name` is what `device=` takes; memory in bytes; kind "cpu", "gpu", "igpu" or "accel"."""

    name: str
    kind: str
    description: str
    memory_free: int
    memory_total: int


def devices() -> list[Device]:
    """The devices that this build can use, in the engine's order."""
    found = []
    for i in range(lib.sdsage_device_count()):
        d = ffi.new("sdsage_device_t *")
        lib.sdsage_get_device(i, d)
        found.append(Device(text(d.name), text(d.kind), text(d.description), d.memory_free, d.memory_total))
    return found


@dataclass(frozen=True)
class SageInfo:
    """Whether SageAttention can run on a device, and which kernel would.

    Attributes:
        device: name and card: "cuda:0 (NVIDIA H200)".
        kernel: "fp16", "fp8", "fp8++" or "hopper"; "" when not supported.
        emulated: this GPU emulates the kernel's FP8 instructions.
        reason: why it can't run; "" when supported.
        why_not_better: why no better kernel runs, or which other is faster; "" if none.
        compute_capability: "9.0"; "" without a CUDA device.
        architectures: that this build has kernels for: "80", "90a", ...
        toolkit: CUDA version of the kernels: "13.0"; "" without CUDA.
    """

    supported: bool
    device: str
    kernel: str
    emulated: bool
    reason: str
    why_not_better: str
    compute_capability: str
    architectures: tuple[str, ...]
    toolkit: str


def sage_info(kernel: SageKernel | str = SageKernel.AUTO, device: str | None = None) -> SageInfo:
    """Asks the kernels' own chooser about a device (None: the one that a context would get); loads no model.

    Raises:
        BadRequest: no kernel or device is called so.
    """
    chosen = SageKernel.parse(kernel)
    if chosen is SageKernel.COUNT:
        raise BadRequest(f"COUNT is no kernel; choose one of {', '.join(SageKernel.choices())}")
    select_device(device)
    c = ffi.new("sdsage_sage_t *")
    lib.sdsage_get_sage(chosen, c)
    cc, toolkit = c.compute_capability, c.toolkit
    return SageInfo(
        supported=bool(c.supported),
        device=text(c.device),
        kernel=text(c.kernel),
        emulated=bool(c.emulated),
        reason=text(c.reason),
        why_not_better=text(c.why_not_better),
        compute_capability=f"{cc // 10}.{cc % 10}" if cc else "",
        architectures=tuple(text(c.architectures).split()),
        toolkit=f"{toolkit // 1000}.{toolkit % 1000 // 10}" if toolkit else "",
    )


def check_sage(kernel: SageKernel | str, device: str | None) -> None:
    """Raises SageUnavailable where `kernel` can't run on `device`."""
    info = sage_info(kernel, device)
    if not info.supported:
        raise SageUnavailable(info.reason)


def device_levers(levers: str | None, device: str | None) -> tuple[str, ...]:
    """Which of these `engine_levers` work on a device."""
    select_device(device)
    return tuple(filter(None, text(lib.sdsage_device_levers((levers or "default").encode())).split(",")))


def check_fast_linear(levers: str | None, device: str | None) -> None:
    """Raises BadRequest where linear layers can't be computed in FP8 on `device`, with these `engine_levers`."""
    select_device(device)
    problem = text(lib.sdsage_fast_linear_problem((levers or "default").encode()))
    if problem:
        raise BadRequest(problem)
