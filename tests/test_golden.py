"""The engine's modules against what PyTorch made of the same weights and inputs: tools/tiny_model/golden.py."""

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

sys.path.append(str(ROOT))  # at the end: the package under test stays the one that is installed

from tools.tiny_model import golden

FILES = {
    "random": ROOT / "tests" / "golden" / "tiny.npz",
    "trained": ROOT / "tests" / "golden" / "tiny_model" / "trained.npz",
}
LIMITS = {"random": golden.RANDOM, "trained": golden.TRAINED}
SEEN = {"random": 0.95, "trained": 0.85}  # a decoder that is trained has black and white pixels: those are cut off


@cache
def expected(weights: str) -> golden.Values:
    assert FILES[weights].stat().st_size < 1e6
    return dict(np.load(FILES[weights]))


@pytest.mark.parametrize(("kind", "modules"), [("f32", golden.MODULES), ("q8_0", ("text", "dit"))])  # the VAE is F16
@pytest.mark.parametrize("weights", FILES)
def test_the_engine_agrees_with_torch(weights: str, kind: str, modules: tuple[str, ...], tmp_path: Path) -> None:
    values = golden.random() if weights == "random" else golden.package()
    found = golden.check(expected(weights), values, kind, tmp_path, only=modules)
    assert {d.module.split(".")[0] for d in found} == {*modules, "noise"}
    assert golden.too_far(found, LIMITS[weights][kind]) == []
    assert all(d.seen > SEEN[weights] for d in found)


def test_what_is_compared_as_q8_0_is_what_the_package_carries(tmp_path: Path) -> None:
    """Weights that were rounded to Q8_0 once stay as they are."""
    values = golden.package()
    _, files = golden.write(values, golden.DType.Q8_0, tmp_path)
    for expert, file in files.items():
        again = golden.export.values(file)
        patches = again.pop("patch_embedding.weight").reshape(-1, golden.LATENT, 1, 2, 2)
        assert (patches == values[expert]["patch_embedding.weight"][:, : golden.LATENT]).all()
        assert all((again[name] == values[expert][name]).all() for name in again)
        assert again.keys() | {"patch_embedding.weight"} == values[expert].keys()


WRONG = {
    "text": ("text", "blk.1.attn_rel_b.weight"),  # as if only the first layer knew distances
    "dit": ("low", "blocks.1.self_attn.norm_k.weight"),
    "decoder": ("vae", "decoder.upsamples.3.time_conv.bias"),
}


@pytest.mark.parametrize("module", WRONG)
def test_a_wrong_layer_is_noticed(module: str, tmp_path: Path) -> None:
    part, tensor = WRONG[module]
    weights = golden.random()
    weights[part][tensor] = np.full_like(weights[part][tensor], 0.3)
    found = golden.check(expected("random"), weights, "f32", tmp_path, only=(module,))
    wrong = [d for d in found if golden.too_far([d], golden.RANDOM["f32"])]
    assert {d.module for d in wrong} == {"text": {"text"}, "dit": {"dit.low.0", "dit.low.1"}, "decoder": {"decoder"}}[
        module
    ]
