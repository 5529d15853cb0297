"""safetensors: a JSON header, then the tensor data without gaps, little-endian."""

import json
from collections.abc import Mapping, Sequence
from struct import pack

from sdsage.tiny.tensors import Tensor


def header(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    """All that comes before the tensor data; padded with spaces, so that the data starts at a multiple of 8 bytes."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for t in tensors:
        if not t.dtype.safetensors:
            raise ValueError(f"{t.name}: safetensors has no type {t.dtype.name}; GGUF has")
        end = offset + t.nbytes
        entries[t.name] = {"dtype": t.dtype.safetensors, "shape": t.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return pack("<Q", len(text)) + text
