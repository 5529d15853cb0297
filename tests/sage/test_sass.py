"""The machine code inside libsage_cuda.so, read with cuobjdump: no GPU.

SAGE_CUDA_LIB names the library: that of `make kernels` holds 89 and 90a, that of `make kernels-all` every documented
architecture.
"""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import binding
import pytest
from binding import NO_LIBRARY, ROOT

SAGE = ROOT / "native" / "sage_cuda"
IN_CI = ["89", "90a"]
ARCHITECTURES = ["80", "86", "89", "90a", "100a", "120a"]
# Every instantiation of the attention kernels, and its part of the mangled name. The last one: is there a bias?
TYPES = {
    "fp16": "qk_int8INS_5PvF16ILi{}EEE",
    "fp16 wgmma": "qk_int8_sm90INS_8TileSm90INS_9PvF16Sm90ILi{}EEEEE",
    "hopper wgmma": "qk_int8_sm90INS_8TileSm90INS_8PvF8Sm90ILi{}EEEEE",
    "fp8": "qk_int8INS_4PvF8ILi{}ELb0EEE",
    "fp8++": "qk_int8INS_4PvF8ILi{}ELb1EEE",
}
KERNELS = {
    f"{kernel} {d}{' bias' * bias}": f"{mangled.format(d)}Lb{bias}E"
    for kernel, mangled in TYPES.items()
    for d in (64, 128)
    for bias in (0, 1)
}
# Their matrix instructions. Before 89 there is no FP8, 90a has wgmma for fp16, and nothing else has: those kernels are
# empty, and nobody launches them. Where FP8 mma.sync is emulated it is FP16's instruction.
NONE: set[str] = set()
EMULATED, NATIVE = {"IMMA", "HMMA"}, {"IMMA", "QMMA"}
OF_FP8 = {"80": NONE, "86": NONE, "89": NATIVE, "90a": EMULATED, "100a": EMULATED, "120a": NATIVE}


def matrix_instructions(name: str, arch: str) -> set[str]:
    if "wgmma" in name:
        return {"IGMMA", "HGMMA" if name.startswith("fp16") else "QGMMA"} if arch == "90a" else NONE
    if name.startswith("fp16"):
        return NONE if arch == "90a" else {"IMMA", "HMMA"}
    return OF_FP8[arch]


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str  # without its modifiers: IMMA
    target: int | None  # of a branch


def lacking(what: str) -> None:
    """CI builds and installs everything that these tests read; elsewhere they may be left out."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


@functools.cache
def find_cuobjdump() -> str | None:
    """The one of the wheel, which reads the code of any toolkit that we know, else that of the machine."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for found in Path(place).glob("cu*/bin/cuobjdump"):
            return str(found)
    return shutil.which("cuobjdump")


def cuobjdump(*options: str) -> str:
    """What it prints about the library."""
    tool, library = find_cuobjdump(), binding.library_path()
    if library is None:
        lacking(NO_LIBRARY)
    if tool is None:
        lacking("no cuobjdump: neither the wheel nvidia-cuda-cuobjdump nor one on PATH")
    done = subprocess.run([str(tool), *options, str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def compiled() -> set[str]:
    return set(re.findall(r"\.sm_(\w+)\.cubin", cuobjdump("--list-elf")))


@functools.cache
def disassembled(arch: str) -> dict[str, list[Instruction]]:
    """The instructions of every kernel, by its mangled name."""
    kernels: dict[str, list[Instruction]] = {}
    for line in cuobjdump("-sass", "-arch", f"sm_{arch}").splitlines():
        if named := re.match(r"\s*Function : (\w+)", line):
            code = kernels.setdefault(named[1], [])
        elif found := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ +)?([A-Z]\w*)([^;]*);", line):
            target = re.search(r"\b0x([0-9a-f]+)\)?\s*$", found[3]) if found[2] == "BRA" else None
            code.append(Instruction(int(found[1], 16), found[2], int(target[1], 16) if target else None))
    return kernels


def kernels_of(arch: str) -> dict[str, list[Instruction]]:
    if arch not in compiled():
        if arch in IN_CI:
            lacking(f"the library holds no code for {arch}")
        pytest.skip(f"the library holds no code for {arch}, as that of `make kernels-all` does")
    return disassembled(arch)


def kernel_of(arch: str, name: str) -> list[Instruction]:
    found = [code for mangled, code in kernels_of(arch).items() if KERNELS[name] in mangled]
    assert len(found) == 1, f"{len(found)} kernels for {arch} are called {KERNELS[name]}"
    return found[0]


def is_matrix(instruction: Instruction) -> bool:
    return instruction.name.endswith("MMA")


def loops(code: list[Instruction]) -> list[list[Instruction]]:
    """What lies between a branch back and its target, for the loops that hold matrix instructions."""
    spans = [(i.target, i.address) for i in code if i.target is not None and i.target < i.address]
    bodies = [[i for i in code if start <= i.address <= end] for start, end in spans]
    return [body for body in bodies if any(map(is_matrix, body))]


def test_the_listed_architectures_are_the_compiled_ones() -> None:
    """The API needs a GPU to say its list, which is the one text of its form in the library."""
    architectures = compiled()
    name = r"[1-9]\d{1,2}[af]?"
    library = Path(str(binding.library_path())).read_bytes()
    texts = [set(t.decode().split()) for t in re.findall(rf"\0({name}(?: {name})*)(?=\0)".encode(), library)]
    assert architectures in texts
    assert all(len(names) == 1 or names == architectures for names in texts)
    if not binding.why_no_gpu():
        assert set(binding.choose(binding.describe()).architectures.split()) == architectures


def test_doctor_reads_the_same_architectures() -> None:
    """Without cuobjdump, out of the file."""
    architectures = compiled()
    try:
        from sdsage._doctor.machine_code import gpu_code
    except ImportError as error:
        lacking(f"the package is not built: {error}")
    code = gpu_code(Path(str(binding.library_path())))
    assert set(code.machine_code) == architectures
    assert not code.ptx


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_of_the_sources_is_there(arch: str) -> None:
    sources = "".join(p.read_text(encoding="utf-8") for d in ("kernels", "quantize") for p in SAGE.glob(f"{d}/*.cuh"))
    written = set(re.findall(r"__global__\s+void\s+(?:__launch_bounds__\(.*?\)\s+)?(\w+)\(const", sources))
    assert len(written) == sources.count("__global__")
    names = list(kernels_of(arch))
    assert {kernel for kernel in written if not any(f"{len(kernel)}{kernel}" in name for name in names)} == set()
    assert sum("qk_int8" in name for name in names) == len(KERNELS)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_matrix_instructions(name: str, arch: str) -> None:
    found = {i.name for i in kernel_of(arch, name) if is_matrix(i)}
    assert found == matrix_instructions(name, arch)


@pytest.mark.parametrize(
    ("name", "arch"), [(n, a) for n in KERNELS for a in ARCHITECTURES if matrix_instructions(n, a)]
)
def test_the_main_loop_stays_in_registers(name: str, arch: str) -> None:
    code = kernel_of(arch, name)
    inside = {i for body in loops(code) for i in body}
    assert inside
    if "wgmma" not in name:  # whose last product stands behind the loop over keys
        assert all(i in inside for i in code if is_matrix(i))
    assert not [i for i in inside if i.name in ("LDL", "STL")]
