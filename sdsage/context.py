"""A loaded model: the main object of the Python interface."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sdsage import _job
from sdsage._ffi import ffi, images_from_c, latents_from_c, latents_to_c, lib, text
from sdsage._files import check_context_files, check_model_file
from sdsage._job import Hooks, OnLog, OnPreview, OnProgress, Preview, Step
from sdsage.enums import SampleMethod, Scheduler
from sdsage.errors import BadRequest, ContextClosed, GenerationError, ModelError
from sdsage.params import SdCtxParams, SdImgGenParams, SdLora, SdSampleParams, SdTilingParams, SdVidGenParams

MAX_SIZE = 16384  # pixels; the engine's own arithmetic is in 32 bits
MAX_FRAMES = 10_000
MAX_STEPS = 10_000


@dataclass(frozen=True)
class Timings:
    """Seconds of each stage; `steps` holds every sampling step over both experts, in order."""

    load: float
    encode_text: float
    encode_image: float
    sample: float
    decode: float
    total: float
    steps: tuple[Step, ...]

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
        latents: with keep_latents, one float32 array per picture (1 x C x H x W) or one per video (1 x C x T x H x W).
    """

    frames: NDArray[np.uint8]
    seeds: tuple[int, ...]
    timings: Timings
    adjusted: tuple[str, ...]
    latents: tuple[NDArray[np.float32], ...] = ()


class Context:
    """A model on a device, for any number of jobs.

    The weights stay loaded between jobs unless `free_params_immediately` is set explicitly; `vae_decode_only` (True by
    default) leaves out the VAE's encoder, which jobs with an input picture need.

    Args:
        params: which files, and how they are held.
        device: "cpu", "cuda:1", ... (see `sdsage.devices()`); None takes the first GPU, else the CPU.
        allow_pickle: allow `.ckpt` and `.pt` files, which hold Python objects.
        on_progress, on_log: heard while loading and, unless a job brings its own, in every job.

    Raises:
        ModelError: a file is missing, damaged, or not what its slot needs.
        GenerationError: the engine could not load the model, for want of memory say.
    """

    def __init__(
        self,
        params: SdCtxParams,
        *,
        device: str | None = None,
        allow_pickle: bool = False,
        on_progress: OnProgress | None = None,
        on_log: OnLog | None = None,
    ) -> None:
        self._ctx: Any = None
        self._device = device
        self._allow_pickle = allow_pickle
        self._on_progress, self._on_log = on_progress, on_log
        check_context_files(params, allow_pickle)
        hooks = Hooks(on_progress, on_log)

        def load() -> Any:
            keep: list[Any] = []
            c_params = params.to_c(keep)
            if not params.was_set("free_params_immediately"):
                c_params.free_params_immediately = False
            ctx = lib.new_sd_ctx(c_params)
            if ctx == ffi.NULL:
                error = _job.failure()
                raise ModelError(str(error)) if isinstance(error, BadRequest) else error
            return ctx

        # A reused context must not free its weights after the first job: the engine would read freed memory.
        self._single_use = params.was_set("free_params_immediately") and params.free_params_immediately
        self._used = False
        self._ctx = _job.run(load, hooks, device, lib.free_sd_ctx)
        self._load_seconds = hooks.seconds.get("load", 0.0)

    # ---- life

    @property
    def _open(self) -> Any:
        if self._ctx is None:
            raise ContextClosed("this context is closed: make a new one")
        return self._ctx

    def close(self) -> None:
        """Frees the model. Harmless when already closed."""
        ctx, self._ctx = self._ctx, None
        if ctx is not None:
            _job.run(lambda: lib.free_sd_ctx(ctx), Hooks())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def cancel(self) -> None:
        """Stops the running job at its next step; it raises Cancelled. Callable from any thread and from callbacks."""
        lib.sdsage_cancel()

    # ---- what the model is

    @property
    def version_name(self) -> str:
        """The engine's name of the architecture: "Wan 2.x"."""
        return text(lib.sdsage_version_name(self._open))

    @property
    def supports_image(self) -> bool:
        return bool(lib.sd_ctx_supports_image_generation(self._open))

    @property
    def supports_video(self) -> bool:
        return bool(lib.sd_ctx_supports_video_generation(self._open))

    @property
    def two_experts(self) -> bool:
        """True when a high-noise diffusion model is loaded as well."""
        return bool(lib.sdsage_has_two_experts(self._open))

    @property
    def size_multiple(self) -> int:
        """Width and height must be multiples of this many pixels."""
        return int(lib.sdsage_size_multiple(self._open))

    def check_size(self, width: int, height: int, frames: int | None = None) -> list[Adjustment]:
        """What of a size the model can't take: sizes go up to the multiple, frame counts down to 4n + 1."""
        found = []
        multiple = self.size_multiple
        for what, asked in (("width", width), ("height", height)):
            if asked % multiple:
                below = asked // multiple * multiple
                used = below + multiple
                found.append(Adjustment(what, asked, used, (below, used) if below else (used,)))
        if frames is not None and (frames - 1) % 4:
            used = (frames - 1) // 4 * 4 + 1
            found.append(Adjustment("frame count", frames, used, (used, used + 4)))
        return found

    # ---- jobs

    def generate_image(
        self,
        params: SdImgGenParams,
        *,
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
        preview: Preview | None = None,
        keep_latents: bool = False,
    ) -> Result:
        """Makes `batch_count` pictures.

        Raises:
            BadRequest: a parameter is out of range, or the model needs something that was not given.
            NonFiniteError, GenerationError: the engine failed.
            Cancelled: `cancel()` was called.
        """
        if not self.supports_image:
            raise BadRequest(
                f"{self.version_name} makes videos: use generate_video (vid-gen), with 1 frame for a picture"
            )
        self._check_common(params)
        if not 1 <= params.batch_count <= 1000:
            raise BadRequest(f"batch_count is {params.batch_count}: 1 to 1000 are possible")
        pictures = [params.init_image, params.mask_image, *params.ref_images]
        self._check_encoder(params.init_image is not None or bool(params.ref_images), False)
        self._check_channels(pictures[:1] + pictures[2:], params.mask_image)

        def body(c_params: Any) -> tuple[Any, int]:
            images = lib.generate_image(self._open, c_params)
            return images, params.batch_count

        seeds = self._seeds(params.seed, params.batch_count)
        adjusted = self.check_size(params.width, params.height)
        return self._generate(
            body, params, seeds, adjusted, Hooks(on_progress, None, on_preview, preview), keep_latents
        )

    def generate_video(
        self,
        params: SdVidGenParams,
        *,
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
        preview: Preview | None = None,
        keep_latents: bool = False,
    ) -> Result:
        """Makes one video. Raises what `generate_image` raises."""
        if not self.supports_video:
            raise BadRequest(f"{self.version_name} makes images, not videos: use generate_image (img-gen)")
        self._check_common(params)
        if not 1 <= params.video_frames <= MAX_FRAMES:
            raise BadRequest(f"video_frames is {params.video_frames}: 1 to {MAX_FRAMES} are possible")
        high = params.high_noise_sample_params.sample_steps
        if high > MAX_STEPS or (high > 0 and not self.two_experts):
            raise BadRequest(
                f"high_noise_sample_params.sample_steps is {high}: "
                + (
                    f"at most {MAX_STEPS} are possible"
                    if self.two_experts
                    else "no high-noise diffusion model is loaded"
                )
            )
        given = params.init_image is not None or params.end_image is not None or bool(params.control_frames)
        self._check_encoder(given, bool(lib.sdsage_needs_encoder(self._open)))
        self._check_channels([params.init_image, params.end_image, *params.control_frames], None)

        def body(c_params: Any) -> tuple[Any, int]:
            count = ffi.new("int *")
            images = lib.generate_video(self._open, c_params, count)
            return images, count[0]

        seeds = self._seeds(params.seed, 1)
        adjusted = self.check_size(params.width, params.height, params.video_frames)
        return self._generate(
            body, params, seeds, adjusted, Hooks(on_progress, None, on_preview, preview), keep_latents
        )

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
        self._begin_use()
        video = np.ndim(latents) == 5
        if np.ndim(latents) not in (4, 5) or not np.isfinite(latents).all():
            raise BadRequest(
                f"latents have shape {np.shape(latents)}: "
                "finite values of 1 x C x T x H x W or 1 x C x H x W are needed"
            )

        def work() -> NDArray[np.uint8]:
            keep: list[Any] = []
            count = ffi.new("int *")
            c_tiling = (tiling or SdTilingParams()).to_c(keep)
            return _take_images(
                lib.sdsage_decode(self._open, latents_to_c(latents, keep), c_tiling, video, count), count[0]
            )

        return _job.run(work, self._hooks(Hooks(on_progress)), self._device)

    # ---- inside

    def _hooks(self, hooks: Hooks) -> Hooks:
        hooks.on_progress = hooks.on_progress or self._on_progress
        hooks.on_log = hooks.on_log or self._on_log
        return hooks

    def _generate(
        self,
        call: Callable[[Any], tuple[Any, int]],
        params: SdImgGenParams | SdVidGenParams,
        seeds: tuple[int, ...],
        adjusted: list[Adjustment],
        hooks: Hooks,
        keep_latents: bool,
    ) -> Result:
        self._begin_use()
        begun = time.monotonic()

        def work() -> tuple[NDArray[np.uint8], tuple[NDArray[np.float32], ...]]:
            keep: list[Any] = []
            c_params = params.to_c(keep)
            c_params.seed = seeds[0]
            self._resolve_sampler(c_params)
            lib.sdsage_keep_latents(keep_latents)
            frames = _take_images(*call(c_params))
            return frames, _take_latents() if keep_latents else ()

        frames, latents = _job.run(work, self._hooks(hooks), self._device)
        s = hooks.seconds
        timings = Timings(
            load=self._load_seconds,
            encode_text=s.get("encode_text", 0.0),
            encode_image=s.get("encode_image", 0.0),
            sample=s.get("sample", 0.0),
            decode=s.get("decode", 0.0),
            total=time.monotonic() - begun,
            steps=tuple(hooks.steps),
        )
        return Result(frames, seeds, timings, tuple(map(str, adjusted)), latents)

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

    def _check_common(self, params: SdImgGenParams | SdVidGenParams) -> None:
        _ = self._open
        for what in ("width", "height"):
            value = getattr(params, what)
            if not 1 <= value <= MAX_SIZE:
                raise BadRequest(f"{what} is {value}: 1 to {MAX_SIZE} pixels are possible")
        if not 0.0 <= params.strength <= 1.0:
            raise BadRequest(f"strength is {params.strength}: 0 to 1 is possible")
        self._check_sampling(params.sample_params)
        self._check_loras(params.loras)

    def _check_sampling(self, sample: SdSampleParams) -> None:
        if not 1 <= sample.sample_steps <= MAX_STEPS:
            raise BadRequest(f"sample_steps is {sample.sample_steps}: 1 to {MAX_STEPS} are possible")
        if sample.guidance.txt_cfg < 0.0:
            raise BadRequest(f"guidance.txt_cfg is {sample.guidance.txt_cfg}: 0 or more is possible")
        sigmas = sample.custom_sigmas
        if len(sigmas) == 1 or any(s < 0 or s == float("inf") for s in sigmas):
            raise BadRequest(f"custom_sigmas has {len(sigmas)} values: two or more finite values from 0 up are needed")

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

    def _check_channels(self, pictures: Sequence[Any], mask: Any) -> None:
        for picture in pictures:
            if picture is not None and picture.shape[2] != 3:
                raise BadRequest(f"an input picture has {picture.shape[2]} channel: H x W x 3 is needed")
        if mask is not None and mask.shape[2] != 1:
            raise BadRequest(f"mask_image has {mask.shape[2]} channels: H x W x 1 is needed")


def _take_images(images: Any, count: int) -> NDArray[np.uint8]:
    """Copies and frees what the engine made; raises the job's error if it made nothing."""
    if images == ffi.NULL or count < 1:
        raise (
            _job.failure()
            if lib.sdsage_last_status() != lib.SDSAGE_OK
            else GenerationError("the engine made no picture")
        )
    try:
        return images_from_c(images, count)
    finally:
        lib.sdsage_free_images(images, count)


def _take_latents() -> tuple[NDArray[np.float32], ...]:
    count = ffi.new("int *")
    latents = lib.sdsage_take_latents(count)
    try:
        return tuple(latents_from_c(latents[i]) for i in range(count[0]))
    finally:
        lib.sdsage_free_latents(latents, count[0])
