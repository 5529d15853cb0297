"""`sdsage bench`: attention alone and whole generations, on the tiny models; its plots, and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_cli import run, sage_on_cpu

import sdsage
from sdsage._attention import SHAPES
from sdsage._attention.problem import Measured, Problem
from sdsage._bench import models, random_models, random_unet
from sdsage._bench.attn import rows
from sdsage._bench.quality import psnr
from sdsage.cli.options import RANDOM, by_key
from sdsage.tiny import umt5, wan, wan_vae
from sdsage.tiny.tensors import DType, Tensor, Uniform, decode

NO_SAGE = not sdsage.sage_info().supported
ATTN = ["bench", "attn", "--device", "cpu", "--shape", "tiny", "--repeats", "2"]
TINY = ["bench", "gen", "--random", "tiny", "-W", "32", "-H", "32", "--video-frames", "5", "-t", "1"]
TINY += [
    "--steps",
    "2",
    "--high-noise-steps",
    "1",
    "--cfg-scale",
    "1",
    "--high-noise-cfg-scale",
    "1",
    "--device",
    "cpu",
]
FLUX = ["bench", "gen", "--random", "tiny-flux", "-W", "32", "-H", "32", "--steps", "2", "-t", "1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def result(*args: str) -> Any:
    return json.loads(run(*args, "--json").stdout.splitlines()[-1])


# ---- attention


def test_attention_on_the_cpu() -> None:
    found = result(*ATTN, "--kernel", "plain")
    (entry,) = found["shapes"]
    assert (entry["shape"], entry["heads"], entry["lq"]) == ("tiny", 4, 512)
    kernels = {row["kernel"]: row for row in entry["kernels"]}
    assert list(kernels) == ["plain", "flash"]  # flash runs beside whatever is asked for
    assert kernels["flash"]["times_flash"] == 1
    assert all(row["ms"] > 0 and row["tflops"] > 0 and row["quantize_ms"] is None for row in kernels.values())
    assert "SageAttention can't run on cpu" in found["no_sage"]
    assert {"device", "driver", "toolkit", "versions", "date", "seed", "repeats"} <= set(found)


def test_attention_in_words() -> None:
    text = run(*ATTN).stdout
    assert "tiny (no model's: for a CPU): B=1 H=4 L=512 D=64" in text
    assert "no kernel of SageAttention was run: SageAttention can't run on cpu" in text


def test_rows_are_medians_and_ratios() -> None:
    problem = Problem(1, 1, 1, 1000, 1000, 100)
    flash = Measured("flash", "flash", "", False, (0.004, 0.004, 0.100), ())
    fp16 = Measured("fp16", "fp16", "", False, (0.001, 0.002, 0.003), (0.0005, 0.0001, 0.0009))
    refused = Measured("fp8", "", "no memory", False, (), ())
    first, second, third = rows([flash, fp16, refused], problem)
    assert (first["ms"], first["times_flash"]) == (4, 1)
    assert (second["ms"], second["quantize_ms"], second["times_flash"]) == (2, 0.5, 2)
    assert second["tflops"] == 0.2  # 4 * 1000 * 1000 * 100 in 2 ms
    assert (third["ms"], third["times_flash"], third["why_not"]) == (None, None, "no memory")


def test_shapes_are_those_of_the_models() -> None:
    assert tuple(by_key()["shape"].choices) == tuple(SHAPES)
    wan = SHAPES["wan-14b"]
    assert wan.lq == (81 + 3) // 4 * 832 // 16 * 480 // 16
    assert SHAPES["flux"].lq == (1024 // 16) ** 2 + 512
    assert SHAPES["qwen-image"].lq == (1328 // 16) ** 2 + 128


# ---- generations


@pytest.mark.skipif(not NO_SAGE, reason="SageAttention runs here")
def test_a_video_without_sage() -> None:
    found = result(*TINY)
    assert list(found["runs"]) == ["flash"]
    assert found["apart"] is None
    assert "SageAttention can't run" in found["no_sage"]
    flash = found["runs"]["flash"]
    assert (flash["frames"], flash["width"], flash["height"], found["steps"]) == (5, 32, 32, 2)
    assert all(flash["seconds"][s] > 0 for s in ("load", "encode_text", "first_step", "median_later_steps", "decode"))
    assert len(flash["later_steps"]) == 2  # of three over both experts
    assert {a["kernel"] for a in flash["attention"] if "noise" in a["module"]} == {"flash"}
    assert flash["finite"]
    assert (found["model"], found["device"]["name"]) == ("tiny", "cpu")


def test_a_picture_in_words() -> None:
    text = run(*FLUX).stdout
    assert "tiny-flux, 32x32, 1 frames, 2 steps, seed 42, on cpu" in text
    assert "first step" in text
    assert "SageAttention was not run: SageAttention can't run on cpu" in text


def test_the_files_of_a_real_model(preset_files: Any) -> None:
    """As for vid-gen and img-gen: options name them, and --mode says that it is a picture."""
    files = preset_files("tiny-flux")
    words = [w for key, path in files.items() for w in (by_key()[key].name, path)]
    args = ["-p", "a cat", "--cfg-scale", "1", *FLUX[4:]]
    found = result("bench", "gen", *words, "--mode", "img_gen", *args)
    assert found["model"] == "Flux"
    assert found["runs"]["flash"]["frames"] == 1


def test_sage_on_and_off() -> None:
    """SageAttention's arithmetic on the CPU: both runs, and how far they are apart."""
    found = sage_on_cpu("gen")
    runs, apart = found["gen"]["runs"], found["gen"]["apart"]
    assert list(runs) == ["flash", "sage"]
    kernels = {n: {a["kernel"] for a in r["attention"] if "noise" in a["module"]} for n, r in runs.items()}
    assert kernels == {"flash": {"flash"}, "sage": {"fp8++"}}
    assert not apart["same"]
    assert apart["latents_db"] > 30
    assert apart["frames_db"] > 20
    (entry,) = found["attn"]["shapes"]
    assert [row["kernel"] for row in entry["kernels"]] == ["flash", "fp16", "fp8", "fp8++"]
    assert all(row["times_flash"] and row["quantize_ms"] is not None for row in entry["kernels"][1:])


def test_psnr() -> None:
    a = np.zeros((2, 4, 4, 3), np.uint8)
    assert psnr(a, a, 255) is None
    assert psnr(a, a + 1, 255) == pytest.approx(48.1, abs=0.05)
    assert psnr(a + 255, a, 255) == 0


def test_models_of_random_weights() -> None:
    assert tuple(models.MODELS) == RANDOM
    for model in models.MODELS.values():
        assert set(model.settings) <= set(by_key())
        assert bool(model.preset) != bool(model.size)
    for name, size in random_models.WAN.items():
        tensors = [*wan.wan(16, 16, size), *umt5.umt5(random_models.UMT5_XXL), *wan_vae.wan_vae(random_models.VAE)]
        assert sum(t.nbytes for t in tensors) < models.MODELS[f"wan-{name}"].gigabytes * 1e9
    assert sum(t.nbytes for t in random_unet.tensors()) < models.MODELS["sd1.5"].gigabytes * 1e9


def test_weights_that_are_changed_are_what_the_file_would_hold() -> None:
    """Also where a large tensor repeats the stretch of random blocks."""
    for shape, dtype in (((4, 64), DType.Q8_0), ((1100, 4096), DType.Q8_0), ((1100, 4096), DType.F16)):
        tensor = Tensor("x", shape, dtype, Uniform(0.1))
        stored, changed = (b"".join(random_models.data(tensor, change)) for change in (None, np.negative))
        assert (np.frombuffer(changed, "<f4") == -decode(stored, dtype)).all()
        assert np.std(decode(stored, dtype)) == pytest.approx(0.1, rel=0.1)


# ---- plots


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plots(suffix: str) -> None:
    pytest.importorskip("matplotlib")
    for command, name in ((ATTN, f"attn{suffix}"), (FLUX, f"gen{suffix}")):
        assert result(*command, "--plot", name)["plot"] == name
        if suffix == ".png":
            with Image.open(name) as picture:
                assert len(np.unique(np.asarray(picture.convert("L")))) > 5
        else:
            assert "<svg" in Path(name).read_text()


def test_a_plot_without_its_extra(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for command in (ATTN, FLUX):
        done = run(*command, "--plot", "a.png", code=2)
        assert "--plot needs matplotlib" in done.stderr
        assert "pip install 'sdsage[plot]'" in done.stderr
    assert not [*folder.iterdir()]


# ---- bad input


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["bench", "attn", "--shape", "sdxxl"], "--shape sdxxl can't be used: allowed is one of headline, sd1.5, sdxl"),
        ([*ATTN, "--repeats", "0"], "--repeats 0 can't be used: it takes a whole number from 1"),
        ([*ATTN, "--kernel", "fp8"], "SageAttention can't run on cpu"),
        ([*ATTN, "--plot", "a.pdf"], "--plot a.pdf can't be used: it takes a name that ends in .png or .svg"),
        ([*ATTN, "--plot", "no/a.svg"], "its folder does not exist"),
        (["bench", "attn", "--device", "tpu"], "there is no device 'tpu' here"),
        (["bench", "gen"], "no model was given: give --model FILE"),
        (["bench", "gen", "--random", "huge"], "--random huge can't be used: allowed is one of tiny, tiny-flux"),
        ([*TINY, "--preset", "tiny-random"], "--random tiny brings its own model: leave out --preset"),
        ([*TINY, "--mode", "convert"], "--mode convert can't be measured: it takes vid_gen or img_gen"),
        ([*TINY, "--vae", "missing.safetensors"], "missing.safetensors does not exist"),
        ([*TINY, "--device", "tpu"], "there is no device 'tpu' here"),
    ],
)
def test_bad_input(args: list[str], words: str, folder: Path) -> None:
    assert words in run(*args, code=2).stderr
    assert not [*folder.iterdir()]


def test_random_weights_on_a_full_disk(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(models, "MODELS", {"wan-14b": models.RandomModel("vid-gen", {}, size="14b", gigabytes=1e9)})
    said = run("bench", "gen", "--random", "wan-14b", "--random-dir", str(folder / "here"), code=2).stderr
    assert "--random wan-14b needs 1e+09 GB in" in said
    assert "--random-dir" in said
    assert not [*(folder / "here").iterdir()]
