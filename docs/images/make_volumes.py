"""Draw the picture of docs/volumes.md: python docs/images/make_volumes.py FP16.safetensors NVFP4.safetensors DATA

The slices are those that a report shows (`report.figures.overlays`): image, truth, both models, where they differ.
"""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from PIL import Image

from fp4deploy.report.figures.overlays import draw_overlays

TARGET = Path(__file__).parent / "volumes.png"


def draw(rows: Sequence[tuple[str, float, Mapping[str, Any]]], target: Path) -> None:
    """Write a row for each volume: its name, the share in which two models differ, and pictures [H, W, 3] by title."""
    matplotlib.use("Agg")
    columns = list(rows[0][2])
    figure, grid = plt.subplots(len(rows), len(columns), figsize=(8, 2.75 * len(rows)), squeeze=False)
    for number, ((name, differing, pictures), axes) in enumerate(zip(rows, grid, strict=True)):
        for title, each in zip(columns, axes, strict=True):
            each.imshow(pictures[title])
            each.set_title(title if number == 0 else "", fontsize=9)
            each.axis("off")
        axes[0].text(0, -0.09, f"{name}: {100 * differing:.1f} % differ", transform=axes[0].transAxes)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.97, bottom=0.03, wspace=0.03, hspace=0.15)
    figure.savefig(target, dpi=90)


def main(fp16: str, nvfp4: str, data: str) -> None:
    """At most four volumes."""
    found = draw_overlays(Path(fp16), Path(nvfp4), Path(data))
    draw(
        [(each.name, each.differing, {title: _pixels(uri) for title, uri in each.pictures.items()}) for each in found],
        TARGET,
    )


def _pixels(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


if __name__ == "__main__":
    main(*sys.argv[1:])
