"""Engines that other options of the build give, built and run.

Upstream's ggml with link-time optimisation and sd-server; an installed ggml. Slow (two builds): `make test-slow`.
"""

import base64
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BUILD, PACKAGE, ROOT
from PIL import Image
from tiny_cli import frames_of

pytestmark = pytest.mark.slow
SMALL = ["-p", "a cat", "-W", "64", "-H", "64", "--steps", "2", "--cfg-scale", "1", "-s", "7", "-t", "1"]


def cmake(*words: str | Path) -> None:
    subprocess.run(["cmake", *words], check=True, stdout=sys.stderr)


def built(name: str, *options: str, targets: tuple[str, ...] = ()) -> Path:
    """The build folder of an engine with these options."""
    build = BUILD.parent / f"{BUILD.name}-{name}"
    cmake("-S", ROOT, "-B", build, "-G", "Ninja", "-DSD_WEBP=OFF", "-DSD_WEBM=OFF", *options)
    cmake("--build", build, "--target", "sdsage", "sd-cli", *targets)
    for file in ("cdef.h", "cdef.cffi"):
        (build / "bin" / file).unlink(missing_ok=True)
        (build / "bin" / file).symlink_to(build / "native" / "sd_cli" / "generated" / file)
    return build


@pytest.fixture(scope="module")
def upstream_lto() -> Path:
    options = ("-DSD_USE_UPSTREAM_GGML=ON", "-DSDSAGE_LTO=ON", "-DSDSAGE_BUILD_SD_SERVER=ON")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SDSAGE_UPSTREAM_DIR", raising=False)  # that tree may carry the edits that are left out here
        return built("upstream-lto", *options, targets=("sd-server",))


@pytest.fixture(scope="module")
def system(upstream_tree: Path) -> Path:
    """An engine with a ggml that was built and installed by itself, as docs/building.md says."""
    ggml, prefix = BUILD.parent / "ggml-build", BUILD.parent / "ggml-prefix"
    alone = ("-DGGML_BUILD_TESTS=OFF", "-DGGML_BUILD_EXAMPLES=OFF")
    cmake("-S", upstream_tree / "ggml", "-B", ggml, "-G", "Ninja", f"-DCMAKE_INSTALL_PREFIX={prefix}", *alone)
    cmake("--build", ggml)
    cmake("--install", ggml)
    tests = ("-DSDSAGE_TESTS=ON",)
    return built("system", "-DSD_USE_SYSTEM_GGML=ON", f"-DCMAKE_PREFIX_PATH={prefix}", *tests, targets=("ggml-other",))


def sdsage(build: Path, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """The command line with the library of `build`."""
    env = {**os.environ, "PYTHONPATH": PACKAGE, "SDSAGE_LIB_DIR": str(build / "bin"), **env}
    return subprocess.run([sys.executable, "-P", "-m", "sdsage", *words], capture_output=True, text=True, env=env)


def picture(build: Path, to: Path) -> Any:
    done = sdsage(build, "img-gen", "--preset", "tiny-flux", *SMALL, "-o", str(to))
    assert done.returncode == 0, done.stderr
    return frames_of(to).astype(int)


def build_info(build: Path) -> dict[str, Any]:
    done = sdsage(build, "doctor", "--json")
    info: dict[str, Any] = json.loads(done.stdout)["build"]
    return info


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory, flux_context: Any) -> Any:
    """The same picture by the engine of this build."""
    to = tmp_path_factory.mktemp("usual") / "a.png"
    env = {**os.environ, "PYTHONPATH": PACKAGE}
    command = [sys.executable, "-P", "-m", "sdsage", "img-gen", "--preset", "tiny-flux", *SMALL, "-o", str(to)]
    subprocess.run(command, check=True, capture_output=True, env=env)
    return frames_of(to).astype(int)


def test_upstreams_ggml_makes_the_same_picture(upstream_lto: Path, usual: Any, tmp_path: Path) -> None:
    info = build_info(upstream_lto)
    assert (info["ggml"], info["lto"]) == ("upstream", True)
    assert np.abs(picture(upstream_lto, tmp_path / "a.png") - usual).max() <= 2
    commands = (upstream_lto / "compile_commands.json").read_text()
    assert commands.count("-flto") > 20


def test_upstreams_ggml_has_no_sage_attention(upstream_lto: Path, tmp_path: Path) -> None:
    to = tmp_path / "a.png"
    done = sdsage(upstream_lto, "img-gen", "--preset", "tiny-flux", *SMALL, "--sage-attn", "-o", str(to))
    assert done.returncode == 2
    assert "this build lacks it" in done.stderr
    assert "SD_USE_UPSTREAM_GGML" in done.stderr
    assert not to.exists()


def model_options(files: dict[str, str]) -> list[str]:
    return [
        w for name, path in files.items() for w in (f"--{name if name == 'clip_l' else name.replace('_', '-')}", path)
    ]


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def server(upstream_lto: Path, preset_files: Any) -> Iterator[str]:
    """sd-server with the tiny Flux on this machine's own address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        upstream_lto / "bin" / "sd-server",
        "--listen-port",
        str(port),
        *model_options(preset_files("tiny-flux")),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "listening on" in line:
                break
        else:
            pytest.fail("".join(said))
        drain = threading.Thread(target=process.stdout.read, daemon=True)
        drain.start()
        while process.poll() is None and not is_open(port):  # it says so just before it is
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        drain.join()


def test_sd_server_makes_a_picture(server: str, usual: Any) -> None:
    job = {"prompt": "a cat", "width": 64, "height": 64, "steps": 2, "cfg_scale": 1.0, "seed": 7}
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server}/sdapi/v1/txt2img", json.dumps(job).encode(), head)
    with urllib.request.urlopen(request) as answer:
        (made,) = json.load(answer)["images"]
    with Image.open(io.BytesIO(base64.b64decode(made))) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert pixels.shape == (64, 64, 3)
    assert pixels.std() > 5


def test_sd_server_says_why_it_does_not_start(upstream_lto: Path, preset_files: Any) -> None:
    program = upstream_lto / "bin" / "sd-server"
    command = [program, "--sage-attn", "--sage-kernel", "fp16", *model_options(preset_files("tiny-flux"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "this build lacks it" in done.stdout + done.stderr
    listed = subprocess.run([program, "--help"], capture_output=True, text=True)
    assert re.search(r"--sage-attn\b", listed.stdout)


def test_an_installed_ggml_makes_the_same_picture(system: Path, usual: Any, tmp_path: Path) -> None:
    assert build_info(system)["ggml"] == "system"
    linked = subprocess.run(["ldd", system / "bin" / "libsdsage.so"], capture_output=True, text=True, check=True).stdout
    assert str(BUILD.parent / "ggml-prefix") in linked
    assert np.abs(picture(system, tmp_path / "a.png") - usual).max() <= 2


def test_another_ggml_in_its_place_is_noticed(system: Path, tmp_path: Path) -> None:
    """One with names of 64 characters comes first: no tensor is touched."""
    other, to = system / "bin" / "libggml-other.so", tmp_path / "a.png"
    words = ("img-gen", "--preset", "tiny-flux", *SMALL, "-o", str(to))
    done = sdsage(system, *words, LD_PRELOAD=str(other))
    assert done.returncode == 1
    assert "is not the one that this engine was built with" in done.stderr
    assert not to.exists()
