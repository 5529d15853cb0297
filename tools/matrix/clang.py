"""Clang as CUDA compiler, host side: launching code and glue with the headers of toolkits whose nvcc is in no wheel."""

import tempfile
from pathlib import Path

import nvcc
from cells import CannotCompile, Cell, CompileError, commands, digest, kept, run
from host import version_of
from toolkits import NVCC, NVRTC, Toolkit, toolkit
from upstream import edits_hash

COMPILER = "clang++-19"
OPTIONS = (
    "-x",
    "cuda",
    "--cuda-host-only",
    "-std=c++17",
    "-O1",
    "-Wno-unknown-cuda-version",
    "-Wno-unknown-attributes",
)


def compiled(kit: Toolkit, *words: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run([COMPILER, *OPTIONS, f"--cuda-path={kit.root}", *words, "-o", f"{folder}/out.o"])


def probe(kit: Toolkit) -> None:
    """Raises CannotCompile where an empty file does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.cu"
        empty.write_text("")
        try:
            compiled(kit, "-c", str(empty))
        except CompileError as error:
            raise CannotCompile(str(error)) from None


def options_of(words: list[str]) -> list[str]:
    """Definitions and folders, without the toolkit's own."""
    return [word for word in words if word.startswith(("-D", "-I"))]


def library(kit: Toolkit) -> tuple[int, list[str]]:
    probe(kit)
    sources = sorted([*nvcc.SAGE.glob("launch/*.cu"), *nvcc.SAGE.glob("src/*.cu")])
    for source in sources:
        compiled(kit, '-DSAGE_ARCHITECTURES="89"', f"-I{nvcc.SAGE}/include", "-c", str(source))
    return len(sources), []


def glue(kit: Toolkit) -> tuple[int, list[str]]:
    probe(kit)
    found = commands(nvcc.glue_folder(NVCC[0]), *(f"/{name}" for name in nvcc.GLUE_FILES))
    for words in found.values():
        compiled(kit, *options_of(words), "-c", words[-1])
    return len(found), []


def cells() -> list[Cell]:
    """After those of nvcc, whose build folders it reads."""
    found = []
    try:
        version = version_of(COMPILER)
    except CannotCompile as error:
        return [Cell("clang", COMPILER, "compiler", "cannot", why=str(error))]
    for number in (*NVRTC, NVCC[0]):
        try:
            kit = toolkit(number)
        except CannotCompile as error:
            found.append(Cell("clang", number, "toolkit", "cannot", why=str(error)))
            continue
        depends = digest([nvcc.SAGE, *nvcc.GLUE], kit.wheels, version, OPTIONS, edits_hash())
        found.append(kept("clang", number, "library", depends, lambda kit=kit: library(kit)))
        found.append(kept("clang", number, "glue", depends, lambda kit=kit: glue(kit)))
    return found
