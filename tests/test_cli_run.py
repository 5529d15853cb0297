"""The verbs at work on the tiny presets: what goes where, what is recorded, and what is left after an error."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import hear_interrupts
from PIL import Image, ImageSequence
from typer.testing import CliRunner

import sdsage
from sdsage.cli import generate, report
from sdsage.cli.app import VERBS, build_app
from sdsage.cli.settings import merge
from sdsage.errors import GenerationError
from sdsage.media import read_metadata

VIDEO = ["vid-gen", "--preset", "tiny-random", "-W", "32", "-H", "32", "--video-frames", "5", "--steps", "1", "-t", "1"]
VIDEO += ["--high-noise-steps", "1", "-p", "a cat"]
PICTURE = ["img-gen", "--preset", "tiny-flux", "-W", "32", "-H", "32", "--steps", "1", "-t", "1", "-p", "a cat"]

SDSAGE = [sys.executable, "-P", "-m", "sdsage"]


def environment() -> dict[str, str]:
    """For another process: it imports the package that is tested here."""
    return {**os.environ, "PYTHONPATH": str(Path(sdsage.__file__).parent.parent)}


@cache
def app(verb: str = "") -> Any:
    return build_app(only=verb)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder; model files come from a cache that all tests share."""
    if "SDSAGE_CACHE_DIR" not in os.environ:
        monkeypatch.setenv("SDSAGE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "models"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args: str, code: int = 0) -> Any:
    verb = next((word for word in args if not word.startswith("-")), "")  # as the entry point does
    result = CliRunner().invoke(app(verb), list(args))
    assert result.exit_code == code, result.output
    return result


def frames_of(path: str | Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as image:
        return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)])


def test_stdout_holds_results_only(folder: Path) -> None:
    command = [*SDSAGE, *VIDEO, "-o", "cat.webp"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "cat.webp\n"
    for word in ("load model", "encode text", "sample (high-noise expert) 1/1", "sample (low-noise expert) 1/1",
                 "s/it", "decode", "write file", "first step", "later steps", "32x32, 5 frames", "seed"):  # fmt: skip
        assert word in done.stderr
    assert len(frames_of("cat.webp")) == 5
    assert os.listdir(folder) == ["cat.webp"]


def test_json_is_one_object() -> None:
    result = run(*VIDEO, "--json", "-q", "-o", "cat.gif")
    found = json.loads(result.stdout)
    assert result.stderr == ""
    assert found["files"] == ["cat.gif"]
    assert (found["seeds"], found["width"], found["height"], found["frames"], found["fps"]) == ([42], 32, 32, 5, 16)
    assert found["steps"] == 2
    assert found["seconds"]["first_step"] > 0
    assert found["seconds"]["load"] > 0
    assert found["options"]["diffusion_model"] == "wan-t2v-low.gguf"


def test_a_drawn_seed_is_recorded_and_reproduces() -> None:
    shown = run(*PICTURE, "-s", "-1", "-o", "a.png").stderr
    metadata = read_metadata("a.png")
    assert metadata is not None
    seed = metadata.data["seed"]
    assert 0 <= seed < 2**31
    assert f"seed {seed} was drawn" in shown
    assert f"Seed: {seed}," in metadata.parameters
    run(*PICTURE, "-s", str(seed), "-o", "b.png", "-q")
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()


def test_each_picture_of_a_batch_has_its_seed() -> None:
    result = run(*PICTURE, "-s", "7", "-b", "3", "-o", "cat.png", "--json", "-q")
    assert json.loads(result.stdout)["seeds"] == [7, 8, 9]
    assert json.loads(result.stdout)["files"] == ["cat_0.png", "cat_1.png", "cat_2.png"]
    for i in range(3):
        metadata = read_metadata(f"cat_{i}.png")
        assert metadata is not None
        assert (metadata.data["seed"], metadata.data["options"]["seed"]) == (7 + i, 7 + i)
    run(*PICTURE, "-s", "9", "-o", "alone.png", "-q")
    assert np.array_equal(frames_of("alone.png"), frames_of("cat_2.png"))


def test_metadata_holds_real_values_and_words(folder: Path) -> None:
    """Names and prompts with spaces, accents, CJK and emoji."""
    name = "Ausgabe ü/猫 🐈.webp"
    prompt = 'чёрный "кот", 猫\n🐈'
    result = run(*VIDEO, "-W", "40", "--video-frames", "7", "-p", prompt, "-n", "no, none", "-o", name)
    assert result.stdout == f"{name}\n"
    for sentence in ("width 40 is not possible with this model: using 48", "frame count 7 is not possible"):
        assert len(re.findall(f"warning: {sentence}", result.stderr)) == 1
        assert len(re.findall(f"changed +{sentence}", result.stderr)) == 1
    assert result.stderr.count("warning: ") == 2
    assert frames_of(name).shape == (5, 32, 48, 3)
    metadata = read_metadata(name)
    assert metadata is not None
    assert metadata.parameters.startswith(f"{prompt}\nNegative prompt: no, none\nSteps: 1, High-noise steps: 1, ")
    data = metadata.data
    assert (data["width"], data["height"], data["frames"], data["fps"], data["verb"]) == (48, 32, 5, 16, "vid-gen")
    assert data["options"]["prompt"] == prompt
    assert len(data["adjusted"]) == 2


def test_metadata_can_be_left_out() -> None:
    run(*PICTURE, "--disable-image-metadata", "-o", "a.png", "-q")
    assert read_metadata("a.png") is None


def test_strict_names_both_neighbours(folder: Path) -> None:
    result = run(*VIDEO, "-W", "40", "--video-frames", "7", "--strict", "-q", "-o", "cat.gif", code=2)
    assert result.stderr.splitlines() == [
        "error: width 40 is not possible with this model: use 32 or 48",
        "error: frame count 7 is not possible with this model: use 5 or 9",
    ]
    assert os.listdir(folder) == []


def test_strict_and_metadata_cover_the_hires_pass(folder: Path) -> None:
    args = [*PICTURE, "--hires", "--hires-scale", "1.2", "--hires-steps", "1", "-q"]
    result = run(*args, "--strict", "-o", "a.png", code=2)
    assert [line for line in result.stderr.splitlines() if line.startswith("error: ")] == [
        "error: hires width 38 is not possible with this model: use 32 or 40",
        "error: hires height 38 is not possible with this model: use 32 or 40",
    ]
    assert os.listdir(folder) == []
    result = run(*args, "-o", "a.png")
    assert result.stderr.count("warning: hires width 38 is not possible with this model: using 40") == 1
    assert "align" not in result.stderr
    metadata = read_metadata("a.png")
    assert metadata is not None
    assert (metadata.data["width"], metadata.data["height"]) == (40, 40)
    assert len(metadata.data["adjusted"]) == 2
    assert frames_of("a.png").shape == (1, 40, 40, 3)


def test_a_video_that_becomes_one_frame_fits_in_a_picture(folder: Path) -> None:
    run(*VIDEO, "--video-frames", "3", "-o", "cat.png", "-q")
    assert frames_of("cat.png").shape == (1, 32, 32, 3)
    assert "5 frames" in run(*VIDEO, "--video-frames", "7", "-o", "dog.png", code=2).stderr


def test_numbered_frames_begin_where_asked() -> None:
    result = run(*VIDEO, "-q", "-o", "out/f_%03d.png", "--output-begin-idx", "9")
    assert result.stdout.split() == [f"out/f_{i:03d}.png" for i in range(9, 14)]


def test_previews_are_written(folder: Path) -> None:
    run(*VIDEO, "--preview", "proj", "--preview-path", "p.png", "-q", "-o", "cat.gif")
    made = set(os.listdir(folder)) - {"cat.gif"}
    assert made <= {"p.png", "p.webp"}
    assert made
    assert frames_of(made.pop()).max() > 0


class Doubled:
    """Stands for the upscaling model: every pixel twice."""

    calls: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012

    def __init__(self, path: str, **more: Any) -> None:
        self.calls.append((path, more))

    def __enter__(self) -> "Doubled":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def upscale(self, image: Any) -> Any:
        return image.repeat(2, axis=0).repeat(2, axis=1)


@pytest.fixture
def doubled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> type[Doubled]:
    monkeypatch.setattr(sdsage, "Upscaler", Doubled, raising=False)
    monkeypatch.setattr(Doubled, "calls", [])
    (folder / "x2.gguf").touch()
    return Doubled


def test_upscaling_after_a_generation(doubled: type[Doubled]) -> None:
    args = ["--upscale-model", "x2.gguf", "--upscale-repeats", "2", "--upscale-tile-size", "64", "-o", "a.png"]
    run(*PICTURE, *args, "-q")
    run(*PICTURE, "-q", "-o", "b.png")
    assert np.array_equal(frames_of("a.png"), frames_of("b.png").repeat(4, axis=1).repeat(4, axis=2))
    assert doubled.calls[0][0] == "x2.gguf"
    assert doubled.calls[0][1]["tile_size"] == 64
    metadata = read_metadata("a.png")
    assert metadata is not None
    assert (metadata.data["width"], metadata.data["stored_width"]) == (32, 128)


def test_upscale(doubled: type[Doubled]) -> None:
    Image.new("RGB", (3, 2), (1, 2, 3)).save("in.png")
    result = run("upscale", "-i", "in.png", "--upscale-model", "x2.gguf", "-t", "1", "--json", "-q")
    found = json.loads(result.stdout)
    assert (found["files"], found["width"], found["height"]) == (["output.png"], 6, 4)
    assert doubled.calls[0][1]["n_threads"] == 1
    assert "exists already" in run("upscale", "-i", "in.png", "--upscale-model", "x2.gguf", code=2).stderr
    assert "--init-img FILE is missing" in run("upscale", code=2).stderr


def test_convert(folder: Path) -> None:
    run(*PICTURE, "--print-params")  # makes the tiny models
    model = next(Path(os.environ["SDSAGE_CACHE_DIR"]).rglob("flux.gguf"))
    result = run("convert", "-m", str(model), "--type", "q8_0", "-o", "small.gguf", "--json", "-q", "-M", "convert")
    found = json.loads(result.stdout)
    assert found["file"] == "small.gguf"
    assert found["bytes"] == os.path.getsize("small.gguf") < model.stat().st_size
    kept = Path("small.gguf").read_bytes()
    assert "exists" in run("convert", "-m", str(model), "-o", "small.gguf", code=2).stderr
    assert ".gguf or .safetensors" in run("convert", "-m", str(model), "-o", "small.bin", code=2).stderr
    Path("bad.gguf").write_bytes(b"no model at all, but long enough to look at")
    assert run("convert", "-m", "bad.gguf", "-o", "small.gguf", "--overwrite", code=2).stderr.startswith("error: ")
    assert Path("small.gguf").read_bytes() == kept
    assert sorted(os.listdir(folder)) == ["bad.gguf", "small.gguf"]


def test_devices() -> None:
    assert re.search(r"^cpu +cpu +\S+ GiB", run("devices").stdout, flags=re.MULTILINE)
    names = [d["name"] for d in json.loads(run("devices", "--json").stdout)["devices"]]
    assert "cpu" in names


BAD = {
    "no model": (["vid-gen", "-p", "x"], "no model was given: give --model FILE"),
    "missing file": ([*VIDEO, "--vae", "no.safetensors"], "--vae no.safetensors does not exist"),
    "folder as file": ([*VIDEO, "--t5xxl", "."], "--t5xxl . is a folder"),
    "file as folder": ([*VIDEO, "--control-video", "note.txt"], "--control-video note.txt is a file"),
    "pickle": ([*VIDEO, "--vae", "old.pt"], "--vae old.pt is a pickle"),
    "not a picture": ([*VIDEO, "-i", "note.txt"], "note.txt is not an image"),
    "zero size": ([*VIDEO, "-W", "0"], "--width 0 can't be used"),
    "absurd size": ([*PICTURE, "-H", "99999"], "--height 99999 can't be used"),
    "no memory": ([*VIDEO, "-W", "16384", "-H", "16384", "-o", "c.gif"], "needs at least 256.0 GiB, and cpu has"),
    "no frames": ([*VIDEO, "--video-frames", "0"], "--video-frames 0 can't be used"),
    "nan": ([*VIDEO, "--cfg-scale", "nan"], "--cfg-scale nan can't be used"),
    "unknown sampler": ([*VIDEO, "--sampling-method", "eulr"], "did you mean euler?"),
    "unknown device": ([*VIDEO, "--device", "tpu:0"], "'tpu:0'"),
    "unknown preset": (["vid-gen", "--preset", "tony"], "no preset is called 'tony'"),
    "preset of the other verb": (["img-gen", "--preset", "tiny-random"], "--preset tiny-random is for vid-gen"),
    "mode of the other verb": ([*VIDEO, "-M", "img_gen"], "run 'sdsage img-gen'"),
    "unknown mode": ([*VIDEO, "-M", "txt2img"], "it takes one of vid_gen, img_gen, convert, upscale"),
    "lora": ([*VIDEO, "-p", "<lora:no:1>"], "LoRA 'no' of the prompt is not in ."),
    "high-noise lora": ([*PICTURE, "-p", "<lora:|high_noise|lo:1>"], "is for the high-noise expert"),
    "no extension": ([*VIDEO, "-o", "cat"], "the extension is missing"),
    "avi": ([*VIDEO, "-o", "cat.avi"], ".avi is not possible"),
    "video in a picture": ([*VIDEO, "-o", "cat.png"], ".png holds one image, not 5 frames"),
    "existing file": ([*PICTURE, "-o", "kept.png"], "exists already"),
    "unwritable folder": ([*VIDEO, "-o", "note.txt/cat.gif"], "can't be made"),
    "preview": ([*VIDEO, "--preview", "proj", "--preview-path", "p.txt", "-o", "c.gif"], "p.txt"),
    "hires model": ([*PICTURE, "--hires", "--hires-upscaler", "big"], "a model needs --hires-upscalers-dir"),
    "type rules": ([*VIDEO, "--tensor-type-rules", "(=f16,x=q9"], "is no regular expression"),
    "seed": ([*PICTURE, "-s", str(2**63 - 1)], "seed + pictures must stay below 2^63"),
    "unknown option": ([*VIDEO, "--strenth", "1"], "--strength"),
    "missing argument": (["vid-gen", "--steps"], "requires an argument"),
    "stray word": ([*VIDEO, "word"], "unexpected extra argument"),
    "unknown verb": (["vidgen"], "No such command"),
    "removed option": ([*VIDEO, "--easycache", "0.2,0.1,0.9"], "use --cache-mode easycache"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_exit_2_and_writes_nothing(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "note.txt").write_text("no picture")
    (folder / "kept.png").write_bytes(b"kept")
    (folder / "lo.gguf").touch()
    (folder / "old.pt").write_bytes(b"PK\3\4")
    before = sorted(os.listdir(folder))
    if name != "unknown device":

        def refuse(*args: Any, **more: Any) -> None:
            pytest.fail("a model was loaded")

        monkeypatch.setattr(sdsage, "Context", refuse, raising=False)
    args, said = BAD[name]
    result = run(*args, code=2)
    assert said in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert sorted(os.listdir(folder)) == before
    assert (folder / "kept.png").read_bytes() == b"kept"


def test_all_problems_are_said_at_once() -> None:
    args = [*VIDEO, "--fps", "0", "--vae", "no.gguf", "-p", "<lora:no:1>", "-M", "img_gen", "-o", "cat.avi"]
    words = ("--fps 0", "--mode img_gen", "--vae no.gguf", "LoRA 'no'", "output 'cat.avi'")
    lines = run(*args, code=2).stderr.splitlines()
    for line, word in zip(lines, words, strict=True):
        assert line.startswith("error: ")
        assert word in line


def test_a_model_of_the_other_verb(folder: Path) -> None:
    files = json.loads(run(*VIDEO, "--print-params").stdout)["ctx"]
    args = [
        "--diffusion-model",
        files["diffusion_model_path"],
        "--vae",
        files["vae_path"],
        "--t5xxl",
        files["t5xxl_path"],
    ]
    assert "makes videos: run 'sdsage vid-gen'" in run("img-gen", *args, "-q", code=2).stderr
    files = json.loads(run(*PICTURE, "--print-params").stdout)["ctx"]
    args = ["--diffusion-model", files["diffusion_model_path"], "--taesd", files["taesd_path"]]
    args += ["--clip_l", files["clip_l_path"], "-o", "x.gif", "-q"]
    assert "makes images, not videos" in run("vid-gen", *args, code=2).stderr
    assert os.listdir(folder) == []


def test_mp4_without_its_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setattr(sdsage, "Context", None, raising=False)
    assert "pip install 'sdsage[video]'" in run(*VIDEO, "-o", "cat.mp4", code=2).stderr
    assert os.listdir(folder) == []


def test_no_arguments_show_help() -> None:
    result = CliRunner().invoke(app(), [])
    assert result.exit_code == 2
    assert all(verb in result.output for verb in VERBS)


def test_version() -> None:
    assert run("--version").stdout == f"sdsage {sdsage.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (GenerationError("the engine gave up"), 1, "error: the engine gave up"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (sdsage.Cancelled("cancelled"), 130, "error: interrupted"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (ImportError("the library is missing"), 1, "error: the library is missing"),
        (MemoryError(), 1, "out of memory"),
        (ZeroDivisionError("x"), 1, "ZeroDivisionError: x (a fault of sdsage; SDSAGE_DEBUG=1 shows where)"),
    ],
)
def test_exit_codes(error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: Any, output: Any) -> None:
        raise error

    monkeypatch.setattr(generate, "generate", fail)
    result = run(*PICTURE, code=code)
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    monkeypatch.setenv("SDSAGE_DEBUG", "1")
    assert "Traceback" in run(*PICTURE, code=code).stderr


def test_an_interrupt_leaves_nothing(folder: Path) -> None:
    command = [*SDSAGE, *VIDEO, "--steps", "5000", "-o", "out/cat.gif"]
    pipe = subprocess.PIPE
    more = {"env": environment(), "preexec_fn": hear_interrupts}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **more) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        seen = ""
        while "sample (low-noise expert) 1/" not in seen:
            line = process.stderr.readline()
            assert line, seen
            seen += line
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        rest = process.stderr.read()
        assert process.wait() == 130
        assert time.monotonic() - began < 20
        assert process.stdout.read() == ""
    assert rest.endswith("error: interrupted\n")
    assert "Traceback" not in rest
    assert os.listdir(folder) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with report.Reporter(merge("vid-gen", {"init_img": "x"})) as reporter:
        reporter.progress(sdsage.Progress("encode_image", 0, 0, 0.0, None))
        for step in range(3):
            reporter.progress(sdsage.Progress("sample", step, 4, 1.5 * step, "high-noise"))
        time.sleep(0.3)  # bars are drawn ten times a second
        reporter.message("warning", "[red]careful[/red]")
        reporter.message("warning", "[red]careful[/red]")
        with reporter.stage("encode"):
            pass
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", sys.stderr.getvalue())  # type: ignore[attr-defined]
    assert text.count("warning: [red]careful[/red]") == 1
    for word in ("encode picture", "sample (high-noise expert)", "2/4, 1.50 s/it, 3 s left", "write file"):
        assert word in text


def test_messages_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    from sdsage.enums import LogLevel

    for given in ({}, {"verbose": True}, {"quiet": True}):
        reporter = report.Reporter(merge("vid-gen", given))
        reporter.log(LogLevel.WARN, "wan.hpp:12   - odd weights\n")
        reporter.log(LogLevel.INFO, "wan.hpp:13   - fine\n")
        reporter.log(LogLevel.ERROR, "model.cpp:1 - broken\n")
    assert capsys.readouterr().err.splitlines() == [
        "warning: odd weights",
        "error: broken",
        "warning: wan.hpp:12   - odd weights",
        "info: wan.hpp:13   - fine",
        "error: model.cpp:1 - broken",
        "warning: odd weights",
        "error: broken",
    ]
    report.Reporter(merge("vid-gen", {"color": True})).log(LogLevel.WARN, "x")
    assert capsys.readouterr().err == "\x1b[33mwarning\x1b[0m: x\n"
