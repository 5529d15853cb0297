"""A first look at model files: is it there, readable, and of a kind that may be loaded."""

import copy
from pathlib import Path

from sdsage._headers import sniff
from sdsage.enums import Prediction
from sdsage.errors import ModelError
from sdsage.params import SdCtxParams

# Fields of SdCtxParams that name a file, and the option of the command line.
PATH_FIELDS = {
    "model_path": "--model",
    "clip_l_path": "--clip_l",
    "clip_g_path": "--clip_g",
    "clip_vision_path": "--clip_vision",
    "t5xxl_path": "--t5xxl",
    "llm_path": "--llm",
    "llm_vision_path": "--llm_vision",
    "diffusion_model_path": "--diffusion-model",
    "high_noise_diffusion_model_path": "--high-noise-diffusion-model",
    "vae_path": "--vae",
    "taesd_path": "--taesd",
    "control_net_path": "--control-net",
    "photo_maker_path": "--photo-maker",
}


def check_model_file(path: str, where: str, allow_pickle: bool, folder_ok: bool = False) -> None:
    """Raises ModelError if the file can't be a model, or holds Python objects that were not allowed."""
    file = Path(path)
    if not file.exists():
        raise ModelError(f"{where} names {path}, which does not exist")
    if file.is_dir():
        if folder_ok:
            return
        raise ModelError(f"{where} names {path}, which is a folder: a model file is needed")
    try:
        kind = sniff(file)
    except OSError as error:
        raise ModelError(f"{where} names {path}, which can't be read: {error.strerror}") from None
    if kind == "pickle" and not allow_pickle:
        raise ModelError(
            f"{where} names {path}, a checkpoint of Python pickles: convert it to GGUF or safetensors, "
            "or allow it (allow_pickle=True, --allow-pickle) if you trust where it comes from"
        )
    if kind == "unknown":
        raise ModelError(
            f"{where} names {path}, which is neither GGUF nor safetensors (nor a checkpoint): fetch the file again"
        )


# What of a model decodes latents.
_DECODING = ("model_path", "vae_path", "taesd_path")


def decoding_params(params: SdCtxParams) -> SdCtxParams:
    """A copy without the files that decoding does not need."""
    made = copy.copy(params)
    object.__setattr__(made, "_explicit", set(params._explicit))
    for name in PATH_FIELDS:
        if name not in _DECODING:
            setattr(made, name, None)
    made.embeddings = []
    made.sage_attn = made.fast_linear = False
    made.prediction = Prediction.EPS  # any: with one, the engine does not ask the diffusion model
    return made


def check_context_files(params: SdCtxParams, allow_pickle: bool, decodes: bool = False) -> None:
    """Every file that the parameters name, and that there is a diffusion model at all, or with `decodes` a VAE."""
    if decodes:
        if not any(getattr(params, name) for name in _DECODING):
            raise ModelError(
                "no VAE was given: set vae_path (--vae), taesd_path (--taesd), or model_path (--model) of a checkpoint "
                "that has one inside"
            )
    elif not params.model_path and not params.diffusion_model_path:
        raise ModelError("no model was given: set model_path (--model) or diffusion_model_path (--diffusion-model)")
    for name, option in PATH_FIELDS.items():
        path = getattr(params, name)
        if path:
            check_model_file(path, f"{name} ({option})", allow_pickle, folder_ok=name == "model_path")
    for embedding in params.embeddings:
        check_model_file(embedding.path or "", f"embedding {embedding.name!r}", allow_pickle)
