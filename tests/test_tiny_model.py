"""Data, reader, sizes and export of the tiny model (tools/tiny_model): what needs no torch."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(ROOT))  # at the end: the package under test stays the one that is installed

from sdsage.tiny import packed
from sdsage.tiny.tensors import DType
from sdsage.tiny.umt5 import VOCABULARY
from tools.tiny_model import arrays, engine, evaluate, export, grammar, pack, reader, scenes, sizes, tokens, unpack

CLIPS = 20


def combinations(s: grammar.Scenes, second: bool = False) -> np.ndarray:
    return grammar.held_out(s.colour2, s.shape2, s.motion2) if second else grammar.held_out(s.colour, s.shape, s.motion)


def test_what_is_held_out_is_never_trained_on() -> None:
    some = grammar.sample(np.random.default_rng(0), 20000)
    pair = some.shape2 >= 0
    assert 0.15 < pair.mean() < 0.25
    assert not combinations(some).any()
    assert not combinations(some.take(np.flatnonzero(pair)), second=True).any()


def test_all_captions_that_measure_the_model_are_held_out_and_differ() -> None:
    kept, captions = grammar.held_out_captions()
    assert len(set(captions)) == grammar.HELD_OUT_COUNT == 200
    assert combinations(kept).all()
    for what, least in (("colour", 8), ("shape", 6)):  # every value is among them
        assert len(np.unique(getattr(kept, what))) == least
    trained = set(grammar.captions(grammar.sample(np.random.default_rng(1), 4000), np.random.default_rng(2)))
    assert not trained & set(captions)


def test_a_caption_says_what_there_is() -> None:
    rng = np.random.default_rng(4)
    some = grammar.sample(rng, 300)
    for i, text in enumerate(grammar.captions(some, rng)):
        said = text.lower().replace(".", "").split()
        motion = grammar.MOTIONS[some.motion[i]]
        assert list(grammar.COLOURS)[some.colour[i]] in said
        assert motion.way == 0 or grammar.DIRECTIONS[motion.way] in said
        assert ("and" in said) == (some.shape2[i] >= 0)
        assert ("two" in said) == (some.count[i] > 1)
        assert not some.told[i] or list(grammar.GROUNDS)[some.ground[i]] in said


def test_every_word_has_a_token_and_prompts_fit() -> None:
    assert set(grammar.words()) <= set(tokens.table())
    assert max(tokens.used()) < VOCABULARY
    rng = np.random.default_rng(5)
    rows, lengths = tokens.rows(list(grammar.captions(grammar.sample(rng, 5000), rng)))
    assert lengths.max() <= tokens.LONGEST < rows.shape[1]
    assert (rows[np.arange(len(rows)), lengths - 1] == tokens.used().index(tokens.EOS) + 1).all()
    assert (rows[np.arange(len(rows)), lengths] == 0).all()
    with pytest.raises(ValueError, match="has words that captions do not have: dragon"):
        tokens.encode("a red dragon")


@pytest.fixture(scope="module")
def clips() -> tuple[grammar.Scenes, np.ndarray]:
    rng = np.random.default_rng(6)
    some = grammar.sample(rng, CLIPS)
    return some, scenes.clips(some, rng)


def test_clips_are_the_same_from_the_same_seed(clips: tuple[grammar.Scenes, np.ndarray]) -> None:
    rng = np.random.default_rng(6)
    again = scenes.clips(grammar.sample(rng, CLIPS), rng)
    assert again.shape == (CLIPS, scenes.FRAMES, scenes.SIZE, scenes.SIZE, 3)
    assert (again == clips[1]).all()


def test_objects_stay_in_the_frame(clips: tuple[grammar.Scenes, np.ndarray]) -> None:
    rng = np.random.default_rng(8)
    some = grammar.sample(rng, 5000)
    o, _ = scenes.layout(some, rng)
    there = o.radius > 0
    reach = o.radius * scenes.REACH[o.shape.astype(int)]
    for middle, path, hop in ((o.x, o.dx, 0 * o.hop), (o.y, o.dy, o.hop)):
        assert ((middle - abs(path) / 2 - hop - reach) >= 0)[there].all()
        assert ((middle + abs(path) / 2 + reach) <= scenes.UNITS)[there].all()
    assert (there.sum(1) == np.where(some.shape2 >= 0, 2, some.count)).all()


def test_no_shape_reaches_farther_than_said() -> None:
    v, u = np.mgrid[1.6:-1.6:321j, -1.6:1.6:321j]
    for distance, reach in zip(scenes.SHAPE_DISTANCES, scenes.REACH, strict=True):
        farthest = np.hypot(u, v)[distance(np, u, v, 1.0) < 0].max()
        assert reach - 0.03 < farthest <= reach


def test_objects_go_far_enough_to_be_seen_to_and_never_meet() -> None:
    rng = np.random.default_rng(9)
    some = grammar.sample(rng, 5000)
    o, _ = scenes.layout(some, rng)
    ways = np.array([m.way for m in grammar.MOTIONS])
    pair = some.shape2 >= 0
    for slot, motion, here in ((0, some.motion, pair | True), (1, some.motion2, pair)):
        goes = here & (ways[motion] > 0)
        assert (np.maximum(abs(o.dx), abs(o.dy))[goes, slot] > 1.5 * reader.MOVED).all()
    reach = o.radius * scenes.REACH[o.shape.astype(int)]
    across = np.where(ways[some.motion] == 0, ways[some.motion2], ways[some.motion])
    for way, one, path in (((1, 2), o.y, o.hop), ((3, 4), o.x, 0 * o.hop)):  # halves lie along the motion
        which = np.flatnonzero(pair & np.isin(across, way))
        upper = one[which].argmin(1)
        rows = np.arange(len(which))
        first = one[which][rows, upper] + reach[which][rows, upper]
        second = (one - path - reach)[which][rows, 1 - upper]
        assert (first < second).all()


def test_the_reader_reads_the_generators_clips(clips: tuple[grammar.Scenes, np.ndarray]) -> None:
    some, frames = clips
    assert evaluate.read(list(frames), some) == [reader.Score(True, True, True)] * CLIPS


def test_the_reader_tells_wrong_clips_from_right_ones(clips: tuple[grammar.Scenes, np.ndarray]) -> None:
    """Backwards, with colours in another order, and of nothing."""
    some, frames = clips
    moving = [i for i in range(CLIPS) if grammar.MOTIONS[some.motion[i]].way in (1, 2) and some.shape2[i] < 0]
    assert len(moving) > 1
    for i in moving[:2]:
        assert not reader.score(frames[i][::-1], some, i).direction
        assert not reader.score(frames[i][..., ::-1], some, i).all or some.colour[i] in (1, grammar.WHITE_OBJECT)
        blank = np.full_like(frames[i], 125)
        assert reader.read(blank) == []
        assert not reader.score(blank, some, i).colour


def softened(clip: np.ndarray, rng: np.random.Generator, times: int = 4, noise: float = 6.0) -> np.ndarray:
    """As a VAE of about 28 dB gives it back."""
    x = clip.astype(np.float32)
    for axis in (1, 2) * times:
        wide = np.pad(x, [(1, 1) if a == axis else (0, 0) for a in range(4)], mode="edge")
        x = sum(share * np.take(wide, range(k, k + x.shape[axis]), axis) for k, share in enumerate((0.25, 0.5, 0.25)))
    return np.rint((x + rng.normal(0, noise, x.shape)).clip(0, 255)).astype(np.uint8)


def test_the_reader_reads_soft_and_noisy_clips() -> None:
    """Eight of each shape: none of them by rule what it isn't, at the sharpness that the VAE has."""
    rng = np.random.default_rng(10)
    many = grammar.sample(rng, 400)
    some = many.take(np.concatenate([np.flatnonzero(many.shape == k)[:8] for k in range(len(grammar.SHAPES))]))
    clips = scenes.clips(some, rng)
    soft = [softened(clip, rng) for clip in clips]
    assert 27 < np.mean([evaluate.psnr(a, b) for a, b in zip(clips, soft, strict=True)]) < 29.5
    found = reader.shares([reader.score(clip, some, i) for i, clip in enumerate(soft)])
    assert found["shape"] == found["direction"] == 1.0
    assert found["colour"] >= 0.98


def test_the_reader_counts(clips: tuple[grammar.Scenes, np.ndarray]) -> None:
    some, frames = clips
    groups = np.flatnonzero(some.count > 1)
    assert len(groups) > 1
    for i in groups[:2]:
        (one,) = reader.read(frames[i])
        assert one.count == some.count[i]


# ---- sizes and files


def test_everything_fits_into_the_package() -> None:
    """An upper bound: nothing is compressed, except the VAE's weights, whose last mantissa bits are zeros."""
    q8 = 34 / 32
    experts = 2 * sizes.DIT.weights(sizes.TEXT) * q8
    text = (sizes.TEXT.weights + len(tokens.used()) * sizes.TEXT.dim) * q8
    vae = (sizes.VAE.decoder_weights() + sizes.VAE.encoder_weights()) * 13 / 8  # 7 of 10 bits
    first_frame = 2 * sizes.I2V_EXTRA * sizes.PATCH**2 * sizes.DIT.dim * 2
    assert (experts + text + vae + first_frame) / 1e6 < 13.0
    assert sizes.DIT.dim % sizes.HEAD == 0


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_bfloat16_is_near(values: list[float]) -> None:
    x = np.array(values, np.float32)
    x = x[np.abs(x) < 3e38]
    back = arrays.from_bf16(arrays.to_bf16(x))
    assert (np.abs(back - x) <= np.maximum(np.abs(x) / 256, 1e-38)).all()


def test_weights_are_kept_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "PART", 1000)
    kept = {f"a{i}": np.full((10 + i, 5), i, np.float32) for i in range(9)} | {"b": np.arange(3, dtype="<u2")}
    assert len(arrays.save(tmp_path, "w", kept, {"step": "3"})) > 1
    found, info = arrays.read(tmp_path, "w")
    assert info == {"step": "3"}
    assert found.keys() == kept.keys()
    assert all((found[k] == kept[k]).all() and found[k].dtype == kept[k].dtype for k in kept)
    arrays.save(tmp_path, "w", {"b": kept["b"]})
    assert [p.name for p in tmp_path.iterdir()] == ["w.0.safetensors"]
    with pytest.raises(ValueError, match="a has 4000 bytes, and a file holds 1000"):
        arrays.save(tmp_path, "w", {"a": np.zeros(1000, np.float32)})


def test_shortened_weights_are_near_and_compress() -> None:
    values = np.random.default_rng(0).normal(0, 0.05, 4096).astype(np.float32)
    short = export.shorter(values, 7)
    assert np.abs(short - values).max() <= np.abs(values).max() / 128
    assert not (short.astype(np.float16).view(np.uint16) & 7).any()


def test_a_text_to_video_expert_is_the_other_with_fewer_inputs() -> None:
    weights = engine.frame_probe()
    for inputs in (sizes.LATENT, 2 * sizes.LATENT + 4):
        tensor = dict((t.name, (t, v)) for t, v in export.dit(weights, DType.F32, inputs))["patch_embedding.weight"]
        assert tensor[0].shape == (4 * 64 * inputs, 1, 2, 2)
        assert (tensor[1].reshape(256, inputs, 1, 2, 2) == weights["patch_embedding.weight"][:, :inputs]).all()


def test_the_tokens_file_is_sorted_and_small() -> None:
    text = tokens.FILE.read_text(encoding="utf-8")
    assert list(json.loads(text)) == sorted(json.loads(text))
    assert len(text) < 4096


@pytest.mark.parametrize("dtype", list(DType))
def test_model_files_are_read_as_written(dtype: DType, tmp_path: Path) -> None:
    weights = engine.frame_probe()
    described = export.dit(weights, dtype, 36)
    (tmp_path / "a.gguf").write_bytes(export.as_gguf(described, "wan", "a"))
    found = export.values(tmp_path / "a.gguf")
    assert found.keys() == weights.keys()
    for name, values in found.items():
        away = np.abs(values.reshape(weights[name].shape) - weights[name])
        assert away.max() <= np.abs(weights[name]).max() / 254  # half a step of Q8_0


NAMES = [name for names in pack.ARCHIVES.values() for name in names]


def test_packed_files_come_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    t2v = rng.bytes(200_000)
    files = {name: t2v + name.encode() if name.startswith("wan-") else name.encode() * 99 for name in NAMES}
    (tmp_path / "old.xz").touch()
    assert pack.pack(files, tmp_path) < 450_000  # the second of two that are alike takes no room
    monkeypatch.setattr(packed, "FOLDER", tmp_path)
    monkeypatch.setattr(packed, "TABLE", tmp_path / "files.json")
    assert {name: file.build() for name, file in packed.files().items()} == {f"trained/{n}": files[n] for n in NAMES}
    assert {path.name for path in tmp_path.iterdir()} == {*pack.ARCHIVES, "files.json"}


def test_what_is_too_large_for_the_package_is_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "LIMIT", 1000)
    files = dict.fromkeys(NAMES, np.random.default_rng(0).bytes(2000))
    with pytest.raises(
        ValueError, match=r"the archives have \d{4} bytes, and the package takes 1000: fewer --vae-bits"
    ):
        pack.pack(files, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_unfinished_weights_are_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays.save(tmp_path, "vae.ema", {"a": np.zeros(1, np.float32)}, {"finished": "1"})
    arrays.save(tmp_path, "low.ema", {"a": np.zeros(1, np.float32)}, {"step": "3"})
    monkeypatch.setattr(sys, "argv", ["pack", str(tmp_path)])
    with pytest.raises(SystemExit):
        pack.main()
    assert "has no finished text, low, high: train.py makes them" in capsys.readouterr().err


# ---- evaluation


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "m"], "m lacks wan-t2v-low-f16.gguf, wan-t2v-high-f16.gguf, umt5-f16.gguf: python -m tools"),
        (["--state", "s"], "s has no finished text, low, high: train.py makes them"),
        (["--models", "m", "--against", "r"], "--against r has no clips.npz: it is the --out of an earlier run"),
    ],
)
def test_the_evaluation_says_which_files_are_missing(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "wan21-vae.safetensors").touch()
    arrays.save(tmp_path / "s", "vae.ema", {"a": np.zeros(1, np.float32)}, {"finished": "1"})
    arrays.save(tmp_path / "s", "text.ema", {"a": np.zeros(1, np.float32)})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "find_spec", lambda name: True)  # as if PyTorch were there
    monkeypatch.setattr(sys, "argv", ["evaluate", *arguments, "--out", "o", "--type", "f16"])
    with pytest.raises(SystemExit) as stopped:
        evaluate.main()
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_what_is_unpacked_packs_to_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training may go on from the package without a loss beyond what packing cost."""
    monkeypatch.setattr(sys, "argv", ["unpack", str(tmp_path)])
    unpack.main()
    made = dict(export.files(tmp_path, DType.Q8_0, 6))
    known = packed.files()
    assert {f"trained/{name}" for name in made} == set(known)
    assert all(known[f"trained/{name}"].is_whole(content) for name, content in made.items())
