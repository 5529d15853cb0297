"""A loaded model: the main object of the Python interface."""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sdsage import _identity, _job, _memory, _outcome
from sdsage._bounds import MAX_THREADS, aligned_frames, lever_problem
from sdsage._ffi import answers_to_c, ffi, lib, text
from sdsage._files import check_context_files, check_model_file, decoding_params
from sdsage._fps import model_fps
from sdsage._handle import Handle
from sdsage._headers import look
from sdsage._job import Attention, Hooks, Lever, OnLog, OnPreview, OnProgress, Preview, Step
from sdsage._limits import check_image_job, check_references, check_video_job, hires_size
from sdsage._remote import Remote, fact, in_worker
from sdsage.checkpoint import Checkpoint, Keeper
from sdsage.enums import CacheMode, SampleMethod, Scheduler, weight_types
from sdsage.errors import BadRequest, ContextClosed, ModelError
from sdsage.params import SdCtxParams, SdImgGenParams, SdLora, SdTilingParams, SdVidGenParams

if TYPE_CHECKING:
    from sdsage._supervisor import Worker


@dataclass(frozen=True)
class Timings:
    """Seconds of each stage.

    `steps` holds every sampling step over both experts that was computed, in order; `replayed` counts those that came
    from a checkpoint instead.
    """

    load: float
    encode_text: float
    encode_image: float
    sample: float
    decode: float
    total: float
    steps: tuple[Step, ...]
    replayed: int = 0

    @property
    def first_step(self) -> float | None:
        """Seconds of the first step, which also plans memory and warms up."""
        return self.steps[0].seconds if self.steps else None

    @property
    def mean_later_steps(self) -> float | None:
        """Mean seconds of all steps but the first; None with fewer than two."""
        later = [s.seconds for s in self.steps[1:]]
        return sum(later) / len(later) if later else None


@dataclass(frozen=True)
class Adjustment:
    """A size or frame count that the model can't take as asked. `neighbours`: the nearest that it can."""

    what: str
    asked: int
    used: int
    neighbours: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.what} {self.asked} is not possible with this model: using {self.used}"


@dataclass(frozen=True)
class Result:
    """What a job made.

    Attributes:
        frames: uint8, N x H x W x 3; the pictures of an image job, the frames of a video.
        seeds: the seed of every picture; one for a video.
        timings: seconds by stage; `load` is that of the context.
        adjusted: what was not made as asked, one sentence each.
        attention: which kernels computed attention in which part of the model, how often, and why not SageAttention;
            what came from a checkpoint was not computed.
        latents: with keep_latents, one float32 array per picture (1 x C x H x W) or one per video (1 x C x T x H x W).
        levers: what sdsage computed in place of the engine (`engine_levers`, `fast_linear`), by part of the model.
    """

    frames: NDArray[np.uint8]
    seeds: tuple[int, ...]
    timings: Timings
    adjusted: tuple[str, ...]
    attention: tuple[Attention, ...]
    latents: tuple[NDArray[np.float32], ...] = ()
    levers: tuple[Lever, ...] = ()


class Context(Handle):
    """A model on a device, for any number of jobs.

    The weights stay loaded between jobs unless `free_params_immediately` is set explicitly; `vae_decode_only` (True by
    default) leaves out the VAE's encoder, which jobs with an input picture need.

    Args:
        params: which files, and how they are held.
        device: "cpu", "cuda:1", ... (see `sdsage.devices()`); None takes the first GPU, else the CPU.
        allow_pickle: allow `.ckpt` and `.pt` files, which hold Python objects.
        on_progress, on_log: heard while loading and, unless a job brings its own, in every job.
        isolated: run the engine in a process of its own (True), or in that of a given `Worker`. Results, errors and
            callbacks are the same; what ends that process (an abort, want of memory) is a `WorkerDied` here, and a
            job that does not stop in half a second when it is cancelled ends with it, and closes the context.
        decode_only: the version of a model (as `version_name` gives it) whose latents will be decoded, and nothing
            else: the VAE is the only file that is needed then (or `taesd_path`, or a whole checkpoint).
        copy_ahead: with `offload_params_to_cpu` and two experts, copy the second one to the GPU while the first one
            computes its last step, if memory is free there. False keeps what is used to one expert.

    Raises:
        SageUnavailable: `sage_attn` is set and SageAttention can't run on the device; no file has been opened.
        ModelError: a file is missing, damaged, or not what its slot needs.
        GenerationError: the engine could not load the model, for want of memory say.
    """

    FACTS = ("version_name", "supports_image", "supports_video", "two_experts", "size_multiple")

    def __init__(
        self,
        params: SdCtxParams,
        *,
        device: str | None = None,
        allow_pickle: bool = False,
        on_progress: OnProgress | None = None,
        on_log: OnLog | None = None,
        isolated: "bool | Worker" = False,
        decode_only: str | None = None,
        copy_ahead: bool = True,
    ) -> None:
        if isolated:
            more = {"device": device, "allow_pickle": allow_pickle, "on_progress": on_progress, "on_log": on_log}
            more |= {"decode_only": decode_only, "copy_ahead": copy_ahead}
            self._remote = Remote("Context", "context", isolated, (params,), more)
            return
        self._allow_pickle = allow_pickle
        self._diffusion_path = params.diffusion_model_path or params.model_path
        self._decode_only, self._copy_ahead = decode_only is not None, copy_ahead
        self._identity = _identity.flat(params, "ctx")
        if self._decode_only:
            params = decoding_params(params)
        elif params.sage_attn:
            _job.check_sage(params.sage_kernel, device)
        if problem := lever_problem(params.engine_levers):
            raise BadRequest(f"engine_levers: {problem}")
        if params.fast_linear:
            _job.check_fast_linear(params.engine_levers, device)
        check_context_files(params, allow_pickle, self._decode_only)
        hooks = Hooks(on_progress, on_log)
        if params.n_threads > MAX_THREADS:
            raise BadRequest(f"n_threads is {params.n_threads}: at most {MAX_THREADS} are possible")
        if not params.wtype.is_weight_type:
            raise BadRequest(f"wtype {params.wtype.engine_name} can't hold weights; choose {', '.join(weight_types())}")

        def load() -> Any:
            keep: list[Any] = []
            c_params = params.to_c(keep)
            if not params.was_set("free_params_immediately"):
                c_params.free_params_immediately = False
            if not lib.sdsage_decode_only(ffi.NULL if decode_only is None else decode_only.encode()):
                raise BadRequest(f"no model that this engine knows is called {decode_only!r}")
            ctx = lib.new_sd_ctx(c_params)
            if ctx == ffi.NULL:
                error = _job.failure()
                raise ModelError(str(error)) if type(error) is BadRequest else error
            return ctx

        self._costs = _memory.costs(params, device)
        # A reused context must not free its weights after the first job: the engine would read freed memory.
        self._single_use = params.was_set("free_params_immediately") and params.free_params_immediately
        self._used = False
        super().__init__(load, "free_sd_ctx", "context", hooks, device)
        self._load_seconds = hooks.seconds.get("load", 0.0)

    def cancel(self) -> None:
        """Stops this context's job, running or waiting for its turn; it raises Cancelled.

        A job stops at its next sampling step, and on the CPU inside a decode; a decode that has begun on a GPU is
        finished, and its frames are dropped. An isolated one that needs longer than half a second ends with its
        worker process, and this context is closed.
        Callable from any thread and from callbacks. Jobs of other contexts go on.
        """
        if self._remote is not None:
            self._remote.cancel()
        else:
            _job.cancel(self)

    # ---- what the model is

    @property
    @fact
    def version_name(self) -> str:
        """The engine's name of the architecture: "Wan 2.x"."""
        return text(lib.sdsage_version_name(self._open))

    @property
    @fact
    def supports_image(self) -> bool:
        return bool(lib.sd_ctx_supports_image_generation(self._open))

    @property
    @fact
    def supports_video(self) -> bool:
        return bool(lib.sd_ctx_supports_video_generation(self._open))

    @property
    @fact
    def two_experts(self) -> bool:
        """True when a high-noise diffusion model is loaded as well."""
        return bool(lib.sdsage_has_two_experts(self._open))

    @property
    def fps(self) -> int:
        """Frames per second at which the model's videos are meant to be played."""
        return model_fps(self.version_name)

    @property
    @fact
    def size_multiple(self) -> int:
        """Width and height must be multiples of this many pixels."""
        return int(lib.sdsage_size_multiple(self._open))

    @in_worker
    def check_first_frame(self) -> None:
        """Raises BadRequest unless a video of this model can begin with a given picture (`init_image`)."""
        takes_pictures = bool(lib.sdsage_needs_encoder(self._open))
        # VACE takes the picture as a reference, not as the first frame
        header = look(self._diffusion_path) if takes_pictures else None
        vace = header is not None and any("vace_" in name for name in header.tensors)
        if vace or not (takes_pictures or self.version_name == "Wan 2.2 TI2V"):
            raise BadRequest(
                f"this model ({self.version_name}{', VACE' if vace else ''}) can't go on from a last frame, because it "
                "takes no first one: use an image-to-video model, such as Wan2.2 I2V or TI2V, or leave out --extend"
            )
        self._check_encoder(True, takes_pictures)

    @in_worker
    def check_size(self, job: SdImgGenParams | SdVidGenParams) -> list[Adjustment]:
        """What of a job's sizes the model can't take: sizes go up to the multiple, frame counts down to 4n + 1.

        The second pass of an image (`hires`) counts from the size that the first really has.
        """
        used, found = self._aligned("", job.width, job.height)
        if isinstance(job, SdImgGenParams):
            second = hires_size(job, *used)
            if second is not None:
                found += self._aligned("hires ", *second)[1]
        elif aligned_frames(job.video_frames) != job.video_frames:
            frames = aligned_frames(job.video_frames)
            found.append(Adjustment("frame count", job.video_frames, frames, (frames, frames + 4)))
        return found

    def _aligned(self, which: str, width: int, height: int) -> tuple[tuple[int, int], list[Adjustment]]:
        """A size as the engine takes it, and what was changed."""
        multiple = self.size_multiple
        used, found = [], []
        for what, asked in (("width", width), ("height", height)):
            below = asked // multiple * multiple
            used.append(asked if asked == below else below + multiple)
            if asked != below:
                found.append(Adjustment(which + what, asked, used[-1], (below, used[-1]) if below else (used[-1],)))
        return (used[0], used[1]), found

    # ---- jobs

    @in_worker
    def generate_image(
        self,
        params: SdImgGenParams,
        *,
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
        preview: Preview | None = None,
        keep_latents: bool = False,
        checkpoint: Checkpoint | None = None,
    ) -> Result:
        """Makes `batch_count` pictures.

        With `checkpoint` the work is kept on disk while it is done, and `checkpoint.resume` goes on with it: the
        pictures are those of a run that was not interrupted, bit for bit where the device computes the same twice. Step
        caches (`params.cache`) begin anew, which `Result.adjusted` says. The file stays until `checkpoint.remove()`.

        Raises:
            ResumeError: `checkpoint.resume`, and there is nothing to resume, or it is of other settings.
            DecodeError: the VAE could not decode, in tiles neither; the error holds the latents.
            BadRequest: a parameter is out of range, the model needs something that was not given, or the job needs more
                memory than there is.
            NonFiniteError, GenerationError: the engine failed.
            Cancelled: `cancel()` was called.
        """
        if self._decode_only:
            keeper = self._keeper(checkpoint, params, self._seeds(params.seed, params.batch_count))
            return self._decode_kept(keeper, params, [], Hooks(on_progress), keep_latents)
        if not self.supports_image:
            raise BadRequest(
                f"{self.version_name} makes videos: use generate_video (vid-gen), with 1 frame for a picture"
            )
        check_image_job(params, self.version_name)
        check_references(params, *self._aligned("", params.width, params.height)[0], self.version_name)
        self._costs.check(params)
        self._check_loras(params.loras)
        self._check_encoder(params.init_image is not None or bool(params.ref_images), False)

        def body(c_params: Any) -> tuple[Any, int]:
            images = lib.generate_image(self._open, c_params)
            return images, params.batch_count

        seeds = self._seeds(params.seed, params.batch_count)
        adjusted = [str(a) for a in self.check_size(params)]
        return self._generate(
            body, params, seeds, adjusted, Hooks(on_progress, None, on_preview, preview), keep_latents, checkpoint
        )

    @in_worker
    def generate_video(
        self,
        params: SdVidGenParams,
        *,
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
        preview: Preview | None = None,
        keep_latents: bool = False,
        checkpoint: Checkpoint | None = None,
    ) -> Result:
        """Makes one video. Takes and raises what `generate_image` does."""
        if self._decode_only:
            keeper = self._keeper(checkpoint, params, self._seeds(params.seed, 1))
            return self._decode_kept(keeper, params, [], Hooks(on_progress), keep_latents)
        if not self.supports_video:
            raise BadRequest(f"{self.version_name} makes images, not videos: use generate_image (img-gen)")
        needs_encoder = bool(lib.sdsage_needs_encoder(self._open))
        check_video_job(params, self.version_name, self.two_experts, needs_encoder)
        self._costs.check(params)
        self._check_loras(params.loras)
        given = params.init_image is not None or params.end_image is not None or bool(params.control_frames)
        self._check_encoder(given, needs_encoder)

        def body(c_params: Any) -> tuple[Any, int]:
            count = ffi.new("int *")
            images = lib.generate_video(self._open, c_params, count)
            return images, count[0]

        seeds = self._seeds(params.seed, 1)
        adjusted = [str(a) for a in self.check_size(params)]
        adjusted += self._without_effect(params, needs_encoder)
        return self._generate(
            body, params, seeds, adjusted, Hooks(on_progress, None, on_preview, preview), keep_latents, checkpoint
        )

    @in_worker
    def decode(
        self,
        latents: NDArray[np.float32],
        tiling: SdTilingParams | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> NDArray[np.uint8]:
        """Frames (N x H x W x 3) of latents that a job kept.

        Latents are 1 x C x T x H x W for a video and 1 x C x H x W for an image.
        """
        return self.decode_all([latents], tiling, on_progress=on_progress).frames

    @in_worker
    def decode_all(
        self,
        latents: Sequence[NDArray[np.float32]],
        tiling: SdTilingParams | None = None,
        *,
        on_progress: OnProgress | None = None,
        seeds: Sequence[int] = (),
    ) -> Result:
        """What a job would have made of the latents that it kept (`Result.latents`): all its pictures, or its video.

        `seeds` are handed on to the result. What does not decode at once for want of memory is decoded in tiles, and
        `Result.adjusted` says so.

        Raises:
            BadRequest: the latents are not of this model.
            DecodeError: the VAE could not decode, in tiles neither.
        """
        video = self.supports_video
        for x in latents:
            self._check_latents(x, video)
        if not latents:
            raise BadRequest("there are no latents to decode")
        self._begin_use()
        begun, hooks = time.monotonic(), self._hooks(Hooks(on_progress))

        def work() -> tuple[NDArray[np.uint8], list[str], tuple[Attention, ...], tuple[Lever, ...]]:
            frames, notes = _outcome.decode(self._open, latents, tiling or SdTilingParams(), video)
            return frames, notes, _job.attention(), _job.levers()

        frames, notes, attention, levers = _job.run(work, hooks, self._device)
        return Result(
            frames, tuple(seeds), self._timings(hooks, begun), tuple(notes), attention, tuple(latents), levers
        )

    def _check_latents(self, latents: NDArray[np.float32], video: bool) -> None:
        shape = np.shape(latents)
        if len(shape) != (5 if video else 4) or shape[0] != 1 or 0 in shape or not np.isfinite(latents).all():
            raise BadRequest(
                f"latents have shape {np.shape(latents)}: "
                f"finite values of 1 x C x {'T x ' if video else ''}H x W are needed"
            )

    # ---- inside

    def _hooks(self, hooks: Hooks) -> Hooks:
        hooks.on_progress = hooks.on_progress or self._on_progress
        hooks.on_log = hooks.on_log or self._on_log
        hooks.owner = self
        return hooks

    def _generate(
        self,
        call: Callable[[Any], tuple[Any, int]],
        params: SdImgGenParams | SdVidGenParams,
        seeds: tuple[int, ...],
        adjusted: list[str],
        hooks: Hooks,
        keep_latents: bool,
        checkpoint: Checkpoint | None,
    ) -> Result:
        begun = time.monotonic()
        keeper = self._keeper(checkpoint, params, seeds)
        if keeper is not None and keeper.latents is not None:
            return self._decode_kept(keeper, params, adjusted, hooks, keep_latents)
        self._begin_use()
        seeds = seeds if keeper is None else keeper.seeds

        def work() -> tuple[
            NDArray[np.uint8],
            tuple[Attention, ...],
            tuple[Lever, ...],
            tuple[NDArray[np.float32], ...],
            list[str],
        ]:
            keep: list[Any] = []
            c_params = params.to_c(keep)
            c_params.seed = seeds[0]
            self._resolve_sampler(c_params)
            lib.sdsage_keep_latents(True)
            lib.sdsage_copy_ahead(self._copy_ahead)
            if keeper is not None:
                lib.sdsage_replay(answers_to_c(keeper.answers, keep), len(keeper.answers))
            frames = _outcome.take_images(self._open, *call(c_params))
            return frames, _job.attention(), _job.levers(), _outcome.take_latents(), _outcome.tiled()

        with nullcontext() if keeper is None else keeper.listening(hooks, len(seeds)):
            frames, attention, levers, latents, notes = _job.run(work, self._hooks(hooks), self._device)
        if hooks.replayed and params.cache.mode != CacheMode.DISABLED:
            notes.append(
                f"the step cache ({params.cache.mode.engine_name}) began anew after {hooks.replayed} steps from the "
                "checkpoint: frames can differ from those of a run that was not interrupted"
            )
        adjusted += notes
        kept = latents if keep_latents else ()
        return Result(frames, seeds, self._timings(hooks, begun), tuple(adjusted), attention, kept, levers)

    def _decode_kept(
        self,
        keeper: Keeper | None,
        params: SdImgGenParams | SdVidGenParams,
        adjusted: list[str],
        hooks: Hooks,
        keep_latents: bool,
    ) -> Result:
        """What is left to do when sampling was over in the run before."""
        if keeper is None or keeper.latents is None:
            raise BadRequest("this context only decodes, and there are no latents yet: make one without decode_only")
        tiling = params.vae_tiling_params
        done = self.decode_all(keeper.latents, tiling, on_progress=hooks.on_progress, seeds=keeper.seeds)
        return replace(done, adjusted=(*adjusted, *done.adjusted), latents=done.latents if keep_latents else ())

    def _keeper(
        self, checkpoint: Checkpoint | None, params: SdImgGenParams | SdVidGenParams, seeds: tuple[int, ...]
    ) -> Keeper | None:
        """The open checkpoint; `seeds` are drawn ones if the job asks for that, and an earlier run's win over them."""
        if checkpoint is None:
            return None
        if checkpoint.resume and params.seed < 0:
            seeds = checkpoint.read().seeds
        settings = _identity.identity(self._identity, params, seeds[0])
        return Keeper(checkpoint, self.version_name, settings, seeds)

    def _timings(self, hooks: Hooks, begun: float) -> Timings:
        s = hooks.seconds
        return Timings(
            load=self._load_seconds,
            encode_text=s.get("encode_text", 0.0),
            encode_image=s.get("encode_image", 0.0),
            sample=s.get("sample", 0.0),
            decode=s.get("decode", 0.0),
            total=time.monotonic() - begun,
            steps=tuple(hooks.steps),
            replayed=hooks.replayed,
        )

    def _without_effect(self, params: SdVidGenParams, takes_pictures: bool) -> list[str]:
        """What was given and can't do anything with this model, one sentence each."""
        given = {
            "init_image": params.init_image is not None,
            "end_image": params.end_image is not None,
            "control_frames": bool(params.control_frames),
        }
        if takes_pictures:
            given = {}
        elif self.version_name == "Wan 2.2 TI2V":
            del given["init_image"]
        found = [
            f"{name} has no effect with this model ({self.version_name})"
            for name, is_given in given.items()
            if is_given
        ]
        low, high = params.sample_params.guidance.txt_cfg, params.high_noise_sample_params.guidance.txt_cfg
        if self.two_experts and low == 1 and high != 1:
            found.append(
                f"the high-noise expert works with guidance.txt_cfg 1 instead of {high:g}: the engine computes what "
                "guidance needs only if that of the low-noise expert is not 1"
            )
        return found

    def _begin_use(self) -> None:
        _ = self._open
        if self._single_use and self._used:
            raise ContextClosed(
                "this context was made with free_params_immediately=True and gave its weights back after one job: "
                "make a new one, or leave that field alone"
            )
        self._used = True

    def _resolve_sampler(self, c_params: Any) -> None:
        """Fills in the model's own sampler and scheduler, as sd-cli does: a hires pass takes them literally."""
        samples = [c_params.sample_params]
        if hasattr(c_params, "high_noise_sample_params"):
            samples.append(c_params.high_noise_sample_params)
        for sample in samples:
            if sample.sample_method == SampleMethod.COUNT:
                sample.sample_method = lib.sd_get_default_sample_method(self._open)
        if samples[0].scheduler == Scheduler.COUNT:
            samples[0].scheduler = lib.sd_get_default_scheduler(self._open, samples[0].sample_method)

    def _seeds(self, seed: int, count: int) -> tuple[int, ...]:
        first = seed if seed >= 0 else secrets.randbelow(2**31)
        return tuple(first + i for i in range(count))

    def _check_loras(self, loras: Sequence[SdLora]) -> None:
        for lora in loras:
            check_model_file(lora.path or "", "loras", self._allow_pickle)
            if lora.is_high_noise and not self.two_experts:
                raise BadRequest(
                    f"LoRA {lora.path} is for the high-noise expert, but no high-noise diffusion model is loaded"
                )

    def _check_encoder(self, picture_given: bool, always: bool) -> None:
        if (picture_given or always) and not lib.sdsage_can_encode(self._open):
            why = "this model" if always else "a job with an input picture"
            raise BadRequest(
                f"{why} needs the VAE's encoder: set sd_ctx_params.vae_decode_only = False before making the context"
            )
