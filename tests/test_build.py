"""The knobs of the build: jobs, CUDA architectures, and that a second build compiles nothing."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

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


class Machine:
    """A machine as far as the build looks for architectures: its GPUs, and what its nvcc knows."""

    def __init__(self, folder: Path, gpus: str = "", toolkit: str = "75 80 86 87 89 90 100 103 120 121") -> None:
        self.smi = fake_smi(folder, gpus)
        self.nvcc = folder / "nvcc"
        codes = "".join(f"sm_{code}\\n" for code in toolkit.split())
        self.nvcc.write_text(f"#!/bin/sh\nprintf '{codes}'\n")
        self.nvcc.chmod(0o755)

    def lines(self, show: str, *definitions: str, **env: str) -> list[str]:
        compiler = f"CMAKE_CUDA_COMPILER={self.nvcc}"
        return script(
            "SdsageCudaArchitectures", show, compiler, *definitions, path=self.smi, **{"CUDAARCHS": "", **env}
        )

    def both(self, *definitions: str, **env: str) -> tuple[str, str]:
        """What ggml-cuda and the kernels are compiled for."""
        lines = self.lines("CMAKE_CUDA_ARCHITECTURES}/${SDSAGE_KERNEL_CUDA_ARCHS", *definitions, **env)
        ggml, _, kernels = result(lines).partition("/")
        return ggml, kernels

    def refusal(self, *definitions: str, **env: str) -> str:
        with pytest.raises(subprocess.CalledProcessError) as stopped:
            self.both(*definitions, **env)
        return " ".join(stopped.value.stderr.split())


DOCUMENTED = "80-real;86-real;89-real;90a-real;100a-real;120a-real"
EVERY = "80-real;86-real;87-real;89-real;90a-real;100a-real;103a-real;120a-real;121a-real"


def test_architectures_the_explicit_value_comes_first(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "9.0\\n")
    assert machine.both("SDSAGE_CUDA_ARCHS=86", SDSAGE_CUDA_ARCHS="89") == ("86-real", "86-real")
    assert machine.both(SDSAGE_CUDA_ARCHS="89;90a-real") == ("89-real;90a-real",) * 2


@pytest.mark.parametrize("asked", ["80;120a", "80,120a", "80 120a", "80-real, 120a-real,80"])
def test_architectures_are_machine_code_however_they_are_separated(asked: str, tmp_path: Path) -> None:
    assert Machine(tmp_path).both(SDSAGE_CUDA_ARCHS=asked) == ("80-real;120a-real",) * 2


def test_architectures_then_the_gpus_seen(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "8.6\\n9.0\\n8.6\\n12.0\\n")
    assert machine.both() == ("86-real;90a-real;120a-real",) * 2
    assert any("the GPUs of this machine" in line for line in machine.lines("CMAKE_CUDA_ARCHITECTURES"))
    assert machine.both(SDSAGE_CUDA_ARCHS="native") == machine.both()


@pytest.mark.parametrize(("answer", "code"), [("", 0), ("No devices were found\\n", 6)])
def test_architectures_without_a_gpu_the_documented_list(answer: str, code: int, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.smi = fake_smi(tmp_path, answer, code)
    assert machine.both() == (DOCUMENTED, DOCUMENTED)
    assert any("no GPU seen" in line for line in machine.lines("CMAKE_CUDA_ARCHITECTURES"))
    assert DOCUMENTED.replace("-real", "").replace(";", ", ") in (ROOT / "docs" / "building.md").read_text()
    assert "SDSAGE_CUDA_ARCHS is native, and nvidia-smi shows no GPU" in machine.refusal("SDSAGE_CUDA_ARCHS=native")


def test_all_architectures_are_those_that_the_toolkit_knows(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.both("SDSAGE_CUDA_ARCHS=all") == (EVERY, EVERY)
    assert EVERY.replace("-real", "").replace(";", ", ") in (ROOT / "docs" / "building.md").read_text()
    older = Machine(tmp_path, toolkit="75 80 86 87 89 90")  # CUDA 12.0
    assert older.both("SDSAGE_CUDA_ARCHS=all")[1] == "80-real;86-real;87-real;89-real;90a-real"
    assert any(
        "does not know architecture 103a: left out" in line for line in older.lines("x", "SDSAGE_CUDA_ARCHS=all")
    )
    text = older.refusal("SDSAGE_CUDA_ARCHS=89;121a")
    assert "SDSAGE_CUDA_ARCHS holds 121a" in text
    assert "knows only 75 80 86 87 89 90" in text


def test_the_kernels_get_what_they_need(tmp_path: Path) -> None:
    """Hopper's own instructions; nothing below 8.0, where there are no kernels."""
    machine = Machine(tmp_path)
    assert machine.both("SDSAGE_CUDA_ARCHS=75;90") == ("75-real;90-real", "90a-real")
    assert machine.both("SDSAGE_CUDA_ARCHS=75") == ("75-real", "80-real")


def test_ggml_may_have_a_list_of_its_own(tmp_path: Path) -> None:
    """For a package with the kernels for every GPU; another architecture of ggml-cuda takes an hour."""
    machine = Machine(tmp_path)
    assert machine.both("SDSAGE_CUDA_ARCHS=all", SDSAGE_GGML_CUDA_ARCHS="90") == ("90-real", EVERY)
    assert machine.both("SDSAGE_CUDA_ARCHS=90", "SDSAGE_GGML_CUDA_ARCHS=80-virtual;90")[0] == "80-virtual;90-real"
    assert any(
        "ggml-cuda 80-real (SDSAGE_GGML_CUDA_ARCHS)" in line for line in machine.lines("x", "SDSAGE_GGML_CUDA_ARCHS=80")
    )


@pytest.mark.parametrize("asked", ["sm_90", "8.9", "fast", "90b", "80;native"])
def test_architectures_that_are_none(asked: str, tmp_path: Path) -> None:
    text = Machine(tmp_path).refusal(f"SDSAGE_CUDA_ARCHS={asked}")
    assert f"SDSAGE_CUDA_ARCHS holds {asked.rpartition(';')[2]}: native, all, or a list" in text


def test_the_kernels_have_no_ptx(tmp_path: Path) -> None:
    text = Machine(tmp_path).refusal("SDSAGE_CUDA_ARCHS=80-virtual")
    assert "which is PTX" in text
    assert "SDSAGE_GGML_CUDA_ARCHS" in text


@pytest.mark.parametrize("name", ["CMAKE_CUDA_ARCHITECTURES", "SAGE_CUDA_ARCHITECTURES", "CUDAARCHS"])
def test_another_list_by_hand_stops_the_build(name: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, "8.6\\n")
    given: dict[str, Any] = {"CUDAARCHS": "89;90a"} if name == "CUDAARCHS" else {}
    definitions = () if given else (f"{name}=89;90a",)
    assert machine.both("SDSAGE_CUDA_ARCHS=90a,89", *definitions, **given) == ("90a-real;89-real",) * 2
    for asked in ((), ("SDSAGE_CUDA_ARCHS=89",)):
        text = machine.refusal(*asked, *definitions, **given)
        assert f"{name} is 89;90a, and SDSAGE_CUDA_ARCHS gives {'89' if asked else '86'}." in text
        assert '-DSDSAGE_CUDA_ARCHS="89;90a"' in text


def test_architectures_are_looked_for_again_in_an_old_build_folder(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(again NONE)\n"
        f'list(APPEND CMAKE_MODULE_PATH "{MODULES}")\nset(CMAKE_CUDA_COMPILER "{machine.nvcc}")\n'
        'include(SdsageCudaArchitectures)\nmessage("RESULT ${CMAKE_CUDA_ARCHITECTURES}")\n'
    )
    for asked in ("86-real", "90a-real;120a-real"):
        done = subprocess.run(
            ["cmake", "-S", tmp_path, "-B", tmp_path / "build"],
            capture_output=True,
            text=True,
            env={**os.environ, "CUDAARCHS": "", "SDSAGE_CUDA_ARCHS": asked},
            check=True,
        )
        assert result((done.stdout + done.stderr).splitlines()) == asked


JOBS = ("SdsageBuildJobs", "sdsage_jobs")


def test_jobs_default_to_cores_and_memory() -> None:
    jobs = int(result(script(*JOBS, MAX_JOBS="")))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert jobs == max(1, min(os.cpu_count() or 1, memory // 2**20 // 4096))


def test_jobs_can_be_chosen() -> None:
    assert result(script(*JOBS, MAX_JOBS="7")) == "7"
    assert result(script(*JOBS, "MAX_JOBS=3", MAX_JOBS="7")) == "3"
    for wrong in ("0", "-1", "many", "2.5"):
        with pytest.raises(subprocess.CalledProcessError) as stopped:
            script(*JOBS, MAX_JOBS=wrong)
        assert f"MAX_JOBS is {wrong}: a number of compilers at once" in " ".join(stopped.value.stderr.split())


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


def configured(build: Path, tree: Path, archs: str) -> None:
    """The CUDA engine in a build folder, with architectures from the environment."""
    env = {**os.environ, "CUDAARCHS": "", "SDSAGE_CUDA_ARCHS": archs, "SDSAGE_UPSTREAM_DIR": str(tree)}
    options = ["-G", "Ninja", "-DSD_CUDA=ON", "-DSD_WEBP=OFF", "-DSD_WEBM=OFF"]
    done = subprocess.run(["cmake", "-S", ROOT, "-B", build, *options], capture_output=True, text=True, env=env)
    if "sdsage: no CUDA compiler" in done.stderr:
        pytest.skip("no CUDA compiler with cuBLAS here: make cuda-glue installs one")
    assert done.returncode == 0, done.stderr


def test_other_architectures_in_one_build_folder_compile_again(tmp_path: Path, upstream_tree: Path) -> None:
    """Of ggml-cuda and of the kernels, one small file of each; the same ones do not."""

    def ninja(*words: str | Path) -> str:
        command = ["ninja", "-C", tmp_path, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    configured(tmp_path, upstream_tree, "80")
    targets = ninja("-t", "targets", "all").splitlines()
    names = [line.partition(":")[0] for line in targets]
    (ours,) = [name for name in names if name.endswith("/sage_cuda.dir/src/api.cu.o")]
    (ggmls,) = [name for name in names if name.endswith("/ggml-cuda.dir/arange.cu.o")]
    files = (ours, ggmls)
    ninja(*files)
    configured(tmp_path, upstream_tree, "80")
    assert "no work to do" in ninja(*files)
    configured(tmp_path, upstream_tree, "86;90")
    again = ninja("-v", *files)
    for file, archs in ((ours, ("86", "90a")), (ggmls, ("86", "90"))):
        (line,) = [line for line in again.splitlines() if f"-o {file}" in line]
        assert [w for w in line.split() if "generate-code" in w] == [
            f'"--generate-code=arch=compute_{a},code=[sm_{a}]"' for a in archs
        ]
