"""Error classes. Each also inherits the builtin a reader would catch, and knows the exit code of the CLI."""

from typing import Any


class SdsageError(Exception):
    """Base of every error that sdsage raises on purpose."""

    exit_code = 1


class BadRequest(SdsageError, ValueError):
    """A value the caller gave is wrong: says what was asked, what is allowed and what to do."""

    exit_code = 2


class ModelError(BadRequest):
    """A model file is missing, damaged, or not what its slot needs."""


class OutputError(BadRequest):
    """An output name, folder or container that can't be used."""


class MissingExtra(SdsageError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""

    exit_code = 2


class SageUnavailable(BadRequest):
    """`sage_attn` was set and SageAttention can't run on this device or in this build; the message says why."""


class GenerationError(SdsageError, RuntimeError):
    """The engine failed at run time; the message holds its last errors."""


class NonFiniteError(GenerationError):
    """Latents became NaN or Inf.

    Attributes:
        step: sampling step after which it was seen, counted from 1 over both experts.
        expert: "low-noise", "high-noise", or None when the model has one expert.
    """

    def __init__(self, message: str, step: int, expert: str | None) -> None:
        super().__init__(message)
        self.step = step
        self.expert = expert


class WorkerDied(GenerationError):
    """The process that ran the engine has ended, or was ended because it hung. Its context or upscaler is closed.

    Attributes:
        pid: the process.
        returncode: its exit code, or minus the number of the signal that ended it; None when there was no process.
        signal: name of that signal, such as "SIGKILL"; "" without one.
        stage: what was done, as in `Progress.stage`; "start" before the engine was there, "" between two jobs.
        step: sampling step that was being computed, counted from 1 in its stage; 0 outside sampling.
        expert: as in `Progress.expert`.
        last_words: the last lines that the engine and the process wrote.
    """

    def __init__(
        self,
        message: str,
        *,
        pid: int = 0,
        returncode: int | None = None,
        signal: str = "",
        stage: str = "",
        step: int = 0,
        expert: str | None = None,
        last_words: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.pid, self.returncode, self.signal = pid, returncode, signal
        self.stage, self.step, self.expert, self.last_words = stage, step, expert, last_words


class DecodeError(GenerationError):
    """Sampling is done and the VAE could not decode: the work is not lost.

    Attributes:
        latents: the final latents, for `Context.decode` or `sdsage.save_latents`.
        model: the version of the model that they are of.
    """

    def __init__(self, message: str, latents: "tuple[Any, ...]", model: str) -> None:
        super().__init__(message)
        self.latents = latents
        self.model = model


class ResumeError(BadRequest):
    """There is no checkpoint to go on from, or it is of a job with other settings.

    Attributes:
        differences: settings that are not the same: name, value before, value now.
    """

    def __init__(self, message: str, differences: "tuple[Any, ...]" = ()) -> None:
        super().__init__(message)
        self.differences = differences


class Cancelled(SdsageError):
    """The job was cancelled by `cancel()`; the context can be used again."""

    exit_code = 130


class ContextClosed(SdsageError, RuntimeError):
    """The context was used after `close()`."""
