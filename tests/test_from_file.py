"""--from: every file of ours makes itself again, from files found by name and hash; what it says is checked."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from test_bad_models import attention_lora, lora_file
from tiny_cli import PICTURE, SMALL, VIDEO, data_of, frames_of, run

from sdsage import _digests
from sdsage.cli import finding
from sdsage.cli.finding import Finder, WantedFile
from sdsage.cli.option import IMG
from sdsage.cli.record import enlarged
from sdsage.cli.repeat import locate, read_recorded
from sdsage.cli.settings import merge
from sdsage.errors import BadRequest
from sdsage.media import Metadata, plan_output, read_metadata

FAST = ["-t", "1", "-q"]  # threads are no part of what is recorded


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def models(preset_files: Callable[[str], dict[str, str]], tmp_path: Path) -> Path:
    """Copies of the tiny Flux outside the current folder, two folders deep."""
    place = tmp_path / "models" / "flux" / "tiny"
    place.mkdir(parents=True)
    for path in preset_files("tiny-flux").values():
        shutil.copy(path, place)
    return tmp_path / "models"


def own_files(models: Path) -> list[str]:
    """Options that name the copies."""
    place = models / "flux" / "tiny"
    files = {"--diffusion-model": "flux.gguf", "--clip_l": "clip-l.safetensors", "--taesd": "taesd.safetensors"}
    return [word for option, name in files.items() for word in (option, str(place / name))]


def params(*args: str) -> Any:
    return json.loads(run(*args, "--print-params").stdout)


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.gif", "a.webp", "a_%d.png", "a_%d.jpg", "a_%d.webp"])
def test_a_video_makes_itself_again(name: str) -> None:
    first = run(*VIDEO, "-s", "-1", "-n", "no", "--flow-shift", "2.5", "-o", name).stdout.split()
    for number in {0, len(first) - 1}:
        again = run("vid-gen", "--from", first[number], *FAST, "-o", f"again{number}_{name}").stdout.split()
        assert len(again) == len(first)
        for old, new in zip(first, again, strict=True):
            assert np.array_equal(frames_of(old), frames_of(new))
            assert data_of(old) == data_of(new)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp"])
def test_a_picture_makes_itself_again(name: str) -> None:
    run(*PICTURE, "--seeds", "5,11", "--cfg-scale", "1.5", "-n", "no", "-o", f"{{seed}}_{name}")
    assert run("img-gen", "--from", f"11_{name}", *FAST, "-o", name).stdout == f"{name}\n"
    assert np.array_equal(frames_of(name), frames_of(f"11_{name}"))
    assert data_of(name) == data_of(f"11_{name}")
    assert not np.array_equal(frames_of(name), frames_of(f"5_{name}"))


def test_values_that_are_zero_or_empty_come_back() -> None:
    given = [
        "--high-noise-steps",
        "0",
        "--skip-layers",
        "[]",
        "--slg-scale",
        "1",
        "--cfg-scale",
        "0",
        "--lora-model-dir",
        "",
    ]
    prompt = ["-p", "a <lora:not:1> tag"]
    run(*VIDEO, "--steps", "2", *given, *prompt, "-o", "a.webp")
    assert params("vid-gen", "--from", "a.webp", "-t", "1") == params(*VIDEO, "--steps", "2", *given, *prompt)


def test_other_options_win() -> None:
    run(*PICTURE, "-s", "5", "-o", "a.png")
    Path("run.toml").write_text("cfg_scale = 2.5\nsteps = 3\n")
    found = params("img-gen", "--from", "a.png", "--config", "run.toml", "--steps", "2", "-p", "a dog", "-W", "64")[
        "img"
    ]
    assert (found["prompt"], found["seed"], found["width"], found["height"]) == ("a dog", 5, 64, 32)
    assert found["sample_params"]["sample_steps"] == 2
    assert found["sample_params"]["guidance"]["txt_cfg"] == 2.5
    run("img-gen", "--from", "a.png", *FAST, "-b", "2", "-o", "b.png")
    assert [data_of(f"b_{i}.png")["seed"] for i in range(2)] == [5, 6]
    assert np.array_equal(frames_of("b_0.png"), frames_of("a.png"))
    Path("run.toml").write_text('from_file = "a.png"\n')
    assert params("img-gen", "--config", "run.toml")["img"]["seed"] == 5


def test_models_are_found_below_a_folder(models: Path) -> None:
    run("img-gen", *own_files(models), *SMALL, "-o", "a.png")
    recorded = data_of("a.png")
    assert str(models) not in json.dumps(recorded)
    assert [entry["name"] for entry in recorded["files"]] == ["flux.gguf", "clip-l.safetensors", "taesd.safetensors"]
    assert all(len(entry["sha256"]) == 64 for entry in recorded["files"])
    said = run("img-gen", "--from", "a.png", "-o", "b.png", code=2).stderr
    for entry in recorded["files"]:
        assert f"{entry['name']} (sha256 {entry['sha256']}): not found" in said
    assert "Name their folder with --model-dir" in said
    assert said.count("error: ") == 4
    assert "--model-dir none does not exist" in run("img-gen", "--from", "a.png", "--model-dir", "none", code=2).stderr
    run("img-gen", "--from", "a.png", *FAST, "--model-dir", "../here", "--model-dir", str(models), "-o", "b.png")
    assert np.array_equal(frames_of("a.png"), frames_of("b.png"))
    shutil.copytree(models, "below")  # in the current folder they are found without being told
    run("img-gen", "--from", "a.png", *FAST, "-o", "c.png")
    (models / "a.png").write_bytes(Path("a.png").read_bytes())
    shutil.rmtree("below")
    run("img-gen", "--from", str(models / "a.png"), *FAST, "-o", "d.png")  # and so they are beside the file


def test_a_renamed_model_is_found_by_its_hash(models: Path) -> None:
    run("img-gen", *own_files(models), *SMALL, "-o", "a.png")
    place = models / "flux" / "tiny"
    (place / "flux.gguf").rename(place / "flux renamed.gguf")
    found = params("img-gen", "--from", "a.png", "--model-dir", str(models))["ctx"]["diffusion_model_path"]
    assert found == str(place / "flux renamed.gguf")


def test_another_file_of_the_same_name(models: Path) -> None:
    run("img-gen", *own_files(models), *SMALL, "-o", "a.png")
    model = models / "flux" / "tiny" / "flux.gguf"
    content = bytearray(model.read_bytes())
    content[-1000] ^= 1
    model.write_bytes(content)  # of the same size
    repeat = ["img-gen", "--from", "a.png", "--model-dir", str(models)]
    said = run(*repeat, "-o", "b.png", code=2).stderr
    assert f"flux.gguf (sha256 {data_of('a.png')['files'][0]['sha256']}): another file of this name is {model}" in said
    assert said.count("error: ") == 2
    assert not Path("b.png").exists()
    assert params(*repeat, "--ignore-hashes")["ctx"]["diffusion_model_path"] == str(model)
    assert params(*repeat, "--diffusion-model", str(model))["ctx"]["diffusion_model_path"] == str(model)
    (models / "more").mkdir()
    content[-1000] ^= 1
    (models / "more" / "flux.gguf").write_bytes(content)  # the right one is further away
    assert params(*repeat)["ctx"]["diffusion_model_path"] == str(models / "more" / "flux.gguf")


def test_a_hash_that_was_not_ready(models: Path, tmp_path: Path) -> None:
    run("img-gen", *own_files(models), *SMALL, "-o", "a.png")
    data = data_of("a.png")
    data["files"][0]["sha256"] = None
    changed = write(tmp_path / "b.png", data)
    shown = run("img-gen", "--from", changed, "--model-dir", str(models), "--print-params", "-q").stdout
    assert json.loads(shown)["ctx"]["diffusion_model_path"].endswith("flux.gguf")
    said = run("img-gen", "--from", changed, "--model-dir", str(models), *FAST, "-o", "c.png").stderr
    assert "was taken by name and size: its hash was not recorded" in said


def test_links_in_a_circle(models: Path) -> None:
    run("img-gen", *own_files(models), *SMALL, "-o", "a.png")
    (models / "flux" / "up").symlink_to(models)
    Path("linked").symlink_to(models)
    assert params("img-gen", "--from", "a.png")["ctx"]["diffusion_model_path"] == "linked/flux/tiny/flux.gguf"


def test_loras_and_pictures(tmp_path: Path) -> None:
    """They are found like models; the prompt that is recorded names no folder."""
    (tmp_path / "loras" / "sub").mkdir(parents=True)
    attention_lora(tmp_path / "loras" / "style.safetensors", 256)
    attention_lora(tmp_path / "loras" / "sub" / "high.safetensors", 256)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 24, 3), np.uint8)).save(tmp_path / "photo.png")
    prompt = f"a cat <lora:style:0.5> <lora:|high_noise|{tmp_path}/loras/sub/high:-1>"
    given = [
        "--preset",
        "tiny-random-i2v",
        "--lora-model-dir",
        str(tmp_path / "loras"),
        "-i",
        str(tmp_path / "photo.png"),
    ]
    run("vid-gen", *SMALL, *given, "--video-frames", "5", "--high-noise-steps", "1", "-p", prompt, "-o", "a.webp")
    data = data_of("a.webp")
    assert data["options"]["prompt"] == "a cat <lora:style:0.5> <lora:|high_noise|high:-1>"
    assert str(tmp_path).encode() not in Path("a.webp").read_bytes()
    assert {entry["name"] for entry in data["files"][3:]} == {
        "wan-i2v-high.gguf",
        "photo.png",
        "style.safetensors",
        "high.safetensors",
    }
    said = run("vid-gen", "--from", "a.webp", code=2).stderr
    for words in (
        "--init-img: photo.png (sha256 ",
        "--lora-model-dir 'style': style.safetensors (sha256 ",
        "'high': high.",
    ):
        assert words in said
    repeat = ["vid-gen", "--from", "a.webp", "--model-dir", str(tmp_path)]
    run(*repeat, *FAST, "-o", "b.webp")
    assert np.array_equal(frames_of("a.webp"), frames_of("b.webp"))
    assert data_of("a.webp") == data_of("b.webp")
    only = params(*repeat, "-p", "a dog <lora:style:2>")["vid"]["loras"]
    assert [(Path(lora["path"]).name, lora["multiplier"]) for lora in only] == [("style.safetensors", 2.0)]
    (tmp_path / "loras" / "sub" / "high.safetensors").unlink()
    assert params(*repeat, "-p", "a dog")["vid"]["loras"] == []  # one that isn't used needn't be there
    plain = params(*VIDEO)["vid"]["init_image"]
    assert params(*repeat, "-p", "a dog", "--init-img", "")["vid"]["init_image"] == plain


def test_embeddings_and_folders_of_pictures(preset_files: Any, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "frames").mkdir()
    with Path(preset_files("tiny-flux")["clip_l"]).open("rb") as file:
        table = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    (width,) = {t["shape"][1] for name, t in table.items() if name.endswith("token_embedding.weight")}
    lora_file(tmp_path / "words" / "mine.safetensors", {"emb_params": (3, width)})
    lora_file(tmp_path / "words" / "unused.safetensors", {"emb_params": (3, width)})
    rng = np.random.default_rng(1)
    for i in range(6):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(tmp_path / "frames" / f"{i}.png")
    given = ["--embd-dir", str(tmp_path / "words"), "-p", "a cat, mine"]
    run(*PICTURE, *given, "-o", str(tmp_path / "a.png"))
    repeat = ["img-gen", "--from", str(tmp_path / "a.png")]
    run(*repeat, *FAST, "-o", "b.png")
    assert np.array_equal(frames_of("b.png"), frames_of(tmp_path / "a.png"))
    assert data_of("b.png") == data_of(tmp_path / "a.png")
    assert params(*repeat)["ctx"]["embeddings"] == [
        {"name": "mine", "path": str(tmp_path / "words" / "mine.safetensors")}
    ]
    run(*VIDEO, "--control-video", str(tmp_path / "frames"), "-o", str(tmp_path / "v.gif"))
    used = [entry["name"] for entry in data_of(tmp_path / "v.gif")["files"] if entry["option"] == "control_video"]
    assert used == [f"{i}.png" for i in range(5)]
    repeat = ["vid-gen", "--from", str(tmp_path / "v.gif"), "-t", "1"]
    assert params(*repeat) == params(*VIDEO, "--control-video", str(tmp_path / "frames"))
    (tmp_path / "frames" / "00.png").write_bytes((tmp_path / "frames" / "0.png").read_bytes())
    assert "--control-video: 0.png (sha256 " in run(*repeat, code=2).stderr


def write(path: Path, data: dict[str, Any]) -> str:
    """A picture that carries `data`."""
    frames = np.zeros((1, 8, 8, 3), np.uint8)
    plan_output(path, video=False, count=1, overwrite=True).write(frames, metadata=Metadata("", data))
    return str(path)


def test_no_metadata_by_either_name() -> None:
    for name in ("--no-metadata", "--disable-image-metadata"):
        run(*PICTURE, name, "-o", "a.png", "--overwrite")
        assert "carries no settings of sdsage" in run("img-gen", "--from", "a.png", code=2).stderr


GOOD: dict[str, Any] = {"format": 1, "version": "0", "verb": IMG, "options": {"seed": 3}, "files": []}
FILE = {"option": "vae", "name": "v.gguf", "bytes": 1, "sha256": None}
BAD = [
    ({}, "carries no settings"),
    (GOOD | {"format": "1"}, "carries no settings"),
    (GOOD | {"options": []}, "carries no settings"),
    (GOOD | {"format": 99, "version": "9.9"}, "was made by sdsage 9.9, whose settings this version can't read"),
    (GOOD | {"verb": "vid-gen"}, "was made by vid-gen: run 'sdsage vid-gen --from ...'"),
    (GOOD | {"options": {"stepz": 3}}, "has 'stepz', which is not an option"),
    (GOOD | {"options": {"output": "/x.png"}}, "has 'output', which is not an option"),
    (GOOD | {"options": {"allow_pickle": True}}, "has 'allow_pickle', which is not an option"),
    (GOOD | {"options": {"lora_model_dir": "/"}}, "is damaged: --lora-model-dir names a folder"),
    (GOOD | {"options": {"vae": "v.gguf"}}, "is damaged: no file for --vae"),
    (GOOD | {"options": {"steps": 0}}, "--steps 0 (in "),
    (GOOD | {"options": {"prompt": 5}}, "--prompt 5 (in "),
    (GOOD | {"files": None}, "is damaged: it has no list of files"),
    (GOOD | {"files": [3]}, "is damaged: 3 names no file"),
    (GOOD | {"files": [FILE | {"name": "../v.gguf"}]}, "names no file"),
    (GOOD | {"files": [FILE | {"name": ".."}]}, "names no file"),
    (GOOD | {"files": [FILE | {"option": "output"}]}, "names no file"),
    (GOOD | {"files": [FILE | {"option": "steps"}]}, "names no file"),
    (GOOD | {"files": [FILE | {"option": "lora_model_dir"}]}, "names no file"),
    (
        GOOD | {"files": [FILE | {"option": "lora_model_dir", "word": "a", "name": n} for n in "xy"]},
        "stands for two files",
    ),
]


@pytest.mark.parametrize(("data", "said"), BAD)
def test_files_that_are_not_believed(data: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.png", data)
    assert said in run("img-gen", "--from", path, code=2).stderr


def test_a_file_that_was_enlarged_says_so(tmp_path: Path) -> None:
    run(*PICTURE, "-o", "a.png")
    settings = merge("upscale", {"upscale_model": "some/x4.gguf"})
    metadata = enlarged(read_metadata("a.png"), settings, (128, 128))
    assert metadata is not None
    path = write(tmp_path / "big.png", metadata.data)
    assert metadata.data["enlarged"] == {"model": "x4.gguf", "repeats": 1, "width": 128, "height": 128}
    assert "was enlarged by 'sdsage upscale' afterwards" in run("img-gen", "--from", path, *FAST, "-o", "b.png").stderr


def test_a_search_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "models" / "/".join("abcdefghijk")
    deep.mkdir(parents=True)
    (deep / "m.gguf").write_bytes(b"x")
    wanted = WantedFile("vae", "m.gguf", "", 1, None)
    finder = Finder([], [str(tmp_path / "models")], False, print)
    assert finder.find(wanted) == (None, "not found")
    assert finder.cut_short
    assert Finder([], [str(tmp_path / "models"), str(deep)], False, print).find(wanted)[0] == deep / "m.gguf"
    monkeypatch.setattr(finding, "MOST_ENTRIES", 2)
    assert Finder([], [str(tmp_path / "models"), str(deep)], False, print).find(wanted)[0] == deep / "m.gguf"
    for i in range(3):
        (deep / f"a{i}").touch()
    assert Finder([], [str(deep)], False, print).find(wanted)[0] is None


def test_files_without_settings(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save("plain.png")
    Path("text.png").write_text("no picture")
    for name, said in (
        ("plain.png", "carries no settings"),
        ("text.png", "text.png"),
        ("none.png", "none.png"),
        (".", "."),
    ):
        assert said in run("img-gen", "--from", name, code=2).stderr


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
keys = st.sampled_from([*GOOD, *FILE, "word", "preset", "engine", "upstream", "prompt", "steps", "vae", "skip_layers"])
values = st.recursive(leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(keys, v, max_size=4), max_leaves=12)


@given(more=st.dictionaries(keys, values, max_size=4), options=st.dictionaries(keys, values, max_size=3))
def test_any_data_is_settings_or_a_bad_request(
    tmp_path_factory: pytest.TempPathFactory, more: dict[str, Any], options: dict[str, Any]
) -> None:
    path = write(tmp_path_factory.mktemp("any") / "a.png", {**GOOD, "options": options, **more})
    try:
        settings = merge(IMG, {"from_file": path})
        settings.problems.stop_if_any()
        locate(settings)
    except BadRequest:
        pass


def test_a_file_of_another_version_says_so(tmp_path: Path) -> None:
    run(*PICTURE, "-o", "a.png")
    data = data_of("a.png")
    said = "was made by sdsage"
    assert said not in run("img-gen", "--from", "a.png", *FAST, "-o", "same.png").stderr
    for i, change in enumerate(({"version": "0.0"}, {"engine": {"upstream": {"version": "0"}}}, {"engine": 3})):
        path = write(tmp_path / f"{i}.png", data | change)
        assert f"warning: {i}.png {said}" in run("img-gen", "--from", path, *FAST, "-o", f"b{i}.png").stderr
    assert read_recorded(write(tmp_path / "x.png", GOOD), IMG, set()).options == {"seed": 3}


# ---- hashes


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SDSAGE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hashes.json"


def test_a_hash_is_remembered_until_the_file_changes(cache: Path) -> None:
    Path("m").write_bytes(b"abc")
    assert _digests.known("m") is None
    first = _digests.sha256("m")
    assert first == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert _digests.known("m") == first
    os.symlink("m", "link")
    assert _digests.known("link") == first
    stat = os.stat("m")
    Path("m").write_bytes(b"abd")
    os.utime("m", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # size and time of the old one
    assert _digests.known("m") is None
    assert _digests.sha256("m") not in (None, first)
    for damaged in (b"", b"{", b"[]", b'{"x": 3}', b"\xff", b'{"x": []}'):
        cache.write_bytes(damaged)
        assert _digests.known("m") is None
        assert _digests.sha256("m") not in (None, first)


def test_a_cache_that_cannot_be_written(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    Path("m").write_bytes(b"abc")
    assert _digests.sha256("m") == _digests.sha256("m") is not None


def test_work_does_not_wait_for_hashes(cache: Path) -> None:
    """A pipe that nobody writes to stands for a disk that takes for ever."""
    Path("small").write_bytes(b"abc")
    os.mkfifo("slow")
    digests = _digests.Digests(["small", "slow", "none"])
    digests.start()
    digests.finish(longest=0.5)
    assert list(digests.ready) in (["small"], [])
    writer = os.open("slow", os.O_WRONLY)  # ends the thread
    os.close(writer)
