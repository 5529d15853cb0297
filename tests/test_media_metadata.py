"""Embedded parameters come back exactly, from every container, and where other programs look for them."""

import contextlib
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from sdsage.errors import BadRequest, MissingExtra
from sdsage.media import Metadata, parameters_text, plan_output, read_metadata, xmp

FRAMES = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
STILLS = ["out.png", "out.jpg", "out.webp"]
CLIPS = ["clip.mp4", "clip.webm", "clip.gif", "clip.webp"]

PROMPT = 'une belle chatte 猫 🐱👩‍👩‍👧, (quoted: "x"), <lora:a:1>\nsecond line\ttab \\ back % \' &amp;'
PLAIN = Metadata("a lovely cat\nSteps: 4, Seed: 42", {"seed": 42})
RICH = Metadata(
    parameters_text(PROMPT, "schlecht, 悪い", {"Steps": 4, "CFG scale": 3.5, "Seed": 42, "Size": "832x480"}),
    {
        "prompt": PROMPT,
        "steps": 4,
        "cfg": 0.1,
        "loras": [{"path": "ü.safetensors", "m": 1e-7}],
        "none": None,
        "t": True,
    },
)
LONG = Metadata("猫🐱é" * 2500, {"prompt": "猫🐱é" * 2500, "negative": "x" * 10_000})
HUGE = Metadata("p" * 300_000, {"note": "beyond the 64 kB of one JPEG segment"})
HALF = Metadata("half \ud83d surrogate \udcff", {"\udc80": "\udfff"})
EMPTY = Metadata()


def write(path: Path, metadata: Metadata | None) -> Path:
    video = path.name.startswith("clip")
    frames = FRAMES if video else FRAMES[:1]
    plan_output(path, video=video, count=len(frames), overwrite=True).write(frames, metadata=metadata)
    return path


@pytest.mark.parametrize("name", STILLS + CLIPS)
@pytest.mark.parametrize(
    "metadata", [PLAIN, RICH, LONG, HUGE, HALF, EMPTY], ids=["plain", "rich", "long", "huge", "half", "empty"]
)
def test_round_trip(tmp_path: Path, name: str, metadata: Metadata) -> None:
    assert read_metadata(write(tmp_path / name, metadata)) == metadata


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(text=st.text(max_size=40), data=st.dictionaries(st.text(max_size=5), json_values, max_size=3))
def test_any_text_round_trips(tmp_path_factory: pytest.TempPathFactory, text: str, data: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("meta")
    for name in STILLS + CLIPS:
        assert read_metadata(write(folder / name, Metadata(text, data))) == Metadata(text, data)


@pytest.mark.parametrize("name", STILLS + CLIPS)
def test_nothing_is_embedded_unasked(tmp_path: Path, name: str) -> None:
    assert read_metadata(write(tmp_path / name, None)) is None


def test_png_chunks_that_other_programs_read(tmp_path: Path) -> None:
    with Image.open(write(tmp_path / "out.png", RICH)) as image:
        assert image.info["parameters"] == RICH.parameters
        assert json.loads(image.info["sdsage"])["sdsage"] == RICH.data


@pytest.mark.parametrize("name", ["out.jpg", "out.webp", "clip.webp"])
def test_exif_user_comment_that_other_programs_read(tmp_path: Path, name: str) -> None:
    with Image.open(write(tmp_path / name, RICH)) as image:
        exif = image.getexif()
    assert exif.get_ifd(0x8769)[0x9286] == b"UNICODE\0" + RICH.parameters.encode("utf-16-be")
    assert exif.endian == ">"


def xmp_of(path: Path) -> ET.Element:
    with Image.open(path) as image:
        return ET.fromstring(image.info["xmp"].decode("utf-8"))


@pytest.mark.parametrize("name", ["out.jpg", "out.webp", "clip.webp"])
def test_xmp_that_other_programs_read(tmp_path: Path, name: str) -> None:
    control = Metadata("a\0cat\x1b <&>\ud800\ufffe", {"x": "\0"})
    root = xmp_of(write(tmp_path / name, RICH))
    texts = [e.text for e in root.iter("{http://www.w3.org/1999/02/22-rdf-syntax-ns#}li")]
    assert texts == [RICH.parameters]
    root = xmp_of(write(tmp_path / name, control))
    assert [e.text for e in root.iter("{http://www.w3.org/1999/02/22-rdf-syntax-ns#}li")] == ["acat <&>"]


@pytest.mark.parametrize("name", ["out.jpg", "out.webp"])
def test_xmp_alone_is_enough(tmp_path: Path, name: str) -> None:
    """What is left when an editor drops comments and EXIF, and writes elements as attributes."""
    with Image.open(write(tmp_path / name, RICH)) as image:
        packet = image.info["xmp"]
        image.save(tmp_path / f"edited {name}", xmp=packet)
    assert read_metadata(tmp_path / f"edited {name}") == RICH
    attribute = re.sub(
        rb'xmp:CreatorTool="sdsage">(.*)<sdsage:json>(.*)</sdsage:json>',
        lambda m: b"sdsage:json='" + m[2].replace(b"'", b"&apos;") + b"'>" + m[1],
        packet,
        flags=re.DOTALL,
    )
    assert b"sdsage:json='" in attribute
    with Image.open(tmp_path / name) as image:
        image.save(tmp_path / f"edited {name}", xmp=attribute)
    assert read_metadata(tmp_path / f"edited {name}") == RICH


@pytest.mark.parametrize(
    "packet",
    [b"", b"<", b"<a>", b"\xff\xfe", b"<x/>" * 2, b'<!DOCTYPE x [<!ENTITY a "b">]><x>&a;</x>', b"<x/>" + b"\0" * 9],
)
def test_xmp_of_any_kind_is_harmless(packet: bytes) -> None:
    assert xmp.json_of(packet) == ""


def test_text_longer_than_a_jpeg_segment_is_still_whole(tmp_path: Path) -> None:
    """XMP has one segment only: without room for the JSON it holds the text, and without that it is left out."""
    for metadata, has_xmp in ((Metadata("a cat", {"x": "y" * 66_000}), True), (HUGE, False)):
        path = write(tmp_path / "out.jpg", metadata)
        assert read_metadata(path) == metadata
        with Image.open(path) as image:
            packet = image.info.get("xmp", b"")
        assert (b"a cat" in packet) is has_xmp
        assert b"sdsage:json" not in packet


@pytest.mark.parametrize("name", ["clip.mp4", "clip.webm"])
def test_container_tag_that_other_programs_read(tmp_path: Path, name: str) -> None:
    with av.open(str(write(tmp_path / name, RICH))) as container:
        tags = {key.lower(): value for key, value in container.metadata.items()}
    assert json.loads(tags["comment"]) == {"parameters": RICH.parameters, "sdsage": RICH.data}


def test_pixels_do_not_depend_on_metadata(tmp_path: Path) -> None:
    for name in ("out.png", "out.jpg", "out.webp"):
        with Image.open(write(tmp_path / name, HUGE)) as image:
            with_text = np.asarray(image)
        with Image.open(write(tmp_path / name, None)) as image:
            assert np.array_equal(with_text, np.asarray(image))


def test_text_of_another_program(tmp_path: Path) -> None:
    chunks = PngImagePlugin.PngInfo()
    chunks.add_text("parameters", "a cat\nSteps: 20")
    Image.fromarray(FRAMES[0]).save(tmp_path / "a.png", pnginfo=chunks)
    assert read_metadata(tmp_path / "a.png") == Metadata("a cat\nSteps: 20", {})
    exif = Image.Exif()
    exif[0x8769] = {0x9286: b"UNICODE\0" + "猫".encode("utf-16-be")}
    Image.fromarray(FRAMES[0]).save(tmp_path / "b.jpg", exif=exif)
    assert read_metadata(tmp_path / "b.jpg") == Metadata("猫", {})


def test_parameters_layout() -> None:
    fields = {"Steps": 4, "Sampler": "euler", "Model": "a,b: c", "VAE": None, "CFG scale": 3.5}
    assert parameters_text("a cat", "", fields) == 'a cat\nSteps: 4, Sampler: euler, Model: "a,b: c", CFG scale: 3.5'
    assert parameters_text("a cat", "bad", {"Seed": 1}).splitlines()[1] == "Negative prompt: bad"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, Path("x"), b"bytes"])
def test_data_without_a_json_form_is_refused(tmp_path: Path, value: object) -> None:
    output = plan_output(tmp_path / "out.png", video=False, count=1)
    with pytest.raises(BadRequest, match="JSON"):
        output.write(FRAMES[:1], metadata=Metadata("", {"x": value}))
    assert list(tmp_path.iterdir()) == []


def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("no image, no video")
    for path in (tmp_path / "missing.png", tmp_path, tmp_path / "text.txt"):
        with pytest.raises(BadRequest, match=path.name):
            read_metadata(path)
    clip = write(tmp_path / "clip.mp4", PLAIN)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtra):
        read_metadata(clip)


@pytest.mark.parametrize("name", STILLS + CLIPS)
def test_truncated_files_give_all_or_nothing(tmp_path: Path, name: str) -> None:
    """Nothing at all, or the readable text (it may lie before the cut), or everything; never half of it."""
    whole = write(tmp_path / name, RICH).read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 25)):
        (tmp_path / "cut").write_bytes(whole[:length])
        with contextlib.suppress(BadRequest):
            assert read_metadata(tmp_path / "cut") in (None, RICH, Metadata(RICH.parameters))
