"""The results as a table, as JSON, and as a part of docs/builds.md."""

import json
import re
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cells import ROOT

RECORD = ROOT / "benchmarks" / "results" / "build_matrix.json"
PAGE = ROOT / "docs" / "builds.md"
START, END = "<!-- made by make test-matrix -->\n", "<!-- end of what make test-matrix made -->\n"
PART = re.compile(f"(?<={re.escape(START)}).*(?={re.escape(END)})", re.S)

Record = dict[str, Any]
Rows = list[list[str]]


def make_record(
    cells: list[Any], trees: dict[str, str], toolkits: dict[str, dict[str, str]], compilers: dict[str, str]
) -> Record:
    """What is committed. Kernels are named once: the set is the same everywhere, or the result is a failure."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "make test-matrix",
        "trees": trees,
        "counts": dict(sorted(Counter(cell.state for cell in cells).items())),
        "kernels": sorted({name for cell in cells for name in cell.names}),
        "cells": [{k: v for k, v in asdict(cell).items() if k != "names" and v not in ("", 0)} for cell in cells],
        "toolkits": toolkits,
        "compilers": compilers,
    }


def by_order(values: list[str]) -> list[str]:
    return list(dict.fromkeys(values))


def text_of(cell: Record | None) -> str:
    if cell is None:
        return ""
    return {"ok": str(cell.get("count", "")), "cannot": "-", "failed": "**failed**", "open": "?"}[cell["state"]]


def table(record: Record, part: str, columns: dict[str, str], head: str) -> Rows:
    """One row for each toolkit or compiler of a part; `columns`: what -> title."""
    cells = [cell for cell in record["cells"] if cell["part"] == part]
    found = {(cell["by"], cell["what"]): cell for cell in cells}
    rows = [[head, *columns.values()]]
    rows += [[by, *(text_of(found.get((by, what))) for what in columns)] for by in by_order([c["by"] for c in cells])]
    return rows


def architectures(record: Record) -> dict[str, str]:
    names = by_order([c["what"] for c in record["cells"] if c["part"] in ("nvrtc", "nvcc")])
    return {name: name for name in names if re.fullmatch(r"\d+a?", name)}


def reasons(record: Record) -> Rows:
    """What is not compiled, and why; the same toolkits, architectures and reason once."""
    titles = {"nvrtc": "NVRTC", "nvcc": "nvcc", "clang": "clang 19 with CUDA", "host": ""}
    by_tool: dict[tuple[str, str, str], list[str]] = {}
    for cell in record["cells"]:
        if cell["state"] != "ok":
            by_tool.setdefault((cell["part"], cell["by"], cell["why"]), []).append(cell["what"])
    together: dict[tuple[str, str, str], list[str]] = {}
    for (part, by, why), what in by_tool.items():
        together.setdefault((titles[part], ", ".join(what), why), []).append(by)
    rows = [[f"{title} {', '.join(by)}".strip(), what, why] for (title, what, why), by in together.items()]
    return [["with", "not compiled", "why"], *rows]


def sections(record: Record) -> list[tuple[str, Rows]]:
    archs = architectures(record)
    files = {"library": "kernel library", "glue": "engine's glue"}
    standards = {
        f"{what} C++{n}": f"{title}, C++{n}"
        for n in ("17", "20")
        for what, title in (("shim", "C++"), ("nvcc", "behind nvcc"))
    }
    return [
        ("Kernels compiled to machine code by NVRTC", table(record, "nvrtc", archs, "NVRTC")),
        (
            "By nvcc: kernels in the library, its source files, files of the glue",
            table(record, "nvcc", archs | files, "nvcc"),
        ),
        ("Clang 19 as CUDA compiler, host side: files", table(record, "clang", files, "headers of CUDA")),
        ("Host compilers: files", table(record, "host", standards, "compiler")),
        ("What does not compile", reasons(record)),
    ]


def markdown(record: Record) -> str:
    """The generated part of docs/builds.md."""
    trees = ", ".join(f"{name} {tree[:12]}" for name, tree in record["trees"].items())
    compilers = ", ".join(f"{name} {version}" for name, version in record["compilers"].items())
    lines = [f"{record['date']}: {trees}. Compilers: {compilers}.", ""]
    for title, rows in sections(record):
        lines += [f"### {title}", "", "| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows[1:]]
        lines.append("")
    return "\n".join(lines)


def plain(record: Record) -> str:
    lines = []
    for title, rows in sections(record):
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines += ["", title] + [
            "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
    return "\n".join(lines)


def write(record: Record) -> None:
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    put_into(PAGE, record)


def put_into(page: Path, record: Record) -> None:
    page.write_text(PART.sub(lambda _: markdown(record), page.read_text(encoding="utf-8")), encoding="utf-8")
