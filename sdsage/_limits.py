"""What a job may ask for. Checked before the engine sees it: past these values it crashes, or makes nothing of use."""

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from sdsage._bounds import (
    MAX_FRAMES,
    MAX_FRAMES_ENCODED,
    MAX_PICTURES,
    MAX_PROMPT_BYTES,
    MAX_SIZE,
    MAX_STEPS,
)
from sdsage.enums import CacheMode, HiresUpscaler, Scheduler
from sdsage.errors import BadRequest
from sdsage.params import SdCacheParams, SdImgGenParams, SdSampleParams, SdVidGenParams

# These need two sigmas to spread over.
TWO_STEP_SCHEDULERS = (Scheduler.GITS, Scheduler.KARRAS, Scheduler.EXPONENTIAL)
# Its tables are those of UNet models.
AYS_MODELS = ("SD 1", "SDXL", "SVD", "SD 2", "Instruct", "SDXS")


def between(what: str, value: float, low: float, high: float, unit: str = "") -> None:
    """Raises BadRequest unless low <= value <= high."""
    if not low <= value <= high:
        raise BadRequest(f"{what} is {value}: {low:g} to {high:g}{unit} is possible")


def check_size(params: SdImgGenParams | SdVidGenParams) -> None:
    for what in ("width", "height"):
        between(what, getattr(params, what), 1, MAX_SIZE, " pixels")


def check_prompts(params: SdImgGenParams | SdVidGenParams) -> None:
    for what in ("prompt", "negative_prompt"):
        text = getattr(params, what) or ""
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError:
            raise BadRequest(f"{what} holds a character that is no text (a lone surrogate)") from None
        if size > MAX_PROMPT_BYTES:
            raise BadRequest(f"{what} has {size} bytes: at most {MAX_PROMPT_BYTES} are possible")


def check_sampling(sample: SdSampleParams, steps: int, version_name: str) -> None:
    """`steps`: those over which the sigmas are spread, of both experts together."""
    between("sample_steps", sample.sample_steps, 1, MAX_STEPS)
    guidance = sample.guidance
    for what, value in (("txt_cfg", guidance.txt_cfg), ("distilled_guidance", guidance.distilled_guidance)):
        between(f"guidance.{what}", value, 0, 1e6)
    if not sample.flow_shift > 0:
        raise BadRequest(f"flow_shift is {sample.flow_shift}: a number above 0 is needed")
    if sample.eta < 0:
        raise BadRequest(f"eta is {sample.eta}: 0 or more is possible")
    sigmas = sample.custom_sigmas
    falls = all(a > b for a, b in pairwise(sigmas))
    if sigmas and (len(sigmas) < 2 or not falls or sigmas[-1] < 0 or not all(map(math.isfinite, sigmas))):
        raise BadRequest(f"custom_sigmas {sigmas} can't be used: two or more values that fall, the last 0 or more")
    if not sigmas:
        check_scheduler(sample.scheduler, steps, version_name)


def check_scheduler(scheduler: Scheduler, steps: int, version_name: str) -> None:
    name = scheduler.engine_name
    if scheduler in TWO_STEP_SCHEDULERS and steps < 2:
        raise BadRequest(f"scheduler {name} needs 2 steps or more, {steps} was asked for: add steps or choose another")
    if scheduler is Scheduler.AYS and not version_name.startswith(AYS_MODELS):
        raise BadRequest(f"scheduler ays is for SD and SDXL models, not for {version_name}: choose another")


def check_cache(cache: SdCacheParams) -> None:
    if cache.mode is CacheMode.SPECTRUM:
        between("cache.spectrum_m", cache.spectrum_m, 1, 64)
        between("cache.spectrum_window_size", cache.spectrum_window_size, 1, MAX_STEPS)
        between("cache.spectrum_warmup_steps", cache.spectrum_warmup_steps, 0, MAX_STEPS)
        between("cache.spectrum_lam", cache.spectrum_lam, 0, 1e6)
        between("cache.spectrum_w", cache.spectrum_w, 0, 1)
        between("cache.spectrum_flex_window", cache.spectrum_flex_window, 0, 1e6)
        between("cache.spectrum_stop_percent", cache.spectrum_stop_percent, 0, 1)
    if cache.scm_mask and not all(item.strip() in ("0", "1") for item in cache.scm_mask.split(",")):
        raise BadRequest(f"cache.scm_mask is {cache.scm_mask!r}: zeros and ones separated by commas are needed")


def hires_size(params: SdImgGenParams, width: int = 0, height: int = 0) -> tuple[int, int] | None:
    """Width and height that the second pass is asked for; None without one.

    `width` and `height` are those of the first pass, by default as `params` ask for them. As in the engine, one side
    alone counts for both.
    """
    hires = params.hires
    if not hires.enabled or hires.upscaler is HiresUpscaler.NONE:
        return None
    if hires.target_width or hires.target_height:
        return hires.target_width or hires.target_height, hires.target_height or hires.target_width
    sides = (width or params.width, height or params.height)
    wide, high = (int(np.floor(np.float32(side) * np.float32(hires.scale) + np.float32(0.5))) for side in sides)
    return wide, high


def check_hires(params: SdImgGenParams, version_name: str) -> None:
    hires, sample = params.hires, params.sample_params
    if not hires.enabled:
        return
    between("hires.target_width", hires.target_width, 0, MAX_SIZE, " pixels")
    between("hires.target_height", hires.target_height, 0, MAX_SIZE, " pixels")
    if not (hires.target_width or hires.target_height):
        between("hires.scale", hires.scale, 0.0625, 16)
    for what, value in zip(("width", "height"), hires_size(params) or (), strict=False):
        between(f"hires {what}", value, 1, MAX_SIZE, " pixels")
    if not 0 < hires.denoising_strength <= 1:
        raise BadRequest(f"hires.denoising_strength is {hires.denoising_strength}: above 0, up to 1 is possible")
    steps = (hires.steps or sample.sample_steps) / hires.denoising_strength
    between("hires.steps / hires.denoising_strength", steps, 1, MAX_STEPS)
    if hires.upscaler is HiresUpscaler.COUNT or (hires.upscaler is HiresUpscaler.MODEL and not hires.model_path):
        raise BadRequest("hires.upscaler is Model without hires.model_path, or not one: choose an upscaler")
    if sample.scheduler in TWO_STEP_SCHEDULERS:
        check_scheduler(sample.scheduler, int(steps), version_name)


def check_pictures(pictures: Iterable[Any], mask: Any = None) -> None:
    """Pictures are H x W x 3, a mask is H x W x 1."""
    for picture in pictures:
        if picture is not None and picture.shape[2] != 3:
            raise BadRequest(f"an input picture has {picture.shape[2]} channel: H x W x 3 is needed")
    if mask is not None and mask.shape[2] != 1:
        raise BadRequest(f"mask_image has {mask.shape[2]} channels: H x W x 1 is needed")


def check_references(params: SdImgGenParams, width: int, height: int, version_name: str) -> None:
    """Reference pictures keep a pixel on each side when the engine gives them the area of the result."""
    multiple = 32 if version_name.startswith("Qwen Image") else 16
    for i, picture in enumerate(params.ref_images if params.auto_resize_ref_image else ()):
        high, wide = picture.shape[:2]
        across = math.sqrt(min(2**20, width * height) * wide // high)
        if across < multiple / 2 or across * high / wide < multiple / 2:
            raise BadRequest(
                f"ref_images[{i}] has {wide}x{high} pixels, too narrow to be resized to the area of {width}x{height}: "
                "use another picture, or auto_resize_ref_image = False (--disable-auto-resize-ref-image)"
            )


def check_image_job(params: SdImgGenParams, version_name: str) -> None:
    """Raises BadRequest for the first value that is out of range."""
    check_size(params)
    check_prompts(params)
    between("strength", params.strength, 0, 1)
    between("batch_count", params.batch_count, 1, MAX_PICTURES)
    check_sampling(params.sample_params, params.sample_params.sample_steps, version_name)
    check_cache(params.cache)
    check_hires(params, version_name)
    pictures = [params.init_image, params.control_image, *params.ref_images, *params.pm_params.id_images]
    check_pictures(pictures, params.mask_image)


def check_video_job(params: SdVidGenParams, version_name: str, two_experts: bool, encodes: bool) -> None:
    """Raises BadRequest for the first value that is out of range. `encodes`: the VAE's encoder sees every frame."""
    check_size(params)
    check_prompts(params)
    between("strength", params.strength, 0, 1)
    between("moe_boundary", params.moe_boundary, 0, 1)
    between("vace_strength", params.vace_strength, -1e6, 1e6)
    most = MAX_FRAMES_ENCODED if encodes else MAX_FRAMES
    between("video_frames", params.video_frames, 1, most)
    high = params.high_noise_sample_params
    if high.sample_steps > MAX_STEPS or (high.sample_steps > 0 and not two_experts):
        why = f"at most {MAX_STEPS} are possible" if two_experts else "no high-noise diffusion model is loaded"
        raise BadRequest(f"high_noise_sample_params.sample_steps is {high.sample_steps}: {why}")
    if two_experts:
        between("high_noise guidance.txt_cfg", high.guidance.txt_cfg, 0, 1e6)
    steps = params.sample_params.sample_steps + max(0, high.sample_steps)
    check_sampling(params.sample_params, steps, version_name)
    check_cache(params.cache)
    check_pictures([params.init_image, params.end_image, *params.control_frames])
