"""`sdsage doctor` in broken situations. They are real: files are damaged, libraries are compiled that misbehave."""

import ast
import contextlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import PACKAGE, ROOT
from hypothesis import given
from hypothesis import strategies as st

from sdsage._doctor import Report, engine, files, gpus
from sdsage._doctor.child import ChildFailed, ask
from sdsage._doctor.machine_code import gpu_code
from sdsage._library import ABI_VERSION, cdef_path, library_path, sd_cli_path

HANG = 120  # seconds: no measure, only the end of waiting


def doctor(*args: str, **env: str) -> "subprocess.CompletedProcess[str]":
    clean = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    path = os.pathsep.join(filter(None, [env.pop("BEFORE", ""), PACKAGE]))
    return subprocess.run(
        [sys.executable, "-P", "-m", "sdsage", "doctor", *args],
        capture_output=True,
        text=True,
        env={**clean, "PYTHONPATH": path, **env},
        timeout=HANG,
    )


def found(code: int | None = None, **env: str) -> dict[str, Any]:
    """The result as JSON; whatever is wrong, it is one line and there is no traceback."""
    done = doctor("--json", **env)
    assert "Traceback" not in done.stderr, done.stderr
    assert len(done.stdout.splitlines()) == 1, done.stdout
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["exit_code"] == done.returncode
    assert code is None or done.returncode == code, result["problems"]
    assert all(p["text"] and p["mend"] for p in result["problems"])
    return result


def names(result: dict[str, Any]) -> list[str]:
    return [p["name"] for p in result["problems"]]


def compiled(folder: Path, name: str, source: str) -> Path:
    (folder / "source.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", folder / "source.c", "-o", folder / name], check=True)
    return folder / name


def library_folder(folder: Path) -> Path:
    """A copy of what stands beside the library, without the library."""
    shutil.copy(cdef_path(), folder)
    if sd_cli_path().is_file():
        (folder / "sd-cli").symlink_to(sd_cli_path())
    return folder


def test_what_works() -> None:
    result = found(0)
    assert not [p for p in result["problems"] if p["level"] == "error"]
    assert result["build"]["upstream"]["version"] == "0.4.7"
    assert [Path(f["file"]).name for f in result["files"]] == ["libsdsage.so", "cdef.h", "sd-cli"]
    assert result["devices"][-1]["name"] == "cpu"
    assert result["devices"][-1]["sage"]["reason"]
    assert os.path.realpath(library_path()) in map(os.path.realpath, result["loaded"])
    assert {f["name"]: f["writable"] for f in result["folders"]} == {"cache": True, "temporary": True, "current": True}
    assert "gpu_code" not in result


def test_the_report_for_people(tmp_path: Path) -> None:
    """Problems stand first, each with its command; then the facts."""
    done = doctor("--sass", SDSAGE_LIB_DIR=str(tmp_path))
    assert done.returncode == 1
    first, mend, more, *_ = done.stdout.splitlines()
    assert first.startswith(f"error: sdsage's native library is not built: {tmp_path}")
    assert "pip install" in mend
    assert "library-missing" in more
    assert done.stdout.index("Python ") > done.stdout.index("error: ")
    assert done.stderr == "error: no job can run as this build is meant to: library-missing\n"


@pytest.mark.parametrize("missing", ["cdef.h", "libsdsage.so"])
def test_a_missing_file(missing: str, tmp_path: Path) -> None:
    for path in (cdef_path(), library_path()):
        if path.name != missing:
            (tmp_path / path.name).symlink_to(path)
    result = found(1, SDSAGE_LIB_DIR=str(tmp_path))
    assert names(result)[0] == "library-missing"
    assert result["codecs"]  # the rest is looked at all the same


def test_other_verbs_without_the_library_are_one_line(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": PACKAGE, "SDSAGE_LIB_DIR": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "sdsage", "devices"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("error: sdsage's native library is not built")
    assert len(done.stderr.splitlines()) == 1
    command[-1] = "--help"
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_installed_command_starts_without_the_library(tmp_path: Path) -> None:
    """pip writes a script of this name, whose first line imports the package."""
    (tmp_path / "sdsage").write_text("from sdsage.cli import main\nmain()\n")
    env = {**os.environ, "PYTHONPATH": PACKAGE, "SDSAGE_LIB_DIR": str(tmp_path)}
    command = [sys.executable, tmp_path / "sdsage", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert names(json.loads(done.stdout))[0] == "library-missing", done.stderr


def test_a_current_folder_that_was_deleted(tmp_path: Path) -> None:
    """What a shell is in after its folder was removed elsewhere."""
    code = f"import os, runpy, sys; os.rmdir({str(tmp_path)!r}); sys.argv = ['sdsage', 'doctor', '--json']; "
    code += "runpy.run_module('sdsage', run_name='__main__')"
    env = {**os.environ, "PYTHONPATH": PACKAGE}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    result = json.loads(done.stdout)
    assert done.returncode == 0
    assert "folder-unwritable" in names(result)
    assert "doctor-failed" not in names(result)


@pytest.mark.parametrize("part", [0, 0.0001, 0.01, 0.5, 0.95])
def test_a_truncated_library(part: float, tmp_path: Path) -> None:
    """Cut where the loader notices it, and where the process gets a signal instead."""
    folder = library_folder(tmp_path)
    whole = library_path().read_bytes()
    (folder / "libsdsage.so").write_bytes(whole[: int(part * len(whole))])
    assert names(found(1, SDSAGE_LIB_DIR=str(folder)))[0] in ("library-damaged", "library-crashes")


def test_declarations_of_another_version(tmp_path: Path) -> None:
    (tmp_path / "libsdsage.so").symlink_to(library_path())
    text = cdef_path().read_text()
    assert f"/* ABI {ABI_VERSION} */" in text
    (tmp_path / "cdef.h").write_text(text.replace(f"/* ABI {ABI_VERSION} */", "/* ABI 99 */"))
    result = found(1, SDSAGE_LIB_DIR=str(tmp_path))
    assert names(result)[0] == "library-abi"
    assert "ABI version 99" in result["problems"][0]["text"]


def test_declarations_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "libsdsage.so").symlink_to(library_path())
    (tmp_path / "cdef.h").write_bytes(b"\xff\xfe" * 100)
    assert names(found(1, SDSAGE_LIB_DIR=str(tmp_path)))[0] == "library-abi"


MISBEHAVING = {
    "another ABI": ("int sdsage_abi_version(void) { return 99; }", "library-abi", "ABI version 99"),
    "aborts": (
        "#include <stdio.h>\n#include <stdlib.h>\n__attribute__((constructor)) static void start(void) {"
        ' fputs("no such luck\\n", stderr); abort(); }',
        "library-crashes",
        "SIGABRT",
    ),
    "another CPU": (
        "__attribute__((constructor)) static void start(void) { __builtin_trap(); }",
        "library-cpu",
        "SIGILL",
    ),
    "exits": (
        "#include <unistd.h>\n__attribute__((constructor)) static void start(void) { _exit(3); }",
        "library-crashes",
        "exit code 3",
    ),
    "needs a driver": ("extern int cuInit(int); int f(void) { return cuInit(0); }", "driver-missing", "libcuda.so.1"),
}


@pytest.mark.parametrize("name", MISBEHAVING)
def test_a_library_that_misbehaves(name: str, tmp_path: Path) -> None:
    source, problem, said = MISBEHAVING[name]
    folder = library_folder(tmp_path)
    if name == "needs a driver":
        if ask("driver")["library"]:
            pytest.skip("there is a driver here")
        (folder / "gone").mkdir()
        compiled(folder / "gone", "libcuda.so.1", "int cuInit(int x) { return x; }")
        (folder / "a.c").write_text(source)
        command = ["cc", "-shared", "-fPIC", folder / "a.c", folder / "gone" / "libcuda.so.1"]
        subprocess.run([*command, "-Wl,-soname,libsdsage.so", "-o", folder / "libsdsage.so"], check=True)
        needed = (folder / "libsdsage.so").read_bytes()  # linked by its path: only the name is to be needed
        path = str(folder / "gone" / "libcuda.so.1").encode()
        (folder / "libsdsage.so").write_bytes(needed.replace(path, b"libcuda.so.1".ljust(len(path), b"\0")))
        shutil.rmtree(folder / "gone")
    else:
        compiled(folder, "libsdsage.so", source)
    result = found(1, SDSAGE_LIB_DIR=str(folder))
    assert names(result)[0] == problem
    assert said in result["problems"][0]["text"]
    if name == "another CPU":
        assert "SDSAGE_NATIVE=OFF" in result["problems"][0]["mend"]
    if name == "aborts":
        assert "no such luck" in result["problems"][0]["text"]


def test_a_library_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(
        library_folder(tmp_path),
        "libsdsage.so",
        "#include <unistd.h>\n__attribute__((constructor)) static void start(void) { for (;;) sleep(1); }",
    )
    monkeypatch.setenv("SDSAGE_LIB_DIR", str(tmp_path))
    monkeypatch.setattr(engine, "PATIENCE", 2.0)
    report = Report()
    engine.look(report)
    assert [p.name for p in report.problems] == ["engine-silent"]
    assert report.failed


def test_a_cache_that_can_t_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = found(0, SDSAGE_CACHE_DIR=str(tmp_path / "file" / "cache"))
    (problem,) = [p for p in result["problems"] if p["name"] == "folder-unwritable"]
    assert problem["level"] == "warning"
    assert "SDSAGE_CACHE_DIR" in problem["mend"]
    assert str(tmp_path / "file" / "cache") in problem["text"]


def test_a_cache_on_a_disk_without_writing() -> None:
    result = found(0, SDSAGE_CACHE_DIR="/proc/sdsage")
    assert "folder-unwritable" in names(result)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    found(0, SDSAGE_CACHE_DIR=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_no_pyav(tmp_path: Path) -> None:
    """Python's own way to change every process: a sitecustomize that lets nobody import av."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n\n\nclass Blocked:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'av':\n            raise ImportError('av is blocked')\n\n\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    result = found(0, BEFORE=str(tmp_path))
    (problem,) = [p for p in result["problems"] if p["name"] == "pyav-missing"]
    assert problem["mend"] == "pip install 'sdsage[video]'"
    assert result["codecs"] == []


def test_a_pyav_that_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "av.py").write_text("import os\nos.abort()\n")
    result = found(0, BEFORE=str(tmp_path))
    (problem,) = [p for p in result["problems"] if p["name"] == "pyav-broken"]
    assert "SIGABRT" in problem["text"]


def test_packages_of_another_version_are_told() -> None:
    assert re.match(r"\d+\.", found()["versions"]["packages"]["cffi"])


# ---- NVIDIA's driver, as a library of our own in its place: this machine has none, or a working one

DRIVER = """
#include <string.h>
int cuDriverGetVersion(int * v) { *v = VERSION; return 0; }
int cuInit(int flags) { return INIT; }
int cuDeviceGetCount(int * n) { *n = GPUS; return 0; }
int cuDeviceGet(int * d, int i) { *d = i; return 0; }
int cuDeviceGetName(char * name, int size, int d) { strncpy(name, "A card", size); return 0; }
int cuDeviceGetAttribute(int * v, int what, int d) { *v = what == 75 ? 8 : 6; return 0; }
int cuGetErrorName(int e, const char ** s) { *s = "CUDA_ERROR_X"; return 0; }
int cuGetErrorString(int e, const char ** s) { *s = "it does not work"; return 0; }
"""
BUILD = {"cuda": {"toolkit": "13.0.88", "architectures": "89-real 90a-real"}}
CPU = {"name": "cpu", "description": "CPU", "sage": {"compute_capability": ""}}


def with_driver(
    folder: Path, monkeypatch: pytest.MonkeyPatch, version: int = 13000, init: int = 0, cards: int = 0
) -> Report:
    source = DRIVER.replace("VERSION", str(version)).replace("INIT", str(init)).replace("GPUS", str(cards))
    (folder / "libcuda.so.1").symlink_to(compiled(folder, "libcuda.so.580.95.05", source))  # as it is installed
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    report = Report()
    report.facts |= {"build": BUILD, "devices": [CPU], "driver": ask("driver")}
    return report


@pytest.mark.parametrize(
    ("driver", "problem", "said"),
    [
        ({"version": 12040, "cards": 1}, "driver-old", "for CUDA 12.4"),
        ({"init": 803}, "driver-broken", "it does not work (CUDA_ERROR_X, 803)"),
        ({}, "gpu-missing", "sees no GPU"),
        ({"cards": 1}, "gpu-not-seen", "the engine does not"),
    ],
)
def test_a_build_for_cuda_that_lists_no_gpu(
    driver: dict[str, int], problem: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = with_driver(tmp_path, monkeypatch, **driver)
    assert report.facts["driver"]["library"] == str(tmp_path / "libcuda.so.580.95.05")
    gpus.look(report)
    assert [p.name for p in report.problems] == [problem]
    assert said in report.problems[0].text
    assert report.failed


def test_gpus_that_a_variable_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = with_driver(tmp_path, monkeypatch, init=100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    gpus.look(report)
    assert [p.name for p in report.problems] == ["gpu-hidden"]


def test_a_gpu_beside_a_build_for_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = with_driver(tmp_path, monkeypatch, cards=1)
    report.facts["build"] = {"cuda": None}
    gpus.look(report)
    assert [p.name for p in report.problems] == ["gpu-unused"]
    assert report.facts["driver"]["gpus"] == [{"name": "A card", "compute_capability": "8.6"}]
    assert not report.failed


def test_a_driver_that_ends_the_process(tmp_path: Path) -> None:
    compiled(tmp_path, "libcuda.so.1", "#include <stdlib.h>\nint cuDriverGetVersion(int * v) { abort(); }")
    result = found(LD_LIBRARY_PATH=str(tmp_path))
    assert "driver-broken" in names(result)
    assert "SIGABRT" in result["driver"]["problem"]


def sage(number: str, **more: Any) -> dict[str, Any]:
    info = {"compute_capability": number, "supported": True, "kernel": "fp16", "emulated": False}
    return {**info, "reason": "", "why_not_better": "", "architectures": ["89", "90a"], "toolkit": "13.0", **more}


@pytest.mark.parametrize(
    ("device", "problem", "mend"),
    [
        (sage("8.6"), "gpu-architecture", "SDSAGE_CUDA_ARCHS=86 "),
        (sage("12.0"), "gpu-architecture", "SDSAGE_CUDA_ARCHS=120a "),
        (sage("9.0", kernel="fp8", emulated=True, why_not_better="it is emulated"), "sage-emulated", "fp16"),
        (sage("8.9", why_not_better="fp8 needs CUDA 12.4"), "sage-not-best", "CUDA 12.8"),
        (sage("8.9", supported=False, reason="an old toolkit"), "sage-unavailable", "SDSAGE_CUDA_ARCHS=89 "),
        (sage("8.9", kernel="fp8++"), None, ""),
    ],
)
def test_what_a_gpu_gets(device: dict[str, Any], problem: str | None, mend: str) -> None:
    report = Report()
    gpu = {"name": "cuda:0", "description": "A card", "sage": device}
    report.facts |= {"build": BUILD, "devices": [gpu, CPU]}
    gpus.look(report)
    assert [p.name for p in report.problems] == ([problem] if problem else [])
    assert all(mend in p.mend for p in report.problems)
    assert report.failed is (problem == "gpu-architecture")


def test_flags_that_the_build_saw() -> None:
    report = Report()
    cuda = {**BUILD["cuda"], "nvcc_flags": {"NVCC_APPEND_FLAGS": "--maxrregcount=64"}}
    report.facts |= {"build": {"cuda": cuda}, "devices": [{"name": "cuda:0", "sage": sage("8.9")}]}
    gpus.look(report)
    assert [p.name for p in report.problems] == ["nvcc-flags"]
    assert "NVCC_APPEND_FLAGS=--maxrregcount=64" in report.problems[0].text


CARDS = (75, 80, 86, 89, 90, 100, 103, 120)


@pytest.mark.parametrize(
    ("architectures", "runs"),
    [
        ("80-real", {80, 86, 89}),
        ("86-real", {86, 89}),
        ("90a-real", {90}),
        ("80", {80, 86, 89, 90, 100, 103, 120}),
        ("90-virtual", {90, 100, 103, 120}),
        ("90a-virtual", {90}),
        ("100f-real", {100, 103}),
        ("75-real 120a-real", {75, 120}),
        ("native", {*CARDS}),
        ("", {*CARDS}),
    ],
)
def test_which_gpus_code_runs_on(architectures: str, runs: set[int]) -> None:
    assert {n for n in CARDS if gpus.covers(architectures, n)} == runs


# ---- GPU code in files


def elf(sections: dict[str, bytes]) -> bytes:
    """A 64-bit ELF file with these sections and nothing else."""
    titles = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".shstrtab"))
    body, headers = b"", [bytes(64)]
    for name, content in (*sections.items(), (".shstrtab", titles)):
        at = titles.index(name.encode() + b"\0")
        headers.append(struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, 64 + len(body), len(content), 0, 0, 8, 0))
        body += content + bytes(-len(content) % 8)
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64,
                       len(headers), len(headers) - 1)  # fmt: skip
    return head + body + b"".join(headers)


def container(*entries: tuple[int, int, int, bytes]) -> bytes:
    """What nvcc embeds: entries of (kind, architecture, flags, content)."""
    body = b"".join(
        struct.pack("<HHIQIIIIIIQQQ", kind, 0x101, 64, len(content), 0, 0, 8, arch, 0, 0, 0x11 | flags, 0, 0) + content
        for kind, arch, flags, content in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


WHOLE = elf({
    ".text": b"code",
    ".nv_fatbin": container((2, 80, 0, bytes(40)), (2, 90, 0x100000, bytes(16)), (1, 120, 0x200000, b"ptx\n" * 4))
    + bytes(8)
    + container((2, 100, 0x208000, bytes(24)), (2, 80, 0, bytes(8))),
})  # fmt: skip


def test_gpu_code_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.so").write_bytes(WHOLE)
    code = gpu_code(tmp_path / "a.so")
    assert (code.machine_code, code.ptx) == (("80", "90a", "100f"), ("120f",))
    (tmp_path / "b.so").write_bytes(elf({".text": b"code"}))
    assert gpu_code(tmp_path / "b.so").machine_code == ()


@given(st.integers(0, len(WHOLE)), st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=8))
def test_a_damaged_file_is_an_error_and_no_more(
    tmp_path_factory: pytest.TempPathFactory, size: int, at: int, junk: bytes
) -> None:
    file = tmp_path_factory.mktemp("elf") / "a.so"
    for data in (WHOLE[:size], WHOLE[:at] + junk + WHOLE[at + len(junk) :]):
        file.write_bytes(data)
        with contextlib.suppress(ValueError):
            gpu_code(file)


def test_gpu_code_beside_what_cuobjdump_lists(tmp_path: Path) -> None:
    """Every way to compress, and names with letters. cuobjdump prints 100 for machine code of 100f."""
    nvcc, cuobjdump = (
        shutil.which("nvcc"),
        next(iter(Path(sys.prefix).glob("lib/*/site-packages/nvidia/cu*/bin/cuobjdump")), None),
    )
    if nvcc is None or cuobjdump is None:
        pytest.skip("needs nvcc on PATH and the wheel nvidia-cuda-cuobjdump")
    (tmp_path / "k.cu").write_text("__global__ void k(float * a) { a[0] = 1; }\n")
    kinds = ["80,code=sm_80", "80,code=compute_80", "90a,code=sm_90a", "90a,code=compute_90a", "103a,code=sm_103a"]
    for mode in ("none", "speed", "size"):
        out = tmp_path / f"{mode}.o"
        options = [word for kind in kinds for word in ("-gencode", f"arch=compute_{kind}")]
        done = subprocess.run(
            [nvcc, "-c", tmp_path / "k.cu", "-o", out, f"--compress-mode={mode}", *options],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            pytest.skip(f"this nvcc can't: {done.stderr[-200:]}")
        told = subprocess.run(
            [cuobjdump, "--list-elf", "--list-ptx", out], capture_output=True, text=True, check=True
        ).stdout
        code = gpu_code(out)
        assert set(code.machine_code) == set(re.findall(r"sm_(\w+)\.cubin", told)) == {"80", "90a", "103a"}
        assert set(code.ptx) == set(re.findall(r"sm_(\w+)\.ptx", told)) == {"80", "90a"}


def test_what_is_in_the_file_against_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libsdsage.so").write_bytes(WHOLE)
    monkeypatch.setenv("SDSAGE_LIB_DIR", str(tmp_path))
    for architectures, problems in (("80-real 90a-real", []), ("80-real 89-real", ["gpu-code-differs"])):
        report = Report()
        report.facts["build"] = {"cuda": {"toolkit": "13.0", "architectures": architectures}}
        files.look_at_code(report)
        assert [p.name for p in report.problems] == problems
    assert "holds 100f, 80, 90a" in report.problems[0].text


def test_the_build_is_read_from_a_library_that_can_t_load(tmp_path: Path) -> None:
    info = files.build_info_in(library_path())
    assert info is not None
    assert info["upstream"]["name"] == "stable-diffusion-cpp-python"
    (tmp_path / "other").write_bytes(b'\0{"version": "1" and so on}\0')
    assert files.build_info_in(tmp_path / "other") is None
    assert files.build_info_in(tmp_path / "none") is None


def test_a_child_that_says_nothing() -> None:
    with pytest.raises(ChildFailed, match="no such question"):
        ask("no such question")


def problem_names() -> set[str]:
    """Every name that the code gives to a problem."""
    found = set()
    for file in (ROOT / "sdsage" / "_doctor").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if re.fullmatch(r"[a-z]+(-[a-z]+)+", node.value) else set()
    return found - {"sd-cli", "nvidia-cublas", "nvidia-cuda-runtime"}


def test_every_problem_has_a_section_in_the_docs() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^### (\S+)$", text, re.MULTILINE)) == problem_names()
