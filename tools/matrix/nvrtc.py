"""The kernels' device code by NVRTC: machine code without a driver, without nvcc, without a host compiler.

    python tools/matrix/nvrtc.py SITE ROOT ARCHITECTURE     what a child process runs: prints JSON

NVRTC knows no header of the C++ library, and not every CUDA 12 brings its own. Of the three that the kernels include,
what they use is written here.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cells import ROOT, CannotCompile, Cell, CompileError, digest, kept
from cffi import FFI
from toolkits import ARCHITECTURES, NVRTC, Toolkit, toolkit

SAGE = ROOT / "native" / "sage_cuda"
DEVICE_CODE = [SAGE / folder for folder in ("common", "kernels", "quantize")]

SIZES = (64, 128)
BIAS = ("false", "true")
# Headers, and every instantiation of their kernels that launch/*.cu ask for; nvcc's library must hold the same.
UNITS = {
    "quantize/kv_stats.cuh quantize/quantize_v.cuh": [
        *(f"sage::{name}<{d}>" for name in ("kv_stats", "kv_stats_finish") for d in SIZES),
        *(f"sage::quantize<{d}, {f8}>" for d in SIZES for f8 in ("false", "true")),
    ],
    "kernels/qk_int8_pv_f16.cuh": [f"sage::qk_int8<sage::PvF16<{d}>, {bias}>" for d in SIZES for bias in BIAS],
    "kernels/qk_int8_pv_f16_sm90.cuh": [
        f"sage::qk_int8_sm90<sage::TileSm90<sage::PvF16Sm90<{d}>>, {bias}>" for d in SIZES for bias in BIAS
    ],
    "kernels/qk_int8_pv_f8_sm90.cuh": [
        f"sage::qk_int8_sm90<sage::TileSm90<sage::PvF8Sm90<{d}>>, {bias}>" for d in SIZES for bias in BIAS
    ],
    "kernels/qk_int8_pv_f8.cuh": [
        f"sage::qk_int8<sage::PvF8<{d}, {fp16}>, {bias}>" for d in SIZES for fp16 in ("false", "true") for bias in BIAS
    ],
}
INTEGERS = {8: "char", 16: "short", 32: "int", 64: "long"}  # of Linux
HEADERS = {
    "cstdint": "".join(f"typedef signed {c} int{n}_t;\ntypedef unsigned {c} uint{n}_t;\n" for n, c in INTEGERS.items()),
    "cfloat": "#define FLT_MAX 3.402823466e38f\n",
    "type_traits": """
namespace std {
template <bool x> struct integral { static constexpr bool value = x; };
using true_type = integral<true>;
using false_type = integral<false>;
template <bool, class A, class> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
template <bool c, class A, class B> using conditional_t = typename conditional<c, A, B>::type;
template <class T> struct decay { using type = T; };  // of what is no array and no function
template <class T> struct decay<const T> { using type = T; };
template <class T> struct decay<T &> : decay<T> {};
template <class T> using decay_t = typename decay<T>::type;
}
""",
}
OPTIONS = ("-std=c++17", "--use_fast_math", "-default-device")  # a lambda is a host function unless it is said

INVALID_OPTION = 5  # NVRTC_ERROR_INVALID_OPTION
DECLARATIONS = """
typedef void * nvrtcProgram;
int nvrtcCreateProgram(nvrtcProgram *, const char *, const char *, int, const char ** headers, const char ** names);
int nvrtcDestroyProgram(nvrtcProgram *);
int nvrtcAddNameExpression(nvrtcProgram, const char *);
int nvrtcCompileProgram(nvrtcProgram, int, const char ** options);
int nvrtcGetProgramLogSize(nvrtcProgram, size_t *);
int nvrtcGetProgramLog(nvrtcProgram, char *);
int nvrtcGetLoweredName(nvrtcProgram, const char *, const char **);
int nvrtcGetCUBINSize(nvrtcProgram, size_t *);
int nvrtcGetCUBIN(nvrtcProgram, char *);
const char * nvrtcGetErrorString(int);
"""


class Nvrtc:
    """One library, and the toolkit with its headers."""

    def __init__(self, library: Path, root: Path) -> None:
        self.ffi = FFI()
        self.ffi.cdef(DECLARATIONS)
        self.lib: Any = self.ffi.dlopen(str(library))
        self.include = root / "include"

    def texts(self, strings: list[str]) -> tuple[Any, list[Any]]:
        """An array of C strings, and what keeps them alive."""
        alive = [self.ffi.new("char[]", text.encode()) for text in strings]
        return self.ffi.new("const char *[]", alive), alive

    def check(self, status: int) -> None:
        if status != 0:
            raise CompileError(f"NVRTC error: {self.ffi.string(self.lib.nvrtcGetErrorString(status)).decode()}")

    def read(self, program: Any, what: str) -> bytes:
        size = self.ffi.new("size_t *")
        self.check(getattr(self.lib, f"nvrtcGet{what}Size")(program, size))
        buffer = self.ffi.new("char[]", size[0])
        self.check(getattr(self.lib, f"nvrtcGet{what}")(program, buffer))
        return bytes(self.ffi.buffer(buffer))

    def compile(self, source: str, kernels: list[str], arch: str) -> list[str]:
        """The kernels' names in their machine code. Raises CannotCompile where NVRTC doesn't know the architecture."""
        headers, headers_alive = self.texts(["#pragma once\n" + text for text in HEADERS.values()])
        names, names_alive = self.texts(list(HEADERS))
        program = self.ffi.new("nvrtcProgram *")
        self.check(self.lib.nvrtcCreateProgram(program, source.encode(), b"unit.cu", len(HEADERS), headers, names))
        for kernel in kernels:
            self.check(self.lib.nvrtcAddNameExpression(program[0], kernel.encode()))
        options, options_alive = self.texts([f"-arch=sm_{arch}", *OPTIONS, f"-I{SAGE}", f"-I{self.include}"])
        status = self.lib.nvrtcCompileProgram(program[0], len(options_alive), options)
        if status == INVALID_OPTION:
            raise CannotCompile("this NVRTC does not know the architecture")
        if status != 0:
            raise CompileError(self.read(program[0], "ProgramLog").decode())
        machine_code = self.read(program[0], "CUBIN")
        found = []
        for kernel in kernels:
            lowered = self.ffi.new("const char **")
            self.check(self.lib.nvrtcGetLoweredName(program[0], kernel.encode(), lowered))
            found.append(self.ffi.string(lowered[0]).decode())
            if b"\0.text." + found[-1].encode() + b"\0" not in machine_code:
                raise CompileError(f"error: the machine code lacks {found[-1]}")
        self.check(self.lib.nvrtcDestroyProgram(program))
        del headers_alive, names_alive
        return found


def compile_all(site: Path, root: Path, arch: str) -> list[str]:
    nvrtc = Nvrtc(next(site.glob("nvidia/*nvrtc/lib/libnvrtc.so.*")), root)
    major, minor = site.parent.name.removeprefix("cuda-").split(".")
    same = f'static_assert(__CUDACC_VER_MAJOR__ == {major} && __CUDACC_VER_MINOR__ == {minor}, "another toolkit\'s");\n'
    names = []
    for headers, kernels in UNITS.items():
        names += nvrtc.compile(same + "".join(f'#include "{h}"\n' for h in headers.split()), kernels, arch)
    return sorted(names)


def in_a_child(kit: Toolkit, arch: str) -> tuple[int, list[str]]:
    """NVRTCs of one major version share a name: one a process."""
    command = [sys.executable, __file__, str(kit.site), str(kit.root), arch]
    ran = subprocess.run(command, capture_output=True, text=True)
    try:
        told = json.loads(ran.stdout)
    except ValueError:
        raise CompileError(f"error: NVRTC ended with {ran.returncode}: {ran.stderr[-2000:]}") from None
    if "cannot" in told:
        raise CannotCompile(told["cannot"])
    if "failed" in told:
        raise CompileError(told["failed"])
    return len(told["names"]), told["names"]


def cells() -> list[Cell]:
    found = []
    for version in NVRTC:
        try:
            kit = toolkit(version)
        except CannotCompile as error:
            found.append(Cell("nvrtc", version, "toolkit", "cannot", why=str(error)))
            continue
        for arch in ARCHITECTURES:
            depends = digest(DEVICE_CODE, kit.wheels, UNITS, HEADERS, OPTIONS)
            found.append(kept("nvrtc", version, arch, depends, lambda kit=kit, arch=arch: in_a_child(kit, arch)))
    return found


def main(site: str, root: str, arch: str) -> None:
    try:
        told: dict[str, Any] = {"names": compile_all(Path(site), Path(root), arch)}
    except CannotCompile as error:
        told = {"cannot": str(error)}
    except CompileError as error:
        told = {"failed": str(error)}
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
