"""Token ids of the captions' words, as the engine's umt5 tokenizer makes them. NumPy only.

`tokens.json` holds them; `python -m tools.tiny_model.tokens TREE` makes it anew from the vocabulary in an unpacked
upstream tree.
"""

import json
import re
import sys
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tools.tiny_model import grammar

FILE = Path(__file__).with_name("tokens.json")
EOS, SPACE = 1, 273  # the empty prompt is a lone space to the engine
LONGEST = 39  # tokens of a prompt, with its end; one column more is padding


@cache
def table() -> dict[str, list[int]]:
    """Word to token ids."""
    return {word: list(ids) for word, ids in json.loads(FILE.read_text(encoding="utf-8")).items()}


@cache
def used() -> tuple[int, ...]:
    """All token ids that captions have, sorted; row k + 1 of the text encoder's table is that of the k-th."""
    return tuple(sorted({EOS, SPACE, *(i for ids in table().values() for i in ids)}))


def unused() -> list[int]:
    """Rows of the text encoder's table that no caption uses any more: training knows nothing of them."""
    said = {i for word in grammar.words() for i in table()[word]} | {EOS, SPACE} | set(table()[","])
    return [k + 1 for k, token in enumerate(used()) if token not in said]


def encode(text: str) -> list[int]:
    """Token ids of a prompt, the end included. Words that captions do not have are refused."""
    words = text.replace(".", " .").replace(",", " ,").split()
    unknown = [w for w in words if w not in table()]
    if unknown:
        raise ValueError(f"{text!r} has words that captions do not have: {', '.join(unknown)}")
    return [*(i for w in words for i in table()[w]), EOS] if words else [SPACE, EOS]


def rows(texts: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the text encoder's table for each prompt, n x LONGEST + 1 with zeros behind, and the lengths."""
    row = {token: k + 1 for k, token in enumerate(used())}
    out = np.zeros((len(texts), LONGEST + 1), np.int64)
    lengths = np.zeros(len(texts), np.int64)
    for i, text in enumerate(texts):
        ids = encode(text)
        if len(ids) > LONGEST:
            raise ValueError(f"{text!r} has {len(ids)} tokens: {LONGEST} are the most")
        out[i, : len(ids)] = [row[token] for token in ids]
        lengths[i] = len(ids)
    return out, lengths


def _segment(word: str, pieces: dict[str, tuple[int, float]]) -> list[int]:
    """The most likely pieces of a word, by their scores."""
    best: list[tuple[float, list[int]] | None] = [(0.0, []), *[None] * len(word)]
    for end in range(1, len(word) + 1):
        for begin in range(end):
            before = best[begin]
            if before is not None and word[begin:end] in pieces:
                token, score = pieces[word[begin:end]]
                if best[end] is None or before[0] + score > best[end][0]:  # type: ignore[index]
                    best[end] = (before[0] + score, [*before[1], token])
    if best[-1] is None:
        raise ValueError(f"{word!r} has characters that are not in the vocabulary")
    return best[-1][1]


def main(tree: Path) -> None:
    """Looks all words up in the vocabulary of an upstream tree."""
    source = (tree / "src" / "tokenizers" / "vocab" / "umt5.hpp").read_text(encoding="ascii")
    data = bytes(int(byte, 16) for byte in re.findall(r"0x([0-9a-f]{2})", source))
    vocabulary = json.loads(data)["model"]["vocab"]
    pieces = {piece: (i, score) for i, (piece, score) in enumerate(vocabulary)}
    marks = {",", "."}
    found = {w: _segment(w if w in marks else f"\u2581{w}", pieces) for w in [*grammar.words(), ","]}
    lines = ",\n".join(f"  {json.dumps(word)}: {json.dumps(ids)}" for word, ids in sorted(found.items()))
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
