"""Draw the picture of the README from a run: python docs/images/make_result.py RUN --data DIR

Rows are validation images: those with the most objects, and the one on which the two models differ most. Scores are the
best validation scores of the training (metrics.jsonl), sizes those of `fp4deploy export --format packed`.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from PIL import Image

from fp4deploy.report.figures.overlays import draw_overlays
from fp4deploy.runs import Run

METRICS = {"ap": "AP", "miou": "mIoU"}


def main() -> None:
    """Read a run, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.png"))
    parser.add_argument("--rows", type=int, default=3)
    arguments = parser.parse_args()
    matplotlib.use("Agg")
    checkpoints = [arguments.run / model / "best.safetensors" for model in ("fp16", "nvfp4")]
    metric, scores = best(arguments.run)
    overlays = draw_overlays(*checkpoints, arguments.data)[-arguments.rows :]
    sizes = [Run(arguments.run).exported(model, ".fp4").stat().st_size / 1e6 for model in ("fp16", "nvfp4")]
    titles = {"image": "image", "truth": "annotation", "difference": "difference in red"}
    for label, size, score in zip(("FP16", "NVFP4"), sizes, scores, strict=True):
        titles[label] = f"{label}: {size:.1f} MB, {METRICS[metric]} {100 * score:.1f}"
    figure, axes = plt.subplots(len(overlays), 5, figsize=(13, 2.1 * len(overlays)), squeeze=False)
    for number, overlay in enumerate(overlays):
        for place, (name, uri) in zip(axes[number], overlay.pictures.items(), strict=True):
            place.imshow(landscape(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))))
            place.axis("off")
            if number == 0:
                place.set_title(titles[name], fontsize=10)
    figure.tight_layout(pad=0.4)
    figure.savefig(arguments.out, dpi=90, metadata={"Software": None})


def landscape(image: Image.Image) -> Image.Image:
    """The upper part of an image, 4:3, so that all rows have one shape."""
    width = min(image.width, round(image.height * 4 / 3))
    return image.crop((0, 0, width, round(width * 3 / 4)))


def best(run: Path) -> tuple[str, list[float]]:
    """The metric of a run and the best score of FP16 and NVFP4."""
    scores = []
    metric = "miou"
    for model in ("fp16", "nvfp4"):
        lines = [json.loads(line) for line in (run / model / "metrics.jsonl").read_text().splitlines()]
        metric = "ap" if any("ap" in line for line in lines) else "miou"
        scores.append(max(line[metric] for line in lines if line.get(metric) is not None))
    return metric, scores


if __name__ == "__main__":
    main()
