"""GGUF version 3: header and layout. Values are little-endian, tensor data is aligned to 32 bytes."""

from collections.abc import Mapping, Sequence
from struct import pack

from sdsage.tiny.tensors import Tensor

ALIGNMENT = 32  # the format's default
_UINT32, _STRING = 4, 8  # types of metadata values
_VERSION = 3


def header(tensors: Sequence[Tensor], metadata: Mapping[str, str | int]) -> bytes:
    """All that comes before the tensor data, padded to the alignment.

    `metadata` holds strings and unsigned 32-bit integers; keys are lower-case words with dots between them.
    """
    parts = [b"GGUF", pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        if isinstance(value, str):
            parts.append(_string(key) + pack("<I", _STRING) + _string(value))
        else:
            parts.append(_string(key) + pack("<II", _UINT32, value))
    offset = 0
    for t in tensors:
        if not 1 <= len(t.shape) <= 4:
            raise ValueError(f"{t.name}: GGUF holds tensors of 1 to 4 dimensions, this one has {len(t.shape)}")
        parts.append(_string(t.name) + pack("<I", len(t.shape)))
        parts.append(pack(f"<{len(t.shape)}Q", *reversed(t.shape)))  # the fastest dimension comes first
        parts.append(pack("<IQ", t.dtype.ggml, offset))
        offset += padded(t.nbytes)
    return pad(b"".join(parts))


def padded(n: int) -> int:
    """n rounded up to the alignment."""
    return -(-n // ALIGNMENT) * ALIGNMENT


def pad(data: bytes) -> bytes:
    """Data with zeros up to the alignment; so is the data of each tensor stored."""
    return data + bytes(padded(len(data)) - len(data))


def _string(text: str) -> bytes:
    raw = text.encode()
    return pack("<Q", len(raw)) + raw
