"""Model files that load one by one but don't fit each other, and unknown weight types: each is an error."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, ctx_params, small_video

import sdsage
from sdsage import BadRequest, ModelError

HIGH = "high_noise_diffusion_model"


@pytest.mark.parametrize(
    ("preset", "other", "option", "words"),
    [
        ("tiny-random", "tiny-random-i2v", HIGH, "the first has 16 input channels, the second 36"),
        ("tiny-random", "tiny-ti2v", "diffusion_model", "the first has 16 input channels, the second 48"),
        ("tiny-random-i2v", "tiny-random", HIGH, "the first has 36 input channels, the second 16"),
    ],
)
def test_experts_of_two_models(preset: str, other: str, option: str, words: str, preset_files: Any) -> None:
    files = {**preset_files(preset), HIGH: preset_files(other)[option]}
    with pytest.raises(ModelError, match=words) as caught:
        sdsage.Context(ctx_params(files))
    assert f"--diffusion-model '{files['diffusion_model']}'" in str(caught.value)
    assert f"--high-noise-diffusion-model '{files[HIGH]}'" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_text_encoder_of_another_width(preset_files: Any) -> None:
    files = {**preset_files("tiny-flux"), "t5xxl": preset_files("tiny-random")["t5xxl"]}
    with pytest.raises(ModelError, match=r"text features are 64 wide, the model takes 4096") as caught:
        sdsage.Context(ctx_params(files))
    assert f"--t5xxl '{files['t5xxl']}'" in str(caught.value)
    assert f"--diffusion-model '{files['diffusion_model']}'" in str(caught.value)


def retyped(source: str, target: Path, number: int) -> Path:
    """A copy of a GGUF file whose last tensor has another type number."""
    data = bytearray(Path(source).read_bytes())
    name = b"head.head.weight"
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    dims = int.from_bytes(data[at : at + 4], "little")
    struct.pack_into("<I", data, at + 4 + 8 * dims, number)
    target.write_bytes(data)
    return target


LOAD = """
import sys
sys.path.insert(0, sys.argv[1])
from conftest import ctx_params
import sdsage
from sdsage import presets
files = {k: v for k, v in presets.load("tiny-random").options.items() if str(v).endswith((".gguf", ".safetensors"))}
try:
    sdsage.Context(ctx_params({**files, "diffusion_model": sys.argv[2]}))
except sdsage.ModelError as error:
    print(error)
    sys.exit(error.exit_code)
"""

CONVERT = """
import sys
import sdsage
try:
    sdsage.convert(sys.argv[2], sys.argv[2] + ".out.gguf")
except sdsage.SdsageError as error:
    print(error)
    sys.exit(2)
"""


@pytest.mark.parametrize(
    ("program", "number"),
    [(LOAD, 31), (LOAD, 41), (LOAD, 84), (LOAD, 999999), (CONVERT, 4), (CONVERT, 5), (CONVERT, 31)],
)
def test_unknown_weight_types(program: str, number: int, preset_files: Any, tmp_path: Path) -> None:
    """In a process of its own: a crash would be seen."""
    file = retyped(preset_files("tiny-random")["diffusion_model"], tmp_path / "odd.gguf", number)
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, ROOT / "tests", file], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert f"'{file}'" in done.stdout
    assert f"tensor 'head.head.weight' has type {number}" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["odd.gguf"]


def lora_file(path: Path, tensors: dict[str, tuple[int, ...]]) -> str:
    """A safetensors file of F32 tensors: name -> shape (slowest first)."""
    rng, header, data = np.random.default_rng(0), {}, b""
    for name, shape in tensors.items():
        raw = (0.2 * rng.standard_normal(shape)).astype(np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (len(data), len(data) + len(raw))}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return str(path)


def attention_lora(path: Path, width: int) -> str:
    name = "diffusion_model.blocks.0.self_attn.q"
    return lora_file(path, {f"{name}.lora_down.weight": (4, width), f"{name}.lora_up.weight": (width, 4)})


@pytest.mark.parametrize(("mode", "wtype"), [("at_runtime", "COUNT"), ("immediately", "f16")])
def test_loras_fit_or_fail(mode: str, wtype: str, preset_files: Any, tmp_path: Path) -> None:
    """Also after an error the context makes the same video as before, and a LoRA for one part alone is right."""
    files = preset_files("tiny-random")
    unfit = "wide.safetensors' does not fit this model: tensor .* is .5120,"
    bad = {
        files["t5xxl"]: "umt5.gguf' fits no tensor of this Wan 2.x model",
        files["diffusion_model"]: "fits no tensor",
        attention_lora(tmp_path / "wide.safetensors", 5120): unfit,
    }
    good = attention_lora(tmp_path / "good.safetensors", 256)
    with sdsage.Context(ctx_params(files, lora_apply_mode=mode, wtype=wtype)) as ctx:
        plain = ctx.generate_video(small_video()).frames
        for path, words in bad.items():
            with pytest.raises(BadRequest, match=words):
                ctx.generate_video(small_video(loras=[sdsage.SdLora(path)]))
        assert (ctx.generate_video(small_video()).frames == plain).all()
        changed = [
            ctx.generate_video(small_video(loras=[sdsage.SdLora(good, is_high_noise=high)])).frames
            for high in (False, True)
        ]
        assert all((frames != plain).any() for frames in changed)
        assert (changed[0] != changed[1]).any()


def test_what_only_float_weights_can_take(preset_files: Any, tmp_path: Path) -> None:
    """Upstream would abort the process."""
    low_rank = attention_lora(tmp_path / "low-rank.safetensors", 256)
    difference = lora_file(tmp_path / "diff.safetensors", {"diffusion_model.blocks.0.self_attn.q.diff": (256, 256)})
    for mode, paths in (("immediately", (low_rank, difference)), ("at_runtime", (difference,))):
        with sdsage.Context(ctx_params(preset_files("tiny-random"), lora_apply_mode=mode)) as ctx:
            for path in paths:
                with pytest.raises(BadRequest, match="would be added to a weight of type q8_0"):
                    ctx.generate_video(small_video(loras=[sdsage.SdLora(path)]))


def test_unused_lora_tensors_print_nothing(
    preset_files: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "diffusion_model.blocks.{}.self_attn.q"
    shapes = {"lora_down.weight": (4, 256), "lora_up.weight": (256, 4)}
    tensors: dict[str, tuple[int, ...]] = {
        f"{name.format(block)}.{part}": shape for block in (0, 999) for part, shape in shapes.items()
    }
    lora = sdsage.SdLora(lora_file(tmp_path / "more.safetensors", tensors))
    with sdsage.Context(ctx_params(preset_files("tiny-random"), lora_apply_mode="at_runtime")) as ctx:
        ctx.generate_video(small_video(loras=[lora]))
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("rules", ["(=f16", "(?i)vae=f16"])
def test_rules_that_are_no_regular_expressions(rules: str, preset_files: Any, tmp_path: Path) -> None:
    files = preset_files("tiny-random")
    words = "--tensor-type-rules: .* is not a regular expression"
    with pytest.raises(ModelError, match=words):
        sdsage.Context(ctx_params(files, tensor_type_rules=rules))
    with pytest.raises(BadRequest, match=words):
        sdsage.convert(files["vae"], tmp_path / "out.gguf", tensor_type_rules=rules)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rules", ["^vae=q9", "vae", "^vae=f16,model=q8_1"])
def test_rules_with_a_type_that_there_is_not(rules: str, preset_files: Any, tmp_path: Path) -> None:
    """Upstream would leave the rule out and go on."""
    files = preset_files("tiny-random")
    words = rf"--tensor-type-rules: '{re.escape(rules.split(',')[-1])}' can't be used: it takes PATTERN=TYPE"
    with pytest.raises(ModelError, match=words):
        sdsage.Context(ctx_params(files, tensor_type_rules=rules))
    with pytest.raises(BadRequest, match=words):
        sdsage.convert(files["vae"], tmp_path / "out.gguf", tensor_type_rules=rules)
    assert list(tmp_path.iterdir()) == []


def embedding(files: dict[str, str], path: str) -> Any:
    return ctx_params(files, embeddings=[sdsage.SdEmbedding(name="mine", path=path)])


def test_embeddings_fit_or_fail(preset_files: Any, tmp_path: Path) -> None:
    files = preset_files("tiny-flux")
    with Path(files["clip_l"]).open("rb") as file:
        table = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    (width,) = {t["shape"][1] for name, t in table.items() if name.endswith("token_embedding.weight")}
    good = lora_file(tmp_path / "good.safetensors", {"emb_params": (3, width)})
    bad = {
        files["taesd"]: "holds a tensor .* it is another kind of file",
        preset_files("tiny-random")["t5xxl"]: "holds a tensor .* it is another kind of file",
        lora_file(tmp_path / "wide.safetensors", {"emb_params": (3, width + 32)}): "was made for another text encoder",
        lora_file(
            tmp_path / "long.safetensors", {"emb_params": (78, width)}
        ): "holds a tensor .* it is another kind of file",
    }
    for path, words in bad.items():
        with pytest.raises(ModelError, match=rf"embedding 'mine' \('{re.escape(path)}'\) {words}") as caught:
            sdsage.Context(embedding(files, path))
        assert caught.value.exit_code == 2
    with sdsage.Context(embedding(files, good)) as ctx:
        assert ctx.supports_image
    with pytest.raises(ModelError, match="this model has no CLIP text encoder"):
        sdsage.Context(embedding(preset_files("tiny-random"), good))


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (
            "control_net_path",
            "--control-net '{}' does not hold tensor '.*' of a ControlNet: it is another",
        ),
        ("photo_maker_path", "--photo-maker '{}' holds no encoder of faces: it is another kind of file"),
    ],
)
def test_other_files_in_the_slots_of_pictures(field: str, words: str, preset_files: Any, tmp_path: Path) -> None:
    files = preset_files("tiny-flux")
    other = files["taesd"]
    with pytest.raises(ModelError, match=words.format(re.escape(other))) as caught:
        sdsage.Context(ctx_params(files, **{field: other}))
    assert caught.value.exit_code == 2
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(Path(other).read_bytes()[:100_000])
    with pytest.raises(ModelError, match=r"cut\.safetensors"):
        sdsage.Context(ctx_params(files, **{field: str(cut)}))


def test_a_vae_beside_a_tiny_autoencoder_is_looked_at_and_said(preset_files: Any) -> None:
    """The engine decodes with one of the two."""
    files, heard = preset_files("tiny-flux"), []
    vae = preset_files("tiny-random")["vae"]
    with sdsage.Context(ctx_params(files, vae_path=vae), on_log=lambda level, line: heard.append(line)) as ctx:
        assert ctx.supports_image
    assert any(f"--vae '{vae}' has no effect beside --taesd" in line for line in heard)
    with pytest.raises(ModelError, match=r"--vae '.*' holds nothing that a VAE for Flux needs: it is another kind"):
        sdsage.Context(ctx_params(files, vae_path=preset_files("tiny-random")["t5xxl"]))
