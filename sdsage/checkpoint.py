"""What a job keeps on disk while it runs, so that nothing is lost when it is killed or when decoding fails.

One file. While the job samples it holds what the model answered, call by call (`_answers`). A job that goes on from it
runs the sampler from its beginning, with the recorded answers in place of the model until they are used up: every
sampler comes to the very state that it was in. Before decoding, the final latents take the place of the answers
(`latents`).
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdsage import _identity
from sdsage._answers import MAGIC, Answer, AnswerFile, read_header
from sdsage._job import Hooks
from sdsage.errors import BadRequest, Cancelled, NonFiniteError, ResumeError
from sdsage.latents import load_latents, save_latents

# A job that is cancelled leaves its file only if this much sampling would be lost: a quick Ctrl-C means it.
WORTH_KEEPING = 60.0  # seconds


@dataclass(frozen=True)
class Checkpoint:
    """Where a job keeps its work.

    The file stays when the job is done, so that frames can be written first: call `remove` then.

    Attributes:
        path: the file; folders that are missing are made with it.
        every: model calls from one writing to the next. Each takes as many bytes as the latents have: a few MB.
        resume: go on from the file, which must be of a job with the same settings.
        info: plain JSON values to keep in it, for the caller.
    """

    path: Path
    every: int = 1
    resume: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise BadRequest(f"every is {self.every!r}: a whole number of model calls from 1 up is needed")

    def remove(self) -> None:
        """Deletes the file, if it is there."""
        self.path.unlink(missing_ok=True)

    def read(self) -> "Kept":
        """What is in the file, without the latents.

        Raises:
            ResumeError: there is no file.
            BadRequest: it is damaged, or of another version.
        """
        try:
            with self.path.open("rb") as file:
                finished = file.read(len(MAGIC)) != MAGIC
            if finished:
                latents = load_latents(self.path)
                header: dict[str, Any] | None = {**latents.info, "model": latents.model}
            else:
                header = read_header(self.path)
        except (FileNotFoundError, NotADirectoryError):
            raise ResumeError(
                f"there is nothing to resume: {self.path} does not exist. A run keeps it next to its output until it "
                "is done; begin anew without --resume"
            ) from None
        if header is None or not isinstance(header.get("settings"), dict) or not isinstance(header.get("seeds"), list):
            raise ResumeError(f"{self.path} is no checkpoint, so nothing can go on from it")
        return Kept(header, finished)


@dataclass(frozen=True)
class Kept:
    """The header of a checkpoint. `finished`: sampling is over, and the latents wait to be decoded."""

    header: dict[str, Any]
    finished: bool

    @property
    def model(self) -> str:
        """The version of the model, as `Context.version_name` gives it."""
        return str(self.header["model"])

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.header["seeds"])

    @property
    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = self.header.get("info", {})
        return found

    def differences(self, now: Mapping[str, Any]) -> list[_identity.Difference]:
        """Where the settings `now` (see `_identity`) are not those of the file."""
        return _identity.differences(self.header["settings"], dict(now))


class Keeper:
    """A job's checkpoint while the job runs.

    Args:
        checkpoint: where.
        model: `Context.version_name`.
        settings: see `_identity`.

    Attributes:
        answers: what the model answered in the run before.
        latents: the final latents of that run, if it got so far.
        problem: the first thing that could not be written; the job goes on without keeping more, and its log says so.

    Raises:
        ResumeError: there is nothing to resume, or the settings are not the same.
        BadRequest: the file is damaged, or of another version.
        SdsageError: another run works with it.
    """

    def __init__(self, checkpoint: Checkpoint, model: str, settings: dict[str, Any], seeds: tuple[int, ...]) -> None:
        self._checkpoint, self._model, self.seeds = checkpoint, model, seeds
        self._settings = settings
        self._header = {"model": model, "settings": settings, "seeds": list(seeds), "info": dict(checkpoint.info)}
        self._file: AnswerFile | None = None
        self._pending: list[Answer] = []
        self._made: list[Path] = []
        self._latents: dict[int, NDArray[np.float32]] = {}
        self._began = time.monotonic()
        self.answers: tuple[Answer, ...] = ()
        self.latents: tuple[NDArray[np.float32], ...] | None = None
        self.problem: OSError | None = None
        self._hooks = Hooks()
        if checkpoint.resume:
            self._resume()

    def _resume(self) -> None:
        path = self._checkpoint.path
        kept = self._checkpoint.read()
        if kept.model != self._model:
            raise ResumeError(f"{path} is of the model {kept.model}, and this is {self._model}")
        check(kept, self._settings, path)
        if kept.finished:
            self.latents = load_latents(path).tensors
        else:
            self._file = AnswerFile.open(path)
            self.answers = self._file.answers if self._file else ()

    def answer(self, values: NDArray[np.float32], sigma: float, step: int) -> None:
        """What the model just answered. Called from the job's thread, like `final`."""
        self._pending.append(Answer(values, sigma, step))
        if len(self._pending) >= self._checkpoint.every:
            self._write_pending()

    def _write_pending(self) -> None:
        answers, self._pending = self._pending, []
        if self.problem is not None or not answers:
            return
        with self._noting():
            if self._file is None:
                self._make_folder()
                self._file = AnswerFile.create(self._checkpoint.path, self._header)
            self._file.append(answers)

    def final(self, values: NDArray[np.float32], index: int, count: int) -> None:
        """Final latents of picture `index` of `count`; with the last they take the place of the answers."""
        self._latents[index] = values
        if len(self._latents) == count:
            self._pending = []
            with self._noting():
                self._make_folder()
                self._close()  # Windows replaces no open file
                tensors = [self._latents[i] for i in range(count)]
                save_latents(self._checkpoint.path, tensors, self._model, self._header)

    @contextlib.contextmanager
    def listening(self, hooks: Hooks, pictures: int) -> Iterator[None]:
        """Keeps what a job does inside the block, and closes the file after it."""
        hooks.on_answer = self.answer
        hooks.on_latents = lambda values, index: self.final(values, index, pictures)
        self._hooks = hooks
        try:
            yield
        except NonFiniteError:  # it would come to the same end again
            self.discard()
            raise
        except (Cancelled, KeyboardInterrupt):
            if not self.answers and time.monotonic() - self._began < WORTH_KEEPING:
                self.discard()
            raise
        finally:
            self._write_pending()
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """What can't be kept must not end the job."""
        try:
            yield
        except OSError as error:
            if self.problem is None:
                self.problem = error
                self._hooks.warn(
                    f"the work of this run is not kept any more, so it can't be resumed: {self._checkpoint.path} "
                    f"can't be written ({error.strerror})"
                )

    def _make_folder(self) -> None:
        folder = self._checkpoint.path.parent
        for missing in reversed([level for level in (folder, *folder.parents) if not level.exists()]):
            missing.mkdir(exist_ok=True)
            self._made.append(missing)

    def discard(self) -> None:
        """The work is of no use: the file goes, and folders that were made for it."""
        self._pending = []
        self._close()
        self._checkpoint.remove()
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):
                folder.rmdir()


def check(kept: Kept, settings: Mapping[str, Any], path: Path) -> None:
    """Raises ResumeError if the settings are not those of the checkpoint at `path`."""
    found = kept.differences(settings)
    if found:
        said = "; ".join(f"{d.name} was {_identity.text(d.before)} and is {_identity.text(d.now)} now" for d in found)
        raise ResumeError(
            f"{path} is of a run with other settings: {said}. Give the same settings, or begin anew without resuming",
            tuple(found),
        )
