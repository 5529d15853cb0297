"""One result of the matrix. They stay in build/matrix/cells: with the same versions and sources none is made again."""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "matrix"
# What a build listens to: further flags, and another upstream than the pinned one.
OF_BUILDS = r"NVCC_\w+_FLAGS|C\w*FLAGS|SDSAGE_(?!CACHE_DIR|UPSTREAM_SDIST)\w+"
only_kept = False  # compile nothing: earlier results alone
sys.path[:0] = [str(ROOT / "tests" / "sage"), str(ROOT / "native" / "cmake"), str(ROOT / "native" / "ggml-patched")]

from record import files_of  # noqa: E402

OK, CANNOT, FAILED, OPEN = "ok", "cannot", "failed", "open"


class CannotCompile(Exception):
    """The tools can't do this whatever the sources are: the text says why."""


class CompileError(Exception):
    """The sources did not compile: the text is what the compiler said."""


@dataclass(frozen=True)
class Cell:
    """Attributes:
    part: of the matrix: nvrtc, nvcc, glue, clang or host.
    by: the toolkit or compiler, as the tables name it.
    what: the architecture, files or language standard.
    count: of kernels or files that compiled.
    why: nothing compiled.
    names: of the kernels, where they were looked at.
    """

    part: str
    by: str
    what: str
    state: str = OK
    count: int = 0
    why: str = ""
    names: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.part:6} {self.by:16} {self.what:28} {self.state:7} {self.count or ''} {self.why}".rstrip()


def digest(paths: Iterable[Path], *more: object) -> str:
    """Of files and folders, by their content, and of what else a result depends on."""
    found = hashlib.sha256(repr(more).encode())
    for path in paths:
        for name, file in files_of(path):
            found.update(f"{name}\n".encode() + file.read_bytes())
    return found.hexdigest()


def run(command: list[str], cwd: Path = ROOT) -> str:
    """What it printed. Raises CompileError with that where it fails."""
    env = {name: value for name, value in os.environ.items() if not re.fullmatch(OF_BUILDS, name)}
    ran = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ran.returncode != 0:
        raise CompileError(f"{shlex.join(command)}\n{ran.stdout}")
    return ran.stdout


def configure(source: Path, build: Path, *definitions: str) -> None:
    """With CMake; the commands of all files are in compile_commands.json then."""
    launchers = [f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("C", "CXX", "CUDA")]
    options = [f"-D{d}" for d in ("CMAKE_EXPORT_COMPILE_COMMANDS=ON", *definitions)]
    with_ccache = launchers if shutil.which("ccache") else []
    run(["cmake", "-S", str(source), "-B", str(build), "-G", "Ninja", *options, *with_ccache])


def commands(build: Path, *sources: str) -> dict[str, list[str]]:
    """How the files whose paths end in `sources` are compiled there: the compiler first, no output."""
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        if entry["file"].endswith(sources):
            words = [word for word in shlex.split(entry["command"]) if word.rpartition("/")[2] != "ccache"]
            at = words.index("-o")
            found[Path(entry["file"]).name] = words[:at] + words[at + 2 :]
    return found


def shortened(said: str) -> str:
    """The first error of a compiler, without folders of this machine."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    first = next((line for line in lines if re.search(r"\berror\b|\bfatal\b", line, re.I)), lines[-1] if lines else "")
    return re.sub(r"[^\s'\"(]*/(?=[\w.+-]+)", "", first)[:300]


def kept(part: str, by: str, what: str, depends: str, make: Callable[[], tuple[int, list[str]]]) -> Cell:
    """The result for `depends` if there is one, else of `make`, which returns how many compiled, and kernels' names."""
    key = hashlib.sha256("\n".join((part, by, what, depends)).encode()).hexdigest()
    file = FOLDER / "cells" / f"{key}.json"
    if file.is_file():
        cell = Cell(**json.loads(file.read_text(encoding="utf-8")))
        if cell.state == OK or only_kept:
            print(f"{cell} (kept)", flush=True)
            return cell
    cell = Cell(part, by, what, OPEN, why="not tried yet") if only_kept else made(part, by, what, make)
    if cell.state in (OK, CANNOT):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(cell)), encoding="utf-8")
    print(cell, flush=True)
    return cell


def made(part: str, by: str, what: str, make: Callable[[], tuple[int, list[str]]]) -> Cell:
    try:
        count, names = make()
        return Cell(part, by, what, OK, count, "", names)
    except CannotCompile as error:
        return Cell(part, by, what, CANNOT, why=shortened(str(error)))
    except CompileError as error:
        log = FOLDER / "logs" / f"{part}-{by}-{what}.log".replace(" ", "-")
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(str(error), encoding="utf-8")
        print(f"what the compiler said: {log}", file=sys.stderr)
        return Cell(part, by, what, FAILED, why=shortened(str(error)))
