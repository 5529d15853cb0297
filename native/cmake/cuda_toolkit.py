"""Finds the CUDA compiler for a build. Prints the path of its nvcc.

    python cuda_toolkit.py --into FOLDER [--cublas] [--cc CC]     the system's, else the wheels joined to FOLDER
    python cuda_toolkit.py --system [--cublas]                    the system's alone; exit code 1 if there is none
    python cuda_toolkit.py --wheels --into FOLDER [--cublas]      the wheels alone

The system's compiler is the one that CUDACXX names, else nvcc on PATH, in CUDA_HOME/bin or in CUDA_PATH/bin.
With --cublas its toolkit must hold cuBLAS too. The wheels are NVIDIA's on the Python package index (groups cuda-build
and cuda-engine of pyproject.toml), as far as the Python that runs this can import them.

NVIDIA's wheels share one folder, nvidia/cu13, which is not laid out as a toolkit: libraries have no plain .so name and
lie in lib instead of lib64, and there is no libcuda to link against. FOLDER gets the usual layout: links, and copies of
the headers. pip unpacks them anew for every isolated build; copies that stay as they are let the next build compile
nothing.
"""

import argparse
import filecmp
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

WHEELS = "cu13"  # folder below site-packages/nvidia of CUDA 13's wheels
LIBRARY_FOLDERS = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
# The joined toolkit is made of links and ELF libraries: on Windows there is none.
ADVICE = (
    ": install NVIDIA's CUDA toolkit, from which builds on Windows are made"
    if sys.platform == "win32"
    else ", and none of NVIDIA's wheels in {prefix}. Install a CUDA toolkit, or run\n  {command}"
)
STUB_ERROR = 34  # CUDA_ERROR_STUB_LIBRARY, what a call of NVIDIA's own stub returns


class ToolkitError(Exception):
    """Shown as one message, without a traceback."""


# --- the system's ----------------------------------------------------------------------------------------------------


def nvcc_candidates() -> Iterator[str]:
    if named := os.environ.get("CUDACXX"):
        if shutil.which(named) is None:
            raise ToolkitError(f"CUDACXX names {named}, which is not a program")
        yield named
    if found := shutil.which("nvcc"):
        yield found
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        folder = os.environ.get(variable)
        if folder and (found := shutil.which(str(Path(folder) / "bin" / "nvcc"))):  # on Windows it ends in .exe
            yield found


def toolkit_root(nvcc: str) -> Path | None:
    """Where nvcc says that its toolkit lies; nvcc itself may be a link or a script."""
    done = subprocess.run([nvcc, "-v", "sdsage_no_such_file"], capture_output=True, text=True)
    found = re.search(r"^#\$ TOP=(.*)$", done.stdout + done.stderr, re.M)
    return Path(found[1].strip()) if found else None


def has_cublas(root: Path) -> bool:
    if sys.platform == "win32":
        return (root / "lib" / "x64" / "cublas.lib").exists() and (root / "include" / "cublas_v2.h").exists()
    libraries = [root / folder for folder in LIBRARY_FOLDERS]
    headers = [root / "include"]
    if Path("/usr") in root.parents:  # a distribution's package puts them with all others
        libraries += Path("/usr/lib").glob("*-linux-gnu")
        headers.append(Path("/usr/include"))
    return any((f / "libcublas.so").exists() for f in libraries) and any((f / "cublas_v2.h").exists() for f in headers)


def system_nvcc(cublas: bool) -> str | None:
    """The compiler that the machine offers, or None."""
    for nvcc in nvcc_candidates():
        root = toolkit_root(nvcc)
        if root is not None and (not cublas or has_cublas(root)):
            return nvcc
    return None


# --- the wheels' -----------------------------------------------------------------------------------------------------


def find_wheels(cublas: bool) -> Path | None:
    """The folder nvidia/cu13 with a compiler, and with cuBLAS if asked for."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        root = Path(place) / WHEELS
        if (root / "bin" / "nvcc").is_file() and (not cublas or list(root.glob("lib/libcublas.so.*"))):
            return root
    return None


def link(path: Path, target: Path) -> None:
    """A link that is left alone when it is right, so that nothing looks new to a build."""
    if path.is_symlink() and path.readlink() == target:
        return
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def link_all(folder: Path, targets: dict[str, Path]) -> None:
    """Links of these names in `folder`, and no others."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.is_symlink() and old.name not in targets:
            old.unlink()
    for name, target in targets.items():
        link(folder / name, target)


def copy_changed(source: Path, target: Path) -> None:
    """Makes `target` a copy of the folder `source`; a file that is the same already is not touched."""
    if target.is_symlink():
        target.unlink()
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        if not (source / old.name).exists():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    for entry in source.iterdir():
        copy = target / entry.name
        if entry.is_dir():
            copy_changed(entry, copy)
        elif not (copy.is_file() and filecmp.cmp(entry, copy, shallow=False)):
            shutil.copy2(entry, copy)


def library_links(lib: Path) -> dict[str, Path]:
    """Every library under its own name, and libX.so.13 also as libX.so, for the linker."""
    links = {file.name: file for file in lib.iterdir() if file.is_file()}
    for name in sorted(links):
        links.setdefault(re.sub(r"\.so\.[\d.]+$", ".so", name), links[name])
    return links


def make_driver_stub(stubs: Path, include: Path, cc: str) -> None:
    """libcuda.so to link against: every function that cuda.h declares. The real one comes with the driver."""
    declared = subprocess.run([cc, "-E", "-P", str(include / "cuda.h")], capture_output=True, text=True)
    names = sorted(set(re.findall(r"\bCUresult\s+(cu\w+)\s*\(", declared.stdout)))
    if not names:
        raise ToolkitError(f"{cc} -E {include / 'cuda.h'} shows no function of the driver:\n{declared.stderr}")
    text = "".join(f"int {name}(void) {{ return {STUB_ERROR}; }}\n" for name in names)
    source, library = stubs / "cuda_stub.c", stubs / "libcuda.so"
    if library.exists() and source.exists() and source.read_text() == text:
        return
    stubs.mkdir(parents=True, exist_ok=True)
    source.write_text(text)
    command = [cc, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ToolkitError(f"{' '.join(command)} failed:\n{done.stderr}")


def join_wheels(wheels: Path, into: Path, cc: str) -> str:
    """A toolkit in `into`, made from `wheels`. Returns its nvcc."""
    into.mkdir(parents=True, exist_ok=True)
    # bin file by file: nvcc looks for its toolkit beside the folder that it is called in
    link_all(into / "bin", {file.name: file for file in (wheels / "bin").iterdir()})
    link_all(into / "lib64", library_links(wheels / "lib"))
    link(into / "lib", Path("lib64"))
    link(into / "nvvm", wheels / "nvvm")
    copy_changed(wheels / "include", into / "include")
    make_driver_stub(into / "lib64" / "stubs", into / "include", cc)
    return str(into / "bin" / "nvcc")


def wheels_nvcc(into: Path, cublas: bool, cc: str) -> str:
    wheels = find_wheels(cublas) if sys.platform != "win32" else None
    if wheels is None:
        what, group = ("CUDA compiler with cuBLAS", "cuda-engine") if cublas else ("CUDA compiler", "cuda-build")
        without = next(nvcc_candidates(), None)
        raise ToolkitError(
            f"no {what}: no toolkit (CUDACXX, nvcc on PATH, CUDA_HOME, CUDA_PATH)"
            + (f" but {without}, which lacks it" if without else "")
            + ADVICE.format(prefix=sys.prefix, command=f"{sys.executable} -m pip install --group {group}")
        )
    return join_wheels(wheels, into, cc)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--system", action="store_true", help="never look at the wheels")
    only.add_argument("--wheels", action="store_true", help="never look at the system")
    parser.add_argument("--into", type=Path, help="folder that gets the joined toolkit")
    parser.add_argument("--cublas", action="store_true", help="cuBLAS must be there too")
    parser.add_argument("--cc", default=os.environ.get("CC", "cc"), help="C compiler for the driver stub")
    args = parser.parse_args()
    if not args.system and args.into is None:
        parser.error("--into FOLDER is missing")
    try:
        nvcc = None if args.wheels else system_nvcc(args.cublas)
        if nvcc is None and args.system:
            sys.exit(1)
        found = nvcc or wheels_nvcc(Path(os.path.abspath(args.into)), args.cublas, args.cc)
        print(Path(found).as_posix())  # as CMake writes paths
    except ToolkitError as error:
        sys.exit(f"sdsage: {error}")


if __name__ == "__main__":
    main()
