"""`sdsage completion bash|zsh|fish`: a script that completes verbs, options and values.

All words are in the script, so that no process starts when a key is pressed; it is to be made again after an update.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import typer

from sdsage.errors import BadRequest

from .app import BENCHES, CONTEXT, GROUPS, VERBS
from .option import Kind, Option
from .options import of_verb

Run = Callable[[Mapping[str, Any]], None]
_VERBS = {name: verb.help for name, verb in VERBS.items()} | GROUPS


def add_to(app: typer.Typer, guarded: Callable[[Run], Run]) -> None:
    """Adds the verb."""
    text = (
        f"{GROUPS['completion']}\n\nExamples: "
        "sdsage completion bash > ~/.local/share/bash-completion/completions/sdsage; "
        "sdsage completion zsh > a folder of $fpath, as _sdsage; "
        "sdsage completion fish > ~/.config/fish/completions/sdsage.fish"
    )

    @app.command("completion", help=text, context_settings=CONTEXT)
    def completion(shell: str = typer.Argument(..., metavar="SHELL", help="bash, zsh or fish.")) -> None:
        guarded(run)({"shell": shell})


def run(raw: Mapping[str, Any]) -> None:
    shell = raw["shell"]
    if shell not in SCRIPTS:
        raise BadRequest(f"there is no completion for {shell}: it takes one of {', '.join(SCRIPTS)}")
    print("\n".join(SCRIPTS[shell]()))


def _choices(option: Option) -> list[str]:
    """Values that can be offered."""
    if option.key != "preset":
        return list(option.choices)
    from sdsage import presets

    return presets.names()


def _spellings(option: Option) -> list[str]:
    switch = option.kind is Kind.SWITCH
    return [*option.names, *([option.name.replace("--", "--no-")] if switch else [])]


def _named(verb: str) -> list[Option]:
    """The options of a verb; what stands in its place, such as the LATENTS of decode, is a file, which shells offer."""
    return [o for o in of_verb(verb) if o.name.startswith("-")]


def _of_words() -> dict[str, list[Option]]:
    """The options after each first word; those of the benchmarks together."""
    benches = {o.name: o for verb in BENCHES for o in _named(verb)}
    return {**{verb: _named(verb) for verb in VERBS}, "bench": list(benches.values())}


def _options() -> dict[str, Option]:
    """Every option that takes a value, once."""
    return {o.key: o for options in _of_words().values() for o in options if o.kind is not Kind.SWITCH}


def _bash() -> Iterator[str]:
    yield "# bash completion of sdsage, written by 'sdsage completion bash'"
    yield "_sdsage() {"
    yield '    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} verb="" word'
    yield '    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do [[ $word != -* ]] && verb=$word && break; done'
    yield "    COMPREPLY=()"
    yield '    case "$prev" in'
    files: list[str] = []
    others: list[str] = []
    for option in _options().values():
        choices = _choices(option)
        if choices:
            yield f"        {'|'.join(option.names)}) {_compgen(choices)}; return ;;"
        else:
            (files if option.kind in (Kind.FILE, Kind.FOLDER) else others).extend(option.names)
    yield f"        {'|'.join(files)}) return ;;  # bash offers files"
    yield f"        {'|'.join(others)}) compopt +o default; return ;;"
    yield "    esac"
    yield '    case "$verb" in'
    yield f'        "") {_compgen([*_VERBS, "--help", "--version"])} ;;'
    for verb, options in _of_words().items():
        words = [word for option in options for word in _spellings(option)]
        yield f"        {verb}) [[ $cur == -* ]] && {_compgen([*words, '--help'])} ;;"
    yield f"        completion) {_compgen([*SCRIPTS])} ;;"
    yield "    esac"
    yield "}"
    yield "complete -o default -F _sdsage sdsage"


def _compgen(words: list[str]) -> str:
    return f'COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$cur"))'


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _zsh() -> Iterator[str]:
    yield "#compdef sdsage"
    yield "# zsh completion of sdsage, written by 'sdsage completion zsh'"
    yield "_sdsage() {"
    yield "    local curcontext=$curcontext state line"
    yield "    typeset -A opt_args"
    yield "    local -a verbs=("
    yield from (f"        {_quoted(f'{name}:{help}')}" for name, help in _VERBS.items())
    yield "    )"
    yield "    _arguments -C '(- *)--help[show the help]' '(- *)--version[show the version]' '1: :->verb' '*:: :->rest'"
    yield "    case $state in"
    yield "        verb) _describe verb verbs ;;"
    yield "        rest) case $words[1] in"
    for verb, options in _of_words().items():
        yield f"            {verb}) _arguments \\"
        yield from (f"                {spec} \\" for option in options for spec in _zsh_specs(option))
        yield "                '--help[show the help]' '*:file:_files' ;;"
    yield f"            completion) _values shell {' '.join(SCRIPTS)} ;;"
    yield "        esac ;;"
    yield "    esac"
    yield "}"
    yield '_sdsage "$@"'


def _zsh_specs(option: Option) -> Iterator[str]:
    help = option.help
    for character in "\\[]:":
        help = help.replace(character, f"\\{character}")
    choices = _choices(option)
    action = f"({' '.join(choices)})" if choices else "_files" if option.kind is Kind.FILE else ""
    action = "_files -/" if option.kind is Kind.FOLDER else action
    value = "" if option.kind is Kind.SWITCH else f":{option.kind.unit}:{action}"
    for name in _spellings(option):
        yield _quoted(f"*{name}[{help}]{value}" if option.many else f"{name}[{help}]{value}")


def _fish() -> Iterator[str]:
    yield "# fish completion of sdsage, written by 'sdsage completion fish'"
    for name, help in _VERBS.items():
        yield f"complete -c sdsage -n __fish_use_subcommand -f -a {name} -d {_fish_text(help)}"
    for verb, options in _of_words().items():
        for option in options:
            yield f"complete -c sdsage -n '__fish_seen_subcommand_from {verb}' {_fish_option(option)}"
    yield f"complete -c sdsage -n '__fish_seen_subcommand_from completion' -f -a '{' '.join(SCRIPTS)}'"


def _fish_option(option: Option) -> str:
    names = [f"-l {n.removeprefix('--')}" if n.startswith("--") else f"-s {n[1:]}" for n in _spellings(option)]
    choices = _choices(option)
    value = (
        f" -x -a '{' '.join(choices)}'" if choices else " -r -F" if option.kind in (Kind.FILE, Kind.FOLDER) else " -x"
    )
    return f"{' '.join(names)} -d {_fish_text(option.help)}{'' if option.kind is Kind.SWITCH else value}"


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: dict[str, Callable[[], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
