"""CUDA toolkits of NVIDIA's wheels, each in a folder of its own."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cells import FOLDER, CannotCompile
from cuda_toolkit import join_wheels

NVCC = ("13.0", "13.1", "13.2", "13.3", "13.4", "13.5")
NVRTC = ("12.0", "12.3", "12.4", "12.8", "12.9")
ARCHITECTURES = ("80", "86", "87", "89", "90a", "100a", "103a", "120a", "121a")

# Parts of the package cuda-toolkit, which names the wheels of one release. clang includes cuRAND's headers by itself.
PARTS = {
    "12": ("cccl", "cublas", "cudart", "curand", "nvcc", "nvrtc"),
    "13": ("cccl", "crt", "cublas", "cudart", "nvcc", "nvvm"),
}
CUOBJDUMP = "nvidia-cuda-cuobjdump==13.5.*"  # reads the machine code of older ones; some have none of their own


@dataclass(frozen=True)
class Toolkit:
    """Attributes:
    root: laid out as a toolkit: include, lib64, nvvm, bin, with nvcc from 13.0 on.
    site: what pip unpacked.
    wheels: their versions.
    """

    version: str
    root: Path
    site: Path
    wheels: dict[str, str]


def pip_install(site: Path, requirement: str) -> dict[str, str]:
    """Unpacks wheels into `site`, once; returns their names and versions."""
    done = site / ".complete"
    if not done.is_file() or done.read_text() != requirement:
        shutil.rmtree(site, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        ran = subprocess.run([*command, "--target", str(site), requirement], capture_output=True, text=True)
        if ran.returncode != 0:
            raise CannotCompile(f"pip install {requirement}: {ran.stderr.strip().splitlines()[-1]}")
        done.write_text(requirement)
    found = (info.name.removesuffix(".dist-info").rpartition("-") for info in site.glob("*.dist-info"))
    return {name.replace("_", "-"): version for name, _, version in sorted(found)}


def merge_wheels(wheels: Path, into: Path) -> None:
    """A toolkit of CUDA 12's wheels, which have a folder each: headers, ptxas and libdevice; none holds nvcc."""
    for kind in ("include", "bin", "nvvm"):
        for folder in sorted(wheels.glob(f"*/{kind}")):
            shutil.copytree(
                folder, into / kind, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__init__.py", "__pycache__")
            )
    for program in (into / "bin").iterdir():
        program.chmod(0o755)
    (into / ".merged").touch()


def toolkit(version: str) -> Toolkit:
    """Raises CannotCompile where the package index lacks it."""
    major = version.partition(".")[0]
    folder = FOLDER / f"cuda-{version}"
    site = folder / "site"
    wheels = pip_install(site, f"cuda-toolkit[{','.join(PARTS[major])}]=={version}.*")
    root = folder / "toolkit"
    if major == "12":
        if not (root / ".merged").is_file():
            shutil.rmtree(root, ignore_errors=True)
            merge_wheels(site / "nvidia", root)
    else:
        join_wheels(site / "nvidia" / "cu13", root, os.environ.get("CC", "cc"))
    return Toolkit(version, root, site, wheels)


def cuobjdump() -> str:
    site = FOLDER / "cuobjdump"
    pip_install(site, CUOBJDUMP)
    return str(next(site.glob("nvidia/cu*/bin/cuobjdump")))
