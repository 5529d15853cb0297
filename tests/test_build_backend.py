"""The build backend: what a build asks for and switches on, with SDSAGE_CUDA and without."""

import os
import subprocess
import sys
import tarfile
import tomllib
from email import message_from_string
from pathlib import Path

import pytest
from conftest import ROOT
from test_cuda_toolkit import make_toolkit, path_without_nvcc

sys.path.insert(0, str(ROOT / "native" / "cmake"))

import sdsage_build as backend
from scikit_build_core import build as plain

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CUDA_VARIABLES = ("SDSAGE_CUDA", "CUDACXX", "CUDA_HOME", "CUDA_PATH")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a CUDA toolkit."""
    monkeypatch.chdir(ROOT)
    for name in CUDA_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", os.pathsep.join(path_without_nvcc()))


@pytest.mark.parametrize("value", [None, "", "0"])
def test_a_build_for_the_cpu_is_scikit_build_cores(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv("SDSAGE_CUDA", value)
    assert backend.get_requires_for_build_wheel() == plain.get_requires_for_build_wheel()
    assert backend.get_requires_for_build_editable() == plain.get_requires_for_build_editable()
    assert backend.with_cuda(None) == {}
    assert backend.with_cuda({"build-dir": "x"}) == {"build-dir": "x"}


def test_a_cuda_build_asks_for_the_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDSAGE_CUDA", "1")
    groups = PROJECT["dependency-groups"]
    wheels = [*groups["cuda-build"], "nvidia-cublas>=13.0,<13.1"]
    assert backend.get_requires_for_build_wheel() == [*plain.get_requires_for_build_wheel(), *wheels]
    assert backend.get_requires_for_build_editable() == [*plain.get_requires_for_build_editable(), *wheels]
    assert backend.get_requires_for_build_sdist() == plain.get_requires_for_build_sdist()


@pytest.mark.parametrize("cublas", [True, False])
def test_a_toolkit_of_the_machine_is_taken_if_it_has_cublas(
    cublas: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDSAGE_CUDA", "1")
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path, cublas).parents[1]))
    asked = any("nvidia" in name for name in backend.get_requires_for_build_wheel())
    assert asked == (not cublas)


def test_a_cuda_build_has_a_folder_of_its_own_and_settings_by_hand_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDSAGE_CUDA", "1")
    assert backend.with_cuda(None) == {"cmake.define.SD_CUDA": "ON", "build-dir": "build/cuda-{wheel_tag}"}
    given = {"build-dir": "x", "cmake.define.SDSAGE_NATIVE": "OFF"}
    assert backend.with_cuda(given) == {"cmake.define.SD_CUDA": "ON", **given}
    assert given == {"build-dir": "x", "cmake.define.SDSAGE_NATIVE": "OFF"}


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDSAGE_CUDA", "yes")
    for hook in (backend.get_requires_for_build_wheel, backend.get_requires_for_build_editable):
        with pytest.raises(SystemExit, match="SDSAGE_CUDA is 'yes': 1 builds the CUDA engine"):
            hook()


def test_what_runs_is_what_was_linked() -> None:
    """The extra and the group name the same versions."""
    run_time = PROJECT["project"]["optional-dependencies"]["cuda"]
    assert set(run_time) <= set(backend.group("cuda-engine"))
    assert {name.split(">")[0] for name in run_time} == {"nvidia-cublas", "nvidia-cuda-runtime"}


@pytest.mark.parametrize("cuda", ["0", "1"])
def test_no_wheel_requires_cuda_unless_the_extra_is_asked_for(
    cuda: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDSAGE_CUDA", cuda)
    folder = backend.prepare_metadata_for_build_wheel(str(tmp_path))
    metadata = message_from_string((tmp_path / folder / "METADATA").read_text())
    nvidia = [r for r in metadata.get_all("Requires-Dist", []) if "nvidia" in r]
    assert len(nvidia) == 2
    assert all("extra ==" in r and "cuda" in r for r in nvidia)


@pytest.fixture(scope="module")
def in_source_package(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in the source package."""
    folder = tmp_path_factory.mktemp("sdist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = backend.build_sdist(str(folder))
    with tarfile.open(folder / name) as tar:
        return {member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()}


def test_the_source_package_carries_its_backend(in_source_package: set[str]) -> None:
    (folder,) = PROJECT["build-system"]["backend-path"]
    assert {f"{folder}/{PROJECT['build-system']['build-backend']}.py", f"{folder}/cuda_toolkit.py"} <= in_source_package
    assert f"{folder}/SdsageCuda.cmake" in in_source_package


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a checkout knows which files are its own")
def test_the_source_package_has_every_file_and_no_build(in_source_package: set[str]) -> None:
    """`make test-sdist` builds a wheel from it and runs the tests with that."""

    def listed(*options: str) -> set[str]:
        done = subprocess.run(
            ["git", "-C", ROOT, "ls-files", "-z", *options], capture_output=True, text=True, check=True
        )
        return {name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()}

    assert listed() - in_source_package == {".ci/run"}
    assert in_source_package - listed() - listed("--others", "--exclude-standard") == {"PKG-INFO"}
