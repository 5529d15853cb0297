"""Number formats: how many bytes so many values take."""

# GGUF's number of a type: name, values a block, bytes a block.
GGML = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 36),
    10: ("q2_K", 256, 84),
    11: ("q3_K", 256, 110),
    12: ("q4_K", 256, 144),
    13: ("q5_K", 256, 176),
    14: ("q6_K", 256, 210),
    15: ("q8_K", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
}

# safetensors' name of a type: our name, bytes a value.
SAFETENSORS = {
    "F64": ("f64", 8),
    "F32": ("f32", 4),
    "F16": ("f16", 2),
    "BF16": ("bf16", 2),
    "F8_E4M3": ("f8_e4m3", 1),
    "F8_E5M2": ("f8_e5m2", 1),
    "F8_E8M0": ("f8_e8m0", 1),
    "I64": ("i64", 8),
    "U64": ("u64", 8),
    "I32": ("i32", 4),
    "U32": ("u32", 4),
    "I16": ("i16", 2),
    "U16": ("u16", 2),
    "I8": ("i8", 1),
    "U8": ("u8", 1),
    "BOOL": ("bool", 1),
    "C64": ("c64", 8),
}

# Formats that the engine widens while it loads: bytes a value in memory. The others stay as they are.
WIDENED = {"f8_e4m3": 2, "f8_e5m2": 2, "f64": 4, "i64": 4}


def stored_bytes(type_name: str, values: int) -> int:
    """Bytes that `values` values take in a format of GGUF."""
    block, size = _BY_NAME[type_name]
    return -(-values // block) * size


_BY_NAME = {name: (block, size) for name, block, size in GGML.values()}
