"""Options of the build beside architectures and jobs (test_build.py): what they set, and what they refuse.

Configured only; what they build is tried by `make test-slow` (test_other_engines.py).
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT
from test_build import MODULES, result

HEAD = f"""cmake_minimum_required(VERSION 3.24)
project(options C CXX)
list(APPEND CMAKE_MODULE_PATH "{MODULES}")
"""


class Project:
    """A project of its own that includes one of the build's modules and shows a variable."""

    def __init__(self, folder: Path, module: str, show: str, before: str = "") -> None:
        self.folder = folder
        text = f'{HEAD}{before}\ninclude({module})\nmessage("RESULT ${{{show}}}")\n'
        (folder / "CMakeLists.txt").write_text(text)

    def run(self, *definitions: str, **env: str) -> "subprocess.CompletedProcess[str]":
        clean = {k: v for k, v in os.environ.items() if not k.startswith("SDSAGE_") and k != "CIBUILDWHEEL"}
        command = ["cmake", "-S", self.folder, "-B", self.folder / "build", *(f"-D{d}" for d in definitions)]
        return subprocess.run(command, capture_output=True, text=True, env={**clean, **env})

    def shown(self, *definitions: str, **env: str) -> str:
        done = self.run(*definitions, **env)
        assert done.returncode == 0, done.stderr
        return result((done.stdout + done.stderr).splitlines())

    def refusal(self, *definitions: str, **env: str) -> str:
        done = self.run(*definitions, **env)
        assert done.returncode != 0, done.stdout
        return " ".join(done.stderr.split())


@pytest.fixture
def host_code(tmp_path: Path) -> Project:
    return Project(tmp_path, "SdsageHostCode", "GGML_NATIVE} march=${SDSAGE_MARCH} avx2=${GGML_AVX2")


def test_the_cpu_that_code_is_for(host_code: Project) -> None:
    assert host_code.shown() == "ON march=native avx2="
    assert host_code.shown(CIBUILDWHEEL="1") == "OFF march= avx2="
    assert host_code.shown(SDSAGE_NATIVE="OFF") == "OFF march= avx2="
    assert host_code.shown("SDSAGE_NATIVE=ON", SDSAGE_NATIVE="0") == "ON march=native avx2="


def test_a_cpu_by_name(host_code: Project) -> None:
    """It alone says what instructions there are: ggml's own switches are off."""
    name = {"x86_64": "x86-64-v2", "aarch64": "armv8.2-a"}[os.uname().machine]
    assert host_code.shown(SDSAGE_NATIVE=name) == f"OFF march={name} avx2=OFF"
    text = host_code.refusal("SDSAGE_NATIVE=abacus")
    assert "SDSAGE_NATIVE is abacus: ON, OFF, or a name that" in text


def test_link_time_optimisation(tmp_path: Path) -> None:
    project = Project(tmp_path, "SdsageHostCode", "CMAKE_INTERPROCEDURAL_OPTIMIZATION")
    assert project.shown() == ""
    assert project.shown("SDSAGE_LTO=ON") == "ON"


@pytest.fixture
def backends(tmp_path: Path) -> Project:
    return Project(tmp_path, "SdsageBackends", "SDSAGE_GGML")


def test_whose_ggml_is_taken(backends: Project) -> None:
    assert backends.shown("SD_CUDA=ON") == "patched"
    assert backends.shown("SD_VULKAN=ON") == "patched"
    assert backends.shown("SD_USE_UPSTREAM_GGML=ON") == "upstream"
    assert backends.shown("SD_USE_UPSTREAM_GGML=OFF", "SD_USE_SYSTEM_GGML=ON") == "system"


def test_rocm_takes_the_files_that_it_shares_with_cuda_as_upstream_has_them(backends: Project) -> None:
    assert backends.shown("SD_HIPBLAS=ON") == "upstream"
    assert "SD_CUDA and SD_HIPBLAS are ON" in backends.refusal("SD_CUDA=ON")


def test_options_that_exclude_each_other(backends: Project) -> None:
    text = backends.refusal("SD_USE_UPSTREAM_GGML=ON", "SD_USE_SYSTEM_GGML=ON")
    assert "ggml comes from one place" in text
    if os.uname().sysname != "Darwin":
        assert "Metal is a part of macOS" in backends.refusal("SD_METAL=ON", "SD_USE_UPSTREAM_GGML=OFF")


@pytest.mark.skipif(shutil.which("glslc") is None, reason="Vulkan's tools are not installed")
def test_vulkan_is_passed_on(upstream_tree: Path, tmp_path: Path) -> None:
    env = {**os.environ, "SDSAGE_UPSTREAM_DIR": str(upstream_tree)}
    options = ["-G", "Ninja", "-DSD_VULKAN=ON", "-DSD_WEBP=OFF", "-DSD_WEBM=OFF"]
    subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path, *options], check=True, capture_output=True, env=env)
    commands = (tmp_path / "compile_commands.json").read_text()
    assert "ggml-vulkan.cpp" in commands
    assert "-DGGML_USE_VULKAN" in commands
    assert "ggml-cuda" not in commands


# ---- SD_USE_SYSTEM_GGML


@pytest.fixture(scope="module")
def package(upstream_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What installing the edited ggml leaves: its own package files and headers; the libraries are empty files here."""
    folder = tmp_path_factory.mktemp("ggml")
    options = ["-G", "Ninja", "-DGGML_OPENMP=OFF", "-DCMAKE_INSTALL_LIBDIR=lib"]
    subprocess.run(
        ["cmake", "-S", upstream_tree / "ggml", "-B", folder / "b", *options], check=True, capture_output=True
    )
    prefix = folder / "prefix"
    shutil.copytree(upstream_tree / "ggml" / "include", prefix / "include")
    (prefix / "lib" / "cmake" / "ggml").mkdir(parents=True)
    for name in ("ggml-config.cmake", "ggml-version.cmake"):
        shutil.copy(folder / "b" / name, prefix / "lib" / "cmake" / "ggml")
    for name in ("ggml", "ggml-base", "ggml-cpu"):
        (prefix / "lib" / f"lib{name}.so").touch()
    return prefix


@pytest.fixture
def system_ggml(upstream_tree: Path, tmp_path: Path) -> Project:
    show = "GGML_VERSION} ${ggml_DIR"
    return Project(tmp_path, "SdsageSystemGgml", show, before=f'set(tree "{upstream_tree}")')


def changed(package: Path, to: Path, file: str, old: str, new: str) -> str:
    """The package with one file changed, as a definition for CMake."""
    shutil.copytree(package, to)
    text = (to / file).read_text()
    assert old in text
    (to / file).write_text(text.replace(old, new))
    return f"CMAKE_PREFIX_PATH={to}"


CONFIG = "lib/cmake/ggml/ggml-config.cmake"


def test_an_installed_ggml_of_the_edited_tree_is_taken(package: Path, system_ggml: Project) -> None:
    assert str(package) in system_ggml.shown(f"CMAKE_PREFIX_PATH={package}")


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            CONFIG,
            "INTERFACE_COMPILE_DEFINITIONS GGML_MAX_NAME",
            "LABELS GGML_MAX_NAME",
            "does not say GGML_MAX_NAME=128",
        ),
        (CONFIG, 'set(GGML_MAX_NAME "128")', 'set(GGML_MAX_NAME "64")', "does not say GGML_MAX_NAME=128"),
        (CONFIG, 'set(GGML_SDSAGE_API "2")', 'set(GGML_SDSAGE_API "0")', "has not the edits that SageAttention needs"),
        ("include/ggml.h", "GGML_OP_CUSTOM,", "GGML_OP_CUSTOM, GGML_OP_MORE,", "is of another version"),
        (CONFIG, 'GGML_AVAILABLE_BACKENDS "', 'GGML_AVAILABLE_BACKENDS "ggml-cuda;', "configure with -DSD_CUDA=ON"),
    ],
)
def test_another_ggml_is_refused(
    file: str, old: str, new: str, said: str, package: Path, system_ggml: Project, tmp_path: Path
) -> None:
    prefix = changed(package, tmp_path / "prefix", file, old, new)
    (tmp_path / "prefix" / "lib" / "libggml-cuda.so").touch()
    text = system_ggml.refusal(prefix)
    assert said in text
    assert "docs/building.md" in text or "SD_CUDA" in text


def test_no_installed_ggml_at_all(system_ggml: Project) -> None:
    assert "there is no CMake package of ggml" in system_ggml.refusal("CMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF")


def test_an_installed_ggml_without_cuda_makes_no_cuda_engine(package: Path, system_ggml: Project) -> None:
    text = system_ggml.refusal(f"CMAKE_PREFIX_PATH={package}", "SD_CUDA=ON")
    assert "was built without CUDA" in text


# ---- the table of docs/building.md


def test_every_option_is_documented_and_tested() -> None:
    text = (ROOT / "CMakeLists.txt").read_text() + "".join(p.read_text() for p in MODULES.glob("*.cmake"))
    options = {*re.findall(r"^\s*option\((\w+)", text, re.M), "SDSAGE_CUDA_ARCHS", "SDSAGE_GGML_CUDA_ARCHS"}
    options |= {"MAX_JOBS", "SDSAGE_NATIVE"}
    table = (ROOT / "docs" / "building.md").read_text().partition("| CMake option")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == options
