"""What the last job of this thread left in the engine, taken out of it: pictures, latents, tiles."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdsage import _job
from sdsage._ffi import ffi, images_from_c, latents_from_c, latents_to_c, lib, text
from sdsage.errors import DecodeError, GenerationError, NonFiniteError
from sdsage.params import SdTilingParams


def take_images(context: Any, images: Any, count: int) -> NDArray[np.uint8]:
    """Copies and frees what the engine made.

    Raises:
        DecodeError: it made latents (see `lib.sdsage_keep_latents`), but no pictures of them.
        SdsageError: the job's error.
    """
    try:
        return _pictures(images, count)
    except (GenerationError, MemoryError) as error:
        latents = take_latents()
        if latents and not isinstance(error, NonFiniteError):
            raise DecodeError(str(error) or "out of memory", latents, text(lib.sdsage_version_name(context))) from None
        raise


def _pictures(images: Any, count: int) -> NDArray[np.uint8]:
    if images == ffi.NULL or count < 1:
        raise (
            _job.failure()
            if lib.sdsage_last_status() != lib.SDSAGE_OK
            else GenerationError("the engine made no picture")
        )
    try:
        return images_from_c(images, count)
    finally:
        lib.sdsage_free_images(images, count)


def take_latents() -> tuple[NDArray[np.float32], ...]:
    """The final latents of the job, if it kept them."""
    count = ffi.new("int *")
    latents = lib.sdsage_take_latents(count)
    try:
        return tuple(latents_from_c(latents[i]) for i in range(count[0]))
    finally:
        lib.sdsage_free_latents(latents, count[0])


def decode(
    context: Any, latents: Sequence[NDArray[np.float32]], tiling: SdTilingParams, video: bool
) -> tuple[NDArray[np.uint8], list[str]]:
    """Pictures of all latents, and what was not done as asked. Runs inside a job of Python's.

    Raises:
        DecodeError: the VAE could not decode, in tiles neither.
        SdsageError: the latents are not of this model, or the job was cancelled.
    """
    found, notes = [], []
    for x in latents:
        keep: list[Any] = []
        count = ffi.new("int *")
        try:
            images = lib.sdsage_decode(context, latents_to_c(x, keep), tiling.to_c(keep), video, count)
            found.append(_pictures(images, count[0]))
        except (GenerationError, MemoryError) as error:
            model = text(lib.sdsage_version_name(context))
            raise DecodeError(str(error) or "out of memory", tuple(latents), model) from None
        notes += [note for note in tiled() if note not in notes]
    return np.concatenate(found), notes


def tiled() -> list[str]:
    """A sentence if the job decoded in tiles though it was not asked to."""
    tile = lib.sdsage_last_tile()
    return [
        f"the VAE decoded in tiles of {tile}x{tile} latent pixels, because decoding at once failed for want of memory"
    ] * bool(tile)
