"""Draw one generated scene: textured shapes in front of a textured background, and the visible pixels of each.

As in photographs, a class has a usual colour without being defined by it: its hue scatters around one of six, one
object in 32 and every greyscale scene has any colour at all, and backgrounds take muted colours of every hue. The
remaining cue is the outline: all classes share textures, sizes and rotations, and objects hide parts of each other.
Minutes of training therefore find the objects, and the last points of mIoU take edges combined with context, which is
where coarse arithmetic would show first.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from fp4deploy.data.coco.regions import Polygons, Rle, decode, encode
from fp4deploy.data.sample import Pixels

Random = np.random.Generator
Points = NDArray[np.float64]  # [N, 2], x and y
Field = NDArray[np.float32]  # [size, size] in [0, 1]
Bitmap = NDArray[np.bool_]

SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
_MIN_VISIBLE = 0.5  # an object is not placed where it would hide more of another one
_MIN_CONTRAST = 0.35  # distance of mean colours, RGB in [0, 1], between neighbours
_TRIES = 12
_HUE_SPREAD = 0.025  # standard deviation; neighbouring classes are 1/6 apart
_ANY_COLOUR = 1 / 32  # share of objects without their class's colour


@dataclass
class Drawn:
    """One object or crowd: its whole outline, and (later) its visible pixels."""

    category: int  # index into SHAPES
    polygons: Polygons | None  # None where the outline has a hole or is a crowd
    whole: Bitmap
    visible: Bitmap
    crowd: bool = False


def draw_scene(random: Random, size: int) -> tuple[Pixels, list[Drawn]]:
    """Draw a scene of size x size pixels.

    Returns:
        The image, uint8 [size, size, 3], and its objects from back to front (empty in one scene of sixteen).
    """
    canvas = _texture(random, size, _muted(_colour(random)))
    things: list[Drawn] = []
    if random.random() > 1 / 16:
        if random.random() < 1 / 6:
            things.append(_draw_crowd(random, canvas))
        for _ in range(int(random.integers(2, 6))):
            _place(random, canvas, things)
    return _photograph(random, canvas), things


def _place(random: Random, canvas: NDArray[np.float32], things: list[Drawn]) -> None:
    """Add one object in front, if a place is found where it leaves enough of the others visible."""
    size = canvas.shape[0]
    category = int(random.integers(len(SHAPES)))
    for _ in range(_TRIES):
        radius = size * float(np.exp(random.uniform(np.log(0.13), np.log(0.3))))
        centre = random.uniform(0.6 * radius, size - 0.6 * radius, size=2)
        polygons, whole = _outline(random, category, centre, radius, size)
        hidden = [(thing, thing.visible & ~whole) for thing in things if not thing.crowd]
        if whole.any() and all(left.sum() >= _MIN_VISIBLE * thing.whole.sum() for thing, left in hidden):
            break
    else:
        return
    for thing, left in hidden:
        thing.visible = left
    _paint(random, canvas, whole, category=category)
    things.append(Drawn(category, polygons, whole, whole))


def _draw_crowd(random: Random, canvas: NDArray[np.float32]) -> Drawn:
    """Many tiny shapes of one class and, as in COCO, one region around them all."""
    size = canvas.shape[0]
    category = int(random.integers(len(SHAPES)))
    radius = size * float(random.uniform(0.15, 0.25))
    centre = random.uniform(radius, size - radius, size=2)
    colour = _colour(random)
    for _ in range(24):
        angle, distance = random.uniform(0, 2 * np.pi), 0.85 * radius * np.sqrt(random.random())
        offset = distance * np.array([np.cos(angle), np.sin(angle)])
        _, whole = _outline(random, category, centre + offset, size * 0.035, size)
        _paint(random, canvas, whole, np.clip(colour + random.normal(scale=0.08, size=3), 0, 1))
    rows, columns = np.mgrid[:size, :size] + 0.5
    region = (columns - centre[0]) ** 2 + (rows - centre[1]) ** 2 <= radius**2
    return Drawn(category, None, region, region, crowd=True)


def _outline(random: Random, category: int, centre: Points, radius: float, size: int) -> tuple[Polygons | None, Bitmap]:
    """Polygon (None for a ring) and pixels of one shape, turned by a random angle."""
    angle = float(random.uniform(0, 2 * np.pi))
    stretch = float(random.uniform(0.85, 1.15))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])

    def rasterise(points: Points, scale: float) -> tuple[Polygons, Bitmap]:
        placed = points * np.array([stretch, 1 / stretch]) @ turn.T * (radius * scale) + centre
        polygons = [np.round(placed.clip(0, size), 2).reshape(-1)]
        rle: Rle | None = encode(polygons, size, size)
        return polygons, decode(rle) if rle else np.zeros((size, size), dtype=np.bool_)

    name = SHAPES[category]
    if name == "ring":
        outer, inner = rasterise(_circle(), 1.0)[1], rasterise(_circle(), 0.55)[1]
        return None, outer & ~inner
    return rasterise(_POINTS[name](), 1.0)


def _circle() -> Points:
    return _spokes(40, [1.0])


def _spokes(count: int, radii: list[float]) -> Points:
    """`count` points around the origin whose distances repeat `radii`."""
    angles = np.arange(count) * (2 * np.pi / count)
    distance = np.resize(radii, count)
    return np.stack([distance * np.cos(angles), distance * np.sin(angles)], axis=1)


def _cross() -> Points:
    arm, end = 0.32, 1.0
    quarter = np.array([[arm, arm], [arm, end], [-arm, end]])
    turns = [np.linalg.matrix_power(np.array([[0.0, -1.0], [1.0, 0.0]]), n) for n in range(4)]
    return np.concatenate([quarter @ turn.T for turn in turns])


_POINTS: dict[str, Callable[[], Points]] = {
    "circle": lambda: 0.9 * _circle(),
    "square": lambda: _spokes(4, [1.1]),
    "triangle": lambda: _spokes(3, [1.2]),
    "star": lambda: _spokes(10, [1.2, 0.5]),
    "cross": _cross,
}


def _paint(
    random: Random,
    canvas: NDArray[np.float32],
    whole: Bitmap,
    colour: Points | None = None,
    category: int | None = None,
) -> None:
    """Fill `whole` with a texture whose mean colour stands out from what is behind it, with softened edges."""
    if colour is None:
        behind = canvas[whole].mean(axis=0)
        usual = category if random.random() > _ANY_COLOUR else None
        tries = (_colour(random, usual) for _ in range(32))
        colour = next((c for c in tries if np.linalg.norm(c - behind) > _MIN_CONTRAST), 1 - behind)
    soft = Image.fromarray(whole.astype(np.uint8) * 255).filter(ImageFilter.BoxBlur(0.5))
    alpha = np.asarray(soft, dtype=np.float32)[..., None] / 255
    canvas += alpha * (_texture(random, canvas.shape[0], colour) - canvas)


def _colour(random: Random, category: int | None = None) -> Points:
    """Any colour, or one of those usual for a class."""
    if category is None:
        return random.uniform(0.1, 0.9, size=3)
    hue = (category / len(SHAPES) + random.normal(scale=_HUE_SPREAD)) % 1
    rgb = colorsys.hsv_to_rgb(hue, random.uniform(0.5, 0.95), random.uniform(0.5, 0.95))
    return np.array(rgb, dtype=np.float64)


def _muted(colour: Points) -> Points:
    """The colour half-way to its grey."""
    return np.asarray(colour.mean() + 0.5 * (colour - colour.mean()), dtype=np.float64)


def _texture(random: Random, size: int, colour: Points) -> NDArray[np.float32]:
    """Float [size, size, 3]: a pattern between two colours whose middle is `colour`."""
    kind = int(random.integers(len(_PATTERNS)))
    pattern = _PATTERNS[kind](random, size)[..., None]
    swing = random.uniform(-0.2, 0.2) + random.uniform(-0.06, 0.06, size=3)
    textured = colour + (2 * pattern - 1) * swing
    return np.asarray(np.clip(textured, 0, 1), dtype=np.float32)


def _flat(random: Random, size: int) -> Field:
    return np.full((size, size), 0.5, dtype=np.float32)


def _noise(random: Random, size: int) -> Field:
    """Smooth noise: a random coarse grid, enlarged."""
    cells = int(random.choice([4, 8, 16, size // 2]))
    grid = Image.fromarray(random.integers(0, 256, size=(cells, cells), dtype=np.uint8))
    enlarged = np.asarray(grid.resize((size, size), Image.Resampling.BICUBIC))
    return np.asarray(enlarged / np.float32(255), dtype=np.float32)


def _phase(random: Random, size: int, waves: tuple[float, float]) -> Field:
    """A ramp in a random direction, in radians; `waves` bounds the number of periods across the image."""
    angle, count = random.uniform(0, 2 * np.pi), random.uniform(*waves)
    rows, columns = np.mgrid[:size, :size]
    ramp = (columns * np.cos(angle) + rows * np.sin(angle)) * (2 * np.pi * count / size) + random.uniform(0, 2 * np.pi)
    return np.asarray(ramp, dtype=np.float32)


def _stripes(random: Random, size: int) -> Field:
    return np.asarray(np.sin(_phase(random, size, (3, 16))) / 2 + 0.5, dtype=np.float32)


def _gradient(random: Random, size: int) -> Field:
    return np.asarray(np.sin(_phase(random, size, (0.2, 1))) / 2 + 0.5, dtype=np.float32)


def _checks(random: Random, size: int) -> Field:
    first, second = (np.sin(_phase(random, size, (3, 10))) > 0 for _ in range(2))
    return np.asarray(first ^ second, dtype=np.float32)


_PATTERNS: tuple[Callable[[Random, int], Field], ...] = (_flat, _noise, _noise, _stripes, _gradient, _checks)


def _photograph(random: Random, canvas: NDArray[np.float32]) -> Pixels:
    """Uneven light and sensor noise, then 8 bits; one scene of 32 in greyscale (still three channels)."""
    light = 1 + 0.25 * (_gradient(random, canvas.shape[0]) - 0.5)
    noisy = canvas * light[..., None] + random.normal(scale=0.02, size=canvas.shape)
    if random.random() < 1 / 32:
        noisy = np.repeat(noisy.mean(axis=2, keepdims=True), 3, axis=2)
    pixels: Pixels = np.clip(np.rint(noisy * 255), 0, 255).astype(np.uint8)
    return pixels
