"""Reading input images: the pixels that sd-cli would hand to the engine.

What the loader does, because the engine's own does it:
  - alpha is dropped, never composited; a palette becomes its colours; an animation gives its first image;
  - 16-bit samples keep their high byte;
  - an EXIF orientation is NOT applied: a photograph stored sideways is read sideways;
  - one channel out of three is the luma (77 R + 150 G + 29 B) / 256; a JPEG gives its own Y plane.
Grey images are accepted for three channels (sd-cli refuses them): the grey is repeated.
PNG, BMP and PPM give sd-cli's exact bytes; JPEG decoders differ by a few levels in single pixels.
"""

import os
import struct
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from sdsage.errors import BadRequest

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM", "TGA")
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")  # what sd-cli takes from a folder

# Whatever Pillow's decoders let through on a damaged file.
_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, zlib.error)


def load_image(
    path: str | os.PathLike[str], *, channels: Literal[1, 3] = 3, size: tuple[int, int] | None = None
) -> NDArray[np.uint8]:
    """Read one image as H x W x channels, uint8.

    With `size` (width, height) an image of another size is cut around its middle to that aspect ratio, then
    resized: each output pixel is the mean of the area it covers, taken in linear light.

    Raises BadRequest, naming the file, when it is missing, not an image, or damaged.
    """
    pixels = _decode(Path(path), channels)
    if size is None or size == (pixels.shape[1], pixels.shape[0]):
        return pixels
    if min(size) < 1:
        raise BadRequest(f"image size {size[0]}x{size[1]} is not possible: width and height start at 1")
    return _resize_area(_crop_to_aspect(pixels, *size), *size)


def load_images_dir(
    path: str | os.PathLike[str], *, size: tuple[int, int] | None = None, limit: int = 0
) -> list[NDArray[np.uint8]]:
    """Read the images of a folder in file-name order, each as `load_image` would with three channels.

    Subfolders and files of other kinds are left out; `limit` > 0 stops after that many.
    Raises BadRequest when the folder is missing or holds no image.
    """
    return [load_image(p, size=size) for p in image_files(path, limit)]


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


def _decode(path: Path, channels: Literal[1, 3]) -> NDArray[np.uint8]:
    if channels not in (1, 3):
        raise BadRequest(f"channels={channels} is not possible: 3 for colour, 1 for a mask")
    try:
        with Image.open(path, formats=FORMATS) as image:
            return _plane(image) if channels == 1 else _colour(image)
    except FileNotFoundError:
        raise BadRequest(f"image {path} does not exist") from None
    except IsADirectoryError:
        raise BadRequest(f"{path} is a folder: an image file is needed") from None
    except PermissionError as error:
        raise BadRequest(f"image {path} can't be read: {error.strerror}") from None
    except UnidentifiedImageError:
        raise BadRequest(f"{path} is not an image that can be read: {', '.join(FORMATS)} are") from None
    except Image.DecompressionBombError:
        raise BadRequest(f"image {path} is too large to be a plausible input: make it smaller first") from None
    except _DAMAGED as error:
        raise BadRequest(f"image {path} is damaged: {error}") from error


def _grey(image: Image.Image) -> NDArray[np.uint8] | None:
    """H x W of an image that is stored without colour, else None."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        return (np.asarray(image).astype(np.int32) >> 8).astype(np.uint8)
    if image.mode in ("1", "L", "LA"):
        return np.asarray(image.convert("L"))
    return None


def _colour(image: Image.Image) -> NDArray[np.uint8]:
    grey = _grey(image)
    return np.asarray(image.convert("RGB")).copy() if grey is None else np.repeat(grey[..., None], 3, axis=2)


def _plane(image: Image.Image) -> NDArray[np.uint8]:
    if image.format == "JPEG":
        image.draft("L", None)  # the decoder hands over Y instead of mixing it again from RGB
    grey = _grey(image)
    if grey is None:
        r, g, b = np.moveaxis(np.asarray(image.convert("RGB")).astype(np.uint32), 2, 0)
        half = 128 if image.format == "WEBP" else 0  # the engine rounds for WebP and cuts for all others
        grey = ((77 * r + 150 * g + 29 * b + half) >> 8).astype(np.uint8)
    return grey[..., None].copy()


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
