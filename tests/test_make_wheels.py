"""tools/make_wheels.py on a real wheel: this package with the library that is tested, packed without compiling."""

import base64
import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import PACKAGE, ROOT

from sdsage._doctor.files import build_info_in
from sdsage._library import library_dir, library_path

sys.path.insert(0, str(ROOT / "tools"))

import make_wheels

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAME = f"sdsage-{PROJECT['version']}"
CARRIED = ("libsdsage.so", "sd-cli", "cdef.h", "cdef.cffi")
needs_auditwheel = pytest.mark.skipif(sys.platform != "linux", reason="auditwheel is for Linux")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the build leaves it: tagged for this machine, without a label."""
    folder = tmp_path_factory.mktemp("wheel")
    package = folder / "tree" / "sdsage"
    shutil.copytree(Path(PACKAGE) / "sdsage", package, ignore=shutil.ignore_patterns("_lib", "__pycache__"))
    (package / "_lib").mkdir()
    for name in CARRIED:
        shutil.copy2(library_dir() / name, package / "_lib" / name)
    # as the install step leaves it; in a build folder it would find that folder's library
    subprocess.run(["patchelf", "--set-rpath", "$ORIGIN", package / "_lib" / "sd-cli"], check=True)
    info = folder / "tree" / f"{NAME}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: sdsage\nVersion: {PROJECT['version']}\n\nWords.\n")
    (info / "WHEEL").write_text(
        f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: py3-none-linux_{os.uname().machine}\n"
    )
    make_wheels.python("-m", "wheel", "pack", folder / "tree", "--dest-dir", folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def finished(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheels.finish(built, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def manifest(finished: Path) -> dict[str, Any]:
    make_wheels.describe(finished.parent, make_wheels.source())
    told: dict[str, Any] = json.loads((finished.parent / "manifest.json").read_text(encoding="utf-8"))
    return told


def tool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "make_wheels.py", *words]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


def check_record(wheel: Path) -> None:
    """Every file is in RECORD with its own hash."""
    with zipfile.ZipFile(wheel) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
        assert {row[0] for row in rows} == {name for name in archive.namelist() if not name.endswith("/")}
        for name, digest, _ in rows:
            if name != record:
                found = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).decode().rstrip("=")
                assert digest == f"sha256={found}", name


# --- what comes out --------------------------------------------------------------------------------------------------


@needs_auditwheel
def test_a_finished_wheel_says_which_system_it_needs(built: Path, finished: Path) -> None:
    assert built.name.endswith(f"-py3-none-linux_{os.uname().machine}.whl")
    assert re.fullmatch(rf"{re.escape(NAME)}-py3-none-manylinux_2_\d+_{os.uname().machine}\.whl", finished.name)
    check_record(finished)


@needs_auditwheel
def test_a_finished_wheel_brings_what_a_system_may_lack(finished: Path, tmp_path: Path) -> None:
    """OpenMP's library is not part of a small system; NVIDIA's and the C library stay outside."""
    unpacked = make_wheels.unpack(finished, tmp_path)
    bundled = [file.name for file in (unpacked / "sdsage.libs").iterdir()]
    assert bundled
    assert all(name.startswith("libgomp-") for name in bundled)
    for name in ("libsdsage.so", "sd-cli"):
        file = unpacked / "sdsage" / "_lib" / name
        said = subprocess.run(["readelf", "-d", file], capture_output=True, text=True, check=True).stdout
        assert "libgomp.so.1]" not in said
    assert (unpacked / "sdsage" / "_lib" / "sd-cli").stat().st_mode & 0o111


def test_the_manifest_is_read_out_of_the_wheel(finished: Path, manifest: dict[str, Any]) -> None:
    (wheel,) = manifest["wheels"]
    assert (manifest["name"], manifest["version"]) == ("sdsage", PROJECT["version"])
    assert (wheel["file"], wheel["kind"], wheel["version"]) == (finished.name, "cpu", PROJECT["version"])
    assert wheel["sha256"] == hashlib.sha256(finished.read_bytes()).hexdigest()
    assert wheel["bytes"] == finished.stat().st_size
    with zipfile.ZipFile(finished) as archive:
        assert wheel["bytes_unpacked"] == sum(file.file_size for file in archive.infolist())
    assert wheel["build"] == build_info_in(library_path())
    assert set(wheel["build"]["upstream"]) == {"name", "version", "sha256", "edits"}
    assert wheel["build"]["compiler"]
    assert set(CARRIED) <= set(wheel["bytes_native"])
    assert "gpu_code" not in wheel


@needs_auditwheel
def test_the_manifest_says_why_this_system(finished: Path, manifest: dict[str, Any]) -> None:
    (wheel,) = manifest["wheels"]
    assert wheel["system"]["tag"] in wheel["tags"]
    glibc = tuple(map(int, re.findall(r"\d+", wheel["system"]["tag"])[:2]))
    assert make_wheels.version_key(wheel["system"]["newest_symbols"]["GLIBC"]) <= glibc
    assert not any("libgomp" in name or "cuda" in name for name in wheel["system"]["from_outside"])


def test_the_sums_are_those_of_sha256sum(finished: Path, manifest: dict[str, Any]) -> None:
    said = subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=finished.parent, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert said.stdout.splitlines() == [f"{finished.name}: OK", "manifest.json: OK"]


def test_a_wheel_described_again_keeps_its_source(finished: Path, manifest: dict[str, Any], tmp_path: Path) -> None:
    """Wheels of two commits may lie in one folder."""
    shutil.copy2(finished, tmp_path)
    told = json.loads(json.dumps(manifest))
    told["wheels"][0]["source"]["commit"] = "0" * 40
    (tmp_path / "manifest.json").write_text(json.dumps(told), encoding="utf-8")
    assert make_wheels.describe(tmp_path, make_wheels.source()) == told


# --- the label of CUDA -----------------------------------------------------------------------------------------------


def test_the_label_follows_from_the_library() -> None:
    """Build info of a CUDA engine and of the one that is tested."""
    recorded = json.loads((ROOT / "benchmarks" / "results" / "sizes.json").read_text(encoding="utf-8"))
    assert make_wheels.label_of(recorded["1.3b"]["engine"]) == "cu130"
    assert make_wheels.label_of({"cuda": {"toolkit": "12.8.93"}}) == "cu128"
    assert make_wheels.label_of(build_info_in(library_path()) or {}) == ""


def test_pip_installs_a_labelled_wheel(built: Path, tmp_path: Path) -> None:
    unpacked = make_wheels.unpack(built, tmp_path / "unpacked")
    make_wheels.put_label(unpacked, "cu130")
    make_wheels.python("-m", "wheel", "pack", unpacked, "--dest-dir", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == built.name.replace(NAME, f"{NAME}+cu130")
    check_record(wheel)
    make_wheels.python("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel)
    ask = "import sdsage, importlib.metadata as m; print(sdsage.__version__, m.version('sdsage'), sdsage.__file__)"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    said = make_wheels.python("-P", "-c", ask, env=env).split()
    # the label tells packages apart, not versions: records and checkpoints know 0.1.0
    assert said[:2] == [PROJECT["version"], f"{PROJECT['version']}+cu130"]
    assert said[2].startswith(str(tmp_path))
    with pytest.raises(make_wheels.WheelError, match=r"has a label already"):
        make_wheels.put_label(unpacked, "cu130")


# --- the build -------------------------------------------------------------------------------------------------------


def test_a_wheel_is_never_built_for_this_machine_alone() -> None:
    given = {"SDSAGE_NATIVE": "ON", "SDSAGE_CUDA": "1", "HOME": "/x"}
    cpu = make_wheels.build_environment("cpu", given)
    assert (cpu["SDSAGE_NATIVE"], cpu["SDSAGE_CUDA"], cpu["HOME"]) == ("OFF", "0", "/x")
    cuda = make_wheels.build_environment("cuda", given)
    assert (cuda["SDSAGE_NATIVE"], cuda["SDSAGE_CUDA"], cuda["SDSAGE_CUDA_ARCHS"]) == ("OFF", "1", "all")
    chosen = make_wheels.build_environment("cuda", {"SDSAGE_CUDA_ARCHS": "89;90a", "SDSAGE_GGML_CUDA_ARCHS": "90"})
    assert (chosen["SDSAGE_CUDA_ARCHS"], chosen["SDSAGE_GGML_CUDA_ARCHS"]) == ("89;90a", "90")


def test_files_that_differ_from_the_commit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run(["git", "-C", tmp_path, *identity, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    monkeypatch.setattr(make_wheels, "ROOT", tmp_path)
    assert make_wheels.source()["changed"] == []
    (tmp_path / "new file.txt").write_text("x")
    with pytest.raises(make_wheels.WheelError, match=r"differ from the commit.*new file\.txt.*--dirty") as error:
        make_wheels.make(["cpu"], tmp_path / "dist", dirty=False)
    assert error.value.misuse
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rocm"], "rocm is no kind of package: cpu, cuda, sdist"),
        (["finish", "no.whl"], "no.whl is not a wheel"),
        (["--build", "x"], "--build names one folder, and these are 2 packages: cpu, cuda"),
        (["describe"], "no wheel and no source package in"),
    ],
)
def test_misuse(words: list[str], said: str, tmp_path: Path) -> None:
    done = tool(*words, "--into", tmp_path / "dist")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "dist").exists()


def test_a_wheel_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other-1.0-py3-none-any.whl").write_bytes(b"no archive")
    done = tool("finish", tmp_path / "other-1.0-py3-none-any.whl", "--into", tmp_path / "dist")
    assert done.returncode == 1
    assert "make_wheels:" in done.stderr
    assert "Traceback (most recent call last)" not in done.stderr.splitlines()[0]
    assert not list((tmp_path / "dist").glob("*"))
