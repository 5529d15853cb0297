"""The command line and its worker process: kills and Ctrl-C at every stage, and what is left."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageSequence
from test_upscale import picture, write_repeater
from worker_tools import LONG, end_with_a_running_job, gone, sdsage_command, wait_until, workers_of

import sdsage
from sdsage import Worker, WorkerDied

VIDEO = ["vid-gen", "--preset", "tiny-random", "-p", "a cat", "-t", "1", "--steps", "2", "--high-noise-steps", "1"]
PICTURE = ["img-gen", "--preset", "tiny-flux", "-p", "a cat", "-t", "1", "--steps", "1", "-W", "32", "-H", "32"]

pytestmark = pytest.mark.usefixtures("empty_folder")


def read_until(process: "subprocess.Popen[str]", word: str) -> str:
    assert process.stderr is not None
    seen = ""
    while word not in seen:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    return seen


LINES = {
    "loading": "load model ...",
    "text": "encode text ...",
    "step 1": "sample (high-noise expert) ...",
    "step 2": "sample (low-noise expert) ...",
    "step 3": "sample (low-noise expert) 1/2",
    "decode": "decode ...",
}


def kept_work(where: str, name: str) -> list[str]:
    """What is left of a run that was killed there: from its second step on, its checkpoint."""
    return [f".{name}.sdsage-checkpoint"] if where in ("step 2", "step 3", "decode") else []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The pixels of VIDEO, of a run that nobody disturbed."""
    path = tmp_path_factory.mktemp("whole") / "cat.gif"
    with sdsage_command(*VIDEO, "-o", str(path)) as process:
        _, err = process.communicate(timeout=LONG)
    assert process.returncode == 0, err
    return pixels(path)


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        return b"".join(frame.convert("RGB").tobytes() for frame in ImageSequence.Iterator(image))


@pytest.mark.parametrize("where", LINES)
def test_the_command_says_that_its_worker_died(where: str, empty_folder: Path, whole: bytes) -> None:
    """And --resume finishes the run."""
    with sdsage_command(*VIDEO, "-o", "out/cat.gif") as process:
        read_until(process, LINES[where])
        (worker,) = workers_of(process.pid)
        os.kill(worker, signal.SIGKILL)
        out, err = process.communicate(timeout=LONG)
    assert process.returncode == 1, err
    assert out == ""
    assert err.count("error: ") == 1
    assert "error: the worker process was ended by SIGKILL while " in err
    assert "Traceback" not in err
    assert gone(worker)
    kept = kept_work(where, "cat.gif")
    assert os.listdir(empty_folder) == ["out"] * bool(kept)
    assert not kept or os.listdir("out") == kept
    assert ("this goes on with it: sdsage vid-gen -o out/cat.gif --resume" in err) == bool(kept)
    with sdsage_command(*VIDEO, "-o", "out/cat.gif", "--resume") as process:
        _, err = process.communicate(timeout=LONG)
    assert process.returncode == 0, err
    assert ("came from the checkpoint" in err) == (where in ("step 2", "step 3"))
    assert ("sample (" in err) == (where != "decode")
    assert pixels(empty_folder / "out" / "cat.gif") == whole
    assert os.listdir("out") == ["cat.gif"]


def test_a_worker_that_dies_while_the_file_is_written_is_not_missed(empty_folder: Path) -> None:
    with sdsage_command(*VIDEO, "-o", "cat.webp") as process:
        read_until(process, "write file ...")
        for worker in workers_of(process.pid):
            os.kill(worker, signal.SIGKILL)
        out, err = process.communicate(timeout=LONG)
    assert (process.returncode, out) == (0, "cat.webp\n"), err
    with Image.open("cat.webp") as image:
        assert len(list(ImageSequence.Iterator(image))) == 17
    assert os.listdir(empty_folder) == ["cat.webp"]


@pytest.mark.parametrize("where", [*LINES, "encode"])
def test_ctrl_c_at_every_stage(where: str, empty_folder: Path, tmp_path: Path) -> None:
    with sdsage_command(*VIDEO, "-o", "out/cat.webp") as process:
        read_until(process, {**LINES, "encode": "write file ..."}[where])
        workers = workers_of(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LONG)
    assert process.returncode == 130, err
    assert out == ""
    assert err.endswith("error: interrupted\n")
    assert "Traceback" not in err
    assert all(map(gone, workers))
    assert os.listdir(empty_folder) == os.listdir(tmp_path / "tmp") == []


def test_ctrl_c_ends_what_would_not_stop(empty_folder: Path) -> None:
    """The engine hears nothing while the process is stopped."""
    with sdsage_command(*VIDEO, "-o", "cat.gif") as process:
        read_until(process, "decode ...")
        (worker,) = workers_of(process.pid)
        os.kill(worker, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LONG)
    assert (process.returncode, out) == (130, ""), err
    assert gone(worker)
    assert os.listdir(empty_folder) == []


@pytest.mark.parametrize("state", ["running", "stopped"])
@pytest.mark.parametrize("where", ["loading", "step 2", "decode"])
def test_nothing_outlives_the_program(where: str, state: str, empty_folder: Path, tmp_path: Path) -> None:
    with sdsage_command(*VIDEO, "-o", "cat.gif") as process:
        read_until(process, LINES[where])
        (worker,) = workers_of(process.pid)
        if state == "stopped":
            os.kill(worker, signal.SIGSTOP)
        process.kill()
        process.wait(LONG)
        assert wait_until(lambda: gone(worker))
    assert os.listdir(empty_folder) == kept_work(where, "cat.gif")
    assert os.listdir(tmp_path / "tmp") == []


SUICIDE = """
import os, signal, sys, threading
import sdsage
def end():
    while not os.listdir("."):
        pass
    print(os.listdir("."), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=end).start()
sdsage.convert(sys.argv[1], "out.gguf", type="f32", isolated=True)
"""


def test_a_conversion_does_not_outlive_the_program(preset_files: Any, empty_folder: Path) -> None:
    command = [sys.executable, "-P", "-c", SUICIDE, preset_files("tiny-random")["t5xxl"]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout[:7]) == (-9, "['.out."), done.stderr
    assert wait_until(lambda: os.listdir(empty_folder) == [])


def test_a_conversion_whose_worker_dies_leaves_nothing(preset_files: Any, empty_folder: Path) -> None:
    worker = Worker()
    seen: list[str] = []

    def end() -> None:
        seen.extend(wait_until(lambda: os.listdir(empty_folder)))
        os.kill(worker.pid, signal.SIGKILL)

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(WorkerDied, match="SIGKILL while converting"):
        sdsage.convert(preset_files("tiny-random")["t5xxl"], "out.gguf", type="f32", isolated=worker)
    thread.join()
    assert seen[0].startswith(".out.")
    assert os.listdir(empty_folder) == []


LIGHT = """
import sys
from sdsage import _ffi
from sdsage.cli import main
sys.argv[0] = "sdsage"
try:
    main()
finally:
    print("loaded", _ffi.is_loaded(), "libsdsage" in open("/proc/self/maps").read())
"""


@pytest.mark.parametrize("verb", ["vid-gen", "--extend", "img-gen", "convert", "upscale"])
def test_the_program_does_not_load_the_engine(verb: str, preset_files: Any, tmp_path: Path) -> None:
    Image.fromarray(picture(8, 8)).save("in.png")
    model = str(write_repeater(tmp_path / "m.safetensors", 2))
    args = {
        "vid-gen": [*VIDEO, "-W", "32", "-H", "32", "--video-frames", "5", "-o", "a.gif", "--upscale-model", model],
        "--extend": [
            *("vid-gen", "--preset", "tiny-ti2v", "-p", "a cat", "-W", "32", "-H", "32", "--video-frames", "5"),
            *("--steps", "1", "-t", "1", "--extend", "1", "-o", "a.gif"),
        ],
        "img-gen": [*PICTURE, "-o", "a.png", "--control-image", "in.png", "--canny", "--preview", "proj"],
        "convert": ["convert", "-m", preset_files("tiny-random")["vae"], "-o", "a.gguf"],
        "upscale": ["upscale", "-i", "in.png", "--upscale-model", model, "-o", "a.png"],
    }[verb]
    done = subprocess.run([sys.executable, "-P", "-c", LIGHT, *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded False False"


def test_the_program_may_end_while_a_thread_generates() -> None:
    pid = int(end_with_a_running_job("isolated"))
    assert wait_until(lambda: gone(pid))
