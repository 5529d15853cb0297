"""The engine of a command: a worker process, which starts while the command is still being looked at."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .settings import Settings


@contextmanager
def engine(settings: Settings) -> Iterator[None]:
    """`settings.worker` is a worker in this block. None is started for a command that is wrong or only prints."""
    if settings.problems.found or settings.values.get("print_params"):
        yield
        return
    from sdsage._supervisor import Worker

    try:
        with Worker() as settings.worker:
            yield
    finally:
        settings.worker = None


def ask(settings: Settings, function: str, *args: Any) -> Any:
    """Calls one of `_worker.FUNCTIONS`, in the worker if there is one."""
    if settings.worker is not None:
        return settings.worker.run(function, *args)
    from sdsage._worker import FUNCTIONS

    return FUNCTIONS[function](*args)
