"""Panoptic files as other tools read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def from_rgb(pixels: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Segment ids of what `to_rgb` gives."""
    red, green, blue = (pixels[..., channel].astype(np.int32) for channel in range(3))
    return red + 256 * green + 65536 * blue


def read_panoptic(folder: Path) -> dict[str, Any]:
    """Content of panoptic.json."""
    found: dict[str, Any] = json.loads((folder / "panoptic.json").read_text())
    return found
