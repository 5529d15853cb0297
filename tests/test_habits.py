"""What is said to people who bring words from other programs."""

import json
import re

import pytest
from typer.testing import CliRunner

from sdsage.cli import habits
from sdsage.cli.app import VERBS, build_app
from sdsage.cli.options import REMOVED, RENAMED, TABLE


def said(*args: str) -> str:
    verb = next((word for word in args if not word.startswith("-")), "")
    result = CliRunner().invoke(build_app(only=verb), list(args))
    assert result.exit_code == 2
    assert result.stdout == ""
    return " ".join(result.stderr.split())


def test_no_word_of_others_is_one_of_ours() -> None:
    ours = {name for option in TABLE for name in option.names}
    ours |= {name.replace("--", "--no-") for name in ours} | set(RENAMED) | set(REMOVED)
    assert not ours & set(habits.OPTIONS)
    assert not set(VERBS) & set(habits.VERBS)


def test_what_is_advised_exists() -> None:
    ours = {name for option in TABLE for name in option.names}
    for text in habits.OPTIONS.values():
        found = re.findall(r"(?<![\w-])--?[\w-]+", text)
        assert set(found) <= ours, text
        assert found or "<lora:" in text
    assert set(habits.VERBS.values()) <= {*VERBS, "--help"}
    for value, here in habits.VALUES.items():
        takes = [option for option in TABLE if here in option.choices]
        assert takes
        assert not any(value in option.choices for option in takes)


@pytest.mark.parametrize("name", habits.OPTIONS)
def test_options_of_others(name: str) -> None:
    assert f"No such option: {name}: use {habits.OPTIONS[name]}" in said("vid-gen", "-p", "x", name, "1")


@pytest.mark.parametrize("name", habits.VERBS)
def test_verbs_of_others(name: str) -> None:
    assert f"No such command '{name}': run 'sdsage {habits.VERBS[name]}'" in said(name, "-p", "x")


def test_a_verb_with_an_underscore() -> None:
    assert "Did you mean 'vid-gen'?" in said("vid_gen")


@pytest.mark.parametrize(
    "args", [["-M", "vid_gen", "-p", "x"], ["--preset", "tiny-random", "vid-gen"], ["--steps=3", "vid-gen"]]
)
def test_options_before_the_verb(args: list[str]) -> None:
    assert "options come after the verb, as in 'sdsage vid-gen" in said(*args)


@pytest.mark.parametrize(
    "args", [["vid-gen", "-p", "a", "lovely", "cat"], ["upscale", "in.png"], ["convert", "a.gguf", "b.gguf"]]
)
def test_words_without_an_option(args: list[str]) -> None:
    assert 'needs quotes: -i cat.png -p "a lovely cat"' in said(*args)


def test_the_advice_is_in_json_too() -> None:
    result = CliRunner().invoke(build_app(only="vid-gen"), ["vid-gen", "--sampler", "euler", "--json"])
    assert json.loads(result.stdout)["text"] == "No such option: --sampler: use --sampling-method"


@pytest.mark.parametrize(
    ("option", "value", "here"),
    [
        ("--sampling-method", "dpmpp_2m", "dpm++2m"),
        ("--sampling-method", "euler_ancestral", "euler_a"),
        ("--sampling-method", "DDIM", "ddim_trailing"),
        ("--scheduler", "normal", "discrete"),
        ("--type", "fp8", "q8_0"),
        ("--type", "Q4_K_M", "q4_K"),
        ("--rng", "gpu", "cuda"),
    ],
)
def test_values_of_others(option: str, value: str, here: str) -> None:
    assert f"did you mean {here}?" in said("vid-gen", "-p", "x", "--preset", "tiny-random", option, value)


def test_an_option_that_is_only_misspelt_keeps_its_suggestions() -> None:
    assert "--strength" in said("img-gen", "--strenth", "1")
