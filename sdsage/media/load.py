"""Reading input images: the pixels that the engine is given, from any format that Pillow reads.

  - an EXIF orientation is applied: a photograph stands as a viewer shows it;
  - transparency is laid on white, in a mask on black; an animation gives its first image;
  - 16-bit samples keep their high byte; CMYK is converted without a colour profile;
  - one channel out of three is the luma (77 R + 150 G + 29 B) / 256; a JPEG gives its own Y plane;
  - grey images are accepted for three channels: the grey is repeated.
sd-cli ignores orientation and transparency, and refuses grey; apart from these, PNG, BMP and PPM give sd-cli's exact
bytes. JPEG decoders differ by a few levels in single pixels.
"""

import os
import struct
import zlib
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from sdsage.errors import BadRequest

# Ghostscript would be started; Windows only; no more than a header is read.
_NOT_READ = {"EPS", "WMF", "BUFR", "GRIB", "HDF5", "MPEG"}
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")  # what sd-cli takes from a folder

# Whatever Pillow's decoders let through on a damaged file.
DAMAGED = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, zlib.error)


def load_image(
    path: str | os.PathLike[str],
    *,
    channels: Literal[1, 3] = 3,
    size: tuple[int, int] | None = None,
    notes: list[str] | None = None,
) -> NDArray[np.uint8]:
    """Read one image as H x W x channels, uint8.

    `notes` gets a sentence for each thing in the file that is not in the pixels: transparency, more images, a profile.

    With `size` (width, height) an image of another size is cut around its middle to that aspect ratio, then
    resized: each output pixel is the mean of the area it covers, taken in linear light.

    Raises BadRequest, naming the file, when it is missing, not an image, damaged, or of a kind without a fixed range of
    values.
    """
    pixels = _decode(Path(path), channels, [] if notes is None else notes)
    if size is None or size == (pixels.shape[1], pixels.shape[0]):
        return pixels
    if min(size) < 1:
        raise BadRequest(f"image size {size[0]}x{size[1]} is not possible: width and height start at 1")
    return _resize_area(_crop_to_aspect(pixels, *size), *size)


def load_images_dir(
    path: str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    limit: int = 0,
    notes: list[str] | None = None,
) -> list[NDArray[np.uint8]]:
    """Read the images of a folder in file-name order, each as `load_image` would with three channels.

    Subfolders and files of other kinds are left out; `limit` > 0 stops after that many.
    Raises BadRequest when the folder is missing or holds no image.
    """
    return [load_image(p, size=size, notes=notes) for p in image_files(path, limit)]


def image_files(path: str | os.PathLike[str], limit: int = 0) -> list[Path]:
    """The files that `load_images_dir` reads, in its order. Raises BadRequest as it does."""
    folder = Path(path)
    if not folder.is_dir():
        raise BadRequest(f"{folder} is not a folder: name a folder that holds {', '.join(SUFFIXES)} files")
    files = [p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file()]
    if not files:
        raise BadRequest(f"{folder} holds no image: it needs {', '.join(SUFFIXES)} files")
    files.sort(key=lambda p: os.fsencode(p.name))
    return files[:limit] if limit > 0 else files


@cache
def formats() -> tuple[str, ...]:
    """Pillow's names of the formats that are read."""
    Image.init()
    return tuple(name for name in Image.ID if name not in _NOT_READ)


def _decode(path: Path, channels: Literal[1, 3], notes: list[str]) -> NDArray[np.uint8]:
    if channels not in (1, 3):
        raise BadRequest(f"channels={channels} is not possible: 3 for colour, 1 for a mask")
    try:
        with Image.open(path, formats=formats()) as image:
            if getattr(image, "n_frames", 1) > 1 and image.format not in ("MPO", "PSD"):  # previews, layers
                notes.append(f"{path} holds {getattr(image, 'n_frames', 0)} images: the first is used")
            return _plane(image, path, notes) if channels == 1 else _colour(image, path, notes)
    except FileNotFoundError:
        raise BadRequest(f"image {path} does not exist") from None
    except IsADirectoryError:
        raise BadRequest(f"{path} is a folder: an image file is needed") from None
    except PermissionError as error:
        raise BadRequest(f"image {path} can't be read: {error.strerror}") from None
    except UnidentifiedImageError:
        raise BadRequest(f"{path} is not an image that can be read: use PNG, JPEG, WebP, TIFF or BMP") from None
    except Image.DecompressionBombError:
        raise BadRequest(f"image {path} is too large to be a plausible input: make it smaller first") from None
    except BadRequest:
        raise
    except DAMAGED as error:
        raise BadRequest(f"image {path} is damaged: {error}") from error


def _colour(image: Image.Image, path: Path, notes: list[str]) -> NDArray[np.uint8]:
    levels = _levels(image, (255, 255, 255), path, notes)
    return levels.copy() if levels.ndim == 3 else np.repeat(levels[..., None], 3, axis=2)


def _plane(image: Image.Image, path: Path, notes: list[str]) -> NDArray[np.uint8]:
    if image.format == "JPEG":
        image.draft("L", None)  # the decoder hands over Y instead of mixing it again from RGB
    levels = _levels(image, (0, 0, 0), path, notes)
    if levels.ndim == 3:
        r, g, b = np.moveaxis(levels.astype(np.uint32), 2, 0)
        half = 128 if image.format == "WEBP" else 0  # the engine rounds for WebP and cuts for all others
        levels = ((77 * r + 150 * g + 29 * b + half) >> 8).astype(np.uint8)
    return levels[..., None].copy()


def _levels(image: Image.Image, ground: tuple[int, int, int], path: Path, notes: list[str]) -> NDArray[np.uint8]:
    """The upright image, laid on the colour `ground`: H x W when it is grey, else H x W x 3."""
    image.load()
    upright = _upright(image, path, notes)
    deep = upright.mode == "I" or upright.mode.startswith("I;16")
    if deep and image.format in ("PNG", "PPM", "TIFF", "JPEG2000") and (upright.mode != "I" or image.format != "TIFF"):
        return _high_byte(np.asarray(upright), image)
    if deep or upright.mode == "F":
        kind = "floating-point" if upright.mode == "F" else "whole"
        raise BadRequest(
            f"image {path} has {kind} numbers whose range the file does not tell: save it with 8 or 16 bits, unsigned"
        )
    if upright.mode == "CMYK":
        notes.append(f"{path} is in CMYK colours: they are converted without a colour profile and may look different")
    if upright.has_transparency_data:
        return np.asarray(_opaque(upright, ground, path, notes))
    return np.asarray(upright.convert("L" if upright.mode in ("1", "L") else "RGB"))


def _upright(image: Image.Image, path: Path, notes: list[str]) -> Image.Image:
    """The image turned as its EXIF orientation says."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception as error:  # whatever a damaged EXIF block leads to; the pixels are whole
        notes.append(f"{path} has EXIF data that can't be read ({error}): it is taken as it is stored")
        return image


def _high_byte(samples: NDArray[np.generic], image: Image.Image) -> NDArray[np.uint8]:
    """16-bit grey as 8 bits. A TIFF may have 12 bits, and may count from white, which Pillow undoes for 8 bits only."""
    tags = getattr(image, "tag_v2", {})
    bits = tags.get(258, (16,))[0] if image.format == "TIFF" else 16
    high = (samples.astype(np.int32) >> (bits - 8)).astype(np.uint8)
    return 255 - high if tags.get(262) == 0 else high


def _opaque(image: Image.Image, ground: tuple[int, int, int], path: Path, notes: list[str]) -> Image.Image:
    layer = image.convert("RGBA")
    if layer.getchannel("A").getextrema() == (255, 255):
        return layer.convert("RGB")
    notes.append(f"{path} is transparent in places: it is laid on {'white' if ground[0] else 'black'}")
    below = Image.new("RGBA", layer.size, (*ground, 255))
    below.alpha_composite(layer)
    return below.convert("RGB")


def _crop_to_aspect(pixels: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """Cut around the middle to the aspect ratio width : height, in single precision as the engine counts."""
    h, w = pixels.shape[:2]
    want = np.float32(width) / np.float32(height)
    have = np.float32(w) / np.float32(h)
    crop_w, crop_h = w, h
    if have > want:
        crop_w = int(np.float32(h) * want)
    elif have < want:
        crop_h = int(np.float32(w) / want)
    x, y = (w - crop_w) // 2, (h - crop_h) // 2
    if x == 0 and y == 0:  # one pixel too much is squeezed, not cut
        return pixels
    return pixels[y : y + max(crop_h, 1), x : x + max(crop_w, 1)]


def _area_weights(n_in: int, n_out: int) -> NDArray[np.float32]:
    """n_in x n_out: the share that each input sample has in each output sample; columns sum to 1."""
    edges = np.arange(n_out + 1) * (n_in / n_out)
    start = np.arange(n_in)[:, None]
    overlap: NDArray[np.float64] = np.minimum(edges[1:], start + 1) - np.maximum(edges[:-1], start)
    return (np.maximum(overlap, 0) * (n_out / n_in)).astype(np.float32)


def _to_linear(srgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """sRGB transfer curve, 0..1 to 0..1."""
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def _resize_area(pixels: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """H x W x C to height x width x C; a block of rows at a time, so that a large photograph stays cheap."""
    h, w, c = pixels.shape
    linear = _to_linear(np.arange(256) / 255).astype(np.float32)
    rounding = _to_linear((np.arange(255) + 0.5) / 255).astype(np.float32)
    across, down = _area_weights(w, width), _area_weights(h, height)
    total = np.zeros((height, c, width), np.float32)
    for y in range(0, h, 256):
        rows = linear[pixels[y : y + 256].transpose(0, 2, 1)] @ across
        total += np.tensordot(down[y : y + 256], rows, axes=(0, 0))
    levels = np.searchsorted(rounding, total).astype(np.uint8)
    return np.ascontiguousarray(levels.transpose(0, 2, 1))
