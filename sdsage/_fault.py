"""An exception on its way from the worker process to the program."""

import builtins
import contextlib
import traceback
from dataclasses import dataclass
from typing import Any

from sdsage import errors


@dataclass
class Fault:
    """An exception, taken apart.

    Attributes:
        type: name of a class of `sdsage.errors`, or of a builtin exception.
        args: plain ones only.
        more: attributes of sdsage's own errors.
        trace: the traceback, for errors that nobody raised on purpose; "" for the others.
    """

    type: str
    message: str
    args: list[Any]
    more: dict[str, Any]
    trace: str


def to_fault(error: BaseException) -> Fault:
    """Raises nothing: what can't be told in full is told as text."""
    ours = isinstance(error, errors.SdsageError)
    args = list(error.args) if all(isinstance(a, str | int | float | None) for a in error.args) else [str(error)]
    if isinstance(error, OSError) and error.filename is not None:
        args = [error.errno, error.strerror, str(error.filename)]
    trace = "" if ours else "".join(traceback.format_exception(error))
    more = {k: v for k, v in vars(error).items() if isinstance(v, str | int | tuple | None)} if ours else {}
    return Fault(_known(type(error)), str(error), args, more, trace)


def _known(cls: type) -> str:
    """The nearest class that the program can make again."""
    for base in cls.__mro__:
        if base in (getattr(errors, base.__name__, None), getattr(builtins, base.__name__, None)):
            return base.__name__
    return "Exception"


def to_error(fault: Fault) -> BaseException:
    """The exception again; the worker's traceback is a note below it."""
    own = getattr(errors, fault.type, None)
    if own is errors.NonFiniteError:
        return errors.NonFiniteError(fault.message, fault.more.get("step", 0), fault.more.get("expert"))
    if own is errors.DecodeError:
        return errors.DecodeError(fault.message, fault.more["latents"], fault.more["model"])
    if own is errors.ResumeError:
        return errors.ResumeError(fault.message, fault.more["differences"])
    if isinstance(own, type) and issubclass(own, errors.SdsageError):
        return own(fault.message)
    cls = getattr(builtins, fault.type, None)
    error: BaseException = errors.GenerationError(f"{fault.type}: {fault.message}")
    if isinstance(cls, type) and issubclass(cls, Exception):
        with contextlib.suppress(TypeError):  # UnicodeError and others want arguments of their own
            error = cls(*fault.args)
    error.add_note(f"in the worker process:\n{fault.trace.rstrip()}")
    return error
