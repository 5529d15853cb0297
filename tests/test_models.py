"""`sdsage models`: the table of presets, and fetching its files from a hub on loopback. Nothing here uses the net."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import hear_interrupts
from filelock import FileLock
from hub_server import Hub
from test_bad_models import attention_lora

import sdsage
from sdsage import hub, presets
from sdsage.cli.option import Kind
from sdsage.cli.options import by_key, of_verb
from sdsage.cli.values import parse
from sdsage.errors import BadRequest, MissingExtra, ModelError
from sdsage.media import read_metadata

FOLDER = Path(presets.__file__).parent
OF_HUB = [name for name in presets.names() if not name.startswith("tiny")]
SD15 = ("stable-diffusion-v1-5/stable-diffusion-v1-5", "v1-5-pruned-emaonly.safetensors")
CONTENT = os.urandom(25_000_000)  # huggingface_hub writes 10 MB at once


# ---- the table


@pytest.mark.parametrize("name", OF_HUB)
def test_preset_file(name: str) -> None:
    table = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    assert set(table) - {"loras"} == {"description", "mode", "files", "settings"}
    options = {o.key: o for o in of_verb(table["mode"])}
    for option, entry in table["files"].items():
        assert options[option].kind is Kind.FILE
        assert set(entry) - {"size"} == {"repo", "file"}
    for option, value in table["settings"].items():
        assert options[option].kind is not Kind.FILE
        assert parse(options[option], value) == (tuple(value) if isinstance(value, list) else value)
    for entry in [*table["files"].values(), *table.get("loras", [])]:
        assert entry["repo"].count("/") == 1
        assert "://" not in entry["repo"] + entry["file"]
        assert entry["file"].endswith((".gguf", ".safetensors"))
        assert entry.get("size", 10**8) >= 10**8
    assert not table["settings"].keys() & {"fps", "seed", "output", "prompt"}


def test_what_the_table_covers() -> None:
    assert set(OF_HUB) == {
        "chroma", "flux-schnell", "qwen-image", "sd1.5", "sdxl", "wan2.1-t2v-1.3b", "wan2.2-i2v-14b",
        "wan2.2-i2v-14b-4step", "wan2.2-t2v-14b", "wan2.2-t2v-14b-4step", "wan2.2-ti2v-5b", "z-image-turbo",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["t2v", "i2v"])
def test_four_steps_have_a_lora_for_each_expert(kind: str) -> None:
    name = f"wan2.2-{kind}-14b-4step"
    low, high = presets.loras(name)
    assert (low.high_noise, high.high_noise) == (False, True)
    assert "_low_noise" in low.tag
    assert high.tag.startswith("<lora:|high_noise|")
    assert "_high_noise" in high.word
    values = presets.settings(name)
    assert values["steps"] + values["high_noise_steps"] == 4
    assert values["cfg_scale"] == values["high_noise_cfg_scale"] == 1


def test_files_on_the_command_line_exist_as_options() -> None:
    assert all(option in by_key() for name in OF_HUB for option in presets.files(name))


# ---- pull


@pytest.fixture
def server() -> Any:
    with Hub({SD15: CONTENT}) as server:
        yield server


class Shell:
    """Runs sdsage in a folder with a hub's cache of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.cache = folder, folder / "hf"
        drop = ("HF_", "HUGGING", "SDSAGE_CACHE_DIR")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
        self.environment |= {"HF_ENDPOINT": url, "HF_HOME": str(self.cache), "HF_HUB_DISABLE_XET": "1"}
        path = [str(Path(sdsage.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        self.environment |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), "no_proxy": "*"}
        self.environment |= {"SDSAGE_CACHE_DIR": str(folder / "cache")}

    def start(self, *args: str, **more: str) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-P", "-m", "sdsage", *args]
        environment = self.environment | more
        return subprocess.Popen(command, cwd=self.folder, env=environment, preexec_fn=hear_interrupts, **pipes)

    def run(self, *args: str, code: int = 0, **more: str) -> tuple[str, str]:
        process = self.start(*args, **more)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, out + err
        return out, err

    def parts(self) -> list[Path]:
        return sorted(self.cache.rglob("*.part"))


@pytest.fixture
def shell(tmp_path: Path, server: Hub) -> Shell:
    return Shell(tmp_path, server.url)


def test_pull_show_path_and_list(shell: Shell, server: Hub) -> None:
    _, err = shell.run("models", "path", "sd1.5", code=2)
    assert "run 'sdsage models pull sd1.5'" in err
    out, err = shell.run("models", "pull", "sd1.5")
    path = Path(out.strip())
    assert path.name == SD15[1]
    assert path.is_relative_to(shell.cache)
    assert path.read_bytes() == CONTENT
    assert "fetching v1-5-pruned-emaonly.safetensors" in err
    assert shell.parts() == []
    assert shell.run("models", "path", "sd1.5")[0] == out
    assert json.loads(shell.run("models", "path", "sd1.5", "--json")[0])["paths"] == {"model": str(path)}
    shown = json.loads(shell.run("models", "show", "sd1.5", "--json")[0])
    assert (shown["state"], shown["files"][0]["path"]) == ("here", str(path))
    assert str(path) in shell.run("models", "show", "sd1.5")[0]
    listed = {m["name"]: m["state"] for m in json.loads(shell.run("models", "list", "--json")[0])["models"]}
    assert (listed["sd1.5"], listed["sdxl"], listed["tiny"]) == ("here", "not here", "made on first use")

    assert shell.run("models", "pull", "sd1.5", "-q") == (out, "")
    assert server.fetched(SD15[1]) == [""]


def test_the_hash_is_remembered(shell: Shell) -> None:
    """It need not be computed again for the metadata of a result."""
    out, _ = shell.run("models", "pull", "sd1.5")
    remembered = json.loads((shell.folder / "cache" / "hashes.json").read_text())
    assert os.path.realpath(out.strip()) in remembered


def wait_for_part(shell: Shell) -> int:
    """How many bytes of the file are here after a while."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (parts := shell.parts()) and parts[0].stat().st_size:
            return parts[0].stat().st_size
        time.sleep(0.05)
    raise AssertionError("nothing has come")


def test_a_connection_that_breaks_is_taken_up_again(shell: Shell, server: Hub) -> None:
    server.cut[SD15] = 12_000_000
    out, _ = shell.run("models", "pull", "sd1.5")
    assert len(server.fetched(SD15[1])) > 1
    assert Path(out.strip()).read_bytes() == CONTENT


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_pull_that_was_ended_goes_on(shell: Shell, server: Hub, end: signal.Signals, ranges: bool) -> None:
    """Where the server knows no ranges, the file is fetched from its beginning, and is right too."""
    server.stall[SD15] = 12_000_000
    process = shell.start("models", "pull", "sd1.5")
    wait_for_part(shell)
    process.send_signal(end)
    _, err = process.communicate(timeout=60)
    if end is signal.SIGINT:
        assert process.returncode == 130, err
        assert "of v1-5-pruned-emaonly.safetensors are kept: the next pull goes on from there" in err
    (part,) = shell.parts()
    have = part.stat().st_size
    assert 0 < have < len(CONTENT)
    assert part.read_bytes() == CONTENT[:have]
    assert "not yet on this machine" in shell.run("models", "path", "sd1.5", code=2)[1]

    server.stall.clear()
    server.ranges = ranges
    out, err = shell.run("models", "pull", "sd1.5")
    assert "of it are here" in err
    assert server.fetched(SD15[1])[1] == f"bytes={have}-"
    assert Path(out.strip()).read_bytes() == CONTENT
    assert shell.parts() == []


@pytest.mark.parametrize("damage", ["other bytes", "longer part"])
def test_damage_never_becomes_a_model(shell: Shell, server: Hub, damage: str) -> None:
    if damage == "other bytes":
        server.sent[SD15] = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
        _, err = shell.run("models", "pull", "sd1.5", code=1)
        assert "came damaged" in err
        assert shell.parts() == []
        assert not [p for p in shell.cache.rglob("*") if p.is_file() and p.stat().st_size == len(CONTENT)]
        server.sent.clear()
    else:
        digest = hashlib.sha256(CONTENT).hexdigest()
        blobs = shell.cache / "hub" / f"models--{SD15[0].replace('/', '--')}" / "blobs"
        blobs.mkdir(parents=True)
        (blobs / f"{digest}.sdsage.part").write_bytes(CONTENT + b"more")
    assert Path(shell.run("models", "pull", "sd1.5")[0].strip()).read_bytes() == CONTENT


def test_a_file_that_was_damaged_here_is_fetched_again(shell: Shell, server: Hub) -> None:
    path = Path(shell.run("models", "pull", "sd1.5")[0].strip())
    blob = Path(os.path.realpath(path))
    blob.write_bytes(CONTENT[:-5] + b"wrong")
    out, err = shell.run("models", "pull", "sd1.5")
    assert "is damaged and is fetched again" in err
    assert Path(out.strip()).read_bytes() == CONTENT


def test_a_file_that_another_program_fetched_is_used(shell: Shell, server: Hub) -> None:
    code = f"import huggingface_hub; print(huggingface_hub.hf_hub_download({SD15[0]!r}, {SD15[1]!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=shell.environment, capture_output=True, text=True, check=True
    )
    assert shell.run("models", "path", "sd1.5")[0] == done.stdout
    assert shell.run("models", "pull", "sd1.5")[0] == done.stdout
    assert len(server.fetched(SD15[1])) == 1


def test_two_pulls_at_once(shell: Shell, server: Hub) -> None:
    server.stall[SD15] = 12_000_000
    first = shell.start("models", "pull", "sd1.5")
    wait_for_part(shell)
    _, err = shell.run("models", "pull", "sd1.5", code=1)
    assert "is being fetched by another program" in err
    first.kill()
    first.communicate(timeout=60)


def test_a_file_that_another_program_fetches_is_left_to_it(shell: Shell, server: Hub) -> None:
    """huggingface_hub locks a file of this name while it downloads."""
    lock = shell.cache / "hub" / ".locks" / f"models--{SD15[0].replace('/', '--')}"
    lock.mkdir(parents=True)
    with FileLock(lock / f"{hashlib.sha256(CONTENT).hexdigest()}.lock"):
        _, err = shell.run("models", "pull", "sd1.5", code=1)
    assert "is being fetched by another program" in err
    shell.run("models", "pull", "sd1.5")


def test_a_full_disk_is_seen_before(shell: Shell, server: Hub) -> None:
    free = shutil.disk_usage(shell.folder).free
    server.sizes[SD15] = 10**15
    _, err = shell.run("models", "pull", "sd1.5", code=2)
    assert "1000000.0 GB are to be fetched" in err
    assert "HF_HOME" in err
    assert free > 0
    assert server.fetched(SD15[1]) == []
    assert shell.parts() == []


@pytest.mark.parametrize(
    ("change", "words", "code"),
    [
        ("gone", "the hub has no such file", 2),
        ("no repository", "the hub has no such file", 2),
        ("gated", "accept them on its page, and set HF_TOKEN", 2),
    ],
)
def test_what_the_hub_refuses(shell: Shell, server: Hub, change: str, words: str, code: int) -> None:
    if change == "gated":
        server.gated.add(SD15[0])
    else:
        server.files.clear()
        if change == "gone":
            server.files[SD15[0], "README.md"] = b"x"
    assert words in shell.run("models", "pull", "sd1.5", code=code)[1]


def test_a_hub_that_is_not_there(tmp_path: Path) -> None:
    with Hub() as server:
        url = server.url
    _, err = Shell(tmp_path, url).run("models", "pull", "sd1.5", code=1)
    assert "the hub can't be reached" in err
    assert "Traceback" not in err


def test_unknown_names(shell: Shell) -> None:
    for command in ("show", "pull", "path"):
        assert "did you mean 'sd1.5'?" in shell.run("models", command, "sd1.6", code=2)[1]


def test_tiny_presets_are_made(shell: Shell) -> None:
    out, _ = shell.run("models", "pull", "tiny-flux")
    assert all(Path(line).is_file() for line in out.splitlines())


# ---- presets at work


@pytest.fixture
def tiny_hub(server: Hub, tmp_path: Path, preset_files: Any) -> Hub:
    """The 4-step preset's files, with the contents of the tiny models and a small LoRA for each expert."""
    contents = {option: Path(path).read_bytes() for option, path in preset_files("tiny-random").items()}
    for option, file in presets.files("wan2.2-t2v-14b-4step").items():
        assert not isinstance(file, str)
        server.files[file.repo, file.file] = contents[option]
    for lora in presets.loras("wan2.2-t2v-14b-4step"):
        server.files[lora.file.repo, lora.file.file] = Path(
            attention_lora(tmp_path / "lora.safetensors", 256)
        ).read_bytes()
    (tmp_path / "lora.safetensors").unlink()
    return server


SMALL = ["-W", "32", "-H", "32", "--video-frames", "5", "-t", "1", "-q", "-p", "a cat", "--no-offload-to-cpu"]


def test_a_preset_uses_its_files_where_they_are(shell: Shell, tiny_hub: Hub) -> None:
    name = "wan2.2-t2v-14b-4step"
    command = ["vid-gen", "--preset", name, *SMALL]
    _, err = shell.run(*command, "-o", "a.mp4", code=2)
    assert "and 5 more, not yet on this machine" in err
    shell.run("models", "pull", name)
    out, _ = shell.run(*command, "--json", "-o", "a.mp4")
    assert json.loads(out)["steps"] == 4
    metadata = read_metadata(shell.folder / "a.mp4")
    assert metadata is not None
    assert [(lora["name"], lora["high_noise"]) for lora in metadata.data["loras"]] == [
        ("wan2.2_t2v_lightx2v_4steps_lora_v1.1_low_noise.safetensors", False),
        ("wan2.2_t2v_lightx2v_4steps_lora_v1.1_high_noise.safetensors", True),
    ]
    # repeated from the file alone, the LoRAs included; and a tag of the user's wins over the preset's
    shell.run("vid-gen", "--from-file", "a.mp4", "-o", "b.webm", "-q")
    again = read_metadata(shell.folder / "b.webm")
    assert again is not None
    assert again.data["loras"] == metadata.data["loras"]
    low = presets.loras(name)[0].word
    weak = ["vid-gen", "--preset", name, *SMALL, "-p", f"a cat<lora:{low}:0.5>", "-o", "c.mp4"]
    shell.run(*weak)
    mixed = read_metadata(shell.folder / "c.mp4")
    assert mixed is not None
    assert sorted(lora["multiplier"] for lora in mixed.data["loras"]) == [0.5, 1.0]


def test_files_that_are_given_are_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset_files: Any
) -> None:
    monkeypatch.setattr(hub, "local", lambda file: None)
    files = preset_files("tiny-random")
    options = presets.load("wan2.2-t2v-14b", without=files).options
    assert options["width"] == 832
    assert "vae" not in options
    with pytest.raises(ModelError, match=r"wan_2.1_vae.* of Comfy-Org/Wan_2.1_ComfyUI_repackaged, not yet"):
        presets.load("wan2.2-t2v-14b", without=set(files) - {"vae"})
    assert presets.load("wan2.2-t2v-14b", missing_ok=True).options["width"] == 832


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match=r"pip install 'sdsage\[hub\]'"):
        presets.load("sd1.5")
    from sdsage.cli.models import describe

    assert describe("sd1.5")["state"] == "not known without sdsage[hub]"
    assert describe("tiny")["state"] == "made on first use"


def test_listing_stays_light() -> None:
    code = (
        "import sys; from sdsage import presets; [presets.hub_files(n) for n in presets.names()];"
        "assert not {'numpy', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_bad_names_of_presets() -> None:
    with pytest.raises(BadRequest, match=r"did you mean 'wan2\.2-t2v-14b'"):
        presets.mode("wan2.2-t2v-14")
