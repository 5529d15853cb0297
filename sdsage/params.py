"""Parameter objects. Names and defaults are those of the C structs in stable-diffusion.h.

Pictures are uint8 arrays H x W x 3 (a mask H x W x 1) or PIL images; sizes are pixels. A float of `inf` means "not set"
where it is the default.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdsage._struct import Struct
from sdsage.enums import (
    CacheMode,
    HiresUpscaler,
    LoraApplyMode,
    Prediction,
    RngType,
    SageKernel,
    SampleMethod,
    Scheduler,
    SdType,
)

Image = NDArray[np.uint8]


class SdTilingParams(Struct):
    """Decoding or encoding in tiles. Sizes are in latent pixels; 0 leaves them to the engine."""

    _c_type = "sd_tiling_params_t"
    _c_init = ("sd_img_gen_params_init", "sd_img_gen_params_t", "vae_tiling_params")
    enabled: bool
    tile_size_x: int
    tile_size_y: int
    target_overlap: float
    rel_size_x: float
    rel_size_y: float


class SdEmbedding(Struct):
    """A textual inversion: the word and its file."""

    _c_type = "sd_embedding_t"
    name: str | None
    path: str | None


class SdLora(Struct):
    """A LoRA file, its strength, and whether it belongs to the high-noise expert."""

    _c_type = "sd_lora_t"
    is_high_noise: bool
    multiplier: float
    path: str | None

    def __init__(self, path: str | None = None, multiplier: float = 1.0, is_high_noise: bool = False) -> None:
        super().__init__(path=path, multiplier=multiplier, is_high_noise=is_high_noise)


class SdCtxParams(Struct):
    """Which model, from which files, and how it is held: sd_ctx_params_t."""

    _c_type = "sd_ctx_params_t"
    _c_init = ("sd_ctx_params_init", "sd_ctx_params_t")
    model_path: str | None
    clip_l_path: str | None
    clip_g_path: str | None
    clip_vision_path: str | None
    t5xxl_path: str | None
    llm_path: str | None
    llm_vision_path: str | None
    diffusion_model_path: str | None
    high_noise_diffusion_model_path: str | None
    vae_path: str | None
    taesd_path: str | None
    control_net_path: str | None
    embeddings: list[SdEmbedding]
    photo_maker_path: str | None
    tensor_type_rules: str | None
    vae_decode_only: bool
    free_params_immediately: bool
    n_threads: int
    wtype: SdType
    rng_type: RngType
    sampler_rng_type: RngType
    prediction: Prediction
    lora_apply_mode: LoraApplyMode
    offload_params_to_cpu: bool
    enable_mmap: bool
    keep_clip_on_cpu: bool
    keep_control_net_on_cpu: bool
    keep_vae_on_cpu: bool
    flash_attn: bool
    diffusion_flash_attn: bool
    tae_preview_only: bool
    diffusion_conv_direct: bool
    vae_conv_direct: bool
    circular_x: bool
    circular_y: bool
    force_sdxl_vae_conv_scale: bool
    chroma_use_dit_mask: bool
    chroma_use_t5_mask: bool
    chroma_t5_mask_pad: int
    qwen_image_zero_cond_t: bool
    max_vram: float
    sage_attn: bool
    sage_kernel: SageKernel
    engine_levers: str | None
    fast_linear: bool


class SdSlgParams(Struct):
    """Skip-layer guidance: layers, the span of steps (fractions of the schedule) and the scale (0: off)."""

    _c_type = "sd_slg_params_t"
    _c_init = ("sd_sample_params_init", "sd_sample_params_t", "guidance", "slg")
    layers: list[int]
    layer_start: float
    layer_end: float
    scale: float


class SdGuidanceParams(Struct):
    """Guidance scales: text (cfg), image, distilled, skip-layer."""

    _c_type = "sd_guidance_params_t"
    _c_init = ("sd_sample_params_init", "sd_sample_params_t", "guidance")
    txt_cfg: float
    img_cfg: float
    distilled_guidance: float
    slg: SdSlgParams


class SdSampleParams(Struct):
    """The sampler: guidance, scheduler, method, steps, sigmas."""

    _c_type = "sd_sample_params_t"
    _c_init = ("sd_sample_params_init", "sd_sample_params_t")
    guidance: SdGuidanceParams
    scheduler: Scheduler
    sample_method: SampleMethod
    sample_steps: int
    eta: float
    shifted_timestep: int
    custom_sigmas: list[float]
    flow_shift: float


class SdPmParams(Struct):
    """PhotoMaker: pictures of a person, the v2 embedding, and the style strength (percent)."""

    _c_type = "sd_pm_params_t"
    _c_init = ("sd_img_gen_params_init", "sd_img_gen_params_t", "pm_params")
    id_images: list[Image]
    id_embed_path: str | None
    style_strength: float


class SdCacheParams(Struct):
    """Caches that skip work in steps that change little."""

    _c_type = "sd_cache_params_t"
    _c_init = ("sd_cache_params_init", "sd_cache_params_t")
    mode: CacheMode
    reuse_threshold: float
    start_percent: float
    end_percent: float
    error_decay_rate: float
    use_relative_threshold: bool
    reset_error_on_compute: bool
    Fn_compute_blocks: int
    Bn_compute_blocks: int
    residual_diff_threshold: float
    max_warmup_steps: int
    max_cached_steps: int
    max_continuous_cached_steps: int
    taylorseer_n_derivatives: int
    taylorseer_skip_interval: int
    scm_mask: str | None
    scm_policy_dynamic: bool
    spectrum_w: float
    spectrum_m: int
    spectrum_lam: float
    spectrum_window_size: int
    spectrum_flex_window: float
    spectrum_warmup_steps: int
    spectrum_stop_percent: float


class SdHiresParams(Struct):
    """A second pass at a larger size."""

    _c_type = "sd_hires_params_t"
    _c_init = ("sd_hires_params_init", "sd_hires_params_t")
    enabled: bool
    upscaler: HiresUpscaler
    model_path: str | None
    scale: float
    target_width: int
    target_height: int
    steps: int
    denoising_strength: float
    upscale_tile_size: int


class SdImgGenParams(Struct):
    """One image job: sd_img_gen_params_t. A negative seed is drawn; picture i of a batch has seed + i."""

    _c_type = "sd_img_gen_params_t"
    _c_init = ("sd_img_gen_params_init", "sd_img_gen_params_t")
    loras: list[SdLora]
    prompt: str | None
    negative_prompt: str | None
    clip_skip: int
    init_image: Any
    ref_images: list[Any]
    auto_resize_ref_image: bool
    increase_ref_index: bool
    mask_image: Any
    width: int
    height: int
    sample_params: SdSampleParams
    strength: float
    seed: int
    batch_count: int
    control_image: Any
    control_strength: float
    pm_params: SdPmParams
    vae_tiling_params: SdTilingParams
    cache: SdCacheParams
    hires: SdHiresParams


class SdVidGenParams(Struct):
    """One video job: sd_vid_gen_params_t. `high_noise_sample_params.sample_steps` of -1 follows `moe_boundary`."""

    _c_type = "sd_vid_gen_params_t"
    _c_init = ("sd_vid_gen_params_init", "sd_vid_gen_params_t")
    loras: list[SdLora]
    prompt: str | None
    negative_prompt: str | None
    clip_skip: int
    init_image: Any
    end_image: Any
    control_frames: list[Any]
    width: int
    height: int
    sample_params: SdSampleParams
    high_noise_sample_params: SdSampleParams
    moe_boundary: float
    strength: float
    seed: int
    video_frames: int
    vace_strength: float
    vae_tiling_params: SdTilingParams
    cache: SdCacheParams
