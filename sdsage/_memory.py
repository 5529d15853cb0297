"""What a job needs at the least, against the memory that is there: a job that can't end is refused before it begins.

Every number is a lower bound, so that nothing is refused that would fit: one tensor of many, weights left out.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from sdsage import _job
from sdsage._bounds import aligned_frames
from sdsage._headers import look
from sdsage._host import host_memory
from sdsage._limits import hires_size
from sdsage.errors import BadRequest
from sdsage.params import SdCtxParams, SdImgGenParams, SdVidGenParams

# Fields of SdCtxParams with which the diffusion model's attention keeps no matrix of all scores.
NO_SCORES = ("flash_attn", "diffusion_flash_attn", "sage_attn")
_CPU = "cpu"
_GIB = 2**30


@dataclass(frozen=True)
class Need:
    """Bytes that a part of a job takes at once on a device.

    Attributes:
        what: the part, as the message names it.
        advice: what makes it smaller, beside a smaller size.
    """

    what: str
    bytes: int
    device: str
    advice: str


@dataclass(frozen=True)
class Costs:
    """What of a model decides on the memory of its jobs.

    Attributes:
        scores: attention builds a matrix of tokens x tokens.
        last: channels of the VAE's last convolution and the pixels (of one side) that it makes of each of its own; None
            when the file does not tell.
        sampling, decoding: devices.
        free: bytes free on a device before the model was loaded: weights may be given back between the parts of a job.
    """

    scores: bool
    last: tuple[int, int] | None
    sampling: str
    decoding: str
    free: dict[str, int | None] = field(default_factory=dict, compare=False)

    def needs(self, job: SdImgGenParams | SdVidGenParams) -> list[Need]:
        """What `job` takes, part by part; each is alone at its time."""
        if isinstance(job, SdVidGenParams):
            width, height, frames = job.width, job.height, aligned_frames(job.video_frames)
            pictures = frames
        else:
            width, height = hires_size(job) or (job.width, job.height)
            frames, pictures = 1, job.batch_count
        pixels = width * height
        # The engine holds all pictures as 32-bit numbers while it makes bytes of them.
        found = [Need("the finished pictures", pixels * 3 * pictures * (4 + 1), _CPU, "")]
        if self.scores:
            # Of the known models none has tokens of more than 32 x 32 pixels and 8 frames; one head of many.
            tokens = (width // 32) * (height // 32) * ((frames - 1) // 8 + 1)
            advice = "flash attention (diffusion_flash_attn, --diffusion-fa)"
            found.append(Need("the attention of the diffusion model", tokens * tokens * 4, self.sampling, advice))
        if self.last is not None and not job.vae_tiling_params.enabled:
            channels, patch = self.last
            together = min(frames, 4)  # frames that a step of the Wan VAE makes
            step = channels * (width // patch) * (height // patch) * together * 4
            done = pixels * 3 * (frames - together) * 4
            advice = "tiles (vae_tiling_params.enabled, --vae-tiling)"
            found.append(Need("the last layer of the VAE", step + done, self.decoding, advice))
        return found

    def check(self, job: SdImgGenParams | SdVidGenParams) -> None:
        """Raises BadRequest if a part of `job` alone is more than its device has free."""
        for need in self.needs(job):
            known = [n for n in (self.free.get(need.device), available(need.device)) if n is not None]
            there = max(known, default=need.bytes)
            if need.bytes > there:
                video = isinstance(job, SdVidGenParams)
                what = f"{job.width}x{job.height} pixels" + (f" and {job.video_frames} frames" if video else "")
                less = "a smaller size" + (" or fewer frames" if video else "")
                raise BadRequest(
                    f"{what}: {need.what} needs at least {need.bytes / _GIB:.1f} GiB, and {need.device} has "
                    f"{there / _GIB:.1f} GiB free; choose {less}{need.advice and f', or {need.advice}'}"
                )


def costs(params: SdCtxParams, device: str | None) -> Costs:
    """Reads the header of the VAE's file; call it before the model is loaded. `device` as for `Context`."""
    decodes_tiny = bool(params.taesd_path) and not params.tae_preview_only
    file = params.vae_path or params.model_path
    last = _last_layer(Path(file)) if file and not decodes_tiny else None
    main = main_device(device)
    decoding = _CPU if params.keep_vae_on_cpu else main
    free = {name: available(name) for name in (main, decoding, _CPU)}
    return Costs(not any(getattr(params, name) for name in NO_SCORES), last, main, decoding, free)


def main_device(device: str | None) -> str:
    """The device that a context gets: the one that was asked for, else the first GPU, else the CPU."""
    return device or next((d.name for d in _job.devices() if d.kind in ("gpu", "igpu")), _CPU)


def _last_layer(path: Path) -> tuple[int, int] | None:
    header = look(path)
    for name, tensor in header.tensors.items() if header is not None else ():
        shape = tensor.shape
        if name.endswith(("decoder.conv_out.weight", "decoder.head.2.weight")) and len(shape) in (4, 5):
            patch = math.isqrt(shape[0] // 3)
            if patch and patch * patch * 3 == shape[0]:
                return shape[1], patch
    return None


def available(device: str) -> int | None:
    """Bytes that are free on a device, for the CPU with swap; None when nobody tells."""
    if device == _CPU:
        return host_memory()
    return next((d.memory_free or None for d in _job.devices() if device in (d.name, d.name.removesuffix(":0"))), None)
