"""The engine end to end on the tiny models, through the API."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ctx_params, small_image, small_video
from PIL import Image

import sdsage
from sdsage._library import sd_cli_path


def model_options(files: Mapping[str, str | Path]) -> list[str | Path]:
    """The files of a preset as sd-cli takes them."""
    words: list[str | Path] = []
    for option, path in files.items():
        name = option if option in ("clip_l", "t5xxl", "vae", "taesd") else option.replace("_", "-")
        words += [f"--{name}", path]
    return words


def sd_cli(out: Path, mode: str, files: Mapping[str, str | Path], *options: str) -> np.ndarray[Any, Any]:
    """Frames that the native program writes as PNG."""
    command = [sd_cli_path(), "-M", mode, "-t", "1", "-o", out / "sd_%03d.png", *model_options(files)]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return np.stack([np.asarray(Image.open(p)) for p in sorted(out.glob("sd_*.png"))])


SMALL = ["-W", "32", "-H", "32", "-s", "7", "-p", "a lovely cat", "--steps", "2", "--sampling-method", "euler"]
BOTH = [
    "--cfg-scale",
    "3.5",
    "--high-noise-cfg-scale",
    "3.5",
    "--high-noise-steps",
    "2",
    "--high-noise-sampling-method",
    "euler",
]


def test_tiny_video(video_context: Any, preset_files: Any, tmp_path: Path) -> None:
    """Text to video with both experts: the frames of the API are those of sd-cli, byte for byte."""
    frames = video_context.generate_video(small_video()).frames
    assert (
        sd_cli(tmp_path, "vid_gen", preset_files("tiny-random"), *SMALL, *BOTH, "--video-frames", "5") == frames
    ).all()


def test_tiny_image_to_video(preset_files: Any, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "in.png")
    files = preset_files("tiny-random-i2v")
    with sdsage.Context(ctx_params(files, vae_decode_only=False)) as ctx:
        frames = ctx.generate_video(small_video(init_image=pixels)).frames
        other = ctx.generate_video(small_video(init_image=255 - pixels)).frames
    theirs = sd_cli(tmp_path, "vid_gen", files, *SMALL, *BOTH, "--video-frames", "5", "-i", str(tmp_path / "in.png"))
    assert (theirs == frames).all()
    assert (frames != other).any()


@pytest.mark.parametrize("picture", [False, True])
def test_tiny_ti2v(picture: bool, preset_files: Any) -> None:
    """48 latent channels and the 2.2 VAE, with and without a first frame."""
    first = np.random.default_rng(1).integers(0, 256, (32, 32, 3), np.uint8) if picture else None
    with sdsage.Context(ctx_params(preset_files("tiny-ti2v"), vae_decode_only=False)) as ctx:
        assert ctx.version_name == "Wan 2.2 TI2V"
        job = small_video(init_image=first)
        job.high_noise_sample_params.sample_steps = -1
        frames = ctx.generate_video(job).frames
    assert frames.shape == (5, 32, 32, 3)
    assert frames.std() > 5


def test_tiny_flux(flux_context: Any, preset_files: Any, tmp_path: Path) -> None:
    frames = flux_context.generate_image(small_image(batch_count=2)).frames
    theirs = sd_cli(tmp_path, "img_gen", preset_files("tiny-flux"), *SMALL, "--cfg-scale", "1", "-b", "2")
    assert (theirs == frames).all()
    assert (frames[0] != frames[1]).any()


def test_pictures_have_contrast_and_attention_matters(preset_files: Any, tmp_path: Path) -> None:
    """The embedded model: pixels deviate by more than 20/255, and without attention the video is another one."""
    from sdsage import presets

    options = presets.load("tiny-random").options
    files = preset_files("tiny-random")
    job = small_video(width=options["width"], height=options["height"])
    frames = sdsage_frames(files, job)
    assert frames.std() > 20
    assert ((frames == 0) | (frames == 255)).mean() < 0.05
    without = {**files}
    for key in ("diffusion_model", "high_noise_diffusion_model"):
        without[key] = str(zeroed(Path(files[key]), "self_attn.o.weight", tmp_path / f"{key}.gguf"))
    difference = np.abs(sdsage_frames(without, job).astype(int) - frames.astype(int))
    assert difference.mean() > 5


def sdsage_frames(files: dict[str, str], job: Any) -> Any:
    with sdsage.Context(ctx_params(files)) as ctx:
        return ctx.generate_video(job).frames


def zeroed(source: Path, name: str, target: Path) -> Path:
    """A copy of a GGUF file in which every tensor whose name ends so is zero (Q8_0: zero scales and zero codes)."""
    import struct

    data = bytearray(source.read_bytes())
    count, n_meta = struct.unpack_from("<QQ", data, 8)
    at = 24

    def string() -> str:
        nonlocal at
        (n,) = struct.unpack_from("<Q", data, at)
        at += 8 + n
        return data[at - n : at].decode()

    for _ in range(n_meta):
        string()
        (kind,) = struct.unpack_from("<I", data, at)
        at += 4
        if kind == 8:
            string()
        else:
            at += {4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}[kind]
    places = []
    for _ in range(count):
        tensor = string()
        (n_dims,) = struct.unpack_from("<I", data, at)
        (offset,) = struct.unpack_from("<Q", data, at + 8 + 8 * n_dims)
        at += 16 + 8 * n_dims
        places.append((offset, tensor))
    begin = (at + 31) // 32 * 32
    ends = [*sorted(o for o, _ in places), len(data) - begin]
    hit = 0
    for offset, tensor in places:
        if tensor.endswith(name):
            end = ends[ends.index(offset) + 1]
            data[begin + offset : begin + end] = bytes(end - offset)
            hit += 1
    assert hit == 2
    target.write_bytes(data)
    return target


def test_reading_with_mmap_and_f16_weights(preset_files: Any, video_context: Any) -> None:
    """Two ways of holding the weights: mapped (same bytes), and converted to F16 (a picture near it)."""
    reference = video_context.generate_video(small_video()).frames
    with sdsage.Context(ctx_params(preset_files("tiny-random"), enable_mmap=True)) as ctx:
        assert (ctx.generate_video(small_video()).frames == reference).all()
    with sdsage.Context(ctx_params(preset_files("tiny-random"), wtype="f16")) as ctx:
        near = ctx.generate_video(small_video()).frames
    assert np.abs(near.astype(int) - reference.astype(int)).mean() < 20
