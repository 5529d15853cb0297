"""Kernels that changed since they last ran on a GPU are named in UNVERIFIED.md."""

from pathlib import Path

import pytest
import record
from record import KERNELS, NAMES, UNVERIFIED, Part, complaint, tree_hash

START = KERNELS.start
TREE = "0123456789abcdef" * 4
OTHER = "f" * 64


@pytest.mark.parametrize("part", NAMES, ids=NAMES.values())
def test_what_runs_on_a_gpu_ran_there_or_is_listed(part: Part) -> None:
    notes = UNVERIFIED.read_text(encoding="utf-8") if UNVERIFIED.is_file() else ""
    said = complaint(tree_hash(part), record.load(part), notes, part)
    assert not said, said


@pytest.mark.parametrize(
    ("recorded", "notes", "says"),
    [
        (TREE, "", ""),
        (OTHER, "", "run tools/gpu_check.sh"),
        (None, "", "never run on a GPU"),
        (OTHER, f"# Unverified\n{START}0123456789ab: a comment\n", ""),
        (None, f"{START}0123456789ab: new\n", ""),
        (OTHER, f"{START}ffffffffffff: of another tree\n", "run tools/gpu_check.sh"),
        (TREE, f"{START}0123456789ab: left over\n", "delete"),
    ],
)
def test_what_the_record_and_the_notes_must_say(recorded: str | None, notes: str, says: str) -> None:
    said = complaint(TREE, {"tree": recorded, "date": "today"} if recorded else None, notes)
    assert said == "" if says == "" else says in said


def test_the_hash_sees_names_and_contents_but_no_notes(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    file = tmp_path / "kernels" / "a.cu"
    file.write_text("one")
    part = Part("", (tmp_path,), tmp_path, "", "")
    first = tree_hash(part)
    (tmp_path / "NOTES.md").write_text("measured")
    assert tree_hash(part) == first
    file.write_text("two")
    second = tree_hash(part)
    file.rename(tmp_path / "kernels" / "b.cu")
    assert len({first, second, tree_hash(part)}) == 3


JUNIT = """<testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="1">
<testcase><skipped message="one device"/></testcase></testsuite></testsuites>"""


def test_a_failed_check_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    junit, library = tmp_path / "junit.xml", tmp_path / "lib.so"
    library.write_bytes(b"")
    part = Part(
        "native/sage_cuda", KERNELS.paths, tmp_path / "results" / "gpu_check.json", "tools/gpu_check.sh", KERNELS.more
    )
    monkeypatch.setattr(record, "gpu", lambda: {"device": "made up"})
    for tests, failures in ((5, 1), (1, 0)):  # a failure; nothing but skips
        junit.write_text(JUNIT.format(tests, failures))
        with pytest.raises(SystemExit, match="no record"):
            record.write(junit, library, None, part)
        assert record.load(part) is None
    junit.write_text(JUNIT.format(5, 0))
    portable = tmp_path / "portable.xml"
    portable.write_text(JUNIT.format(3, 1))
    with pytest.raises(SystemExit, match="no record"):
        record.write(junit, library, portable, part)
    portable.write_text(JUNIT.format(3, 0))
    record.write(junit, library, portable, part)
    made = record.load(part)
    assert made is not None
    assert made["tests_passed_portable_fp16"] == 2
    assert (made["tree"], made["tests_passed"], made["tests_skipped"]) == (tree_hash(), 4, {"one device": 1})


def test_the_line_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = tmp_path / "UNVERIFIED.md"
    notes.write_text(f"# Unverified\n{START}ffffffffffff: older\nother\n")
    monkeypatch.setattr(record, "UNVERIFIED", notes)
    record.write_unverified("newer")
    assert notes.read_text() == f"# Unverified\nother\n{START}{tree_hash()[:12]}: newer\n"
    assert complaint(tree_hash(), None, notes.read_text()) == ""
