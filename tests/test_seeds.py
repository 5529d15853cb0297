"""Every picture and video has a seed of its own, in its name, its file and the summary, and is made again by it."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from tiny_cli import PICTURE, VIDEO, data_of, frames_of, run

from sdsage.cli.option import IMG, VID
from sdsage.cli.seeds import Part, choose, parts
from sdsage.cli.settings import merge
from sdsage.errors import BadRequest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("sampler", [[], ["--sampling-method", "euler_a", "--rng", "std_default"]])
def test_a_picture_of_a_batch_is_made_again_by_its_seed(sampler: list[str]) -> None:
    found = json.loads(run(*PICTURE, *sampler, "--steps", "2", "-s", "-1", "-b", "4", "-o", "cat.png", "--json").stdout)
    seeds = found["seeds"]
    assert seeds == list(range(seeds[0], seeds[0] + 4))
    assert found["results"] == [{"seed": seed, "files": [f"cat_{i}.png"]} for i, seed in enumerate(seeds)]
    pictures = [frames_of(f"cat_{i}.png") for i in range(4)]
    assert not any(np.array_equal(pictures[0], other) for other in pictures[1:])
    for i, seed in enumerate(seeds):
        assert (data_of(f"cat_{i}.png")["seed"], data_of(f"cat_{i}.png")["options"]["seed"]) == (seed, seed)
    run(*PICTURE, *sampler, "--steps", "2", "-s", str(seeds[2]), "-o", "alone.png")
    assert np.array_equal(frames_of("alone.png"), pictures[2])


def test_chosen_seeds_of_pictures() -> None:
    result = run(*PICTURE, "--seeds", "1,9,5", "-o", "{seed}.png", "--json")
    found = json.loads(result.stdout)
    assert found["results"] == [{"seed": seed, "files": [f"{seed}.png"]} for seed in (1, 9, 5)]
    assert found["frames"] == 3
    for seed in (1, 9, 5):
        assert data_of(f"{seed}.png")["seed"] == seed
        run(*PICTURE, "-s", str(seed), "-o", f"alone_{seed}.png")
        assert np.array_equal(frames_of(f"alone_{seed}.png"), frames_of(f"{seed}.png"))


@pytest.mark.parametrize("asked", [["--seeds", "8,3"], ["-s", "7", "-b", "2"]])
def test_several_videos_with_one_load(asked: list[str], folder: Path) -> None:
    shown = run(*[word for word in VIDEO if word != "-q"], *asked, "-o", "{seed}_{index}.webp", "--json")
    seeds = [8, 3] if "--seeds" in asked else [7, 8]
    names = [f"{seed}_{i}.webp" for i, seed in enumerate(seeds)]
    events = [json.loads(line) for line in shown.stdout.splitlines()]
    found = events[-1]
    assert found["results"] == [{"seed": seed, "files": [name]} for seed, name in zip(seeds, names, strict=True)]
    assert (found["frames"], found["steps"]) == (5, 4)
    assert [e["stage"] for e in events if e["event"] == "stage"].count("load") == 1
    assert f"{names[0]} is written, 1 of 2" in [e["text"] for e in events if e["event"] == "note"]
    assert sorted(os.listdir(folder)) == sorted(names)
    for seed, name in zip(seeds, names, strict=True):
        assert data_of(name)["seed"] == seed
        run(*VIDEO, "-s", str(seed), "-o", f"alone_{seed}.webp")
        assert np.array_equal(frames_of(f"alone_{seed}.webp"), frames_of(name))


def test_frames_of_several_videos() -> None:
    found = json.loads(run(*VIDEO, "--seeds", "8,3", "-o", "{seed}_%d.png", "--json").stdout)
    assert found["results"] == [{"seed": s, "files": [f"{s}_{i}.png" for i in range(5)]} for s in (8, 3)]
    assert {data_of(f"3_{i}.png")["seed"] for i in range(5)} == {3}


def test_what_is_finished_stays_when_a_later_one_fails(folder: Path) -> None:
    """The second video can't be written: a folder of its name appears only after the check."""
    args = [word for word in VIDEO if word != "-q"]
    Path("3.webp").symlink_to(folder / "none" / "3.webp")  # not there, so free; its folder can be made
    (folder / "none").symlink_to(folder / "1.webp" / "x")  # which goes through the first result, a plain file
    result = run(*args, "--seeds", "1,3", "-o", "{seed}.webp", code=1)
    assert "1.webp is written" in result.stderr
    assert len(frames_of("1.webp")) == 5


@pytest.mark.parametrize("verb", [IMG, VID])
def test_rules(verb: str) -> None:
    assert choose(merge(verb, {"seed": "7", "batch_count": "3"})) == (7, 8, 9)
    assert choose(merge(verb, {"seeds": "5,1"})) == (5, 1)
    drawn = choose(merge(verb, {"seed": "-1", "batch_count": "2"}))
    assert drawn[1] == drawn[0] + 1
    assert 0 <= drawn[0] < 2**31
    one_job = [Part(0, 3)] if verb == IMG else [Part(0, 1), Part(1, 1), Part(2, 1)]
    assert parts(merge(verb, {"batch_count": "3"}), (7, 8, 9)) == one_job
    assert parts(merge(verb, {"seeds": "7,8"}), (7, 8)) == [Part(0, 1), Part(1, 1)]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"seeds": "1,x"}, "--seeds 1,x can't be used: it takes whole numbers"),
        ({"seeds": "1,-1"}, "--seeds 1,-1 can't be used"),
        ({"seeds": "5,1,5"}, "--seeds has 5 more than once"),
        ({"seed": str(2**63 - 2), "batch_count": "2"}, "is too large: seed + "),
    ],
)
@pytest.mark.parametrize("verb", [IMG, VID])
def test_refusals(verb: str, asked: dict[str, str], said: str) -> None:
    settings = merge(verb, asked)
    choose(settings)
    with pytest.raises(BadRequest, match=re.escape(said)):
        settings.problems.stop_if_any()
