"""Draw the picture of docs/volumes.md: python docs/images/make_volumes.py FP16.safetensors NVFP4.safetensors DATA

The slices are those that a report shows (`report.figures.overlays`): image, truth, both models, where they differ.
"""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from PIL import Image

from fp4deploy.report.figures.overlays import draw_overlays

TARGET = Path(__file__).parent / "volumes.png"


def main(fp16: str, nvfp4: str, data: str) -> None:
    """Write a row for each volume, at most four."""
    matplotlib.use("Agg")
    found = draw_overlays(Path(fp16), Path(nvfp4), Path(data))
    columns = list(found[0].pictures)
    figure, rows = plt.subplots(len(found), len(columns), figsize=(8, 2.75 * len(found)), squeeze=False)
    for overlay, axes in zip(found, rows, strict=True):
        for title, each in zip(columns, axes, strict=True):
            content = base64.b64decode(overlay.pictures[title].partition(",")[2])
            each.imshow(Image.open(io.BytesIO(content)))
            each.set_title(title if overlay is found[0] else "", fontsize=9)
            each.axis("off")
        axes[0].text(0, -0.09, f"{overlay.name}: {100 * overlay.differing:.1f} % differ", transform=axes[0].transAxes)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.97, bottom=0.03, wspace=0.03, hspace=0.15)
    figure.savefig(TARGET, dpi=90)


if __name__ == "__main__":
    main(*sys.argv[1:])
