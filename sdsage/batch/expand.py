"""From the entries of a job file to single jobs: defaults, named models, grids. Everything is checked."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sdsage.batch.schema import OF_THE_BATCH, entry_model, errors_of, fits, key_of
from sdsage.batch.source import Entry, Faults, Source
from sdsage.cli.option import GENERATE, Kind
from sdsage.cli.options import by_key, of_verb
from sdsage.cli.seeds import MAX_SEED
from sdsage.cli.settings import hidden_key, unknown_key
from sdsage.cli.values import parse

MOST_JOBS = 100_000


@dataclass(frozen=True)
class Wanted:
    """One picture or video to make.

    Attributes:
        number: from 1, in the order of the job file.
        where: its entry.
        options: as they were written.
        raw: what a command line would have given, by parameter name; the output is not in it.
        output: its template.
        model: the name of the model in the job file; empty where there is none.
    """

    number: int
    where: str
    verb: str
    options: dict[str, Any]
    raw: dict[str, Any]
    output: str
    model: str = ""


def expand(source: Source, faults: Faults) -> list[Wanted]:
    """All jobs in their order; what is wrong with an entry goes to `faults`."""
    found: list[Wanted] = []
    heads = {"defaults": source.defaults} | {f"model {name}": values for name, values in source.models.items()}
    for name, values in heads.items():
        _check_names(values, f"{source.name}, {name}", faults, ("mode", "model", "output"))
    for entry in source.entries:
        _check_names(entry.values, entry.where, faults, ("mode", "model", "output"))
        for merged, model in _merged(source, entry):
            for verb, values, output in _jobs(merged, entry, faults):
                raw = _as_given(values)
                found.append(Wanted(len(found) + 1, entry.where, verb, values, raw, output, model))
        if len(found) > MOST_JOBS:
            faults.add(entry.where, "", f"there are more than {MOST_JOBS} jobs up to here: make several job files")
            break
    if not found:
        faults.add(source.name, "", "there are no jobs in it")
    return found


def _check_names(values: dict[str, Any], where: str, faults: Faults, more: tuple[str, ...]) -> None:
    seen: dict[str, str] = {}
    for written in values:
        key = key_of(written)
        if key in seen:
            faults.add(where, written, f"this is the same as {seen[key]}: give one of them")
        seen[key] = written
        if key in OF_THE_BATCH:
            faults.add(where, written, f"this is not for a job: {OF_THE_BATCH[key]}")
        elif key not in more and not any(key == o.key for verb in GENERATE for o in of_verb(verb)):
            faults.add(where, written, unknown_key(written, "vid-gen", "the job file"))


def _merged(source: Source, entry: Entry) -> Iterator[tuple[dict[str, Any], str]]:
    """Defaults, then the named model, then the entry; and the name of the model: once for each model of a list."""
    own = {key_of(k): v for k, v in entry.values.items()}
    defaults = {key_of(k): v for k, v in source.defaults.items()}
    asked = own.get("model", defaults.get("model"))
    for name in asked if isinstance(asked, list) else [asked]:
        model, title = {"model": name}, ""
        if isinstance(name, str) and name in source.models:
            model, title = {key_of(k): v for k, v in source.models[name].items()}, name
        rest = [{k: v for k, v in values.items() if k != "model"} for values in (defaults, own)]
        merged = {**rest[0], **model, **rest[1]}
        verb = merged.get("mode")
        kept = {k: v for k, v in merged.items() if k in own or verb not in GENERATE or fits(k, str(verb))}
        yield {k: v for k, v in kept.items() if v is not None and k not in OF_THE_BATCH}, title


def _jobs(merged: dict[str, Any], entry: Entry, faults: Faults) -> Iterator[tuple[str, dict[str, Any], str]]:
    verb = merged.get("mode")
    if verb not in GENERATE:
        said = f"{verb!r} is not a mode" if verb is not None else "it is missing"
        faults.add(entry.where, "mode", f"{said}: it takes vid-gen or img-gen")
        return
    known = {key: value for key, value in merged.items() if key in entry_model(verb).model_fields}
    for key in merged.keys() - known.keys():
        if key in by_key():
            faults.add(entry.where, key, f"this is not an option of {verb}")
    parsed, wrong = errors_of(entry_model(verb), known)
    for loc, text in wrong:
        faults.add(entry.where, str(loc[0]), text)
    if parsed is None:
        return
    grid: dict[str, list[Any]] = {key: getattr(parsed, key) for key in known if key not in ("mode", "output")}
    if math.prod(map(len, grid.values())) > MOST_JOBS:
        faults.add(entry.where, "", f"its grid has more than {MOST_JOBS} jobs: make it smaller")
        return
    output: str = getattr(parsed, "output")  # noqa: B009 - a field that is made at run time
    for values in itertools.product(*grid.values()):
        for single in _one_result_each(dict(zip(grid, values, strict=True)), entry, faults):
            yield verb, single, output


def _one_result_each(values: dict[str, Any], entry: Entry, faults: Faults) -> Iterator[dict[str, Any]]:
    """--seeds and --batch-count make jobs of their own, so that each result is kept and made again by itself."""
    seeds, count = values.pop("seeds", None), int(values.pop("batch_count", 1))
    if seeds is not None:
        yield from ({**values, "seed": seed} for seed in parse(by_key()["seeds"], seeds))
        return
    first = int(values.get("seed", by_key()["seed"].default))
    if first + count > MAX_SEED:
        faults.add(entry.where, "seed", f"{first} is too large: seed + batch_count must stay below 2^63")
        return
    for i in range(count):
        yield values if count == 1 else {**values, "seed": first + i if first >= 0 else first}


def _as_given(values: dict[str, Any]) -> dict[str, Any]:
    """As typer gives it: numbers are text, and a switch that is off has a parameter of its own."""
    raw: dict[str, Any] = {}
    for key, value in values.items():
        if value is False and by_key()[key].kind is Kind.SWITCH:
            raw[hidden_key("no", by_key()[key].name)] = True
        else:
            raw[key] = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    return raw
