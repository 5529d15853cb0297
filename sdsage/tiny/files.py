"""The tiny model files. Random ones: which network, which seed, which container; and their exact bytes."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from sdsage.tiny import gguf, packed, safetensors
from sdsage.tiny.clip import clip_l
from sdsage.tiny.flux import flux
from sdsage.tiny.taesd import taesd
from sdsage.tiny.tensors import GENERATOR, Tensor
from sdsage.tiny.umt5 import umt5
from sdsage.tiny.wan import wan
from sdsage.tiny.wan_vae import WAN21, WAN22, wan_vae


@dataclass(frozen=True)
class ModelFile:
    """One file of random weights. It carries digests of its description and of its data, so damage and age show.

    Attributes:
        name: the extension tells the container.
        architecture: GGUF's `general.architecture`.
        tensors: makes the description of the network.
        seed: two files with the same network and different seeds differ in every random value.
    """

    name: str
    architecture: str
    tensors: Callable[[], list[Tensor]]
    seed: int = 0

    def build(self) -> bytes:
        """The whole file."""
        tensors = self.tensors()
        data = b"".join(self._stored(t.data(self.seed)) for t in tensors)
        return self._header(tensors, data) + data

    def is_whole(self, content: bytes) -> bool:
        """True if `content` is what `build` gives; takes milliseconds where `build` takes a second."""
        tensors = self.tensors()
        start = len(self._header(tensors, b""))  # digests have a fixed length
        if len(content) != start + sum(self._size(t) for t in tensors):
            return False
        view = memoryview(content)
        return view[:start] == self._header(tensors, view[start:])

    @property
    def _is_gguf(self) -> bool:
        return self.name.endswith(".gguf")

    def _size(self, tensor: Tensor) -> int:
        return gguf.padded(tensor.nbytes) if self._is_gguf else tensor.nbytes

    def _stored(self, data: bytes) -> bytes:
        return gguf.pad(data) if self._is_gguf else data

    def _header(self, tensors: list[Tensor], data: bytes | memoryview) -> bytes:
        described = [(t.name, t.shape, t.dtype.name, repr(t.fill)) for t in tensors]
        recipe = json.dumps([GENERATOR, self.seed, described]).encode()
        digests = {
            "sdsage.recipe": hashlib.sha256(recipe).hexdigest(),
            "sdsage.data": hashlib.sha256(data).hexdigest(),
        }
        if self._is_gguf:
            general: dict[str, str | int] = {
                "general.architecture": self.architecture,
                "general.name": f"sdsage tiny random weights: {self.name}",
                "general.quantization_version": 2,
            }
            return gguf.header(tensors, general | digests)
        return safetensors.header(tensors, digests)


# Seeds of the autoencoders give colourful pictures; the others only have to differ.
RANDOM = {
    file.name: file
    for file in (
        ModelFile("wan-t2v-low.gguf", "wan", lambda: wan(16, 16), seed=0),
        ModelFile("wan-t2v-high.gguf", "wan", lambda: wan(16, 16), seed=1),
        ModelFile("wan-i2v-low.gguf", "wan", lambda: wan(36, 16), seed=2),
        ModelFile("wan-i2v-high.gguf", "wan", lambda: wan(36, 16), seed=3),
        ModelFile("wan-ti2v.gguf", "wan", lambda: wan(48, 48), seed=4),
        ModelFile("umt5.gguf", "t5encoder", lambda: umt5()),
        ModelFile("wan21-vae.safetensors", "", lambda: wan_vae(WAN21), seed=8),
        ModelFile("wan22-vae.safetensors", "", lambda: wan_vae(WAN22), seed=1),
        ModelFile("flux.gguf", "flux", flux),
        ModelFile("clip-l.safetensors", "", clip_l),
        ModelFile("taesd.safetensors", "", taesd, seed=4),
    )
}

FILES: dict[str, ModelFile | packed.PackedFile] = {**RANDOM, **packed.files()}
