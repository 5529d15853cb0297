"""The user's cache of tiny model files: made on first use, checked on every use, rebuilt when damaged or old."""

import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

from sdsage.errors import BadRequest, OutputError
from sdsage.tiny.files import FILES, ModelFile
from sdsage.tiny.packed import PackedFile

_seen: dict[Path, tuple[str, int, int, int, int]] = {}  # whole files, and what they looked like then


def cache_dir() -> Path:
    """SDSAGE_CACHE_DIR, else XDG_CACHE_HOME/sdsage, else ~/.cache/sdsage; not created here.

    Raises:
        OutputError: neither variable is set and the user has no home folder.
    """
    if own := os.environ.get("SDSAGE_CACHE_DIR"):
        return Path(own).absolute()
    if (xdg := os.environ.get("XDG_CACHE_HOME")) and os.path.isabs(xdg):  # relative ones are to be ignored
        return Path(xdg) / "sdsage"
    try:
        return Path.home() / ".cache" / "sdsage"
    except RuntimeError:
        raise OutputError("this user has no home folder for a cache: set SDSAGE_CACHE_DIR to a folder") from None


def ensure(names: Iterable[str], on_write: Callable[[Path], None] | None = None) -> dict[str, Path]:
    """Paths of the named tiny model files, whole and current.

    Several processes may call this at once: each sees a whole file under the final name, or none.

    Args:
        names: keys of `sdsage.tiny.FILES`.
        on_write: called before a file is made, which takes up to a second.

    Raises:
        BadRequest: there is no tiny model of that name.
        OutputError: the cache folder can't be written. ModelError: this installation is damaged.
    """
    folder = cache_dir() / "tiny"
    paths = {}
    for name in names:
        if name not in FILES:
            raise BadRequest(f"no tiny model file is called {name!r}; there are {', '.join(FILES)}")
        paths[name] = folder / name
        try:
            if not _is_whole(FILES[name], paths[name]):
                if on_write is not None:
                    on_write(paths[name])
                _write(paths[name], FILES[name].build())
        except OSError as e:
            raise OutputError(
                f"the tiny model file {paths[name]} can't be made: {e.strerror or e}; "
                "set SDSAGE_CACHE_DIR to a folder that can be written"
            ) from e
    return paths


def _is_whole(file: ModelFile | PackedFile, path: Path) -> bool:
    try:
        found = os.stat(path)
        stamp = (file.name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        if _seen.get(path) != stamp:  # else this process has read it already
            if not file.is_whole(path.read_bytes()):
                return False
            _seen[path] = stamp
        return True
    except FileNotFoundError:
        return False


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
