"""Pictures of instances: every object in a colour of its own over the image in grey, with a line around it.

The eight colours of Okabe and Ito, which people who cannot tell red from green tell apart, are given in turn, so that
two neighbours rarely share one; the line separates them where they do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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


def outline(ids: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Pixels whose right or lower neighbour belongs to something else; bool [H, W]."""
    edge = np.zeros(ids.shape, dtype=np.bool_)
    edge[:, :-1] |= ids[:, 1:] != ids[:, :-1]
    edge[:-1] |= ids[1:] != ids[:-1]
    return edge
