"""Draws the clips of `grammar`, many at once: the same code for NumPy arrays and for torch tensors on any device.

All lengths are in pixels of a frame 96 wide; other sizes scale.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tools.tiny_model.grammar import COLOURS, GROUNDS, MOTIONS, Scenes

FRAMES, SIZE, UNITS = 17, 96, 96.0

# The VAE has a latent for 8 pixels and the transformer a token for 16: a shape has to be larger to be one.
RADII = np.array([[16.0, 21.0, 26.0], [13.0, 14.5, 16.0]])  # [number of objects - 1][size]
PAIR_RADII = np.array([12.5, 14.0, 15.5])  # of two different objects
REACH = np.array([1.0, 1.25, 1.35, 1.35, 1.26, 1.11])  # how far a shape's rim is from its middle at most, in radii
PATHS = np.array([20.0, 32.0, 44.0])  # by speed
HOP, HOPS = 14.0, 2
TURN = math.pi / 2  # over the whole clip, clockwise
EDGE, GAP = 1.0, 4.0  # pixels to the frame's rim, and between equal objects
OBJECT = 55  # of 255: no texture is so far from the middle of its ground, and every object is, but white before white


@dataclass(frozen=True)
class _Arrays:
    """Arrays of one kind."""

    def to(self, make: Callable[[Any], Any]) -> Self:
        return replace(self, **{f.name: make(getattr(self, f.name)) for f in fields(self)})


@dataclass(frozen=True)
class Objects(_Arrays):
    """What is drawn: float arrays of n clips x up to 2 objects. `radius` is 0 where there is none."""

    shape: Any
    red: Any
    green: Any
    blue: Any
    radius: Any
    x: Any  # in the middle of the clip
    y: Any
    dx: Any  # over the whole clip
    dy: Any
    hop: Any
    angle: Any
    turn: Any


@dataclass(frozen=True)
class Grounds(_Arrays):
    """n x 1: colour, kind of texture, its direction and strength."""

    red: Any
    green: Any
    blue: Any
    texture: Any
    direction: Any
    strength: Any


def layout(scenes: Scenes, rng: np.random.Generator) -> tuple[Objects, Grounds]:
    """Places all objects so that they stay in the frame, and two different ones in halves of their own."""
    n = len(scenes)
    pair = scenes.shape2 >= 0
    size = np.where(pair, PAIR_RADII[scenes.size], RADII[scenes.count - 1, scenes.size])
    columns: dict[str, NDArray[np.float64]] = {f.name: np.zeros((n, 2)) for f in fields(Objects)}

    across = _across(scenes, rng)  # halves are left and right, else upper and lower
    first_half = rng.random(n) < 0.5
    for second in (False, True):
        motion = scenes.motion2 if second else scenes.motion
        way, bounces, turns = (np.array([getattr(m, a) for m in MOTIONS])[motion] for a in ("way", "bounces", "turns"))
        r = PAIR_RADII[scenes.size2] if second else size
        shape = scenes.shape2 if second else scenes.shape
        reach = r * REACH[shape]
        low = np.where(pair & (first_half == second), UNITS / 2, 0.0)
        high = np.where(pair & (first_half != second), UNITS / 2, UNITS)
        x0, x1 = np.where(across, low, 0.0), np.where(across, high, UNITS)
        y0, y1 = np.where(across, 0.0, low), np.where(across, UNITS, high)

        step = 2 * reach + GAP  # from one of several equal objects to the next
        row = (scenes.count - 1) * step / 2 if not second else np.zeros(n)
        upright = np.isin(way, (1, 2)) | ((way == 0) & (rng.random(n) < 0.5))  # the row stands across the motion
        wide, tall = reach + np.where(upright, 0.0, row), reach + np.where(upright, row, 0.0)

        length = PATHS[np.ones(n, np.int64) if second else scenes.speed] * rng.uniform(0.9, 1.1, n)
        hop = np.where(bounces, np.minimum(HOP, y1 - y0 - 2 * tall - 2 * EDGE), 0.0).clip(0)
        dx = np.minimum(length, x1 - x0 - 2 * wide - 2 * EDGE) * np.array([0, -1, 1, 0, 0])[way]
        dy = np.minimum(length, y1 - y0 - 2 * tall - 2 * EDGE) * np.array([0, 0, 0, -1, 1])[way]
        x = _between(x0 + wide + EDGE + abs(dx) / 2, x1 - wide - EDGE - abs(dx) / 2, rng)
        y = _between(y0 + tall + EDGE + abs(dy) / 2 + hop, y1 - tall - EDGE - abs(dy) / 2, rng)
        colour = np.array(list(COLOURS.values()))[scenes.colour2 if second else scenes.colour]
        colour = (colour + rng.uniform(-6, 6, (n, 1))).clip(0, 255)
        angle = rng.uniform(-0.12, 0.12, n)
        for k in range(1 if second else 2):
            slot = 1 if second else k
            here = pair if second else k < scenes.count
            off = (k - (scenes.count - 1) / 2) * step * here
            values = (
                shape,
                *(colour.T / 127.5 - 1),
                r,
                x + np.where(upright, 0.0, off),
                y + np.where(upright, off, 0.0),
                dx,
                dy,
                hop,
                angle,
                turns * TURN,
            )
            for field, value in zip(fields(Objects), values, strict=True):
                columns[field.name][:, slot] = np.where(here, value, columns[field.name][:, slot])

    ground = np.array(list(GROUNDS.values()))[scenes.ground] + rng.uniform(-6, 6, (n, 1))
    grounds = Grounds(
        *(ground.clip(0, 255) / 127.5 - 1).T[..., None],
        texture=scenes.texture[:, None].astype(float),
        direction=(rng.integers(2, size=(n, 1)) * math.pi / 4),
        strength=rng.uniform(0.1, 0.15, (n, 1)) * (scenes.texture[:, None] > 0),
    )
    return Objects(**columns), grounds


def _across(scenes: Scenes, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Two objects that go to the left or right get an upper and a lower half, those that go up or down the others."""
    way = np.array([m.way for m in MOTIONS])
    sideways = np.isin(way[scenes.motion], (1, 2)), np.isin(way[scenes.motion2], (1, 2))
    upright = np.isin(way[scenes.motion], (3, 4)), np.isin(way[scenes.motion2], (3, 4))
    either = rng.random(len(scenes)) < 0.5
    votes = upright[0].astype(int) + upright[1] - sideways[0] - sideways[1]
    return np.where(votes == 0, either, votes > 0)


def _between(low: NDArray[np.float64], high: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    return low + (np.maximum(high, low) - low) * rng.random(len(low))


def draw(xp: Any, objects: Objects, grounds: Grounds, frames: int = FRAMES, size: int = SIZE) -> Any:
    """Clips n x 3 x frames x size x size, -1 to 1. `xp` is numpy or torch, and the arrays are of it, in float32."""
    scale = UNITS / size
    along = (xp.arange(size) + 0.5) * scale
    along = _like(xp, along, objects.x)
    px, py = along[None, None, None, :], along[None, None, :, None]  # n, frame, row, column
    at = _like(xp, xp.arange(frames) / max(frames - 1, 1) - (0.5 if frames > 1 else 0.0), objects.x)[
        None, :, None, None
    ]

    shade = _texture(xp, px, py, grounds)
    clip = [_wide(c) + shade + 0 * at for c in (grounds.red, grounds.green, grounds.blue)]
    n = objects.x.shape[0]
    for slot in range(objects.x.shape[1]):
        here = [i for i, r in enumerate(objects.radius[:, slot].tolist()) if r > 0]
        if not here:
            continue
        one = objects.to(lambda a, slot=slot, here=here: a[here][:, slot : slot + 1])
        cover = _cover(xp, one, px, py, at, scale)
        every = len(here) == n
        for k, colour in enumerate((one.red, one.green, one.blue)):
            under = clip[k] if every else clip[k][here]
            under = under + (_wide(colour) - under) * cover
            if every:
                clip[k] = under
            else:
                clip[k][here] = under
    return xp.stack(clip, 1).clip(-1, 1)


def _like(xp: Any, values: Any, other: Any) -> Any:
    return values.astype(np.float32) if xp is np else values.to(other)


def _wide(a: Any) -> Any:
    return a[:, :, None, None]


def _cover(xp: Any, one: Objects, px: Any, py: Any, at: Any, scale: float) -> Any:
    """How much of each pixel the object covers: n x frames x rows x columns."""
    hop = abs(xp.sin((at + 0.5) * (HOPS * math.pi)))
    x = px - (_wide(one.x) + _wide(one.dx) * at)
    y = py - (_wide(one.y) + _wide(one.dy) * at - _wide(one.hop) * hop)
    angle = _wide(one.angle) + _wide(one.turn) * (at + 0.5)
    cos, sin = xp.cos(angle), xp.sin(angle)
    u, v = x * cos + y * sin, x * sin - y * cos  # v points up
    shape, r = _wide(one.shape), _wide(one.radius)
    distance = 0.0
    for kind, sdf in enumerate(SHAPE_DISTANCES):
        if (one.shape == kind).any():
            distance = xp.where(shape == kind, sdf(xp, u, v, r), distance + 0 * u)
    return (0.5 - distance / scale).clip(0, 1)


def _texture(xp: Any, px: Any, py: Any, g: Grounds) -> Any:
    period = 2 * math.pi / 16
    cos, sin = xp.cos(_wide(g.direction)), xp.sin(_wide(g.direction))
    u = (px * cos + py * sin) * period
    v = (py * cos - px * sin) * period
    striped = (3 * xp.sin(u)).clip(-1, 1)
    checkered = (4 * xp.sin(u) * xp.sin(v)).clip(-1, 1)
    dotted = (4 * (xp.cos(u) + xp.cos(v) - 1.1)).clip(-1, 1)
    kind = _wide(g.texture)
    pattern = xp.where(kind == 1, striped, xp.where(kind == 2, checkered, dotted))
    return pattern * _wide(g.strength)


# ---- distance to the rim of each shape, negative inside; r makes their areas about equal


def _circle(xp: Any, u: Any, v: Any, r: Any) -> Any:
    return xp.sqrt(u * u + v * v) - r


def _square(xp: Any, u: Any, v: Any, r: Any) -> Any:
    return xp.maximum(abs(u), abs(v)) - 0.88 * r


def _triangle(xp: Any, u: Any, v: Any, r: Any) -> Any:
    return xp.maximum(math.sqrt(0.75) * abs(u) + 0.5 * v, -v) - 0.675 * r


def _star(xp: Any, u: Any, v: Any, r: Any) -> Any:
    """Five tips: folded onto half a tip, where the rim is one line."""
    tip, inner, angle = 1.35 * r, 0.54 * r, math.pi / 5
    u = abs(u)
    for _ in range(2):
        over = (u * math.cos(angle) - v * math.sin(angle)).clip(0, None)
        u, v = abs(u - 2 * over * math.cos(angle)), v + 2 * over * math.sin(angle)
    eu, ev = inner * math.sin(angle), inner * math.cos(angle) - tip
    return (eu * (v - tip) - ev * u) / xp.sqrt(eu * eu + ev * ev)


def _cross(xp: Any, u: Any, v: Any, r: Any) -> Any:
    u, v = abs(u), abs(v)
    return xp.minimum(xp.maximum(u - 1.2 * r, v - 0.37 * r), xp.maximum(u - 0.37 * r, v - 1.2 * r))


def _ring(xp: Any, u: Any, v: Any, r: Any) -> Any:
    return abs(xp.sqrt(u * u + v * v) - 0.85 * r) - 0.26 * r


SHAPE_DISTANCES = (_circle, _square, _triangle, _star, _cross, _ring)


def clips(scenes: Scenes, rng: np.random.Generator, frames: int = FRAMES, size: int = SIZE) -> NDArray[np.uint8]:
    """Clips as a video has them, by NumPy: n x frames x size x size x 3."""
    objects, grounds = (a.to(lambda x: np.asarray(x, np.float32)) for a in layout(scenes, rng))
    values = draw(np, objects, grounds, frames, size)
    return np.rint((values + 1) * 127.5).astype(np.uint8).transpose(0, 2, 3, 4, 1)
