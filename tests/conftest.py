"""What the tests share: the built tree, the tiny models, and small jobs on them."""

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A quick run by default; `make test-slow` takes the other: --hypothesis-profile=thorough.
settings.register_profile("quick", max_examples=12, deadline=None)
settings.register_profile("thorough", max_examples=400, deadline=None)
settings.load_profile("quick")

ROOT = Path(__file__).parent.parent
# For PYTHONPATH of a child: where the package that is tested lies, the installed one when there is one.
PACKAGE = str(Path(str(find_spec("sdsage").origin)).parents[1])  # type: ignore[union-attr]
# The same with what this process has there: a machine with a GPU may have cffi in a folder of its own.
CHILD_PATH = os.pathsep.join(filter(None, [PACKAGE, os.environ.get("PYTHONPATH")]))
BUILD = Path(os.environ.get("SDSAGE_BUILD_DIR", ROOT / "build" / "make"))

# The tiny models are written once per build tree, not into the user's cache.
os.environ.setdefault("SDSAGE_CACHE_DIR", str(ROOT / "build" / "test-cache"))


@pytest.fixture(scope="session")
def upstream_tree() -> Path:
    """The edited tree that the native build was made from."""
    trees = sorted(BUILD.glob("upstream-*"), key=lambda p: p.stat().st_mtime)
    if not trees:
        given = os.environ.get("SDSAGE_UPSTREAM_DIR")
        assert given, f"no upstream tree in {BUILD}: run `make native` first"
        return Path(given)
    return trees[-1]


@pytest.fixture(scope="session")
def preset_files() -> Any:
    """Files of a preset, by option name."""
    from sdsage import presets

    def files(name: str) -> dict[str, str]:
        options = presets.load(name).options
        return {k: str(v) for k, v in options.items() if isinstance(v, str) and Path(v).is_file()}

    return files


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Iterator[list[str]]:
    """Figures for the log of the run."""
    lines: list[str] = []
    yield lines
    with capsys.disabled():
        for line in lines:
            print("\n  " + line, end="")


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and one for temporary files beside it."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def hear_interrupts() -> None:
    """For preexec_fn: what a shell starts in the background ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ctx_params(files: dict[str, str], **more: Any) -> Any:
    """SdCtxParams for the files of a preset."""
    import sdsage

    fields = {
        "diffusion_model": "diffusion_model_path",
        "high_noise_diffusion_model": "high_noise_diffusion_model_path",
        "vae": "vae_path",
        "t5xxl": "t5xxl_path",
        "clip_l": "clip_l_path",
        "clip_vision": "clip_vision_path",
        "llm_vision": "llm_vision_path",
        "taesd": "taesd_path",
        "tae": "taesd_path",
    }
    params = sdsage.SdCtxParams(n_threads=1)
    for option, path in files.items():
        setattr(params, fields[option], path)
    for name, value in more.items():
        setattr(params, name, value)
    return params


def small_video(**more: Any) -> Any:
    """A video job of less than a second."""
    import sdsage

    job = sdsage.SdVidGenParams(prompt="a lovely cat", width=32, height=32, video_frames=5, seed=7)
    job.sample_params.sample_steps = 2
    job.sample_params.guidance.txt_cfg = 3.5
    job.high_noise_sample_params.sample_steps = 2
    job.high_noise_sample_params.guidance.txt_cfg = 3.5
    for name, value in more.items():
        setattr(job, name, value)
    return job


def small_image(**more: Any) -> Any:
    """An image job of less than a second."""
    import sdsage

    job = sdsage.SdImgGenParams(prompt="a lovely cat", width=32, height=32, seed=7)
    job.sample_params.sample_steps = 2
    job.sample_params.guidance.txt_cfg = 1.0
    for name, value in more.items():
        setattr(job, name, value)
    return job


@pytest.fixture(scope="session")
def video_context(preset_files: Any) -> Iterator[Any]:
    """The tiny Wan with both experts."""
    import sdsage

    with sdsage.Context(ctx_params(preset_files("tiny-random"))) as ctx:
        yield ctx


@pytest.fixture(scope="session")
def flux_context(preset_files: Any) -> Iterator[Any]:
    """The tiny Flux."""
    import sdsage

    with sdsage.Context(ctx_params(preset_files("tiny-flux"))) as ctx:
        yield ctx
