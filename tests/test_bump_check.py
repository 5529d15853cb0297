"""How the table of edits fits another upstream: the pinned one, and trees that have drifted."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_upstream import PATCHED, load, make_tree

PROGRAM = PATCHED / "bump_check.py"


@pytest.fixture(scope="module")
def bump() -> ModuleType:
    return load(PROGRAM)


@pytest.fixture
def tree(bump: ModuleType, tmp_path: Path) -> Path:
    """Every anchor once."""
    make_tree(bump.upstream, tmp_path / "tree")
    return tmp_path / "tree"


def run(given: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, str(PROGRAM), str(given)], capture_output=True, text=True)


def of_file(bump: ModuleType, root: Path, file: str) -> list[Any]:
    return [f for findings in bump.check(root).values() for f in findings if f.edit.file == file]


def edit_of(bump: ModuleType, file: str, where: str) -> Any:
    """An edit with a long anchor that is alone on its lines."""
    edits = [e for g in bump.GROUPS for e in g.edits if e.file == file and e.where == where]
    return max(edits, key=lambda e: len(e.anchor))


def replace(root: Path, file: str, old: str, new: str) -> None:
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new))


def test_the_pinned_upstream_fits_and_shows_no_sign(bump: ModuleType, tmp_path: Path) -> None:
    try:
        sdist = bump.upstream.find_sdist()
    except bump.upstream.UpstreamError:
        pytest.skip("the source package is not at hand: SDSAGE_UPSTREAM_DIR was given")
    bump.upstream.unpack(sdist, tmp_path / "pinned")
    found = bump.check(tmp_path / "pinned")
    assert [(name, f.edit.file) for name, fs in found.items() for f in fs if f.state != "fits"] == []
    assert bump.signs(tmp_path / "pinned") == {}


def test_a_tree_that_fits(tree: Path) -> None:
    before = {p: p.read_bytes() for p in tree.rglob("*") if p.is_file()}
    done = run(tree)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 drifted, 0 is lost" in done.stdout
    assert before == {p: p.read_bytes() for p in tree.rglob("*") if p.is_file()}


def test_a_changed_line_shows_what_is_there_now(bump: ModuleType, tree: Path) -> None:
    replace(tree, "src/util.cpp", "static char log_buffer[", "static char the_log_buffer[")
    drifted = [f for f in of_file(bump, tree, "src/util.cpp") if f.state != "fits"]
    assert [f.state for f in drifted] == ["drifted"]
    assert any(line.startswith("+ static char the_log_buffer[") for line in drifted[0].more)
    done = run(tree)
    assert done.returncode == 1
    assert "drifted: src/util.cpp, at 'static char log_buffer" in done.stdout
    assert "1 drifted, 0 is lost" in done.stdout  # the others are told too


def test_an_anchor_that_is_there_twice(bump: ModuleType, tree: Path) -> None:
    edit = edit_of(bump, "src/util.cpp", "=")
    text = (tree / "src/util.cpp").read_text()
    (tree / "src/util.cpp").write_text(text + "\n" + edit.anchor)
    states = [(f.state, f.more) for f in of_file(bump, tree, "src/util.cpp") if f.edit == edit]
    assert states[0][0] == "drifted"
    assert "2 times: lines [" in states[0][1][0]


def test_a_file_that_is_gone_and_one_that_moved(bump: ModuleType, tree: Path) -> None:
    (tree / "src/convert.cpp").rename(tree / "src/converting.cpp")
    findings = of_file(bump, tree, "src/convert.cpp")
    assert findings
    assert {f.state for f in findings} <= {"drifted", "is lost"}
    moved = [f for f in findings if f.state == "drifted"]
    assert moved
    assert all("src/converting.cpp" in f.more[-1] for f in moved)
    (tree / "src/converting.cpp").unlink()
    assert "is lost" in {f.state for f in of_file(bump, tree, "src/convert.cpp")}


@pytest.mark.parametrize("where", ["<", ">", "="])
def test_what_upstream_has_itself(bump: ModuleType, tree: Path, where: str) -> None:
    """Whatever its spaces."""
    edit = next(
        e
        for g in bump.GROUPS
        for e in g.edits
        if e.where == where and len(e.text) > 60 and e.anchor not in e.text and e.file.startswith("src/")
    )
    made = {"<": edit.text + edit.anchor, ">": edit.anchor + edit.text, "=": edit.text}[where]
    replace(tree, edit.file, edit.anchor, made.replace("    ", "\t"))
    found = [f.state for f in of_file(bump, tree, edit.file) if f.edit == edit]
    assert found == ["is there"]


def test_a_sign_names_the_group_and_its_drop_check(bump: ModuleType, tree: Path) -> None:
    header = tree / "include/stable-diffusion.h"
    header.write_text(header.read_text() + "\nSD_API void sd_cancel_generation(sd_ctx_t* sd_ctx);\n")
    assert set(bump.signs(tree)) == {"seam"}
    done = run(tree)
    assert done.returncode == 0
    assert "droppable? include/stable-diffusion.h has 'sd_cancel_generation('" in done.stdout


def test_signs_are_of_groups_that_can_go(bump: ModuleType) -> None:
    assert set(bump.SIGNS) <= {g.name for g in bump.GROUPS if not g.drop.startswith("never")}


def test_what_is_no_upstream_is_refused(bump: ModuleType, tree: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.tar.gz").write_text("no archive")
    (tree / bump.upstream.MARKER).write_text("abc\n")
    for given, said in (
        (tmp_path / "none", "neither a file nor a folder"),
        (tmp_path / "empty", "is no stable-diffusion.cpp"),
        (tmp_path / "text.tar.gz", "not a gzip file"),
        (tree, "carries our edits already"),
    ):
        done = run(given)
        assert done.returncode == 1
        assert said in done.stderr
        assert "Traceback" not in done.stderr
