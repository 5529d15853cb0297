"""The tiny model's networks against public implementations; needs torch, diffusers and transformers."""

import sys

import pytest
from conftest import ROOT

for package in ("torch", "diffusers", "transformers"):
    pytest.importorskip(package)

sys.path.append(str(ROOT))  # at the end: the package under test stays the one that is installed

from tools.tiny_model import golden, public  # noqa: E402


def test_the_networks_are_the_public_ones() -> None:
    found = list(public.networks(golden.random()))
    assert {d.module for d in found} == {"text", "dit.low", "dit.high", "encoder", "decoder"}
    assert all(d.largest <= public.LIMIT for d in found), found
