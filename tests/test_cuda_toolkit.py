"""The program that finds the CUDA compiler, against made-up toolkits and wheels."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PROGRAM = ROOT / "native" / "cmake" / "cuda_toolkit.py"
CUDA_H = """
#define CUDAAPI
typedef int CUresult;
#define cuMemFree cuMemFree_v2
CUresult CUDAAPI cuInit(unsigned int Flags);
CUresult CUDAAPI cuMemFree(unsigned long long dptr);
"""


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def make_toolkit(root: Path, cublas: bool = True) -> Path:
    """A toolkit as far as the program looks. Returns its nvcc."""
    nvcc = write(root / "bin" / "nvcc", f"#!/bin/sh\necho '#$ _HERE_=x' >&2\necho '#$ TOP={root}' >&2\nexit 1\n")
    nvcc.chmod(0o755)
    if cublas:
        write(root / "include" / "cublas_v2.h")
        write(root / "lib64" / "libcublas.so")
    return nvcc


def make_wheels(site: Path, cublas: bool = True) -> Path:
    """What NVIDIA's wheels leave in a site-packages folder."""
    root = site / "nvidia" / "cu13"
    for name in ("bin/nvcc", "bin/nvcc.profile", "bin/crt/link.stub", "nvvm/bin/cicc", "include/cuda_runtime.h"):
        write(root / name)
    write(root / "include" / "cuda.h", CUDA_H)
    for name in ("libcudart.so.13", "libcudart_static.a", "cmake/x.cmake"):
        write(root / "lib" / name)
    if cublas:
        write(root / "lib" / "libcublas.so.13")
    return root


def path_without_nvcc() -> list[str]:
    return [f for f in os.environ["PATH"].split(os.pathsep) if not os.access(Path(f) / "nvcc", os.X_OK)]


def run(
    *options: str | Path, path: Path | None = None, site: Path | None = None, **env: str | Path
) -> subprocess.CompletedProcess[str]:
    """The program with nothing of this machine in sight but what is given; -S leaves the real site-packages out."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA", "PYTHON"))}
    clean["PATH"] = os.pathsep.join([str(path)] * (path is not None) + path_without_nvcc())
    if site is not None:
        clean["PYTHONPATH"] = str(site)
    env = {"CC": "/usr/bin/cc", **clean, **{k: str(v) for k, v in env.items()}}
    command = [sys.executable, "-S", str(PROGRAM), *map(str, options)]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def answer(*options: str | Path, **more: str | Path) -> str:
    done = run(*options, **more)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- the system's ----------------------------------------------------------------------------------------------------


def test_the_system_comes_first_in_the_order_of_cmake(tmp_path: Path) -> None:
    named, on_path, home, cuda_path = (make_toolkit(tmp_path / name) for name in ("named", "path", "home", "cuda_path"))
    make_wheels(tmp_path / "site")
    places: dict[str, str | Path] = {"site": tmp_path / "site", "CUDA_PATH": cuda_path.parents[1]}
    into = ("--into", tmp_path / "joined", "--cublas")
    assert answer(*into, **places) == str(cuda_path)
    places["CUDA_HOME"] = home.parents[1]
    assert answer(*into, **places) == str(home)
    places["path"] = on_path.parent
    assert answer(*into, **places) == str(on_path)
    places["CUDACXX"] = named
    assert answer(*into, **places) == str(named)
    assert answer("--system", **places) == str(named)
    assert not (tmp_path / "joined").exists()
    assert answer(*into, "--wheels", **places) == str(tmp_path / "joined" / "bin" / "nvcc")


def test_a_script_in_front_of_nvcc_is_followed_to_its_toolkit(tmp_path: Path) -> None:
    nvcc = make_toolkit(tmp_path / "toolkit")
    script = write(tmp_path / "bin" / "nvcc", f'#!/bin/sh\nexec {nvcc} "$@"\n')
    script.chmod(0o755)
    assert answer("--system", "--cublas", path=script.parent) == str(script)


@pytest.mark.parametrize("missing", ["include/cublas_v2.h", "lib64/libcublas.so"])
def test_a_toolkit_without_cublas_compiles_kernels_but_no_engine(missing: str, tmp_path: Path) -> None:
    nvcc = make_toolkit(tmp_path / "toolkit")
    (tmp_path / "toolkit" / missing).unlink()
    make_wheels(tmp_path / "site")
    places = {"path": nvcc.parent, "site": tmp_path / "site"}
    assert answer("--into", tmp_path / "joined", **places) == str(nvcc)
    assert answer("--into", tmp_path / "joined", "--cublas", **places) == str(tmp_path / "joined" / "bin" / "nvcc")
    assert run("--system", "--cublas", **places).returncode == 1


def test_a_compiler_named_by_hand_must_exist(tmp_path: Path) -> None:
    done = run("--system", path=make_toolkit(tmp_path).parent, CUDACXX="/no/such/nvcc")
    assert done.returncode == 1
    assert done.stderr == "sdsage: CUDACXX names /no/such/nvcc, which is not a program\n"


# --- the wheels' -----------------------------------------------------------------------------------------------------


def test_wheels_become_a_toolkit(tmp_path: Path) -> None:
    wheels = make_wheels(tmp_path / "site")
    joined = tmp_path / "joined"
    assert answer("--into", joined, site=tmp_path / "site") == str(joined / "bin" / "nvcc")
    assert not (joined / "bin").is_symlink()  # nvcc would look beside the folder it really lies in
    for name in ("bin/nvcc", "bin/nvcc.profile", "bin/crt", "nvvm"):
        assert (joined / name).readlink() == wheels / name
    assert (joined / "include" / "cuda.h").read_text() == CUDA_H
    names = {"libcudart.so", "libcudart.so.13", "libcudart_static.a", "libcublas.so", "libcublas.so.13"}
    assert {f.name for f in (joined / "lib64").iterdir()} == names | {"stubs"}
    assert (joined / "lib64" / "libcublas.so").resolve() == wheels / "lib" / "libcublas.so.13"
    assert (joined / "lib").resolve() == joined / "lib64"


def test_the_driver_stub_has_what_the_header_declares(tmp_path: Path) -> None:
    make_wheels(tmp_path / "site")
    answer("--into", tmp_path / "joined", site=tmp_path / "site")
    stub = ctypes.CDLL(str(tmp_path / "joined" / "lib64" / "stubs" / "libcuda.so"))
    assert (stub.cuInit(0), stub.cuMemFree_v2(0)) == (34, 34)  # CUDA_ERROR_STUB_LIBRARY
    assert not hasattr(stub, "cuMemFree")
    program = write(tmp_path / "a.c", "int cuInit(unsigned); int main(void) { return cuInit(0); }")
    link = ["cc", program, "-o", tmp_path / "a", f"-L{tmp_path}/joined/lib64/stubs", "-lcuda"]
    subprocess.run(link, check=True)
    needed = subprocess.run(["readelf", "-d", tmp_path / "a"], capture_output=True, text=True, check=True).stdout
    assert "[libcuda.so.1]" in needed


def times(folder: Path) -> dict[str, int]:
    return {str(f.relative_to(folder)): f.lstat().st_mtime_ns for f in folder.rglob("*")}


def test_joined_again_nothing_looks_new(tmp_path: Path) -> None:
    make_wheels(tmp_path / "site")
    answer("--into", tmp_path / "joined", site=tmp_path / "site")
    first = times(tmp_path / "joined")
    answer("--into", tmp_path / "joined", site=tmp_path / "site")
    assert times(tmp_path / "joined") == first


def test_the_same_wheels_unpacked_anew_compile_nothing(tmp_path: Path) -> None:
    """What an isolated build does each time: another folder, later file times."""
    make_wheels(tmp_path / "one")
    answer("--into", tmp_path / "joined", site=tmp_path / "one")
    first = times(tmp_path / "joined" / "include")
    (tmp_path / "one").rename(tmp_path / "gone")
    wheels = make_wheels(tmp_path / "two")
    for header in (wheels / "include").iterdir():
        os.utime(header, (2e9, 2e9))
    answer("--into", tmp_path / "joined", site=tmp_path / "two")
    assert times(tmp_path / "joined" / "include") == first
    assert (tmp_path / "joined" / "bin" / "nvcc").resolve() == wheels / "bin" / "nvcc"


def test_other_wheels_take_the_place_of_the_first(tmp_path: Path) -> None:
    wheels = make_wheels(tmp_path / "one")
    write(wheels / "include" / "old" / "old.h")
    answer("--into", tmp_path / "joined", site=tmp_path / "one")
    wheels = make_wheels(tmp_path / "two", cublas=False)
    write(wheels / "include" / "cuda_runtime.h", "// new")
    answer("--into", tmp_path / "joined", site=tmp_path / "two")
    joined = tmp_path / "joined"
    assert (joined / "bin" / "nvcc").resolve() == wheels / "bin" / "nvcc"
    assert not (joined / "lib64" / "libcublas.so").is_symlink()
    assert {f.name for f in (joined / "include").iterdir()} == {"cuda.h", "cuda_runtime.h"}
    assert (joined / "include" / "cuda_runtime.h").read_text() == "// new"


# --- nothing there ---------------------------------------------------------------------------------------------------


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    nothing = run("--into", tmp_path / "joined", "--cublas")
    assert nothing.returncode == 1
    assert "no CUDA compiler with cuBLAS" in nothing.stderr
    assert "pip install --group cuda-engine" in nothing.stderr
    kernels = run("--into", tmp_path / "joined")
    assert "pip install --group cuda-build" in kernels.stderr
    make_wheels(tmp_path / "site", cublas=False)
    nvcc = make_toolkit(tmp_path / "toolkit", cublas=False)
    half = run("--into", tmp_path / "joined", "--cublas", path=nvcc.parent, site=tmp_path / "site")
    assert half.returncode == 1
    assert f"{nvcc}, which lacks it" in half.stderr
    assert not (tmp_path / "joined").exists()
