"""The table of NOTES.md: registers, stack, spills and static shared memory per kernel and architecture.

Usage: configure with -DSAGE_CUDA_FLAGS="--use_fast_math;SHELL:-Xptxas -O3;SHELL:-Xptxas -v", then
ninja -v > build.log; python3 tests/ptxas_table.py build.log
"""

import re
import subprocess
import sys
from pathlib import Path


def rows(text):
    name = arch = spill = None
    for line in text.splitlines():
        if m := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            name, arch = m.groups()
        elif m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spill = m.groups()
        elif (m := re.search(r"Used (\d+) registers", line)) and name:
            shared = re.search(r"(\d+) bytes smem", line)
            yield name, arch, m.group(1), spill, shared.group(1) if shared else "0"
            name = None


def main():
    found = list(rows(Path(sys.argv[1]).read_text(encoding="utf-8")))
    names = sorted({r[0] for r in found})
    plain = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    short = {n: re.sub(r"void |sage::|\(\w+\)$|\((int|bool)\)", "", p) for n, p in zip(names, plain, strict=True)}
    archs = sorted({r[1] for r in found}, key=lambda a: (len(a.rstrip("af")), a))
    cell = {(r[0], r[1]): f"{r[2]}" + (f" ({r[3][1]}/{r[3][2]})" if r[3][1:] != ("0", "0") else "") for r in found}
    print("| kernel | " + " | ".join(archs) + " | static shared |")
    print("|---" * (len(archs) + 2) + "|")
    for n in sorted(names, key=short.get):
        shared = max((int(r[4]) for r in found if r[0] == n), default=0)
        print(f"| `{short[n]}` | " + " | ".join(cell.get((n, a), "-") for a in archs) + f" | {shared} |")


if __name__ == "__main__":
    main()
