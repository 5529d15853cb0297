"""The record of the last GPU check, and what has changed since.

python tests/sage/record.py hash                      tree hash of native/sage_cuda
python tests/sage/record.py write JUNIT.xml LIBRARY [PORTABLE.xml]
                                                  benchmarks/results/gpu_check.json, if every test passed
python tests/sage/record.py unverified "why"      puts the line for the present tree into UNVERIFIED.md
"""

import hashlib
import json
import platform
import subprocess
import sys
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TREE = ROOT / "native" / "sage_cuda"
RECORD = ROOT / "benchmarks" / "results" / "gpu_check.json"
UNVERIFIED = ROOT / "UNVERIFIED.md"
START = "- native/sage_cuda "  # of its line in UNVERIFIED.md; then the tree hash's first 12 digits, a colon, and why


def tree_hash(tree: Path = TREE) -> str:
    """sha256 over names and contents, in the order of the names. Notes and what a build leaves do not count."""
    digest = hashlib.sha256()
    for path in sorted(p for p in tree.rglob("*") if p.is_file()):
        parts = path.relative_to(tree).parts
        if path.suffix == ".md" or parts[0].startswith("build") or "__pycache__" in parts or path.name.startswith("."):
            continue
        content = path.read_bytes()
        digest.update(f"{'/'.join(parts)}\n{len(content)}\n".encode() + content)
    return digest.hexdigest()


def line_hash(line: str) -> str:
    return line.removeprefix(START).split(":")[0].strip()


def complaint(tree: str, record: dict[str, Any] | None, notes: str) -> str:
    """'' where the record is of this tree, or UNVERIFIED.md says of this tree that it is not."""
    lines = [line for line in notes.splitlines() if line.startswith(START)]
    if record is not None and record["tree"] == tree:
        return f"the GPU check has run on this tree: delete from UNVERIFIED.md {lines[0]!r}" if lines else ""
    if [line_hash(line) for line in lines] == [tree[:12]]:
        return ""
    last = f"last run on a GPU {record['date']} as {record['tree'][:12]}" if record else "never run on a GPU"
    return (
        f"native/sage_cuda is {tree[:12]}, {last}: run tools/gpu_check.sh on a machine with a GPU, "
        'or say so by `python tests/sage/record.py unverified "what changed, why it was not run"`'
    )


def load() -> dict[str, Any] | None:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else None


def drop_line(notes: str) -> str:
    return "".join(line for line in notes.splitlines(keepends=True) if not line.startswith(START))


def write_unverified(why: str) -> None:
    old = UNVERIFIED.read_text(encoding="utf-8") if UNVERIFIED.is_file() else ""
    UNVERIFIED.write_text(drop_line(old) + f"{START}{tree_hash()[:12]}: {why}\n", encoding="utf-8")


def counts(junit: Path) -> dict[str, int]:
    found = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in ET.parse(junit).getroot().iter("testsuite"):
        for name in found:
            found[name] += int(suite.get(name, 0))
    return found


def skips(junit: Path) -> dict[str, int]:
    """Reasons of the skipped tests, each with its number."""
    found: dict[str, int] = {}
    for skipped in ET.parse(junit).getroot().iter("skipped"):
        reason = skipped.get("message") or ""
        found[reason] = found.get(reason, 0) + 1
    return found


def gpu() -> dict[str, str]:
    fields = ("name", "driver_version", "compute_cap", "memory.total")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", "0"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"record.py: nvidia-smi does not answer ({error}): no record")
    name, driver, capability, memory = (x.strip() for x in line.split(","))
    return {"device": name, "driver": driver, "compute_capability": capability, "memory": memory}


def passed(junit: Path) -> int:
    run = counts(junit)
    good = run["tests"] - run["failures"] - run["errors"] - run["skipped"]
    if run["failures"] or run["errors"] or not good:
        sys.exit(f"record.py: {good} passed, {run['failures']} failed, {run['errors']} errors: no record")
    return good


def write(junit: Path, library: Path, portable: Path | None = None) -> None:
    """`portable`: of the tests of fp16 with the code that GPUs without one of their own run."""
    record = {
        "tree": tree_hash(),
        "tests_passed": passed(junit),
        "tests_skipped": skips(junit),
        **({"tests_passed_portable_fp16": passed(portable)} if portable else {}),
        **gpu(),
        "library_sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": "tools/gpu_check.sh",
    }
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


def main(args: list[str]) -> None:
    match args:
        case ["hash"]:
            print(tree_hash())
        case ["write", junit, library]:
            write(Path(junit), Path(library))
        case ["write", junit, library, portable]:
            write(Path(junit), Path(library), Path(portable))
        case ["unverified", why]:
            write_unverified(why)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
