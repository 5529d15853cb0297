"""ESRGAN upscaling with a real network whose answer is known: its weights repeat each pixel, exactly."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import sdsage
from sdsage._library import sd_cli_path

FEATURES, GROWTH = 64, 32  # the engine knows ESRGAN with these channels only


def pass_through(n_out: int, n_in: int) -> np.ndarray[Any, Any]:
    """A 3x3 convolution that hands the first channels on: taps of 1 in the centre."""
    weight = np.zeros((n_out, n_in, 3, 3), np.float16)
    for i in range(min(n_out, n_in)):
        weight[i, i, 1, 1] = 1.0
    return weight


def write_repeater(path: Path, factor: int) -> Path:
    """An ESRGAN file (2x or 4x) that repeats pixels: its residual blocks add nothing."""
    weights = {"conv_first": pass_through(FEATURES, 3), "conv_body": np.zeros((FEATURES, FEATURES, 3, 3), np.float16)}
    for rdb in (1, 2, 3):
        for conv in range(1, 6):
            n_in, n_out = FEATURES + GROWTH * (conv - 1), FEATURES if conv == 5 else GROWTH
            weights[f"body.0.rdb{rdb}.conv{conv}"] = np.zeros((n_out, n_in, 3, 3), np.float16)
    for name in ("conv_up1", "conv_hr") if factor == 2 else ("conv_up1", "conv_up2", "conv_hr"):
        weights[name] = pass_through(FEATURES, FEATURES)
    weights["conv_last"] = pass_through(3, FEATURES)
    tensors = {f"{k}.weight": v for k, v in weights.items()}
    tensors |= {f"{k}.bias": np.zeros(len(v), np.float32) for k, v in weights.items()}
    header, offset = {}, 0
    for name, value in tensors.items():
        kind = "F16" if value.dtype == np.float16 else "F32"
        header[name] = {"dtype": kind, "shape": value.shape, "data_offsets": [offset, offset + value.nbytes]}
        offset += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(v.tobytes() for v in tensors.values()))
    return path


def picture(height: int, width: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).integers(0, 256, (height, width, 3), np.uint8)


def repeated(pixels: np.ndarray[Any, Any], factor: int) -> np.ndarray[Any, Any]:
    return pixels.repeat(factor, 0).repeat(factor, 1)


@pytest.mark.parametrize("factor", [2, 4])
def test_upscale(factor: int, tmp_path: Path) -> None:
    pixels = picture(9, 14)
    with sdsage.Upscaler(write_repeater(tmp_path / "model.safetensors", factor), n_threads=1) as upscaler:
        assert upscaler.factor == factor
        assert (upscaler.upscale(pixels) == repeated(pixels, factor)).all()
        assert (upscaler.upscale(Image.fromarray(pixels)) == repeated(pixels, factor)).all()
    upscaler.close()
    with pytest.raises(sdsage.ContextClosed):
        upscaler.upscale(pixels)


def test_upscale_in_tiles(tmp_path: Path) -> None:
    """Tiles overlap and are blended: repeating pixels, they agree where they meet."""
    pixels = picture(40, 50)
    with sdsage.Upscaler(write_repeater(tmp_path / "model.safetensors", 2), n_threads=1, tile_size=32) as upscaler:
        made = upscaler.upscale(pixels)
    assert np.abs(made.astype(int) - repeated(pixels, 2)).max() <= 1


def test_progress_tells_the_stage(tmp_path: Path) -> None:
    seen: list[Any] = []
    model = write_repeater(tmp_path / "model.safetensors", 2)
    with sdsage.Upscaler(model, n_threads=1, on_progress=seen.append) as upscaler:
        upscaler.upscale(picture(8, 8))
    assert [p.stage for p in seen if p.step == 0] == ["load", "upscale"]


def test_verb_and_sd_cli_write_the_same_picture(tmp_path: Path) -> None:
    model, source = write_repeater(tmp_path / "model.safetensors", 2), tmp_path / "in.png"
    pixels = picture(12, 10)
    Image.fromarray(pixels).save(source)
    options = ["-i", source, "--upscale-model", model, "--upscale-repeats", "2", "-t", "1"]
    theirs, ours = tmp_path / "theirs.png", tmp_path / "ours.png"
    subprocess.run([sd_cli_path(), "-M", "upscale", *options, "-o", theirs], check=True, capture_output=True)
    subprocess.run(
        [sys.executable, "-P", "-m", "sdsage", "upscale", *options, "-o", ours], check=True, capture_output=True
    )
    assert (np.asarray(Image.open(ours)) == np.asarray(Image.open(theirs))).all()
    assert (np.asarray(Image.open(ours)) == repeated(pixels, 4)).all()


def test_a_generation_is_upscaled(tmp_path: Path) -> None:
    """`img-gen --upscale-model` gives the picture of the same seed, repeated."""
    model = write_repeater(tmp_path / "model.safetensors", 2)
    common = ["--preset", "tiny-flux", "-p", "a cat", "-W", "32", "-H", "32", "--steps", "1", "-t", "1"]
    for name, more in (("plain", []), ("large", ["--upscale-model", str(model)])):
        command = [sys.executable, "-P", "-m", "sdsage", "img-gen", *common, *more, "-o", str(tmp_path / f"{name}.png")]
        subprocess.run(command, check=True, capture_output=True)
    plain, large = (np.asarray(Image.open(tmp_path / f"{name}.png")) for name in ("plain", "large"))
    assert (large == repeated(plain, 2)).all()
