"""Latents that are kept: decoding them alone, and what happens when there is no memory to decode them."""

import contextlib
import json
import os
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ctx_params, small_image, small_video
from hypothesis import given
from hypothesis import strategies as st
from tiny_cli import frames_of, run

import sdsage
from sdsage import Checkpoint, load_latents, save_latents
from sdsage.errors import BadRequest, ModelError
from sdsage.media import read_metadata

LIMITED = Path(__file__).parent / "limited"
VIDEO = [
    "vid-gen",
    "--preset",
    "tiny-random",
    "--video-frames",
    "5",
    "--steps",
    "1",
    "--high-noise-steps",
    "1",
    "-t",
    "1",
]
VIDEO += ["-p", "a cat", "-W", "160", "-H", "160"]
PICTURES = ["img-gen", "--preset", "tiny-flux", "-W", "32", "-H", "32", "--steps", "1", "-t", "1", "-p", "a cat"]
# MB that are left when decoding of VIDEO begins: it takes 135 for its graph, and then 68 at once or 44 for a tile.
TILES_FIT, NOTHING_FITS, ABORTS = "191", "150", "60"


def run_limited(megabytes: str, *args: str, python: bool = False, **more: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, whose memory ends soon after decoding has begun."""
    paths = f"{LIMITED}{os.pathsep}{Path(sdsage.__file__).parent.parent}"
    # no freed memory is held back, which would be there though the address space is full
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    env = {**os.environ, **malloc, "PYTHONPATH": paths, "SDSAGE_TEST_DECODE_MB": megabytes, **more}
    command = [sys.executable, *([] if python else ["-P", "-m", "sdsage"]), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def answer(stdout: str) -> Any:
    """The last line of --json."""
    return json.loads(stdout.splitlines()[-1])


# ---- decoding alone


def test_a_vae_alone_decodes_a_video(video_context: Any, preset_files: Any) -> None:
    whole = video_context.generate_video(small_video(), keep_latents=True)
    params = ctx_params({"vae": preset_files("tiny-random")["vae"]})
    with sdsage.Context(params, decode_only=video_context.version_name) as context:
        assert context.version_name == video_context.version_name
        assert (context.decode(whole.latents[0]) == whole.frames).all()
        with pytest.raises(BadRequest, match="this context only decodes"):
            context.generate_video(small_video())


def test_a_tiny_autoencoder_alone_decodes_pictures(flux_context: Any, preset_files: Any) -> None:
    whole = flux_context.generate_image(small_image(batch_count=2), keep_latents=True)
    files = preset_files("tiny-flux")
    files = {name: files[name] if name in ("tae", "taesd") else "/not/there.gguf" for name in files}
    with sdsage.Context(ctx_params(files), decode_only="Flux") as context:
        result = context.decode_all(whole.latents, seeds=whole.seeds)
        assert (result.frames == whole.frames).all()
        assert (result.seeds, result.adjusted) == (whole.seeds, ())
        with pytest.raises(BadRequest, match="this context only decodes"):
            context.generate_image(small_image())
        with pytest.raises(BadRequest, match="latents have shape"):
            context.decode(np.zeros((1, 16, 2, 4, 4), np.float32))
        with pytest.raises(BadRequest, match="do not belong to this model"):
            context.decode(np.zeros((1, 4, 4, 4), np.float32))
        with pytest.raises(BadRequest, match="no latents to decode"):
            context.decode_all([])


def test_what_can_not_decode_is_refused(preset_files: Any) -> None:
    files = preset_files("tiny-random")
    with pytest.raises(BadRequest, match="no model that this engine knows is called 'Sora'"):
        sdsage.Context(ctx_params({"vae": files["vae"]}), decode_only="Sora")
    with pytest.raises(ModelError, match=r"no VAE was given: set vae_path \(--vae\)"):
        sdsage.Context(ctx_params({"diffusion_model": files["diffusion_model"]}), decode_only="Wan 2.x")
    with pytest.raises(ModelError, match="holds nothing that a VAE"):
        sdsage.Context(ctx_params({"vae": files["t5xxl"]}), decode_only="Wan 2.x")
    with pytest.raises(ModelError, match="is not a diffusion model"):  # the next context is a whole one again
        sdsage.Context(ctx_params({"diffusion_model": files["vae"]}))


def test_a_context_that_only_decodes_ends_a_job_that_was_sampled(
    video_context: Any, preset_files: Any, tmp_path: Path
) -> None:
    kept = Checkpoint(tmp_path / "kept")
    whole = video_context.generate_video(small_video(), checkpoint=kept)
    with sdsage.Context(ctx_params(preset_files("tiny-random")), decode_only=video_context.version_name) as context:
        again = context.generate_video(small_video(), checkpoint=Checkpoint(kept.path, resume=True))
    assert (again.frames == whole.frames).all()
    kept.remove()
    assert not kept.path.exists()


# ---- the file


def test_latents_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = [np.random.default_rng(i).normal(size=(1, 4, 3, 5)).astype(np.float32) for i in range(11)]
    save_latents(path, tensors, "Flux", {"prompt": "a \u732b"})
    found = load_latents(path)
    assert (found.model, found.video, found.info["prompt"]) == ("Flux", False, "a \u732b")
    assert all((a == b).all() for a, b in zip(found.tensors, tensors, strict=True))
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])  # as any reader of safetensors sees it
    begin, end = header["latents.3"]["data_offsets"]
    assert header["latents.3"] == {"dtype": "F32", "shape": [1, 4, 3, 5], "data_offsets": [begin, end]}
    assert data[8 + length + begin : 8 + length + end] == tensors[3].tobytes()
    assert os.listdir(tmp_path) == [path.name]
    with pytest.raises(BadRequest, match="keep_latents=True"):
        save_latents(path, [], "Flux")
    with pytest.raises(BadRequest, match="plain JSON"):
        save_latents(path, tensors, "Flux", {"x": float("nan")})
    assert path.read_bytes() == data


@given(data=st.data())
def test_a_file_of_latents_that_is_cut_or_damaged_is_one_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    save_latents(path, [np.zeros((1, 4, 2, 2), np.float32)], "Flux")
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
        path.write_bytes(content)
        with pytest.raises(BadRequest):
            load_latents(path)
        return
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(BadRequest):
        load_latents(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["latents.0"].update(shape=[2**40, 2**40, 1, 1]),
        lambda h: h["latents.0"].update(data_offsets=[0, 2**63]),
        lambda h: h["latents.0"].update(data_offsets=[-64, 0]),
        lambda h: h["latents.0"].update(dtype="F64"),
        lambda h: h.pop("latents.0"),
        lambda h: h.update({"latents.2": h["latents.0"]}),
        lambda h: h["__metadata__"].update(sdsage="[]"),
        lambda h: h["__metadata__"].update(sdsage='{"format": 2, "model": "Flux"}'),
    ],
)
def test_a_lying_header_is_one_error(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    path = tmp_path / "x.safetensors"
    save_latents(path, [np.zeros((1, 4, 2, 2), np.float32)], "Flux")
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(BadRequest):
        load_latents(path)


# ---- no memory to decode


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from conftest import ctx_params, small_video
import sdsage
from sdsage import presets
files = {k: v for k, v in presets.load("tiny-random").options.items() if k in ("diffusion_model", "vae", "t5xxl")}
job = small_video(width=160, height=160)
job.high_noise_sample_params.sample_steps = -1
job.vae_tiling_params.enabled = True
job.vae_tiling_params.tile_size_x = job.vae_tiling_params.tile_size_y = 20
with sdsage.Context(ctx_params(files), on_log=lambda level, line: None, on_progress=lambda p: None) as context:
    try:
        context.generate_video(job)
    except sdsage.DecodeError as error:
        sdsage.save_latents("kept", error.latents, error.model)
        print(error)
"""


def test_the_error_holds_the_latents_and_tiles_of_the_caller_stay(empty_folder: Path, preset_files: Any) -> None:
    result = run_limited(NOTHING_FITS, "-c", SCRIPT, str(Path(__file__).parent), python=True)
    assert "insufficient memory" in result.stdout, result.stderr
    kept = load_latents("kept")
    assert (kept.model, kept.tensors[0].shape) == ("Wan 2.x", (1, 16, 2, 20, 20))
    assert "trying again" not in result.stdout + result.stderr


def test_a_decode_without_memory_is_tried_again_in_tiles(empty_folder: Path) -> None:
    result = run_limited(TILES_FIT, *VIDEO, "-o", "cat.webp", "--json")
    assert result.returncode == 0, result.stderr
    sentence = "the VAE decoded in tiles of 16x16 latent pixels, because decoding at once failed for want of memory"
    assert f"warning: {sentence}" in result.stderr
    assert "warning: decoding failed (ggml_aligned_malloc: insufficient memory" in result.stderr
    assert answer(result.stdout)["adjusted"] == [sentence]
    metadata = read_metadata("cat.webp")
    assert metadata is not None
    assert metadata.data["adjusted"] == [sentence]
    run(*VIDEO, "-o", "tiles.webp", "--vae-tiling", "--vae-tile-size", "16", "-q")
    assert (frames_of("cat.webp") == frames_of("tiles.webp")).all()
    assert sorted(os.listdir(empty_folder)) == ["cat.webp", "tiles.webp"]


def test_latents_outlive_a_decode_that_fails_in_tiles_too(empty_folder: Path) -> None:
    result = run_limited(NOTHING_FITS, *VIDEO, "--fps", "9", "-o", "out/cat.webp", "--json")
    assert result.returncode == 1
    assert answer(result.stdout)["event"] == "error"
    assert os.listdir(empty_folder / "out") == ["cat.latents.safetensors"]
    (command,) = [line for line in result.stderr.splitlines() if "sdsage decode" in line]
    words = shlex.split(command.removeprefix("error: "))
    assert words[:3] == ["sdsage", "decode", "out/cat.latents.safetensors"]
    assert run(*words[1:], "-q").stdout == "out/cat.webp\n"
    run(*VIDEO, "--fps", "9", "-o", "whole.webp", "-q")
    assert (frames_of("out/cat.webp") == frames_of("whole.webp")).all()
    mine, theirs = read_metadata("out/cat.webp"), read_metadata("whole.webp")
    assert mine is not None
    assert theirs is not None
    assert {**mine.data, "attention": 0} == {**theirs.data, "attention": 0}
    said = run(*VIDEO, "-o", "out/cat.webp", "--resume", "--overwrite", code=2).stderr
    assert "can be decoded: sdsage decode out/cat.latents.safetensors --vae FILE -o out/cat.webp" in said


def test_an_abort_for_want_of_memory_is_followed_by_tiles_in_a_new_process(empty_folder: Path, tmp_path: Path) -> None:
    once = {"SDSAGE_TEST_DECODE_ONCE": str(tmp_path / "once")}
    result = run_limited(ABORTS, *VIDEO, "-o", "out/cat.webp", "--json", **once)
    assert result.returncode == 0, result.stderr
    assert "decoding is tried again in tiles, in a new process" in result.stderr
    (sentence,) = answer(result.stdout)["adjusted"]
    assert sentence == "the VAE decoded in tiles, because decoding at once failed for want of memory"
    assert os.listdir(empty_folder / "out") == ["cat.webp"]
    result = run_limited(ABORTS, *VIDEO, "-o", "out/dog.webp")
    assert result.returncode == 1
    assert "sdsage decode out/dog.latents.safetensors" in result.stderr
    assert sorted(os.listdir(empty_folder / "out")) == ["cat.webp", "dog.latents.safetensors"]


# ---- the command line


def test_latents_are_kept_when_asked(empty_folder: Path) -> None:
    result = run(*PICTURES, "-b", "2", "--save-latents", "-o", "cat.png")
    assert "latents" in result.stderr
    assert sorted(os.listdir(empty_folder)) == ["cat.latents.safetensors", "cat_0.png", "cat_1.png"]
    values = answer(run(*PICTURES, "-b", "2", "--save-latents", "-o", "cat.png", "--overwrite", "--json").stdout)
    assert values["latents"] == ["cat.latents.safetensors"]
    assert os.fsencode(empty_folder) not in Path("cat.latents.safetensors").read_bytes()  # names, no paths
    (vae,) = [v for k, v in json.loads(run(*PICTURES, "--print-params").stdout)["ctx"].items() if k == "taesd_path"]
    args = ["decode", "cat.latents.safetensors", "--taesd", vae]
    shown = answer(run(*args, "-o", "again.png", "--json").stdout)
    assert (shown["files"], shown["frames"], shown["adjusted"]) == (["again_0.png", "again_1.png"], 2, [])
    for i in range(2):
        assert (frames_of(f"again_{i}.png") == frames_of(f"cat_{i}.png")).all()
        first, second = read_metadata(f"cat_{i}.png"), read_metadata(f"again_{i}.png")
        assert first is not None
        assert second is not None
        assert first.data["seed"] == second.data["seed"] == 42 + i
        assert first.parameters == second.parameters
    assert run(*args, "-o", "again.png", code=2).stderr.startswith("error: output")
    assert (
        "--save-latents would replace cat.latents" in run(*PICTURES, "--save-latents", "-o", "cat.jpg", code=2).stderr
    )
    run(*args, "-o", "bare.png", "--disable-image-metadata", "-q")
    assert read_metadata("bare_0.png") is None


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "LATENTS is missing"),
        (["none.safetensors", "--vae", "vae"], "LATENTS none.safetensors does not exist"),
        (["text", "--vae", "vae"], "text holds no latents"),
        (["text"], "no VAE was given"),
        (["running", "--vae", "vae"], "running is of a run that is still sampling or was ended"),
    ],
)
def test_bad_latents_are_exit_2(empty_folder: Path, args: list[str], said: str) -> None:
    from sdsage._answers import AnswerFile

    (empty_folder / "text").write_text("no latents but some text that is long enough to be read")
    (empty_folder / "vae").touch()
    AnswerFile.create(empty_folder / "running", {}).close()
    before = sorted(os.listdir(empty_folder))
    assert said in run("decode", *args, code=2).stderr
    assert sorted(os.listdir(empty_folder)) == before
