"""The kernel library for every architecture, and the engine's glue, by each nvcc of NVIDIA's wheels."""

import functools
import re
import tempfile
from pathlib import Path

from cells import FOLDER, ROOT, CannotCompile, Cell, CompileError, commands, configure, digest, kept, run
from toolkits import ARCHITECTURES, NVCC, Toolkit, cuobjdump, toolkit
from upstream import edits_hash

SAGE = ROOT / "native" / "sage_cuda"
CMAKE = [ROOT / "CMakeLists.txt", ROOT / "native" / "cmake", ROOT / "native" / "ggml-patched" / "CMakeLists.txt"]
GLUE = [ROOT / "native" / "ggml-patched" / folder for folder in ("cuda", "glue")]
GLUE_FILES = ("sage_node.cu", "levers.cu", "linear.cu", "conv.cu", "conv_node.cu", "ggml-cuda.cu")
GLUE_ARCHITECTURES = "80-real;90a-real;120a-real"
ENTRY = re.compile(rb"\0\.text\.(_ZN4sage\w+)(?=\0)")


def known(kit: Toolkit) -> list[str]:
    """Of the architectures, those that this nvcc compiles for; it lists 90, not 90a."""
    numbers = re.findall(r"\d+", run([str(kit.root / "bin" / "nvcc"), "--list-gpu-code"]))
    return [arch for arch in ARCHITECTURES if arch.rstrip("a") in numbers]


def library_folder(version: str) -> Path:
    return FOLDER / f"library-{version}"


def glue_folder(version: str) -> Path:
    return FOLDER / f"glue-{version}"


@functools.cache
def kernels_by_architecture(version: str) -> dict[str, list[str]]:
    """Builds the library; the kernels in its machine code."""
    kit, build = toolkit(version), library_folder(version)
    asked = f"CMAKE_CUDA_ARCHITECTURES={';'.join(known(kit))}"
    configure(SAGE, build, "SAGE_CUDA_SHARED=ON", f"CMAKE_CUDA_COMPILER={kit.root}/bin/nvcc", asked)
    run(["cmake", "--build", str(build), "-j", "1"])
    found: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        run([cuobjdump(), "-xelf", "all", str(build / "libsage_cuda.so")], Path(folder))
        for cubin in Path(folder).glob("*.cubin"):
            arch = re.search(r"\.sm_(\w+)\.cubin$", cubin.name)[1]
            found.setdefault(arch, set()).update(name.decode() for name in ENTRY.findall(cubin.read_bytes()))
    return {arch: sorted(names) for arch, names in found.items()}


def kernels(kit: Toolkit, arch: str) -> tuple[int, list[str]]:
    if arch not in known(kit):
        raise CannotCompile("this nvcc does not know the architecture")
    names = kernels_by_architecture(kit.version).get(arch, [])
    if not names:
        raise CompileError(f"error: libsage_cuda.so has no machine code for {arch}")
    return len(names), names


def library(kit: Toolkit) -> tuple[int, list[str]]:
    kernels_by_architecture(kit.version)
    return len(commands(library_folder(kit.version), ".cu", ".cpp")), []


def glue(kit: Toolkit) -> tuple[int, list[str]]:
    """What `make cuda-glue` compiles: our files in ggml's CUDA backend, and the one of ggml's that our edits change."""
    build = glue_folder(kit.version)
    compiler = f"CMAKE_CUDA_COMPILER={kit.root}/bin/nvcc"
    architectures = f"CMAKE_CUDA_ARCHITECTURES={GLUE_ARCHITECTURES}"
    configure(ROOT, build, "SD_CUDA=ON", "SD_USE_UPSTREAM_GGML=OFF", compiler, architectures)
    names = "|".join(map(re.escape, GLUE_FILES))
    targets = re.findall(rf"^(\S*/(?:{names})\.o):", run(["ninja", "-C", str(build), "-t", "targets", "all"]), re.M)
    if len(targets) != len(GLUE_FILES):
        raise CompileError(f"error: {len(targets)} targets for {GLUE_FILES}")
    run(["ninja", "-C", str(build), "-j", "1", *targets])
    return len(targets), []


def depends_of_library(kit: Toolkit) -> str:
    return digest([SAGE], kit.wheels)


def depends_of_glue(kit: Toolkit) -> str:
    return digest([*CMAKE, *GLUE, SAGE], kit.wheels, GLUE_ARCHITECTURES, edits_hash())


def cells() -> list[Cell]:
    found = []
    for version in NVCC:
        try:
            kit = toolkit(version)
        except CannotCompile as error:
            found.append(Cell("nvcc", version, "toolkit", "cannot", why=str(error)))
            continue
        depends = depends_of_library(kit)
        for arch in ARCHITECTURES:
            found.append(kept("nvcc", version, arch, depends, lambda kit=kit, arch=arch: kernels(kit, arch)))
        found.append(kept("nvcc", version, "library", depends, lambda kit=kit: library(kit)))
        found.append(kept("nvcc", version, "glue", depends_of_glue(kit), lambda kit=kit: glue(kit)))
    return found
