"""The knobs of the build: jobs, CUDA architectures, and that a second build compiles nothing."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from conftest import BUILD, ROOT

MODULES = ROOT / "native" / "cmake"


def script(module: str, show: str, *definitions: str, path: str | None = None, **env: str) -> list[str]:
    """Lines that a CMake script prints after including a module. `path` replaces PATH for programs looked up."""
    code = f'list(APPEND CMAKE_MODULE_PATH "{MODULES}")\ninclude({module})\nmessage("RESULT ${{{show}}}")\n'
    file = Path(tempfile.gettempdir()) / f"sdsage-{os.getpid()}-{module}.cmake"
    file.write_text(code)
    try:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("SDSAGE_")}
        options = [f"-D{d}" for d in definitions]
        if path is not None:
            options.append(f"-DCMAKE_PROGRAM_PATH={path}")
        done = subprocess.run(
            ["cmake", *options, "-P", str(file)], capture_output=True, text=True, env={**clean, **env}, check=True
        )
    finally:
        file.unlink()
    return (done.stdout + done.stderr).splitlines()


def result(lines: list[str]) -> str:
    return next(line.removeprefix("RESULT ").strip() for line in lines if line.startswith("RESULT "))


def fake_smi(folder: Path, answer: str, code: int = 0) -> str:
    """A machine with the GPUs that `answer` lists, as far as the build looks."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{answer}'\nexit {code}\n")
    program.chmod(0o755)
    return str(folder)


ARCH = ("SdsageCudaArchitectures", "CMAKE_CUDA_ARCHITECTURES")
DOCUMENTED = "80-real;86-real;89-real;90a-real;100a-real;120a-real"


def test_architectures_the_explicit_value_comes_first(tmp_path: Path) -> None:
    smi = fake_smi(tmp_path, "9.0\\n")
    lines = script(*ARCH, "CMAKE_CUDA_ARCHITECTURES=86-real", path=smi, SDSAGE_CUDA_ARCHITECTURES="89-real")
    assert result(lines) == "86-real"


def test_architectures_then_the_environment(tmp_path: Path) -> None:
    smi = fake_smi(tmp_path, "9.0\\n")
    assert result(script(*ARCH, path=smi, SDSAGE_CUDA_ARCHITECTURES="89-real;90a-real")) == "89-real;90a-real"


def test_architectures_then_the_gpus_seen(tmp_path: Path) -> None:
    smi = fake_smi(tmp_path, "8.6\\n9.0\\n8.6\\n12.0\\n")
    lines = script(*ARCH, path=smi)
    assert result(lines) == "86-real;90a-real;120a-real"
    assert any("the GPUs of this machine" in line for line in lines)


@pytest.mark.parametrize(("answer", "code"), [("", 0), ("No devices were found\\n", 6)])
def test_architectures_without_a_gpu_the_documented_list(answer: str, code: int, tmp_path: Path) -> None:
    lines = script(*ARCH, path=fake_smi(tmp_path, answer, code))
    assert result(lines) == DOCUMENTED
    assert any("no GPU seen" in line for line in lines)
    assert DOCUMENTED.replace("-real", "").replace(";", ", ") in (ROOT / "docs" / "building.md").read_text()


def test_architectures_are_looked_for_again_in_an_old_build_folder(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(again NONE)\n"
        f'list(APPEND CMAKE_MODULE_PATH "{MODULES}")\ninclude({ARCH[0]})\nmessage("RESULT ${{{ARCH[1]}}}")\n'
    )
    for asked in ("86-real", "90a-real;120a-real"):
        done = subprocess.run(
            ["cmake", "-S", tmp_path, "-B", tmp_path / "build"],
            capture_output=True,
            text=True,
            env={**os.environ, "SDSAGE_CUDA_ARCHITECTURES": asked},
            check=True,
        )
        assert result((done.stdout + done.stderr).splitlines()) == asked


def test_jobs_default_to_cores_and_memory() -> None:
    jobs = int(result(script("SdsageBuildJobs", "SDSAGE_BUILD_JOBS")))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert jobs == max(1, min(os.cpu_count() or 1, memory // 2**20 // 4096))


def test_jobs_can_be_chosen() -> None:
    assert result(script("SdsageBuildJobs", "SDSAGE_BUILD_JOBS", SDSAGE_BUILD_JOBS="7")) == "7"
    assert result(script("SdsageBuildJobs", "SDSAGE_BUILD_JOBS", "SDSAGE_BUILD_JOBS=3", SDSAGE_BUILD_JOBS="7")) == "3"


FLAGS = ("SdsageNvccFlags", "SDSAGE_JSON_NVCC_FLAGS")


def test_flags_that_nvcc_takes_from_the_environment() -> None:
    """They are in the build info, without folders of the machine that built it."""
    quiet = {"NVCC_PREPEND_FLAGS": "", "NVCC_APPEND_FLAGS": ""}
    assert json.loads(result(script(*FLAGS, **quiet))) == {}
    flags = '-ccbin /usr/bin/g++-12 -DNAME="x y" --maxrregcount=64;-O1'
    found = json.loads(result(script(*FLAGS, **{**quiet, "NVCC_APPEND_FLAGS": flags})))
    assert found == {"NVCC_APPEND_FLAGS": '-ccbin g++-12 -DNAME="x y" --maxrregcount=64;-O1'}
    both = json.loads(result(script(*FLAGS, NVCC_PREPEND_FLAGS="-v", NVCC_APPEND_FLAGS="-O2 -I=/opt/x/include")))
    assert both == {"NVCC_PREPEND_FLAGS": "-v", "NVCC_APPEND_FLAGS": "-O2 -I=include"}


def test_building_again_compiles_nothing() -> None:
    done = subprocess.run(["cmake", "--build", BUILD], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "no work to do" in done.stdout
