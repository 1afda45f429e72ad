"""Content of the hand-made dataset folders."""

from __future__ import annotations

from typing import Any

import numpy as np

HEIGHT, WIDTH = 12, 16
SQUARE = [2, 2, 8, 2, 8, 8, 2, 8]  # columns and rows 2..7
CONTENT: dict[str, Any] = {
    "images": [
        {"id": 7, "file_name": "a.png", "height": HEIGHT, "width": WIDTH},
        {"id": 9, "file_name": "empty.png", "height": HEIGHT, "width": WIDTH},
    ],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 44, "iscrowd": 0, "segmentation": [SQUARE], "bbox": [2, 2, 6, 6]}
    ],
    "categories": [{"id": 1, "name": "person"}, {"id": 44, "name": "bottle"}, {"id": 90, "name": "cup"}],
}


def runs(mask: np.ndarray) -> list[int]:
    """Uncompressed RLE counts of a boolean mask, written as the COCO site defines them."""
    counts, value = [0], False
    for pixel in mask.T.reshape(-1):
        if bool(pixel) != value:
            counts.append(0)
            value = not value
        counts[-1] += 1
    return counts
