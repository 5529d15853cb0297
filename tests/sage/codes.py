"""What a run quantized, read back from its workspace, in the form of reference.py: codes and scales by row and channel.

sage_cuda.h says where they lie and how (`sage_attn_layout`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from binding import Array, Case, check, ffi, real_device, sage
from reference import e4m3_value

KEYS = 64  # of a tile of V; hopper has twice as many
# The key at each place of a group of 16 in E4M3 V.
PERMUTED = np.array([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])
E4M3 = np.array([e4m3_value(code) for code in range(256)], np.float32)


@dataclass(frozen=True)
class Codes:
    """Codes [B, heads, rows, D] as float32, with the padding; scales [B, heads, rows], of v [B, kv_heads, D]."""

    q: Array
    q_scale: Array
    k: Array
    k_scale: Array
    v: Array
    v_scale: Array
    k_mean: Array  # [B, kv_heads, D]
    v_mean: Array


def workspace_layout(desc: Any, on: Any = None) -> Any:
    """sage_attn_layout of a description."""
    layout = ffi.new("sage_attn_layout *")
    layout.struct_size = ffi.sizeof("sage_attn_layout")
    check(sage().sage_attn_workspace_layout(desc, real_device() if on is None else on, layout))
    return layout


def straightened(rows: Array) -> Array:
    """Bytes [.., rows, 128 or 64] with their 16-byte chunks in order."""
    *outer, count, width = rows.shape
    chunks = rows.reshape(*outer, count, width // 16, 16)
    row = np.arange(count)[:, None]
    at = np.arange(width // 16)[None] ^ (row % 8 if width == 128 else row // 2 % 4)
    return np.asarray(np.take_along_axis(chunks, at.reshape(*[1] * len(outer), *at.shape, 1), -2).reshape(rows.shape))


def read_codes(case: Case) -> Codes:
    """After a run of `case`."""
    layout, memory = workspace_layout(case.desc), case.workspace.read()
    batch, heads, kv_heads = case.desc.batch, case.desc.heads, case.desc.kv_heads
    dim, q_rows, k_rows = layout.padded_dim, layout.q_rows, layout.k_rows

    def part(at: int, kind: Any, *shape: int) -> Array:
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        return memory[at : at + size].view(kind).reshape(shape)

    q = straightened(part(layout.q_codes, np.uint8, batch, heads, q_rows, dim)).view(np.int8)
    k = straightened(part(layout.k_codes, np.uint8, batch, kv_heads, k_rows, dim)).view(np.int8)
    q_scale = part(layout.q_scales, np.float32, batch, heads, q_rows // 32, 8)
    k_scale = part(layout.k_scales, np.float32, batch, kv_heads, k_rows // 64, 4)
    if case.choice.kernel == "fp16":
        tiles = part(layout.v_codes, np.uint8, batch, kv_heads, k_rows // KEYS, dim // 64, KEYS, 128)
        v = straightened(tiles).view(np.float16).swapaxes(3, 4).reshape(batch, kv_heads, k_rows, dim).astype(np.float32)
    else:
        keys = 128 if case.choice.kernel == "hopper" else KEYS
        tiles = part(layout.v_codes, np.uint8, batch, kv_heads, k_rows // keys, dim, keys)
        by_place = E4M3[straightened(tiles)].swapaxes(3, 4).reshape(batch, kv_heads, k_rows // 16, 16, dim)
        v = np.empty_like(by_place)
        v[:, :, :, PERMUTED] = by_place
        v = v.reshape(batch, kv_heads, k_rows, dim)
    return Codes(
        q.astype(np.float32),
        np.tile(q_scale, (1, 1, 1, 4)).reshape(batch, heads, q_rows),
        k.astype(np.float32),
        np.tile(np.repeat(k_scale, 2, -1), (1, 1, 1, 8)).reshape(batch, kv_heads, k_rows),
        v,
        part(layout.v_scales, np.float32, batch, kv_heads, dim),
        part(layout.k_mean, np.float32, batch, kv_heads, dim),
        part(layout.v_mean, np.float32, batch, kv_heads, dim),
    )
