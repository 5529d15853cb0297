"""Output names, what is refused before any work, and files that appear whole or not at all."""

import itertools
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sdsage.errors import BadRequest, MissingExtra, OutputError, SdsageError
from sdsage.media import Metadata, naming, plan_output, pyav, read_metadata, stills

FRAMES = np.random.default_rng(0).integers(0, 256, (4, 40, 48, 3), np.uint8)
CONTAINERS = ["out.mp4", "out.webm", "out.gif", "out.webp", "out_%02d.png", "out_%d.jpg", "out_%d.webp"]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@given(
    parts=st.lists(
        st.one_of(
            st.sampled_from(["%%", "%d", "%1d", "%03d", "%5d", "%0d", "%012d"]),
            st.text(st.characters(exclude_characters="%/\0", exclude_categories=["Cs"]), max_size=4),
        ),
        max_size=6,
    ),
    index=st.integers(0, 10**6),
)
def test_patterns_are_printf(parts: list[str], index: int) -> None:
    places = sum(part[0] == "%" and part[-1] == "d" for part in parts if part)
    pattern = "".join(parts)
    assert naming.is_pattern(pattern) == (places > 0)
    assert naming.fill(naming.literal(pattern), index, {}) == pattern % ((index,) * places)


@given(count=st.integers(1, 200), begin=st.integers(0, 10**4), width=st.integers(0, 9))
def test_names_are_distinct_and_ordered(count: int, begin: int, width: int) -> None:
    template = f"a/f_%0{width}d.png" if width else naming.numbered("a/f.png")
    fields = [{"index": str(begin + i)} for i in range(count)]
    names = naming.file_names(template, count, begin, fields)
    assert len(set(names)) == count
    if count > 1 or width:
        assert [int(name.removeprefix("a/f_").removesuffix(".png")) for name in names] == [
            begin + k for k in range(count)
        ]


@pytest.mark.parametrize(
    ("name", "count", "begin", "expected"),
    [
        ("a.png", 1, None, ["a.png"]),
        ("a.png", 3, None, ["a_0.png", "a_1.png", "a_2.png"]),
        ("a.PNG", 2, 7, ["a_7.PNG", "a_8.PNG"]),
        ("a.b.jpg", 2, -1, ["a.b_0.jpg", "a.b_1.jpg"]),
        ("100%.png", 2, None, ["100%_0.png", "100%_1.png"]),
        ("100%%_%d.png", 2, 1, ["100%_1.png", "100%_2.png"]),
        ("d_%d/x.webp", 2, 1, ["d_1/x.webp", "d_2/x.webp"]),
        ("猫 🐱/é.png", 1, None, ["猫 🐱/é.png"]),
    ],
)
def test_image_names(tmp_path: Path, name: str, count: int, begin: int | None, expected: list[str]) -> None:
    output = plan_output(tmp_path / name, video=False, count=count, begin_index=begin)
    assert files(tmp_path) == []  # planning creates nothing
    written = output.write(FRAMES[:count])
    assert [str(path.relative_to(tmp_path)) for path in written] == expected
    for path, frame in zip(written, FRAMES, strict=False):
        with Image.open(path) as image:
            assert np.asarray(image).shape == frame.shape


@pytest.mark.parametrize(
    ("name", "video", "count", "texts"),
    [
        ("", True, 5, ["is a folder", "out.mp4"]),
        ("folder", False, 1, ["is a folder", "out.png"]),
        ("new/", False, 1, ["is a folder"]),
        ("out", True, 5, ["extension is missing", ".mp4", "out_%04d.png"]),
        (".mp4", True, 5, ["extension is missing"]),
        ("out.avi", True, 5, [".avi is not possible", ".mp4, .webm, .gif or .webp"]),
        ("out.mkv", True, 1, [".mkv is not possible", ".png"]),
        ("out.mp4", False, 1, [".mp4 is not possible", ".png"]),
        ("out.gif", False, 1, [".gif is not possible", ".png"]),
        ("out.png", True, 5, ["one image, not 5 frames", "out_%04d.png", ".mp4"]),
        ("out_%d.mp4", True, 5, ["frame number", ".png"]),
        ("out_%d", True, 5, ["frame number", ".png"]),
        ("out.mp4", True, 0, ["at least 1"]),
        ("file.txt/out.png", False, 1, ["file.txt", "is a file"]),
        ("file.txt/a/b/out.png", False, 1, ["file.txt", "is a file"]),
        ("there.png", False, 1, ["there.png", "exists already", "--overwrite"]),
        ("there_%d.png", False, 3, ["there_2.png", "exists already"]),
        ("there.gif", True, 3, ["there.gif", "exists already"]),
        ("dir.png", False, 1, ["dir.png", "is a folder"]),
        ("pipe.png", False, 1, ["pipe.png", "not a plain file"]),
        ("a\0b.png", False, 1, ["zero byte"]),
        ("n" * 300 + ".png", False, 1, ["File name too long"]),
    ],
)
def test_refusals(tmp_path: Path, name: str, video: bool, count: int, texts: list[str]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "dir.png").mkdir()
    (tmp_path / "file.txt").write_text("x")
    for there in ("there.png", "there_2.png", "there.gif"):
        (tmp_path / there).write_text("x")
    os.mkfifo(tmp_path / "pipe.png")
    before = files(tmp_path)
    with pytest.raises(BadRequest) as caught:
        plan_output(f"{tmp_path}/{name}", video=video, count=count)
    assert caught.value.exit_code == 2
    for text in texts:
        assert text in str(caught.value)
    assert files(tmp_path) == before


def test_overwrite_never_replaces_a_folder_or_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "dir.png").mkdir()
    for name in ("pipe.png", "dir.png"):
        with pytest.raises(OutputError):
            plan_output(tmp_path / name, video=False, count=1, overwrite=True)


def test_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    if os.geteuid() == 0:  # root may write anywhere: ask as somebody else would be answered
        monkeypatch.setattr(os, "access", lambda path, mode: os.stat(path).st_mode & 0o200 != 0)
    for name in ("out.png", "deep/er/out.png"):
        with pytest.raises(OutputError, match=r"locked.* is not writable"):
            plan_output(locked / name, video=False, count=1)


@pytest.mark.parametrize("name", ["out.mp4", "out.webm"])
def test_without_pyav(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "av", None)  # importing it raises ImportError
    with pytest.raises(MissingExtra, match=r"pip install 'sdsage\[video\]'") as caught:
        plan_output(tmp_path / name, video=True, count=5)
    assert caught.value.exit_code == 2
    assert files(tmp_path) == []
    for other in ("out.gif", "out.webp", "f_%d.png"):
        plan_output(tmp_path / other, video=True, count=4).write(FRAMES)
    assert len(files(tmp_path)) == 6


def test_without_the_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(av, "codecs_available", {"libvpx-vp9", "mpeg4"})
    with pytest.raises(OutputError, match=r"libx264.*present: libvpx-vp9"):
        plan_output(tmp_path / "out.mp4", video=True, count=5)
    plan_output(tmp_path / "out.webm", video=True, count=5)


def test_importing_media_does_not_import_pyav() -> None:
    code = "import sys, sdsage.media; sys.exit('av' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False, timeout=60).returncode == 0


def break_pillow(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Pillow writes half a file, then fails; a sequence fails after some whole images."""
    real, calls = Image.Image.save, itertools.count()

    def save(self: Image.Image, target: object, *args: object, **options: object) -> None:
        if isinstance(target, Path):
            target.write_bytes(b"half")
        if next(calls) % 4 == 2 or options.get("save_all"):
            raise error
        real(self, target, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Image.Image, "save", save)


def break_pyav(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The third frame fails on its way to the encoder."""
    real = pyav._yuv

    def yuv(module: object, rgb: object, index: int, fps: int) -> object:
        if index == 2:
            raise error
        return real(module, rgb, index, fps)  # type: ignore[arg-type]

    monkeypatch.setattr(pyav, "_yuv", yuv)


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device"), MemoryError()])
def test_failure_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException
) -> None:
    old = naming.fill(name, 0, {})
    (tmp_path / old).write_bytes(b"older file")
    output = plan_output(tmp_path / name, video=True, count=4, overwrite=True)
    elsewhere = plan_output(tmp_path / "a" / "b" / name, video=True, count=4)
    break_pillow(monkeypatch, error)
    break_pyav(monkeypatch, error)
    expected: type[BaseException] = SdsageError if isinstance(error, OSError) else type(error)
    for plan in (output, elsewhere):
        with pytest.raises(expected) as caught:
            plan.write(FRAMES)
        if isinstance(caught.value, SdsageError):
            assert caught.value.exit_code == 1
            assert "No space left on device" in str(caught.value)
    assert files(tmp_path) == [old]
    assert (tmp_path / old).read_bytes() == b"older file"


@contextmanager
def full_disk() -> Iterator[None]:
    """Inside, no file of this process grows beyond 1 KiB: not pytest's own output either, so nothing may be printed."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("name", CONTAINERS)
def test_full_disk(tmp_path: Path, name: str) -> None:
    old = naming.fill(name, 0, {})
    (tmp_path / old).write_bytes(b"older file")
    output = plan_output(tmp_path / name, video=True, count=4, overwrite=True)
    with full_disk(), pytest.raises(SdsageError) as caught:
        output.write(FRAMES)
    assert caught.value.exit_code == 1
    assert files(tmp_path) == [old]
    assert (tmp_path / old).read_bytes() == b"older file"


def test_size_beyond_the_container(tmp_path: Path) -> None:
    wide = np.zeros((1, 1, 16384, 3), np.uint8)
    with pytest.raises(SdsageError, match=r"out\.webp"):
        plan_output(tmp_path / "out.webp", video=False, count=1).write(wide)
    assert files(tmp_path) == []


def test_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    output = plan_output(tmp_path / "f_%d.png", video=False, count=3)
    (tmp_path / "f_1.png").write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        output.write(FRAMES[:3])
    assert files(tmp_path) == ["f_1.png"]
    assert (tmp_path / "f_1.png").read_text() == "mine"


@pytest.mark.parametrize("name", CONTAINERS)
def test_overwrite(tmp_path: Path, name: str) -> None:
    first = tmp_path / naming.fill(name, 0, {})
    first.write_text("older file")
    plan_output(tmp_path / name, video=True, count=4, overwrite=True).write(FRAMES)
    assert first.read_bytes() != b"older file"
    assert first.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("name", CONTAINERS)
def test_strange_folders(tmp_path: Path, name: str) -> None:
    """Spaces, CJK, emoji, a colon (a protocol to FFmpeg) and bytes that are no UTF-8."""
    folder = tmp_path / "sp ace" / "猫🐱" / "co:lon" / os.fsdecode(b"\xff\xfe")
    meta = Metadata("text", {"seed": 1})
    written = plan_output(folder / name, video=True, count=4).write(FRAMES, metadata=meta)
    assert all(read_metadata(path) == meta for path in written)


def test_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.png").symlink_to(tmp_path / "real" / "file.png")
    plan_output(tmp_path / "link.png", video=False, count=1).write(FRAMES[:1])
    assert (tmp_path / "link.png").is_symlink()
    assert files(tmp_path) == ["link.png", "real", "real/file.png"]


def test_metadata_of_each_image_is_its_own(tmp_path: Path) -> None:
    output = plan_output(tmp_path / "b.png", video=False, count=4)
    written = output.write(FRAMES, metadata=[Metadata(f"Seed: {7 + k}", {"seed": 7 + k}) for k in range(4)])
    assert [m.data["seed"] for path in written if (m := read_metadata(path))] == [7, 8, 9, 10]
    with pytest.raises(BadRequest, match="2 metadata entries for 4 files"):
        plan_output(tmp_path / "c.png", video=False, count=4).write(FRAMES, metadata=[Metadata(), Metadata()])


def test_every_still_suffix_has_an_encoder(tmp_path: Path) -> None:
    for suffix in stills.STILL_FORMATS:
        plan_output(tmp_path / f"out{suffix}", video=False, count=1).write(FRAMES[:1])
    assert len(files(tmp_path)) == len(stills.STILL_FORMATS)
