"""Tells, edit by edit, what the table of edits meets in another upstream. Writes nothing.

    python bump_check.py UPSTREAM       (or: make bump-check UPSTREAM=...)

UPSTREAM is a source package of stable-diffusion-cpp-python, or a folder: a checkout of stable-diffusion.cpp with its
ggml, or an unpacked source package. An edit

    fits      its anchor is there once
    drifted   it is not: with the most similar place, or the file that has the anchor now
    is there  upstream has this very text itself
    is lost   its file is gone, and no other has the anchor

and a group with a sign (`SIGNS`) that upstream does its work itself is said to be droppable; its drop check in the
table is what a person looks at then. Exit code 0 if every edit fits or is there, else 1.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import upstream  # noqa: E402
from edits import GROUPS, Edit  # noqa: E402

# Group -> (file, regular expression) that is not in the pinned upstream; where it is found, the group may have become
# needless. Groups that say "never" have none.
SIGNS = {
    "sizes": ("src/wan.hpp", r"patch_embedding\.bias"),
    "seam": ("include/stable-diffusion.h", r"\bsd_cancel\w*\("),
    "log": ("src/util.cpp", r"thread_local\s+char\s+log_buffer|std::mutex\s+\w*log\w*"),
    "device": ("include/stable-diffusion.h", r"\b(main_device|device_index|(?:const )?char\s*\*\s*device)\b"),
    "random": ("src/rng_philox.hpp", r"SPDX-License-Identifier: (MIT|Apache|BSD)"),
}
SHORTEST = 24  # characters, without spaces: a shorter text is found anywhere
ALIKE = 0.5  # similarity from which a place is worth showing
SOURCES = {".c", ".cpp", ".cu", ".cuh", ".h", ".hpp"}


@dataclass(frozen=True)
class Finding:
    """What one edit meets. `state` is one of the four words above; `more` are lines for people."""

    edit: Edit
    state: str
    more: tuple[str, ...] = ()


def check(root: Path) -> dict[str, list[Finding]]:
    """Group -> what its edits meet in a tree, each after the ones before it, as they are applied."""
    texts: dict[str, str] = {}
    return {group.name: [_meet(root, edit, texts) for edit in group.edits] for group in GROUPS}


def _meet(root: Path, edit: Edit, texts: dict[str, str]) -> Finding:
    if edit.file not in texts:
        path = root / edit.file
        if not path.is_file():
            return _moved(root, edit, f"{edit.file} is gone")
        texts[edit.file] = _read(path)
    text = texts[edit.file]
    if _stands_in(edit, text):
        return Finding(edit, "is there")
    try:
        texts[edit.file] = upstream.edit_text(text, edit)
    except upstream.UpstreamError:
        lines = _lines_of(edit.anchor, text)
        if lines:
            return Finding(edit, "drifted", (f"the anchor stands there {len(lines)} times: lines {lines}",))
        return _moved(root, edit, *_nearest(edit.anchor, text))
    return Finding(edit, "fits")


def _read(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n")


def _bare(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _stands_in(edit: Edit, text: str) -> bool:
    """Whether upstream has what the edit would make, whatever its spaces."""
    if edit.where == "=" and edit.anchor in text:
        return False
    made = _bare({"<": edit.text + edit.anchor, ">": edit.anchor + edit.text, "=": edit.text}[edit.where])
    return len(made) >= SHORTEST and made in _bare(text)


def _lines_of(anchor: str, text: str) -> list[int]:
    return [text.count("\n", 0, match.start()) + 1 for match in re.finditer(re.escape(anchor), text)]


def _moved(root: Path, edit: Edit, *more: str) -> Finding:
    """The anchor may stand in another file now."""
    where = [name for name, text in _sources(root) if name != edit.file and edit.anchor in text]
    if where and len(edit.anchor.strip()) >= SHORTEST:
        return Finding(edit, "drifted", (*more, f"the anchor stands in {', '.join(where[:3])}"))
    return Finding(edit, "drifted" if (root / edit.file).is_file() else "is lost", more)


@cache
def _sources(root: Path) -> list[tuple[str, str]]:
    found = (p for folder in ("src", "include", "examples") for p in sorted((root / folder).rglob("*")))
    return [(str(p.relative_to(root)), _read(p)) for p in found if p.suffix in SOURCES]


def _nearest(anchor: str, text: str) -> tuple[str, ...]:
    """The most similar lines, as many as the anchor has, with what differs."""
    wanted = anchor.strip("\n").split("\n")
    lines = text.split("\n")
    matcher = SequenceMatcher(autojunk=False)
    matcher.set_seq2("\n".join(line.strip() for line in wanted))
    best, at = ALIKE, -1
    for i in range(len(lines) - len(wanted) + 1):
        matcher.set_seq1("\n".join(line.strip() for line in lines[i : i + len(wanted)]))
        if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best and (ratio := matcher.ratio()) > best:
            best, at = ratio, i
    if at < 0:
        return ("nothing there is similar",)
    there = lines[at : at + len(wanted)]
    pairs = [(f"- {w.strip()}", f"+ {t.strip()}") for w, t in zip(wanted, there, strict=True) if w.strip() != t.strip()]
    shown = [line for pair in pairs for line in pair]
    return (f"most similar: line {at + 1}, {100 * best:.0f} % alike", *shown)


def signs(root: Path) -> dict[str, str]:
    """Groups that upstream may have made needless -> the sign that was found."""
    found = {}
    for group, (file, pattern) in SIGNS.items():
        match = re.search(pattern, _read(root / file)) if (root / file).is_file() else None
        if match is not None:
            found[group] = f"{file} has {match[0]!r}"
    return found


def report(root: Path) -> Iterator[str]:
    """Lines for people."""
    found, droppable = check(root), signs(root)
    for group in GROUPS:
        findings = found[group.name]
        states = [f.state for f in findings]
        counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
        yield f"{group.name}: {len(findings)} edits, {counts}"
        if group.name in droppable:
            yield f"  droppable? {droppable[group.name]}; the drop check: {group.drop}"
        for finding in findings:
            if finding.state != "fits":
                first = next(line for line in finding.edit.anchor.splitlines() if line.strip()).strip()
                yield f"  {finding.state}: {finding.edit.file}, at {first!r}"
                yield from (f"      {line}" for line in finding.more)
    states = [f.state for findings in found.values() for f in findings]
    name, version, _ = upstream.read_pin()
    yield f"of {len(states)} edits for {name} {version}: " + ", ".join(
        f"{states.count(s)} {s}" for s in ("fits", "is there", "drifted", "is lost")
    )


def fits(root: Path) -> bool:
    return all(f.state in ("fits", "is there") for findings in check(root).values() for f in findings)


def tree_of(given: Path, into: Path) -> Path:
    """The stable-diffusion.cpp in a source package or folder; a package is unpacked to `into`."""
    if given.is_file():
        upstream.unpack(given, into)
        return into
    if not given.is_dir():
        raise upstream.UpstreamError(f"{given} is neither a file nor a folder")
    for folder in (given, given / "vendor" / "stable-diffusion.cpp"):
        if (folder / "src").is_dir() and (folder / "CMakeLists.txt").is_file():
            if (folder / upstream.MARKER).is_file():
                raise upstream.UpstreamError(f"{folder} carries our edits already: give a tree without them")
            return folder
    raise upstream.UpstreamError(
        f"{given} is no stable-diffusion.cpp: give a source package (.tar.gz) or a checkout with its ggml"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("upstream", type=Path, help="source package or folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        try:
            root = tree_of(args.upstream, Path(tmp))
        except (upstream.UpstreamError, OSError, upstream.tarfile.TarError) as error:
            sys.exit(f"sdsage: {error}")
        print("\n".join(report(root)))
        sys.exit(0 if fits(root) else 1)


if __name__ == "__main__":
    main()
