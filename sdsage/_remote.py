"""Objects that live in a worker process, and what makes a class ready for that.

A class has `FACTS`, the names of its properties that never change, and marks the methods that use the engine:

    @property
    @fact
    def factor(self) -> int: ...

    @in_worker
    def upscale(self, image): ...

Made with `isolated`, its instance holds a `Remote` in place of a native object; the marked ones go there.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from sdsage.errors import ContextClosed, GenerationError

if TYPE_CHECKING:
    from sdsage._supervisor import Worker

P = ParamSpec("P")
T = TypeVar("T")


class Remote:
    """An object in a worker process, from the side of the program.

    Args:
        cls: name of the class.
        noun: what users call the object.
        isolated: True for a worker of its own; or the one to use.
        args, kwargs: of the class; `on_progress` and `on_log` are heard in every job.
    """

    _count = 0

    def __init__(
        self, cls: str, noun: str, isolated: "bool | Worker", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        from sdsage._supervisor import Worker  # late: whoever runs the engine itself has no use for it

        self._noun, self._open, self._own = noun, True, not isinstance(isolated, Worker)
        self.worker = isolated if isinstance(isolated, Worker) else Worker()
        if self._own:  # nobody may close it
            weakref.finalize(self, self.worker.kill).atexit = False
        Remote._count += 1
        self._number = Remote._count
        heard = {name: kwargs.pop(name, None) for name in ("on_progress", "on_log")}
        self._heard = {name: callback for name, callback in heard.items() if callback is not None}
        try:
            self._facts: dict[str, Any] = self.worker.call(cls, self._number, args, kwargs, self, self._heard)
        except BaseException:
            self.close()  # it may be there all the same: somebody cancelled too late
            raise

    def fact(self, name: str) -> Any:
        """A property that was read when the object was made."""
        self._check_open()
        return self._facts[name]

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method."""
        self._check_open()
        return self.worker.call(name, self._number, args, kwargs, self, self._heard)

    def _check_open(self) -> None:
        if not self._open or (not self.worker.alive and self.worker.death_is_known):
            why = "closed" if not self._open else "closed, because its worker process has ended"
            raise ContextClosed(f"this {self._noun} is {why}: make a new one")

    def cancel(self) -> None:
        """Stops the jobs of this object."""
        self.worker.cancel(self)

    def close(self) -> None:
        """Frees the object, after a job that still runs; with a worker of its own by the end of it."""
        if not self._open:
            return
        if self._own:
            self.worker.close()
        elif self.worker.alive:
            with contextlib.suppress(GenerationError, ContextClosed):  # it has died: nothing is left of the object
                self.worker.call("close", self._number, (), {}, self, self._heard)
        self._open = False


class Isolable(Protocol):
    """An object that may live in a worker process."""

    _remote: Remote | None


S = TypeVar("S", bound=Isolable)


def in_worker(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method that uses the engine, wherever it is."""

    @functools.wraps(method)
    def dispatch(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._remote is None:
            return method(self, *args, **kwargs)
        result: T = self._remote.call(method.__name__, args, kwargs)
        return result

    dispatch.in_worker = True  # type: ignore[attr-defined]
    return dispatch


def fact(getter: Callable[[Any], T]) -> Callable[[Any], T]:
    """For the getter of a property that does not change while the object lives; its name is one of `FACTS`."""

    @functools.wraps(getter)
    def get(self: Any) -> T:
        if self._remote is None:
            return getter(self)
        value: T = self._remote.fact(getter.__name__)
        return value

    return get
