"""The table of docs/builds.md, and the tool that makes it, without compiling anything."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools" / "matrix"))
import cells
import nvrtc
import report
from host import with_standard
from record import KERNELS, UNVERIFIED, tree_hash
from test_chooser import KNOWN


@pytest.fixture(scope="module")
def record() -> Any:
    return json.loads(report.RECORD.read_text(encoding="utf-8"))


def test_the_page_holds_the_recorded_table(record: Any, tmp_path: Path) -> None:
    page = tmp_path / "builds.md"
    page.write_text(report.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    report.put_into(page, record)
    assert page.read_text(encoding="utf-8") == report.PAGE.read_text(encoding="utf-8")
    assert str(len(record["kernels"])) in report.PART.search(page.read_text(encoding="utf-8"))[0]


def test_nothing_failed_and_what_can_not_compile_has_a_reason(record: Any) -> None:
    assert "failed" not in record["counts"]
    assert all(cell["state"] == "ok" or cell["why"] for cell in record["cells"])
    counts = {
        cell["count"] for cell in record["cells"] if re.fullmatch(r"\d+a?", cell["what"]) and cell["state"] == "ok"
    }
    assert counts == {len(record["kernels"])}


def test_the_choosers_table_knows_the_toolkits_as_they_are(record: Any) -> None:
    """Which architectures a toolkit compiles: the tests of the chooser take it from their own table."""
    tried = [c for c in record["cells"] if c["part"] in ("nvrtc", "nvcc") and c["state"] != "open"]
    tried = [c for c in tried if re.fullmatch(r"\d+a?", c["what"])]
    assert tried
    for cell in tried:
        major, minor = cell["by"].split(".")
        known = KNOWN[int(major) * 1000 + int(minor) * 10].split()
        assert (cell["what"] in known) == (cell["state"] == "ok"), cell


def test_the_recorded_kernels_are_those_of_the_sources(record: Any) -> None:
    sources = "".join(
        p.read_text(encoding="utf-8") for d in ("kernels", "quantize") for p in nvrtc.SAGE.glob(f"{d}/*.cuh")
    )
    written = set(re.findall(r"__global__\s+void\s+(?:__launch_bounds__\(.*?\)\s+)?(\w+)\(const", sources))
    asked = [name for names in nvrtc.UNITS.values() for name in names]
    assert {re.match(r"sage::(\w+)<", name)[1] for name in asked} == written
    told = [
        line for line in UNVERIFIED.read_text(encoding="utf-8").splitlines() if line.startswith("- docs/builds.md: ")
    ]
    if record["trees"]["native/sage_cuda"] != tree_hash(KERNELS) and any(
        tree_hash(KERNELS)[:12] in line for line in told
    ):
        return  # the table is of an earlier tree, and UNVERIFIED.md says of this one that it is
    assert not told
    assert len(record["kernels"]) == len(set(asked))
    assert all(any(f"{len(name)}{name}" in kernel for kernel in record["kernels"]) for name in written)


def test_a_result_is_kept_for_the_same_sources_and_a_failure_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cells, "FOLDER", tmp_path)
    made = []

    def make() -> tuple[int, list[str]]:
        made.append(1)
        if len(made) == 1:
            raise cells.CompileError(
                "In file included from /home/me/a.cu:1:\n/home/me/src/b.cuh(7): error: no such thing\n"
            )
        return 3, ["k"]

    first = cells.kept("nvrtc", "12.0", "80", "one", make)
    assert (first.state, first.why) == (cells.FAILED, "b.cuh(7): error: no such thing")
    assert "/home/me/src/b.cuh" in (tmp_path / "logs" / "nvrtc-12.0-80.log").read_text()
    again = [cells.kept("nvrtc", "12.0", "80", "one", make) for _ in range(2)]
    assert again == [cells.Cell("nvrtc", "12.0", "80", cells.OK, 3, "", ["k"])] * 2
    assert len(made) == 2
    cells.kept("nvrtc", "12.0", "80", "other sources", make)
    assert len(made) == 3
    assert "(kept)" in capsys.readouterr().out


def test_the_standard_of_a_command_is_replaced() -> None:
    assert with_standard(["-O3", "-std=gnu++17", "-c"], "20") == ["-O3", "-std=gnu++20", "-c"]
    assert with_standard(["-std=c++17"], "20") == ["-std=c++20"]


def test_an_unknown_part_is_refused() -> None:
    ran = subprocess.run([sys.executable, ROOT / "tools" / "matrix", "hosts"], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "hosts is no part" in ran.stderr
    assert "nvrtc, nvcc, clang, host" in ran.stderr
