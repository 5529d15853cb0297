"""Bad files and values: each is a typed error that says what is wrong, and the process lives."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, ctx_params, small_image, small_video
from hypothesis import given, settings
from hypothesis import strategies as st

import sdsage
from sdsage import BadRequest, ModelError


def tiny_without(files: dict[str, str], *names: str, **more: str) -> dict[str, str]:
    return {**{k: v for k, v in files.items() if k not in names}, **more}


def bad_files(files: dict[str, str], tmp: Path) -> dict[str, tuple[dict[str, str], str]]:
    """name -> (files of the context, what the error says)."""
    truncated_gguf = tmp / "truncated.gguf"
    truncated_gguf.write_bytes(Path(files["diffusion_model"]).read_bytes()[:1_000_000])
    truncated_safetensors = tmp / "truncated.safetensors"
    truncated_safetensors.write_bytes(Path(files["vae"]).read_bytes()[:1_000_000])
    empty, nonsense, pickle = tmp / "empty.gguf", tmp / "nonsense.gguf", tmp / "model.ckpt"
    empty.write_bytes(b"")
    nonsense.write_bytes(b"this is not a model at all" * 10)
    pickle.write_bytes(b"PK\x03\x04" + bytes(100))
    return {
        "missing file": (
            {**files, "vae": str(tmp / "none.safetensors")},
            "vae_path .--vae. names .*none.safetensors, which does not exist",
        ),
        "directory as file": ({**files, "t5xxl": str(tmp)}, "t5xxl_path .--t5xxl. names .*, which is a folder"),
        "truncated GGUF": ({**files, "diffusion_model": str(truncated_gguf)}, "truncated.gguf"),
        "truncated safetensors": ({**files, "vae": str(truncated_safetensors)}, "truncated.safetensors"),
        "empty file": ({**files, "diffusion_model": str(empty)}, "neither GGUF nor safetensors"),
        "nonsense": ({**files, "diffusion_model": str(nonsense)}, "neither GGUF nor safetensors"),
        "pickle": ({**files, "vae": str(pickle)}, "Python pickles.*--allow-pickle"),
        "umt5 as VAE": ({**files, "vae": files["t5xxl"]}, "--vae .* holds nothing that a VAE for Wan 2.x needs"),
        "VAE as diffusion model": (
            tiny_without(files, "high_noise_diffusion_model", diffusion_model=files["vae"]),
            "is not a diffusion model that this engine knows",
        ),
        "VAE as text encoder": ({**files, "t5xxl": files["vae"]}, "--t5xxl .* holds nothing that a T5 text encoder"),
        "umt5 as high-noise expert": (
            {**files, "high_noise_diffusion_model": files["t5xxl"]},
            "--high-noise-diffusion-model .* holds nothing",
        ),
        "umt5 as CLIP vision encoder": ({**files, "clip_vision": files["t5xxl"]}, "--clip_vision .* holds nothing"),
        "VAE as LLM vision encoder": ({**files, "llm_vision": files["vae"]}, "--llm_vision .* holds nothing"),
        "no VAE": (tiny_without(files, "vae"), "give the VAE in --vae"),
        "no text encoder": (tiny_without(files, "t5xxl"), "no text encoder was given; Wan needs umt5 in --t5xxl"),
        "no model": ({"vae": files["vae"]}, "no model was given: set model_path"),
    }


CASES = [
    "missing file",
    "directory as file",
    "truncated GGUF",
    "truncated safetensors",
    "empty file",
    "nonsense",
    "pickle",
    "umt5 as VAE",
    "VAE as diffusion model",
    "VAE as text encoder",
    "umt5 as high-noise expert",
    "umt5 as CLIP vision encoder",
    "VAE as LLM vision encoder",
    "no VAE",
    "no text encoder",
    "no model",
]


@pytest.mark.parametrize("case", CASES)
def test_bad_files(case: str, preset_files: Any, tmp_path: Path) -> None:
    files, words = bad_files(preset_files("tiny-random"), tmp_path)[case]
    with pytest.raises(ModelError, match=words) as caught:
        sdsage.Context(ctx_params(files))
    assert caught.value.exit_code == 2


def test_a_48_channel_vae_with_a_16_channel_model(preset_files: Any) -> None:
    files = {**preset_files("tiny-random"), "vae": preset_files("tiny-ti2v")["vae"]}
    with pytest.raises(
        ModelError, match=r"--vae '.*wan22-vae.safetensors' does not fit Wan 2.x: tensor .* the model needs"
    ):
        sdsage.Context(ctx_params(files))


def test_after_an_error_the_next_context_works(preset_files: Any) -> None:
    files = preset_files("tiny-random")
    with pytest.raises(ModelError):
        sdsage.Context(ctx_params({**files, "vae": files["t5xxl"]}))
    with sdsage.Context(ctx_params(files)) as ctx:
        assert len(ctx.generate_video(small_video()).frames) == 5


TRUNCATIONS = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from conftest import ctx_params
import sdsage
from sdsage import presets
files = {k: v for k, v in presets.load("tiny-random").options.items() if str(v).endswith((".gguf", ".safetensors"))}
target, key = Path(sys.argv[2]), sys.argv[3]
data = Path(files[key]).read_bytes()
header = 60_000
lengths = [*range(1, 34), *range(34, header, header // 16), len(data) // 2, len(data) - 4096, len(data) - 32]
for n in lengths:
    target.write_bytes(data[:n])
    try:
        sdsage.Context(ctx_params({**files, key: str(target)}))
    except sdsage.ModelError:
        continue
    sys.exit(f"{n} of {len(data)} bytes were accepted")
print("refused", len(lengths))
"""


@pytest.mark.parametrize("key", ["diffusion_model", "vae"])
def test_a_file_cut_anywhere_is_refused(key: str, tmp_path: Path) -> None:
    """In a process of its own: a crash would be seen."""
    name = "cut.gguf" if key == "diffusion_model" else "cut.safetensors"
    done = subprocess.run(
        [sys.executable, "-P", "-c", TRUNCATIONS, ROOT / "tests", tmp_path / name, key], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("refused 5")


VIDEO_VALUES = {
    "zero width": ({"width": 0}, "width is 0: 1 to 16384"),
    "negative height": ({"height": -64}, "height is -64"),
    "absurd width": ({"width": 100_000}, "width is 100000"),
    "no frames": ({"video_frames": 0}, "video_frames is 0"),
    "negative frames": ({"video_frames": -5}, "video_frames is -5"),
    "strength": ({"strength": 1.5}, "strength is 1.5: 0 to 1"),
    "too many frames": ({"video_frames": 577}, "video_frames is 577: 1 to 573"),
    "boundary": ({"moe_boundary": -1.0}, "moe_boundary is -1.0: 0 to 1"),
    "long prompt": ({"prompt": "x" * 16_385}, "prompt has 16385 bytes: at most 16384"),
    "surrogate": ({"negative_prompt": "\ud800"}, "negative_prompt holds a character that is no text"),
}


@pytest.mark.parametrize("case", VIDEO_VALUES)
def test_bad_values_of_a_video_job(case: str, video_context: Any) -> None:
    values, words = VIDEO_VALUES[case]
    with pytest.raises(BadRequest, match=words):
        video_context.generate_video(small_video(**values))


def test_bad_sampling_values(video_context: Any) -> None:
    job = small_video()
    for value in (0, -3, 10**6):
        job.sample_params.sample_steps = value
        with pytest.raises(BadRequest, match=f"sample_steps is {value}"):
            video_context.generate_video(job)
    job = small_video()
    job.sample_params.custom_sigmas = [1.0]
    with pytest.raises(BadRequest, match="custom_sigmas"):
        video_context.generate_video(job)
    job = small_video()
    job.sample_params.guidance.txt_cfg = -1.0
    with pytest.raises(BadRequest, match=r"txt_cfg is -1\.0"):
        video_context.generate_video(job)
    with pytest.raises(BadRequest, match="finite"):
        job.sample_params.flow_shift = math.nan


@pytest.mark.parametrize("scheduler", ["gits", "karras", "exponential"])
def test_schedulers_that_need_two_steps(scheduler: str, flux_context: Any) -> None:
    job = small_image()
    job.sample_params.scheduler = scheduler
    job.sample_params.sample_steps = 1
    with pytest.raises(BadRequest, match=f"scheduler {scheduler} needs 2 steps or more, 1 was asked for"):
        flux_context.generate_image(job)
    job.sample_params.sample_steps = 2
    assert flux_context.generate_image(job).frames.std() > 5


def test_ays_is_for_unets(video_context: Any) -> None:
    job = small_video()
    job.sample_params.scheduler = "ays"
    with pytest.raises(BadRequest, match=r"ays is for SD and SDXL models, not for Wan 2.x"):
        video_context.generate_video(job)


@pytest.mark.parametrize(
    "sigmas", [[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [3.0, 2.0, 2.0], [2.0, 1.0, -1.0], [math.inf, 0.0]]
)
def test_sigmas_that_do_not_fall(sigmas: list[float], flux_context: Any) -> None:
    job = small_image()
    job.sample_params.custom_sigmas = sigmas
    with pytest.raises(BadRequest, match="custom_sigmas"):
        flux_context.generate_image(job)


@pytest.mark.parametrize(("name", "value"), [("m", -1), ("m", 100_000), ("window_size", 0), ("lam", -1.0), ("w", 2.0)])
def test_spectrum_settings(name: str, value: float, flux_context: Any) -> None:
    job = small_image()
    job.cache.mode = "spectrum"
    setattr(job.cache, f"spectrum_{name}", value)
    with pytest.raises(BadRequest, match=f"cache.spectrum_{name} is {value}"):
        flux_context.generate_image(job)


@pytest.mark.parametrize("kind", ["i8", "q8_1", "f64"])
def test_types_that_hold_no_weights(kind: str, preset_files: Any, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=f"{kind} can't hold weights; choose f32"):
        sdsage.Context(ctx_params(preset_files("tiny-random"), wtype=kind))
    with pytest.raises(BadRequest, match=f"{kind} can't hold weights"):
        sdsage.convert(preset_files("tiny-random")["vae"], tmp_path / "out.gguf", type=kind)


@pytest.mark.parametrize("shape", [(2, 16, 2, 8, 8), (1, 16, 0, 8, 8), (1, 16, 8, 8), (16, 2, 8, 8)])
def test_latents_of_another_shape(shape: tuple[int, ...], video_context: Any) -> None:
    with pytest.raises(BadRequest, match="latents have shape"):
        video_context.decode(np.zeros(shape, np.float32))


def test_grey_pictures_where_colour_is_needed(flux_context: Any) -> None:
    grey = np.zeros((64, 64, 1), np.uint8)
    for job in (small_image(control_image=grey), small_image(ref_images=[grey])):
        with pytest.raises(BadRequest, match="H x W x 3 is needed"):
            flux_context.generate_image(job)


def test_too_many_threads(preset_files: Any) -> None:
    with pytest.raises(BadRequest, match="n_threads is 100000: at most 1024"):
        sdsage.Context(ctx_params(preset_files("tiny-random"), n_threads=100_000))


def test_a_video_model_makes_no_images(video_context: Any) -> None:
    with pytest.raises(BadRequest, match="makes videos"):
        video_context.generate_image(small_image())


def test_bad_image_jobs(flux_context: Any) -> None:
    with pytest.raises(BadRequest, match="batch_count is 0"):
        flux_context.generate_image(small_image(batch_count=0))
    with pytest.raises(BadRequest, match="makes images, not videos"):
        flux_context.generate_video(small_video())
    with pytest.raises(BadRequest, match=r"vae_decode_only = False"):
        flux_context.generate_image(small_image(init_image=np.zeros((64, 64, 3), np.uint8)))


def test_an_image_model_without_its_encoder_is_refused_before_the_engine_aborts(preset_files: Any) -> None:
    with (
        sdsage.Context(ctx_params(preset_files("tiny-random-i2v"))) as ctx,
        pytest.raises(BadRequest, match="this model needs the VAE's encoder"),
    ):
        ctx.generate_video(small_video())


def test_loras(video_context: Any, preset_files: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"loras names .*none.safetensors, which does not exist"):
        video_context.generate_video(small_video(loras=[sdsage.SdLora(str(tmp_path / "none.safetensors"))]))
    files = preset_files("tiny-random")
    with sdsage.Context(ctx_params(tiny_without(files, "high_noise_diffusion_model"))) as ctx:
        job = small_video(loras=[sdsage.SdLora(files["vae"], is_high_noise=True)])
        job.high_noise_sample_params.sample_steps = -1
        with pytest.raises(BadRequest, match="high-noise expert"):
            ctx.generate_video(job)
        job = small_video()
        with pytest.raises(BadRequest, match="no high-noise diffusion model is loaded"):
            ctx.generate_video(job)


@pytest.mark.parametrize(
    "prompt", ["一只可爱的猫", "🐱🎬 café naïve", "", "x" * 16_384, "<lora:none:1>", "((nested [brackets)", "a\nb\tc"]
)
def test_prompts_of_every_kind(prompt: str, video_context: Any) -> None:
    frames = video_context.generate_video(small_video(prompt=prompt, negative_prompt=prompt[::-1])).frames
    assert frames.shape == (5, 32, 32, 3)


SIDES = st.integers(1, 80)


@settings(max_examples=max(3, settings.default.max_examples // 8))
@given(
    SIDES,
    SIDES,
    st.integers(1, 10),
    st.text(st.characters(exclude_characters="\0"), max_size=60),
)
def test_any_small_size_and_prompt_runs(video_context: Any, width: int, height: int, frames: int, prompt: str) -> None:
    """Whatever fits the limits is made, at the size that the adjustments say."""
    job = small_video(width=width, height=height, video_frames=frames, prompt=prompt)
    job.sample_params.sample_steps = job.high_noise_sample_params.sample_steps = 1
    made = video_context.generate_video(job)
    used = {a.what: a.used for a in video_context.check_size(job)}
    expected = (used.get("frame count", frames), used.get("height", height), used.get("width", width), 3)
    assert made.frames.shape == expected


def test_paths_with_spaces_and_other_scripts(preset_files: Any, tmp_path: Path) -> None:
    folder = tmp_path / "модели и 模型 🐱"
    folder.mkdir()
    files = {}
    for option, path in preset_files("tiny-random").items():
        files[option] = str(folder / Path(path).name)
        Path(files[option]).symlink_to(path)
    with sdsage.Context(ctx_params(files)) as ctx:
        assert len(ctx.generate_video(small_video()).frames) == 5


def test_convert_errors_write_nothing(preset_files: Any, tmp_path: Path) -> None:
    vae = preset_files("tiny-random")["vae"]
    existing = tmp_path / "there.gguf"
    existing.write_bytes(b"keep me")
    cases: list[tuple[str, Path, type[Exception], str]] = [
        (vae, tmp_path / "out.txt", sdsage.OutputError, "must end in .gguf or .safetensors"),
        (vae, existing, sdsage.OutputError, "exists"),
        (vae, tmp_path / "no" / "out.gguf", sdsage.OutputError, "can be written"),
        (str(tmp_path / "none"), tmp_path / "out.gguf", ModelError, "does not exist"),
    ]
    for source, target, error, words in cases:
        with pytest.raises(error, match=words):
            sdsage.convert(source, target)
    assert [p.name for p in tmp_path.iterdir()] == ["there.gguf"]
    assert existing.read_bytes() == b"keep me"


def test_converting_a_damaged_file_fails(preset_files: Any, tmp_path: Path) -> None:
    """No tensors, or tensors beyond the end of the file: nothing is written."""
    hollow, cut = tmp_path / "hollow.gguf", tmp_path / "cut.gguf"
    hollow.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    cut.write_bytes(Path(preset_files("tiny-random")["diffusion_model"]).read_bytes()[:1_000_000])
    for source, words in ((hollow, "holds no tensors"), (cut, "truncated|can't be read|failed")):
        with pytest.raises(sdsage.SdsageError, match=words):
            sdsage.convert(source, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_convert_round_trip(preset_files: Any, video_context: Any, tmp_path: Path) -> None:
    """A model converted to F16 GGUF and loaded again is the same model."""
    files = preset_files("tiny-random")
    target = sdsage.convert(files["vae"], tmp_path / "vae.gguf", type="f16")
    assert target.read_bytes()[:4] == b"GGUF"
    assert [p.name for p in tmp_path.iterdir()] == ["vae.gguf"]
    with sdsage.Context(ctx_params({**files, "vae": str(target)})) as ctx:
        assert (ctx.generate_video(small_video()).frames == video_context.generate_video(small_video()).frames).all()


def test_an_upscaler_that_is_none(preset_files: Any) -> None:
    with pytest.raises(ModelError, match="not an upscaler"):
        sdsage.Upscaler(preset_files("tiny-random")["vae"])
    with pytest.raises(ModelError, match="does not exist"):
        sdsage.Upscaler("/nonexistent.gguf")
