"""`sdsage doctor`: what is wrong here, and what is here."""

from collections.abc import Iterator, Mapping
from typing import Any

from sdsage.errors import SdsageError

from .console import console

_GIB = 2**30
_GGML = {
    "upstream": "as upstream has it, without SageAttention (SD_USE_UPSTREAM_GGML)",
    "system": "an installed one (SD_USE_SYSTEM_GGML)",
}
_SHOWN = ("libsdsage", "libcuda", "libcudart", "libcublas", "libnvidia")  # of the loaded files


def run(raw: Mapping[str, Any]) -> None:
    from sdsage._doctor import Level, examine

    report = examine(sass=bool(raw.get("sass")))
    if raw.get("json"):
        console().result(report.as_json(), exit_code=int(report.failed))
    else:
        print("\n".join(lines(report)))
    if report.failed:
        names = [p.name for p in report.problems if p.level is Level.ERROR]
        raise SdsageError(f"no job can run as this build is meant to: {', '.join(dict.fromkeys(names))}")


def lines(report: Any) -> Iterator[str]:
    """The report for people: problems first."""
    for problem in report.problems:
        yield f"{problem.level.name.lower()}: {problem.text}"
        yield f"    to mend it: {problem.mend}"
        yield f"    more: docs/troubleshooting.md, {problem.name}"
    if not report.problems:
        yield "nothing is wrong"
    yield ""
    for title, text in _rows(report.facts):
        first, *more = text.split("\n")
        yield f"{title:<13} {first}".rstrip()
        yield from (f"{'':<13} {line}" for line in more)


def _rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from _versions(facts["versions"], facts["python"])
    yield from _build(facts["build"])
    for row in facts["files"]:
        yield "file", f"{row['file']}  {_size(row['bytes'])}"
    for row in facts.get("gpu_code", []):
        ptx = f"; PTX {' '.join(row['ptx'])}" if row["ptx"] else ""
        yield "GPU code", f"{row['file']}: {row['problem'] or ' '.join(row['machine_code']) or 'none'}{ptx}"
    for path in facts["loaded"]:
        if path.rpartition("/")[2].startswith(_SHOWN):
            yield "loaded", path
    yield from _driver(facts["driver"])
    for device in facts["devices"]:
        yield "device", _device(device)
    for codec in facts["codecs"]:
        yield (
            "video",
            f"{codec['codec']} ({codec['encoder']}) in {', '.join(codec['files'])}: {codec['why_not'] or 'present'}",
        )
    for row in facts["folders"]:
        state = row["why_not"] or f"can be written, {_gib(row['bytes_free'])} free"
        yield "folder", f"{row['name']} {row['path']}: {state}"
    if facts["host_memory_free"] is not None:
        yield "memory", f"{_gib(facts['host_memory_free'])} free, with swap"
    for name, value in facts["environment"].items():
        yield "environment", f"{name}={value}"


def _versions(versions: Mapping[str, Any], python: str) -> Iterator[tuple[str, str]]:
    if versions:
        yield "sdsage", versions["sdsage"]
        yield "Python", f"{versions['python']}  {python}"
        yield "system", f"{versions['system']}, {versions['libc']}"
        yield "packages", ", ".join(f"{name} {found or '-'}" for name, found in versions["packages"].items())


def _build(build: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if build is None:
        return
    upstream, cuda = build["upstream"], build["cuda"]
    yield "library", f"{build['version']}, {build['compiler']}, {build['build_type']}"
    yield (
        "upstream",
        f"{upstream['name']} {upstream['version']}, edits {upstream['edits']}, sha256 {upstream['sha256']}",
    )
    own = (
        "every instruction of the CPU that built it"
        if build["native"] is True
        else "those that travel (on x86-64 AVX2, FMA, F16C and BMI2)"
    )
    yield "CPU code", f"-march={build['native']}" if isinstance(build["native"], str) else own
    if ggml := _GGML.get(build.get("ggml", "patched")):
        yield "ggml", ggml
    yield "CUDA", f"toolkit {cuda['toolkit']}, for {cuda['architectures']}" if cuda else "none: a build for the CPU"
    kernels = (cuda or {}).get("kernel_architectures", "")
    if kernels and cuda and kernels != cuda["architectures"]:
        yield "", f"SageAttention's kernels for {kernels}"
    yield from ((cuda or {}).get("nvcc_flags") or {}).items()


def _driver(driver: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if driver.get("library"):
        yield "driver", f"{driver.get('version') or '?'}, for CUDA {driver.get('cuda', '?')}, {driver['library']}"
    else:
        yield "driver", f"none of NVIDIA's ({driver.get('problem', '')})"
    for gpu in driver.get("gpus", []):
        yield "GPU", f"{gpu['name']}, compute capability {gpu['compute_capability']}"


def _device(device: Mapping[str, Any]) -> str:
    memory = f"{_gib(device['memory_free'])} of {_gib(device['memory_total'])} free"
    text = f"{device['name']} ({device['description']}), {memory}"
    sage = device.get("sage")
    if not sage:
        return text
    if not sage["supported"]:
        return f"{text}\n{sage['reason']}"
    emulated = ", emulated" if sage["emulated"] else ""
    text += f"\ncompute capability {sage['compute_capability']}; SageAttention: {sage['kernel']}{emulated}"
    text += f"; kernels for {' '.join(sage['architectures'])}, CUDA {sage['toolkit']}"
    return f"{text}\n{sage['why_not_better']}" if sage["why_not_better"] else text


def _gib(count: int | None) -> str:
    return f"{count / _GIB:.1f} GiB" if count is not None else "?"


def _size(count: int | None) -> str:
    if count is None:
        return "missing"
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count} bytes"
