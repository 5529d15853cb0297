"""The models of a run: where they come from, and how long they stay loaded."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from .job import Job
from .report import Reporter
from .settings import Settings

if TYPE_CHECKING:
    from sdsage import Context, Upscaler, Worker


class Models:
    """Models that are loaded for one run and closed after it.

    Attributes:
        keeps: they stay for the next run, so none may free its weights.
    """

    keeps = False

    def context(self, job: Job, reporter: Reporter, decode_only: str | None) -> "AbstractContextManager[Context]":
        """The model of a job; see `sdsage.Context` for `decode_only`."""
        return make_context(job, reporter, job.settings.worker or True, decode_only)

    def upscaler(self, settings: Settings, reporter: Reporter) -> "AbstractContextManager[Upscaler | None]":
        """The model of --upscale-model; nothing when there is none."""
        return make_upscaler(settings, reporter) if settings["upscale_model"] else nullcontext()

    def again(self, job: Job, reporter: Reporter, decode_only: str) -> "AbstractContextManager[Context]":
        """What is needed to decode, in a new process: the one before has died."""
        return make_context(job, reporter, True, decode_only)


def make_context(job: Job, reporter: Reporter, isolated: "bool | Worker", decode_only: str | None = None) -> "Context":
    """The model of a job, heard by `reporter`."""
    from sdsage import Context

    return Context(
        job.ctx,
        device=job.settings["device"],
        allow_pickle=job.settings["allow_pickle"],
        on_progress=reporter.progress,
        on_log=reporter.log,
        isolated=isolated,
        decode_only=decode_only,
        copy_ahead=copies_ahead(job),
    )


def copies_ahead(job: Job) -> bool:
    """Whether the second expert may lie on the GPU beside the first: a number of GiB is a limit."""
    from .memory import AUTO

    return job.settings["vram"] in (None, AUTO)


def make_upscaler(settings: Settings, reporter: Reporter) -> "Upscaler":
    """The model of --upscale-model."""
    from sdsage import Upscaler

    return Upscaler(
        settings["upscale_model"],
        device=settings["device"],
        n_threads=settings["threads"],
        tile_size=settings["upscale_tile_size"],
        direct=settings["diffusion_conv_direct"],
        offload_params_to_cpu=settings["offload_to_cpu"],
        allow_pickle=settings["allow_pickle"],
        on_log=reporter.log,
        isolated=settings.worker or True,
    )
