"""Pre-flight: which files fit together, told from headers; and never stricter than the engine."""

import json
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ctx_params
from test_bad_models import attention_lora, lora_file
from test_stock_sizes import t5, wan, wan_vae, write_sparse
from typer.testing import CliRunner

import sdsage
from sdsage._headers import read_header
from sdsage._kinds import Role, contents
from sdsage._preflight import Findings, Lora, preflight
from sdsage.cli.app import build_app

Shapes = dict[str, tuple[int, ...]]
LOW, HIGH = "--diffusion-model", "--high-noise-diffusion-model"


def linear(name: str, n_in: int, n_out: int) -> Shapes:
    return {f"{name}.weight": (n_out, n_in), f"{name}.bias": (n_out,)}


def flux(inputs: int = 64, guidance: bool = True) -> Shapes:
    shapes = linear("img_in", inputs, 3072) | linear("txt_in", 4096, 3072) | linear("vector_in.in_layer", 768, 3072)
    shapes |= linear("double_blocks.0.img_attn.qkv", 3072, 9216) | linear("single_blocks.0.linear1", 3072, 21504)
    shapes |= linear("final_layer.linear", 3072, 64)
    return shapes | (linear("guidance_in.in_layer", 256, 3072) if guidance else {})


def unet(context: int, inputs: int = 4, big: bool = False) -> Shapes:
    shapes = {"input_blocks.0.0.weight": (320, inputs, 3, 3), "out.2.weight": (4, 320, 3, 3)}
    attention = "output_blocks.3.1.transformer_blocks.0.attn2"
    shapes |= linear(f"{attention}.to_k", context, 320) | linear("input_blocks.1.0.emb_layers.1", 1280, 320)
    return shapes | (linear("label_emb.0.0", 2816, 1280) if big else {})


QWEN = (
    linear("txt_in", 3584, 3072) | linear("transformer_blocks.0.img_mod.1", 3072, 18432) | linear("proj_out", 3072, 64)
)
Z_IMAGE = (
    {"cap_embedder.0.weight": (2560,)} | linear("cap_embedder.1", 2560, 3840) | linear("final_layer.linear", 3840, 64)
)
SD3 = {"x_embedder.proj.weight": (1536, 16, 2, 2), "joint_blocks.0.x_block.attn.qkv.weight": (4608, 1536)} | linear(
    "context_embedder", 4096, 1536
)
CHROMA = flux() | {"distilled_guidance_layer.in_proj.weight": (5120, 64)}


def clip(width: int) -> Shapes:
    return {"text_model.embeddings.token_embedding.weight": (49408, width), "text_model.encoder.layers.0.x": (width,)}


def kl_vae(channels: int) -> Shapes:
    return {"decoder.conv_in.weight": (512, channels, 3, 3), "decoder.conv_out.weight": (3, 128, 3, 3)}


def llm(width: int) -> Shapes:
    return {"model.embed_tokens.weight": (151936, width), "model.layers.0.self_attn.q_proj.weight": (width, width)}


def prefixed(**parts: Shapes) -> Shapes:
    return {f"{prefix.replace('__', '.')}.{n}": s for prefix, shapes in parts.items() for n, s in shapes.items()}


SD1_WHOLE = prefixed(
    model__diffusion_model=unet(768), first_stage_model=kl_vae(4), cond_stage_model__transformer=clip(768)
)
SDXL_WHOLE = prefixed(
    model__diffusion_model=unet(2048, big=True),
    first_stage_model=kl_vae(4),
    conditioner__embedders__0__transformer=clip(768),
)

# name: shapes, role, kind, words of the title
STOCK: dict[str, tuple[Shapes, Role, str, str]] = {
    "t2v-14b": (wan(5120, 13824, 2, 16, 16), Role.DIFFUSION, "wan-t2v", "text-to-video, 14B"),
    "t2v-1.3b": (wan(1536, 8960, 2, 16, 16), Role.DIFFUSION, "wan-t2v", "text-to-video, 1.3B"),
    "i2v-2.1": (wan(5120, 13824, 2, 36, 16, image=True), Role.DIFFUSION, "wan-i2v-clip", "Wan 2.1 image-to-video, 14B"),
    "flf2v": (wan(5120, 13824, 2, 36, 16, image=True, flf=True), Role.DIFFUSION, "wan-flf2v", "first-last-frame"),
    "i2v-2.2": (wan(5120, 13824, 2, 36, 16), Role.DIFFUSION, "wan-i2v", "Wan 2.2 image-to-video, 14B"),
    "ti2v": (wan(3072, 14336, 2, 48, 48), Role.DIFFUSION, "wan-ti2v", "text- and image-to-video, 5B"),
    "vace": (wan(5120, 13824, 2, 16, 16, vace=1), Role.DIFFUSION, "wan-vace", "Wan VACE, 14B"),
    "flux": (flux(), Role.DIFFUSION, "flux", "Flux dev"),
    "schnell": (flux(guidance=False), Role.DIFFUSION, "flux", "Flux schnell"),
    "fill": (flux(384), Role.DIFFUSION, "flux-fill", "Flux Fill"),
    "chroma": (CHROMA, Role.DIFFUSION, "chroma", "Chroma"),
    "qwen": (QWEN, Role.DIFFUSION, "qwen-image", "Qwen-Image"),
    "z-image": (Z_IMAGE, Role.DIFFUSION, "z-image", "Z-Image"),
    "sd3": (SD3, Role.DIFFUSION, "sd3", "Stable Diffusion 3"),
    "sd1": (SD1_WHOLE, Role.DIFFUSION, "sd1", "Stable Diffusion 1"),
    "sdxl": (SDXL_WHOLE, Role.DIFFUSION, "sdxl", "Stable Diffusion XL"),
    "sd1-inpaint": (prefixed(model__diffusion_model=unet(768, 9)), Role.DIFFUSION, "sd1", "inpainting"),
    "sd2-unet": (unet(1024), Role.DIFFUSION, "sd2", "Stable Diffusion 2"),
    "umt5": (t5(256384, True), Role.TEXT, "umt5", "umt5-xxl"),
    "t5": (t5(32128, False), Role.TEXT, "t5", "T5 v1.1-xxl"),
    "clip-l": (clip(768), Role.TEXT, "clip-l", "CLIP-L"),
    "clip-g": (clip(1280), Role.TEXT, "clip-g", "CLIP-G"),
    "qwen25": (llm(3584), Role.TEXT, "llm", "language model, 3584 wide"),
    "qwen3": (llm(2560), Role.TEXT, "llm", "language model, 2560 wide"),
    "clip-vision": (
        {"vision_model.embeddings.patch_embedding.weight": (1280, 3, 14, 14)}, Role.VISION, "clip-vision", "1280 wide"),
    "wan-vae": (wan_vae(96, 96, 16), Role.VAE, "wan-vae", "Wan 2.1 VAE, 16 channels"),
    "wan22-vae": (wan_vae(160, 256, 48), Role.VAE, "wan-vae", "Wan 2.2 VAE, 48 channels"),
    "flux-vae": (kl_vae(16), Role.VAE, "kl-vae", "of Flux, SD3 and Z-Image, 16 channels"),
    "sd-vae": (kl_vae(4), Role.VAE, "kl-vae", "of Stable Diffusion 1, 2 and XL, 4 channels"),
    "taesd": (
        {"decoder.layers.0.weight": (64, 4, 3, 3), "decoder.layers.2.conv.0.weight": (64, 64, 3, 3)},
        Role.TAE, "taesd", "for pictures, 4 channels"),
    "taew": (
        {"decoder.1.weight": (256, 16, 3, 3), "decoder.3.conv.0.weight": (256, 512, 3, 3)},
        Role.TAE, "taehv", "for videos, 16 channels"),
    "esrgan": (
        {"conv_first.weight": (64, 3, 3, 3), "body.0.rdb1.conv1.weight": (32, 64, 3, 3),
         "conv_up1.weight": (64, 64, 3, 3), "conv_up2.weight": (64, 64, 3, 3)},
        Role.UPSCALER, "esrgan", "ESRGAN upscaler, 4 times"),
    "esrgan-old": (
        {"model.0.weight": (64, 3, 3, 3), "model.1.sub.0.RDB1.conv1.0.weight": (32, 64, 3, 3),
         "model.1.sub.1.weight": (64, 64, 3, 3), "model.3.weight": (64, 64, 3, 3), "model.6.weight": (64, 64, 3, 3)},
        Role.UPSCALER, "esrgan", "ESRGAN upscaler, 4 times"),
    "controlnet": (
        {"control_model.input_hint_block.0.weight": (16, 3, 3, 3),
         "control_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": (320, 768)},
        Role.CONTROL, "control-net", "ControlNet for SD 1"),
    "embedding": ({"emb_params": (3, 768)}, Role.EMBEDDING, "embedding", "embedding of 3 tokens, 768 wide"),
}  # fmt: skip


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Sparse files with headers like those of public ones, of two blocks."""
    folder = tmp_path_factory.mktemp("stock")

    def file(name: str) -> str:
        path = folder / f"{name}.safetensors"
        if not path.exists():
            write_sparse(path, STOCK[name][0])
        return str(path)

    return file


@pytest.mark.parametrize("name", list(STOCK))
def test_what_a_file_is(name: str, stock: Callable[[str], str]) -> None:
    _, role, kind, words = STOCK[name]
    holds = contents(read_header(stock(name)))
    part = holds.part(role)
    assert part is not None
    assert part.kind == kind
    assert words in part.title
    assert words in holds.title


def test_whole_checkpoints_and_strangers(tmp_path: Path) -> None:
    write_sparse(tmp_path / "whole", SDXL_WHOLE)
    holds = contents(read_header(tmp_path / "whole"))
    assert holds.roles == {Role.DIFFUSION, Role.VAE, Role.TEXT}
    write_sparse(tmp_path / "strange", {"layer.weight": (300, 300), "x" * 200: (1,) * 8})
    strange = contents(read_header(tmp_path / "strange"))
    assert strange.parts == ()
    assert preflight({LOW: str(tmp_path / "strange"), "--vae": str(tmp_path / "strange")}) == Findings()


def test_gguf_has_no_fifth_dimension(preset_files: Any) -> None:
    for preset, kind, channels in (
        ("tiny-random", "wan-t2v", 16),
        ("tiny-random-i2v", "wan-i2v", 36),
        ("tiny-ti2v", "wan-ti2v", 48),
    ):
        part = contents(read_header(preset_files(preset)["diffusion_model"])).part(Role.DIFFUSION)
        assert part is not None
        assert (part.kind, part.facts["input_channels"]) == (kind, channels)


SETS = {
    "t2v": {LOW: "t2v-14b", "--t5xxl": "umt5", "--vae": "wan-vae"},
    "ti2v": {LOW: "ti2v", "--t5xxl": "umt5", "--vae": "wan22-vae"},
    "i2v-2.1": {LOW: "i2v-2.1", "--t5xxl": "umt5", "--vae": "wan-vae", "--clip_vision": "clip-vision"},
    "tae": {LOW: "t2v-14b", "--t5xxl": "umt5", "--taesd": "taew"},
    "flux": {LOW: "flux", "--t5xxl": "t5", "--clip_l": "clip-l", "--vae": "flux-vae"},
    "chroma": {LOW: "chroma", "--t5xxl": "t5", "--vae": "flux-vae"},
    "sd3": {LOW: "sd3", "--t5xxl": "t5", "--clip_l": "clip-l", "--clip_g": "clip-g", "--vae": "flux-vae"},
    "qwen": {LOW: "qwen", "--llm": "qwen25", "--vae": "wan-vae"},
    "z-image": {LOW: "z-image", "--llm": "qwen3", "--vae": "flux-vae"},
    "sd1": {"--model": "sd1", "--control-net": "controlnet", "--upscale-model": "esrgan"},
    "sdxl": {"--model": "sdxl", "--vae": "sd-vae"},
    "sd1 in two files": {"--model": "sd1-inpaint", "--clip_l": "clip-l", "--vae": "sd-vae"},
}


@pytest.mark.parametrize("name", list(SETS))
def test_sets_that_fit(name: str, stock: Callable[[str], str]) -> None:
    files = {flag: stock(file) for flag, file in SETS[name].items()}
    assert preflight(files) == Findings()


WRONG = [
    (
        "t2v",
        {"--vae": "wan22-vae"},
        r"--vae .*\(Wan 2.2 VAE, 48 channels\) does not fit .*takes latents of 16.*wan_2.1_vae",
    ),
    ("ti2v", {"--vae": "wan-vae"}, r"16 channels\) does not fit .*48 channels: give the Wan 2.2 VAE \(wan2.2_vae\)"),
    ("t2v", {"--vae": "flux-vae"}, "does not fit .*: give the Wan 2.1 VAE"),
    ("flux", {"--vae": "sd-vae"}, r"4 channels\) does not fit .*16 channels: give the Flux VAE \(ae.safetensors\)"),
    ("qwen", {"--vae": "flux-vae"}, "give the Qwen-Image VAE"),
    ("tae", {"--taesd": "taesd"}, "--taesd .*for pictures, 4 channels.* does not fit .*a tiny autoencoder for videos"),
    ("t2v", {"--t5xxl": "t5"}, "T5 v1.1-xxl.* does not fit .*which takes umt5-xxl: its vocabulary"),
    ("t2v", {"--t5xxl": "clip-l"}, r"is a text encoder \(CLIP-L\): --t5xxl takes a T5 .*; give this file as --clip_l"),
    ("t2v", {"--t5xxl": "wan-vae"}, r"is a VAE \(Wan 2.1 VAE.*: --t5xxl takes .*; give this file as --vae"),
    ("t2v", {"--vae": "umt5"}, r"is a text encoder \(umt5-xxl\): --vae takes a VAE; give this file as --t5xxl"),
    ("t2v", {"--vae": "taew"}, r"is a tiny autoencoder .*; give this file as --taesd"),
    ("t2v", {LOW: "umt5"}, "is a text encoder .*: --diffusion-model takes a diffusion model; give .* --t5xxl"),
    ("t2v", {"--t5xxl": ""}, "no text encoder was given for .*: give umt5-xxl in --t5xxl"),
    ("t2v", {"--vae": ""}, r"no VAE was given for .*: give the Wan 2.1 VAE \(wan_2.1_vae\) in --vae"),
    ("flux", {"--t5xxl": "", "--clip_l": ""}, "no text encoder was given for .*: give t5xxl"),
    ("qwen", {"--llm": ""}, "no text encoder was given for .*: give Qwen2.5-VL-7B in --llm"),
    ("qwen", {"--llm": "qwen3"}, "text features are 2560 wide, the model takes 3584; give Qwen2.5-VL-7B"),
    ("z-image", {"--llm": "qwen25"}, "text features are 3584 wide, the model takes 2560; give Qwen3-4B"),
    ("flux", {"--clip_l": "clip-g"}, "text features are 1280 wide, the model takes 768; give CLIP-L"),
    ("i2v-2.1", {"--clip_vision": ""}, "no vision encoder was given for .*: give clip_vision_h in --clip_vision"),
    (
        "t2v",
        {HIGH: "i2v-2.2"},
        "are not the two experts of one model: the first .* has 16 input channels, the second .* 36",
    ),
    ("t2v", {HIGH: "t2v-1.3b"}, "are not the two experts of one model: .*5120 values of width, the second .*1536"),
    ("t2v", {HIGH: "t2v-14b"}, "are not the two experts of one model: they are the same file"),
    ("flux", {HIGH: "t2v-14b"}, "has no place beside --diffusion-model .*which has no second expert"),
    (
        "t2v",
        {LOW: "", "--model": "t2v-14b"},
        r"--model .* holds a diffusion model alone .*: give it as --diffusion-model.*",
    ),
    ("sd1", {"--model": "", LOW: "sd1"}, "is a whole checkpoint .*: give it as --model"),
    ("sd1", {"--model": "sd-vae"}, "is a VAE .*: --model takes a whole checkpoint; give this file as --vae"),
    ("sd1", {"--control-net": "sd-vae"}, "--control-net takes a ControlNet"),
    ("sd1", {"--upscale-model": "taesd"}, "--upscale-model takes an ESRGAN upscaler"),
]


@pytest.mark.parametrize(("base", "changes", "words"), WRONG)
def test_sets_that_do_not_fit(base: str, changes: dict[str, str], words: str, stock: Callable[[str], str]) -> None:
    chosen = {flag: stock(file) for flag, file in (SETS[base] | changes).items() if file}
    for path in chosen.values():
        read_header(path)
    begun = time.monotonic()
    (problem, *more) = preflight(chosen).problems
    assert time.monotonic() - begun < 1
    assert not more
    assert re.search(words, problem), problem
    assert any(path in problem for path in chosen.values())


def test_a_picture_model_makes_no_video(stock: Callable[[str], str]) -> None:
    files = {kind: {flag: stock(file) for flag, file in SETS[kind].items()} for kind in ("flux", "t2v")}
    assert preflight(files["flux"], video=False) == preflight(files["t2v"], video=True) == Findings()
    (problem,) = preflight(files["flux"], video=True).problems
    assert "(Flux dev) makes images, not videos: run 'sdsage img-gen'" in problem
    (problem,) = preflight(files["t2v"], video=False).problems
    assert "makes videos: run 'sdsage vid-gen'" in problem


def test_what_the_engine_takes_is_only_warned_about(stock: Callable[[str], str]) -> None:
    files = {flag: stock(file) for flag, file in (SETS["flux"] | {"--t5xxl": "umt5"}).items()}
    found = preflight(files)
    assert found.problems == []
    assert "was made for t5xxl" in found.warnings[0]
    # a VAE that stays unread beside a tiny autoencoder
    files = {flag: stock(file) for flag, file in (SETS["tae"] | {"--vae": "wan22-vae"}).items()}
    assert preflight(files).problems == []
    assert preflight(files, preview_only_tae=True).problems != []
    # a whole checkpoint of which the diffusion model is used
    files = {LOW: stock("sd1"), "--clip_l": stock("clip-l"), "--vae": stock("sd-vae")}
    assert preflight(files).problems == []


def test_swapped_experts_can_t_be_told(preset_files: Any) -> None:
    files = preset_files("tiny-random")
    names = {LOW: files["high_noise_diffusion_model"], HIGH: files["diffusion_model"]}
    more = {"--t5xxl": files["t5xxl"], "--vae": files["vae"]}
    assert preflight(names | more) == Findings()


# ---- LoRAs


def t2v_files(stock: Callable[[str], str]) -> dict[str, str]:
    return {flag: stock(file) for flag, file in SETS["t2v"].items()}


def pair(name: str, n_in: int, n_out: int, rank: int = 4, ends: tuple[str, str] = ("lora_A", "lora_B")) -> Shapes:
    return {f"{name}.{ends[0]}.weight": (rank, n_in), f"{name}.{ends[1]}.weight": (n_out, rank)}


FITTING = {
    "plain": pair("diffusion_model.blocks.0.self_attn.q", 5120, 5120),
    "kohya": pair("lora_unet_blocks_1_ffn_0", 5120, 13824, 8, ("lora_down", "lora_up")),
    "diff": {"diffusion_model.blocks.0.norm3.diff_b": (5120,), "diffusion_model.blocks.0.norm3.diff": (5120,)},
    "part of a weight": pair("transformer.blocks.0.cross_attn.k", 5120, 1024),
    "some unknown": pair("blocks.0.self_attn.q", 5120, 5120) | pair("blocks.99.self_attn.q", 5120, 5120),
    "text encoder": pair("te3_encoder_block_0_layer_0_SelfAttention_q", 4096, 4096),
}
UNFIT = {
    "other width": (pair("diffusion_model.blocks.0.self_attn.q", 1536, 1536), "4x1536, the model's is 5120x5120"),
    "flux": (
        pair("lora_unet_double_blocks_0_img_attn_qkv", 3072, 9216),
        r"\(LoRA for Flux or Chroma\) fits no tensor of",
    ),
    "sdxl": (pair("lora_unet_down_blocks_1_attentions_0_proj_in", 640, 640), "fits no tensor of"),
    "diffusers": (pair("transformer.blocks.0.attn1.to_q", 5120, 5120), "Wan, with names of diffusers.* fits no tensor"),
    "no lora": (wan_vae(8, 8, 16), r"is a VAE \(Wan 2.1 VAE, 16 channels\), and no LoRA"),
}


@pytest.mark.parametrize("name", list(FITTING))
def test_loras_that_fit(name: str, stock: Callable[[str], str], tmp_path: Path) -> None:
    write_sparse(tmp_path / "lora.safetensors", FITTING[name])
    lora = str(tmp_path / "lora.safetensors")
    assert preflight(t2v_files(stock), [Lora(lora, False)]) == Findings()


@pytest.mark.parametrize("name", list(UNFIT))
def test_loras_that_do_not_fit(name: str, stock: Callable[[str], str], tmp_path: Path) -> None:
    shapes, words = UNFIT[name]
    write_sparse(tmp_path / "lora.safetensors", shapes)
    lora = str(tmp_path / "lora.safetensors")
    (problem,) = preflight(t2v_files(stock), [Lora(lora, False)]).problems
    assert re.search(words, problem), problem
    assert lora in problem


def test_a_lora_of_another_family_on_pictures(stock: Callable[[str], str], tmp_path: Path) -> None:
    files = {flag: stock(file) for flag, file in SETS["flux"].items()}
    for name, fits in (
        ("transformer.single_transformer_blocks.0.attn.to_q", True),
        ("transformer.transformer_blocks.0.attn.to_q", True),
        ("anything", True),
        ("diffusion_model.blocks.0.self_attn.q", False),
    ):
        write_sparse(tmp_path / "lora.safetensors", pair(name, 3072, 3072))
        found = preflight(files, [Lora(str(tmp_path / "lora.safetensors"), False)])
        assert (found.problems == []) is fits, name


# ---- against the engine


def test_never_stricter_than_the_engine(preset_files: Any) -> None:
    """Every tiny file in every slot of two presets: what pre-flight refuses, the engine refuses as well."""
    files = [path for p in ("tiny", "tiny-i2v", "tiny-ti2v", "tiny-flux") for path in preset_files(p).values()]
    everything = {contents(read_header(path)).title: path for path in files}.values()  # one of each kind
    flags = {"diffusion_model": LOW, "high_noise_diffusion_model": HIGH, "clip_l": "--clip_l", "taesd": "--taesd"}
    refused = both = 0
    for preset in ("tiny", "tiny-flux"):
        files = preset_files(preset)
        for slot in files:
            for other in everything:
                chosen = files | {slot: other}
                found = preflight({flags.get(key, f"--{key}"): path for key, path in chosen.items()})
                same = chosen.get("high_noise_diffusion_model") == chosen["diffusion_model"]
                if not found.problems or same:
                    continue
                refused += 1
                with pytest.raises(sdsage.ModelError):
                    sdsage.Context(ctx_params(chosen))
                both += 1
    assert refused == both > 40


def test_loras_against_the_engine(preset_files: Any, video_context: Any, tmp_path: Path) -> None:
    from conftest import small_video

    files = preset_files("tiny-random")
    names = {flag: files[key] for flag, key in ((LOW, "diffusion_model"), ("--t5xxl", "t5xxl"), ("--vae", "vae"))}
    cases = {
        "good": attention_lora(tmp_path / "good.safetensors", 256),
        "kohya": lora_file(
            tmp_path / "kohya.safetensors",
            {"lora_unet_blocks_0_self_attn_q.lora_down.weight": (4, 256),
             "lora_unet_blocks_0_self_attn_q.lora_up.weight": (256, 4)},
        ),
        "prefix": lora_file(
            tmp_path / "prefix.safetensors",
            {"transformer.blocks.0.cross_attn.k.lora_A.weight": (4, 256),
             "transformer.blocks.0.cross_attn.k.lora_B.weight": (256, 4)},
        ),
        "wide": attention_lora(tmp_path / "wide.safetensors", 5120),
        "vae": files["vae"],
    }  # fmt: skip
    for name, path in cases.items():
        found = preflight(names, [Lora(path, False)])
        assert bool(found.problems) is (name in ("wide", "vae"))
        job = small_video(loras=[sdsage.SdLora(path)])
        if found.problems:
            with pytest.raises(sdsage.BadRequest):
                video_context.generate_video(job)
        else:
            video_context.generate_video(job)


# ---- on the command line


def refuse(args: list[str], folder: Path) -> str:
    result = CliRunner().invoke(build_app(args[0]), [*args, "-o", str(folder / "out.mp4")])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "load model" not in result.stderr
    assert not (folder / "out.mp4").exists()
    return result.stderr


def test_the_command_stops_before_anything_is_loaded(preset_files: Any, tmp_path: Path) -> None:
    files = preset_files("tiny-random")
    base = ["vid-gen", "--preset", "tiny-random", "-p"]
    other = preset_files("tiny-ti2v")["vae"]
    text = refuse([*base, "x", "--vae", other], tmp_path)
    assert f"error: --vae {other} (Wan 2.2 VAE, 48 channels) does not fit" in text
    lora = attention_lora(tmp_path / "wide.safetensors", 5120)
    text = refuse([*base, "x <lora:wide:1>", "--lora-model-dir", str(tmp_path)], tmp_path)
    assert f"LoRA {lora} does not fit --diffusion-model {files['diffusion_model']}" in text
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(Path(files["t5xxl"]).read_bytes()[:9999])
    text = refuse([*base, "x", "--t5xxl", str(cut)], tmp_path)
    assert f"error: --t5xxl: {cut} is truncated: tensor" in text


@pytest.mark.parametrize("name", ["../wide", "sub/../../wide", "{absolute}"])
def test_loras_stay_in_their_folder(name: str, tmp_path: Path) -> None:
    attention_lora(tmp_path / "wide.safetensors", 256)
    folder = tmp_path / "loras"
    (folder / "sub").mkdir(parents=True)
    name = name.format(absolute=tmp_path / "wide.safetensors")
    args = ["vid-gen", "--preset", "tiny-random", "-p", f"x <lora:{name}:1>", "--lora-model-dir", str(folder)]
    text = refuse(args, tmp_path)
    assert f"LoRA {name!r} of the prompt leads out of {folder}: put the file there, or name its folder" in text


def test_models_in_parts_are_refused(preset_files: Any, tmp_path: Path) -> None:
    part = tmp_path / "model-00001-of-00002.safetensors"
    write_sparse(part, {"a": (2, 2)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": part.name, "b": "model-00002-of-00002.safetensors"}}))
    write_sparse(tmp_path / "model-00002-of-00002.safetensors", {"b": (2, 2)})
    for file, words in ((part, "is part 1 of a model in 2 files"), (index, "is the index of a model in 2 files")):
        (problem,) = preflight({"--t5xxl": str(file)}).problems
        assert words in problem


def test_what_can_t_be_looked_at_passes(tmp_path: Path) -> None:
    """A folder in diffusers layout, a pickle, a header past the reader's limits."""
    (tmp_path / "pickle.ckpt").write_bytes(b"PK\x03\x04" + bytes(50))
    large = tmp_path / "large.gguf"
    with large.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 2**30, 0))
        file.truncate(2**36)
    for path in (tmp_path, tmp_path / "pickle.ckpt", large, tmp_path / "none"):
        assert preflight({"--model": str(path), "--vae": str(path)}, [Lora(str(path), False)]) == Findings()
