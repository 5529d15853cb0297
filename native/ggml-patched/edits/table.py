"""What an edit and a group of edits are, and the files of upstream that are edited most."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    file: str
    where: str
    anchor: str
    text: str


@dataclass(frozen=True)
class Group:
    name: str
    why: str
    guard: str
    drop: str
    edits: tuple[Edit, ...]


SD = "src/stable-diffusion.cpp"
HEADER = "include/stable-diffusion.h"
EXTEND = "src/ggml_extend.hpp"
CUDA = "ggml/src/ggml-cuda/ggml-cuda.cu"
COMMON = "examples/common/common.cpp"
MODEL = "src/model.cpp"
WAN = "src/wan.hpp"
CLIP = "src/clip.hpp"
UTIL = "src/util.cpp"
CLI = "examples/cli/main.cpp"
SERVER = "examples/server/main.cpp"
