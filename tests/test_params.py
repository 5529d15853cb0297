"""Parameter objects: every field of the headers is there, with the C default, and comes back from C unchanged."""

import importlib.util
import math
import sys
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import sdsage
import sdsage.params
from sdsage._ffi import ffi, lib, params_json, text
from sdsage._struct import _CLASSES, LENGTHS, Struct
from sdsage.enums import _C_COUNTS, C_ENUMS, CEnum
from sdsage.errors import BadRequest

STRUCTS = list(_CLASSES.values())


def other_value(value: Any, c_type: Any, name: str) -> Any:
    """A value for a field that differs from its default."""
    if name in LENGTHS:
        item = c_type.item
        if item.kind == "struct" and item.cname.removeprefix("const ") in _CLASSES:
            return [_CLASSES[item.cname.removeprefix("const ")]()]
        return [np.full((2, 3, 3), 9, np.uint8)] if item.cname == "sd_image_t" else [1, 2, 3]
    if isinstance(value, Struct):
        return type(value)(**{k: other_value(v, type(value)._fields()[k], k) for k, v in fields(value).items()})
    if isinstance(value, CEnum):
        return next(m for m in type(value) if m is not value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 3
    if isinstance(value, float):
        return 0.625 if value != 0.625 else 0.25  # exact in 32 bits
    if c_type.cname == "sd_image_t":
        return np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)
    return "some text"


def fields(struct: Struct) -> dict[str, Any]:
    return struct._values()


@pytest.mark.parametrize("cls", STRUCTS, ids=lambda c: c.__name__)
def test_every_field_of_the_header_is_reachable_and_round_trips(cls: type[Struct]) -> None:
    c_fields = {name for name, _ in ffi.typeof(cls._c_type).fields}
    struct = cls()
    assert set(fields(struct)) | set(LENGTHS.values()) & c_fields == c_fields
    for name, value in fields(struct).items():
        setattr(struct, name, other_value(value, cls._fields()[name], name))
    keep: list[Any] = []
    back = cls.from_c(struct.to_c(keep)[0])
    assert back == struct
    assert back != cls()


@pytest.mark.parametrize("cls", STRUCTS, ids=lambda c: c.__name__)
def test_annotations_name_every_field(cls: type[Struct]) -> None:
    """What a type checker and an editor know is what the header has."""
    annotated = set(cls.__annotations__)
    assert annotated == {name for name in cls._fields() if name not in LENGTHS.values()}


def test_defaults_are_those_of_the_c_init_functions() -> None:
    struct = ffi.new("sd_vid_gen_params_t *")
    lib.sd_vid_gen_params_init(struct)
    params = sdsage.SdVidGenParams()
    assert params.video_frames == struct.video_frames == 6
    assert params.moe_boundary == struct.moe_boundary
    assert params.high_noise_sample_params.sample_steps == -1
    assert sdsage.SdCtxParams().chroma_use_dit_mask is True
    assert sdsage.SdSampleParams() == params.sample_params
    assert sdsage.SdLora("x").multiplier == 1.0


def test_lists_and_lengths_are_those_of_the_generator() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "native" / "sd_cli" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = generate  # its dataclass looks itself up
    spec.loader.exec_module(generate)
    assert generate.LENGTHS == LENGTHS


def test_every_struct_of_the_header_has_a_class() -> None:
    by_value = {"sd_image_t", "sdsage_attention_t", "sdsage_device_t", "sdsage_event_t", "sdsage_latents_t"}
    by_value |= {
        "sdsage_answer_t",
        "sdsage_sage_t",
        "sdsage_attention_method_t",
        "sdsage_attention_problem_t",
        "sdsage_lever_t",
    }
    names = {line.split()[0] for line in text(lib.sdsage_layout()).splitlines()}
    assert names - by_value == set(_CLASSES)


@pytest.mark.parametrize("tag", C_ENUMS)
def test_enums_are_those_of_the_header(tag: str) -> None:
    """Members, values and C constants of each enum."""
    declared = ffi.typeof(f"enum {tag}").relements
    cls = C_ENUMS[tag]
    assert {m.c_name: m.value for m in cls} == declared
    assert ("COUNT" in cls.__members__) == (cls.__name__ in _C_COUNTS)


@pytest.mark.parametrize(
    ("tag", "function"),
    [
        ("rng_type_t", "sd_rng_type_name"),
        ("sample_method_t", "sd_sample_method_name"),
        ("scheduler_t", "sd_scheduler_name"),
        ("prediction_t", "sd_prediction_name"),
        ("sd_type_t", "sd_type_name"),
        ("preview_t", "sd_preview_name"),
        ("lora_apply_mode_t", "sd_lora_apply_mode_name"),
        ("sd_hires_upscaler_t", "sd_hires_upscaler_name"),
    ],
)
def test_engine_names_are_the_engine_s(tag: str, function: str) -> None:
    for member in C_ENUMS[tag]:
        if member.name != "COUNT":
            assert member.engine_name == text(getattr(lib, function)(member))
            for name in (member.engine_name, member.name, member.c_name, member.value):
                assert C_ENUMS[tag].parse(name) is member


def test_an_enum_field_takes_a_name_and_refuses_others() -> None:
    params = sdsage.SdSampleParams(sample_method="euler_a", scheduler="KARRAS_SCHEDULER")
    assert params.sample_method is sdsage.SampleMethod.EULER_A
    assert params.scheduler is sdsage.Scheduler.KARRAS
    with pytest.raises(BadRequest, match=r"'eula'.*choose one of euler, euler_a"):
        params.sample_method = "eula"
    assert isinstance(params.sample_method, IntEnum)


def test_an_unknown_field_suggests_the_nearest() -> None:
    params = sdsage.SdCtxParams()
    with pytest.raises(AttributeError, match="did you mean 'diffusion_model_path'"):
        params.difusion_model_path = "x"
    with pytest.raises(AttributeError, match="did you mean 'vae_path'"):
        _ = params.vae_pth
    with pytest.raises(AttributeError, match="length of 'embeddings'"):
        params.embedding_count = 3
    with pytest.raises(AttributeError, match="has no field"):
        sdsage.SdVidGenParams(nonsense=1)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("width", "512", "takes a number"),
        ("width", 1.5, "whole number"),
        ("width", 2**40, "does not fit"),
        ("strength", math.nan, "finite"),
        ("strength", -math.inf, "finite"),
        ("strength", 1e39, "finite"),
        ("prompt", 3, "takes text"),
        ("prompt", "a\0b", "NUL"),
        ("seed", True, "takes a number"),
        ("init_image", np.zeros((4, 4, 3)), "not a picture"),
        ("init_image", np.zeros((4, 4, 4), np.uint8), "not a picture"),
        ("init_image", np.zeros((0, 4, 3), np.uint8), "not a picture"),
        ("sample_params", 3, "takes a SdSampleParams"),
    ],
)
def test_wrong_values_are_refused_when_set(name: str, value: Any, words: str) -> None:
    params = sdsage.SdImgGenParams()
    before = getattr(params, name)
    with pytest.raises(BadRequest, match=f"SdImgGenParams.{name}.*{words}"):
        setattr(params, name, value)
    assert getattr(params, name) == before


def test_pictures_may_be_pil_images() -> None:
    params = sdsage.SdImgGenParams(
        init_image=Image.new("RGB", (4, 2), (1, 2, 3)), mask_image=Image.new("L", (4, 2), 255)
    )
    assert params.init_image.shape == (2, 4, 3)
    assert params.mask_image.shape == (2, 4, 1)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), st.integers(-(2**63), 2**63 - 1))
def test_text_and_seeds_round_trip(prompt: str, seed: int) -> None:
    params = sdsage.SdVidGenParams(prompt=prompt, seed=seed)
    keep: list[Any] = []
    assert sdsage.SdVidGenParams.from_c(params.to_c(keep)[0]) == params


def test_params_json_shows_what_was_set() -> None:
    import json

    job = sdsage.SdVidGenParams(prompt='a "cat"\n', loras=[sdsage.SdLora("l.safetensors", 0.5, True)])
    job.sample_params.guidance.slg.layers = [7, 8]
    shown = json.loads(params_json(sdsage.SdCtxParams(vae_path="v"), vid=job))
    assert shown["ctx"]["vae_path"] == "v"
    assert shown["vid"]["prompt"] == 'a "cat"\n'
    assert shown["vid"]["loras"] == [{"is_high_noise": True, "multiplier": 0.5, "path": "l.safetensors"}]
    assert shown["vid"]["sample_params"]["guidance"]["slg"]["layers"] == [7, 8]
    assert shown["vid"]["sample_params"]["eta"] == "inf"
