"""The program that fetches and edits upstream: anchors, hash, caching, offline ways."""

import importlib.util
import io
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT

PATCHED = ROOT / "native" / "ggml-patched"
PROGRAM = PATCHED / "upstream.py"


def load(program: Path) -> ModuleType:
    """A program of the build, as a module."""
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[program.stem] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def upstream() -> ModuleType:
    return load(PROGRAM)


def run(into: Path, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    clean = {k: v for k, v in os.environ.items() if not k.startswith("SDSAGE_")}
    command = [sys.executable, str(PROGRAM), "--into", str(into)]
    return subprocess.run(command, env={**clean, **env}, capture_output=True, text=True)


def make_tree(upstream: ModuleType, root: Path) -> None:
    """A tree that holds every anchor once and nothing else."""
    texts: dict[str, list[str]] = {}
    edits = [edit for group in upstream.GROUPS for edit in group.edits]
    for edit in sorted(edits, key=lambda e: len(e.anchor), reverse=True):  # an anchor may hold a shorter one
        texts.setdefault(edit.file, [])
        if not any(edit.anchor in t for t in texts[edit.file]):
            texts[edit.file].append(edit.anchor)
    for name, anchors in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(anchors))
    (root / "CMakeLists.txt").write_text("project(x)\n")


def test_every_group_says_why_how_it_is_guarded_and_when_it_goes(upstream: ModuleType) -> None:
    names = [g.name for g in upstream.GROUPS]
    assert len(set(names)) == len(names)
    for group in upstream.GROUPS:
        assert all((group.why, group.drop, group.edits)), group.name
        for guard in group.guard.split(", "):
            file, _, test = guard.partition("::")
            assert (ROOT / file).is_file(), guard
            assert not test or f"def {test}(" in (ROOT / file).read_text(), guard


def test_an_anchor_must_match_exactly_once(upstream: ModuleType, tmp_path: Path) -> None:
    edit = upstream.Edit("a.cpp", "<", "anchor\n", "new\n")
    assert upstream.edit_text("x\nanchor\ny\n", edit) == "x\nnew\nanchor\ny\n"
    for text, count in (("nothing", 0), ("anchor\nanchor\n", 2)):
        with pytest.raises(upstream.UpstreamError, match=f"a.cpp: {count} matches for 'anchor'"):
            upstream.edit_text(text, edit)


def test_a_missing_anchor_stops_by_name_and_writes_nothing(upstream: ModuleType, tmp_path: Path) -> None:
    make_tree(upstream, tmp_path / "tree")
    util = tmp_path / "tree" / "src" / "util.cpp"
    util.write_text(util.read_text().replace("static char log_buffer", "char log_buffer"))
    result = run(tmp_path / "build", SDSAGE_UPSTREAM_DIR=str(tmp_path / "tree"))
    assert result.returncode == 1
    assert "src/util.cpp: 0 matches for 'static char log_buffer" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "build").glob("upstream-*"))


def test_a_given_tree_is_copied_and_edited_and_one_with_the_marker_is_taken(
    upstream: ModuleType, tmp_path: Path
) -> None:
    make_tree(upstream, tmp_path / "tree")
    before = (tmp_path / "tree" / "src" / "util.cpp").read_bytes()
    first = run(tmp_path / "build", SDSAGE_UPSTREAM_DIR=str(tmp_path / "tree"))
    assert first.returncode == 0, first.stderr
    edited = Path(first.stdout.strip())
    assert (tmp_path / "tree" / "src" / "util.cpp").read_bytes() == before
    assert "note_log" in (edited / "src" / "util.cpp").read_text()
    again = run(tmp_path / "build2", SDSAGE_UPSTREAM_DIR=str(edited))
    assert Path(again.stdout.strip()) == edited
    assert not (tmp_path / "build2").exists()
    # applied twice is refused: without its marker the edited tree is just another version
    (edited / upstream.MARKER).unlink()
    assert run(tmp_path / "build3", SDSAGE_UPSTREAM_DIR=str(edited)).returncode == 1


def test_a_given_tree_edited_again_looks_the_same_to_a_build(upstream: ModuleType, tmp_path: Path) -> None:
    make_tree(upstream, tmp_path / "tree")
    times = []
    for _ in range(2):
        edited = Path(run(tmp_path / "build", SDSAGE_UPSTREAM_DIR=str(tmp_path / "tree")).stdout.strip())
        times.append({p.name: p.stat().st_mtime_ns for p in edited.rglob("*.[ch]pp")})
    assert times[0]
    assert times[0] == times[1]


def test_crlf_files_are_edited_as_lf(upstream: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_bytes(b"one\r\nanchor\r\n")
    texts = upstream.edited_texts(tmp_path, [upstream.Edit("a.cpp", ">", "one\nanchor\n", "new\n")])
    assert texts == {"a.cpp": "one\nanchor\nnew\n"}


def test_a_wrong_hash_stops(tmp_path: Path) -> None:
    wrong = tmp_path / "sdist.tar.gz"
    with tarfile.open(wrong, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("x/vendor/stable-diffusion.cpp/CMakeLists.txt"), io.BytesIO())
    result = run(tmp_path / "build", SDSAGE_UPSTREAM_SDIST=str(wrong))
    assert result.returncode == 1
    assert "has sha256" in result.stderr
    assert "upstream.txt asks for 998d1957" in result.stderr


def test_a_named_sdist_that_is_not_there(tmp_path: Path) -> None:
    result = run(tmp_path / "build", SDSAGE_UPSTREAM_SDIST=str(tmp_path / "none"))
    assert result.returncode == 1
    assert "which is not a file" in result.stderr


def test_without_a_network_the_error_names_both_ways_out(tmp_path: Path) -> None:
    # an index on a closed loopback port, and no configuration that names another
    offline = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_RETRIES": "0",
        "PIP_TIMEOUT": "2",
    }
    result = run(tmp_path / "build", SDSAGE_CACHE_DIR=str(tmp_path / "cache"), **offline)
    assert result.returncode == 1
    for word in ("stable-diffusion-cpp-python 0.4.7", "SDSAGE_UPSTREAM_SDIST", "SDSAGE_UPSTREAM_DIR"):
        assert word in result.stderr
    assert not list(tmp_path.glob("cache/upstream/*.gz"))


def test_the_cached_sdist_is_used_without_pip(upstream: ModuleType, tmp_path: Path) -> None:
    """A second build folder unpacks what the first one fetched; the same folder is left alone."""
    _, _, sha256 = upstream.read_pin()
    cached = upstream.cache_dir() / "upstream" / f"{sha256}.tar.gz"
    default = Path.home() / ".cache" / "sdsage" / "upstream" / f"{sha256}.tar.gz"
    sdist = next((p for p in (cached, default) if p.is_file()), None)
    if sdist is None:
        pytest.skip("the build did not fetch the sdist: SDSAGE_UPSTREAM_DIR was given")
    (tmp_path / "cache" / "upstream").mkdir(parents=True)
    (tmp_path / "cache" / "upstream" / sdist.name).symlink_to(sdist)
    env = {"SDSAGE_CACHE_DIR": str(tmp_path / "cache"), "PIP_INDEX_URL": "http://127.0.0.1:9/"}
    first = run(tmp_path / "build", **env)
    assert first.returncode == 0, first.stderr
    tree = Path(first.stdout.strip())
    stamp = (tree / "src" / "wan.hpp").stat().st_mtime_ns
    assert run(tmp_path / "build", **env).stdout == first.stdout
    assert (tree / "src" / "wan.hpp").stat().st_mtime_ns == stamp


def test_ggml_can_be_left_as_it_is(upstream: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SD_USE_UPSTREAM_GGML: edits below ggml/ are left out, and the tree has another name."""
    (tmp_path / "ggml").mkdir()
    for name in ("ggml/a.c", "b.c"):
        (tmp_path / name).write_text("anchor\n")
    edits = tuple(upstream.Edit(name, ">", "anchor\n", "edited\n") for name in ("ggml/a.c", "b.c"))
    group = type(upstream.GROUPS[0])("both", "why", "guard", "drop", edits)
    monkeypatch.setattr(upstream, "GROUPS", (group,))
    upstream.apply_edits(tmp_path, leave_ggml=True)
    assert (tmp_path / "ggml/a.c").read_text() == "anchor\n"
    assert (tmp_path / "b.c").read_text() == "anchor\nedited\n"
    assert upstream.is_marked(tmp_path, leave_ggml=True)
    assert not upstream.is_marked(tmp_path)


def test_the_fetch_works_inside_a_build_by_pip(
    upstream: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install .` as the first command: what pip told our build backend is in the environment."""
    monkeypatch.setenv("_PYPROJECT_HOOKS_BUILD_BACKEND", "sdsage_build")
    monkeypatch.setenv("_PYPROJECT_HOOKS_BACKEND_PATH", str(ROOT / "native" / "cmake"))
    monkeypatch.setenv("PEP517_BACKEND_PATH", str(ROOT / "native" / "cmake"))
    upstream.pip_download(tmp_path)
    (fetched,) = tmp_path.glob("*.tar.gz")
    upstream.check_hash(fetched, upstream.read_pin()[2])
