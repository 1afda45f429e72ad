"""Pictures of boxes: each in the colour of its class over the image, with the class and the score where it is named."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from fp4deploy.data.sample import Pixels
from fp4deploy.detection.decode import Detections
from fp4deploy.instances.draw import PALETTE


def draw_boxes(image: Pixels, found: Detections, names: Sequence[str] | None = None) -> Pixels:
    """Draw boxes over an image.

    Args:
        image: uint8 [H, W, 3] RGB.
        names: of the classes by id, background first; None: boxes alone.

    Returns:
        uint8 [H, W, 3]
    """
    picture = Image.fromarray(image)
    canvas = ImageDraw.Draw(picture)
    thick = max(1, round(min(image.shape[:2]) / 300))
    for (left, top, right, bottom), number, score in reversed(
        list(zip(found.boxes, found.classes, found.scores, strict=True))
    ):
        colour = tuple(int(value) for value in PALETTE[(int(number) - 1) % len(PALETTE)])
        edges = (float(left), float(top), max(float(left), float(right) - 1), max(float(top), float(bottom) - 1))
        canvas.rectangle(edges, outline=colour, width=thick)
        if names is not None:
            canvas.text((float(left) + thick + 1, float(top)), f"{names[int(number)]} {score:.2f}", fill=colour)
    drawn: Pixels = np.asarray(picture)
    return drawn
