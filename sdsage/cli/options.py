"""The table of all options: typer signatures, config and preset keys, metadata and docs/cli.md come from it.

Names and defaults are those of the native sd-cli (a test compares them with `sd-cli --help` and with its
parameter dumps); where sd-cli's help and its code differ (high-noise steps, frame rate), with its code.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from sdsage._attention import DEFAULT_SEED, METHODS, SHAPES
from sdsage._bounds import LEVERS, MAX_FRAMES, MAX_SIZE, MAX_STEPS
from sdsage.enums import (
    CacheMode,
    HiresUpscaler,
    LoraApplyMode,
    Prediction,
    PreviewMode,
    RngType,
    SageKernel,
    SampleMethod,
    Scheduler,
    weight_types,
)

from .batch_options import BATCH_OPTIONS
from .option import (
    BATCH,
    BENCH_ATTN,
    BENCH_GEN,
    CONVERT,
    DECODE,
    DEVICES,
    DOCTOR,
    GENERATE,
    IMG,
    INFO,
    UPSCALE,
    VERIFY,
    VID,
    Kind,
    Option,
    Panel,
)

FLOAT, INT, SWITCH, FILE, FOLDER, CHOICE = (
    Kind.FLOAT,
    Kind.INT,
    Kind.SWITCH,
    Kind.FILE,
    Kind.FOLDER,
    Kind.CHOICE,
)
SAMPLERS, SCHEDULERS = SampleMethod.choices(), Scheduler.choices()
CACHE_MODES = CacheMode.choices()
RNGS = RngType.choices()
# "Model" stands for a file, which is given by its name.
CODECS = ("h264", "h265", "vp9", "av1")  # as in sdsage.media.codecs, which is not loaded for a help text
UPSCALERS = tuple(name for name in HiresUpscaler.choices() if name != "Model")
WEIGHT_TYPES = tuple(weight_types())

RUNS = GENERATE | {CONVERT, DECODE, UPSCALE}
BENCH = frozenset({BENCH_ATTN, BENCH_GEN})
ANSWERS = BENCH | {DEVICES, DOCTOR, INFO, VERIFY}  # verbs that only answer
RANDOM = ("tiny", "tiny-flux", "sd1.5", "wan-1.3b", "wan-14b")  # models of random weights: sdsage._bench.models
_TOLD = RUNS | {BATCH}  # verbs that say what they do while they do it
_MUST = "none, it must be given"
_ENGINE = "chosen by the engine for the model"

_MODEL = (
    Option("--model", "Whole checkpoint with diffusion model, text encoder and VAE", Panel.MODEL, FILE, short="-m",
           target="ctx.model_path", verbs=GENERATE | {CONVERT, DECODE},
           in_verb=((CONVERT, "Model to convert: a file, or a folder in diffusers layout", _MUST),)),
    Option("--diffusion-model", "Diffusion model alone; of two experts, the low-noise one", Panel.MODEL, FILE,
           target="ctx.diffusion_model_path"),
    Option("--clip_l", "CLIP-L text encoder", Panel.MODEL, FILE, target="ctx.clip_l_path"),
    Option("--clip_g", "CLIP-G text encoder", Panel.MODEL, FILE, target="ctx.clip_g_path"),
    Option("--clip_vision", "CLIP vision encoder, which image-to-video models of Wan 2.1 need", Panel.MODEL, FILE,
           target="ctx.clip_vision_path"),
    Option("--t5xxl", "T5 text encoder; for Wan, umt5", Panel.MODEL, FILE, target="ctx.t5xxl_path"),
    Option("--llm", "Language model used as text encoder, such as Qwen2.5-VL or Mistral", Panel.MODEL, FILE,
           aliases=("--qwen2vl",), target="ctx.llm_path"),
    Option("--llm_vision", "Vision part of the language model", Panel.MODEL, FILE, aliases=("--qwen2vl_vision",),
           target="ctx.llm_vision_path"),
    Option("--vae", "VAE that turns latents into pictures", Panel.MODEL, FILE, target="ctx.vae_path",
           verbs=GENERATE | {CONVERT, DECODE}, in_verb=((CONVERT, "VAE that goes into the same file", "none"),)),
    Option("--taesd", "Tiny autoencoder, which decodes faster and less exactly than the VAE", Panel.MODEL, FILE,
           aliases=("--tae",), target="ctx.taesd_path", verbs=GENERATE | {DECODE}),
    Option("--control-net", "ControlNet model", Panel.MODEL, FILE, target="ctx.control_net_path", only=IMG,
           needs=("--control-image",)),
    Option("--photo-maker", "PhotoMaker model", Panel.MODEL, FILE, target="ctx.photo_maker_path", only=IMG),
    Option("--embd-dir", "Folder of textual-inversion embeddings, each used by its file name in the prompt",
           Panel.MODEL, FOLDER),
    Option("--lora-model-dir", "Folder in which LoRA files of the prompt are looked up", Panel.MODEL, FOLDER,
           default=".", default_text="the current folder"),
    Option("--lora-apply-mode", "When LoRA is added to the weights: while loading (exact for float weights, faster) or "
           "at run time (for quantized weights)", Panel.MODEL, CHOICE, choices=LoraApplyMode.choices(), default="auto",
           default_text="auto, which means at_runtime for quantized weights", target="ctx.lora_apply_mode"),
    Option("--type", "Number format to which weights are converted", Panel.MODEL, CHOICE, choices=WEIGHT_TYPES,
           default_text="as in the file", target="ctx.wtype", verbs=GENERATE | {CONVERT, DECODE}),
    Option("--tensor-type-rules", "Number format per tensor, as pairs of a regular expression and a format, such as "
           r"'^vae\.=f16,model\.=q8_0'", Panel.MODEL, unit="REGEX=FORMAT,...", default="",
           target="ctx.tensor_type_rules", verbs=GENERATE | {CONVERT, DECODE}),
    Option("--convert-name", "Rename the tensors to the engine's own names", Panel.MODEL, SWITCH,
           verbs=frozenset({CONVERT})),
    Option("--prediction", "What the model predicts, when the file does not tell", Panel.MODEL, CHOICE,
           choices=Prediction.choices(), default_text="read from the file", target="ctx.prediction"),
    Option("--force-sdxl-vae-conv-scale", "Scale the convolutions of an SDXL VAE, against overflow in 16-bit numbers",
           Panel.MODEL, SWITCH, target="ctx.force_sdxl_vae_conv_scale", verbs=GENERATE | {DECODE}),
    Option("--chroma-disable-dit-mask", "Leave out the padding mask in Chroma's diffusion model", Panel.MODEL, SWITCH,
           target="ctx.chroma_use_dit_mask", sets=False),
    Option("--chroma-enable-t5-mask", "Use the padding mask in Chroma's text encoder", Panel.MODEL, SWITCH,
           target="ctx.chroma_use_t5_mask"),
    Option("--chroma-t5-mask-pad", "Padding tokens that Chroma's mask leaves visible", Panel.MODEL, INT, default=1,
           unit="tokens", low=0, high=512, target="ctx.chroma_t5_mask_pad"),
    Option("--qwen-image-zero-cond-t", "Give reference pictures of Qwen-Image the time step zero", Panel.MODEL, SWITCH,
           target="ctx.qwen_image_zero_cond_t"),
    Option("--allow-pickle", "Read .ckpt, .pt and .pth files, which are pickled and only safe from a source you trust",
           Panel.MODEL, SWITCH, verbs=RUNS, record=False),
)  # fmt: skip

_LATENTS = (
    Option("LATENTS", "Latents that were kept: NAME.latents.safetensors", Panel.MODEL, FILE, positional=True,
           verbs=frozenset({DECODE}), record=False),
)  # fmt: skip

_PROMPT = (
    Option("--prompt", "What to show; <lora:NAME:WEIGHT> adds a LoRA and <lora:|high_noise|NAME:WEIGHT> one for the "
           "high-noise expert", Panel.PROMPT, default="", short="-p", default_text="empty"),
    Option("--negative-prompt", "What to keep away from", Panel.PROMPT, default="", short="-n", default_text="empty",
           target="gen.negative_prompt"),
    Option("--clip-skip", "Layers of CLIP counted from the end at which the text is read; 1 reads the last one",
           Panel.PROMPT, INT, default=-1, unit="layers", high=32, target="gen.clip_skip",
           default_text="-1, which means 1 for SD1 and 2 for SD2"),
)  # fmt: skip

_PICTURES = (
    Option("--init-img", "Picture to start from", Panel.PICTURES, FILE, short="-i", verbs=GENERATE | {UPSCALE},
           in_verb=((UPSCALE, "Picture to enlarge", _MUST),)),
    Option("--end-img", "Last picture of the video, for models that take a first and a last one", Panel.PICTURES, FILE,
           only=VID),
    Option("--mask", "Grey picture that is white where --init-img may change", Panel.PICTURES, FILE, only=IMG,
           needs=("--init-img",), default_text="white everywhere"),
    Option("--strength", "How far --init-img may be changed", Panel.PICTURES, FLOAT, default=0.75, unit="fraction",
           low=0, high=1, target="gen.strength", only=IMG, needs=("--init-img",)),
    Option("--ref-image", "Reference picture of an editing model", Panel.PICTURES, FILE, short="-r", many=True,
           only=IMG),
    Option("--disable-auto-resize-ref-image", "Leave reference pictures at their own size", Panel.PICTURES, SWITCH,
           target="img.auto_resize_ref_image", sets=False, only=IMG, needs=("--ref-image",)),
    Option("--increase-ref-index", "Number reference pictures 1, 2, 3 in the model's positions", Panel.PICTURES, SWITCH,
           target="img.increase_ref_index", only=IMG, needs=("--ref-image",)),
    Option("--control-image", "Control picture for a ControlNet or a control model", Panel.PICTURES, FILE, only=IMG),
    Option("--control-strength", "How much the ControlNet steers", Panel.PICTURES, FLOAT, default=0.9, unit="factor",
           target="img.control_strength", only=IMG, needs=("--control-net",)),
    Option("--canny", "Replace the control picture by its edges", Panel.PICTURES, SWITCH, only=IMG,
           needs=("--control-image",)),
    Option("--control-video", "Folder of pictures, in order of their names, that steer a VACE video frame by frame",
           Panel.PICTURES, FOLDER, only=VID),
    Option("--vace-strength", "How much --control-video steers", Panel.PICTURES, FLOAT, default=1.0, unit="factor",
           target="vid.vace_strength", only=VID),
    Option("--pm-id-images-dir", "Folder of portraits for PhotoMaker", Panel.PICTURES, FOLDER, only=IMG,
           needs=("--photo-maker",)),
    Option("--pm-id-embed-path", "Identity embedding for PhotoMaker 2", Panel.PICTURES, FILE,
           target="img.pm_params.id_embed_path", only=IMG, needs=("--photo-maker",)),
    Option("--pm-style-strength", "How late PhotoMaker's identity joins in, so that style has more room",
           Panel.PICTURES, FLOAT, default=20.0, unit="percent of the steps", low=0, high=100,
           target="img.pm_params.style_strength", only=IMG, needs=("--photo-maker",)),
)  # fmt: skip

# These exist once for the model (of two experts, the low-noise one) and once more for the high-noise expert.
_PER_EXPERT = (
    Option("--sampling-method", "Sampler", Panel.SAMPLING, CHOICE, choices=SAMPLERS, default_text=_ENGINE,
           target="gen.sample_params.sample_method"),
    Option("--cfg-scale", "CFG, how strongly the prompt counts against the negative prompt; 1 turns it off and halves "
           "the work", Panel.SAMPLING, FLOAT, default=7.0, unit="factor", low=0,
           target="gen.sample_params.guidance.txt_cfg"),
    Option("--img-cfg-scale", "CFG of the input picture, for inpainting and edit models", Panel.SAMPLING, FLOAT,
           unit="factor", default_text="the same as CFG of the prompt", target="gen.sample_params.guidance.img_cfg"),
    Option("--guidance", "Guidance of distilled models, which is an input of the model and costs no time",
           Panel.SAMPLING, FLOAT, default=3.5, unit="factor", target="gen.sample_params.guidance.distilled_guidance"),
    Option("--eta", "Noise added again in each step", Panel.SAMPLING, FLOAT, unit="factor", low=0,
           default_text="that of the sampler", target="gen.sample_params.eta"),
    Option("--slg-scale", "Skip-layer guidance, for transformer models; 0 turns it off", Panel.SAMPLING, FLOAT,
           default=0.0, unit="factor", target="gen.sample_params.guidance.slg.scale"),
    Option("--skip-layers", "Layers left out by skip-layer guidance", Panel.SAMPLING, Kind.INTS, default=(7, 8, 9),
           unit="layer numbers", target="gen.sample_params.guidance.slg.layers", needs=("--slg-scale",)),
    Option("--skip-layer-start", "Where skip-layer guidance begins", Panel.SAMPLING, FLOAT, default=0.01,
           unit="fraction of the steps", low=0, high=1, target="gen.sample_params.guidance.slg.layer_start",
           needs=("--slg-scale",)),
    Option("--skip-layer-end", "Where skip-layer guidance ends", Panel.SAMPLING, FLOAT, default=0.2,
           unit="fraction of the steps", low=0, high=1, target="gen.sample_params.guidance.slg.layer_end",
           needs=("--slg-scale",)),
)  # fmt: skip

_SAMPLING = (
    Option("--seed", "Seed of the random numbers; a negative one is drawn, shown and recorded, and picture i of a "
           "batch has seed + i", Panel.SAMPLING, INT, default=42, short="-s", low=-(2**63), high=2**63 - 1,
           beaten_by=("--seeds",), verbs=GENERATE | {VERIFY, BENCH_ATTN},
           in_verb=tuple((verb, "Seed of the random inputs, 0 or more", str(DEFAULT_SEED))
                         for verb in (VERIFY, BENCH_ATTN))),
    Option("--seeds", "Seeds such as 1,5,9: a picture or a video for each, with the model loaded once", Panel.SAMPLING,
           Kind.INTS, default=(), default_text="--seed", unit="whole numbers", low=0, high=2**63 - 1, record=False),
    Option("--steps", "Sampling steps; with two experts, those of the low-noise one", Panel.SAMPLING, INT, default=20,
           unit="steps", low=1, high=MAX_STEPS, target="gen.sample_params.sample_steps", beaten_by=("--sigmas",)),
    *_PER_EXPERT,
    Option("--scheduler", "How noise levels are spread over the steps", Panel.SAMPLING, CHOICE, choices=SCHEDULERS,
           default_text=_ENGINE, target="gen.sample_params.scheduler", beaten_by=("--sigmas",)),
    Option("--sigmas", "Noise levels, from high to low, one more than there are steps", Panel.SAMPLING, Kind.FLOATS,
           default=(), many=True, unit="sigma", target="gen.sample_params.custom_sigmas",
           default_text="made by the scheduler"),
    Option("--flow-shift", "Shift of the noise levels in flow models, such as SD3 and Wan", Panel.SAMPLING, FLOAT,
           unit="factor", low=0, low_open=True, default_text=_ENGINE, target="gen.sample_params.flow_shift"),
    Option("--timestep-shift", "Shift of the time steps, for NitroFusion models", Panel.SAMPLING, INT, default=0,
           unit="time steps", low=0, high=1000, target="gen.sample_params.shifted_timestep"),
    Option("--rng", "Random number generator of the first noise; cuda gives the same numbers on every device",
           Panel.SAMPLING, CHOICE, choices=RNGS, default="cuda", target="ctx.rng_type"),
    Option("--sampler-rng", "Random number generator inside the sampler", Panel.SAMPLING, CHOICE, choices=RNGS,
           default_text="that of --rng", target="ctx.sampler_rng_type"),
    Option("--circular", "Make pictures that tile in both directions", Panel.SAMPLING, SWITCH,
           verbs=GENERATE | {DECODE}),
    Option("--circularx", "Make pictures that tile from left to right", Panel.SAMPLING, SWITCH,
           beaten_by=("--circular",), verbs=GENERATE | {DECODE}),
    Option("--circulary", "Make pictures that tile from top to bottom", Panel.SAMPLING, SWITCH,
           beaten_by=("--circular",), verbs=GENERATE | {DECODE}),
)  # fmt: skip


def _for_high_noise(option: Option) -> Option:
    name = option.name.replace("--", "--high-noise-")
    own = tuple(n.replace("--", "--high-noise-") for n in option.needs)
    return replace(
        option,
        name=name,
        help=f"High-noise expert: {option.help}",
        panel=Panel.HIGH_NOISE,
        only=VID,
        target=option.target.replace("gen.", "vid.high_noise_"),
        needs=own or ("--high-noise-diffusion-model",),
    )


_HIGH_NOISE = (
    Option("--high-noise-diffusion-model", "High-noise expert of a model with two experts, such as Wan 2.2 14B",
           Panel.HIGH_NOISE, FILE, target="ctx.high_noise_diffusion_model_path", only=VID),
    Option("--high-noise-steps", "Steps of the high-noise expert, which come before --steps; 0 or less lets "
           "--moe-boundary divide --steps between the experts", Panel.HIGH_NOISE, INT, default=20, unit="steps",
           high=MAX_STEPS, only=VID, needs=("--high-noise-diffusion-model",)),
    Option("--moe-boundary", "Noise level below which the low-noise expert takes over, when --high-noise-steps is 0 or "
           "less", Panel.HIGH_NOISE, FLOAT, default=0.875, unit="sigma", low=0, high=1, target="vid.moe_boundary",
           only=VID, needs=("--high-noise-diffusion-model",)),
    *map(_for_high_noise, _PER_EXPERT),
)  # fmt: skip

_SIZE = (
    Option("--width", "Width; the model may need a multiple of 8, 16 or 32 and then gets the next one", Panel.SIZE, INT,
           short="-W", unit="px", low=1, high=MAX_SIZE, default_text="that of the input picture, else 512"),
    Option("--height", "Height; the model may need a multiple of 8, 16 or 32 and then gets the next one", Panel.SIZE,
           INT, short="-H", unit="px", low=1, high=MAX_SIZE, default_text="that of the input picture, else 512"),
    Option("--video-frames", "Length of the video; a count other than 4n+1 is lowered to the next one", Panel.SIZE, INT,
           default=1, unit="frames", low=1, high=MAX_FRAMES, target="vid.video_frames", only=VID),
    Option("--fps", "Speed at which the video is played", Panel.SIZE, INT, unit="frames per second", low=1, high=1000,
           only=VID, verbs=GENERATE | {DECODE},
           default_text="that of the model: 24 for Wan2.2 TI2V and LTX, 16 for every other Wan"),
    Option("--extend", "Go on from the last frame this many times, each time by --video-frames less one, for models "
           "that take a picture; part i has seed + i, and a seam may show as a change of motion", Panel.SIZE, INT,
           default=0, unit="times", low=0, high=1000, only=VID, verbs=frozenset({VID})),
    Option("--batch-count", "Pictures or videos to make, one after the other, the next one always with the next seed",
           Panel.SIZE, INT, default=1, short="-b", unit="pictures or videos", low=1, high=1000,
           target="img.batch_count", beaten_by=("--seeds",), record=False),
)  # fmt: skip

_MEMORY = (
    Option("--vram", "GPU memory that the run may use: --offload-to-cpu, --vae-tiling and --max-vram are chosen so "
           "that it fits; auto takes what is free", Panel.MEMORY, unit="GiB, or auto", default_text="nothing is chosen",
           record=False),
    Option("--offload-to-cpu", "Keep the weights in RAM and copy them to the GPU when they are needed", Panel.MEMORY,
           SWITCH, target="ctx.offload_params_to_cpu", verbs=GENERATE | {DECODE, UPSCALE}),
    Option("--max-vram", "GPU memory for one part of the calculation, which is cut into parts to fit; 0 does not cut",
           Panel.MEMORY, FLOAT, default=0.0, unit="GiB", low=0, target="ctx.max_vram", verbs=GENERATE | {DECODE}),
    Option("--clip-on-cpu", "Run the text encoder on the CPU", Panel.MEMORY, SWITCH, target="ctx.keep_clip_on_cpu"),
    Option("--vae-on-cpu", "Run the VAE on the CPU", Panel.MEMORY, SWITCH, target="ctx.keep_vae_on_cpu",
           verbs=GENERATE | {DECODE}),
    Option("--control-net-cpu", "Run the ControlNet on the CPU", Panel.MEMORY, SWITCH,
           target="ctx.keep_control_net_on_cpu", only=IMG, needs=("--control-net",)),
    Option("--mmap", "Map model files into memory instead of reading them", Panel.MEMORY, SWITCH,
           target="ctx.enable_mmap", verbs=GENERATE | {DECODE}),
    Option("--vae-tiling", "Run the VAE tile by tile, which needs less memory", Panel.MEMORY, SWITCH,
           target="gen.vae_tiling_params.enabled", verbs=GENERATE | {DECODE}),
    Option("--vae-tile-size", "Size of a tile", Panel.MEMORY, Kind.INT_PAIR, default=(0, 0), unit="latent pixels",
           low=0, high=MAX_SIZE, default_text="32x32", needs=("--vae-tiling",),
           beaten_by=("--vae-relative-tile-size",), verbs=GENERATE | {DECODE}),
    Option("--vae-relative-tile-size", "Size of a tile: up to 1 a fraction of the picture, above 1 the number of tiles",
           Panel.MEMORY, Kind.FLOAT_PAIR, default=(0.0, 0.0), unit="fraction or tiles", low=0, high=MAX_SIZE,
           default_text="from --vae-tile-size", needs=("--vae-tiling",), verbs=GENERATE | {DECODE}),
    Option("--vae-tile-overlap", "How much tiles overlap", Panel.MEMORY, FLOAT, default=0.5, unit="fraction of a tile",
           low=0, high=0.5, target="gen.vae_tiling_params.target_overlap", needs=("--vae-tiling",),
           verbs=GENERATE | {DECODE}),
)  # fmt: skip

_SPEED = (
    Option("--threads", "CPU threads", Panel.SPEED, INT, default=-1, short="-t", unit="threads", high=4096,
           default_text="-1, all physical cores", verbs=GENERATE | {DECODE, UPSCALE}, record=False),
    Option("--fa", "Flash attention in every part of the model", Panel.SPEED, SWITCH, target="ctx.flash_attn",
           verbs=GENERATE | {DECODE}),
    Option("--diffusion-fa", "Flash attention in the diffusion model only", Panel.SPEED, SWITCH,
           target="ctx.diffusion_flash_attn", beaten_by=("--fa",)),
    Option("--sage-attn", "SageAttention in the diffusion model: 8-bit attention on NVIDIA GPUs from compute "
           "capability 8.0 on, in place of --fa and --diffusion-fa there", Panel.SPEED, SWITCH, target="ctx.sage_attn"),
    Option("--sage-kernel", "Kernel of SageAttention", Panel.SPEED, CHOICE, choices=SageKernel.choices(),
           default="auto", default_text="auto, the specified one for the GPU", target="ctx.sage_kernel",
           needs=("--sage-attn",)),
    Option("--engine-levers", "What sdsage computes in place of the engine, on NVIDIA GPUs: none, or some of default, "
           f"{', '.join(LEVERS)} joined by commas", Panel.SPEED, Kind.LEVERS, default="default",
           default_text="default, what pays on the GPU", target="ctx.engine_levers",
           verbs=GENERATE | {DECODE}),
    Option("--fast-linear", "Linear layers of the diffusion model in FP8, on NVIDIA GPUs of compute capability 9.0: "
           "faster, and further from the exact result", Panel.SPEED, SWITCH, target="ctx.fast_linear"),
    Option("--diffusion-conv-direct", "Convolve directly in the diffusion model and the upscaler", Panel.SPEED, SWITCH,
           target="ctx.diffusion_conv_direct", verbs=GENERATE | {UPSCALE}),
    Option("--vae-conv-direct", "Convolve directly in the VAE", Panel.SPEED, SWITCH, target="ctx.vae_conv_direct",
           verbs=GENERATE | {DECODE}),
    Option("--cache-mode", "Reuse results of earlier steps: easycache for transformers, ucache for UNets, dbcache, "
           "taylorseer and cache-dit for blocks of transformers, spectrum for both", Panel.SPEED, CHOICE,
           choices=CACHE_MODES, default="disabled"),
    Option("--cache-option", "Settings of the cache: threshold, start, end, decay, relative, reset (easycache, "
           "ucache); Fn, Bn, threshold, warmup (dbcache, taylorseer, cache-dit); w, m, lam, window, flex, warmup, stop "
           "(spectrum)", Panel.SPEED, Kind.PAIRS, default="", default_text="those of the mode",
           needs=("--cache-mode",)),
    Option("--scm-mask", "Which steps are calculated (1) and which may come from the cache (0), for dbcache and "
           "cache-dit", Panel.SPEED, Kind.INTS, default=(), unit="0 or 1 per step", low=0, high=1, default_text="none",
           needs=("--cache-mode",)),
    Option("--scm-policy", "Whether steps marked 0 are reused after a check (dynamic) or always (static)", Panel.SPEED,
           CHOICE, choices=("dynamic", "static"), default="dynamic", needs=("--cache-mode",)),
)  # fmt: skip

_UPSCALING = (
    Option("--hires", "Make the picture small, enlarge it and refine it in a second pass", Panel.UPSCALING, SWITCH,
           target="img.hires.enabled", only=IMG),
    Option("--hires-upscaler", "How --hires enlarges: a built-in way, or the name of a model in --hires-upscalers-dir "
           "without its extension", Panel.UPSCALING, default="Latent", unit=", ".join(UPSCALERS) + " or a model's name",
           only=IMG, needs=("--hires",)),
    Option("--hires-upscalers-dir", "Folder of upscaling models for --hires-upscaler", Panel.UPSCALING, FOLDER,
           only=IMG, needs=("--hires",)),
    Option("--hires-scale", "How much --hires enlarges", Panel.UPSCALING, FLOAT, default=2.0, unit="factor", low=0,
           low_open=True, high=64, target="img.hires.scale", only=IMG, needs=("--hires",),
           beaten_by=("--hires-width", "--hires-height")),
    Option("--hires-width", "Width after --hires; 0 takes it from the other side or from --hires-scale",
           Panel.UPSCALING, INT, default=0, unit="px", low=0, high=MAX_SIZE, target="img.hires.target_width", only=IMG,
           needs=("--hires",)),
    Option("--hires-height", "Height after --hires; 0 takes it from the other side or from --hires-scale",
           Panel.UPSCALING, INT, default=0, unit="px", low=0, high=MAX_SIZE, target="img.hires.target_height", only=IMG,
           needs=("--hires",)),
    Option("--hires-steps", "Steps of the second pass; 0 takes --steps", Panel.UPSCALING, INT, default=0, unit="steps",
           low=0, high=MAX_STEPS, target="img.hires.steps", only=IMG, needs=("--hires",)),
    Option("--hires-denoising-strength", "How far the second pass may change the picture", Panel.UPSCALING, FLOAT,
           default=0.7, unit="fraction", low=0, low_open=True, high=1, target="img.hires.denoising_strength", only=IMG,
           needs=("--hires",)),
    Option("--hires-upscale-tile-size", "Tile size of an upscaling model in --hires", Panel.UPSCALING, INT, default=128,
           unit="px", low=1, high=MAX_SIZE, target="img.hires.upscale_tile_size", only=IMG, needs=("--hires",)),
    Option("--upscale-model", "ESRGAN model that enlarges the finished pictures", Panel.UPSCALING, FILE,
           verbs=GENERATE | {UPSCALE}, in_verb=((UPSCALE, "ESRGAN model that enlarges the picture", _MUST),)),
    Option("--upscale-repeats", "How often --upscale-model is applied", Panel.UPSCALING, INT, default=1, unit="times",
           low=1, high=8, needs=("--upscale-model",), verbs=GENERATE | {UPSCALE}),
    Option("--upscale-tile-size", "Tile size of --upscale-model", Panel.UPSCALING, INT, default=128, unit="px", low=1,
           high=MAX_SIZE, needs=("--upscale-model",), verbs=GENERATE | {UPSCALE}),
)  # fmt: skip

_PREVIEW = (
    Option("--preview", "Write a preview while sampling: proj is a rough guess that costs nothing, tae needs --taesd, "
           "vae is exact and slow", Panel.PREVIEW, CHOICE, choices=PreviewMode.choices(), default="none", record=False),
    Option("--preview-path", "File of the preview; a preview with several frames in a .png is written as animated "
           ".webp", Panel.PREVIEW, FILE, default="preview.png", needs=("--preview",), record=False),
    Option("--preview-interval", "Steps from one preview to the next", Panel.PREVIEW, INT, default=1, unit="steps",
           low=1, high=MAX_STEPS, needs=("--preview",), record=False),
    Option("--preview-noisy", "Show the noisy input of each step instead of the denoised guess", Panel.PREVIEW, SWITCH,
           needs=("--preview",), record=False),
    Option("--preview-inline", "Show previews in the terminal too, where it can: kitty, Ghostty, iTerm2, WezTerm, "
           "Konsole, mintty, foot and others; on tries it inside tmux as well", Panel.PREVIEW, CHOICE,
           choices=("auto", "on", "off"), default="auto", needs=("--preview",), record=False),
    Option("--taesd-preview-only", "Use --taesd for previews and the VAE for the result", Panel.PREVIEW, SWITCH,
           target="ctx.tae_preview_only", needs=("--taesd",)),
)  # fmt: skip

_OUTPUT = (
    Option("--output", "File to write, whose extension says what it is: .mp4, .webm, .gif, .webp for a video, .png, "
           ".jpg, .webp for pictures; frame_%04d.png writes numbered pictures; {seed}, {index}, {prompt} and {date} "
           "are filled in", Panel.OUTPUT, FILE, short="-o",
           default_text="output.mp4 for a video, output.png for pictures", verbs=RUNS, record=False,
           in_verb=((UPSCALE, "File to write: .png, .jpg or .webp", "output.png"),
                    (CONVERT, "File to write: .gguf or .safetensors", "output.gguf"))),
    Option("--output-begin-idx", "First number of numbered files", Panel.OUTPUT, INT, default=-1, default_text="0",
           low=0, high=999999, verbs=GENERATE | {DECODE}, record=False),
    Option("--codec", "Codec of .mp4 (h264, h265, av1) and .webm (vp9, av1); 'list' prints what this machine can write",
           Panel.OUTPUT, CHOICE, choices=(*CODECS, "list"), verbs=frozenset({VID, UPSCALE}), record=False,
           default_text="h264 in .mp4, vp9 in .webm"),
    Option("--crf", "Quality of the codec: lower is better and larger", Panel.OUTPUT, INT, unit="steps", low=0, high=63,
           verbs=frozenset({VID, UPSCALE}), record=False,
           default_text="that of the codec: h264 17, h265 20, vp9 18, av1 24"),
    Option("--overwrite", "Replace files that exist", Panel.OUTPUT, SWITCH, verbs=RUNS | {BATCH}, record=False,
           in_verb=((BATCH, "Replace files that exist and are not of this batch as it is now", ""),)),
    Option("--disable-image-metadata", "Leave prompt and settings out of the files", Panel.OUTPUT, SWITCH,
           aliases=("--no-metadata",), verbs=GENERATE | {DECODE}, record=False),
    Option("--save-latents", "Keep the final latents beside the output, as NAME.latents.safetensors for sdsage decode",
           Panel.OUTPUT, SWITCH, record=False),
    Option("--checkpoint-every", "Keep the work on disk each time that the model was called so often, a few MB a call; "
           "0 keeps nothing", Panel.OUTPUT, INT, default=1, unit="model calls", low=0, high=MAX_STEPS, record=False),
    Option("--resume", "Go on with a run that was ended: the same command, or --output alone", Panel.OUTPUT, SWITCH,
           record=False),
)  # fmt: skip

_RUN = (
    Option("--mode", "Mode of sd-cli, accepted when it is that of the verb", Panel.RUN, short="-M",
           default_text="that of the verb", verbs=RUNS, record=False),
    Option("--preset", "Model files and settings under one name; --config and other options win over it", Panel.RUN,
           unit="preset", record=False),
    Option("--config", "TOML file of options, such as cfg_scale = 5.0; other options win over it", Panel.RUN, FILE,
           record=False),
    Option("--from-file", "Repeat what made this picture or video: its settings and seed; other options win over it",
           Panel.RUN, FILE, aliases=("--from",), record=False),
    Option("--model-dir", "Folder in which --from looks for the files that were used, by name and hash, folders below "
           "included", Panel.RUN, FOLDER, many=True, default=(),
           default_text="the current folder and that of the --from file, which are always looked at last",
           needs=("--from-file",), record=False),
    Option("--ignore-hashes", "Take files for --from by their name alone", Panel.RUN, SWITCH, needs=("--from-file",),
           record=False),
    Option("--device", "Device to run on, as 'sdsage devices' names it", Panel.RUN, unit="device",
           default_text="the first GPU, else cpu", verbs=GENERATE | {DECODE, UPSCALE, VERIFY, BENCH_ATTN},
           record=False),
    Option("--kernel", "Kernel to run: plain and flash are ggml's, the others SageAttention's", Panel.RUN, CHOICE,
           choices=METHODS, many=True, default=(), default_text="every one that the device can run",
           verbs=frozenset({VERIFY, BENCH_ATTN}), record=False,
           in_verb=((BENCH_ATTN, "Kernel to run beside flash: plain is ggml's, the others are SageAttention's",
                     "SageAttention's that the device can run"),)),
    Option("--quick", "Check one shape instead of three, fewer tails, and time three repeats", Panel.RUN, SWITCH,
           verbs=frozenset({VERIFY}), record=False),
    Option("--shape", "Shape to time: " + "; ".join(f"{name} {s.what}" for name, s in SHAPES.items()), Panel.RUN,
           CHOICE, choices=tuple(SHAPES), many=True, default=(), default_text="all but tiny; on a CPU tiny alone",
           verbs=frozenset({BENCH_ATTN}), record=False),
    Option("--repeats", "Times that each kernel runs for its median, by turns with the others", Panel.RUN, INT,
           default=10, unit="times", low=1, high=10000, verbs=frozenset({BENCH_ATTN}), record=False),
    Option("--random", "A model of random weights, made on first use: the tiny ones for a look, the others of the "
           "models' real sizes (sd1.5 2 GB, wan-1.3b 8 GB, wan-14b 22 GB)", Panel.RUN, CHOICE, choices=RANDOM,
           verbs=frozenset({BENCH_GEN}), record=False),
    Option("--random-dir", "Folder in which --random keeps its files", Panel.RUN, FOLDER,
           default_text="random-models in the cache folder", verbs=frozenset({BENCH_GEN}), needs=("--random",),
           record=False),
    Option("--plot", "Picture of the result to write, a .png or .svg; needs the extra plot", Panel.RUN, FILE,
           verbs=BENCH, record=False),
    Option("--strict", "Make a size or frame count that the model can't take an error", Panel.RUN, SWITCH,
           record=False),
    Option("--print-params", "Print the parameters as JSON and stop before anything is loaded", Panel.RUN, SWITCH,
           record=False),
    Option("--json", "Print JSON on stdout: an object a line for each event, the last one with the result or the "
           "error; docs/json.md has the fields", Panel.RUN, SWITCH, verbs=_TOLD | ANSWERS, record=False,
           in_verb=tuple((verb, "Print the answer as one line of JSON; docs/json.md has the fields", "")
                         for verb in sorted(ANSWERS))),
    Option("--tensors", "List every tensor of a model file with its shape and number format", Panel.RUN, SWITCH,
           verbs=frozenset({INFO}), record=False),
    Option("--sass", "Read the architectures of the GPU code out of the files themselves too", Panel.RUN, SWITCH,
           verbs=frozenset({DOCTOR}), record=False),
    Option("--quiet", "Show no progress and no summary; warnings and errors stay, and of --json the last line",
           Panel.RUN, SWITCH, short="-q", verbs=_TOLD, record=False),
    Option("--verbose", "Show the engine's informative and debugging messages", Panel.RUN, SWITCH, short="-v",
           verbs=RUNS, record=False),
    Option("--log-file", "Add everything to the end of this file with the time, the engine's debugging messages "
           "included, whatever is shown", Panel.RUN, FILE, verbs=_TOLD, record=False),
    Option("--color", "Colour the level of each message even when stderr is no terminal", Panel.RUN, SWITCH,
           verbs=_TOLD, record=False),
)  # fmt: skip

TABLE: tuple[Option, ...] = (
    *(_LATENTS + _MODEL + _PROMPT + _PICTURES + _SAMPLING + _HIGH_NOISE + _SIZE),
    *(_MEMORY + _SPEED + _UPSCALING + _PREVIEW + _OUTPUT + BATCH_OPTIONS + _RUN),
)

# Names of other versions of the engine. Those with a successor still work; the others say what to use.
RENAMED = {
    "--schedule": "--scheduler",
    "--style-ratio": "--pm-style-strength",
    "--input-id-images-dir": "--pm-id-images-dir",
    "--stacked-id-embd-dir": "--photo-maker",
}


class Removed(NamedTuple):
    """An option of another version of the engine, and what to use here."""

    takes_value: bool
    advice: str


REMOVED = {
    "--high-noise-scheduler": Removed(True, "--scheduler is used for both experts"),
    "--normalize-input": Removed(False, "PhotoMaker pictures are always normalised; leave it out"),
    "--easycache": Removed(True, "use --cache-mode easycache with --cache-option threshold=...,start=...,end=..."),
    "--cache-preset": Removed(True, "use --cache-option, such as threshold=0.25"),
    "--params-backend": Removed(True, "use --offload-to-cpu to keep weights in RAM"),
    "--stream-layers": Removed(False, "use --max-vram with --offload-to-cpu"),
    "--backend": Removed(True, "use --device"),
}


@cache
def by_key() -> dict[str, Option]:
    """Options by their config key."""
    return {o.key: o for o in TABLE}


@cache
def of_verb(verb: str) -> tuple[Option, ...]:
    """Options that a verb takes, in the order of the help."""
    return tuple(o.told_in(verb) for panel in Panel.ORDER for o in TABLE if o.panel == panel and _takes(verb, o))


# What a benchmark leaves out of the options of vid-gen: it writes nothing, makes one result, and chooses the attention.
_BENCHED = (Panel.MODEL, Panel.PROMPT, Panel.PICTURES, Panel.SAMPLING, Panel.HIGH_NOISE, Panel.SIZE, Panel.MEMORY)
_NOT_BENCHED = ("seeds", "batch_count", "extend", "fps", "sage_attn")
_BENCHED_TOO = ("mode", "preset", "config", "device")


def _takes(verb: str, option: Option) -> bool:
    if verb != BENCH_GEN or verb in option.verbs:
        return verb in option.verbs
    panel = option.panel in (*_BENCHED, Panel.SPEED) and option.key not in _NOT_BENCHED
    return VID in option.verbs and (panel or option.key in _BENCHED_TOO)
