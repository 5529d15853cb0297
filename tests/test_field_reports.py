"""docs/field-reports.md names tests that exist; and the tests of its rows that belong to nothing else."""

import ast
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, ctx_params, small_video
from tiny_cli import PICTURE, VIDEO, frames_of, run

import sdsage

ROWS = {"K": 18, "B": 7, "E": 9, "R": 5, "P": 5, "C": 4, "V": 4, "Q": 3, "D": 2}


@cache
def rows() -> dict[str, tuple[str, str]]:
    """Row -> its tests and its note."""
    text = (ROOT / "docs" / "field-reports.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| ([A-Z]\d\d) \|[^|]+\|([^|]*)\|([^|]*)\|$", text, flags=re.MULTILINE)
    assert len(found) == len({row for row, _, _ in found}), "a row stands twice"
    return {row: (tests, note.strip()) for row, tests, note in found}


@cache
def functions_of(path: str) -> set[str]:
    """Functions of a test file, those of classes as Class::function."""
    found = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return {name for name in found if name.split("::")[-1].startswith("test_")}


def test_every_row_is_there() -> None:
    letters = [row[0] for row in rows()]
    assert {letter: letters.count(letter) for letter in ROWS} == ROWS
    assert len(letters) == sum(ROWS.values()) == 57


@pytest.mark.parametrize("row", rows())
def test_a_row_names_tests_that_exist_or_says_why_not(row: str) -> None:
    text, note = rows()[row]
    names = re.findall(r"`([^`]+)`", text)
    assert names or note
    for name in names:
        path, _, function = name.partition("::")
        assert (ROOT / path).is_file(), name
        assert function in functions_of(path), name


# ---- rows without another place


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("asked", "used"), [(24, 21), (32, 29), (35, 33), (34, 33), (33, 33), (1, 1)])
def test_frame_counts(asked: int, used: int, video_context: Any) -> None:
    found = video_context.check_size(small_video(video_frames=asked))
    assert [(a.what, a.asked, a.used) for a in found] == ([("frame count", asked, used)] if asked != used else [])


@pytest.mark.parametrize(
    ("preset", "asked", "used"),
    [
        ("tiny-random", (1920, 1080), (1920, 1088)),
        ("tiny-random", (1280, 720), (1280, 720)),
        ("tiny-random", (640, 360), (640, 368)),
        ("tiny-ti2v", (1280, 720), (1280, 736)),
        ("tiny-ti2v", (1920, 1080), (1920, 1088)),
    ],
)
def test_sizes_of_films(preset: str, asked: tuple[int, int], used: tuple[int, int], preset_files: Any) -> None:
    """Both kinds of Wan 2.2 need multiples of their own."""
    with sdsage.Context(ctx_params(preset_files(preset))) as context:
        found = {a.what: a.used for a in context.check_size(small_video(width=asked[0], height=asked[1]))}
    assert (found.get("width", asked[0]), found.get("height", asked[1])) == used


def test_model_files_that_do_not_make_a_model(preset_files: Any) -> None:
    """Each message names the option that is to be used."""
    files = preset_files("tiny-random")
    model, vae = files["diffusion_model"], files["vae"]
    args = ["vid-gen", "-p", "x", "-o", "x.gif", "-q"]
    said = [
        run(*args, "-m", model, "--vae", vae, "--t5xxl", files["t5xxl"], code=2).stderr,
        run(*args, "--diffusion-model", "missing.gguf", code=2).stderr,
        run(*args, "--diffusion-model", model, "--vae", vae, code=2).stderr,
    ]
    for text, words in zip(said, ("--diffusion-model", "missing.gguf does not exist", "--t5xxl"), strict=True):
        assert words in text
    assert len(set(said)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("command", [PICTURE, VIDEO])
def test_800_by_1200(command: list[str]) -> None:
    run(*command, "-W", "800", "-H", "1200", "--video-frames", "1", "-o", "a.webp")
    assert frames_of("a.webp").shape == (1, 1200, 800, 3)


def test_no_variable_turns_sage_attention_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it would be an error: this build or this machine has no CUDA."""
    if any(device.kind == "gpu" for device in sdsage.devices()):
        pytest.skip("this machine has a GPU")
    run(*PICTURE, "-o", "a.png")
    for name in (
        "SAGE_ATTN",
        "SAGE_ATTENTION",
        "SDSAGE_SAGE_ATTN",
        "SDSAGE_SAGE_KERNEL",
        "GGML_SAGE_ATTN",
        "SD_SAGE_ATTN",
    ):
        monkeypatch.setenv(name, "1")
    found = json.loads(run(*PICTURE, "--json", "-o", "b.png").stdout)
    assert {entry["kernel"] for entry in found["attention"]} == {"ordinary"}
    assert np.array_equal(frames_of("a.png"), frames_of("b.png"))
    assert sorted(os.listdir()) == ["a.png", "b.png"]


def test_the_gain_is_told_as_it_was_measured() -> None:
    """The table of docs/attention.md against the file that benchmarks/step.py wrote; README leads there."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "step.json").read_text(encoding="utf-8"))["14b"]
    text = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    assert measured["device"].removeprefix("NVIDIA ") in text
    rows = {"flash": "ours, `--diffusion-fa`", "sage fp16": "`--sage-attn --sage-kernel fp16`"}
    for method, title in rows.items():
        cells = next(line for line in text.splitlines() if line.startswith(f"| {title}")).split("|")
        for cell, frames in zip(cells[2:4], ("33 frames", "81 frames"), strict=True):
            seconds = measured["methods"][method][frames]["median of the later steps"]
            assert float(cell.strip(" *")) == pytest.approx(seconds, abs=0.006)
    assert "## When not to use it" in text
    assert "docs/attention.md" in (ROOT / "README.md").read_text(encoding="utf-8")
