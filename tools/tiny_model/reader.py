"""Reads clips by rule: which colours there are, which shape each has and where it goes. NumPy only.

A colour's pixels are those that are nearest to it among all objects' colours and the ground's; where two colours run
into each other there is a third, but never several pixels deep. The shape is the one whose outline, turned, scaled to
the same area and perhaps blurred, covers the pixels best, over several frames. The direction is how the middle of the
pixels moves.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tools.tiny_model.grammar import COLOURS, DIRECTIONS, GROUNDS, MOTIONS, SHAPES, Scenes
from tools.tiny_model.scenes import SHAPE_DISTANCES, UNITS

NEAR = 95.0  # farthest distance in RGB of a pixel from its colour
CORE = 3  # of a pixel's four neighbours that must have its colour: rims of mixed colours fall out
DEEP = 2  # pixels around one that have its colour too, somewhere in every object
SMALLEST = 60  # pixels of an object, in a frame 96 wide
PIECE = 0.4  # smaller pieces of a colour, in parts of the largest, are not objects
MOVED = 7.0  # pixels of a frame 96 wide: less is no motion
VIEWS = 7  # frames whose shape is looked at
SOFTER = 2  # outlines whose corners are rounded, a little and more, beside the sharp ones
PERIODS = (0, 90, 120, 72, 90, 0)  # degrees after which a shape looks the same; the circle and the ring always do
VIEW_TURN = 7.5  # degrees from one outline to the next
GRID = np.linspace(-1.1, 1.1, 47, dtype=np.float32)  # where shapes are compared, in roots of their area


@dataclass(frozen=True)
class Found:
    """Things of one colour, as words of the grammar. `area` is that of all of them in a frame, in pixels."""

    colour: str
    shape: str
    direction: str
    count: int
    area: float


def read(frames: NDArray[np.uint8]) -> list[Found]:
    """What a clip (frames x height x width x 3) shows, the largest first."""
    scale = frames.shape[2] / UNITS
    names, kinds = classify(frames)
    found = []
    for k, name in enumerate(names):
        masks = kinds == k
        areas = masks.sum((1, 2))
        if np.median(areas) < SMALLEST * scale**2 * 0.8:
            continue
        here = np.flatnonzero(areas >= 0.5 * np.median(areas))
        if len(here) < max(1, len(frames) // 2) or np.median([_deep(masks[i]) for i in here]) < 1:
            continue
        pieces = [_pieces(masks[i]) for i in here]
        big = [[p for p in each if p.sum() >= PIECE * each[0].sum()] for each in pieces]
        count = round(float(np.median([len(each) for each in big])))
        middles = np.array([_middle(sum(each)) for each in big])
        views = [big[i][0] for i in np.linspace(0, len(here) - 1, min(VIEWS, len(here))).round().astype(int)]
        area = float(np.median([sum(p.sum() for p in each) for each in big]))
        found.append(Found(name, shape_of(views), direction_of(middles, scale), count, area))
    return sorted(found, key=lambda f: -f.area)


def classify(frames: NDArray[np.uint8]) -> tuple[list[str], NDArray[np.int64]]:
    """Colours that objects can have before this ground, and for each pixel the index of its own, or -1."""
    rim = np.concatenate([frames[:, :2].reshape(-1, 3), frames[:, -2:].reshape(-1, 3)])
    rim = np.concatenate([rim, frames[:, :, :2].reshape(-1, 3), frames[:, :, -2:].reshape(-1, 3)]).astype(np.float32)
    middle = np.median(rim, 0)
    ground = min(GROUNDS, key=lambda name: float(np.abs(middle - GROUNDS[name]).sum()))
    names = [n for n in COLOURS if not (n == "white" and ground == "white")]
    close = rim[np.abs(rim - middle).max(1) < 70]
    grounds = [middle, *(np.percentile(close, q, axis=0) for q in (5, 95))]  # a texture has a dark and a light side
    palette = np.array([*(COLOURS[n] for n in names), *grounds], np.float32)
    pixels = frames.reshape(-1, 3).astype(np.float32)
    distance = np.stack([np.sqrt(np.square(pixels - colour).sum(1)) for colour in palette], 1)
    nearest = distance.argmin(1)
    nearest[(nearest >= len(names)) | (distance.min(1) > NEAR)] = -1
    kinds = nearest.reshape(frames.shape[:3])
    return names, np.where(_core(kinds), kinds, -1)


def _core(kinds: NDArray) -> NDArray[np.bool_]:
    """Pixels with CORE neighbours of their own kind or more; kinds are frames x rows x columns."""
    wide = np.pad(kinds, ((0, 0), (1, 1), (1, 1)), mode="edge")
    around = (wide[:, :-2, 1:-1], wide[:, 2:, 1:-1], wide[:, 1:-1, :-2], wide[:, 1:-1, 2:])
    return np.asarray(sum((a == kinds).astype(int) for a in around) >= CORE)


def _deep(mask: NDArray[np.bool_]) -> int:
    """Pixels that are DEEP inside."""
    n = 2 * DEEP + 1
    return int(np.lib.stride_tricks.sliding_window_view(mask, (n, n)).all((2, 3)).sum())


def _middle(mask: NDArray) -> NDArray[np.float64]:
    rows, columns = np.nonzero(mask)
    return np.array([columns.mean(), rows.mean()])


def _pieces(mask: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """Connected pieces, the largest first: labels sweep to and fro until nothing changes."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    part = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    inside = mask[part]
    labels = np.where(inside, np.arange(1, inside.size + 1).reshape(inside.shape), 0)
    before = np.zeros_like(labels)
    while (labels != before).any():
        before = labels.copy()
        for lines, there in ((labels, inside), (labels.T, inside.T)):
            for way in (1, -1):
                swept, open_ = lines[::way], there[::way]
                for k in range(1, len(swept)):
                    swept[k] = np.maximum(swept[k], swept[k - 1]) * open_[k]
    values, counts = np.unique(labels[labels > 0], return_counts=True)
    found = []
    for value in values[np.argsort(-counts)][:8]:
        piece = np.zeros_like(mask)
        piece[part] = labels == value
        found.append(piece)
    return found


def direction_of(middles: NDArray[np.float64], scale: float) -> str:
    """Where the middles (frames x 2) go: up and down count as one where they come back, as a bounce does."""
    if len(middles) < 3:
        return "none"
    ends = max(1, len(middles) // 6)
    dx, dy = middles[-ends:].mean(0) - middles[:ends].mean(0)
    if max(abs(dx), abs(dy)) < MOVED * scale:
        return "none"
    if abs(dx) > abs(dy):
        return "right" if dx > 0 else "left"
    return "down" if dy > 0 else "up"


def shape_of(masks: list[NDArray[np.bool_]]) -> str:
    """The shape that covers all masks best."""
    outlines, kinds = _outlines()
    scores = np.zeros(len(SHAPES))
    for mask in masks:
        box = _normal(mask)
        both = outlines @ box
        overlap = both / (outlines.sum(1) + box.sum() - both)
        scores += [overlap[kinds == kind].max() for kind in range(len(SHAPES))]
    return SHAPES[int(scores.argmax())]


def _normal(mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    """The mask about its middle on GRID, between pixels linearly."""
    x, y = _middle(mask)
    side = math.sqrt(float(mask.sum()))
    wide = np.pad(mask, 1).astype(np.float32)  # outside there is nothing
    found = wide
    for axis, middle in ((0, y), (1, x)):
        at = (GRID * side + middle + 1).clip(0, wide.shape[axis] - 1.001)
        low = at.astype(int)
        share = (at - low).reshape(-1, 1) if axis == 0 else at - low
        found = np.take(found, low, axis) * (1 - share) + np.take(found, low + 1, axis) * share
    return np.asarray(found, np.float32).ravel()


@cache
def _outlines() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """All shapes of area 1 in all their turns, sharp and blurred, on GRID about their middle of mass; their kinds."""
    u, v = np.meshgrid(GRID, -GRID)
    found, kinds = [], []
    for kind, period in enumerate(PERIODS):
        r = _unit_area(kind) ** -0.5
        for angle in np.deg2rad(np.arange(0, max(period, 1), VIEW_TURN)):
            cos, sin = math.cos(angle), math.sin(angle)
            x, y = u * cos + v * sin, v * cos - u * sin + _unit_middle(kind) * r
            outline = (0.5 - SHAPE_DISTANCES[kind](np, x, y, np.float32(r)) / (GRID[1] - GRID[0])).clip(0, 1)
            for _ in range(SOFTER + 1):
                found.append((outline > 0.5).astype(np.float32).ravel())
                kinds.append(kind)
                for _ in range(2):
                    outline = _blurred(outline)
    return np.array(found), np.array(kinds)


def _blurred(image: NDArray[np.float32]) -> NDArray[np.float32]:
    """By 1/4, 1/2, 1/4 in both directions."""
    for axis in (0, 1):
        wide = np.pad(image, [(1, 1) if a == axis else (0, 0) for a in (0, 1)])
        parts = (np.take(wide, range(k, k + image.shape[axis]), axis) for k in range(3))
        image = sum(w * p for w, p in zip((0.25, 0.5, 0.25), parts, strict=True))  # type: ignore[assignment]
    return image


@cache
def _unit(kind: int) -> NDArray[np.bool_]:
    v, u = np.mgrid[1.5:-1.5:301j, -1.5:1.5:301j]
    return np.asarray(SHAPE_DISTANCES[kind](np, u, v, 1.0) < 0)


def _unit_area(kind: int) -> float:
    return float(_unit(kind).mean() * 9)


def _unit_middle(kind: int) -> float:
    """How high the middle of mass lies above the shape's own middle."""
    rows = np.nonzero(_unit(kind))[0]
    return float(1.5 - rows.mean() / 100)


# ---- scores


@dataclass(frozen=True)
class Score:
    """Whether a clip shows what its caption says of the first object. `colour`: of all objects, and no other."""

    colour: bool
    shape: bool
    direction: bool

    @property
    def all(self) -> bool:
        return self.colour and self.shape and self.direction


def score(frames: NDArray[np.uint8], scenes: Scenes, i: int) -> Score:
    """Compares a clip with scene i."""
    found = {f.colour: f for f in read(frames)}
    colour = list(COLOURS)[scenes.colour[i]]
    wanted = {colour} | ({list(COLOURS)[scenes.colour2[i]]} if scenes.shape2[i] >= 0 else set())
    one = found.get(colour)
    return Score(
        set(found) == wanted,
        one is not None and one.shape == SHAPES[scenes.shape[i]],
        one is not None and one.direction == DIRECTIONS[MOTIONS[scenes.motion[i]].way],
    )


def shares(scores: list[Score]) -> dict[str, float]:
    """Share of clips that are right, by what is looked at."""
    return {
        name: sum(getattr(s, name) for s in scores) / len(scores) for name in ("colour", "shape", "direction", "all")
    }
