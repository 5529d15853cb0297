"""From words to settings: precedence, what is refused, and what has no effect."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdsage.cli.cache import cache_fields
from sdsage.cli.option import IMG, VID, Option
from sdsage.cli.options import REMOVED, RENAMED, by_key
from sdsage.cli.prompt import extract_loras
from sdsage.cli.settings import Settings, hidden_key, merge
from sdsage.cli.values import MAX_FLOAT, Problems, parse
from sdsage.errors import BadRequest


def option(name: str) -> Option:
    return by_key()[name.removeprefix("--").replace("-", "_")]


def problems_of(settings: Settings) -> str:
    try:
        settings.problems.stop_if_any()
    except BadRequest as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("--steps", "12", 12),
        ("--steps", 12, 12),
        ("--cfg-scale", "1e0", 1.0),
        ("--cfg-scale", 2, 2.0),
        ("--sampling-method", "Euler_A", "euler_a"),
        ("--type", "Q4_k", "q4_K"),
        ("--skip-layers", "[7,8, 9]", (7, 8, 9)),
        ("--skip-layers", "7 8", (7, 8)),
        ("--skip-layers", "[]", ()),
        ("--skip-layers", [1, 2], (1, 2)),
        ("--sigmas", ["3,2", "[1,0]"], (3.0, 2.0, 1.0, 0.0)),
        ("--sigmas", [3, 2.5], (3.0, 2.5)),
        ("--vae-tile-size", "32x24", (32, 24)),
        ("--vae-tile-size", 32, (32, 32)),
        ("--vae-relative-tile-size", [0.5, 2], (0.5, 2.0)),
        ("--ref-image", "a.png", ("a.png",)),
        ("--ref-image", ["a.png", "b, c.png"], ("a.png", "b, c.png")),
        ("--seed", "-1", -1),
        ("--prompt", "", ""),
    ],
)
def test_values(name: str, raw: Any, value: Any) -> None:
    assert parse(option(name), raw) == value


BAD = [
    ("--steps", "0"), ("--steps", "-1"), ("--steps", "2.5"), ("--steps", ""), ("--steps", "1_000"),
    ("--steps", "99999"),
    ("--steps", True), ("--steps", "１２x"), ("--high-noise-steps", "10001"), ("--width", "0"), ("--width", "-64"),
    ("--width", "16385"), ("--height", "1e3"), ("--video-frames", "0"), ("--fps", "0"), ("--batch-count", "0"),
    ("--strength", "1.01"), ("--strength", "-0.1"), ("--cfg-scale", "nan"), ("--cfg-scale", "inf"),
    ("--cfg-scale", "-1"), ("--cfg-scale", "1e39"), ("--flow-shift", "-inf"), ("--flow-shift", "0"), ("--eta", "x"),
    ("--img-cfg-scale", "infinity"), ("--guidance", "NaN"), ("--moe-boundary", "1.5"), ("--clip-skip", "many"),
    ("--seed", "9223372036854775808"), ("--sampling-method", "euler a"), ("--scheduler", "karas"), ("--rng", "gpu"),
    ("--type", "q9_0"), ("--type", "q8_1"), ("--prediction", ""), ("--cache-mode", "none"), ("--preview", "all"),
    ("--skip-layers", "[7,8"), ("--skip-layers", "7;8"), ("--sigmas", "1,x"), ("--sigmas", "inf"),
    ("--vae-tile-size", "32x"), ("--vae-tile-size", "1x2x3"), ("--vae-tile-size", "-4x4"),
    ("--vae-relative-tile-size", "nanx1"), ("--scm-mask", "1,2"), ("--upscale-repeats", "0"),
    ("--hires-denoising-strength", "0"), ("--max-vram", "-1"), ("--vae-tiling", "yes"), ("--prompt", 5),
    ("--prompt", "\udcff"), ("--prompt", "a\0b"), ("--output-begin-idx", "-2"), ("--threads", "5000"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "raw"), BAD)
def test_bad_values_say_what_is_allowed(name: str, raw: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(option(name), raw, " (in x.toml)")
    text = str(caught.value)
    assert text.startswith(f"{name} ")
    assert " (in x.toml) can't be used: " in text
    assert "it takes" in text or "allowed is" in text
    assert "!" not in text


@given(st.floats())
def test_floats_are_finite_in_32_bits(number: float) -> None:
    try:
        value = parse(option("--control-strength"), repr(number))
    except BadRequest:
        assert not abs(number) <= MAX_FLOAT
    else:
        assert value == number


@given(st.text(max_size=40))
def test_any_text_is_a_value_or_a_bad_request(text: str) -> None:
    for name in ("--steps", "--cfg-scale", "--skip-layers", "--vae-tile-size", "--sigmas", "--rng", "--prompt"):
        with contextlib.suppress(BadRequest):
            parse(option(name), text)


def test_all_problems_at_once() -> None:
    found = problems_of(merge(VID, {"steps": "0", "width": "x", "cfg_scale": "nan", "rng": "gpu"}))
    assert [line.split()[0] for line in found.splitlines()] == ["--steps", "--cfg-scale", "--rng", "--width"]


def test_nothing_given_gives_defaults() -> None:
    settings = merge(VID, {})
    assert settings["steps"] == 20
    assert settings["vae_tiling"] is False
    assert settings.given == set()
    assert settings.warnings == []
    assert problems_of(settings) == ""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('cfg-scale = 5\nsteps = 7\nvae_tiling = true\ntae = "t.gguf"\nseed = -1\nskip_layers = [1]\n')
    return path


def test_config_then_command_line(config: Path) -> None:
    settings = merge(IMG, {"config": str(config), "steps": "9"})
    got = {key: settings[key] for key in ("cfg_scale", "steps", "vae_tiling", "taesd", "seed", "skip_layers")}
    assert got == {
        "cfg_scale": 5.0, "steps": 9, "vae_tiling": True, "taesd": "t.gguf", "seed": -1, "skip_layers": (1,),
    }  # fmt: skip


def test_a_switch_can_be_taken_back(config: Path) -> None:
    assert merge(IMG, {"config": str(config), "no_vae_tiling": True})["vae_tiling"] is False
    both = merge(IMG, {"vae_tiling": True, "no_vae_tiling": True})
    assert "--vae-tiling and --no-vae-tiling contradict" in problems_of(both)


@pytest.fixture
def preset(monkeypatch: pytest.MonkeyPatch) -> None:
    from sdsage import presets

    made = presets.Preset("p", VID, "", {"steps": 2, "fps": 8, "vae_tile_size": "8x8", "diffusion_model": "m.gguf"})
    monkeypatch.setattr(presets, "load", lambda name, on_write, without: made)
    monkeypatch.setattr(presets, "mode", lambda name: made.mode)


@pytest.mark.usefixtures("preset")
def test_preset_then_config_then_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "p"\nsteps = 3\nfps = 9\n')
    settings = merge(VID, {"config": str(path), "fps": "10"})
    assert (settings["steps"], settings["fps"], settings["diffusion_model"]) == (3, 10, "m.gguf")
    assert settings.warnings == []  # a preset may set what has no effect


@pytest.mark.usefixtures("preset")
def test_preset_of_the_other_verb() -> None:
    with pytest.raises(BadRequest, match="--preset p is for vid-gen, not for img-gen: run 'sdsage vid-gen'"):
        merge(IMG, {"preset": "p"})


def test_unknown_preset() -> None:
    with pytest.raises(BadRequest, match=r"'tony'.*tiny"):
        merge(VID, {"preset": "tony"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cfg_skale = 5", "has cfg_skale, which is not an option of img-gen; did you mean cfg_scale"),
        ("config = 'x'", "has config, which is not an option"),
        ("steps = 0", "--steps 0 (in "),
        ("steps = '4.5'", "--steps 4.5 (in "),
        ("vae_tiling = 'yes'", "--vae-tiling yes (in "),
    ],
)
def test_bad_keys_in_a_config_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert message in problems_of(merge(IMG, {"config": str(path)}))


@pytest.mark.parametrize(("content", "message"), [(b"a = ", "is not a TOML file"), (b"\xff", "is not a TOML file")])
def test_unreadable_config(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(BadRequest, match=message):
        merge(IMG, {"config": str(path)})
    with pytest.raises(BadRequest, match="does not exist"):
        merge(IMG, {"config": str(tmp_path / "no.toml")})
    with pytest.raises(BadRequest, match="is a folder"):
        merge(IMG, {"config": str(tmp_path)})


@pytest.mark.parametrize(
    ("verb", "given", "sentence"),
    [
        (VID, {"vae_tile_size": "8x8"}, "--vae-tile-size has no effect without --vae-tiling"),
        (VID, {"vae_tiling": True, "vae_tile_size": "8", "vae_relative_tile_size": "0.5"},
         "--vae-tile-size has no effect beside --vae-relative-tile-size, which decides instead"),
        (VID, {"batch_count": "2", "seeds": "1,5"},
         "--batch-count has no effect beside --seeds, which decides instead"),
        (IMG, {"seed": "2", "seeds": "1,5"}, "--seed has no effect beside --seeds, which decides instead"),
        (VID, {"model_dir": ["m"]}, "--model-dir has no effect without --from-file"),
        (IMG, {"fps": "8"}, "--fps has no effect in img-gen: it is for vid-gen"),
        (IMG, {"hires_steps": "3"}, "--hires-steps has no effect without --hires"),
        (IMG, {"cache_option": "threshold=1"}, "--cache-option has no effect without --cache-mode"),
        (IMG, {"preview_interval": "2"}, "--preview-interval has no effect without --preview"),
        (IMG, {"preview": "tae"},
         "--preview tae needs --taesd: without it the VAE makes the preview, as with --preview vae"),
        (IMG, {"control_net_cpu": True}, "--control-net-cpu has no effect without --control-net"),
        (IMG, {"strength": "0.5"}, "--strength has no effect without --init-img"),
        (IMG, {"skip_layers": "[1]", "slg_scale": "0"}, "--skip-layers has no effect without --slg-scale"),
        (IMG, {"sigmas": ["1,0"], "scheduler": "karras"},
         "--scheduler has no effect beside --sigmas, which decides instead"),
        (VID, {"high_noise_cfg_scale": "2"},
         "--high-noise-cfg-scale has no effect without --high-noise-diffusion-model"),
        (VID, {"high_noise_diffusion_model": "m", "moe_boundary": "0.9"},
         "--moe-boundary has no effect with 20 high-noise steps: give --high-noise-steps 0 to use it"),
        (IMG, {"init_img": "a.png", "width": "64"},
         "--width has no effect alone: both sides come from the input picture"),
        (IMG, {"fa": True, "diffusion_fa": True}, "--diffusion-fa has no effect beside --fa, which decides instead"),
        (IMG, {"device": "cpu", "clip_on_cpu": True},
         "--clip-on-cpu has no effect with --device cpu: everything runs there"),
        (IMG, {"output_begin_idx": "3"},
         "--output-begin-idx has no effect on a single file: name one with %d, or ask for several results"),
        (IMG, {"cache_mode": "easycache", "scm_mask": "1,0"},
         "--scm-mask has no effect with --cache-mode easycache"),
    ],
)  # fmt: skip
def test_options_without_effect(verb: str, given: dict[str, Any], sentence: str) -> None:
    assert merge(verb, given).warnings == [sentence]


@pytest.mark.parametrize(
    ("verb", "given"),
    [
        (VID, {"vae_tiling": True, "vae_tile_size": "8"}),
        (VID, {"high_noise_diffusion_model": "m", "moe_boundary": "0.9", "high_noise_steps": "-1"}),
        (IMG, {"hires": True, "hires_scale": "3"}),
        (IMG, {"output": "x_%d.png", "output_begin_idx": "3"}),
        (IMG, {"cache_mode": "dbcache", "scm_mask": "1,0", "scm_policy": "static"}),
        (IMG, {"preview": "tae", "taesd": "t", "preview_noisy": True, "taesd_preview_only": True}),
    ],
)
def test_options_with_effect(verb: str, given: dict[str, Any]) -> None:
    assert merge(verb, given).warnings == []


@pytest.mark.parametrize("old", RENAMED)
def test_old_names_work(old: str) -> None:
    new = option(RENAMED[old])
    value = "karras" if new.choices else "0.5"
    settings = merge(IMG, {hidden_key("old", old): value, "photo_maker": "p"})
    if old == "--stacked-id-embd-dir":
        assert f"{old} and {new.name} are the same option" in problems_of(settings)
        return
    assert settings[new.key] == parse(new, value)
    assert settings.warnings == [f"{old} is now called {new.name}: use the new name"]


@pytest.mark.parametrize("old", REMOVED)
def test_removed_names_say_what_to_use(old: str) -> None:
    assert f"{old} is not an option of this version: " in problems_of(merge(VID, {hidden_key("old", old): "1"}))


def test_cache_options() -> None:
    problems = Problems()
    text = "threshold=0.3,warmup=2,relative=0,Fn=4"
    assert cache_fields("easycache", text, problems) == {
        "reuse_threshold": 0.3, "max_warmup_steps": 2, "use_relative_threshold": False, "Fn_compute_blocks": 4,
    }  # fmt: skip
    assert cache_fields("dbcache", "threshold=0.3", problems) == {"residual_diff_threshold": 0.3}
    assert cache_fields("spectrum", "warmup=5", problems) == {"spectrum_warmup_steps": 5}
    problems.stop_if_any()


@pytest.mark.parametrize(
    "text",
    ["threshold", "thresh=1", "threshold=x", "threshold=nan", "Fn=1.5", "threshold=-1", "start=0.9,end=0.1", "end=2"],
)
def test_bad_cache_options(text: str) -> None:
    problems = Problems()
    cache_fields("easycache", text, problems)
    with pytest.raises(BadRequest, match=r"--cache-option .*can't be used"):
        problems.stop_if_any()


def test_loras_are_found_and_summed(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.gguf", "b.safetensors", "c d ü.safetensors"):
        (tmp_path / name).touch()
    problems = Problems()
    prompt = "x <lora:a:0.5>y<lora:b:1> <lora:a:0.25><lora:|high_noise|c d ü:2> 🐈"
    rest, loras = extract_loras(prompt, str(tmp_path), problems)
    problems.stop_if_any()
    assert rest == "x y  🐈"
    assert [(Path(a.path).name, a.multiplier, a.is_high_noise) for a in loras] == [
        ("a.safetensors", 0.75, False), ("b.gguf", 1.0, False), ("c d ü.safetensors", 2.0, True),
    ]  # fmt: skip
    assert extract_loras(prompt, "", problems) == (prompt, [])


@pytest.mark.parametrize(("tag", "said"), [("<lora:no:1>", "'no'"), ("<lora:a:x>", "'x'"), ("<lora:a:nan>", "'nan'")])
def test_bad_loras_are_errors(tmp_path: Path, tag: str, said: str) -> None:
    (tmp_path / "a.gguf").touch()
    problems = Problems()
    extract_loras(f"cat {tag}", str(tmp_path), problems)
    with pytest.raises(BadRequest, match=said):
        problems.stop_if_any()
