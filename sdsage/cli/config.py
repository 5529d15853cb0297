"""`sdsage config show VERB ...`: the settings that a command would run with, and where each came from."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import typer

from .app import CONTEXT, GROUPS, SWITCH_NOTE, PanelCommand
from .console import console
from .option import IMG, VID, Option, Panel
from .options import of_verb
from .settings import Settings, merge
from .signature import command

_SHOW = "Show the settings that a command would run with, as a config file, and where each one came from."
_EXAMPLE = "sdsage config show vid-gen --preset tiny --config run.toml --steps 8"
# They can't stand in a config file, or have done their work when the values are known.
_COMMENTED = ("config", "mode", "from_file", "model_dir", "ignore_hashes", "json", "quiet")

Run = Callable[[Mapping[str, Any]], None]


def add_to(app: typer.Typer, guarded: Callable[[Run], Run]) -> None:
    """Adds `config show vid-gen` and `config show img-gen`, which take the options of these verbs."""
    config = typer.Typer(name="config", help=GROUPS["config"], no_args_is_help=True, context_settings=CONTEXT)
    show = typer.Typer(name="show", help=f"{_SHOW}\n\nExample: {_EXAMPLE}", no_args_is_help=True)
    for verb in (VID, IMG):
        help = f"The settings of 'sdsage {verb}' with the same options.\n\n{SWITCH_NOTE}"
        function = command(verb, guarded(partial(run, verb)))
        show.command(verb, cls=PanelCommand, help=help, context_settings=CONTEXT)(function)
    config.add_typer(show)
    app.add_typer(config)


def run(verb: str, raw: Mapping[str, Any]) -> None:
    """Prints TOML, or with --json one object."""
    from .repeat import locate

    settings = merge(verb, raw)
    locate(settings)
    settings.problems.stop_if_any()
    if settings["json"]:
        options = {key: {"value": value, "from": settings.source(key)} for key, value in settings.values.items()}
        console().result({"verb": verb, "options": options})
    else:
        print("\n".join(toml_lines(settings)))


def toml_lines(settings: Settings) -> Iterator[str]:
    """A config file that gives these settings; what is a default stands in a comment."""
    options = of_verb(settings.verb)
    yield f"# sdsage {settings.verb}"
    for panel in Panel.ORDER:
        rows = [_line(o, settings) for o in options if o.panel == panel]
        if rows:
            yield f"\n# {panel}"
            yield from rows
    for folder, files in settings.located.items():  # of no option: they were found one by one
        yield from (f"# {folder}: {word!r} is {path}" for word, path in files.items())


def _line(option: Option, settings: Settings) -> str:
    value, source = settings[option.key], settings.source(option.key)
    shown = option.shown_default() if value is None else toml(value)
    comment = source == "default" or value is None or option.key in _COMMENTED
    name = f"# {option.key}" if comment else option.key
    return f"{name} = {shown}  # {source}"


def toml(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):  # JSON escapes all that TOML wants escaped, but for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
