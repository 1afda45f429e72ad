"""Pictures of instances: every object in a colour of its own over the image in grey, with a line around it.

The eight colours of Okabe and Ito, which people who cannot tell red from green tell apart, are given in turn, so that
two neighbours rarely share one; the line separates them where they do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Pixels = NDArray[np.uint8]

TINT = 0.55
OUTLINE = (255, 255, 255)
VOID = (160, 160, 160)
PALETTE: Pixels = np.array(
    [
        (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66),
        (0, 114, 178), (213, 94, 0), (204, 121, 167),
    ],
    dtype=np.uint8,
)  # fmt: skip


def draw_instances(image: Pixels, ids: NDArray[np.int32], void: NDArray[np.bool_] | None = None) -> Pixels:
    """Lay objects over an image.

    Args:
        image: uint8 [H, W, 3] RGB.
        ids: int32 [H, W], 0 where there is no object.
        void: bool [H, W], drawn grey: crowds, which are not scored.

    Returns:
        uint8 [H, W, 3]
    """
    grey = np.repeat(image.mean(axis=2, keepdims=True), 3, axis=2).astype(np.float32)
    colour = PALETTE[(ids - 1) % len(PALETTE)].astype(np.float32)
    inside = ids > 0
    drawn = np.where(inside[..., None], (1 - TINT) * grey + TINT * colour, grey)
    if void is not None:
        drawn[void] = (1 - TINT) * grey[void] + TINT * np.array(VOID, dtype=np.float32)
    drawn[inside & outline(ids)] = OUTLINE
    return drawn.round().astype(np.uint8)


def label_objects(image: Pixels, ids: NDArray[np.int32], texts: Sequence[str], factor: float = 1.0) -> Pixels:
    """Write a text on each object, over the middle of its pixels.

    Args:
        image: uint8 [H, W, 3] RGB.
        ids: int32 [h, w] with the numbers 1 to len(texts); those that are not there get no text.
        texts: such as "car 0.93".
        factor: H / h.

    Returns:
        uint8 [H, W, 3]
    """
    picture = Image.fromarray(image)
    canvas = ImageDraw.Draw(picture)
    font = ImageFont.load_default(max(9, round(min(image.shape[:2]) / 24)))
    for number, text in enumerate(texts, start=1):
        rows, columns = np.nonzero(ids == number)
        if len(rows):
            place = float(np.median(columns) + 0.5) * factor, float(np.median(rows) + 0.5) * factor
            left, top, right, bottom = canvas.textbbox((0, 0), text, font=font, stroke_width=1)
            x = min(max(place[0] - (right - left) / 2, 1), image.shape[1] - right - 1)
            y = min(max(place[1] - (bottom - top) / 2, 1), image.shape[0] - bottom - 1)
            canvas.text((x, y), text, fill=(255, 255, 255), font=font, stroke_width=1, stroke_fill=(0, 0, 0))
    drawn: Pixels = np.asarray(picture)
    return drawn


def outline(ids: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Pixels whose right or lower neighbour belongs to something else; bool [H, W]."""
    edge = np.zeros(ids.shape, dtype=np.bool_)
    edge[:, :-1] |= ids[:, 1:] != ids[:, :-1]
    edge[:-1] |= ids[1:] != ids[:-1]
    return edge
