"""The images on which an artefact lost most: image, truth, baseline, artefact, and the pixels that became wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fp4deploy.bench.evidence import PixelCounts, read_evidence
from fp4deploy.bench.records import Evidence
from fp4deploy.bench.runtimes.open import open_runtime
from fp4deploy.data import IGNORE, EvalTransform, validation_set
from fp4deploy.errors import Fp4DeployError
from fp4deploy.files import atomic_write
from fp4deploy.predict.palette import Palette, colours, tinted
from fp4deploy.report.figures.overlays import DIFFERENCE, Pixels

MOST = 5
FOLDER = "overlays"


def most_wrong(evidence: Evidence) -> list[str]:
    """The `MOST` images with the largest share of wrong pixels."""
    counts = read_evidence(evidence, "The counts")
    assert isinstance(counts, PixelCounts)
    right = counts.hit.sum(1) / np.maximum(counts.truth.sum(1), 1)
    return [counts.images[place] for place in np.argsort(right, kind="stable")[:MOST]]


def draw_lost(
    artefact: Path, baseline: Path | None, images: Sequence[str], data: Path, split: str, folder: Path
) -> list[Path]:
    """Write one PNG an image into `folder`/overlays; the baseline's column is left out where it cannot be run.

    Returns:
        The files, in the order of `images`; names that the split does not have are passed over.

    Raises:
        InputError: the artefact or the data cannot be read, or the folder cannot be written.
    """
    runtime = open_runtime(artefact)
    card = runtime.card
    dataset = validation_set(card, data, split)
    transform = EvalTransform(card.height, card.width, card.mean, card.std)
    wanted = dict.fromkeys(images)
    samples = (dataset.load(index) for index in range(len(dataset)))
    found = {sample.name: sample for sample in samples if sample.name in wanted}
    try:
        other = open_runtime(baseline) if baseline is not None else None
    except Fp4DeployError:
        other = None
    palette = colours(len(card.class_names), card.background)
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (card.mean, card.std))
    written = []
    for name in [name for name in wanted if name in found]:
        tensor, mask = transform(found[name])
        normalised = tensor.numpy()[None]
        image = ((tensor.numpy() * std + mean).clip(0, 1) * 255).round().astype(np.uint8).transpose(1, 2, 0)
        predictions = [
            torch.from_numpy(model.infer(normalised)[0]).argmax(0).numpy().astype(np.uint8)
            for model in (other, runtime)
            if model is not None
        ]
        path = folder / FOLDER / f"{_file_name(name)}.png"
        with atomic_write(path) as temporary:
            drawn = _row(image, mask.numpy().astype(np.uint8), predictions, palette)
            Image.fromarray(drawn).save(temporary, format="PNG")
        written.append(path)
    return written


def _row(image: Pixels, truth: Pixels, predictions: Sequence[Pixels], palette: Palette) -> Pixels:
    """Panels side by side [H, columns * W, 3]; the last one marks pixels that are wrong, and were right before."""
    wrong = (predictions[-1] != truth) & (truth != IGNORE)
    if len(predictions) > 1:
        wrong &= predictions[0] == truth
    grey = np.repeat(image.mean(axis=2, keepdims=True) * 0.5 + 110, 3, axis=2).astype(np.uint8)
    grey[wrong] = DIFFERENCE
    return np.concatenate([image, *(tinted(image, mask, palette) for mask in (truth, *predictions)), grey], axis=1)


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", Path(name).stem) or "image"
