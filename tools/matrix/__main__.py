"""Compiles what of ours goes into the library with many toolkits and compilers, and says what compiled with what.

    python tools/matrix [nvrtc] [nvcc] [clang] [host]     all of them without a name; `make test-matrix`
    python tools/matrix --kept                            compiles nothing: the results so far, the others as not tried

Toolkits come from NVIDIA's wheels into build/matrix (13 GB). A run that was interrupted goes on where it was. The
table goes to docs/builds.md and benchmarks/results/build_matrix.json when all parts have run.
"""

import sys

import cells as cells_of_runs
import clang
import host
import nvcc
import nvrtc
import report
from cells import FAILED, CannotCompile, Cell, digest
from record import KERNELS, tree_hash
from toolkits import NVCC, NVRTC, toolkit
from upstream import edits_hash

PARTS = {"nvrtc": nvrtc.cells, "nvcc": nvcc.cells, "clang": clang.cells, "host": host.cells}


def same_kernels(cells: list[Cell]) -> list[str]:
    """Every toolkit and architecture must have compiled the same set: NVRTC's list here, nvcc's from launch/*.cu."""
    sets = {tuple(cell.names): cell for cell in cells if cell.names}
    return [] if len(sets) < 2 else [f"{c.part} {c.by} {c.what}: {len(names)} kernels" for names, c in sets.items()]


def versions() -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Of the toolkits' wheels, and of the compilers that are installed."""
    toolkits, compilers = {}, {}
    for version in (*NVRTC, *NVCC):
        try:
            toolkits[version] = toolkit(version).wheels
        except CannotCompile:
            continue
    for name, (_, compiler) in host.COMPILERS.items():
        try:
            compilers[name] = host.version_of(compiler)
        except CannotCompile:
            continue
    return toolkits, compilers


def main(asked: list[str]) -> int:
    if asked == ["--kept"]:
        cells_of_runs.only_kept = True
        asked = []
    if wrong := [name for name in asked if name not in PARTS]:
        print(f"tools/matrix: {wrong[0]} is no part: name some of {', '.join(PARTS)}, or none for all", file=sys.stderr)
        return 2
    cells = [cell for name, make in PARTS.items() if not asked or name in asked for cell in make()]
    trees = {
        "native/sage_cuda": tree_hash(KERNELS),
        "glue": digest(nvcc.GLUE),
        "shim": digest([nvcc.ROOT / "native" / "sd_cli"]),
        "edits": edits_hash(),
    }
    record = report.make_record(cells, trees, *versions())
    print(report.plain(record))
    for line in (differ := same_kernels(cells)):
        print(f"not the same kernels everywhere: {line}", file=sys.stderr)
    failed = [cell for cell in cells if cell.state == FAILED]
    print(f"\n{record['counts']}", flush=True)
    if not asked and not differ:
        report.write(record)
        print(f"written: {report.RECORD.name}, {report.PAGE.name}")
    return 1 if failed or differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
