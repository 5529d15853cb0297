"""The image, the workflows and the wheels' settings: they name what is there."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import try_wheel

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SETTINGS = [ROOT / "Dockerfile", ROOT / "tools" / "make_wheels.py", ROOT / "pyproject.toml", *WORKFLOWS]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def what_the_build_reads() -> set[str]:
    """Names of variables in the build's own files."""
    files = [ROOT / "CMakeLists.txt", *(ROOT / "native").rglob("*.cmake"), *(ROOT / "native").rglob("*.py")]
    return {name for file in files for name in re.findall(r"\b(?:SDSAGE_[A-Z_]+|MAX_JOBS)\b", read(file))}


@pytest.mark.parametrize("file", SETTINGS, ids=lambda file: file.name)
def test_every_variable_is_one_that_the_build_reads(file: Path) -> None:
    asked = set(re.findall(r"\b(?:SDSAGE_[A-Z_]*[A-Z]|MAX_JOBS)\b", read(file)))
    assert asked <= what_the_build_reads()


def test_every_make_target_and_file_that_a_workflow_calls_is_there() -> None:
    text = "\n".join(map(read, WORKFLOWS))
    targets = set(re.findall(r"\bmake ([a-z-]+)", text))
    assert targets
    assert targets <= set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.M))
    for name in {".ci/run", *re.findall(r"\btools/\w+\.py", text + read(ROOT / "pyproject.toml"))}:
        assert (ROOT / name).is_file()
    groups = set(re.findall(r"--group (?:\S*:)?([\w-]+)", text + read(ROOT / "pyproject.toml")))
    assert groups <= set(PROJECT["dependency-groups"])


def test_the_image_asks_for_extras_that_exist() -> None:
    extras = {name for found in re.findall(r"extras=([\w,]+)", read(ROOT / "Dockerfile")) for name in found.split(",")}
    assert extras == {"video", "hub", "cuda"}
    assert extras <= set(PROJECT["project"]["optional-dependencies"])


def test_the_image_is_built_without_what_git_ignores() -> None:
    """A library or a build folder of the host would become part of the image."""
    left_out = set(read(ROOT / ".dockerignore").split("\n"))
    for line in read(ROOT / ".gitignore").split():
        name = line.strip("/")
        pattern = {"__pycache__": "**/__pycache__", "demo.mp4": "*.mp4"}.get(name, name)
        covered = pattern in left_out or (re.fullmatch(r"\.\w+_cache", name) and ".*_cache" in left_out)
        assert covered or name == "*.egg-info", name


def test_the_trial_of_a_wheel_leaves_out_what_needs_the_build_folder() -> None:
    files = {path.name: read(path) for path in (ROOT / "tests").glob("test_*.py")}
    build = re.compile(r"^from conftest import .*\bBUILD\b|\bupstream_tree\b", re.M)
    assert {name for name, text in files.items() if build.search(text)} - {Path(__file__).name} <= set(
        try_wheel.LEFT_OUT
    )
    assert all((ROOT / "tests" / name).exists() for name in try_wheel.LEFT_OUT)


def test_weights_in_training_are_small_files_and_no_part_of_a_package() -> None:
    """Machines with a GPU take files of up to 16 MiB; pip's archives need none of them."""
    settings = PROJECT["tool"]["scikit-build"]
    assert "tools/tiny_model/weights" in settings["sdist"]["exclude"]
    assert settings["wheel"]["packages"] == ["sdsage"]
    for file in (ROOT / "tools" / "tiny_model" / "weights").rglob("*"):
        assert file.stat().st_size < 15 * 2**20, file
