"""CMake presets, and the flags that the compilers of Windows get; neither MSVC nor clang-cl is here to take them."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

PRESETS: dict[str, Any] = json.loads((ROOT / "CMakePresets.json").read_text(encoding="utf-8"))
CONFIGURE = {p["name"]: p for p in PRESETS["configurePresets"] if not p.get("hidden")}
ON_WINDOWS = {"msvc", "msvc-cuda", "clang-cl", "clang-cl-cuda"}


def test_cmake_takes_the_presets() -> None:
    done = subprocess.run(["cmake", "--list-presets=all"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    configure, _, build = done.stdout.partition("build presets")
    assert set(re.findall(r'^ *"([\w-]+)"', configure, re.M)) == set(CONFIGURE) - ON_WINDOWS
    assert set(re.findall(r'^ *"([\w-]+)"', build, re.M)) == set(CONFIGURE)


@pytest.mark.parametrize("name", [*CONFIGURE])
def test_docs_name_every_preset(name: str) -> None:
    docs = (ROOT / "docs" / ("windows.md" if name in ON_WINDOWS | {"mingw"} else "building.md")).read_text()
    assert re.search(rf"cmake --preset {name}\s", docs)


def flags(folder: Path, language: str, compiler: str, msvc: bool) -> str:
    """What SdsageCompilerFlags.cmake gives a file of a language, for a compiler that CMake need not have."""
    lines = [
        "cmake_minimum_required(VERSION 3.24)",
        "project(flags LANGUAGES CXX)",
        f"set(MSVC {int(msvc)})",
        f"include({ROOT}/native/cmake/SdsageCompilerFlags.cmake)",
        "get_directory_property(options COMPILE_OPTIONS)",
        'file(WRITE ${CMAKE_BINARY_DIR}/options "${options}")',
    ]
    (folder / "CMakeLists.txt").write_text("\n".join(lines))
    subprocess.run(["cmake", "-S", folder, "-B", folder / "build"], check=True, capture_output=True)
    options = (folder / "build" / "options").read_text().split(";")
    found = []
    for option in options:
        for kind, names, flag in re.findall(r"\$<\$<(COMPILE_LANGUAGE|COMPILE_LANG_AND_ID):([\w,]+)>:([^>]*)>", option):
            given, *ids = names.split(",") if kind == "COMPILE_LANG_AND_ID" else (language,)
            if language in names.split(",") if not ids else (given, ids[0]) == (language, compiler):
                found.append(flag)
    return " ".join(found)


def test_msvc_gets_its_own_words(tmp_path: Path) -> None:
    assert flags(tmp_path, "CXX", "MSVC", True) == "/Zc:preprocessor /utf-8 /bigobj"
    cuda = flags(tmp_path, "CUDA", "NVIDIA", True)
    assert cuda == "-Xcompiler=/Zc:preprocessor -Xcompiler=/utf-8 -Xcompiler=/bigobj"
    clang = flags(tmp_path, "CXX", "Clang", True)
    assert clang == "/clang:-fno-finite-math-only /utf-8 /bigobj"


def test_other_compilers_leave_paths_out(tmp_path: Path) -> None:
    given = flags(tmp_path, "CXX", "GNU", False)
    assert given == f"-ffile-prefix-map={tmp_path}/build/= -ffile-prefix-map={tmp_path}/="
