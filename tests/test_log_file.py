"""--log-file: everything, with the time, after what was there."""

import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tiny_cli import run

from sdsage.cli import generate
from sdsage.cli.console import Console
from sdsage.errors import WorkerDied

PICTURE = ["img-gen", "--preset", "tiny-flux", "-W", "33", "-H", "32", "--steps", "1", "-t", "1", "-p", "eine Katze 猫"]
LOG = ["--log-file", "run.log"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(path: str = "run.log") -> list[tuple[str, str]]:
    """Level and text of each line; each has a time with its zone, and they go on."""
    found, times = [], []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        time, level, text = re.fullmatch(r"(\S+) (\S+) +(.*)", line).groups()  # type: ignore[union-attr]
        times.append(datetime.fromisoformat(time))
        assert times[-1].tzinfo is not None
        found.append((level, text))
    assert times == sorted(times)
    return found


def test_everything_is_in_it_whatever_is_shown() -> None:
    result = run(*PICTURE, *LOG, "-q")
    assert "stable-diffusion.cpp" not in result.stderr
    lines = read()
    assert lines[0][0] == "sdsage"
    assert lines[-1] == ("exit", "0")
    levels = {level for level, _ in lines}
    assert {"debug", "info", "warning", "stage", "step", "summary", "result"} <= levels
    text = "\n".join(text for _, text in lines)
    for words in ("stable-diffusion.cpp:", "width 33 is not possible", "sample 1/1", "write file ...", "output.png"):
        assert words in text


def test_a_second_run_goes_on_in_it() -> None:
    Path("run.log").write_text("2026-01-01T00:00:00.000+00:00 mine     a line of my own\n", encoding="utf-8")
    run(*PICTURE, *LOG, "-q")
    run(*PICTURE, *LOG, "-q", code=2)  # the file exists now
    lines = read()
    assert lines[0] == ("mine", "a line of my own")
    assert [text for level, text in lines if level == "exit"] == ["0", "2"]
    assert any(level == "error" and "exists already" in text for level, text in lines)


def test_what_was_wrong_with_a_command_is_in_it(folder: Path) -> None:
    run(*PICTURE, *LOG, "--steps", "0", code=2)
    assert any(level == "error" and "--steps 0" in text for level, text in read())
    assert os.listdir(folder) == ["run.log"]


UNWRITABLE = {
    "no folder": ("no/run.log", "No such file or directory"),
    "a folder": (".", "Is a directory"),
    "below a file": ("note.txt/run.log", "Not a directory"),
    "no text": ("model.gguf", "it holds something else than text"),
    "the output": ("cat.png", "it is also the file of --output"),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_a_file_that_cannot_be_written_ends_the_command(name: str, folder: Path) -> None:
    Path("note.txt").write_text("x", encoding="utf-8")
    Path("model.gguf").write_bytes(b"GGUF\3\0\0\0")
    before = sorted(os.listdir(folder))
    path, why = UNWRITABLE[name]
    result = run(*PICTURE, "--log-file", path, "-o", "cat.png", code=2)
    assert f"error: --log-file {path} can't be written: {why}" in result.stderr
    assert sorted(os.listdir(folder)) == before
    assert Path("model.gguf").read_bytes() == b"GGUF\3\0\0\0"


def test_last_words_and_tracebacks_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: Any, output: Any) -> None:
        raise WorkerDied("the worker process ended", last_words=("ggml: first", "ggml: second"))

    monkeypatch.setattr(generate, "generate", fail)
    run(*PICTURE, *LOG, code=1)
    lines = read()
    assert [text for level, text in lines if level == "worker"] == ["ggml: first", "ggml: second"]
    assert any(level == "trace" and "WorkerDied" in text for level, text in lines)
    assert ("error", "the worker process ended") in lines
    assert lines[-1] == ("exit", "1")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_ends_the_log_and_not_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    out = Console()
    out.open_log("/dev/full", "vid-gen")
    for _ in range(3):
        out.message("note", "still here")
    out.close()
    said = capsys.readouterr().err
    assert said.count("--log-file /dev/full can't be written any more") == 1
    assert said.count("still here") == 3


def test_text_of_any_kind_is_kept_line_by_line() -> None:
    out = Console()
    out.open_log("run.log", "vid-gen")
    out.log("info", "two\nlines, \udcff and 🐈")
    out.close()
    assert read()[1:] == [("info", "two"), ("info", "lines, \\udcff and 🐈")]
