"""The engine against torch, module by module, on the same weights and inputs.

    python -m tools.tiny_model.golden make FILE [--package | --state DIR]     torch's answers, into one small file
    python -m tools.tiny_model.golden check FILE [--package | --state DIR]    the engine's; needs no torch

Weights are those of the preset `tiny-random`; with --package the trained ones that the package carries, which are Q8_0
already; with --state those of train.py as far as there are. `make` needs the engine too: the noise that a diffusion
transformer gets is the engine's own. Errors are relative: the largest difference to torch over torch's largest value,
and the root mean squares of both. `public` does the same with public code.
"""

import argparse
import tempfile
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sdsage.tiny import ensure
from sdsage.tiny.files import RANDOM as RANDOM_FILES
from sdsage.tiny.tensors import DType
from tools.tiny_model import arrays, engine, export, grammar, scenes, tokens
from tools.tiny_model.sizes import LATENT, PIXEL, DitSize, TextSize, VaeSize

PROMPTS = 6
SIGMAS = {"high": (1.0, 0.9), "low": (0.7, 0.2)}
FRAMES, SIZE = 9, (64, 48)  # width and height of the diffusion transformers' inputs
FIRST = (48, 64)  # height and width of the first frame that the encoder gets
Values = dict[str, NDArray]


@dataclass(frozen=True)
class Difference:
    """`largest` and `rms` are relative; `seen` is the share of values that could be compared."""

    module: str
    largest: float
    rms: float
    seen: float = 1.0


# The most that a module may differ, largest and root mean square, by the type of the linear layers. Random weights make
# rounding grow from layer to layer. The VAE's layers are F16 in every file, and processors with AVX512-FP16 add their
# products up in F16 too.
Limits = Mapping[str, tuple[float, float]]
_NOISE: Limits = {"noise": (1e-6, 1e-6)}
_VAE: Limits = {"encoder": (2e-3, 2e-3), "decoder": (4e-3, 1e-3)}  # the largest of half a million pixels
_RANDOM_VAE: Limits = {"encoder": (1e-2, 5e-3), "decoder": (4e-2, 5e-3)}
TRAINED: Mapping[str, Limits] = {
    "f32": {"text": (1e-3, 1e-3), "dit": (1e-3, 1e-3), **_VAE, **_NOISE},
    "f16": {"text": (2e-3, 2e-3), "dit": (5e-3, 2e-3), **_VAE, **_NOISE},
    "q8_0": {"text": (2e-2, 2e-2), "dit": (2e-2, 2e-2), **_VAE, **_NOISE},
}
RANDOM: Mapping[str, Limits] = {
    "f32": {"text": (1e-3, 1e-3), "dit": (4e-3, 2e-3), **_RANDOM_VAE, **_NOISE},
    "f16": {"text": (2e-3, 2e-3), "dit": (1e-2, 5e-3), **_RANDOM_VAE, **_NOISE},
    "q8_0": {"text": (3e-2, 3e-2), "dit": (2.5e-1, 8e-2), **_RANDOM_VAE, **_NOISE},
}


def prompts() -> list[str]:
    return [*grammar.held_out_captions()[1][: PROMPTS - 1], ""]


def first_frame() -> NDArray[np.uint8]:
    """A picture of the generator's, cut to FIRST."""
    rng = np.random.default_rng(7)
    clip = scenes.clips(grammar.sample(rng, 1), rng)[0, 8]
    top, left = ((n - k) // 2 for n, k in zip(clip.shape, FIRST, strict=False))
    return np.ascontiguousarray(clip[top : top + FIRST[0], left : left + FIRST[1]])


def first_clip() -> NDArray[np.float32]:
    """It with gray frames behind, as the encoder gets it: 1 x 3 x t x h x w."""
    clip = np.zeros((1, PIXEL, FRAMES, *FIRST), np.float32)
    clip[0, :, 0] = first_frame().transpose(2, 0, 1) / np.float32(127.5) - 1
    return clip


def cases() -> list[tuple[str, float, int]]:
    """Expert, sigma and number of the prompt, which is the seed as well."""
    return [(expert, sigma, k) for expert, those in SIGMAS.items() for k, sigma in enumerate(those)]


# ---- weights, by the names of the torch modules


def weights(state: Path | None) -> tuple[dict[str, Values], tuple[str, ...]]:
    """Weights of text, vae, low and high, and which of them are trained: the others are random.

    Where an expert is missing the trunk stands for it.
    """
    found, trained = random(), []
    for part in found if state else ():
        names = (part, "trunk") if part in SIGMAS else (part,)
        kept = [w for w in (arrays.load(state, f"{name}.ema") for name in names) if w]
        if kept:
            found[part] = kept[0]
            trained.append(part)
    return found, tuple(trained)


def limits(kind: str, trained: Container[str]) -> Limits:
    """Of each module, for linear layers of a type."""
    part = {"text": "text", "dit": "low", "noise": "low", "encoder": "vae", "decoder": "vae"}
    return {module: (TRAINED if part[module] in trained else RANDOM)[kind][module] for module in part}


def random() -> dict[str, Values]:
    """Those of the preset `tiny-random`, before they are rounded to Q8_0."""
    names = {
        "text": "umt5.gguf",
        "vae": "wan21-vae.safetensors",
        "low": "wan-t2v-low.gguf",
        "high": "wan-t2v-high.gguf",
    }
    files = {part: RANDOM_FILES[name] for part, name in names.items()}
    return _of_files({part: {t.name: t.values(file.seed) for t in file.tensors()} for part, file in files.items()})


def package() -> dict[str, Values]:
    """The trained ones that the package carries."""
    names = {
        "text": "trained/umt5-q8_0.gguf",
        "vae": "trained/wan21-vae.safetensors",
        "low": "trained/wan-i2v-low-q8_0.gguf",
        "high": "trained/wan-i2v-high-q8_0.gguf",
    }
    paths = ensure(names.values())
    return _of_files({part: export.values(paths[name]) for part, name in names.items()})


def _of_files(found: dict[str, Values]) -> dict[str, Values]:
    """Tensors of model files as the torch modules have them."""
    found["text"] = {name.removeprefix("enc."): values for name, values in found["text"].items()}
    table = found["text"]["token_embd.weight"]
    rows = [np.zeros_like(table[0]), *(table[i] for i in tokens.used())]
    found["text"]["token_embd.weight"] = np.stack(rows)
    for expert in SIGMAS:
        dim = len(found[expert]["patch_embedding.bias"])
        found[expert]["patch_embedding.weight"] = found[expert]["patch_embedding.weight"].reshape(dim, -1, 1, 2, 2)
    return found


def add_source(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--package", action="store_true", help="the weights of the preset tiny")
    source.add_argument("--state", type=Path, help="folder of train.py; what it lacks is random")


def chosen(a: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[dict[str, Values], tuple[str, ...]]:
    """Weights as `add_source` asks for them, and which of them are trained."""
    found, trained = (package(), ("text", "vae", "low", "high")) if a.package else weights(a.state)
    if a.state and not trained:
        parser.error(f"{a.state} has no weights: train.py --state {a.state} makes them")
    return found, trained


def text_size(w: Values) -> TextSize:
    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blk."))
    heads = w["blk.0.attn_rel_b.weight"].shape[1]
    return TextSize(w["token_embd.weight"].shape[1], heads, len(w["blk.0.ffn_up.weight"]), layers)


def dit_size(w: Values) -> DitSize:
    blocks = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))
    dim, inputs = w["patch_embedding.weight"].shape[:2]
    return DitSize(dim, len(w["blocks.0.ffn.0.bias"]), blocks, inputs)


def vae_size(w: Values) -> VaeSize:
    return VaeSize(len(w["encoder.conv1.bias"]), len(w["decoder.conv1.bias"]) // 4)


def write(weights: Mapping[str, Values], linear: DType, folder: Path) -> tuple[engine.Modules, dict[str, Path]]:
    """Model files of the weights: the engine's modules, and the experts' files."""
    text, vae = folder / "umt5.gguf", folder / "wan21-vae.safetensors"
    text.write_bytes(export.as_gguf(export.text(weights["text"], linear), "t5encoder", "umt5"))
    vae.write_bytes(export.as_safetensors(export.vae(weights["vae"])))
    experts = {}
    for expert in SIGMAS:
        experts[expert] = folder / f"wan-{expert}.gguf"
        experts[expert].write_bytes(export.as_gguf(export.dit(weights[expert], linear, LATENT), "wan", expert))
    return engine.Modules(text, vae, folder), experts


# ---- both sides


def make(weights: Mapping[str, Values], folder: Path) -> Values:
    """Inputs and torch's answers."""
    import torch

    from tools.tiny_model.dit import Wan
    from tools.tiny_model.text import Umt5
    from tools.tiny_model.vae import WanVae

    modules, _ = write(weights, DType.F32, folder)
    size = text_size(weights["text"])
    text = filled(Umt5(size, len(tokens.used())), weights["text"])
    vae = filled(WanVae(vae_size(weights["vae"])), weights["vae"])
    rows, lengths = (torch.from_numpy(a) for a in tokens.rows(prompts()))
    found: Values = {}
    with torch.no_grad():
        hidden = text(rows, lengths)
        found["text"] = hidden.sum(1).numpy()
        for expert, sigma, k in cases():
            shape = dit_size(weights[expert])
            dit = filled(Wan(shape, size), weights[expert])
            x = modules.noise(sigma, k, FRAMES, SIZE)
            inputs = torch.cat((torch.from_numpy(x), torch.zeros(1, shape.inputs - LATENT, *x.shape[2:])), 1)
            v = dit(inputs, torch.tensor([sigma]), hidden[k : k + 1], lengths[k : k + 1])
            found[f"dit.{expert}.{k}.x"], found[f"dit.{expert}.{k}.v"] = x, v.numpy()
        found["encoder"] = vae.diffusion_latents(torch.from_numpy(first_clip())).numpy()
        rng = np.random.default_rng(11)
        drawn = scenes.clips(grammar.sample(rng, 1), rng, FRAMES)[0, :, 24:72, 16:80]
        z = vae.diffusion_latents(torch.from_numpy(drawn).permute(3, 0, 1, 2)[None] / 127.5 - 1)
        found["decoder.z"], found["decoder"] = z.numpy(), vae.decode_diffusion(z)[0].numpy()
    return found


def filled(module, values: Values):  # type: ignore[no-untyped-def]
    """A torch module with these weights; convolutions have the F16 values that model files hold."""
    import torch

    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(torch.from_numpy(np.array(values[name], np.float32)))
            if weight.dim() > 3:
                weight.copy_(weight.half().float())
    return module.eval()


def compare(name: str, ours: NDArray, theirs: NDArray) -> Difference:
    there = ~np.isnan(ours)
    away, size = (ours - theirs)[there].astype(np.float64), theirs.astype(np.float64)
    rms = float(np.sqrt(np.square(away).mean() / np.square(size[there]).mean()))
    return Difference(name, float(np.abs(away).max() / np.abs(size).max()), rms, float(there.mean()))


MODULES = ("text", "dit", "encoder", "decoder")


def check(
    expected: Values, weights: Mapping[str, Values], kind: str, folder: Path, only: Container[str] = MODULES
) -> list[Difference]:
    """What the engine makes of the same inputs, with linear layers of a type ("f32", "f16", "q8_0")."""
    modules, experts = write(weights, DType[kind.upper()], folder)
    found = []
    if "text" in only:
        found.append(compare("text", modules.text_sum(prompts()), expected["text"]))
    for expert, sigma, k in cases() if "dit" in only else ():
        x, v = modules.velocity(experts[expert], prompts()[k], sigma, k, FRAMES, SIZE)
        name = f"dit.{expert}.{k}"
        found.append(compare(f"noise.{expert}.{k}", x, expected[f"{name}.x"]))
        found.append(compare(name, v, expected[f"{name}.v"]))
    if "encoder" in only:
        found.append(compare("encoder", modules.condition(first_frame(), FRAMES), expected["encoder"]))
    if "decoder" in only:
        found.append(compare("decoder", modules.decoded(weights["vae"], expected["decoder.z"]), expected["decoder"]))
    return found


def too_far(found: list[Difference], limits: Limits) -> list[str]:
    """What is over the limits, in words."""
    said = []
    for d in found:
        module = d.module.split(".")[0]
        largest, rms = limits[module]
        if not (d.largest <= largest and d.rms <= rms):
            said.append(f"{d.module}: {d.largest:.1e} and {d.rms:.1e} (rms), at most {largest:.0e} and {rms:.0e}")
    return said


def show(title: str, found: list[Difference]) -> None:
    print(title)
    for d in found:
        print(f"  {d.module:14} largest {d.largest:.1e}  rms {d.rms:.1e}  seen {d.seen:.3f}")


def save(path: Path, values: Values) -> None:
    """float32, compressed."""
    np.savez_compressed(path, **{k: v.astype(np.float32) for k, v in values.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=("make", "check"))
    parser.add_argument("file", type=Path, help="the golden file (.npz)")
    add_source(parser)
    parser.add_argument("--type", choices=tuple(TRAINED), default="q8_0", help="check: of the linear layers")
    a = parser.parse_args()
    some, trained = chosen(a, parser)
    with tempfile.TemporaryDirectory() as scratch:
        if a.verb == "make":
            a.file.parent.mkdir(parents=True, exist_ok=True)
            save(a.file, make(some, Path(scratch)))
            print(f"{a.file}  {a.file.stat().st_size / 1e6:.2f} MB")
            return
        found = check(dict(np.load(a.file)), some, a.type, Path(scratch))
    show(f"trained: {', '.join(trained) or 'nothing'}", found)
    if said := too_far(found, limits(a.type, trained)):
        parser.exit(1, "\n".join(said) + "\n")


if __name__ == "__main__":
    main()
