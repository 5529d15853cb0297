"""The records of the last checks on a GPU, and what has changed since: of the kernels and of their place in the engine.

python tests/sage/record.py kernels|engine hash               tree hash
python tests/sage/record.py kernels|engine write JUNIT.xml LIBRARY [MORE.xml]
                                                           the record, if every test passed
python tests/sage/record.py kernels|engine unverified "why"   puts the line for the present tree into UNVERIFIED.md
"""

import hashlib
import json
import platform
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
UNVERIFIED = ROOT / "UNVERIFIED.md"


@dataclass(frozen=True)
class Part:
    """What is checked on a GPU as one.

    Attributes:
        name: what UNVERIFIED.md calls it.
        paths: folders and files that the hash is of.
        command: what checks it.
        more: what a second run of tests is of.
        groups: of the engine's edits (native/ggml-patched/edits) that the hash is of as well.
    """

    name: str
    paths: tuple[Path, ...]
    record: Path
    command: str
    more: str
    groups: tuple[str, ...] = ()

    @property
    def start(self) -> str:
        """Of its line in UNVERIFIED.md; then the tree hash's first 12 digits, a colon, and why."""
        return f"- {self.name} "


KERNELS = Part(
    "native/sage_cuda",
    (ROOT / "native" / "sage_cuda",),
    RESULTS / "gpu_check.json",
    "tools/gpu_check.sh",
    "tests_passed_portable_fp16",  # fp16 with the code of GPUs that have none of their own
)
ENGINE = Part(
    "SageAttention, levers and offloading in the engine",
    (
        ROOT / "native" / "ggml-patched" / "cuda",
        ROOT / "native" / "ggml-patched" / "glue" / "sdsage_attention.hpp",
        ROOT / "native" / "ggml-patched" / "glue" / "sdsage_conv.hpp",
        ROOT / "native" / "ggml-patched" / "glue" / "sdsage_levers.hpp",
        ROOT / "native" / "ggml-patched" / "glue" / "sdsage_models.hpp",
        ROOT / "native" / "ggml-patched" / "glue" / "sdsage_offload.hpp",
        ROOT / "native" / "sd_cli" / "src" / "attention.cpp",
        ROOT / "native" / "sd_cli" / "src" / "levers.cpp",
        ROOT / "native" / "sd_cli" / "src" / "offload.cpp",
    ),
    RESULTS / "gpu_engine.json",
    "tools/gpu_engine.sh",
    "attention_cases_passed",
    ("sage", "flash", "levers", "offload"),
)


def files_of(path: Path) -> list[tuple[str, Path]]:
    """Names, relative to a folder, and files. Notes and what a build leaves do not count."""
    if path.is_file():
        return [(path.name, path)]
    found = []
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        parts = file.relative_to(path).parts
        if file.suffix == ".md" or parts[0].startswith("build") or "__pycache__" in parts or file.name.startswith("."):
            continue
        found.append(("/".join(parts), file))
    return found


def edit_groups() -> Any:
    """The table of the engine's edits."""
    folder = str(ROOT / "native" / "ggml-patched")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import edits  # type: ignore[import-not-found]

    return edits.GROUPS


def tree_hash(part: Part = KERNELS) -> str:
    """sha256 over names and contents, in the order of the names."""
    digest = hashlib.sha256()
    for name, file in (found for path in part.paths for found in files_of(path)):
        content = file.read_bytes()
        digest.update(f"{name}\n{len(content)}\n".encode() + content)
    if part.groups:
        digest.update(repr([g.edits for g in edit_groups() if g.name in part.groups]).encode())
    return digest.hexdigest()


def line_hash(line: str, part: Part) -> str:
    return line.removeprefix(part.start).split(":")[0].strip()


def complaint(tree: str, record: dict[str, Any] | None, notes: str, part: Part = KERNELS) -> str:
    """'' where the record is of this tree, or UNVERIFIED.md says of this tree that it is not."""
    lines = [line for line in notes.splitlines() if line.startswith(part.start)]
    if record is not None and record["tree"] == tree:
        return f"the GPU check has run on this tree: delete from UNVERIFIED.md {lines[0]!r}" if lines else ""
    if [line_hash(line, part) for line in lines] == [tree[:12]]:
        return ""
    last = f"last run on a GPU {record['date']} as {record['tree'][:12]}" if record else "never run on a GPU"
    return (
        f"{part.name} is {tree[:12]}, {last}: run {part.command} on a machine with a GPU, or say so by `python "
        f'tests/sage/record.py {NAMES[part]} unverified "what changed, why it was not run"`'
    )


NAMES = {KERNELS: "kernels", ENGINE: "engine"}
PARTS = {name: part for part, name in NAMES.items()}


def load(part: Part = KERNELS) -> dict[str, Any] | None:
    return json.loads(part.record.read_text(encoding="utf-8")) if part.record.is_file() else None


def drop_line(notes: str, part: Part) -> str:
    return "".join(line for line in notes.splitlines(keepends=True) if not line.startswith(part.start))


def write_unverified(why: str, part: Part = KERNELS) -> None:
    old = UNVERIFIED.read_text(encoding="utf-8") if UNVERIFIED.is_file() else ""
    line = f"{part.start}{tree_hash(part)[:12]}: {why}\n"
    UNVERIFIED.write_text(drop_line(old, part) + line, encoding="utf-8")


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


def write(junit: Path, library: Path, more: Path | None = None, part: Part = KERNELS) -> None:
    """`more`: a second run of tests, under the name that the part has for it."""
    record = {
        "tree": tree_hash(part),
        "tests_passed": passed(junit),
        "tests_skipped": skips(junit),
        **({part.more: passed(more)} if more else {}),
        **gpu(),
        "library_sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": part.command,
    }
    part.record.parent.mkdir(parents=True, exist_ok=True)
    part.record.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


def main(args: list[str]) -> None:
    part = PARTS.get(args[0]) if args else None
    match args[1:]:
        case ["hash"] if part:
            print(tree_hash(part))
        case ["write", junit, library] if part:
            write(Path(junit), Path(library), None, part)
        case ["write", junit, library, more] if part:
            write(Path(junit), Path(library), Path(more), part)
        case ["unverified", why] if part:
            write_unverified(why, part)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
