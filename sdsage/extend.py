"""Videos longer than a model makes at once: each part goes on from the last frame of the one before.

Only one picture passes a seam. What moved may move otherwise behind it, and colours may drift a little with each part.
Every part is a job of its own: part i (from 0) has seed + i, and can be made again alone from the frame before it.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from sdsage._bounds import aligned_frames
from sdsage.errors import BadRequest, GenerationError

if TYPE_CHECKING:
    from sdsage._job import Attention, Lever
    from sdsage.context import Context, Result, Timings
    from sdsage.params import SdVidGenParams

    Counted = TypeVar("Counted", Attention, Lever)


class UnfinishedError(GenerationError):
    """A later part failed.

    Attributes:
        result: the parts before it, as one video.
        parts: how many they are.
    """

    def __init__(self, message: str, result: "Result", parts: int) -> None:
        super().__init__(message)
        self.result = result
        self.parts = parts


def extended_frames(video_frames: int, times: int) -> int:
    """Frames of the whole: the picture that two parts share is kept once."""
    frames = aligned_frames(video_frames)
    return frames + times * (frames - 1)


def check_extension(video_frames: int, times: int, control: bool) -> None:
    """Raises BadRequest when a job of so many frames, steered by control frames or not, can't be extended."""
    if times < 0:
        raise BadRequest(f"extending {times} times is not possible: 0 times or more")
    if times and aligned_frames(video_frames) < 2:
        raise BadRequest(f"a video of {video_frames} frames can't be extended: --video-frames 5 or more is needed")
    if times and control:
        raise BadRequest("a video with control frames can't be extended: they are for one part only")


def generate_extended(
    context: "Context",
    params: "SdVidGenParams",
    times: int,
    *,
    on_part: Callable[[int, int], None] | None = None,
    **how: Any,
) -> "Result":
    """One video of `extended_frames(params.video_frames, times)` frames.

    `params.end_image`, for models that take a last picture, is that of the whole. `params` is left as it is.

    Args:
        on_part: called with the number of a part, counted from 1, and that of all, before it begins.
        how: as for `Context.generate_video`, heard in each part.

    Raises:
        BadRequest: the model takes no first picture, or the job can't be extended; nothing has been made.
        UnfinishedError: a later part failed; it holds the parts before.
        And what `Context.generate_video` raises.
    """
    if times == 0:
        return context.generate_video(params, **how)
    # what was not set is not asked for: with an isolated context this process has no engine that knows the defaults
    control = params.was_set("control_frames") and bool(params.control_frames)
    end_image = params.end_image if params.was_set("end_image") else None
    check_extension(params.video_frames, times, control)
    context.check_first_frame()
    job = type(params).revived(*params.parts())
    whole: Result | None = None
    for part in range(times + 1):
        if on_part is not None:
            on_part(part + 1, times + 1)
        job.end_image = end_image if part == times else None
        if whole is not None:
            last = whole.frames[-1]
            job.init_image, job.seed = last, whole.seeds[0] + part
            job.height, job.width = last.shape[:2]  # those that the model really took
        try:
            made = context.generate_video(job, **how)
        except GenerationError as error:
            if whole is None:
                raise
            raise UnfinishedError(f"part {part + 1} of {times + 1} failed: {error}", whole, part) from error
        whole = made if whole is None else _joined(whole, made)
    assert whole is not None
    return whole


def _joined(first: "Result", second: "Result") -> "Result":
    """`second` begins with the frame that `first` ends with."""
    import numpy as np

    return replace(
        first,
        frames=np.concatenate([first.frames, second.frames[1:]]),
        seeds=first.seeds + second.seeds,
        timings=_sum(first.timings, second.timings),
        adjusted=tuple(dict.fromkeys(first.adjusted + second.adjusted)),
        attention=added(first.attention + second.attention),
        latents=first.latents + second.latents,
        levers=added(first.levers + second.levers),
    )


def _sum(first: "Timings", second: "Timings") -> "Timings":
    """Seconds of both; the model was loaded once."""
    values = {f.name: getattr(first, f.name) + getattr(second, f.name) for f in fields(first)}
    return replace(first, **values | {"load": first.load})


def added(entries: "Iterable[Counted]") -> "tuple[Counted, ...]":
    """Entries that differ in nothing but their calls as one."""
    calls: dict[Counted, int] = {}
    for entry in entries:
        key = replace(entry, calls=0)
        calls[key] = calls.get(key, 0) + entry.calls
    return tuple(replace(entry, calls=n) for entry, n in calls.items())
