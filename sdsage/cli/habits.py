"""Words that people bring from other programs, and what they are called here: for the messages about mistakes."""

from collections.abc import Sequence

_ENCODERS = "--t5xxl, --clip_l, --clip_g or --llm, one for each text encoder"

# Option of another program -> what to write here.
OPTIONS = {
    "--cfg": "--cfg-scale",
    "--guidance-scale": "--cfg-scale (--guidance is that of distilled models)",
    "--sampler": "--sampling-method",
    "--sampler-name": "--sampling-method",
    "--num-steps": "--steps",
    "--n-steps": "--steps",
    "--num-inference-steps": "--steps",
    "--shift": "--flow-shift",
    "--frames": "--video-frames",
    "--num-frames": "--video-frames",
    "--length": "--video-frames",
    "--frame-rate": "--fps",
    "--size": "--width and --height",
    "-w": "-W",
    "--neg": "--negative-prompt",
    "--negative": "--negative-prompt",
    "--neg-prompt": "--negative-prompt",
    "--lora": "<lora:NAME:1> in --prompt, with --lora-model-dir FOLDER",
    "--loras": "<lora:NAME:1> in --prompt, with --lora-model-dir FOLDER",
    "--lora-dir": "--lora-model-dir",
    "--denoise": "--strength",
    "--denoising-strength": "--strength",
    "--batch-size": "--batch-count",
    "--num-images": "--batch-count",
    "--image": "--init-img, or --ref-image for an editing model",
    "--init-image": "--init-img",
    "--start-image": "--init-img",
    "--input": "--init-img",
    "--end-image": "--end-img",
    "--last-image": "--end-img",
    "--output-dir": "--output with the folder in it, such as out/cat.png",
    "--outdir": "--output with the folder in it, such as out/cat.png",
    "--prompt-file": '--prompt "$(cat FILE)", or prompt = "..." in a --config file',
    "--ckpt": "--model",
    "--checkpoint": "--model",
    "--model-path": "--model",
    "--unet": "--diffusion-model",
    "--high-noise-model": "--high-noise-diffusion-model",
    "--low-noise-model": "--diffusion-model",
    "--text-encoder": _ENCODERS,
    "--clip": _ENCODERS,
    "--gpu": "--device, with a name from 'sdsage devices'",
    "--n-threads": "--threads",
    "--flash-attn": "--diffusion-fa",
    "--flash-attention": "--diffusion-fa",
    "--sage": "--sage-attn",
    "--sage-attention": "--sage-attn",
    "--use-sage-attention": "--sage-attn",
    "--lowvram": "--offload-to-cpu, and --vae-tiling for the VAE",
    "--low-vram": "--offload-to-cpu, and --vae-tiling for the VAE",
    "--medvram": "--offload-to-cpu",
    "--cpu-offload": "--offload-to-cpu",
    "--fp16": "--type f16",
    "--fp8": "--type q8_0",
}

VERBS = {
    **dict.fromkeys(("t2v", "i2v", "txt2vid", "img2vid", "txt2video"), "vid-gen"),
    **dict.fromkeys(("t2i", "i2i", "txt2img", "img2img", "generate"), "img-gen"),
    "quantize": "convert",
    "help": "--help",
}

# Value of another program -> the same here.
VALUES = {
    "euler_ancestral": "euler_a",
    "dpmpp_2m": "dpm++2m",
    "dpmpp_2s_ancestral": "dpm++2s_a",
    "dpm_2": "dpm2",
    "ddim": "ddim_trailing",
    "normal": "discrete",
    "fp32": "f32",
    "fp16": "f16",
    "fp8": "q8_0",
    "gpu": "cuda",
}


def advice(message: str, option: str | None, args: Sequence[str]) -> str:
    """What to do about a command line that can't be read; "" when nothing better than the message is known.

    Args:
        message: what is wrong, in typer's words.
        option: the option that there is not.
        args: the command line.
    """
    before_verb = bool(args) and args[0].startswith("-")
    if option is not None and before_verb and args[0].split("=")[0] == option:
        return "options come after the verb, as in 'sdsage vid-gen --preset tiny'"
    if option in OPTIONS:
        return f"use {OPTIONS[option]}"
    if message.startswith("No such command") and args[0] in VERBS:
        return f"run 'sdsage {VERBS[args[0]]}'"
    if "unexpected extra argument" in message:
        return (
            'each file and text belongs to an option, and a text with spaces needs quotes: -i cat.png -p "a lovely cat"'
        )
    return ""
