"""`sdsage info`: what a model file is, and with which settings a picture or video was made."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sdsage._headers import Header, read_header, sniff
from sdsage._kinds import Contents, Match, Part, Role, contents, match_lora
from sdsage.errors import BadRequest, SdsageError

from .console import console
from .values import Problems

_NAMES = ("general.name", "general.basename", "modelspec.title", "ss_output_name", "title")
_ARCHITECTURES = ("general.architecture", "modelspec.architecture", "ss_base_model_version")
_UNKNOWN_MATCHES = 5  # names of a LoRA that are shown


def run(raw: Mapping[str, Any]) -> None:
    paths: list[str] = list(raw.get("files") or ())
    if not paths:
        raise BadRequest("no file was given: name model files, pictures or videos, as in 'sdsage info wan.gguf'")
    found, problems = [], Problems()
    models: dict[str, Contents] = {}
    for path in paths:
        try:
            found.append(describe(path, bool(raw.get("tensors")), models))
        except SdsageError as error:
            problems.add(str(error))
    add_matches(found, models)
    if raw.get("json"):
        console().result({"files": found, "problems": problems.found}, exit_code=2 if problems.found else 0)
    else:
        print("\n\n".join("\n".join(lines(entry)) for entry in found), end="\n" if found else "")
    problems.stop_if_any()


def describe(path: str, tensors: bool, models: dict[str, Contents]) -> dict[str, Any]:
    """One entry of the result as plain values; the contents of a model file go into `models`.

    Raises:
        BadRequest: the file is missing, damaged, or nothing that is known here.
    """
    file = Path(path)
    if file.name.endswith(".json") or not file.is_file() or sniff(file) in ("gguf", "safetensors", "pickle"):
        header = read_header(file)
        models[path] = contents(header)
        entry = model_entry(header, models[path])
        if tensors:
            entry["tensors_by_name"] = {
                name: {"shape": list(t.shape), "type": t.type, "bytes": t.nbytes} for name, t in header.tensors.items()
            }
        return entry
    return media_entry(file)


def media_entry(file: Path) -> dict[str, Any]:
    from sdsage.media import read_metadata

    metadata = read_metadata(file)
    return {
        "file": str(file),
        "kind": "picture or video",
        "parameters": metadata.parameters if metadata is not None else None,
        "settings": metadata.data if metadata is not None else None,
    }


def model_entry(header: Header, holds: Contents) -> dict[str, Any]:
    by_type: dict[str, int] = {}
    for tensor in header.tensors.values():
        by_type[tensor.type] = by_type.get(tensor.type, 0) + tensor.nbytes
    return {
        "file": str(header.path),
        "kind": "model",
        "title": holds.title,
        "name": _first(header, _NAMES),
        "architecture": _first(header, _ARCHITECTURES),
        "container": header.container,
        "bytes": header.size,
        "files": [p.name for p in header.parts] if len(header.parts) > 1 else [],
        "tensors": len(header.tensors),
        "bytes_by_type": dict(sorted(by_type.items(), key=lambda item: -item[1])),
        "parts": [_part(part) for part, _ in holds.parts],
        "metadata": {k: _finite(v) for k, v in header.metadata.items()},
    }


def _finite(value: str | float) -> str | float:
    """JSON has no word for the numbers that are none."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _part(part: Part) -> dict[str, Any]:
    sizes = {"width": part.width, "text_width": part.text_width, "latent_channels": part.latents}
    return {
        "role": str(part.role),
        "kind": part.kind,
        "title": part.title,
        **{name: value for name, value in (sizes | part.facts).items() if value},
    }


def _first(header: Header, keys: tuple[str, ...]) -> str | None:
    return next((str(header.metadata[key]) for key in keys if header.metadata.get(key)), None)


def add_matches(found: list[dict[str, Any]], models: dict[str, Contents]) -> None:
    """For each LoRA, how it fits the diffusion models that were named beside it."""
    targets = {path: holds for path, holds in models.items() if holds.part(Role.DIFFUSION) is not None}
    for entry in found:
        file = models.get(entry["file"])
        if file is None or file.part(Role.LORA) is None or not targets:
            continue
        entry["fits"] = {path: _match(match_lora(file, holds)) for path, holds in targets.items()}


def _match(match: Match | None) -> dict[str, Any] | None:
    if match is None:
        return None
    return {"fitting": match.fitting, "unknown": list(match.unknown), "unfit": list(match.unfit)}


def lines(entry: dict[str, Any]) -> Iterator[str]:
    """An entry for people."""
    yield _safe(entry["file"])
    rows = _model_rows(entry) if entry["kind"] == "model" else _media_rows(entry)
    for title, text in rows:
        first, *more = _safe(text).split("\n") or [""]
        yield f"  {title:<15} {first}"
        yield from (f"  {'':<15} {line}" for line in more)


def _media_rows(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if entry["parameters"] is None:
        yield "parameters", "none: the file carries no settings"
        return
    yield "parameters", entry["parameters"]
    if entry["settings"]:
        yield "settings", json.dumps(entry["settings"], ensure_ascii=False, indent=1)


def _model_rows(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for part in entry["parts"]:
        yield part["role"], part["title"]
        facts = {k: v for k, v in part.items() if k not in ("role", "kind", "title")}
        if facts:
            yield "", ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())
    if not entry["parts"]:
        yield "kind", "unknown"
    if entry["name"]:
        yield "name", entry["name"]
    if entry["architecture"]:
        yield "architecture", entry["architecture"]
    split = f" in {len(entry['files'])} files" if entry["files"] else ""
    yield "file", f"{entry['container']}{split}, {_size(entry['bytes'])}, {entry['tensors']} tensors"
    total = sum(entry["bytes_by_type"].values()) or 1
    shares = (f"{kind} {100 * n / total:.1f} %" for kind, n in entry["bytes_by_type"].items())
    yield "numbers", ", ".join(shares) or "none"
    for path, match in entry.get("fits", {}).items():
        yield "fits", f"{path}: {_fit_text(match)}"
    for name, tensor in entry.get("tensors_by_name", {}).items():
        yield "tensor", f"{name}  {'x'.join(map(str, tensor['shape']))}  {tensor['type']}"


def _fit_text(match: dict[str, Any] | None) -> str:
    if match is None:
        return "not known"
    text = f"{match['fitting']} weights"
    if match["unknown"]:
        names = match["unknown"]
        more = f" and {len(names) - _UNKNOWN_MATCHES} more" if len(names) > _UNKNOWN_MATCHES else ""
        text += f"; {len(names)} match nothing: {', '.join(names[:_UNKNOWN_MATCHES])}{more}"
    if match["unfit"]:
        text += f"; {len(match['unfit'])} have another size: {match['unfit'][0]}"
    return text


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _safe(text: str) -> str:
    """Texts come out of files: nothing that a terminal would obey, nothing that can't be encoded."""
    kept = "".join(
        c if c.isprintable() or c == "\n" else " " if c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    return kept.encode("utf-8", "replace").decode("utf-8")
