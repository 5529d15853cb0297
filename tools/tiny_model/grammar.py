"""What can happen in a clip, and the sentences that say it. NumPy only.

A clip has one object, two equal ones, or two different ones, before a ground. Some combinations of colour,
shape and motion are held out: no training clip has them, and the captions that the model is measured by all do.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (45, 80, 225),
    "yellow": (245, 215, 45),
    "orange": (250, 130, 25),
    "purple": (145, 55, 190),
    "cyan": (40, 205, 225),
    "white": (250, 250, 250),
}
GROUNDS = {
    "black": (18, 18, 18),
    "gray": (125, 125, 125),
    "brown": (110, 68, 38),
    "pink": (240, 170, 190),
    "white": (230, 230, 230),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
ROUND = (0, 5)  # shapes that look the same when they turn
TEXTURES = ("plain", "striped", "checkered", "dotted")
SIZES = ("small", "medium", "big")
SPEEDS = ("slow", "normal", "quick")
DIRECTIONS = ("none", "left", "right", "up", "down")


@dataclass(frozen=True)
class Motion:
    """`way` is an index of DIRECTIONS."""

    way: int = 0
    bounces: bool = False
    turns: bool = False


MOTIONS = (
    Motion(),
    *(Motion(way) for way in (1, 2, 3, 4)),
    *(Motion(way, bounces=True) for way in (1, 2)),
    *(Motion(way, turns=True) for way in (1, 2, 3, 4)),
    Motion(turns=True),
)

WHITE_OBJECT, WHITE_GROUND = list(COLOURS).index("white"), list(GROUNDS).index("white")
NO_GROUND = -1  # the caption does not say what the ground is


@dataclass(frozen=True)
class Scenes:
    """Many clips: one integer each. What ends in 2 is of the second object, whose `shape2` is -1 if there is none.

    `told` is 0 where the caption says nothing of the ground.
    """

    count: NDArray[np.int64]
    colour: NDArray[np.int64]
    shape: NDArray[np.int64]
    motion: NDArray[np.int64]
    size: NDArray[np.int64]
    speed: NDArray[np.int64]
    colour2: NDArray[np.int64]
    shape2: NDArray[np.int64]
    motion2: NDArray[np.int64]
    size2: NDArray[np.int64]
    ground: NDArray[np.int64]
    texture: NDArray[np.int64]
    told: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.count)

    def take(self, which: NDArray[np.int64] | slice) -> "Scenes":
        return Scenes(**{f.name: getattr(self, f.name)[which] for f in fields(self)})


def held_out(colour: NDArray[np.int64], shape: NDArray[np.int64], motion: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Combinations that are never trained on: one in 16, spread by multiplicative hashing."""
    key = (colour * len(SHAPES) + shape) * len(MOTIONS) + motion
    return (key * 2654435761 % 2**32) >> 28 == 5


def impossible(shape: NDArray[np.int64], motion: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Turning that nobody can see."""
    turns = np.array([m.turns for m in MOTIONS])
    return turns[motion] & np.isin(shape, ROUND)


def crossing(motion: NDArray[np.int64], motion2: NDArray[np.int64]) -> NDArray[np.bool_]:
    """One goes sideways, the other up or down: two objects in halves of a frame have room for the same way alone."""
    axis = np.array([(m.way + 1) // 2 for m in MOTIONS])
    one, other = axis[motion], axis[motion2]
    return (one > 0) & (other > 0) & (one != other)


def sample(rng: np.random.Generator, n: int, *, held: bool = False, moving: bool = True) -> Scenes:
    """n clips: with `held` the first object of each is a held-out combination, else no object is.

    With `moving` False all objects stay still: pictures.
    """
    two = rng.random(n) < 0.2
    count = np.where(two | (rng.random(n) < 0.85), 1, 2)
    motions = rng.choice(len(MOTIONS), n, p=_weights()) if moving else np.zeros(n, np.int64)
    motions2 = rng.choice(len(MOTIONS), n, p=_weights()) if moving else np.zeros(n, np.int64)
    colour, shape = rng.integers(len(COLOURS), size=n), rng.integers(len(SHAPES), size=n)
    colour2, shape2 = rng.integers(len(COLOURS), size=n), rng.integers(len(SHAPES), size=n)
    ground = rng.integers(len(GROUNDS), size=n)

    def unfit(c: NDArray[np.int64], s: NDArray[np.int64], m: NDArray[np.int64], want: bool) -> NDArray[np.bool_]:
        return (held_out(c, s, m) != want) | impossible(s, m) | ((c == WHITE_OBJECT) & (ground == WHITE_GROUND))

    while (again := unfit(colour, shape, motions, held)).any():
        k = int(again.sum())
        colour[again], shape[again] = rng.integers(len(COLOURS), size=k), rng.integers(len(SHAPES), size=k)
        if moving:
            motions[again] = rng.choice(len(MOTIONS), k, p=_weights())
    while (again := unfit(colour2, shape2, motions2, False) | (colour2 == colour) | crossing(motions, motions2)).any():
        k = int(again.sum())
        colour2[again], shape2[again] = rng.integers(len(COLOURS), size=k), rng.integers(len(SHAPES), size=k)
        if moving:
            motions2[again] = rng.choice(len(MOTIONS), k, p=_weights())
    return Scenes(
        count=count,
        colour=colour,
        shape=shape,
        motion=motions,
        size=rng.integers(len(SIZES), size=n),
        speed=rng.integers(len(SPEEDS), size=n),
        colour2=colour2,
        shape2=np.where(two, shape2, -1),
        motion2=motions2,
        size2=rng.integers(len(SIZES), size=n),
        ground=ground,
        texture=np.where(rng.random(n) < 0.5, 0, rng.integers(1, len(TEXTURES), size=n)),
        told=(rng.random(n) < 0.75).astype(np.int64),
    )


def _weights() -> NDArray[np.float64]:
    """Motions that go somewhere come more often."""
    weights = np.array([2.0 if m.way else 1.5 for m in MOTIONS])
    return weights / weights.sum()


# ---- sentences

_NAMES = (("circle", "ball"), ("square", "box"), ("triangle",), ("star",), ("cross",), ("ring",))
_MANY = {"box": "boxes", "cross": "crosses"}
_SIZE_WORDS = (("small", "tiny", "little"), ("",), ("big", "large"))
_SPEED_WORDS = (("slowly",), ("",), ("quickly",))
_WAYS = (("",), ("left", "to the left"), ("right", "to the right"), ("up",), ("down",))


def captions(scenes: Scenes, rng: np.random.Generator) -> Iterator[str]:
    """A sentence for each clip; the words for the same thing vary."""
    for i in range(len(scenes)):
        yield caption(scenes, i, rng)


def caption(scenes: Scenes, i: int, rng: np.random.Generator) -> str:
    """The sentence of clip i."""

    def one_of(words: tuple[str, ...]) -> str:
        return words[int(rng.integers(len(words)))] if len(words) > 1 else words[0]

    s = scenes
    many = int(s.count[i])
    text = _object(one_of, many, int(s.size[i]), int(s.colour[i]), int(s.shape[i]))
    text += " " + _does(one_of, many > 1, MOTIONS[s.motion[i]], int(s.speed[i]))
    if s.shape2[i] >= 0:
        text += " and " + _object(one_of, 1, int(s.size2[i]), int(s.colour2[i]), int(s.shape2[i]))
        text += " " + _does(one_of, False, MOTIONS[s.motion2[i]], 1)
    if s.told[i]:
        texture = TEXTURES[s.texture[i]]
        words = (
            "a",
            "" if texture == "plain" else texture,
            list(GROUNDS)[s.ground[i]],
            one_of(("background", "ground")),
        )
        text += " on " + " ".join(filter(None, words))
    if rng.random() < 0.1:
        text = text[0].upper() + text[1:] + "."
    return text


def _object(one_of, many: int, size: int, colour: int, shape: int) -> str:  # type: ignore[no-untyped-def]
    name = one_of(_NAMES[shape])
    if many > 1:
        name = _MANY.get(name, f"{name}s")
    word = one_of(_SIZE_WORDS[size])
    return " ".join(filter(None, (("a", "two")[many - 1], word, list(COLOURS)[colour], name)))


def _does(one_of, many: bool, motion: Motion, speed: int) -> str:  # type: ignore[no-untyped-def]
    end = "" if many else "s"
    way = one_of(_WAYS[motion.way])
    if motion.turns and not motion.way:
        return f"{one_of(('spin', 'turn'))}{end} in place"
    if not motion.way:
        return f"{one_of(('stay', 'stand'))}{end} still"
    if motion.bounces:
        does = f"bounce{end} {way}"
    elif motion.turns:
        does = f"{one_of(('turn', 'spin'))}{end} while moving {way}"
    else:
        verb = one_of(("move", "slide", "go"))
        does = f"{verb}{'es' if verb == 'go' and end else end} {way}"
    return " ".join(filter(None, (does, one_of(_SPEED_WORDS[speed]))))


def words() -> list[str]:
    """All words that captions are made of, sorted."""
    rng = np.random.default_rng(0)
    found: set[str] = set()
    for _ in range(20):
        for held in (False, True):
            for text in captions(sample(rng, 500, held=held), rng):
                found.update(text.replace(".", " .").split())
    return sorted(found)


HELD_OUT_SEED, HELD_OUT_COUNT = 20, 200


def held_out_captions() -> tuple[Scenes, list[str]]:
    """The 200 captions that the model is measured by."""
    rng = np.random.default_rng(HELD_OUT_SEED)
    scenes = sample(rng, HELD_OUT_COUNT, held=True)
    return scenes, list(captions(scenes, rng))
