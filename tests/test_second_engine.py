"""The engine without our seams: upstream with the sizes edits alone, built a second time, makes the same bytes.

Slow (a whole build): `make test-slow`. The group "sizes" is needed, since nothing else loads the tiny models.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BUILD, ROOT
from PIL import Image

from sdsage._library import sd_cli_path

pytestmark = pytest.mark.slow
PATCHED = ROOT / "native" / "ggml-patched"


@pytest.fixture(scope="module")
def plain_sd_cli() -> Path:
    """sd-cli of upstream with the group "sizes" only, by upstream's own CMake files."""
    spec = importlib.util.spec_from_file_location("upstream", PATCHED / "upstream.py")
    assert spec is not None
    assert spec.loader is not None
    upstream = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(upstream)
    tree = BUILD.parent / "plain-tree"
    shutil.rmtree(tree, ignore_errors=True)
    upstream.LEFT_OUT = ()
    upstream.unpack(upstream.find_sdist(), tree)
    upstream.apply_edits(tree, groups=["sizes"])
    build = BUILD.parent / "plain"
    options = [
        "-G",
        "Ninja",
        "-DSD_BUILD_EXAMPLES=ON",
        f"-DCMAKE_CXX_FLAGS=-I{PATCHED / 'glue'}",
        "-DCMAKE_BUILD_TYPE=Release",
    ]
    subprocess.run(["cmake", "-S", tree, "-B", build, *options], check=True, stdout=sys.stderr)
    subprocess.run(["cmake", "--build", build, "--target", "sd-cli"], check=True, stdout=sys.stderr)
    return build / "bin" / "sd-cli"


SMALL = ["-s", "7", "-p", "a lovely cat", "--steps", "2", "--cfg-scale", "3.5", "-t", "1"]
VIDEO = ["-M", "vid_gen"]
BOTH = ["--high-noise-steps", "2", "--high-noise-cfg-scale", "3.5"]
JOBS = {
    "tiny-random": [*VIDEO, *BOTH],
    "tiny-random-i2v": [*VIDEO, *BOTH, "-i", "PICTURE"],
    "tiny-ti2v": [*VIDEO, "-i", "PICTURE"],
    "tiny-flux": ["-M", "img_gen"],
}


# FlashAttention is upstream's own where the number of keys is a multiple of 256 (group "flash"): 256 tokens, or 256
# beside 256 of text.
PLAIN = ["-W", "64", "-H", "64", "--video-frames", "5"]
FLASH = ["--diffusion-fa", "--video-frames", "13"]
FLASH_SIZE = {"tiny": "128", "tiny-i2v": "128", "tiny-ti2v": "256", "tiny-flux": "256"}


@pytest.mark.parametrize("preset", JOBS)
@pytest.mark.parametrize("flash", [False, True])
def test_same_bytes(preset: str, flash: bool, plain_sd_cli: Path, preset_files: Any, tmp_path: Path) -> None:
    size = FLASH_SIZE[preset]
    attention = [*FLASH, "-W", size, "-H", size] if flash else PLAIN
    picture = tmp_path / "in.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(picture)
    options = [str(picture) if o == "PICTURE" else o for o in JOBS[preset]]
    for option, path in preset_files(preset).items():
        options += [f"--{option if option == 'clip_l' else option.replace('_', '-')}", path]
    made = []
    for name, program in (("plain", plain_sd_cli), ("ours", sd_cli_path())):
        command = [str(program), *options, *SMALL, *attention, "-o", str(tmp_path / f"{name}_%03d.png")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:]
        made.append(np.stack([np.asarray(Image.open(p)) for p in sorted(tmp_path.glob(f"{name}_*.png"))]))
    assert made[0].std() > 5
    assert (made[0] == made[1]).all()
