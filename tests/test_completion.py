"""The completion scripts, in the shells themselves."""

import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sdsage.cli.app import VERBS, build_app
from sdsage.cli.options import by_key

SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    result = CliRunner().invoke(build_app(only="completion"), ["completion", shell])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bash") / "sdsage"
    path.write_text(script("bash"))
    return path


def offered(bash: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    program = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _sdsage; printf "%s\\n" "${COMPREPLY[@]}"'
    command = ["bash", "-c", f"compopt() {{ :; }}; {program}", bash, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sdsage", ""], [*VERBS, "models", "bench", "config", "completion", "--help", "--version"]),
        (["sdsage", "vid"], ["vid-gen"]),
        (["sdsage", "vid-gen", "--schedu"], ["--scheduler"]),
        (["sdsage", "vid-gen", "--scheduler", ""], list(by_key()["scheduler"].choices)),
        (["sdsage", "img-gen", "--preset", "tiny-f"], ["tiny-flux"]),
        (["sdsage", "img-gen", "--no-vae-ti"], ["--no-vae-tiling"]),
        (["sdsage", "img-gen", "--vae", ""], []),
        (["sdsage", "img-gen", "--steps", ""], []),
        (["sdsage", "devices", "--j"], ["--json"]),
        (["sdsage", "completion", ""], list(SHELLS)),
    ],
)
def test_bash(bash: Path, words: list[str], expected: list[str]) -> None:
    assert offered(bash, *words) == expected


def test_bash_offers_every_option(bash: Path) -> None:
    for verb in ("vid-gen", "img-gen"):
        assert {o.name for o in by_key().values() if verb in o.verbs} <= set(offered(bash, "sdsage", verb, "--"))


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_are_read_by_their_shell(shell: str, tmp_path: Path) -> None:
    text = script(shell)
    assert all(o.name.removeprefix("--") in text for o in by_key().values() if o.name.startswith("-"))
    assert "-l LATENTS" not in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(text)
    done = subprocess.run([shell, "-n", tmp_path / "script"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_offers_values(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    (tmp_path / "script").write_text(script("fish"))
    for line, expected in {
        "sdsage vid": "vid-gen",
        "sdsage vid-gen --schedu": "--scheduler",
        "sdsage vid-gen --scheduler kar": "karras",
        "sdsage completion f": "fish",
    }.items():
        command = f"source {tmp_path}/script; complete -C '{line}'"
        done = subprocess.run(["fish", "--no-config", "-c", command], capture_output=True, text=True)
        assert expected in [row.split("\t")[0] for row in done.stdout.splitlines()], done.stderr


def test_an_unknown_shell() -> None:
    result = CliRunner().invoke(build_app(only="completion"), ["completion", "tcsh"])
    assert result.exit_code == 2
    assert "there is no completion for tcsh: it takes one of bash, zsh, fish" in result.stderr
