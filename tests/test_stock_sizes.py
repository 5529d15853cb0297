"""Stock model files resolve to the sizes that upstream hard-codes: sparse files with the headers of the public checkpoints.

The expected constants are upstream's (src/wan.hpp and src/t5.hpp of the pinned version, without our edits).
"""

import json
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import BUILD

Shapes = dict[str, tuple[int, ...]]

# version numbers of upstream's SDVersion enum
WAN2, WAN2_2_I2V, WAN2_2_TI2V = 21, 22, 23


def linear(name: str, n_in: int, n_out: int, bias: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (n_out, n_in)
    if bias:
        yield f"{name}.bias", (n_out,)


def wan_block(block: str, dim: int, ffn: int, image: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{block}.modulation", (1, 6, dim)
    for attn in ("self_attn", "cross_attn"):
        for p in "qkvo":
            yield from linear(f"{block}.{attn}.{p}", dim, dim)
        for norm in ("norm_q", "norm_k"):
            yield f"{block}.{attn}.{norm}.weight", (dim,)
    if image:
        for p in ("k_img", "v_img"):
            yield from linear(f"{block}.cross_attn.{p}", dim, dim)
        yield f"{block}.cross_attn.norm_k_img.weight", (dim,)
    yield f"{block}.norm3.weight", (dim,)
    yield f"{block}.norm3.bias", (dim,)
    yield from linear(f"{block}.ffn.0", dim, ffn)
    yield from linear(f"{block}.ffn.2", ffn, dim)


def wan(
    dim: int, ffn: int, layers: int, n_in: int, n_out: int, *, image: bool = False, flf: bool = False, vace: int = 0
) -> Shapes:
    shapes: Shapes = {"patch_embedding.weight": (dim, n_in, 1, 2, 2), "patch_embedding.bias": (dim,)}
    for name, a, b in (("text_embedding.0", 4096, dim), ("text_embedding.2", dim, dim), ("time_embedding.0", 256, dim)):
        shapes.update(linear(name, a, b))
    shapes.update(linear("time_embedding.2", dim, dim))
    shapes.update(linear("time_projection.1", dim, 6 * dim))
    for i in range(layers):
        shapes.update(wan_block(f"blocks.{i}", dim, ffn, image))
    shapes["head.modulation"] = (1, 2, dim)
    shapes.update(linear("head.head", dim, 4 * n_out))
    if image:
        shapes.update({"img_emb.proj.0.weight": (1280,), "img_emb.proj.0.bias": (1280,)})
        shapes.update(linear("img_emb.proj.1", 1280, 1280))
        shapes.update(linear("img_emb.proj.3", 1280, dim))
        shapes.update({"img_emb.proj.4.weight": (dim,), "img_emb.proj.4.bias": (dim,)})
    if flf:
        shapes["img_emb.emb_pos"] = (1, 514, 1280)
    if vace:
        shapes.update({"vace_patch_embedding.weight": (dim, 96, 1, 2, 2), "vace_patch_embedding.bias": (dim,)})
        for i in range(vace):
            shapes.update(wan_block(f"vace_blocks.{i}", dim, ffn, False))
            shapes.update(linear(f"vace_blocks.{i}.after_proj", dim, dim))
        shapes.update(linear("vace_blocks.0.before_proj", dim, dim))
    return shapes


def t5(vocab: int, umt5: bool) -> Shapes:
    shapes: Shapes = {"shared.weight": (vocab, 4096), "encoder.final_layer_norm.weight": (4096,)}
    for i in range(24):
        block = f"encoder.block.{i}.layer"
        for p in "qkvo":
            shapes[f"{block}.0.SelfAttention.{p}.weight"] = (4096, 4096)
        if umt5 or i == 0:  # umt5 has a position bias in every block
            shapes[f"{block}.0.SelfAttention.relative_attention_bias.weight"] = (32, 64)
        shapes[f"{block}.0.layer_norm.weight"] = (4096,)
        shapes[f"{block}.1.DenseReluDense.wi_0.weight"] = (10240, 4096)
        shapes[f"{block}.1.DenseReluDense.wi_1.weight"] = (10240, 4096)
        shapes[f"{block}.1.DenseReluDense.wo.weight"] = (4096, 10240)
        shapes[f"{block}.1.layer_norm.weight"] = (4096,)
    return shapes


def wan_vae(dim: int, dec_dim: int, z: int) -> Shapes:
    """The stock VAE, from the generator of the tiny one: the layout is the same, and the engine compares every tensor."""
    from sdsage.tiny import wan_vae as tiny

    kind = tiny.WAN22 if z == 48 else tiny.WAN21
    return {t.name: t.shape for t in tiny.wan_vae(replace(kind, width=dim, decoder_width=dec_dim))}


def write_sparse(path: Path, shapes: Shapes) -> None:
    """A safetensors file of F16 whose weights are a hole."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2
        for n in shape:
            size *= n
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + offset)


WAN_EXPECTED = {
    "t2v-1.3B": (
        wan(1536, 8960, 30, 16, 16),
        f"version {WAN2} desc Wan2.1-T2V-1.3B type t2v in 16 dim 1536 ffn 8960 freq 256 text 4096 out 16 heads 12 layers 30 vace 0",
    ),
    "t2v-14B": (
        wan(5120, 13824, 40, 16, 16),
        f"version {WAN2} desc Wan2.x-T2V-14B type t2v in 16 dim 5120 ffn 13824 freq 256 text 4096 out 16 heads 40 layers 40 vace 0",
    ),
    "2.1-i2v-14B": (
        wan(5120, 13824, 40, 36, 16, image=True),
        f"version {WAN2} desc Wan2.1-I2V-14B type i2v in 36 dim 5120 ffn 13824 freq 256 text 4096 out 16 heads 40 layers 40 vace 0",
    ),
    "2.1-flf2v-14B": (
        wan(5120, 13824, 40, 36, 16, image=True, flf=True),
        f"version {WAN2} desc Wan2.1-FLF2V-14B type i2v in 36 dim 5120 ffn 13824 freq 256 text 4096 out 16 heads 40 layers 40 vace 0",
    ),
    "2.2-i2v-14B": (
        wan(5120, 13824, 40, 36, 16),
        f"version {WAN2_2_I2V} desc Wan2.2-I2V-14B type t2v in 36 dim 5120 ffn 13824 freq 256 text 4096 out 16 heads 40 layers 40",
    ),
    "2.2-ti2v-5B": (
        wan(3072, 14336, 30, 48, 48),
        f"version {WAN2_2_TI2V} desc Wan2.2-TI2V-5B type t2v in 48 dim 3072 ffn 14336 freq 256 text 4096 out 48 heads 24 layers 30",
    ),
    "vace-1.3B": (
        wan(1536, 8960, 30, 16, 16, vace=15),
        f"version {WAN2} desc Wan2.1-VACE-1.3B type t2v in 16 dim 1536 ffn 8960 freq 256 text 4096 out 16 heads 12 layers 30"
        " vace 15 vace_in 96",
    ),
    "vace-14B": (
        wan(5120, 13824, 40, 16, 16, vace=8),
        f"version {WAN2} desc Wan2.x-VACE-14B type t2v in 16 dim 5120 ffn 13824 freq 256 text 4096 out 16 heads 40 layers 40"
        " vace 8 vace_in 96",
    ),
}


def probe(kind: str, path: Path, program: Path = BUILD / "bin" / "probe_sizes") -> list[str]:
    done = subprocess.run([program, kind, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", WAN_EXPECTED)
def test_wan(name: str, tmp_path: Path) -> None:
    shapes, expected = WAN_EXPECTED[name]
    write_sparse(tmp_path / "wan.safetensors", shapes)
    first, last = probe("wan", tmp_path / "wan.safetensors")
    assert first.startswith(expected)
    assert last == f"{len(shapes)} tensors match"


@pytest.mark.parametrize(("kind", "vocab"), [("umt5", 256384), ("t5", 32128)])
def test_t5_xxl(kind: str, vocab: int, tmp_path: Path) -> None:
    shapes = t5(vocab, kind == "umt5")
    write_sparse(tmp_path / "t5.safetensors", shapes)
    first, last = probe(kind, tmp_path / "t5.safetensors")
    assert first == f"layers 24 dim 4096 ff 10240 heads 64 vocab {vocab}"
    assert last == f"{len(shapes)} tensors match"


@pytest.mark.parametrize(("dim", "dec_dim", "z"), [(96, 96, 16), (160, 256, 48)])
def test_wan_vae(dim: int, dec_dim: int, z: int, tmp_path: Path) -> None:
    shapes = wan_vae(dim, dec_dim, z)
    write_sparse(tmp_path / "vae.safetensors", shapes)
    first, last = probe("vae", tmp_path / "vae.safetensors")
    assert first == f"dim {dim} dec_dim {dec_dim} z {z}"
    assert last == f"{len(shapes)} tensors match"


def test_a_wrong_width_is_found(tmp_path: Path) -> None:
    """The probe compares every tensor: one that does not fit is named."""
    shapes = wan(1536, 8960, 30, 16, 16)
    shapes["blocks.3.ffn.2.weight"] = (1536, 8959)
    write_sparse(tmp_path / "wan.safetensors", shapes)
    done = subprocess.run(
        [BUILD / "bin" / "probe_sizes", "wan", tmp_path / "wan.safetensors"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "blocks.3.ffn.2.weight" in done.stdout
