"""A native object, here or in a worker process, that is closed once: what contexts and upscalers share."""

from collections.abc import Callable
from typing import Any, ClassVar, Self

from sdsage import _job
from sdsage._ffi import lib
from sdsage._job import Hooks, OnLog, OnProgress
from sdsage._remote import Remote
from sdsage.errors import ContextClosed


class Handle:
    """Holds what a native "new" function gave, until `close`.

    Args:
        load: makes the native object; runs as a job, and raises if it can't.
        free: name of the C function that frees it.
        noun: what users call the object: "context".
        hooks: listen to the loading.
        device: as for `Context`.
    """

    FACTS: ClassVar[tuple[str, ...]] = ()
    _remote: Remote | None = None

    def __init__(self, load: Callable[[], Any], free: str, noun: str, hooks: Hooks, device: str | None) -> None:
        self._native: Any = None
        self._free, self._noun, self._device = free, noun, device
        self._on_progress: OnProgress | None = hooks.on_progress
        self._on_log: OnLog | None = hooks.on_log
        hooks.owner = self
        self._native = _job.run(load, hooks, device, lambda made: getattr(lib, free)(made))

    @property
    def _open(self) -> Any:
        """The native object. A job asks for it when it is its turn: somebody may have closed it meanwhile."""
        if self._native is None:
            raise ContextClosed(f"this {self._noun} is closed: make a new one")
        return self._native

    @property
    def worker_pid(self) -> int | None:
        """The process that runs the engine, for `isolated` objects; else None."""
        return None if self._remote is None else self._remote.worker.pid

    def close(self) -> None:
        """Frees the model, after a job that still runs. Harmless when already closed."""
        if self._remote is not None:
            self._remote.close()
            return

        def free() -> None:
            if self._native is not None:
                getattr(lib, self._free)(self._native)
                self._native = None

        if self._native is not None:
            _job.run(free, Hooks())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
