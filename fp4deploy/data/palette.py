"""Colours of classes, and classes drawn over an image."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import numpy as np

from fp4deploy.data.sample import IGNORE, MAX_CLASSES, ClassIds, Pixels, background_class

TINT = 0.6
BAND = 2**20  # pixels that are blended at once: they are FP32 meanwhile
VOID = (160, 160, 160)
BLACK = (0, 0, 0)
COLOURS = (
    (76, 110, 245), (250, 176, 5), (12, 166, 120), (232, 89, 12), (174, 62, 201), (21, 170, 191),
    (130, 201, 30), (250, 82, 82), (121, 80, 242), (166, 113, 68), (77, 171, 247), (240, 101, 149),
)  # fmt: skip

Palette = list[tuple[int, int, int] | None]


def colours(names: Sequence[str], background: bool) -> Palette:
    """One colour a class; None for the background (`background_class`), which stays as photographed."""
    clear = background_class(names, background)
    found: Palette = [_colour(number) for number in range(len(names) - (clear is not None))]
    if clear is not None:
        found.insert(clear, None)
    return found


def _colour(number: int) -> tuple[int, int, int]:
    if number < len(COLOURS):
        return COLOURS[number]
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, 0.65, 0.9)
    return round(255 * red), round(255 * green), round(255 * blue)


def tinted(image: Pixels, mask: ClassIds, palette: Palette) -> Pixels:
    """Draw class colours over the image in grey, so that they stand out; `mask` [H, W] holds class ids or, of at most
    255 classes, 255.
    """
    table = np.zeros((max(256, len(palette)), 3), np.float32)
    weight = np.zeros(len(table), np.float32)
    void: list[tuple[int, tuple[int, int, int] | None]] = [(IGNORE, VOID)] if len(palette) <= MAX_CLASSES else []
    for number, colour in [*enumerate(palette), *void]:
        if colour is not None:
            table[number], weight[number] = colour, TINT
    blended = np.empty_like(image)
    rows = max(1, BAND // max(1, image.shape[1]))
    for top in range(0, len(image), rows):
        band = slice(top, top + rows)
        grey = image[band].mean(axis=2, dtype=np.float32)[..., None]
        share = weight[mask[band]][..., None]
        blended[band] = ((1 - share) * grey + share * table[mask[band]]).round()
    return blended


def png_palette(palette: Palette) -> list[int]:
    """The palette of an indexed PNG, 256 times R, G, B; a class without a colour is black, 255 is grey.

    Empty for more than 255 classes, whose masks have 16 bits and no palette.
    """
    if len(palette) > MAX_CLASSES:
        return []
    table = [colour or BLACK for colour in palette] + [BLACK] * (256 - len(palette))
    table[IGNORE] = VOID
    return [value for colour in table for value in colour]
