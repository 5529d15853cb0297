"""sdsage config show: a config file that gives the same settings, and where each came from."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_cli import PICTURE, VIDEO, run

from sdsage.cli.config import toml, toml_lines
from sdsage.cli.option import IMG, VID
from sdsage.cli.settings import merge


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('preset = "tiny-random"\nsteps = 7\nfps = 9\nvae_tiling = true\n')
    return tmp_path


def sources(*args: str) -> dict[str, Any]:
    found = json.loads(run("config", "show", *args, "--json").stdout.splitlines()[-1])  # models may be written first
    return {key: (entry["value"], entry["from"]) for key, entry in found["options"].items()}


def test_sources() -> None:
    found = sources("vid-gen", "--config", "run.toml", "--fps", "10", "--no-vae-tiling")
    assert found["steps"] == (7, "--config run.toml")
    assert found["fps"] == (10, "option")
    assert found["vae_tiling"] == (False, "option")
    assert found["preset"] == ("tiny-random", "--config run.toml")
    assert found["sampling_method"] == ("euler", "--preset tiny-random")
    assert found["diffusion_model"][0].endswith("wan-t2v-low.gguf")
    assert found["diffusion_model"][1] == "--preset tiny-random"
    assert found["seed"] == (42, "default")


def test_what_a_file_brings_in() -> None:
    run(*PICTURE, "-s", "5", "-o", "a.png")
    found = sources("img-gen", "--from", "a.png", "--steps", "3")
    assert found["seed"] == (5, "--from a.png")
    assert found["diffusion_model"][0].endswith("flux.gguf")
    assert found["diffusion_model"][1] == "--from a.png"
    assert found["steps"] == (3, "option")


def test_what_is_shown_is_a_config_file() -> None:
    words = [word for word in VIDEO[1:] if word != "-q"]
    more = [
        "-p",
        'a "cat"\n\\ 猫',
        "--skip-layers",
        "[1,2]",
        "--vae-tile-size",
        "8x16",
        "--vae-tiling",
        "--sigmas",
        "1,0",
    ]
    shown = run("config", "show", "vid-gen", *words, *more, "--config", "run.toml").stdout
    Path("shown.toml").write_text(shown)
    assert "# strength = 0.75  # default" in shown.splitlines()
    again = run("vid-gen", "--config", "shown.toml", "--print-params")
    assert json.loads(again.stdout) == json.loads(
        run("vid-gen", *words, *more, "--config", "run.toml", "--print-params").stdout
    )


def test_what_is_wrong() -> None:
    assert "--steps 0 can't be used" in run("config", "show", "vid-gen", "--steps", "0", code=2).stderr
    run("config", "show", "convert", code=2)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30))
def test_any_text_is_toml(text: str) -> None:
    assert tomllib.loads(f"x = {toml(text)}")["x"] == text


@given(
    cfg=st.floats(0, 1e30),
    seed=st.integers(-(2**63), 2**63 - 2),
    layers=st.lists(st.integers(0, 40), max_size=4),
    prompt=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
)
def test_values_come_back(cfg: float, seed: int, layers: list[int], prompt: str) -> None:
    given = {"cfg_scale": repr(cfg), "seed": str(seed), "skip_layers": str(layers), "slg_scale": "1", "prompt": prompt}
    for verb in (IMG, VID):
        settings = merge(verb, given)
        table = tomllib.loads("\n".join(toml_lines(settings)))
        assert (table["cfg_scale"], table["seed"], table["skip_layers"]) == (cfg, seed, layers)
        assert table["prompt"] == prompt
        assert set(table) == set(given)
