"""--from: the settings that a picture or video carries, and the files that they name."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sdsage.errors import BadRequest

from .finding import DEEPEST, MOST_ENTRIES, Finder, WantedFile
from .inputs import PICTURE_FOLDERS, WORD_FOLDERS
from .option import Kind, Option
from .options import by_key, of_verb
from .prompt import lora_names
from .record import FORMAT
from .report import say
from .settings import Settings
from .values import check_folder


@dataclass(frozen=True)
class Recorded:
    """What a file says about how it was made.

    Attributes:
        options: values by option key, not yet checked; files are not among them.
        preset: where model files may come from; None when none was used.
        overridden: keys that the user or a preset gives instead.
        engine: the version of the engine's source.
        enlarged: `sdsage upscale` worked on it afterwards.
    """

    path: str
    version: str
    engine: object
    options: dict[str, Any]
    files: tuple[WantedFile, ...]
    preset: str | None
    overridden: frozenset[str]
    enlarged: bool


def read_recorded(path: str, verb: str, overridden: set[str]) -> Recorded:
    """Reads `path`, which may come from anywhere: nothing in it is taken without a look.

    Raises:
        BadRequest: it can't be read, carries no settings of ours, or was made by another verb.
        MissingExtra: it is a video and PyAV is not installed.
    """
    from sdsage.media import read_metadata

    metadata = read_metadata(path)
    data = metadata.data if metadata is not None else {}
    match data:
        case {"format": int(format), "version": str(version), "verb": str(made_by), "options": dict(options)}:
            pass
        case _:
            raise BadRequest(
                f"--from {path} carries no settings of sdsage: it takes a file that sdsage wrote, without --no-metadata"
            )
    if format > FORMAT:
        raise BadRequest(f"--from {path} was made by sdsage {version}, whose settings this version can't read")
    if made_by != verb:
        raise BadRequest(f"--from {path} was made by {made_by}: run 'sdsage {made_by} --from ...'")
    known = {o.key: o for o in of_verb(verb) if o.record or o.key == "seed"}
    for key in options:
        if key not in known:
            raise BadRequest(f"--from {path} has {key!r}, which is not an option of {verb} in this version")
    for key, value in options.items():
        if known[key].kind is Kind.FOLDER and value != "":
            raise _damaged(path, f"{known[key].name} names a folder")
    files = tuple(_files(path, data.get("files"), known))
    values = {key: value for key, value in options.items() if known[key].kind is not Kind.FILE}
    for key in options.keys() - values.keys() - {file.option for file in files}:
        raise _damaged(path, f"no file for {known[key].name}")
    preset = data.get("preset")
    upstream = data.get("engine", {}).get("upstream") if isinstance(data.get("engine"), dict) else None
    return Recorded(
        path,
        version,
        upstream,
        values,
        files,
        preset if isinstance(preset, str) else None,
        frozenset(overridden),
        "enlarged" in data,
    )


def _damaged(path: str, what: str) -> BadRequest:
    return BadRequest(f"--from {path} is damaged: {what}")


def _files(path: str, entries: object, known: Mapping[str, Option]) -> Iterator[WantedFile]:
    if not isinstance(entries, list):
        raise _damaged(path, "it has no list of files")
    words: dict[tuple[str, str], WantedFile] = {}
    for entry in entries:
        match entry:
            case {
                "option": str(option),
                "name": str(name),
                "bytes": int() | None as size,
                "sha256": str() | None as sha,
            }:
                word = entry.get("word", "")
                plain = name == os.path.basename(name) and name not in ("", ".", "..") and "\0" not in name
                folder = option in WORD_FOLDERS or option in PICTURE_FOLDERS
                fits = option in known and (folder or known[option].kind is Kind.FILE)
                if not (plain and fits and isinstance(word, str) and bool(word) == (option in WORD_FOLDERS)):
                    raise _damaged(path, f"{entry} names no file")
            case _:
                raise _damaged(path, f"{entry} names no file")
        wanted = WantedFile(option, name, word, size, sha)
        if word and words.setdefault((option, word), wanted) != wanted:
            raise _damaged(path, f"{word!r} stands for two files")
        yield wanted


def locate(settings: Settings) -> None:
    """Puts the paths of all files that --from names into the settings; without --from it does nothing.

    Raises:
        BadRequest: naming every file that is missing, with its hash; or the settings have other problems.
    """
    recorded = settings.recorded
    if recorded is None:
        return
    for folder in settings["model_dir"]:
        check_folder("--model-dir", folder, settings.problems)
    settings.problems.stop_if_any()
    if recorded.enlarged:
        settings.warnings.append(
            f"{recorded.path} was enlarged by 'sdsage upscale' afterwards, which is not repeated: run it on the result"
        )
    groups: dict[str, list[WantedFile]] = {}
    for wanted in recorded.files:
        if _is_needed(wanted, settings, recorded):
            groups.setdefault(wanted.option, []).append(wanted)
    finder = Finder(
        _preset_files(recorded, settings) if groups else [],
        [*settings["model_dir"], ".", os.path.dirname(recorded.path) or "."],
        settings["ignore_hashes"],
        lambda text: None if settings["quiet"] else say("note", text, settings["color"]),
    )
    missing = [line for files in groups.values() for line in _place(files, finder, settings)]
    if missing:
        raise BadRequest("\n".join([*missing, _advice(recorded, settings, finder)]))
    if settings["preset"] is None:
        settings.values["preset"] = recorded.preset  # for the record of the new file


def _is_needed(wanted: WantedFile, settings: Settings, recorded: Recorded) -> bool:
    if wanted.option in recorded.overridden:
        return False
    match wanted.option:
        case "lora_model_dir":
            return wanted.word in lora_names(settings["prompt"])
        case "embd_dir":
            return wanted.word.casefold() in f"{settings['prompt']} {settings['negative_prompt']}".casefold()
        case "hires_upscalers_dir":
            return bool(settings["hires"]) and settings["hires_upscaler"] == wanted.word
    return True


def _place(files: list[WantedFile], finder: Finder, settings: Settings) -> Iterator[str]:
    """Finds the files of one option and sets it; a line for each one that is missing."""
    from sdsage.media.load import image_files

    key = files[0].option
    option = by_key()[key]
    if key in PICTURE_FOLDERS:
        folder, problem = finder.find_folder(files, lambda path: image_files(path, len(files)))
        if folder is None:
            yield f"{option.name}: {files[0]}: {problem}"
        else:
            _set(settings, key, str(folder))
        return
    paths = []
    for wanted in files:
        path, problem = finder.find(wanted)
        if path is None:
            yield f"{option.name}{f' {wanted.word!r}' if wanted.word else ''}: {wanted}: {problem}"
        else:
            paths.append(str(path))
            if wanted.sha256 is None and wanted.size is not None and not settings["ignore_hashes"]:
                settings.warnings.append(f"{path} was taken by name and size: its hash was not recorded")
            if wanted.word:
                settings.located.setdefault(key, {})[wanted.word] = str(path)
    if option.kind is Kind.FILE and paths:
        _set(settings, key, tuple(paths) if option.many else paths[0])


def _set(settings: Settings, key: str, value: Any) -> None:
    settings.values[key] = value
    settings.sources[key] = f"--from {settings['from_file']}"


def _preset_files(recorded: Recorded, settings: Settings) -> list[str]:
    from sdsage import presets

    if recorded.preset not in presets.names():
        return []
    note = None if settings["quiet"] else lambda path: say("note", f"writing the tiny model {path}")
    values = presets.load(recorded.preset, note, missing_ok=True).options.items()
    return [str(value) for key, value in values if by_key()[key].kind is Kind.FILE]


def _advice(recorded: Recorded, settings: Settings, finder: Finder) -> str:
    looked = ", ".join(dict.fromkeys([*settings["model_dir"], ".", os.path.dirname(recorded.path) or "."]))
    cut = f" (no deeper than {DEEPEST} folders, no more than {MOST_ENTRIES} files in each)" if finder.cut_short else ""
    return (
        f"--from {recorded.path} needs these files; looked at: {looked}{cut}. Name their folder with --model-dir, give "
        "the option itself with another file, or take other files of these names with --ignore-hashes"
    )


def differences(recorded: Recorded, engine: Mapping[str, Any]) -> list[str]:
    """A sentence when this version, or its engine, is not the one that made the file."""
    from sdsage import __version__

    if (recorded.version, recorded.engine) == (__version__, engine["upstream"]):
        return []
    return [
        f"{os.path.basename(recorded.path)} was made by sdsage {recorded.version}, this is {__version__}, and versions "
        "or their engines differ: so may the result"
    ]
