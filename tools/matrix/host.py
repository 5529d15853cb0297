"""What runs on the host, by the compilers of the distribution, as C++17 and as C++20."""

import re
import shutil
import tempfile

import nvcc
from cells import FOLDER, ROOT, CannotCompile, Cell, commands, configure, digest, kept, run
from toolkits import NVCC, toolkit
from upstream import edits_hash

# C and C++ of one compiler
COMPILERS = {
    "gcc 11": ("gcc-11", "g++-11"),
    "gcc 12": ("gcc-12", "g++-12"),
    **{f"clang {n}": (f"clang-{n}", f"clang++-{n}") for n in (14, 15, 16, 19)},
}
STANDARDS = ("17", "20")
ENGINE = FOLDER / "engine"
SHIM = ("api.cpp", "attention.cpp", "devices.cpp", "job.cpp", "params_json.cpp")
CHOOSER = ("choose.cpp", "error.cpp")
# Behind nvcc, which splits them: of the kernels those that are empty for the architecture, which is quick.
OF_NVCC = {"library": ("api.cu", "qk_int8_pv_f8_d64.cu", "qk_int8_pv_f16_sm90_d64.cu"), "glue": ("sage_node.cu",)}
ARCHITECTURE = "--generate-code=arch=compute_80,code=[sm_80]"
SOURCES = [
    ROOT / "native" / folder for folder in ("sage_cuda", "sd_cli", "cmake", "ggml-patched/cuda", "ggml-patched/glue")
]


def version_of(compiler: str) -> str:
    if shutil.which(compiler) is None:
        raise CannotCompile(f"{compiler} is not installed here")
    return run([compiler, "-dumpfullversion", "-dumpversion"]).strip()


def with_standard(words: list[str], standard: str) -> list[str]:
    return [re.sub(r"^(-std=\w+\+\+)\w+$", rf"\g<1>{standard}", word) for word in words]


def compile_files(found: dict[str, list[str]], names: tuple[str, ...], compiler: str, standard: str) -> int:
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            run([compiler, *with_standard(found[name][1:], standard), "-o", f"{folder}/{name}.o"])
    return len(names)


def shim(compiler: str, standard: str) -> tuple[int, list[str]]:
    """The commands of an engine that is configured once, with another compiler."""
    configure(ROOT, ENGINE, "SD_CUDA=OFF", "SD_USE_UPSTREAM_GGML=OFF", "SDSAGE_TESTS=ON")
    found = commands(ENGINE, *(f"/{name}" for name in SHIM + CHOOSER))
    return compile_files(found, SHIM + CHOOSER, compiler, standard), []


def behind_nvcc(compiler: str, standard: str) -> tuple[int, list[str]]:
    count = 0
    for part, names in OF_NVCC.items():
        build = nvcc.library_folder(NVCC[0]) if part == "library" else nvcc.glue_folder(NVCC[0])
        found = commands(build, *(f"/{name}" for name in names))
        for name, words in found.items():
            kept_words = [word for word in words if not word.startswith("--generate-code=")]
            found[name] = [kept_words[0], "-ccbin", compiler, ARCHITECTURE, *kept_words[1:]]
        count += compile_files(found, names, next(iter(found.values()))[0], standard)
    return count, []


def cells() -> list[Cell]:
    """After those of nvcc, whose build folders it reads."""
    found = []
    wheels = toolkit(NVCC[0]).wheels
    for name, (_, compiler) in COMPILERS.items():
        try:
            version = version_of(compiler)
        except CannotCompile as error:
            found.append(Cell("host", name, "compiler", "cannot", why=str(error)))
            continue
        depends = digest(SOURCES, version, edits_hash(), SHIM, CHOOSER, OF_NVCC, wheels)
        for standard in STANDARDS:
            for what, make in (("shim", shim), ("nvcc", behind_nvcc)):
                found.append(
                    kept("host", name, f"{what} C++{standard}", depends, lambda m=make, c=compiler, s=standard: m(c, s))
                )
    return found
