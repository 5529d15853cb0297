"""Every program of examples/, as it is, on the tiny presets; the C program is in test_native.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import BUILD, PACKAGE, ROOT
from PIL import Image
from test_bad_models import attention_lora
from tiny_cli import data_of, frames_of

from sdsage import presets

EXAMPLES = ROOT / "examples"
SMALL = ["width=64", "height=64", "video_frames=5", "steps=1", "high_noise_steps=1", "cfg_scale=1"]
WAN = ["--preset", "tiny-random", "--loras", "loras", "sage_attn=false", "high_noise_cfg_scale=1", "threads=1", *SMALL]
PAIR = [lora.word for lora in presets.loras("wan2.2-t2v-14b-4step")]  # what the job file calls them
VIDEOS = ["--preset", "tiny-random-i2v", "high_noise_cfg_scale=1", "threads=1", *SMALL]
BENCH = ["--random", "tiny", "-W", "32", "-H", "32", "--video-frames", "5", "--steps", "2", "--high-noise-steps", "1"]
BENCH += ["-t", "1", "--device", "cpu"]
# The engine of the tests computes the kernels' arithmetic on the CPU, in every process that loads it.
SAGE_ON_CPU = """
import sys
if "sdsage._worker" in sys.orig_argv:
    from sdsage._ffi import lib
    lib.sdsage_test_sage_cpu(89, 13000, b"80 89")
"""

pytestmark = pytest.mark.usefixtures("empty_folder")


def example(name: str, *args: str, code: int = 0, **env: str) -> "subprocess.CompletedProcess[str]":
    """Runs it as a program."""
    environment = {**os.environ, "PYTHONPATH": PACKAGE, **env}
    command = [sys.executable, str(EXAMPLES / name), *args]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == code, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    assert "Traceback" not in done.stderr
    return done


def test_each_is_named_where_people_look_and_is_run_here() -> None:
    readme, here = (p.read_text(encoding="utf-8") for p in (ROOT / "README.md", Path(__file__)))
    for path in EXAMPLES.glob("*.py"):
        assert f"examples/{path.name}" in readme
        assert f'example("{path.name}"' in here


def test_api_minimal() -> None:
    said = example("api_minimal.py", "circle.webp").stdout
    assert "circle.webp" in said.splitlines()[-1]
    frames = frames_of("circle.webp")
    assert frames.shape == (17, 96, 96, 3)
    assert frames.std() > 5


def test_wan22_batch() -> None:
    """All prompts with all seeds, a LoRA for each expert, one load; the second time there is nothing to do."""
    Path("loras").mkdir()
    for name in PAIR:
        attention_lora(Path("loras", f"{name}.safetensors"), 256)
    assert "6 of 6 done, model loads: 1," in example("wan22_batch.py", *WAN).stdout
    videos = sorted(Path("out", "wan22").glob("*.mp4"))
    assert [re.sub(r"\W|_", " ", path.stem) for path in videos] == [
        f"{prompt} {seed}"
        for prompt in ("a red fox trots through fresh snow at dawn", "rain on the window of a night train")
        for seed in (1, 2, 3)
    ]
    for path in videos:
        assert frames_of(path).shape == (5, 64, 64, 3)
        loras = [(lora["name"], lora["high_noise"]) for lora in data_of(path)["loras"]]
        assert loras == [(f"{PAIR[0]}.safetensors", False), (f"{PAIR[1]}.safetensors", True)]
    assert len({path.read_bytes() for path in videos}) == 6
    assert "6 of 6 done, model loads: 0," in example("wan22_batch.py", *WAN).stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "run 'sdsage models pull wan2.2-t2v-14b-4step'"),
        (["--preset", "tiny-random"], f"LoRA '{PAIR[0]}' of the prompt is not in"),
        (["--preset", "tiny-random", "steps"], "steps is no setting: give OPTION=VALUE"),
        ([*WAN, "step=1"], "did you mean"),
    ],
)
def test_wan22_batch_says_what_is_wrong(args: list[str], words: str) -> None:
    said = example("wan22_batch.py", *args, code=2, HF_HOME=os.getcwd(), HF_HUB_OFFLINE="1").stderr
    assert words in said
    assert not Path("out").exists()


def test_img2vid_folder() -> None:
    """A picture that can't be read fails alone; the next time only what is new or has changed is made."""
    Path("in").mkdir()
    for name, colour in (("a.png", "red"), ("b {x}.jpg", "blue")):
        Image.new("RGB", (90, 60), colour).save(Path("in", name))
    Path("in", "a.txt").write_text("a red cat", encoding="utf-8")
    Path("in", "c.webp").write_bytes(b"no picture")
    said = example("img2vid_folder.py", "in", "out", "-p", "a cat", *VIDEOS, code=1).stdout
    assert "failed out/c.webp.mp4 in/c.webp is not an image" in said
    assert "2 of 3 videos are there, 3 were tried now" in said
    prompts = {path.name: data_of(path)["options"]["prompt"] for path in Path("out").glob("*.mp4")}
    assert prompts == {"a.png.mp4": "a red cat", "b {x}.jpg.mp4": "a cat"}
    red, blue = (frames_of(Path("out", name)) for name in prompts)
    assert red.shape == blue.shape == (5, 64, 64, 3)
    assert np.abs(red.astype(int) - blue).mean() > 5

    before = Path("out", "b {x}.jpg.mp4").stat().st_mtime_ns
    Path("in", "a.txt").write_text("another cat", encoding="utf-8")
    Path("in", "c.webp").unlink()
    said = example("img2vid_folder.py", "in", "out", "-p", "a cat", *VIDEOS).stdout
    assert "2 of 2 videos are there, 1 were tried now" in said
    assert data_of(Path("out", "a.png.mp4"))["options"]["prompt"] == "another cat"
    assert Path("out", "b {x}.jpg.mp4").stat().st_mtime_ns == before


def test_img2vid_folder_says_what_is_wrong() -> None:
    assert "in is no folder" in example("img2vid_folder.py", "in", "out", code=2).stderr
    Path("in").mkdir()
    assert "there is no picture in in" in example("img2vid_folder.py", "in", "out", code=2).stderr
    assert not Path("out").exists()


def test_compare_attention_without_cuda() -> None:
    said = example("compare_attention.py", *BENCH, CUDA_VISIBLE_DEVICES="").stdout
    assert "SageAttention needs an NVIDIA GPU and an engine built for CUDA, so it was off alone:" in said
    rows = {line[:20].strip(): line[20:].split() for line in said.splitlines()[2:6]}
    assert list(rows) == ["load", "first step", "later steps (mean)", "decode"]
    assert all(float(off) > 0 and (on, ratio) == ("-", "-") for off, on, ratio in rows.values())
    assert "PSNR" not in said


def test_compare_attention_with_the_kernels_arithmetic(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SAGE_ON_CPU, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), PACKAGE])
    said = example("compare_attention.py", *BENCH, PYTHONPATH=path, SDSAGE_LIB_DIR=str(BUILD / "test-lib")).stdout
    rows = {line[:20].strip(): line[20:].split() for line in said.splitlines()[2:6]}
    for off, on, ratio in rows.values():
        assert float(ratio.removesuffix("x")) == pytest.approx(float(off) / float(on), rel=0.2, abs=0.02)
    assert "kernels of SageAttention: fp8++" in said
    (psnr,) = re.findall(r"PSNR of the frames: (\S+) dB", said)
    assert 20 < float(psnr) < 80


def test_compare_attention_passes_on_what_is_wrong() -> None:
    assert "--random huge can't be used" in example("compare_attention.py", "--random", "huge", code=2).stderr
