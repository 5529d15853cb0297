"""The build backend of the wheel: scikit-build-core, and with SDSAGE_CUDA=1 the CUDA engine.

A build for the CPU asks for nothing that it did not ask for before. With SDSAGE_CUDA=1, and no CUDA toolkit with cuBLAS
on the machine, NVIDIA's wheels become requirements of the build; CMake joins them to a toolkit (SdsageCuda.cmake).
"""

import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cuda_toolkit
from scikit_build_core import build as base
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = Mapping[str, Any] | None
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def wants_cuda() -> bool:
    value = os.environ.get("SDSAGE_CUDA", "")
    if value not in ("", "0", "1"):
        raise SystemExit(
            f"sdsage: SDSAGE_CUDA is {value!r}: 1 builds the CUDA engine, 0 or nothing the one for the CPU"
        )
    return value == "1"


def group(name: str) -> list[str]:
    """A dependency group of pyproject.toml with what it includes."""
    groups = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["dependency-groups"]
    found: list[str] = []
    for entry in groups[name]:
        found += [entry] if isinstance(entry, str) else group(entry["include-group"])
    return found


def cuda_requirements() -> list[str]:
    """NVIDIA's wheels, where they can be a toolkit: on Windows CMake says that one must be installed."""
    wanted = wants_cuda() and sys.platform != "win32" and cuda_toolkit.system_nvcc(cublas=True) is None
    return group("cuda-engine") if wanted else []


def with_cuda(config_settings: Settings) -> dict[str, Any]:
    """The settings, with the CUDA engine switched on if SDSAGE_CUDA asks for it. A setting given by hand wins."""
    given = dict(config_settings or {})
    if not wants_cuda():
        return given
    # A folder of its own: one left by a build for the CPU would be compiled anew, and the next one again.
    return {"cmake.define.SD_CUDA": "ON", "build-dir": "build/cuda-{wheel_tag}", **given}


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*base.get_requires_for_build_wheel(with_cuda(config_settings)), *cuda_requirements()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*base.get_requires_for_build_editable(with_cuda(config_settings)), *cuda_requirements()]


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    return base.prepare_metadata_for_build_wheel(metadata_directory, with_cuda(config_settings))


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    return base.prepare_metadata_for_build_editable(metadata_directory, with_cuda(config_settings))


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    return base.build_wheel(wheel_directory, with_cuda(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return base.build_editable(wheel_directory, with_cuda(config_settings), metadata_directory)
