"""From settings to the engine's parameter structs, field for field what sd-cli would fill in."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdsage.enums import HiresUpscaler

from .cache import BLOCK_MODES, cache_fields
from .inputs import Inputs, input_files
from .memory import check_vram
from .option import IMG, Kind
from .options import UPSCALERS, of_verb
from .pictures import load_pictures
from .prompt import Lora, extract_loras
from .settings import Settings
from .values import PICKLED, check_file, check_folder, check_type_rules

if TYPE_CHECKING:
    from sdsage.params import SdCtxParams, SdImgGenParams, SdVidGenParams

_EMBEDDING_SUFFIXES = (".gguf", ".safetensors", ".pt")
_UPSCALER_SUFFIXES = (".gguf", ".safetensors", ".pt", ".pth")


@dataclass
class Job:
    """One generation, ready to run.

    Attributes:
        seeds: the real ones, one for each picture or video; a negative request has been drawn.
        loras: what the tags of the prompt named.
        inputs: the files that the result is made from.
        engine: version, source pin, compiler and CUDA toolkit of the native library, known when it runs.
        memory: what --vram chose, one sentence; "" without it.
        notes: one sentence for each thing in the input pictures that the engine does not get.
        fps_why: where the frames per second come from, known when the model is loaded; empty for pictures.
    """

    settings: Settings
    ctx: "SdCtxParams"
    gen: "SdImgGenParams | SdVidGenParams"
    seeds: tuple[int, ...]
    loras: list[Lora]
    inputs: Inputs
    engine: dict[str, Any] = field(default_factory=dict)
    memory: str = ""
    notes: tuple[str, ...] = ()
    fps_why: str = ""


@dataclass(frozen=True)
class Resolved:
    """What the texts among the settings stand for, found without reading a model or a picture."""

    prompt: str
    loras: list[Lora]
    cache: dict[str, float | int | bool]
    embeddings: dict[str, str]
    hires_upscaler: str
    hires_model: str | None


def resolve(settings: Settings) -> Resolved:
    """Checks all that can be checked before anything is loaded; what is wrong becomes `settings.problems`."""
    problems = settings.problems
    check_inputs(settings)
    if not settings["model"] and not settings["diffusion_model"]:
        problems.add(
            "no model was given: give --model FILE (a whole checkpoint), or --diffusion-model FILE with its "
            "text encoder and --vae, or --preset NAME"
        )
    check_type_rules(settings["tensor_type_rules"], problems)
    check_vram(settings["vram"], problems)
    prompt, loras = extract_loras(
        settings["prompt"], settings["lora_model_dir"], problems, settings.located.get("lora_model_dir", {})
    )
    _check_loras(loras, settings)
    cache = cache_fields(settings["cache_mode"], settings["cache_option"], problems)
    upscaler, model = _hires_upscaler(settings) if settings["hires"] else ("Latent", None)
    embeddings = find_embeddings(settings)
    return Resolved(prompt, loras, cache, embeddings, upscaler, model)


def check_inputs(settings: Settings) -> None:
    """Every named input file and folder exists, and pickled files are allowed."""
    for option in of_verb(settings.verb):
        value = settings[option.key]
        if option.key in ("output", "preview_path", "log_file", "config") or not value or value == option.default:
            continue
        if option.kind is Kind.FOLDER:
            for path in value if option.many else (value,):
                check_folder(option.name, path, settings.problems)
        elif option.kind is Kind.FILE:
            for path in value if option.many else (value,):
                check_file(option.name, path, settings.problems)
                _check_pickle(option.name, path, settings)


def _check_pickle(name: str, path: str, settings: Settings) -> None:
    """Files with other names are judged when they are read, one at a time."""
    from sdsage._headers import sniff

    pickled = path.lower().endswith(PICKLED) and os.path.isfile(path) and sniff(Path(path)) == "pickle"
    if pickled and not settings["allow_pickle"]:
        settings.problems.add(
            f"{name} {path} is a pickle, which can run any code when it is read: use a .safetensors or .gguf "
            "file, or give --allow-pickle if you trust its source"
        )


def _check_loras(loras: list[Lora], settings: Settings) -> None:
    for lora in loras:
        _check_pickle("LoRA", lora.path, settings)
        if lora.is_high_noise and not (settings.verb != IMG and settings["high_noise_diffusion_model"]):
            settings.problems.add(
                f"LoRA {lora.path} is for the high-noise expert, and there is none: leave out |high_noise|, or "
                "give --high-noise-diffusion-model with vid-gen"
            )


def find_embeddings(settings: Settings) -> dict[str, str]:
    """Name -> path of the embeddings in --embd-dir, sorted by name; pickled ones only with --allow-pickle."""
    folder = settings["embd_dir"]
    found = dict(settings.located.get("embd_dir", {}))
    if not folder or not os.path.isdir(folder):
        return found
    for path in sorted(Path(folder).iterdir()):
        if path.suffix not in _EMBEDDING_SUFFIXES or not path.is_file():
            continue
        if path.suffix in PICKLED and not settings["allow_pickle"]:
            settings.warnings.append(f"embedding {path} is left out: a pickle needs --allow-pickle")
            continue
        found[path.stem] = os.path.join(folder, path.name)
    return dict(sorted(found.items()))


def _hires_upscaler(settings: Settings) -> tuple[str, str | None]:
    """Engine name of the upscaler, and its file when it is a model."""
    name = settings["hires_upscaler"] or "Latent"
    for known in UPSCALERS:
        if name.casefold() == known.casefold():
            return known, None
    if name in settings.located.get("hires_upscalers_dir", {}):
        return "Model", settings.located["hires_upscalers_dir"][name]
    folder, problems = settings["hires_upscalers_dir"], settings.problems
    builtin = ", ".join(UPSCALERS)
    if not folder:
        problems.add(f"--hires-upscaler {name!r} is not built in ({builtin}): a model needs --hires-upscalers-dir")
        return "Model", None
    if os.path.basename(name) != name or os.path.splitext(name)[1]:
        problems.add(f"--hires-upscaler {name!r} can't be used: it takes a name without folder and extension")
        return "Model", None
    for suffix in _UPSCALER_SUFFIXES:
        path = os.path.join(folder, name + suffix)
        if os.path.isfile(path):
            _check_pickle("--hires-upscaler", path, settings)
            return "Model", os.path.normpath(path)
    problems.add(f"--hires-upscaler {name!r} is neither built in ({builtin}) nor a model in {folder}")
    return "Model", None


def build(settings: Settings, resolved: Resolved, seeds: tuple[int, ...]) -> Job:
    """Reads the input pictures and fills the structs, for the first seed."""
    from sdsage.params import SdCtxParams, SdEmbedding, SdImgGenParams, SdLora, SdVidGenParams

    pictures = load_pictures(settings)
    ctx = SdCtxParams()
    gen = SdImgGenParams() if settings.verb == IMG else SdVidGenParams()
    roots = {"ctx": ctx, "gen": gen, "img" if settings.verb == IMG else "vid": gen}
    for option in of_verb(settings.verb):
        root, _, path = option.target.partition(".")
        value = settings[option.key]
        if option.kind is Kind.SWITCH:
            value = option.sets is value
        if root in roots and value not in (None, "", ()):
            set_path(roots[root], path, value)

    _fill_context(ctx, settings, resolved, pictures.encodes)
    ctx.embeddings = [SdEmbedding(name=name, path=path) for name, path in resolved.embeddings.items()]
    gen.prompt, gen.seed, gen.width, gen.height = resolved.prompt, seeds[0], pictures.width, pictures.height
    gen.loras = [SdLora(lora.path, lora.multiplier, lora.is_high_noise) for lora in resolved.loras]
    for path, value in pictures.fields.items():
        set_path(gen, path, value)
    tiling = gen.vae_tiling_params
    tiling.tile_size_x, tiling.tile_size_y = settings["vae_tile_size"]
    tiling.rel_size_x, tiling.rel_size_y = settings["vae_relative_tile_size"]
    _fill_cache(gen.cache, settings, resolved.cache)
    if isinstance(gen, SdVidGenParams):
        steps = settings["high_noise_steps"]
        gen.high_noise_sample_params.sample_steps = steps if steps > 0 else -1
    elif settings["seeds"]:
        gen.batch_count = 1
    if isinstance(gen, SdImgGenParams) and settings["hires"]:
        gen.hires.enabled = resolved.hires_upscaler != "None"
        gen.hires.upscaler = HiresUpscaler.parse(resolved.hires_upscaler)
        gen.hires.model_path = resolved.hires_model
    return Job(settings, ctx, gen, seeds, resolved.loras, input_files(settings, resolved), notes=tuple(pictures.notes))


def set_path(root: object, path: str, value: Any) -> None:
    """`root.a.b.c = value` for path "a.b.c"."""
    *parents, name = path.split(".")
    for parent in parents:
        root = getattr(root, parent)
    setattr(root, name, value)


def _fill_context(ctx: "SdCtxParams", settings: Settings, resolved: Resolved, encodes: bool) -> None:
    if settings["threads"] > 0:  # else the default of the struct: all physical cores
        ctx.n_threads = settings["threads"]
    ctx.circular_x = settings["circular"] or settings["circularx"]
    ctx.circular_y = settings["circular"] or settings["circulary"]
    # these three enlarge pixels, which are then encoded again
    latent = resolved.hires_upscaler not in ("Model", "Lanczos", "Nearest")
    ctx.vae_decode_only = settings.verb == IMG and not encodes and (latent or not settings["hires"])
    ctx.free_params_immediately = True  # one generation per run


def _fill_cache(cache: Any, settings: Settings, fields: dict[str, float | int | bool]) -> None:
    if settings["cache_mode"] != "disabled":
        cache.mode = settings["cache_mode"]
    for name, value in fields.items():
        setattr(cache, name, value)
    if settings["scm_mask"]:
        cache.scm_mask = ",".join(map(str, settings["scm_mask"]))
    if settings["cache_mode"] in BLOCK_MODES:
        cache.scm_policy_dynamic = settings["scm_policy"] == "dynamic"
