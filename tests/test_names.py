"""Names of results: what fields become, whatever the prompt is, and what is refused before any work."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_cli import PICTURE, VIDEO, run

from sdsage.cli.places import plan
from sdsage.cli.settings import merge
from sdsage.errors import BadRequest, OutputError
from sdsage.media import naming, output, plan_output

RESERVED = ["CON", "prn", "Aux", "nul", "COM1", "lpt9", "com²", "CONIN$", "con.tar", "nul .x"]
WORDS = st.sampled_from(
    [*RESERVED, "..", "/", "\\", ".", "-rf", "~root", "%d", "%%", "{seed}", "{{", "\0", "\n", "cat", " "]
)
ANY_TEXT = st.one_of(st.text(max_size=300), st.lists(st.one_of(WORDS, st.text(max_size=3)), max_size=80).map("".join))


def reserved(component: str) -> bool:
    stem = component.split(".")[0].rstrip(" ").upper()
    return stem in {"CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"} or bool(re.fullmatch("(COM|LPT)[0-9¹²³]", stem))


@given(prompt=ANY_TEXT, template=st.sampled_from(["{prompt}.png", "a {prompt} {prompt}.png", "%%{prompt}%d.png"]))
def test_any_prompt_is_a_safe_component(prompt: str, template: str) -> None:
    name = naming.fill(template, 7 if naming.is_pattern(template) else None, {"prompt": prompt})
    assert len(name.encode("utf-8")) <= 255
    assert not re.search(r'[\x00-\x1f\x7f-\x9f<>:"/\\|?*]', name)
    assert not name.startswith((".", "-", "~"))
    assert not reserved(name)
    assert name.endswith(".png")
    assert naming.is_pattern(template) or "%" not in name


@given(prompt=ANY_TEXT, folders=st.integers(0, 3))
def test_a_prompt_stays_in_its_folder(prompt: str, folders: int) -> None:
    template = "out/" + "{prompt}/" * folders + "{seed}_{prompt}.png"
    name = naming.fill(template, None, {"prompt": prompt, "seed": "5"})
    assert os.path.normpath(name) == name
    assert name.startswith("out/")
    assert name.count("/") == template.count("/")


@given(prompt=ANY_TEXT)
def test_any_prompt_makes_a_file(tmp_path_factory: pytest.TempPathFactory, prompt: str) -> None:
    folder = tmp_path_factory.mktemp("names")
    place = plan_output(
        folder / "{prompt}" / "{prompt}_{index}.png", video=False, count=2, fields=[{"prompt": prompt}] * 2
    )
    for path in place.paths(2):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert len(list(folder.rglob("*.png"))) == 2


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a lovely cat", "a_lovely_cat"),
        ("a/b\\c: <d>?", "a_b_c_d"),
        ("../../etc/passwd", "etc_passwd"),
        ("...hidden", "hidden"),
        ("con", "_con"),
        ("Nul.txt", "_Nul.txt"),
        ("console", "console"),
        ("", "untitled"),
        ("/ . /", "untitled"),
        ("line\nbreak\ttab\0zero", "line_break_tab_zero"),
        ("100% {seed} %d", "100_{seed}_d"),
        ("猫 🐱 é", "猫_🐱_é"),
        ("e\u0301", "é"),
        ("left\u202eright", "leftright"),
        ("\ud800x", "x"),
    ],
)
def test_prompts(prompt: str, expected: str) -> None:
    assert naming.fill("{prompt}.png", None, {"prompt": prompt}) == f"{expected}.png"


def test_a_long_prompt_is_cut_between_characters() -> None:
    name = naming.fill("{prompt}.png", None, {"prompt": "猫" * 100})
    assert name == "猫" * (naming.PROMPT_BYTES // 3) + ".png"
    crowded = naming.fill("n" * 230 + "{prompt}.png", None, {"prompt": "x" * 100})
    assert len(crowded) <= 255


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{seed}.png", "5.png"),
        ("{index}/{seed}.png", "2/5.png"),
        ("{date}_{{seed}}.png", "2025-01-31_{seed}.png"),
        ("a{}b{1}{a b}.png", "a{}b{1}{a b}.png"),
        ("50%_{seed}.png", "50%_5.png"),
        ("com{index}.png", "_com2.png"),
        ("con.png", "con.png"),  # whoever writes it wants it
    ],
)
def test_fields(template: str, expected: str) -> None:
    assert naming.fill(template, None, {"seed": "5", "index": "2", "date": "2025-01-31"}) == expected


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(OutputError, match=r"\{Seed\} is not known: use \{seed\}, .* or write \{\{Seed\}\}"):
        naming.fields_of("{index}_{Seed}.png")


def names(verb: str, name: str, seeds: tuple[int, ...], **more: Any) -> list[str]:
    """What a run would write; raises what it would say."""
    settings = merge(verb, {"output": name, "seeds": ",".join(map(str, seeds)), **more})
    places = plan(settings, "a cat", seeds)
    settings.problems.stop_if_any()
    frames = 5 if verb == "vid-gen" else 1
    return [str(path) for place in places for path in place.paths(frames)]


@pytest.mark.parametrize(
    ("verb", "name", "expected"),
    [
        ("img-gen", "cat.png", ["cat_0.png", "cat_1.png"]),
        ("img-gen", "cat_%02d.png", ["cat_00.png", "cat_01.png"]),
        ("img-gen", "{prompt}-{seed}.webp", ["a_cat-9.webp", "a_cat-4.webp"]),
        ("img-gen", "{index}-%d.png", ["0-0.png", "1-1.png"]),
        ("img-gen", "{prompt}.png", ["a_cat_0.png", "a_cat_1.png"]),
        ("vid-gen", "cat.gif", ["cat_0.gif", "cat_1.gif"]),
        ("vid-gen", "{seed}.gif", ["9.gif", "4.gif"]),
        ("vid-gen", "{seed}/%d.png", [f"{seed}/{i}.png" for seed in (9, 4) for i in range(5)]),
    ],
)
def test_names_of_several_results(
    verb: str, name: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert names(verb, name, (9, 4), video_frames="5") == expected
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("verb", "name", "said"),
    [
        ("vid-gen", "f_%02d.png", "gives 2 videos the same names: put {index} or {seed} into it"),
        ("vid-gen", "{date}_%02d.png", "gives 2 videos the same names"),
        ("img-gen", "{cat}.png", "{cat} is not known"),
        ("img-gen", "there_{seed}.png", "there_4.png' exists already"),
        ("vid-gen", "{seed}", "the extension is missing"),
        ("vid-gen", "there_{seed}.png/{index}.gif", "is a file"),
    ],
)
def test_collisions_are_judged_before_the_work(
    verb: str, name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there_4.png").write_bytes(b"kept")
    with pytest.raises(BadRequest, match=re.escape(said)):
        names(verb, name, (9, 4), video_frames="5")
    assert os.listdir(tmp_path) == ["there_4.png"]


def test_a_file_that_appears_at_the_last_moment_stays(tmp_path: Path) -> None:
    part, target = tmp_path / ".part", tmp_path / "a.png"
    for there in (False, True):
        part.write_bytes(b"ours")
        if there:
            target.write_bytes(b"theirs")
            with pytest.raises(OutputError, match="exists already"):
                output._put(part, target, overwrite=False)
            assert target.read_bytes() == b"theirs"
            output._put(part, target, overwrite=True)
        else:
            output._put(part, target, overwrite=False)
        assert target.read_bytes() == b"ours"
        assert not part.exists()


def test_index_begins_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert names("img-gen", "{index}_%d.png", (9, 4), output_begin_idx="7") == ["7_7.png", "8_8.png"]
    assert names("vid-gen", "a.gif", (9, 4), output_begin_idx="7") == ["a_7.gif", "a_8.gif"]


def test_names_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prompt = "../secret/%d {index} <lora:x:1> 猫"
    run(*PICTURE, "-p", prompt, "--lora-model-dir", "", "-s", "3", "-o", "{seed}/{prompt}.png")
    assert run(*VIDEO, "-s", "3", "-o", "{seed}/{index}_%03d.png").stdout.split()[0] == "3/0_000.png"
    assert sorted(os.listdir(tmp_path)) == ["3"]
    assert sorted(os.listdir("3"))[-1] == "secret_d_{index}_lora_x_1_猫.png"
    said = run(*PICTURE, "-p", prompt, "--lora-model-dir", "", "-s", "3", "-o", "{seed}/{prompt}.png", code=2).stderr
    assert "exists already" in said
