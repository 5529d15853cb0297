"""One attention alone, computed by the engine and compared with float64: of `sdsage verify` and `sdsage bench attn`.

Names and shapes are here, which a help text needs; the rest is imported where it is used.
"""

from typing import NamedTuple

GGML = ("plain", "flash")  # mul_mat, soft_max, mul_mat; and ggml_flash_attn_ext
SAGE = ("fp16", "fp8", "fp8++", "hopper")
METHODS = GGML + SAGE
DEFAULT_SEED = 42


class Shape(NamedTuple):
    """Of one attention in a model; `what` says where it is from."""

    batch: int
    heads: int
    lq: int
    lk: int
    head_dim: int
    what: str


# Of the models' largest attention unless their name says otherwise.
SHAPES = {
    "headline": Shape(2, 24, 4096, 4096, 128, "the shape of the SageAttention papers"),
    "sd1.5": Shape(1, 8, 4096, 4096, 40, "512x512"),
    "sdxl": Shape(1, 10, 4096, 4096, 64, "1024x1024"),
    "flux": Shape(1, 24, 4608, 4608, 128, "1024x1024 and 512 text tokens"),
    "qwen-image": Shape(1, 24, 7017, 7017, 128, "1328x1328 and 128 text tokens"),
    "wan-1.3b": Shape(1, 12, 32760, 32760, 128, "832x480, 81 frames"),
    "wan-14b-33": Shape(1, 40, 14040, 14040, 128, "832x480, 33 frames"),
    "wan-14b": Shape(1, 40, 32760, 32760, 128, "832x480, 81 frames"),
    "wan-14b-cross": Shape(1, 40, 32760, 512, 128, "832x480, 81 frames, to the text"),
    "wan-14b-720p": Shape(1, 40, 75600, 75600, 128, "1280x720, 81 frames"),
    "tiny": Shape(1, 4, 512, 512, 64, "no model's: for a CPU"),
}
