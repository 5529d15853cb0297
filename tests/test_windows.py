"""sd-cli and sdsage.dll as mingw-w64 built them, under Wine: `make test-windows`.

SDSAGE_WINDOWS_BUILD names the build folder. The models are made here, in a folder with a Chinese name, and the frames
are compared with those of this machine's engine.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ctx_params, small_video
from PIL import Image
from test_engine import BOTH, SMALL, model_options, sd_cli

import sdsage
from sdsage._library import sd_cli_path

BUILD = os.environ.get("SDSAGE_WINDOWS_BUILD", "")
pytestmark = pytest.mark.skipif(not BUILD, reason="make test-windows builds for Windows and runs this")

FOLDER, PROMPT = "視頻 模型", "一隻可愛的貓"
WORDS = [*SMALL, *BOTH, "--video-frames", "5", "-p", PROMPT]
LEVELS = 8.0  # of 255, on average over all pixels: see check


@pytest.fixture(scope="module")
def models(preset_files: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny video models, in a folder with a Chinese name."""
    folder = tmp_path_factory.mktemp("windows") / FOLDER
    folder.mkdir()
    return {option: Path(shutil.copy(path, folder)) for option, path in preset_files("tiny-random").items()}


@pytest.fixture(scope="module")
def wine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a program of the build. Wine takes the names of files from the locale, which must be UTF-8."""
    program = shutil.which("wine64") or shutil.which("wine64", path="/usr/lib/wine") or shutil.which("wine")
    assert program, "Wine is needed: apt-get install wine64"
    prefix = tmp_path_factory.mktemp("wine")
    environment = {**os.environ, "WINEPREFIX": str(prefix), "WINEDEBUG": "-all", "LC_ALL": "C.UTF-8"}
    environment.pop("DISPLAY", None)

    def run(name: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
        command = [program, str(Path(BUILD, "bin", f"{name}.exe").resolve()), *map(windows_name, args)]
        return subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", errors="replace")

    return run


def windows_name(arg: str | Path) -> str:
    """Wine shows this machine's files on drive Z:."""
    return "Z:" + str(arg).replace("/", "\\") if isinstance(arg, Path) else arg


def seeds(folder: Path) -> Iterator[tuple[Path, str]]:
    """A folder for the frames of SMALL's seed, and one for those of another."""
    for seed in ("7", "8"):
        (folder / seed).mkdir()
        yield folder / seed, seed


def pictures(files: list[Path]) -> np.ndarray[Any, Any]:
    return np.stack([np.asarray(Image.open(p)) for p in files])


def check(frames: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> None:
    """Frames of the engine for Windows are those of ours; `other` are ours for another seed.

    They are not the same bytes: mathematical functions come from glibc here and from mingw-w64 there. In half of 3584
    values tanh differs by one or two in the last place, and GELU is read from a table of 16-bit floats made with it.
    The tiny models have random weights, so differences grow at each step: to 1.5 levels on average for a video from
    text, to 6.2 for one from a picture, where two engines on Linux, for AVX2 and for AVX-512, are 5.9 apart. Another
    seed is more than 40 levels away.
    """
    assert frames.shape == theirs.shape == other.shape == (5, 32, 32, 3)
    near, far = (float(np.abs(frames.astype(int) - x.astype(int)).mean()) for x in (theirs, other))
    print(f"{near:.2f} levels from this seed's frames, {far:.1f} from another's")
    assert near <= LEVELS < far / 4


def test_the_program_makes_the_video(wine: Any, models: dict[str, Path], tmp_path: Path) -> None:
    theirs = [sd_cli(folder, "vid_gen", models, *WORDS, "-s", s) for folder, s in seeds(tmp_path)]
    there = tmp_path / "輸出" / "幀_%02d.png"
    done = wine("sd-cli", "-M", "vid_gen", *model_options(models), *WORDS, "-o", there)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    files = sorted(there.parent.iterdir())
    assert [p.name for p in files] == [f"幀_{i:02d}.png" for i in range(5)]
    check(pictures(files), *theirs)
    words = Image.open(files[0]).text["parameters"]  # type: ignore[attr-defined]
    assert words.encode("latin-1").decode().startswith(PROMPT)  # sd-cli writes UTF-8 where PNG says Latin-1


@pytest.mark.parametrize(
    ("name", "magic"), [("貓.avi", b"RIFF"), ("貓.webm", b"\x1a\x45\xdf\xa3"), ("貓.webp", b"RIFF")]
)
def test_the_program_writes_moving_files(
    name: str, magic: bytes, wine: Any, models: dict[str, Path], tmp_path: Path
) -> None:
    done = wine("sd-cli", "-M", "vid_gen", *model_options(models), *WORDS, "-o", tmp_path / name)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_the_program_reads_a_picture_with_a_chinese_name(wine: Any, preset_files: Any, tmp_path: Path) -> None:
    """Image to video; the picture counts, and it is the same picture."""
    picture = tmp_path / "圖.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)).save(picture)
    files = {option: Path(path) for option, path in preset_files("tiny-random-i2v").items()}
    theirs = [sd_cli(folder, "vid_gen", files, *WORDS, "-i", str(picture), "-s", s) for folder, s in seeds(tmp_path)]
    done = wine("sd-cli", "-M", "vid_gen", *model_options(files), *WORDS, "-i", picture, "-o", tmp_path / "幀_%d.png")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    check(pictures(sorted(tmp_path.glob("幀_*.png"))), *theirs)


@pytest.mark.parametrize("wrong", ["option", "model", "kernel"])
def test_bad_input_has_an_exit_code(wrong: str, wine: Any, models: dict[str, Path], tmp_path: Path) -> None:
    """The codes of sd-cli here."""
    words = ["-M", "vid_gen", *model_options(models), *WORDS]
    missing = tmp_path / "沒有.gguf"
    if wrong == "option":
        words += ["--no-such-option"]
    elif wrong == "kernel":
        words += ["--sage-kernel", "fp7"]
    else:
        words[words.index("--vae") + 1] = missing
    out = tmp_path / "out.avi"
    done = wine("sd-cli", *words, "-o", out)
    here = subprocess.run([sd_cli_path(), *words, "-o", out], capture_output=True)
    assert done.returncode == here.returncode != 0
    assert not out.exists()
    if wrong == "model":
        assert missing.name in done.stdout + done.stderr


def test_the_library_makes_the_video_in_a_folder_with_a_chinese_name(
    wine: Any, models: dict[str, Path], tmp_path: Path
) -> None:
    """A program in the system's code page: build information, the frames of the API here, and a cancelled job."""
    out = tmp_path / "幀.rgb"
    files = {name: models[name] for name in ("diffusion_model", "vae", "t5xxl")}
    done = wine("windows_dll", *files.values(), PROMPT, out)
    assert done.returncode == 0, done.stdout + done.stderr
    info, made, cancelled = done.stdout.splitlines()
    assert json.loads(info)["upstream"]["sha256"] == sdsage.build_info()["upstream"]["sha256"]
    assert made == "5 frames of 32x32 by Wan 2.x"
    assert cancelled.startswith("cancelled: ")
    jobs = [small_video(prompt=PROMPT, seed=seed) for seed in (7, 8)]
    with sdsage.Context(ctx_params({name: str(path) for name, path in files.items()})) as ctx:
        for job in jobs:
            job.high_noise_sample_params.sample_steps = -1
        theirs = [ctx.generate_video(job).frames for job in jobs]
    check(np.fromfile(out, np.uint8).reshape(theirs[0].shape), *theirs)


def test_a_missing_model_is_named(wine: Any, tmp_path: Path) -> None:
    missing = tmp_path / "沒有.gguf"
    done = wine("windows_dll", missing, missing, missing, PROMPT, tmp_path / "out.rgb")
    assert done.returncode == 1
    assert missing.name in done.stderr
    assert not (tmp_path / "out.rgb").exists()


def test_only_the_api_is_visible() -> None:
    tool = shutil.which("x86_64-w64-mingw32-objdump")
    assert tool, "mingw-w64's binutils are needed"
    listed = subprocess.run([tool, "-p", Path(BUILD, "bin", "sdsage.dll")], capture_output=True, text=True, check=True)
    _, _, table = listed.stdout.partition("[Ordinal/Name Pointer] Table")
    names = {line.split()[-1] for line in table.partition("\n\n")[0].splitlines()[1:] if line.strip()}
    from sdsage._ffi import lib

    declared = {name for name in dir(lib) if callable(getattr(lib, name)) and not name.isupper()}
    assert names == {name for name in declared if not name.startswith("sdsage_test_")}


def test_no_library_of_the_compiler_is_needed() -> None:
    """What both files import are DLLs of Windows itself."""
    tool = shutil.which("x86_64-w64-mingw32-objdump")
    assert tool
    for name, own in (("sdsage.dll", set()), ("sd-cli.exe", {"sdsage.dll"})):
        listed = subprocess.run([tool, "-p", Path(BUILD, "bin", name)], capture_output=True, text=True, check=True)
        needed = {line.split()[-1].lower() for line in listed.stdout.splitlines() if "DLL Name:" in line}
        assert needed - own <= {"kernel32.dll", "msvcrt.dll", "advapi32.dll", "shell32.dll", "user32.dll"}, needed
