"""`sdsage models list|show|pull|path`: the presets, their files, and fetching these."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import typer

from sdsage.errors import MissingExtra

from .app import CONTEXT, GROUPS
from .console import console

Run = Callable[[Mapping[str, Any]], None]

_JSON = typer.Option(False, "--json", help="Print one JSON object on stdout (switch; default off).")
_QUIET = typer.Option(False, "--quiet", "-q", help="Show no progress; errors stay (switch; default off).")
_NAME = typer.Argument(..., metavar="NAME", help="A preset, as 'sdsage models list' names it.")


def add_to(app: typer.Typer, guarded: Callable[[Run], Run]) -> None:
    """Adds `models` with its four commands."""
    models = typer.Typer(name="models", help=GROUPS["models"], no_args_is_help=True, context_settings=CONTEXT)
    command = partial(models.command, context_settings=CONTEXT)

    @command(
        "list", help="List the presets: their size, and whether their files are here.\n\nExample: sdsage models list"
    )
    def list_models(json: bool = _JSON) -> None:
        guarded(list_presets)({"json": json})

    @command("show", help="Show files and settings of a preset.\n\nExample: sdsage models show wan2.2-t2v-14b")
    def show(name: str = _NAME, json: bool = _JSON) -> None:
        guarded(show_preset)({"name": name, "json": json})

    @command(
        "pull",
        help="Fetch the files of a preset into the hub's cache (HF_HOME), going on where an earlier pull stopped, and "
        "check their hashes. Needs the extra hub.\n\nExample: sdsage models pull wan2.2-t2v-14b",
    )
    def pull(name: str = _NAME, json: bool = _JSON, quiet: bool = _QUIET) -> None:
        guarded(pull_preset)({"name": name, "json": json, "quiet": quiet})

    @command(
        "path",
        help="Print where the files of a preset are, one a line; an error when one is missing.\n\n"
        "Example: sdsage models path wan2.2-t2v-14b",
    )
    def path(name: str = _NAME, json: bool = _JSON) -> None:
        guarded(print_paths)({"name": name, "json": json})

    app.add_typer(models)


def describe(name: str) -> dict[str, Any]:
    """A preset as plain values; a path is None where a file is not here, or nobody can tell without huggingface_hub."""
    from sdsage import hub, presets

    rows: list[dict[str, Any]] = []
    for option, file in presets.files(name).items():
        if isinstance(file, str):
            rows.append({"option": option, "file": file, "path": None, "made_on_first_use": True})
        else:
            rows.append(
                {"option": option, "repo": file.repo, "file": file.file, "size": file.size, "path": _here(file)}
            )
    for lora in presets.loras(name):
        row = {"option": "lora", "repo": lora.file.repo, "file": lora.file.file, "size": lora.file.size}
        rows.append({**row, "path": _here(lora.file), "weight": lora.weight, "high_noise": lora.high_noise})
    of_hub = [row for row in rows if "repo" in row]
    sizes = [row["size"] for row in of_hub]
    state = "made on first use" if not of_hub else _state([row["path"] for row in of_hub])
    try:
        hub.hub()
    except MissingExtra:
        state = state if not of_hub else "not known without sdsage[hub]"
    return {
        "name": name,
        "verb": presets.mode(name),
        "description": presets.describe(name),
        "state": state,
        "size": sum(size or 0 for size in sizes),
        "size_is_whole": None not in sizes,
        "files": rows,
        "settings": presets.settings(name),
    }


def _state(paths: list[str | None]) -> str:
    here = sum(path is not None for path in paths)
    return "here" if here == len(paths) else f"{here} of {len(paths)} files here" if here else "not here"


def _here(file: Any) -> str | None:
    from sdsage import hub

    try:
        path = hub.local(file)
    except MissingExtra:
        return None
    return str(path) if path else None


def list_presets(raw: Mapping[str, Any]) -> None:
    from sdsage import presets

    found = [describe(name) for name in presets.names()]
    if raw["json"]:
        console().result({"models": found})
        return
    rows = [("NAME", "VERB", "SIZE", "STATE", "WHAT IT IS")]
    rows += [(m["name"], m["verb"], _size(m), m["state"], m["description"]) for m in found]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[4])


def _size(model: Mapping[str, Any]) -> str:
    """Gigabytes; a plus where the size of a file is not known before it is fetched."""
    return f"{model['size'] / 1e9:.1f} GB{'' if model['size_is_whole'] else '+'}" if model["size"] else "-"


def show_preset(raw: Mapping[str, Any]) -> None:
    found = describe(raw["name"])
    if raw["json"]:
        console().result(found)
        return
    print(f"{found['name']}: {found['description']}\n\nfiles ({found['state']}; {_size(found)}):")
    for row in found["files"]:
        size = f", {row['size'] / 1e9:.2f} GB" if row.get("size") else ""
        source = f"{row['file']} of {row['repo']}{size}" if "repo" in row else f"{row['file']}, made on first use"
        use = row["option"]
        if use == "lora":
            use = f"lora of the {'high' if row['high_noise'] else 'low'}-noise expert, weight {row['weight']:g}"
        print(f"  {use}: {source}")
        if row["path"]:
            print(f"    {row['path']}")
    print("\nsettings:")
    for key, value in found["settings"].items():
        print(f"  {key} = {json.dumps(value)}")
    print(f'\nsdsage {found["verb"]} --preset {found["name"]} -p "..."')


def pull_preset(raw: Mapping[str, Any]) -> None:
    from sdsage import hub, presets

    def note(sentence: str) -> None:
        console().message("note", sentence)

    files = presets.hub_files(raw["name"])
    if not files:
        presets.load(raw["name"], lambda path: note(f"writing the tiny model {path}"))
    else:
        hub.pull(files, note, progress=not raw["quiet"])
    print_paths(raw)


def print_paths(raw: Mapping[str, Any]) -> None:
    """Raises ModelError when a file of a hub is missing."""
    from sdsage import presets

    preset = presets.load(raw["name"])
    paths = {option: str(preset.options[option]) for option in presets.files(raw["name"])}
    paths |= {lora.word: str(lora.path) for lora in preset.loras}
    if raw["json"]:
        console().result({"name": raw["name"], "paths": paths})
    else:
        print("\n".join(paths.values()))
