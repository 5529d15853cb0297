"""What reaches the C structs: for every option, sdsage and the native sd-cli dump the same parameters."""

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from sdsage import _library
from sdsage.cli.app import build_app
from sdsage.cli.option import GENERATE, IMG, Kind, Option
from sdsage.cli.options import TABLE

# Options of sd-cli that change no struct: they steer what is done with the result.
OUTSIDE = {
    "--fps", "--upscale-model", "--upscale-repeats", "--upscale-tile-size", "--preview", "--preview-path",
    "--preview-interval", "--preview-noisy", "--output", "--output-begin-idx", "--disable-image-metadata", "--mode",
    "--print-params", "--verbose", "--color", "--hires-upscalers-dir", "--lora-model-dir",
}  # fmt: skip
OURS = {
    "--allow-pickle", "--overwrite", "--preset", "--config", "--device", "--strict", "--json", "--quiet", "--seeds",
    "--vram", "--tensors", "--log-file", "--preview-inline",
    "--from-file", "--model-dir", "--ignore-hashes", "--extend", "--codec", "--crf", "--save-latents",
    "--checkpoint-every", "--resume", "--sass", "LATENTS",
}  # fmt: skip
# A value that is not the default, where the kind of the option does not give one.
VALUES = {
    "--model": ["wan low.safetensors"],
    "--type": ["q8_0"],
    "--tensor-type-rules": [r"^vae\.=f16,model\.=q8_0"],
    "--cache-option": ["threshold=0.3,start=0.2,end=0.8,decay=0.9,relative=0,reset=0,Fn=4,Bn=1,warmup=2,w=0.3"],
    "--mode": None,  # the verb's
    "--output": ["other.webp"],
    "--preview-path": ["preview.webp"],
}  # fmt: skip
PICTURES = {"--init-img", "--end-img", "--mask", "--ref-image", "--control-image"}
# Another option that is needed for this one to reach the struct.
WITH = {
    "--canny": ["--control-image", "photo.png"],
    "--hires-upscaler": ["--hires"],
    "--scm-policy": ["--cache-mode", "dbcache"],
}
SIZE = ["-W", "24", "-H", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model files (empty: nothing is read), pictures of 24 x 16, and folders of them."""
    root = tmp_path_factory.mktemp("inputs")
    rng = np.random.default_rng(7)
    (root / "model.gguf").touch()
    (root / "wan low.safetensors").touch()
    for name in ("photo.png", "frames/00.png", "frames/01.png"):
        (root / name).parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 24, 3), np.uint8)).save(root / name)
    Image.fromarray(rng.integers(0, 256, (16, 24), np.uint8)).save(root / "grey.png")
    for name in ("models/style.safetensors", "models/detail.gguf", "models/sub/high.safetensors", "models/x4.gguf"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


@cache
def app(verb: str) -> Any:
    return build_app(only=verb)


def native(folder: Path, verb: str, args: list[str]) -> Any:
    command = [_library.sd_cli_path(), "-M", verb.replace("-", "_"), "--print-params", *args]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return comparable(json.loads(done.stdout[done.stdout.index('{"ctx"') :]))


def ours(folder: Path, verb: str, args: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app(verb), [verb, "--print-params", *args])
    assert result.exit_code == 0, result.output
    return comparable(json.loads(result.stdout))


def comparable(dump: Any) -> Any:
    """Without the one value that sd-cli leaves uninitialised: the upscaler of a hires pass that is off."""
    hires = dump.get("img", {}).get("hires", {})
    if not hires.get("enabled", True):
        hires.pop("upscaler")
    return dump


def value_of(option: Option) -> list[str]:
    """Arguments that set `option` to something other than its default."""
    if option.name in VALUES:
        return VALUES[option.name] or []
    if option.kind is Kind.SWITCH:
        return []
    if option.kind is Kind.FILE:
        return ["grey.png" if option.name == "--mask" else "photo.png" if option.name in PICTURES else "model.gguf"]
    if option.kind is Kind.FOLDER:
        return ["frames" if option.name in ("--control-video", "--pm-id-images-dir") else "models"]
    if option.choices:
        return [next(c for c in reversed(option.choices) if c != option.default)]
    plain = {
        Kind.TEXT: "Lanczos" if option.name == "--hires-upscaler" else 'grün "猫" 🐈 \\ %d',
        Kind.LEVERS: "linear,vae",
        Kind.INT: str(option.default + 5 if isinstance(option.default, int) else 96),
        Kind.FLOAT: "0.3",
        Kind.INTS: "[1, 0,1]",
        Kind.FLOATS: "14.5,7.25, 0",
        Kind.INT_PAIR: "24x20",
        Kind.FLOAT_PAIR: "0.5x2",
    }
    return [plain[option.kind]]


def arguments(option: Option) -> list[str]:
    scm = {"--scm-mask": ["1,0,1"]}
    mine = [] if option.name == "--mode" else [option.name, *scm.get(option.name, value_of(option))]
    return ["-m", "model.gguf", *WITH.get(option.name, []), *mine]


NATIVE = [o for o in TABLE if o.name not in OURS and o.name != "--convert-name" and GENERATE & set(o.verbs)]


@pytest.mark.parametrize("verb", sorted(GENERATE))
@pytest.mark.parametrize("option", NATIVE, ids=lambda o: o.name)
def test_dumps_agree(verb: str, option: Option, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sized = option.name in PICTURES | {"--control-video", "--canny"}
    args = arguments(option) + (SIZE if sized else [])
    dump = ours(folder, verb, args, monkeypatch)
    assert dump == native(folder, verb, args)
    more_videos = option.name == "--batch-count" and verb != IMG  # jobs of their own, which sd-cli doesn't have
    if option.name not in OUTSIDE and option.only in (None, verb) and not more_videos:
        base = ["-m", "model.gguf", *WITH.get(option.name, []), *(SIZE if sized else [])]
        assert dump != baseline(folder, verb, tuple(base), monkeypatch), "the value did not reach the struct"


BASELINES: dict[tuple[str, tuple[str, ...]], Any] = {}


def baseline(folder: Path, verb: str, args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `args` give; most options have the same ones beside them."""
    if (verb, args) not in BASELINES:
        BASELINES[verb, args] = ours(folder, verb, list(args), monkeypatch)
    return BASELINES[verb, args]


LORAS = "a <lora:style:0.8> cat <lora:detail:-0.5><lora:style:0.25> <lora:{sub}x4:1.5>"
HIGH = " <lora:|high_noise|sub/high:1>"
COMBINATIONS = {
    "defaults": [],
    "short names": ["-p", "p", "-n", "n", "-s", "7", "-t", "3", *SIZE],
    "two experts": ["--high-noise-diffusion-model", "wan low.safetensors", "--high-noise-steps", "0", "--steps", "4"],
    "negative high-noise steps": ["--high-noise-steps", "-5"],
    "size from the picture": ["-i", "photo.png"],
    "one side beside a picture": ["-i", "photo.png", "-W", "96"],
    "one side alone": ["-H", "96"],
    "size from a reference picture": ["-r", "photo.png", "-r", "grey rgb.png"],
    "tile size of one number": ["--vae-tiling", "--vae-tile-size", "48", "--vae-relative-tile-size", "0.25"],
    "empty list of layers": ["--skip-layers", "[5]", "--high-noise-skip-layers", "[1,2]"],
    "sigmas given twice": ["--sigmas", "[3,2]", "--sigmas", "1,0"],
    "hires with a model": ["--hires", "--hires-upscaler", "x4", "--hires-upscalers-dir", "models"],
    "hires in the latents": ["--hires", "--hires-upscaler", "Latent (bicubic)", "--hires-steps", "3"],
    "hires turned off": ["--hires", "--hires-upscaler", "None"],
    "circular": ["--circular", "--circularx"],
    "threads left to the engine": ["-t", "0"],
    "aliases": ["--qwen2vl", "model.gguf", "--qwen2vl_vision", "model.gguf", "--tae", "model.gguf"],
    "last one wins": ["--steps", "3", "--steps", "4", "--cfg-scale", "2", "--cfg-scale", "3"],
    **{
        f"cache {mode}": ["--cache-mode", mode, "--cache-option", "threshold=0.2,warmup=3", "--scm-policy", "static"]
        for mode in ("easycache", "ucache", "dbcache", "taylorseer", "cache-dit", "spectrum")
    },
}


@pytest.mark.parametrize("verb", sorted(GENERATE))
@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations_agree(verb: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rgb = folder / "grey rgb.png"
    if not rgb.exists():
        Image.new("RGB", (8, 8), (9, 9, 9)).save(rgb)
    args = ["--diffusion-model", "wan low.safetensors", *COMBINATIONS[name]]
    assert ours(folder, verb, args, monkeypatch) == native(folder, verb, args)


@pytest.mark.parametrize("verb", sorted(GENERATE))
def test_loras_agree(verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = LORAS.format(sub=f"{folder}/models/") + (HIGH if verb != IMG else "")
    args = ["-m", "model.gguf", "--lora-model-dir", "./models/", "-p", prompt]
    args += ["--high-noise-diffusion-model", "model.gguf"] if verb != IMG else []
    dump = ours(folder, verb, args, monkeypatch)
    assert dump == native(folder, verb, args)
    made = dump["img" if verb == IMG else "vid"]
    assert [x["path"] for x in made["loras"]][-1] == (
        "models/sub/high.safetensors" if verb != IMG else "models/style.safetensors"
    )
    assert "<lora" not in made["prompt"]


def test_embeddings_agree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["-m", "model.gguf", "--embd-dir", "models/"]
    dump = ours(folder, IMG, args, monkeypatch)
    assert dump == native(folder, IMG, args)
    assert [e["name"] for e in dump["ctx"]["embeddings"]] == ["detail", "style", "x4"]
