"""Attention as the engine's graphs build it against exact attention, by native/tests/probe_attention.cpp.

On the CPU, or where SDSAGE_PROBE_DEVICE says: our edits of FlashAttention's path, and SageAttention's nodes.
"""

import json
import os
import subprocess
from typing import Any

import pytest
from conftest import BUILD

from sdsage._attention.accuracy import LIMITS

DEVICE = os.environ.get("SDSAGE_PROBE_DEVICE", "cpu")
# of few outputs, some of them masked
LIMIT = {
    "ordinary": LIMITS["plain"].rel_l2,
    "flash": 3e-3,
    "fp16": LIMITS["fp16"].rel_l2,
    "fp8": 0.045,
    "fp8++": 0.045,
    "hopper": 0.045,
}


def probe(
    method: str,
    layout: str = "rope",
    head_dim: int = 128,
    heads: int = 2,
    kv_heads: int = 2,
    lq: int = 96,
    lk: int = 96,
    batch: int = 1,
    mask: str = "none",
    kv_scale: float = 1.0,
    value: float = 1.0,
) -> Any:
    words = [DEVICE, method, layout, head_dim, heads, kv_heads, lq, lk, batch, mask, kv_scale, value]
    command = [str(BUILD / "bin" / "probe_attention"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("layout", ["rope", "rows"])
@pytest.mark.parametrize("method", ["ordinary", "flash", "fp16", "fp8", "fp8++", "hopper"])
@pytest.mark.parametrize(
    "shape",
    [
        {"lk": 256},
        {"lq": 70, "lk": 513},
        {"batch": 2, "lq": 33, "lk": 77},
        {"heads": 4, "kv_heads": 2},
        {"mask": "key", "lk": 256},
        {"mask": "key", "lk": 200, "head_dim": 64},
    ],
    ids=str,
)
def test_exact(method: str, layout: str, shape: dict[str, Any]) -> None:
    """Masked FlashAttention was wrong upstream, a batch above 1 aborted."""
    found = probe(method, layout, **shape)
    assert found["kernel"] == method
    assert found["why"] == ""
    assert found["count"] == 1
    assert found["error"] < LIMIT[method]


@pytest.mark.parametrize("lk", [200, 256])
def test_full_mask(lk: int) -> None:
    """One value for every query and key."""
    assert probe("flash", mask="full", lk=lk)["error"] < LIMIT["flash"]


def test_flash_attention_builds_no_mask() -> None:
    """A key more than a multiple of 256 cost a mask of all queries times all keys: 2048 * 1280 * (4 + 2) bytes here."""
    aligned = probe("flash", heads=1, kv_heads=1, lq=2048, lk=1024)["compute_bytes"]
    odd = probe("flash", heads=1, kv_heads=1, lq=2048, lk=1025)["compute_bytes"]
    assert odd < aligned + 100_000


@pytest.mark.parametrize(
    ("shape", "kernel", "why"),
    [
        ({"head_dim": 256}, "flash", "head_dim above 128"),
        ({"mask": "full"}, "flash", "not one number per key"),
        ({"head_dim": 256, "batch": 2}, "flash", "head_dim above 128"),
        # ggml's FlashAttention has 160 on the CPU alone
        ({"head_dim": 160}, "flash" if DEVICE == "cpu" else "ordinary", "head_dim above 128"),
    ],
    ids=str,
)
def test_fallback_is_counted_with_its_reason(shape: dict[str, Any], kernel: str, why: str) -> None:
    found = probe("fp16", **shape)
    assert found["kernel"] == kernel
    assert why in found["why"]
    assert found["error"] < LIMIT[kernel]


@pytest.mark.parametrize("method", ["fp16", "fp8", "fp8++", "hopper"])
def test_kv_scale_has_no_part(method: str) -> None:
    """Qwen-Image and Z-Image give 1/128 against the overflow of FP16: V of 1e5 is beyond its range."""
    plain = probe(method, value=1e5)
    assert plain["error"] < LIMIT[method]
    assert probe(method, value=1e5, kv_scale=1 / 128)["error"] == plain["error"]
