"""--json: the lines of real runs against the tables of docs/json.md."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import PACKAGE, ROOT, hear_interrupts
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

import sdsage
from sdsage.cli.app import VERBS, build_app
from sdsage.cli.console import SCHEMA, Console, as_json
from sdsage.cli.options import of_verb

SIZE = ["-W", "32", "-H", "32", "-t", "1", "-p", "a cat"]
VIDEO = ["vid-gen", "--preset", "tiny-random", *SIZE, "--video-frames", "5"]
PICTURE = ["img-gen", "--preset", "tiny-flux", *SIZE]
TYPES: dict[str, Any] = {"text": str, "integer": int, "number": (int, float), "object": dict, "null": type(None)}
TYPES["boolean"] = bool

Tables = dict[str, dict[str, str]]


@cache
def tables() -> Tables:
    """Section of docs/json.md -> field -> type."""
    found: Tables = {"every line": {}}
    section = found["every line"]
    for line in (ROOT / "docs" / "json.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section = found.setdefault(line.strip("# "), {}) if line.startswith("##") else section
        elif row := re.match(r"\| `(\w+)` \| ([^|]+) \|", line):
            section[row[1]] = row[2].strip()
    return found


def is_a(value: Any, kind: str) -> bool:
    for name in kind.removesuffix(", optional").split(" or "):
        if name.startswith("list of "):
            if isinstance(value, list) and all(is_a(item, name.removeprefix("list of ")) for item in value):
                return True
        elif isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool)):
            return True
    return False


def check(line: dict[str, Any], verb: str) -> None:
    """A line has the documented fields, all of them, of the documented types."""
    event = line["event"]
    known = tables()["every line"] | tables()[event]
    if event == "result":
        known = known | next(fields for name, fields in tables().items() if re.match(f"result of .*{verb}", name))
    assert set(line) <= set(known), event
    for name, kind in known.items():
        assert name in line or kind.endswith("optional"), (event, name)
        assert name not in line or is_a(line[name], kind), (event, name, line[name])
    assert line["schema"] == SCHEMA


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(*args: str, code: int = 0, verb: str = "") -> list[dict[str, Any]]:
    """Runs a command with --json; its lines, each checked."""
    result = CliRunner().invoke(build_app(only=args[0]), [*args, "--json"])
    assert result.exit_code == code, result.output
    assert result.stdout.isascii()
    assert result.stdout.endswith("\n")
    found = [json.loads(line) for line in result.stdout.splitlines()]
    for line in found:
        check(line, verb or args[0])
    assert [line["event"] for line in found].count(found[-1]["event"]) == 1
    assert (found[-1]["event"], found[-1]["exit_code"]) == ("error" if code else "result", code)
    assert sorted(line["elapsed"] for line in found) == [line["elapsed"] for line in found]
    return found


def of(found: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in found if line["event"] == event]


def test_a_video() -> None:
    args = ["--steps", "3", "--high-noise-steps", "2", "--preview", "proj", "-o", "猫 cat.gif", "-W", "40"]
    found = lines(*VIDEO, *args)
    assert found[0]["event"] == "start"
    assert (found[0]["verb"], found[0]["version"]) == ("vid-gen", sdsage.__version__)
    stages = [(line["stage"], line["expert"], line["steps"]) for line in of(found, "stage")]
    assert stages[-4:] == [
        ("sample", "high-noise", 2),
        ("sample", "low-noise", 3),
        ("decode", None, 0),
        ("encode", None, 0),
    ]
    assert [name for name, _, _ in stages[:-4]] == ["load", "encode_text"]
    steps = [line for line in of(found, "step") if line["stage"] == "sample"]
    assert [(s["expert"], s["step"], s["steps"], s["overall_step"], s["overall_steps"]) for s in steps] == [
        ("high-noise", 1, 2, 1, 5),
        ("high-noise", 2, 2, 2, 5),
        ("low-noise", 1, 3, 3, 5),
        ("low-noise", 2, 3, 4, 5),
        ("low-noise", 3, 3, 5, 5),
    ]
    assert steps[0]["seconds_left"] is None  # the first step tells nothing
    assert steps[1]["seconds_left"] == pytest.approx(3 * steps[1]["seconds"], abs=0.01)
    assert steps[-1]["seconds_left"] == 0
    assert [(p["file"], p["step"]) for p in of(found, "preview")] == [("preview.webp", n) for n in (1, 2, 1, 2, 3)]
    assert Path("preview.webp").is_file()
    assert [line["text"] for line in of(found, "warning")] == ["width 40 is not possible with this model: using 48"]
    assert found[-1]["files"] == ["猫 cat.gif"]
    assert found[-1]["width"] == 48
    attention = {entry["module"]: entry for entry in found[-1]["attention"]}
    assert attention["high-noise"]["kernel"] == attention["low-noise"]["kernel"] == "ordinary"
    assert attention["high-noise"]["calls"] * 3 == attention["low-noise"]["calls"] * 2


def test_pictures_with_the_engine_s_messages() -> None:
    found = lines(*PICTURE, "--steps", "2", "-b", "2", "-s", "-1", "-v")
    assert {line["level"] for line in of(found, "log")} >= {"debug", "info"}
    assert any("was drawn" in line["text"] for line in of(found, "note"))
    left = [(line["overall_step"], line["overall_steps"]) for line in of(found, "step") if line["stage"] == "sample"]
    assert left == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert found[-1]["files"] == ["output_0.png", "output_1.png"]


def test_seeds_are_all_counted() -> None:
    found = lines(*PICTURE, "--steps", "2", "--seeds", "5,9", "--hires", "--hires-scale", "2", "-o", "{seed}.png")
    done = [(line["overall_step"], line["overall_steps"]) for line in of(found, "step") if line["stage"] == "sample"]
    assert done == [(i + 1, 8) for i in range(8)]
    assert found[-1]["results"] == [{"seed": 5, "files": ["5.png"]}, {"seed": 9, "files": ["9.png"]}]


def test_quiet_leaves_the_last_line() -> None:
    assert len(lines(*PICTURE, "--steps", "1", "-q", "-W", "33")) == 1
    assert len(lines(*PICTURE, "--steps", "0", "-q", code=2)) == 1


def test_stderr_has_warnings_and_errors_alone() -> None:
    result = CliRunner().invoke(build_app(only="img-gen"), [*PICTURE, "--steps", "1", "-W", "33", "--json"])
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["warning"] * len(result.stderr.splitlines())
    assert "width 33" in result.stderr


def test_convert() -> None:
    lines(*PICTURE, "--print-params", verb="--print-params")  # makes the tiny models
    model = next(Path(os.environ["SDSAGE_CACHE_DIR"]).rglob("flux.gguf"))
    found = lines("convert", "-m", str(model), "--type", "q8_0")
    assert found[0]["event"] == "start"
    assert found[-1]["file"] == "output.gguf"
    assert lines("convert", "-m", str(model), code=2)[-1]["type"] == "OutputError"


def test_upscale_that_fails() -> None:
    Image.new("RGB", (3, 2), (1, 2, 3)).save("in.png")
    Path("x2.gguf").write_bytes(b"GGUF, but no more than that")
    found = lines("upscale", "-i", "in.png", "--upscale-model", "x2.gguf", code=2)
    assert (found[0]["event"], found[-1]["type"]) == ("start", "ModelError")


@pytest.mark.parametrize(
    "args", [["devices"], ["doctor", "--sass"], ["config", "show", "vid-gen", "--preset", "tiny-random"]]
)
def test_verbs_that_only_answer_give_one_line(args: list[str]) -> None:
    assert [line["event"] for line in lines(*args)] == ["result"]


def test_parameters_are_an_answer_too() -> None:
    found = lines(*PICTURE, "--print-params", verb="--print-params")
    assert [line["event"] for line in found] == ["start", "result"]
    assert found[-1]["parameters"]["ctx"]["diffusion_model_path"].endswith("flux.gguf")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_says_what_is_wrong_as_a_line(verb: str) -> None:
    assert "json" in [option.key for option in of_verb(verb)]
    found = lines(verb, "--no-such-option", code=2)
    assert [line["event"] for line in found] == ["error"]
    assert found[0]["type"] == "UsageError"
    assert "--no-such-option" in found[0]["text"]


BAD = {
    "no model": (["vid-gen", "-p", "x"], "no model was given"),
    "several": ([*VIDEO, "--steps", "0", "-o", "x.avi"], "--steps 0"),
    "no such file": ([*VIDEO, "--vae", "no.gguf"], "--vae no.gguf"),
    "config": ([*VIDEO, "--config", "no.toml"], "--config no.toml"),
    "preset": (["vid-gen", "--preset", "tony"], "tony"),
    "missing value": (["img-gen", "--steps"], "requires an argument"),
    "unknown verb": (["vidgen"], "vidgen"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_before_the_run_are_lines(name: str, folder: Path) -> None:
    args, said = BAD[name]
    if name == "missing value":
        args = ["img-gen", "--json", "--steps"]
        result = CliRunner().invoke(build_app(only="img-gen"), args)
        found = [json.loads(line) for line in result.stdout.splitlines()]
    else:
        found = lines(*args, code=2)
    assert said in found[-1]["text"]
    assert {line["event"] for line in found[:-1]} <= {"start"}
    assert os.listdir(folder) == []


def test_several_problems_are_several_lines_of_one_text() -> None:
    text = lines(*BAD["several"][0], code=2)[-1]["text"].splitlines()
    assert len(text) == 2


def test_an_interrupt_is_the_last_line(folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": PACKAGE}
    command = [sys.executable, "-P", "-m", "sdsage", *VIDEO, "--steps", "5000", "--json", "-o", "cat.gif"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True, preexec_fn=hear_interrupts) as process:
        assert process.stdout is not None
        for line in process.stdout:  # each arrives when it happens
            if '"step"' in line and '"sample"' in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read().splitlines()
        assert process.wait() == 130
    last = json.loads(rest[-1])
    check(last, "vid-gen")
    assert (last["event"], last["exit_code"], last["text"]) == ("error", 130, "interrupted")
    assert os.listdir(folder) == []


@given(st.dictionaries(st.text(), st.text() | st.floats() | st.none() | st.lists(st.text(alphabet=st.characters()))))
def test_any_value_is_one_line_of_json(values: dict[str, Any]) -> None:
    line = as_json({"value": values})
    assert line.isascii()
    assert len(line.splitlines()) == 1
    back = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert set(back["value"]) == set(values)


def test_a_file_name_of_any_bytes_comes_back() -> None:
    name = os.fsdecode(b"cat-\xff.png")
    assert os.fsencode(json.loads(as_json({"file": name}))["file"]) == b"cat-\xff.png"


def test_nothing_follows_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    out = Console({"json": True})
    out.result({})
    out.message("warning", "late")
    out.failure("later", 1, OSError())
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == ["result"]


def test_every_event_and_verb_is_documented() -> None:
    sections = set(tables())
    assert {"start", "stage", "step", "preview", "warning", "note", "log", "result", "error"} <= sections
    for verb in VERBS:
        assert any(re.match(f"result of .*{verb}", name) for name in sections), verb
