"""Models that stay loaded from one job to the next."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from sdsage._files import PATH_FIELDS
from sdsage._wire import Arrays, pack
from sdsage.batch.identity import hashed, merges_loras
from sdsage.cli.job import Job
from sdsage.cli.loaded import Models, copies_ahead, make_context, make_upscaler
from sdsage.cli.prepare import stamp
from sdsage.cli.report import Reporter
from sdsage.cli.settings import Settings
from sdsage.errors import SdsageError

if TYPE_CHECKING:
    from sdsage import Context, Upscaler, Worker


class _Heard:
    """Hands progress and messages on to the reporter of the job that runs."""

    def __init__(self) -> None:
        self.reporter: Reporter | None = None

    def progress(self, progress: Any) -> None:
        if self.reporter is not None:
            self.reporter.progress(progress)

    def log(self, level: Any, text: str) -> None:
        if self.reporter is not None:
            self.reporter.log(level, text)


class KeptModels(Models):
    """At most one model and one upscaler, in the worker process that `worker` gives.

    Attributes:
        loads: how many models were loaded.
    """

    keeps = True

    def __init__(self, worker: "Callable[[], Worker]", renewed: "Callable[[], Worker]") -> None:
        self._worker, self._renewed = worker, renewed
        self._heard: Any = _Heard()
        self._kept: dict[str, tuple[str, Any]] = {}  # "context" or "upscaler" -> key, object
        self.loads = 0

    @contextmanager
    def context(self, job: Job, reporter: Reporter, decode_only: str | None) -> "Iterator[Context]":
        """What is left of a job to decode is decoded with the whole model: the next job will need it."""
        with self._listening(reporter):
            yield self._get("context", _key(job), lambda: make_context(job, self._heard, self._worker()))

    @contextmanager
    def upscaler(self, settings: Settings, reporter: Reporter) -> "Iterator[Upscaler | None]":
        if not settings["upscale_model"]:
            yield None
            return
        path = settings["upscale_model"]
        names = ("device", "threads", "upscale_tile_size", "diffusion_conv_direct", "offload_to_cpu", "allow_pickle")
        key = hashed([path, stamp(path), *(settings[name] for name in names)])
        with self._listening(reporter):
            yield self._get("upscaler", key, lambda: make_upscaler(settings, self._heard))

    @contextmanager
    def again(self, job: Job, reporter: Reporter, decode_only: str) -> "Iterator[Context]":
        self._kept = {}
        with make_context(job, reporter, self._renewed(), decode_only) as context:
            yield context

    def forget(self) -> None:
        """The process in which they were is gone."""
        self._kept = {}

    @contextmanager
    def _listening(self, reporter: Reporter) -> Iterator[None]:
        before, self._heard.reporter = self._heard.reporter, reporter
        try:
            yield
        finally:
            self._heard.reporter = before

    def _get(self, what: str, key: str, make: Callable[[], Any]) -> Any:
        known, kept = self._kept.get(what, ("", None))
        if known == key:
            return kept
        if kept is not None:
            del self._kept[what]
            with suppress(SdsageError):  # its process has ended: nothing is left of it
                kept.close()
        made = make()
        self._kept[what] = key, made
        self.loads += what == "context"
        return made


def _key(job: Job) -> str:
    """Of all that a loaded model depends on, its files included; without the engine, which knows the defaults."""
    _, _, values = job.ctx.parts()
    files = {name: stamp(values[name]) for name in PATH_FIELDS if values.get(name)}
    files |= {e.path: stamp(e.path) for e in values.get("embeddings", ()) if e.path}
    loras = [[lora.path, stamp(lora.path), lora.multiplier, lora.is_high_noise] for lora in job.loras]
    more = [job.settings["device"], job.settings["allow_pickle"], copies_ahead(job), files]
    return hashed([pack(job.ctx, Arrays()), more, loras if merges_loras(job.settings["lora_apply_mode"]) else []])
