"""Model files of a hub: where they are on this machine, and fetching them through huggingface_hub (extra `hub`).

Files live in the hub's own cache (HF_HOME, HF_HUB_CACHE), where other programs find them too. Its own download begins
again after an interruption; ours goes on, from a part beside the place where the whole file will be.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from sdsage.errors import BadRequest, MissingExtra, OutputError, SdsageError

_CHUNK = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MARGIN = 100 << 20  # bytes that stay free
Note = Callable[[str], None]


@dataclass(frozen=True)
class HubFile:
    """A file of a repository.

    Attributes:
        repo: "owner/name"; file: path inside it.
        size: in bytes, where it is known without asking.
    """

    repo: str
    file: str
    size: int | None = None

    @property
    def name(self) -> str:
        """The file's name without folders."""
        return self.file.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.file} of {self.repo}"


class Offer(NamedTuple):
    """What the hub says of a file, and how much of it is here."""

    file: HubFile
    size: int
    digest: str  # SHA-256, or Git's SHA-1 of a small file
    blob: Path  # where the content will be
    have: int


def hub() -> ModuleType:
    """huggingface_hub. Raises MissingExtra without it."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtra(
            f"files of a hub need huggingface_hub ({error}): run pip install 'sdsage[hub]', or name your own files "
            "with --diffusion-model, --vae and so on"
        ) from error
    return huggingface_hub


def local(file: HubFile) -> Path | None:
    """The file in the cache, or None. Asks nobody. Raises MissingExtra without huggingface_hub."""
    found = hub().try_to_load_from_cache(file.repo, file.file)
    return Path(found) if isinstance(found, str) else None


def cache_folder() -> Path:
    """The hub's cache of models."""
    hub()
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def pull(files: Sequence[HubFile], note: Note, *, progress: bool) -> list[Path]:
    """Fetches the files that are missing or damaged, and checks the hash of all; what is fetched in part goes on.

    Args:
        note: hears what is done, one sentence each.
        progress: whether bars may be shown on a terminal.

    Raises:
        BadRequest: the hub has no such file, or does not give it to this user. OutputError: the disk is too full.
        SdsageError: the hub can't be reached, or sent other bytes than it announced.
    """
    module = hub()
    if not progress:
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
    with _readable_errors():
        offers = [_ask(module, file) for file in files]
    todo = [offer for offer in offers if not _is_whole(offer, note)]
    _check_space(todo)
    for offer in todo:
        _fetch(module, offer, note)
    with _readable_errors():
        return [Path(module.hf_hub_download(file.repo, file.file)) for file in files]


def _ask(module: ModuleType, file: HubFile) -> Offer:
    from huggingface_hub.file_download import repo_folder_name

    found = module.get_hf_file_metadata(module.hf_hub_url(file.repo, file.file))
    if found.etag is None or found.size is None or not re.fullmatch(r"[0-9A-Za-z_-]+", found.etag):
        raise SdsageError(f"the hub does not tell size and hash of {file}")
    blob = cache_folder() / repo_folder_name(repo_id=file.repo, repo_type="model") / "blobs" / found.etag
    part = _part(blob)
    have = blob.stat().st_size if blob.is_file() else part.stat().st_size if part.is_file() else 0
    return Offer(file, int(found.size), found.etag, blob, have)


def _part(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.sdsage.part")


def _is_whole(offer: Offer, note: Note) -> bool:
    """Whether the file is here and is what the hub has; a damaged one is removed."""
    if not offer.blob.is_file():
        return False
    note(f"checking {offer.file.name}, which is here")
    if _digest(offer.blob, offer) == offer.digest:
        return True
    note(f"{offer.blob} is damaged and is fetched again")
    offer.blob.unlink()
    return False


def _digest(path: Path, offer: Offer) -> str:
    """The hash of a file, of the kind that the hub gave; remembered where it is a SHA-256."""
    if _SHA256.fullmatch(offer.digest):
        from sdsage import _digests

        return _digests.sha256(path) or ""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _check_space(todo: Sequence[Offer]) -> None:
    """The rest of all files must fit, with a margin."""
    folder = cache_folder()
    while not folder.exists():
        folder = folder.parent
    missing = sum(max(offer.size - (offer.have if not offer.blob.is_file() else 0), 0) for offer in todo)
    free = shutil.disk_usage(folder).free
    if missing and missing + _MARGIN > free:
        raise OutputError(
            f"{_gigabytes(missing)} are to be fetched and {_gigabytes(free)} are free in {folder}: make room, or name "
            "another folder in the variable HF_HOME"
        )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _fetch(module: ModuleType, offer: Offer, note: Note) -> None:
    """Downloads into the part, checks it and puts it where the hub's cache has it."""
    part = _part(offer.blob)
    part.parent.mkdir(parents=True, exist_ok=True)
    with _alone(part, offer) as have:
        rest = f", {_gigabytes(have)} of it are here" if have else ""
        note(f"fetching {offer.file} ({_gigabytes(offer.size)}{rest})")
        try:
            _download(module, offer, part, have)
        except BaseException:
            if part.stat().st_size:
                note(
                    f"{_gigabytes(part.stat().st_size)} of {offer.file.name} are kept: the next pull goes on from there"
                )
            else:
                part.unlink()
            raise
        note(f"checking {offer.file.name}")
        found = _digest(part, offer)
        if part.stat().st_size != offer.size or found != offer.digest:
            part.unlink()
            raise SdsageError(
                f"{offer.file} came damaged (hash {found[:12]}..., announced was {offer.digest[:12]}...) and was "
                "removed: pull again"
            )
        os.replace(part, offer.blob)
    if _SHA256.fullmatch(offer.digest):
        from sdsage import _digests

        _digests.learn(offer.blob, offer.digest)


def _download(module: ModuleType, offer: Offer, part: Path, have: int) -> None:
    """Appends what is missing to the part, of which `have` bytes are here."""
    from huggingface_hub.file_download import http_get

    url, headers = module.hf_hub_url(offer.file.repo, offer.file.file), module.utils.build_hf_headers()
    how = {"headers": headers, "expected_size": offer.size, "displayed_filename": offer.file.name}
    with part.open("r+b") as target:
        target.seek(have)
        try:
            with _readable_errors():
                http_get(url, target, resume_size=have, **how)
        except SdsageError:
            # A server that sends all of a file when it is asked for the rest: huggingface_hub 1.0 appends that.
            if not have or part.stat().st_size <= offer.size:
                raise
            target.seek(0)
            target.truncate()
            with _readable_errors():
                http_get(url, target, **how)


@contextmanager
def _alone(part: Path, offer: Offer) -> Iterator[int]:
    """How many bytes of the part can be kept; no other program fetches this file in this block: the lock is the hub's
    own."""
    from filelock import FileLock, Timeout

    cache, repo = offer.blob.parents[2], offer.blob.parents[1].name
    lock = cache / ".locks" / repo / f"{offer.blob.name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock, timeout=0):
            part.touch()
            have = part.stat().st_size
            if have > offer.size:
                os.truncate(part, 0)
                have = 0
            yield have
    except Timeout:
        raise SdsageError(f"{offer.file} is being fetched by another program: wait for it") from None


@contextmanager
def _readable_errors() -> Iterator[None]:
    """What huggingface_hub and its HTTP client raise, as our errors."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise BadRequest(
            f"the hub gives this file to users who have accepted its terms: accept them on its page, and set HF_TOKEN "
            f"({_first_line(error)})"
        ) from error
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError, errors.RevisionNotFoundError) as error:
        raise BadRequest(f"the hub has no such file: {_first_line(error)}") from error
    except SdsageError:
        raise
    except Exception as error:  # connections, timeouts, statuses: of several libraries, which differ by version
        if isinstance(error, MemoryError | AssertionError | AttributeError | TypeError | NameError):
            raise
        text = f"{type(error).__name__}: {_first_line(error)}"
        raise SdsageError(f"the hub can't be reached, or did not answer as it should ({text}): try again") from error


def _first_line(error: Any) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no more is known")
