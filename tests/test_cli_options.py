"""The table of options against sd-cli, the engine's enums and parameter structs, the help and docs/cli.md."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sdsage import _library, params
from sdsage.cli import docs
from sdsage.cli.app import BENCHES, VERBS, build_app
from sdsage.cli.option import GENERATE, Kind, Option
from sdsage.cli.options import REMOVED, RENAMED, TABLE, by_key, of_verb

# Options of sd-cli that vid-gen and img-gen don't take, and why.
NOT_TAKEN = {
    "--image": "belongs to sd-cli's metadata mode, which is no verb here",
    "--metadata-format": "belongs to sd-cli's metadata mode, which is no verb here",
    "--metadata-raw": "belongs to sd-cli's metadata mode, which is no verb here",
    "--metadata-brief": "belongs to sd-cli's metadata mode, which is no verb here",
    "--metadata-all": "belongs to sd-cli's metadata mode, which is no verb here",
    "--convert-name": "works in sd-cli's convert mode only: sdsage convert takes it",
    "--help": "is made by typer",
}
IDS = [o.name for o in TABLE]


@cache
def native_names() -> dict[str, str | None]:
    """Long option -> short option, from `sd-cli --help`."""
    text = subprocess.run([_library.sd_cli_path(), "--help"], capture_output=True, text=True).stdout
    return {long: short or None for short, long in re.findall(r"^  (?:(-\w), )?(--[\w-]+)", text, flags=re.MULTILINE)}


@cache
def help_of(verb: str) -> str:
    result = CliRunner().invoke(build_app(only=verb.split()[0]), [*verb.split(), "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    return result.stdout


def test_sd_cli_has_options() -> None:
    assert len(native_names()) > 100


@pytest.mark.parametrize("verb", sorted(GENERATE))
def test_every_option_of_sd_cli_is_taken(verb: str) -> None:
    spellings = {name: option for option in of_verb(verb) for name in option.names}
    missing = {name for name in native_names() if name not in spellings}
    assert missing == set(NOT_TAKEN)
    for long, short in native_names().items():
        if short and long not in NOT_TAKEN:
            assert spellings[short] is spellings[long]


@pytest.mark.parametrize("verb", [*VERBS, *BENCHES])
def test_spellings_are_unique(verb: str) -> None:
    names = [name for option in of_verb(verb) for name in option.names]
    names += [o.name.replace("--", "--no-") for o in of_verb(verb) if o.kind is Kind.SWITCH]
    names += [*RENAMED, *REMOVED]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("option", TABLE, ids=IDS)
def test_help_has_sentence_unit_and_default(option: Option) -> None:
    for verb in option.verbs:
        told = option.told_in(verb)
        sentence = told.sentence()
        assert re.fullmatch(r"[A-Z].{3,} \(.+; default .+\)\.", sentence)
        assert not told.help.endswith(".")
        assert "".join(sentence.split()) in "".join(help_of(verb).split())  # lines break at hyphens too


@pytest.mark.parametrize("verb", [*VERBS, *BENCHES])
def test_help_has_an_example_and_panels(verb: str) -> None:
    text = help_of(verb)
    assert "".join((VERBS | BENCHES)[verb].example.split()) in "".join(text.split())
    titles = re.findall(r"^(\S.*):$", text, flags=re.MULTILINE)
    assert titles == list(dict.fromkeys(o.panel for o in of_verb(verb)))


@pytest.mark.parametrize("option", [o for o in TABLE if o.target], ids=lambda o: o.name)
def test_targets_exist(option: Option) -> None:
    root, *path = option.target.split(".")
    classes = {
        "ctx": [params.SdCtxParams],
        "img": [params.SdImgGenParams],
        "vid": [params.SdVidGenParams],
        "gen": [params.SdImgGenParams, params.SdVidGenParams],
    }
    for cls in classes[root]:
        value = cls()
        for name in path:
            value = getattr(value, name)


def test_other_words_are_for_verbs_that_take_the_option() -> None:
    for option in TABLE:
        assert {verb for verb, _, _ in option.in_verb} <= option.verbs


@pytest.mark.parametrize("option", TABLE, ids=IDS)
def test_relations_name_options(option: Option) -> None:
    keys = {n.removeprefix("--").replace("-", "_") for n in (*option.needs, *option.beaten_by, *RENAMED.values())}
    assert keys <= set(by_key())
    assert option.only is None or option.only in option.verbs


@pytest.mark.parametrize("option", [o for o in TABLE if o.low is not None], ids=lambda o: o.name)
def test_defaults_are_in_range(option: Option) -> None:
    values = option.default if isinstance(option.default, tuple) else (option.default,)
    for value in values:
        unset = value is None or option.key == "output_begin_idx"  # -1: none was given
        assert unset or (option.low <= value <= (option.high or value))


def test_docs_are_current() -> None:
    path = Path(__file__).parent.parent / "docs" / "cli.md"
    assert path.read_text(encoding="utf-8") == docs.document() + "\n", "run: python -m sdsage.cli.docs > docs/cli.md"


def test_docs_name_every_option() -> None:
    text = docs.document()
    assert [o.name for o in TABLE if f"`{o.name}" not in text] == []
