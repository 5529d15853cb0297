"""Where results go: a name is judged before the work starts, and files appear only when whole."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdsage._parts import part_of
from sdsage.errors import BadRequest, OutputError, SdsageError
from sdsage.media import check, codecs, naming, pyav, stills
from sdsage.media.metadata import Metadata

IMAGE_SUFFIXES = tuple(stills.STILL_FORMATS)
CLIP_SUFFIXES = (".mp4", ".webm", ".gif", ".webp")


@dataclass
class Output:
    """A judged place for results; made by `plan_output`.

    Attributes:
        path: the name as given, perhaps a pattern.
        suffix: its extension in lower case.
        clip: all frames go into one moving file; otherwise each frame gets its own.
        overwrite: existing files are replaced.
        begin_index: index of the first numbered file.
        template: what the names are made from, see `sdsage.media.naming`.
        fields: what the template's fields stand for, one for all files or one for each.
        codec: key of `codecs.CODECS`; empty for what is neither .mp4 nor .webm.
        crf: quality of the codec; None for its own.
        notes: one sentence for each way in which the last written file differs from what was given.
    """

    path: str
    suffix: str
    clip: bool
    overwrite: bool
    begin_index: int
    template: str
    fields: tuple[Mapping[str, str], ...]
    codec: str = ""
    crf: int | None = None
    notes: list[str] = field(default_factory=list)

    def paths(self, count: int) -> list[Path]:
        """Files that `count` frames make."""
        if self.clip:
            return [Path(naming.fill(self.template, None, self.fields[0]))]
        return [Path(name) for name in naming.file_names(self.template, count, self.begin_index, self.fields)]

    def part(self, first: int, count: int) -> "Output":
        """The place of `count` pictures out of all, from number `first` on."""
        return replace(self, begin_index=self.begin_index + first, fields=self.fields[first : first + count], notes=[])

    def check_size(self, width: int, height: int) -> None:
        """Raises OutputError when frames of a size in px can't go into the file."""
        if self.codec:
            codecs.check_side(self.codec, width, height)

    def write(
        self,
        frames: NDArray[np.uint8],
        *,
        fps: int = 16,
        metadata: Metadata | Sequence[Metadata] | None = None,
    ) -> list[Path]:
        """Write frames N x H x W x 3 (uint8); missing folders are made.

        `fps` counts for moving files only. `metadata` is one for all files, or one for each file.
        Every file is written under a temporary name beside its place, opened again and checked; all are renamed
        when all are whole and right.
        After any exception, Ctrl-C included, temporary files are gone and older files are as they were.

        Raises BadRequest for frames, fps or metadata of the wrong kind, OutputError when a file appeared
        meanwhile, SdsageError when writing fails (disk full, size beyond the container's limit) or the file does not
        hold what it should.
        """
        _check_frames(frames, fps)
        paths = self.paths(len(frames))
        _check_distinct(self.path, paths)
        infos = _one_each(metadata, len(paths))
        self.notes = list(self._differences(frames, fps))
        with self._whole(paths) as parts:
            for index, part in enumerate(parts):
                if self.clip:
                    self._write_clip(part, frames, fps, infos[index])
                else:
                    stills.write_still(part, self.suffix, frames[index], infos[index])
                    check.check_still(part, self.suffix, frames[index])
        return paths

    @contextmanager
    def stream(
        self,
        size: tuple[int, int],
        fps: Fraction | int,
        *,
        metadata: Metadata | None = None,
        time_base: Fraction | None = None,
        sound: Any = None,
    ) -> Iterator[pyav.VideoWriter]:
        """An .mp4 or .webm file that takes one frame after the other, so that no more than one is in memory.

        `size` is width and height in px; see `pyav.VideoWriter` for the rest. The file appears at the end of the
        `with` block, checked as `write` does; an exception inside leaves everything as it was.
        """
        self.notes = list(self._padded(*size))
        with self._whole(self.paths(1)) as (part,):
            how: dict[str, Any] = {"codec": self.codec, "crf": self.crf, "size": size, "fps": fps}
            how |= {"metadata": metadata, "time_base": time_base, "sound": sound}
            with pyav.VideoWriter(part, self.suffix, **how) as writer:
                yield writer
            expected = check.Expected(writer.count, _even(*size), None if time_base else Fraction(fps))
            check.check_video(part, self.suffix, self.codec, expected)

    @contextmanager
    def _whole(self, paths: Sequence[Path]) -> Iterator[list[Path]]:
        """Temporary names for `paths`, which become them when the block ends without an exception."""
        targets = [Path(os.path.realpath(path)) for path in paths]  # through a link, as plain writing would
        parts = [part_of(target) for target in targets]
        folders: list[Path] = []
        try:
            for folder in dict.fromkeys(target.parent for target in targets):
                _make_folder(folder, folders)
            yield parts
            _check_existing(targets, self.overwrite)
            for part, target in zip(parts, targets, strict=True):
                _put(part, target, self.overwrite)
        except BaseException as error:
            for part in parts:
                part.unlink(missing_ok=True)
            for folder in reversed(folders):
                with contextlib.suppress(OSError):  # not empty any more: another process uses it
                    folder.rmdir()
            if isinstance(error, (OSError, ValueError)) and not isinstance(error, SdsageError):
                reason = getattr(error, "strerror", None) or error
                raise SdsageError(f"output {self.path!r} was not written: {reason}") from error
            raise

    def _write_clip(self, part: Path, frames: NDArray[np.uint8], fps: int, metadata: Metadata | None) -> None:
        size = frames.shape[2], frames.shape[1]
        expected = check.Expected(len(frames), size, Fraction(fps))
        if self.suffix == ".gif":
            times = stills.write_gif(part, frames, fps, metadata)
            check.check_clip(part, self.suffix, expected, sum(times))
        elif self.suffix == ".webp":
            times = stills.write_webp_clip(part, frames, fps, metadata)
            check.check_clip(part, self.suffix, expected, sum(times))
        else:
            how: dict[str, Any] = {"codec": self.codec, "crf": self.crf, "size": size, "fps": fps}
            pyav.write_video(part, self.suffix, frames, metadata=metadata, **how)
            check.check_video(part, self.suffix, self.codec, expected._replace(size=_even(*size)))

    def _padded(self, width: int, height: int) -> Iterator[str]:
        stored = _even(width, height)
        if stored != (width, height):
            yield (
                f"{self.suffix} needs even sizes: {width}x{height} is stored as {stored[0]}x{stored[1]}, edge repeated"
            )

    def _differences(self, frames: NDArray[np.uint8], fps: int) -> Iterator[str]:
        if self.codec:
            yield from self._padded(frames.shape[2], frames.shape[1])
        if self.clip and self.suffix == ".gif":
            times = set(stills.frame_times(len(frames), fps, 100))
            if min(times) < stills.GIF_FASTEST:
                yield f".gif can't show {fps} frames per second: it plays at 50, the most that players accept"
            elif len(times) > 1:
                lengths = " or ".join(str(10 * t) for t in sorted(times))
                yield f".gif counts in 10 ms: at {fps} frames per second frames last {lengths} ms in turn"


def plan_output(
    path: str | os.PathLike[str],
    *,
    video: bool,
    count: int,
    overwrite: bool = False,
    begin_index: int | None = None,
    fields: Sequence[Mapping[str, str]] | None = None,
    codec: str | None = None,
    crf: int | None = None,
) -> Output:
    """Judge an output name for `count` images, or frames of a video; creates nothing.

    A video goes to .mp4, .webm, .gif or .webp, or with a pattern such as frame_%04d.png to one image per
    frame; a single frame also to an image name. Images go to .png, .jpg or .webp; several images under a
    plain name become name_0.png, name_1.png. Indices start at `begin_index` (negative or None: 0).
    `codec` and `crf` count for .mp4 and .webm only, see `codecs.CODECS`.

    With `fields` (one for a video, one for each image) the name may hold {seed}, {prompt} and the like, each of which
    the fields give; without, braces are braces. An image that has no "index" gets its number.

    Raises OutputError (BadRequest) for a name, folder, container or codec that can't be used and, unless
    `overwrite`, for files that exist already; MissingExtra when the container needs PyAV and there is none.
    """
    name = os.fspath(path)
    if count < 1:
        raise BadRequest(f"{count} frames can't be written: at least 1 is needed")
    suffix = _check_name(name, is_video=video, count=count)
    clip = video and not naming.is_pattern(name) and suffix in CLIP_SUFFIXES
    begin = max(begin_index or 0, 0)
    template, given = (naming.literal(name), [{}] * (1 if video else count)) if fields is None else (name, fields)
    named = naming.fields_of(template)
    if not clip and count > 1 and not named & {"index", "seed"} and not naming.is_pattern(name):
        template = naming.numbered(template)
    each = tuple({"index": str(begin + i), **f} for i, f in enumerate(given))
    output = Output(name, suffix, clip, overwrite, begin, template, each)
    targets = output.paths(count)
    _check_distinct(name, targets)
    try:
        for folder in dict.fromkeys(Path(os.path.realpath(target)).parent for target in targets):
            _check_folder(folder)
        _check_existing(targets, overwrite)
    except OSError as error:
        raise OutputError(f"output {name!r} can't be used: {error.strerror}") from error
    if clip and suffix in codecs.CONTAINERS:
        output.codec, output.crf = codecs.choose_codec(suffix, codec, crf), crf
    return output


def _check_name(name: str, *, is_video: bool, count: int) -> str:
    """The extension of `name` in lower case, if a job of this kind can be written to it."""
    if not os.path.basename(name) or os.path.isdir(name):
        raise OutputError(
            f"output {name!r} is a folder: add a file name such as {'out.mp4' if is_video else 'out.png'}"
        )
    if "\0" in name:
        raise OutputError(f"output {name!r} holds a zero byte, which no file name can")
    suffix = os.path.splitext(name)[1].lower()
    numbered = naming.is_pattern(name)
    allowed: tuple[str, ...] = IMAGE_SUFFIXES
    if is_video and not numbered:
        allowed = CLIP_SUFFIXES + ((".png", ".jpg", ".jpeg", ".jpe") if count == 1 else ())
    if suffix in allowed:
        return suffix
    stem = os.path.splitext(name)[0]
    if numbered:
        problem = f"{suffix or 'no extension'} is not possible with a frame number"
        remedy = f"use {_listed(IMAGE_SUFFIXES)}" + (", or a name without %d for a video" if is_video else "")
    elif is_video and suffix in IMAGE_SUFFIXES:
        problem = f"{suffix} holds one image, not {count} frames"
        remedy = f"number them ({stem}_%04d{suffix}), or use {_listed(CLIP_SUFFIXES)}"
    else:
        problem = f"{suffix} is not possible" if suffix else "the extension is missing"
        remedy = f"use {_listed(allowed)}" + (f", or numbered images ({stem}_%04d.png)" if is_video else "")
    raise OutputError(f"output {name!r}: {problem}: {remedy}")


def _even(width: int, height: int) -> tuple[int, int]:
    """The size as MP4 and WebM store it."""
    bottom, right = pyav.padding(height, width)
    return width + right, height + bottom


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _check_folder(folder: Path) -> None:
    """The folder, or the nearest one above it that exists, must take new files."""
    present = folder
    while not present.exists() and present != present.parent:
        present = present.parent
    if not present.is_dir():
        raise OutputError(f"output folder {str(folder)!r} can't be made: {str(present)!r} is a file")
    if not os.access(present, os.W_OK | os.X_OK):
        raise OutputError(f"output folder {str(present)!r} is not writable: choose another or change its permissions")


def _check_distinct(name: str, targets: Sequence[Path]) -> None:
    for target, times in Counter(targets).items():
        if times > 1:
            raise OutputError(
                f"output {name!r} gives {times} results the name {str(target)!r}: put {{index}} into it to number them"
            )


def _check_existing(targets: Sequence[Path], overwrite: bool) -> None:
    for target in targets:
        if not target.exists():
            continue
        if not target.is_file():
            raise OutputError(f"output {str(target)!r} exists and is not a plain file: choose another name")
        if not overwrite:
            raise _taken(target)


def _taken(target: Path) -> OutputError:
    return OutputError(f"output {str(target)!r} exists already: choose another name, or replace it (--overwrite)")


def _put(part: Path, target: Path, overwrite: bool) -> None:
    """Gives a whole file its name; a file that another program wrote a moment ago stays, unless `overwrite`."""
    if not overwrite:
        try:
            os.link(part, target)  # unlike renaming, it fails where a file is
        except FileExistsError:
            raise _taken(target) from None
        except OSError:
            pass  # a file system without links
        else:
            part.unlink()
            return
    os.replace(part, target)


def _make_folder(folder: Path, made: list[Path]) -> None:
    """Create `folder` and what is missing above it; what is new is appended to `made`, outermost first."""
    missing = [level for level in (folder, *folder.parents) if not level.exists()]
    for level in reversed(missing):
        made.append(level)
        level.mkdir(exist_ok=True)


def _check_frames(frames: Any, fps: object) -> None:
    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        kind = f"{frames.dtype} {frames.shape}" if isinstance(frames, np.ndarray) else type(frames).__name__
        raise BadRequest(f"frames must be a uint8 array of shape N x H x W x 3, not {kind}")
    if 0 in frames.shape:
        raise BadRequest(f"frames of shape {frames.shape} hold no pixel")
    if isinstance(fps, bool) or not isinstance(fps, int) or fps < 1:
        raise BadRequest(f"fps={fps!r} is not possible: a whole number of frames per second from 1 up")


def _one_each(metadata: Metadata | Sequence[Metadata] | None, files: int) -> list[Metadata | None]:
    if metadata is None or isinstance(metadata, Metadata):
        return [metadata] * files
    if len(metadata) != files:
        raise BadRequest(f"{len(metadata)} metadata entries for {files} files: give one for all, or one for each")
    return list(metadata)
