"""Typer commands from the table of options: a function with one keyword parameter for each spelling."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import typer

from .option import BATCH, INFO, Kind, Option
from .options import REMOVED, RENAMED, by_key, of_verb
from .settings import hidden_key

Raw = Mapping[str, Any]
# Verbs that take any number of words without an option, as "files".
_WORDS = {
    INFO: ("FILE...", "Model files, pictures and videos."),
    BATCH: ("JOBS", "Job file: .jsonl, .yaml, .json or .csv; or: status FOLDER."),
}


def command(verb: str, run: Callable[[Raw], None]) -> Callable[..., None]:
    """The function that typer turns into a command; it hands what was given to `run`, by parameter name.

    Values stay text, so that every bad one is reported, and None tells that an option was not given.
    """

    def body(**raw: Any) -> None:
        run(raw)

    parameters = [p for option in of_verb(verb) for p in _parameters(option)] + _old_names(verb)
    if verb in _WORDS:
        metavar, help = _WORDS[verb]
        panel = of_verb(verb)[0].panel
        words = typer.Argument(None, metavar=metavar, help=help, show_default=False, rich_help_panel=panel)
        parameters.insert(0, _parameter("files", words, list[str]))
    body.__name__ = verb.replace("-", "_")
    body.__annotations__ = {p.name: p.annotation for p in parameters}
    body.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return body


def _parameters(option: Option) -> list[inspect.Parameter]:
    if option.positional:
        argument = typer.Argument(
            None, metavar=option.name, help=option.sentence(), rich_help_panel=option.panel, show_default=False
        )
        return [_parameter(option.key, argument, str)]
    switch = option.kind is Kind.SWITCH
    info = typer.Option(
        False if switch else None,
        *option.names,
        help=option.sentence(),
        rich_help_panel=option.panel,
        metavar=None if switch else option.kind.metavar,
        show_default=False,
    )
    shown = _parameter(option.key, info, bool if switch else list[str] if option.many else str)
    return [shown, _hidden("no", option.name, option.name.replace("--", "--no-"), bool)] if switch else [shown]


def _old_names(verb: str) -> list[inspect.Parameter]:
    taken = {o.key for o in of_verb(verb)}
    hidden = []
    for old, name in RENAMED.items():
        option = by_key()[name.removeprefix("--").replace("-", "_")]
        if option.key in taken:
            hidden.append(_hidden("old", old, old, str))
    if "steps" in taken:  # verbs that generate
        hidden += [_hidden("old", old, old, str if r.takes_value else bool) for old, r in REMOVED.items()]
    return hidden


def _hidden(kind: str, name: str, spelling: str, annotation: type) -> inspect.Parameter:
    info = typer.Option(False if annotation is bool else None, spelling, hidden=True)
    return _parameter(hidden_key(kind, name), info, annotation)


def _parameter(name: str, info: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=annotation)
