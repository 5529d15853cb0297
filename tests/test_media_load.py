"""Input images: channels, depth, transparency, orientation, every format, and the engine's crop-and-resize."""

import contextlib
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from sdsage.errors import BadRequest
from sdsage.media import load_image, load_images_dir

RNG = np.random.default_rng(0)
NOISE: NDArray[np.uint8] = RNG.integers(0, 256, (23, 31, 4), np.uint8)
RGB = np.ascontiguousarray(NOISE[..., :3])


def luma(rgb: NDArray[np.uint8], rounding: int = 0) -> NDArray[np.uint8]:
    r, g, b = (rgb[..., k].astype(int) for k in range(3))
    return ((77 * r + 150 * g + 29 * b + rounding) // 256).astype(np.uint8)[..., None]


def save_png16(path: Path, samples: NDArray[np.uint16], colour_type: int) -> None:
    """A 16-bit PNG, which Pillow writes for grey only."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    header = struct.pack(">IIBBBBB", samples.shape[1], samples.shape[0], 16, colour_type, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.ppm", "a.tga", "a 猫 é.PNG"])
def test_lossless_rgb(tmp_path: Path, name: str) -> None:
    Image.fromarray(RGB).save(tmp_path / name)
    assert np.array_equal(load_image(tmp_path / name), RGB)
    assert np.array_equal(load_image(str(tmp_path / name), channels=1), luma(RGB))


def laid_on(level: int, rgba: NDArray[np.uint8]) -> NDArray[np.float64]:
    """What a viewer shows of transparent pixels over a grey ground."""
    share = rgba[..., 3:] / 255
    return rgba[..., :3] * share + level * (1 - share)


@pytest.mark.parametrize("name", ["a.png", "a.webp", "a.tiff", "a.tga"])
def test_transparency_is_laid_on_white(tmp_path: Path, name: str) -> None:
    Image.fromarray(NOISE, "RGBA").save(
        tmp_path / name, **({"lossless": True, "exact": True} if "webp" in name else {})
    )
    notes: list[str] = []
    assert np.abs(load_image(tmp_path / name, notes=notes) - laid_on(255, NOISE)).max() <= 1
    (note,) = notes
    assert name in note
    assert "laid on white" in note
    notes.clear()
    grey = load_image(tmp_path / name, channels=1, notes=notes)
    assert np.abs(grey - laid_on(0, NOISE) @ [[77 / 256], [150 / 256], [29 / 256]]).max() <= 2
    assert "laid on black" in notes[0]


def test_an_alpha_channel_that_hides_nothing_is_not_noted(tmp_path: Path) -> None:
    Image.fromarray(RGB).convert("RGBA").save(tmp_path / "a.png")
    notes: list[str] = []
    assert np.array_equal(load_image(tmp_path / "a.png", notes=notes), RGB)
    assert notes == []


@pytest.mark.parametrize("name", ["a.png", "a.gif"])
def test_palette_with_a_transparent_colour(tmp_path: Path, name: str) -> None:
    image = Image.fromarray(RGB).quantize(16)
    image.save(tmp_path / name, transparency=3)
    expected = np.asarray(image.convert("RGB")).copy()
    expected[np.asarray(image) == 3] = 255
    notes: list[str] = []
    assert np.array_equal(load_image(tmp_path / name, notes=notes), expected)
    assert "laid on white" in notes[0]


@pytest.mark.parametrize("mode", ["L", "1"])
def test_grey(tmp_path: Path, mode: str) -> None:
    image = Image.fromarray(RGB[..., 0]).convert(mode)
    image.save(tmp_path / "a.png")
    grey = np.asarray(image.convert("L"))[..., None]
    assert np.array_equal(load_image(tmp_path / "a.png", channels=1), grey)
    assert np.array_equal(load_image(tmp_path / "a.png"), grey.repeat(3, axis=2))


@pytest.mark.parametrize(("colour_type", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_16_bit_keeps_the_high_byte(tmp_path: Path, colour_type: int, channels: int) -> None:
    samples = RNG.integers(0, 65536, (9, 13, channels), np.uint16)
    save_png16(tmp_path / "a.png", samples, colour_type)
    high = (samples >> 8).astype(np.uint8)
    colour = high[..., :3] if channels > 2 else high[..., :1].repeat(3, axis=2)
    expected = colour if channels % 2 else laid_on(255, np.concatenate([colour, high[..., -1:]], axis=2))
    assert np.abs(load_image(tmp_path / "a.png") - expected).max() <= (0 if channels % 2 else 1)


def test_16_bit_tiff(tmp_path: Path) -> None:
    """Grey from black and from white, 12 bits, both byte orders, and colour, which Pillow reads but does not write."""
    samples = RNG.integers(0, 65536, (9, 13), np.uint16)
    high = (samples >> 8).astype(np.uint8)[..., None].repeat(3, axis=2)
    Image.fromarray(samples).save(tmp_path / "grey.tiff")
    assert np.array_equal(load_image(tmp_path / "grey.tiff"), high)
    for order in "<>":
        save_tiff(tmp_path / "a.tiff", samples[..., None], order, photometric=1)
        assert np.array_equal(load_image(tmp_path / "a.tiff"), high)
    save_tiff(tmp_path / "a.tiff", samples[..., None], "<", photometric=0)
    assert np.array_equal(load_image(tmp_path / "a.tiff"), 255 - high)
    colours = RNG.integers(0, 65536, (9, 13, 3), np.uint16)
    save_tiff(tmp_path / "a.tiff", colours, "<", photometric=2)
    assert np.array_equal(load_image(tmp_path / "a.tiff"), (colours >> 8).astype(np.uint8))


def save_tiff(path: Path, samples: NDArray[np.uint16], order: str, photometric: int) -> None:
    """A 16-bit TIFF in one strip: H x W x channels."""
    height, width, channels = samples.shape
    data = samples.astype(f"{order}u2").tobytes()
    fields = {256: width, 257: height, 258: 16, 259: 1, 262: photometric, 273: 8, 277: channels, 278: height}
    fields[279] = len(data)
    bits = 8 + len(data)  # three of them do not fit into a field
    body = struct.pack(f"{order}H", len(fields))
    for tag, value in fields.items():
        if tag == 258 and channels > 1:
            body += struct.pack(f"{order}HHII", tag, 3, channels, bits)
        else:
            body += struct.pack(f"{order}HHII", tag, 4, 1, value)
    directory = bits + 2 * channels
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, directory)
    path.write_bytes(head + data + struct.pack(f"{order}{channels}H", *[16] * channels) + body + b"\0" * 4)


@pytest.mark.parametrize("samples", [np.ones((4, 4), np.float32), np.ones((4, 4), np.int32)])
def test_numbers_without_a_range_are_refused(tmp_path: Path, samples: NDArray[np.generic]) -> None:
    Image.fromarray(samples).save(tmp_path / "a.tiff")
    with pytest.raises(BadRequest, match=r"a\.tiff has .* numbers whose range"):
        load_image(tmp_path / "a.tiff")


# EXIF's number: how often the stored picture is turned by 90 degrees to the left, after it was mirrored or not
TURNS = {1: (0, False), 2: (0, True), 3: (2, False), 4: (2, True)}
TURNS |= {5: (1, True), 6: (3, False), 7: (3, True), 8: (1, False)}


@pytest.mark.parametrize("name", ["a.png", "a.webp", "a.tiff", "a.jpg"])
@pytest.mark.parametrize("orientation", TURNS)
def test_exif_orientation_is_applied(tmp_path: Path, name: str, orientation: int) -> None:
    times, mirrored = TURNS[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    blocks = np.kron(np.array([[0, 60, 120], [180, 220, 255]], np.uint8), np.ones((16, 16), np.uint8))
    stored = np.stack([blocks, blocks // 2, 255 - blocks], axis=-1)
    Image.fromarray(stored).save(tmp_path / name, exif=exif, lossless=True, quality=95, subsampling=0)
    expected = np.rot90(stored[:, ::-1] if mirrored else stored, times)
    for channels in (1, 3):
        shown = load_image(tmp_path / name, channels=channels)  # type: ignore[arg-type]
        wanted = expected if channels == 3 else luma(expected)
        assert shown.shape == wanted.shape
        assert np.abs(shown.astype(int) - wanted).max() <= {"a.jpg": 12, "a.webp": 1}.get(name, 0)


def test_a_camera_picture_of_several_images(tmp_path: Path) -> None:
    """MPO: a JPEG with a preview behind it, as telephones write."""
    first = Image.fromarray(np.full((16, 24, 3), (200, 30, 40), np.uint8))
    first.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))])
    notes: list[str] = []
    shown = load_image(tmp_path / "a.jpg", notes=notes)
    assert shown.shape == (16, 24, 3)
    assert np.abs(shown.astype(int) - (200, 30, 40)).max() < 6
    assert notes == []


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.tiff", "a.png"])
def test_of_an_animation_the_first_image_is_used(tmp_path: Path, name: str) -> None:
    pictures = [Image.new("RGB", (8, 6), colour) for colour in ("red", "lime", "blue")]
    pictures[0].save(tmp_path / name, save_all=True, append_images=pictures[1:], lossless=True)
    notes: list[str] = []
    assert (load_image(tmp_path / name, notes=notes) == (255, 0, 0)).all()
    assert "holds 3 images: the first is used" in notes[0]


@pytest.mark.parametrize("name", ["a.jpg", "a.tiff"])
def test_cmyk(tmp_path: Path, name: str) -> None:
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / name)
    notes: list[str] = []
    shown = load_image(tmp_path / name, notes=notes)
    assert np.abs(shown.astype(int) - (255, 0, 0)).max() <= 3
    assert "CMYK" in notes[0]


@pytest.mark.parametrize("suffix", ["avif", "jp2", "ico", "sgi", "pcx", "qoi", "tiff", "dds"])
def test_other_formats_of_pillow(tmp_path: Path, suffix: str) -> None:
    if suffix not in [s.lstrip(".") for s in Image.registered_extensions()]:
        pytest.skip(f"this Pillow has no .{suffix}")
    try:
        Image.new("RGB", (16, 16), (200, 30, 40)).save(tmp_path / f"a.{suffix}")
    except (KeyError, OSError):
        pytest.skip(f"this Pillow does not write .{suffix}")
    shown = load_image(tmp_path / f"a.{suffix}")
    assert np.abs(shown.astype(int) - (200, 30, 40)).max() <= 4


def test_postscript_is_not_run(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.eps")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.eps").read_bytes())
    with pytest.raises(BadRequest, match="not an image that can be read"):
        load_image(tmp_path / "a.png")


def test_jpeg_and_webp(tmp_path: Path) -> None:
    y, x = np.mgrid[0:48, 0:64]
    soft = np.stack([x * 4, y * 5, x + y], axis=-1).astype(np.uint8)
    for name, options in (("a.jpg", {"quality": 95}), ("a.webp", {"lossless": True})):
        Image.fromarray(soft).save(tmp_path / name, **options)
        assert np.abs(load_image(tmp_path / name).astype(int) - soft).max() <= 12
    assert np.array_equal(load_image(tmp_path / "a.webp", channels=1), luma(soft, 128))
    with Image.open(tmp_path / "a.jpg") as image:
        image.draft("L", None)
        assert np.array_equal(load_image(tmp_path / "a.jpg", channels=1)[..., 0], np.asarray(image))


@pytest.mark.parametrize(
    ("source", "target", "box"),  # sizes are width x height, the box is left, top, width, height
    [
        ((60, 40), (30, 30), (10, 0, 40, 40)),
        ((40, 60), (30, 30), (0, 10, 40, 40)),
        ((60, 40), (30, 20), (0, 0, 60, 40)),
        ((100, 61), (50, 30), (0, 0, 100, 61)),  # one row too much is squeezed, not cut
        ((83, 61), (160, 96), (0, 6, 83, 49)),
        ((83, 61), (32, 48), (21, 0, 40, 61)),
    ],
)
def test_crop_rule(tmp_path: Path, source: tuple[int, int], target: tuple[int, int], box: tuple[int, ...]) -> None:
    """Inside the box the image is one colour, outside another: nothing of the outside may be seen."""
    left, top, width, height = box
    image = np.full((source[1], source[0], 3), 255, np.uint8)
    image[top : top + height, left : left + width] = (10, 100, 200)
    Image.fromarray(image).save(tmp_path / "a.png")
    loaded = load_image(tmp_path / "a.png", size=target)
    assert loaded.shape == (target[1], target[0], 3)
    assert (loaded == (10, 100, 200)).all()
    for row, column in (
        (top, left),
        (top + height - 1, left + width - 1),
    ):  # and the box is used to its edges
        image[row, column] = 255
    Image.fromarray(image).save(tmp_path / "b.png")
    changed = (load_image(tmp_path / "b.png", size=target) != loaded).any(axis=2)
    assert changed[0, 0]
    assert changed[-1, -1]


def test_resize_is_the_mean_of_the_area_in_linear_light(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 255], [255, 0]], np.uint8)).save(tmp_path / "a.png")
    assert load_image(tmp_path / "a.png", channels=1, size=(1, 1)).tolist() == [[[188]]]  # a mean of levels: 128
    Image.fromarray(np.array([[0, 90, 255]], np.uint8).repeat(3, 0)).save(tmp_path / "b.png")
    enlarged = load_image(tmp_path / "b.png", channels=1, size=(6, 6))
    assert enlarged[0, :, 0].tolist() == [0, 0, 90, 90, 255, 255]


@given(
    source=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    target=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    channels=st.sampled_from([1, 3]),
    level=st.integers(0, 255),
)
def test_resize_keeps_a_flat_colour(
    tmp_path_factory: pytest.TempPathFactory,
    source: tuple[int, int],
    target: tuple[int, int],
    channels: int,
    level: int,
) -> None:
    path = tmp_path_factory.mktemp("flat") / "a.png"
    Image.new("RGB", source, (level, level, level)).save(path)
    loaded = load_image(path, channels=1 if channels == 1 else 3, size=target)
    assert loaded.shape == (target[1], target[0], channels)
    assert (loaded == level).all()


def test_result_is_writable_and_contiguous(tmp_path: Path) -> None:
    Image.fromarray(RGB).save(tmp_path / "a.png")
    for loaded in (load_image(tmp_path / "a.png"), load_image(tmp_path / "a.png", size=(64, 32))):
        assert loaded.flags.c_contiguous
        assert loaded.flags.writeable


def test_bad_files_are_named(tmp_path: Path) -> None:
    Image.fromarray(RGB).save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "empty.png").touch()
    table = {
        "missing.png": "does not exist",
        "cut.png": "damaged",
        "text.png": "not an image",
        "empty.png": "not an image",
    }
    for name, text in table.items():
        with pytest.raises(BadRequest, match=text) as caught:
            load_image(tmp_path / name)
        assert name in str(caught.value)
        assert caught.value.exit_code == 2
    with pytest.raises(BadRequest, match="is a folder"):
        load_image(tmp_path)
    with pytest.raises(BadRequest, match="0x5"):
        load_image(tmp_path / "whole.png", size=(0, 5))
    with pytest.raises(BadRequest, match="channels=4"):
        load_image(tmp_path / "whole.png", channels=4)  # type: ignore[arg-type]


@given(
    suffix=st.sampled_from(["png", "jpg", "bmp", "gif", "webp", "ppm", "tga", "tiff", "qoi", "pcx", "sgi"]),
    data=st.data(),
)
def test_damage_never_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damage") / f"a.{suffix}"
    Image.fromarray(RGB[:8, :8]).save(path)
    broken = bytearray(path.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(broken) - 1), max_size=4)):
        broken[at] = data.draw(st.integers(0, 255))
    path.write_bytes(broken[: data.draw(st.integers(0, len(broken)))])
    with contextlib.suppress(BadRequest):
        assert load_image(path).shape[2] == 3


def test_folder(tmp_path: Path) -> None:
    (tmp_path / "sub.png").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    for index, name in enumerate(["10.png", "2.PNG", "a.bmp", "B.webp"]):
        Image.new("RGB", (8, 6), (index, 0, 0)).save(tmp_path / name, lossless=True)
    images = load_images_dir(tmp_path)
    assert [int(image[0, 0, 0]) for image in images] == [0, 1, 3, 2]  # byte order: 10, 2, B, a
    assert [image.shape for image in load_images_dir(tmp_path, size=(4, 4), limit=2)] == [(4, 4, 3)] * 2
    with pytest.raises(BadRequest, match="not a folder"):
        load_images_dir(tmp_path / "notes.txt")
    with pytest.raises(BadRequest, match="no image"):
        load_images_dir(tmp_path / "sub.png")
