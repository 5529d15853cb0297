"""Job files: JSONL, YAML, JSON and CSV, read into entries that know where they stand; values are not judged here."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdsage.errors import BadRequest, MissingExtra

KINDS = (".jsonl", ".yaml", ".yml", ".json", ".csv")
TOP = ("defaults", "models", "jobs")


class Faults:
    """What is wrong with a job file, gathered so that all of it is told at once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[str]] = {}

    def add(self, where: str, name: str, text: str) -> None:
        """`name`: the field; empty where there is none. The same fault in many entries becomes one line."""
        self._found.setdefault((name, text), []).append(where)

    def stop_if_any(self) -> None:
        """Raises BadRequest with a line for each fault."""
        if self._found:
            raise BadRequest("\n".join(self._lines()))

    def _lines(self) -> Iterator[str]:
        for (name, text), places in self._found.items():
            more = f" and {len(places) - 1} more" if places[1:] else ""
            for line in text.split("\n"):
                yield f"{places[0]}{more}{f', {name}' if name else ''}: {line}"


@dataclass(frozen=True)
class Entry:
    """A job, or a grid of jobs, as it was written. `where`: "jobs.jsonl, line 3 (entry 2)"."""

    where: str
    values: dict[str, Any]


@dataclass
class Source:
    """What is in a job file."""

    name: str
    defaults: dict[str, Any] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)


def read(path: Path, faults: Faults) -> Source:
    """A job file, of the kind that its extension says.

    Raises:
        BadRequest: it can't be read at all.
        MissingExtra: it is YAML, and PyYAML is not installed.
    """
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise BadRequest(f"{path} can't be a job file: it takes {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise BadRequest(f"job file {path} does not exist: check the path") from None
    except OSError as error:
        raise BadRequest(f"job file {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadRequest(f"job file {path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from None
    if kind == ".jsonl":
        return _jsonl(path.name, text, faults)
    if kind == ".csv":
        return _csv(path.name, text, faults)
    load = _json if kind == ".json" else _yaml
    return document(load(text, path), path.name, faults)


def document(found: Any, name: str, faults: Faults) -> Source:
    """A list of jobs, or an object with `jobs` and perhaps `defaults` and `models`."""
    from sdsage.batch.schema import Document, errors_of

    if isinstance(found, list | tuple):
        found = {"jobs": list(found)}
    parsed, wrong = errors_of(Document, found)
    for loc, text in wrong:
        where = f"{name}, entry {loc[1] + 1}" if loc[:1] == ("jobs",) and loc[1:] else name
        inner = loc[2:] if where != name else loc
        faults.add(where, ".".join(map(str, inner)), text)
    if parsed is None:
        return Source(name)
    entries = [Entry(f"{name}, entry {i}", values) for i, values in enumerate(parsed.jobs, 1)]
    return Source(name, parsed.defaults, parsed.models, entries)


def _jsonl(name: str, text: str, faults: Faults) -> Source:
    """An object a line. Lines that have nothing but `defaults` or `models` are for the lines of all jobs."""
    source = Source(name)
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            value = _loads(line)
        except ValueError as error:
            faults.add(where, "", f"this is not a JSON object: {error}")
            continue
        if isinstance(value, dict) and value and set(value) <= {"defaults", "models"}:
            head = document({**value, "jobs": []}, where, faults)
            source.defaults |= head.defaults
            source.models |= head.models
            continue
        where += f" (entry {len(source.entries) + 1})"
        if isinstance(value, dict):
            source.entries.append(Entry(where, value))
        else:
            faults.add(where, "", f'{line.strip()[:60]} is no job: a JSON object is needed, such as {{"prompt": ...}}')
    return source


def _csv(name: str, text: str, faults: Faults) -> Source:
    """A job a row; the first row has the names. Empty cells are not given; JSON lists and objects count as such."""
    source = Source(name)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names: list[str] = []
    while True:
        begin = reader.line_num + 1
        where = f"{name}, line {begin}"
        try:
            row = next(reader)
        except StopIteration:
            return source
        except csv.Error as error:
            faults.add(where, "", f"this is not CSV: {error}")
            return source
        if not any(cell.strip() for cell in row):
            continue
        if not names:
            names = [cell.strip() for cell in row]
            for column in sorted({n for n in names if names.count(n) > 1 or not n}):
                faults.add(where, "", f"the column {column!r} {'stands twice' if column else 'has no name'}")
            continue
        where += f" (entry {len(source.entries) + 1})"
        if len(row) > len(names):
            faults.add(where, "", f"{len(row)} cells under {len(names)} names: quote a cell that holds a comma")
        values = {column: _cell(cell) for column, cell in zip(names, row, strict=False) if cell != ""}
        source.entries.append(Entry(where, values))


def _cell(text: str) -> Any:
    if text[:1] in ("[", "{"):
        try:
            return _loads(text)
        except ValueError:
            pass  # a prompt may begin with a bracket
    return text


def _loads(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)


def _json(text: str, path: Path) -> Any:
    try:
        return _loads(text)
    except ValueError as error:
        raise BadRequest(f"{path} is not JSON: {error}") from None


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} stands twice")
        found[name] = value
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number here")


def _yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingExtra(f"{path} is YAML, which needs PyYAML: pip install 'sdsage[batch]'") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """A name that stands twice is an error, as in JSON."""

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        loader.flatten_mapping(node)
        seen = set()
        for key, _ in node.value:
            name = loader.construct_object(key, deep=True)
            if not isinstance(name, str):
                raise yaml.constructor.ConstructorError(None, None, f"{name!r} is no name", key.start_mark)
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r} stands twice", key.start_mark)
            seen.add(name)
        found: dict[Any, Any] = loader.construct_mapping(node, deep=True)
        return found

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return yaml.load(text, Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark is not None else ""
        what = getattr(error, "problem", None) or str(error).split("\n")[0]
        raise BadRequest(f"{path}{at} is not YAML: {what}") from None


def lines_of(path: str) -> list[str]:
    """The lines of a file that are not empty; raises ValueError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"file {path} can't be read: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise ValueError(f"file {path} is not UTF-8 text: save it as UTF-8") from None
    found = [line.strip() for line in text.splitlines() if line.strip()]
    if not found:
        raise ValueError(f"file {path} is empty: a value a line is needed")
    return found


def given(jobs: Any, faults: Faults, read_path: Callable[[Path, Faults], Source] = read) -> Source:
    """Jobs from a path, from a list of entries, or from an object with `jobs`, `defaults` and `models`."""
    if isinstance(jobs, str | Path):
        return read_path(Path(jobs), faults)
    return document(dict(jobs) if isinstance(jobs, Mapping) else list(jobs), "jobs", faults)
