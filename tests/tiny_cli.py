"""Small commands on the tiny presets, run in this process, and a look at what they wrote."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from conftest import BUILD, PACKAGE, ROOT
from PIL import Image, ImageSequence
from typer.testing import CliRunner

from sdsage.cli.app import build_app
from sdsage.media import read_metadata

SMALL = ["-W", "32", "-H", "32", "--steps", "1", "-p", "a cat", "-t", "1", "-q"]
VIDEO = ["vid-gen", "--preset", "tiny-random", *SMALL, "--high-noise-steps", "1", "--video-frames", "5"]
PICTURE = ["img-gen", "--preset", "tiny-flux", *SMALL]


@cache
def app(verb: str) -> Any:
    return build_app(only=verb)


def run(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app(args[0]), list(args))
    assert result.exit_code == code, result.output
    return result


def frames_of(path: str | Path) -> Any:
    """N x H x W x 3 of a picture or video."""
    if Path(path).suffix in (".mp4", ".webm"):
        import av

        with av.open(str(path)) as container:
            return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    with Image.open(path) as image:
        return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)])


def data_of(path: str | Path) -> dict[str, Any]:
    metadata = read_metadata(path)
    assert metadata is not None
    return metadata.data


def sage_on_cpu(*words: str) -> Any:
    """What attention_worker.py prints, with the test library."""
    env = {**os.environ, "SDSAGE_LIB_DIR": str(BUILD / "test-lib"), "PYTHONPATH": PACKAGE}
    command = [sys.executable, str(ROOT / "tests" / "attention_worker.py"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
