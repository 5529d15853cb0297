"""The compilers' flags, read from compile_commands.json: none vanishes without a word.

The build of `make native`, and the one for CUDA that `make cuda-glue` configures (SDSAGE_CUDA_BUILD_DIR names another).
"""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from conftest import BUILD, ROOT

CUDA_BUILD = Path(os.environ.get("SDSAGE_CUDA_BUILD_DIR", ROOT / "build" / "cuda-glue"))
# part of the path of what is compiled -> kind
KINDS = {
    "/native/sage_cuda/": "kernels",
    "/native/sd_cli/": "ours",
    "/ggml/src/ggml-cpu/": "ggml-cpu",
    "/ggml/src/ggml-cuda/": "ggml-cuda",
    "/native/ggml-patched/cuda/": "ggml-cuda",
    "/ggml/src/": "ggml",
    "/examples/": "programs",
    "/thirdparty/": "others",
    "/src/": "stable-diffusion",
}


def commands(build: Path) -> dict[str, list[list[str]]]:
    """Words of the commands by kind, without the programs of the test suite."""
    found: dict[str, list[list[str]]] = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if "native/tests/" in entry["file"] + entry["output"]:
            continue
        kind = next((kind for part, kind in KINDS.items() if part in entry["file"]), "others")
        found.setdefault(kind, []).append(shlex.split(entry["command"]))
    return found


def file_of(words: list[str]) -> str:
    return words[words.index("-c") + 1]


def is_cuda(words: list[str]) -> bool:
    return file_of(words).endswith(".cu")


def lacking(group: list[list[str]], *flags: str) -> dict[str, list[str]]:
    """File -> flags that its command has not."""
    found = {file_of(words): [f for f in flags if f not in words] for words in group}
    return {file: missing for file, missing in found.items() if missing}


@pytest.fixture(scope="module")
def cpu() -> dict[str, list[list[str]]]:
    return commands(BUILD)


@pytest.fixture(scope="module")
def cuda() -> dict[str, list[list[str]]]:
    if not (CUDA_BUILD / "compile_commands.json").is_file():
        pytest.skip(f"{CUDA_BUILD} is not configured: make cuda-glue")
    return commands(CUDA_BUILD)


ENGINE = ("ours", "ggml", "ggml-cpu", "stable-diffusion")


def check_host(found: dict[str, list[list[str]]], kind: str) -> None:
    group = [words for words in found[kind] if not is_cuda(words)]
    assert group, kind
    assert lacking(group, "-O3", "-DNDEBUG", "-fPIC", "-DGGML_MAX_NAME=128") == {}
    cxx = [words for words in group if file_of(words).endswith(".cpp")]
    assert {w for words in cxx for w in words if w.startswith("-std=")} == {"-std=gnu++17"}
    assert not [w for words in group for w in words if w in ("-O0", "-O1", "-O2", "-g", "-ffast-math")]
    # the folders of this machine do not get into the library
    assert not [file_of(words) for words in group if not any(w.startswith("-ffile-prefix-map=") for w in words)]


@pytest.mark.parametrize("kind", ENGINE)
def test_host_code(kind: str, cpu: dict[str, list[list[str]]]) -> None:
    check_host(cpu, kind)


@pytest.mark.parametrize("kind", ENGINE)
def test_host_code_beside_cuda(kind: str, cuda: dict[str, list[list[str]]]) -> None:
    check_host(cuda, kind)


def test_instructions_of_this_cpu_are_for_ggmls_cpu_code_alone(cpu: dict[str, list[list[str]]]) -> None:
    """-march=native as the build's own option says, and nowhere else: the rest is the same on every CPU."""
    (option,) = re.findall(r'"native": (true|false|"[^"]+")', build_info(BUILD))
    march = {"true": {"-march=native"}, "false": set()}.get(option, {f"-march={option.strip(chr(34))}"})
    assert {w for words in cpu["ggml-cpu"] for w in words if w.startswith("-march")} == march
    if option == "false":
        assert lacking(cpu["ggml-cpu"], "-mavx2", "-mfma", "-mf16c") == {}
    for kind in ("ours", "ggml", "stable-diffusion", "programs"):
        assert not [w for words in cpu[kind] for w in words if w.startswith(("-march", "-mavx", "-mcpu"))]


def build_info(build: Path) -> str:
    return (build / "native" / "sd_cli" / "generated" / "sdsage_build_info.h").read_text()


def gencode(words: list[str]) -> list[str]:
    return [w for w in words if w.startswith(("--generate-code=", "-gencode", "-arch"))]


def test_the_kernels(cuda: dict[str, list[list[str]]]) -> None:
    """Machine code for the listed architectures and nothing else, compressed; fast mathematics; ptxas at its best."""
    group = [words for words in cuda["kernels"] if is_cuda(words)]
    assert len(group) == len([*(ROOT / "native" / "sage_cuda").glob("launch/*.cu")]) + 1  # and src/api.cu
    flags = ("-O3", "--use_fast_math", "-Xptxas", "-std=c++17", "-Xcompiler=-fPIC", "-Xcompiler=-fvisibility=hidden")
    assert lacking(group, *flags) == {}
    compressed = {"--compress-mode=size", "-Xfatbin=-compress-all"}  # the first from CUDA 12.8 on
    assert not [file_of(words) for words in group if not compressed & set(words)]
    (listed,) = re.findall(r'"kernel_architectures": "([^"]+)"', build_info(CUDA_BUILD))
    names = [name.removesuffix("-real") for name in listed.split()]
    assert names
    for words in group:
        assert words[words.index("-Xptxas") + 1] == "-O3"
        assert gencode(words) == [f"--generate-code=arch=compute_{n},code=[sm_{n}]" for n in names], file_of(words)
        assert f'-DSAGE_ARCHITECTURES="{" ".join(names)}"' in words


def test_ggmls_kernels(cuda: dict[str, list[list[str]]]) -> None:
    group = [words for words in cuda["ggml-cuda"] if is_cuda(words)]
    assert len(group) > 100
    assert any("sage_node.cu" in file_of(words) for words in group)
    flags = ("-O3", "-use_fast_math", "-std=c++17", "-Xcompiler=-fPIC", "-DGGML_MAX_NAME=128")
    assert lacking(group, *flags) == {}
    (listed,) = re.findall(r'"architectures": "([^"]+)"', build_info(CUDA_BUILD))
    code = [(name.rpartition("-")[0], name.rpartition("-")[2]) for name in listed.split()]
    expected = [f"--generate-code=arch=compute_{n},code=[{'sm' if k == 'real' else 'compute'}_{n}]" for n, k in code]
    for words in group:
        assert gencode(words) == expected, file_of(words)


def test_the_libraries_are_linked_as_they_must_be() -> None:
    """Nothing of another ggml in the process is taken, nothing of ours leaks, and all of upstream is in there."""
    text = (BUILD / "build.ninja").read_text()
    rule = re.search(r"^build bin/libsdsage\.so:.*?(?=^build )", text, re.M | re.S)
    assert rule
    assert "-Wl,--version-script=" in rule[0]
    assert "-Wl,-Bsymbolic" in rule[0]
    assert "--whole-archive" in rule[0]


def test_every_kind_of_file_is_known(cpu: dict[str, list[list[str]]], cuda: dict[str, Any]) -> None:
    assert set(cpu) >= {*ENGINE, "programs"}
    assert set(cuda) >= {*ENGINE, "programs", "kernels", "ggml-cuda"}
