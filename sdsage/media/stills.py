"""Encoders that come with Pillow: single images, GIF and animated WebP. Each writes one whole file."""

import io
import itertools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sdsage.media.metadata import Metadata, jpeg_exif, png_text, webp_exif, webp_xmp, with_jpeg_segments

STILL_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".jpe": "JPEG", ".webp": "WEBP"}
QUALITY = 95  # JPEG without chroma subsampling, WebP: no visible loss
CLIP_QUALITY = 90  # animated WebP: what sd-cli uses; lossless would be ten times the size
GIF_FASTEST = 2  # hundredths of a second; players take anything shorter for "not given"
_PALETTE_SAMPLES = 1 << 16  # pixels that the palette of a clip is made from


def write_still(path: Path, suffix: str, frame: NDArray[np.uint8], metadata: Metadata | None) -> None:
    """One image, H x W x 3."""
    image = Image.fromarray(frame)
    match STILL_FORMATS[suffix]:
        case "PNG":
            image.save(path, "PNG", pnginfo=png_text(metadata) if metadata else None)
        case "WEBP":
            more = {"exif": webp_exif(metadata), "xmp": webp_xmp(metadata)} if metadata else {}
            image.save(path, "WEBP", quality=QUALITY, **more)
        case "JPEG":
            buffer = io.BytesIO()
            exif = jpeg_exif(metadata) if metadata else b""
            image.save(buffer, "JPEG", quality=QUALITY, subsampling=0, exif=exif)
            jpeg = buffer.getvalue()
            path.write_bytes(with_jpeg_segments(jpeg, metadata) if metadata else jpeg)


def frame_times(count: int, fps: int, unit: int) -> list[int]:
    """How long each of `count` frames lasts, in 1/unit seconds: whole numbers whose running sum never drifts.

    The k-th frame ends at k / fps rounded half up, so at 16 fps a GIF (unit 100) shows 6 and 7 in turn.
    """
    ends = [(2 * unit * k + fps) // (2 * fps) for k in range(count + 1)]
    return [end - start for start, end in itertools.pairwise(ends)]


def write_gif(path: Path, frames: NDArray[np.uint8], fps: int, metadata: Metadata | None) -> list[int]:
    """Frames N x H x W x 3 over one palette for the whole clip, so that colours are steady; loops for ever.

    Equal frames in a row are stored once and last longer. Returns how many milliseconds each of the N frames lasts.
    """
    palette = _clip_palette(frames)
    images = [Image.fromarray(frame).quantize(palette=palette) for frame in frames]
    times = [10 * max(t, GIF_FASTEST) for t in frame_times(len(frames), fps, 100)]
    comment = metadata.to_json().encode("ascii") if metadata else b""
    images[0].save(
        path,
        "GIF",
        save_all=True,
        append_images=images[1:],
        duration=times,
        loop=0,
        comment=comment,
        optimize=False,
    )
    return times


def _clip_palette(frames: NDArray[np.uint8]) -> Image.Image:
    """256 colours that span the clip's colours: under dithering closer to the eye than a median cut."""
    pixels = frames.reshape(-1, 3)
    if len(pixels) > _PALETTE_SAMPLES:
        pixels = pixels[np.random.default_rng(0).integers(len(pixels), size=_PALETTE_SAMPLES)]
    return Image.fromarray(pixels[None]).quantize(256, Image.Quantize.MAXCOVERAGE)


def write_webp_clip(path: Path, frames: NDArray[np.uint8], fps: int, metadata: Metadata | None) -> list[int]:
    """Frames N x H x W x 3 as animated WebP, looping for ever. Returns how many milliseconds each frame lasts."""
    times = frame_times(len(frames), fps, 1000)
    images = [Image.fromarray(frame) for frame in frames]
    images[0].save(
        path,
        "WEBP",
        save_all=True,
        append_images=images[1:],
        duration=times,
        loop=0,
        quality=CLIP_QUALITY,
        exif=webp_exif(metadata) if metadata else b"",
        xmp=webp_xmp(metadata) if metadata else b"",
    )
    return times
