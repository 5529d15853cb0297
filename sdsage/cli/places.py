"""Where the results of a run go, judged before any work."""

import time
from typing import TYPE_CHECKING

from sdsage.errors import BadRequest, OutputError
from sdsage.extend import check_extension, extended_frames

from .option import IMG
from .seeds import parts
from .settings import Settings

if TYPE_CHECKING:
    from sdsage.media import Output

DEFAULT_OUTPUT = {"vid-gen": "output.mp4", "img-gen": "output.png"}


def plan(settings: Settings, prompt: str, seeds: tuple[int, ...]) -> "list[Output]":
    """The place of each part of the run; what is wrong with one becomes one of the settings' problems.

    Args:
        prompt: for {prompt}.

    Raises:
        MissingExtra: the container needs PyAV, which is not installed.
    """
    from sdsage.media import plan_output

    date = time.strftime("%Y-%m-%d")
    fields = [{"seed": str(seed), "prompt": prompt, "date": date} for seed in seeds]
    name = settings["output"] or DEFAULT_OUTPUT[settings.verb]
    begin = max(settings["output_begin_idx"], 0)
    # a part that is there was written by the run that is resumed, and is not made again
    replaces = settings["overwrite"] or (settings["resume"] and len(parts(settings, seeds)) > 1)
    try:
        if settings.verb != IMG:
            return _videos(name, fields, begin, settings, replaces)
        whole = plan_output(
            name,
            video=False,
            count=len(seeds),
            overwrite=replaces,
            begin_index=begin,
            fields=fields,
        )
        return [whole.part(part.first, part.count) for part in parts(settings, seeds)]
    except BadRequest as error:
        settings.problems.add(str(error))
        return []


def _videos(name: str, fields: list[dict[str, str]], begin: int, settings: Settings, replaces: bool) -> "list[Output]":
    """One place for each video. Its number is {index}; %d counts the frames inside one video."""
    from sdsage.media import naming, plan_output

    check_extension(settings["video_frames"], settings["extend"], bool(settings["control_video"]))
    frames = extended_frames(settings["video_frames"], settings["extend"])
    several = len(fields) > 1 and not naming.is_pattern(name) and not naming.fields_of(name) & {"index", "seed"}
    template = naming.numbered(name) if several else name
    places = [
        plan_output(
            template,
            video=True,
            count=frames,
            overwrite=replaces,
            begin_index=begin,
            codec=settings["codec"],
            crf=settings["crf"],
            fields=[{"index": str(begin + i), **field}],
        )
        for i, field in enumerate(fields)
    ]
    if len({place.paths(frames)[0] for place in places}) < len(places):
        raise OutputError(
            f"output {name!r} gives {len(places)} videos the same names: put {{index}} or {{seed}} into it"
        )
    return places
