"""The trained models' files, which the package carries in xz archives; tools/tiny_model/pack.py writes these.

An archive holds one file, or several behind each other: experts with and without a first frame are nearly the same
bytes, so the second of them takes next to no room.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from sdsage.errors import ModelError

FOLDER = Path(__file__).parent / "trained"
TABLE = FOLDER / "files.json"


@dataclass(frozen=True)
class PackedFile:
    """One file, and where it lies: `offset` and `size` are in the bytes that `archive` unpacks to."""

    name: str
    archive: str
    offset: int
    size: int
    sha256: str

    def build(self) -> bytes:
        """The whole file.

        Raises:
            ModelError: the archive is damaged.
        """
        from lzma import LZMAError, decompress  # a Python may lack it; listing presets needs none

        path = FOLDER / self.archive
        try:
            content = decompress(path.read_bytes())[self.offset : self.offset + self.size]
        except (LZMAError, EOFError, FileNotFoundError):
            content = b""
        if not self.is_whole(content):
            raise ModelError(f"{path} is damaged or missing: install sdsage again")
        return content

    def is_whole(self, content: bytes) -> bool:
        """True if `content` is what `build` gives."""
        return len(content) == self.size and hashlib.sha256(content).hexdigest() == self.sha256


def files() -> dict[str, PackedFile]:
    """All files, under names with a folder of their own."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return {file.name: file for file in (PackedFile(f"trained/{name}", **entry) for name, entry in table.items())}
