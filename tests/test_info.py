"""`sdsage info`: model files, LoRAs beside models, pictures and videos."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from test_bad_models import lora_file
from test_headers import entry, hand_made, parts, text
from typer.testing import CliRunner

from sdsage.cli.app import build_app
from sdsage.media import Metadata, plan_output


def info(*args: object, code: int = 0) -> Any:
    result = CliRunner().invoke(build_app("info"), ["info", *map(str, args)])
    assert result.exit_code == code, result.output
    return result


def as_json(*args: object, code: int = 0) -> list[dict[str, Any]]:
    found = json.loads(info("--json", *args, code=code).stdout)
    assert (found["event"], found["exit_code"], bool(found["problems"])) == ("result", code, code != 0)
    files: list[dict[str, Any]] = found["files"]
    return files


def test_a_model(preset_files: Any) -> None:
    file = preset_files("tiny-random")["diffusion_model"]
    lines = [line.split(maxsplit=1) for line in info(file).stdout.splitlines()]
    assert lines[0] == [file]
    shown = info(file).stdout
    assert "  diffusion model Wan 2.1 or 2.2 text-to-video, 256 wide\n" in shown
    assert "input channels 16" in shown
    assert "gguf, 2.3 MiB, 69 tensors" in shown
    assert "numbers         q8_0 96.1 %, f32 2.5 %, f16 1.4 %" in shown
    (entry,) = as_json(file)
    assert entry["bytes"] == Path(file).stat().st_size
    assert entry["architecture"] == "wan"
    assert entry["parts"][0]["kind"] == "wan-t2v"
    assert entry["parts"][0]["text_width"] == 64
    assert sum(entry["bytes_by_type"].values()) <= entry["bytes"]
    assert "tensors_by_name" not in entry


def test_tensors(preset_files: Any) -> None:
    file = preset_files("tiny-random")["vae"]
    (entry,) = as_json(file, "--tensors")
    assert entry["tensors_by_name"]["conv2.weight"] == {"shape": [16, 16, 1, 1, 1], "type": "f16", "bytes": 512}
    assert "  tensor          conv2.weight  16x16x1x1x1  f16\n" in info(file, "--tensors").stdout


def test_a_lora_beside_its_model(preset_files: Any, tmp_path: Path) -> None:
    name = "diffusion_model.blocks.{}.self_attn.q"
    shapes = {"lora_down.weight": (4, 256), "lora_up.weight": (256, 4)}
    tensors = {f"{name.format(i)}.{end}": shape for i in (0, 1, 77) for end, shape in shapes.items()}
    lora = lora_file(tmp_path / "style.safetensors", tensors)
    alone = info(lora).stdout
    assert "LoRA            LoRA for Wan\n" in alone
    assert "changed weights 3, rank 4" in alone
    assert "fits" not in alone
    model = preset_files("tiny-random")["diffusion_model"]
    assert f"{model}: 2 weights; 1 match nothing: {name.format(77)}\n" in info(lora, model).stdout
    (entry, _) = as_json(lora, model)
    assert entry["fits"] == {model: {"fitting": 2, "unknown": [name.format(77)], "unfit": []}}
    flux = preset_files("tiny-flux")["diffusion_model"]
    assert f"{flux}: 0 weights; 3 match nothing" in info(lora, flux).stdout


def test_a_model_in_parts(tmp_path: Path) -> None:
    index = parts(tmp_path)
    (entry,) = as_json(index)
    assert entry["files"] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert "safetensors in 2 files" in info(index).stdout


def test_pictures_and_videos(tmp_path: Path) -> None:
    frames = np.zeros((5, 32, 32, 3), np.uint8)
    metadata = Metadata("a cat\nSteps: 4, Seed: 7", {"seed": 7, "options": {"prompt": "a 猫"}})
    for name, count in (("a.png", 1), ("b.jpg", 1), ("c.webp", 5), ("d.gif", 5)):
        output = plan_output(str(tmp_path / name), video=count > 1, count=count, overwrite=False, begin_index=-1)
        output.write(frames[:count], fps=16, metadata=metadata if count > 1 else [metadata])
        (entry,) = as_json(tmp_path / name)
        assert entry["parameters"] == metadata.parameters
        assert entry["settings"] == metadata.data
        shown = info(tmp_path / name).stdout
        assert "  parameters      a cat\n                  Steps: 4, Seed: 7\n" in shown
        assert "a 猫" in shown


def test_a_picture_without_settings(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (4, 4)).save(tmp_path / "plain.png")
    assert "none: the file carries no settings" in info(tmp_path / "plain.png").stdout
    assert as_json(tmp_path / "plain.png")[0]["parameters"] is None


def test_a_video(tmp_path: Path) -> None:
    pytest.importorskip("av")
    metadata = Metadata("a cat", {"seed": 7})
    output = plan_output(str(tmp_path / "a.mp4"), video=True, count=5, overwrite=False, begin_index=-1)
    output.write(np.zeros((5, 32, 32, 3), np.uint8), fps=16, metadata=metadata)
    assert as_json(tmp_path / "a.mp4")[0]["settings"] == {"seed": 7}


def test_wrong_files_leave_the_others_shown(preset_files: Any, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hello")
    (tmp_path / "old.ckpt").write_bytes(b"PK\x03\x04" + bytes(40))
    good = preset_files("tiny-random")["vae"]
    args = (tmp_path / "none.gguf", good, tmp_path / "note.txt", tmp_path / "old.ckpt", tmp_path)
    result = info(*args, code=2)
    assert "Wan 2.1 VAE, 16 channels" in result.stdout
    errors = result.stderr.splitlines()
    assert len(errors) == 4
    assert "none.gguf does not exist: check the path" in errors[0]
    assert "old.ckpt is a checkpoint of Python pickles" in errors[2]
    assert len(as_json(*args, code=2)) == 1
    assert "no file was given: name model files, pictures or videos" in info(code=2).stderr


def test_texts_out_of_files_do_nothing_to_a_terminal(tmp_path: Path) -> None:
    def word(key: bytes, value: bytes) -> bytes:
        return text(key) + struct.pack("<I", 8) + text(value)

    nan = text(b"score") + struct.pack("<If", 6, float("nan"))
    file = tmp_path / "evil.gguf"
    file.write_bytes(hand_made([word(b"general.name", b"\x1b[31mred\x07\xff"), nan], [entry(b"\x1b[2J\xfe")]))
    shown = info(file, "--tensors").stdout
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert as_json(file)[0]["metadata"]["score"] == "nan"


def test_looking_at_files_loads_no_library(preset_files: Any, tmp_path: Path) -> None:
    program = """
import sys
from sdsage._preflight import preflight
from sdsage.cli.app import build_app
files = sys.argv[1:]
assert not preflight({"--diffusion-model": files[0], "--t5xxl": files[1], "--vae": files[2]}).problems
build_app("info")(["info", *files], standalone_mode=False)
assert "sdsage._ffi" not in sys.modules
assert "numpy" not in sys.modules
"""
    files = preset_files("tiny-random")
    paths = [files[name] for name in ("diffusion_model", "t5xxl", "vae")]
    subprocess.run([sys.executable, "-P", "-c", program, *paths], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
