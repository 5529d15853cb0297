"""Packs trained weights into the package: python -m tools.tiny_model.pack STATE

Exports the model files, packs them into sdsage/tiny/trained/*.xz and writes the table that sdsage.tiny reads.
"""

import argparse
import hashlib
import json
import lzma
from collections.abc import Mapping
from pathlib import Path

from sdsage.tiny import packed
from sdsage.tiny.tensors import DType
from tools.tiny_model import export
from tools.tiny_model.evaluate import finished

ARCHIVES = {  # what is alike lies behind each other, nearer than the dictionary is long
    "experts.xz": (
        "wan-t2v-high-q8_0.gguf",
        "wan-i2v-high-q8_0.gguf",
        "wan-t2v-low-q8_0.gguf",
        "wan-i2v-low-q8_0.gguf",
    ),
    "umt5.xz": ("umt5-q8_0.gguf",),
    "vae.xz": ("wan21-vae.safetensors",),
}
PARTS = ("vae", "text", "low", "high")
LIMIT = 12_000_000  # bytes of all archives
# Most numbers have two bytes: 2 % less than with the defaults.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 24, "lc": 0, "lp": 1, "pb": 1}]


def pack(files: Mapping[str, bytes], folder: Path) -> int:
    """Writes archives and table; the archives' bytes. Older archives go.

    Raises:
        ValueError: the archives are too large for the package; nothing was written.
    """
    table, archives = {}, {}
    for archive, names in ARCHIVES.items():
        offset = 0
        for name in names:
            digest = hashlib.sha256(files[name]).hexdigest()
            table[name] = {"archive": archive, "offset": offset, "size": len(files[name]), "sha256": digest}
            offset += len(files[name])
        whole = b"".join(files[name] for name in names)
        archives[archive] = lzma.compress(whole, format=lzma.FORMAT_XZ, filters=FILTERS)
    total = sum(map(len, archives.values()))
    if total > LIMIT:
        raise ValueError(f"the archives have {total} bytes, and the package takes {LIMIT}: fewer --vae-bits help")
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.xz"):
        old.unlink()
    for name, content in archives.items():
        (folder / name).write_bytes(content)
    (folder / packed.TABLE.name).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("state", type=Path, help="folder with the finished weights of train.py")
    parser.add_argument("--vae-bits", type=int, default=6, help="bits of mantissa in the VAE's weights, 4 to 10")
    a = parser.parse_args()
    if not 4 <= a.vae_bits <= 10:
        parser.error(f"--vae-bits is {a.vae_bits}: 4 to 10 are possible")
    absent = [name for name in PARTS if not finished(a.state, name)]
    if absent:
        parser.error(f"{a.state} has no finished {', '.join(absent)}: train.py makes them")
    try:
        total = pack(dict(export.files(a.state, DType.Q8_0, a.vae_bits)), packed.FOLDER)
    except ValueError as error:
        parser.error(str(error))
    print(f"{packed.FOLDER}: {total / 1e6:.2f} MB; git add it")


if __name__ == "__main__":
    main()
