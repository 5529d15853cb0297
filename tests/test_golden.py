"""The engine's modules against what PyTorch made of the same weights and inputs: tools/tiny_model/golden.py."""

import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

sys.path.append(str(ROOT))  # at the end: the package under test stays the one that is installed

from tools.tiny_model import golden

FILE = ROOT / "tests" / "golden" / "tiny.npz"


@pytest.fixture(scope="module")
def expected() -> golden.Values:
    assert FILE.stat().st_size < 1e6
    return dict(np.load(FILE))


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_the_engine_agrees_with_torch(expected: golden.Values, kind: str, tmp_path: Path) -> None:
    found = golden.check(expected, golden.random(), kind, tmp_path)
    assert {d.module.split(".")[0] for d in found} == {"text", "dit", "noise", "encoder", "decoder"}
    assert golden.too_far(found, golden.RANDOM[kind]) == []
    assert all(d.seen > 0.95 for d in found)


WRONG = {
    "text": ("text", "blk.1.attn_rel_b.weight"),  # as if only the first layer knew distances
    "dit": ("low", "blocks.1.self_attn.norm_k.weight"),
    "decoder": ("vae", "decoder.upsamples.3.time_conv.bias"),
}


@pytest.mark.parametrize("module", WRONG)
def test_a_wrong_layer_is_noticed(expected: golden.Values, module: str, tmp_path: Path) -> None:
    part, tensor = WRONG[module]
    weights = golden.random()
    weights[part][tensor] = np.full_like(weights[part][tensor], 0.3)
    found = golden.check(expected, weights, "f32", tmp_path, only=(module,))
    wrong = [d for d in found if golden.too_far([d], golden.RANDOM["f32"])]
    assert {d.module for d in wrong} == {"text": {"text"}, "dit": {"dit.low.0", "dit.low.1"}, "decoder": {"decoder"}}[
        module
    ]
