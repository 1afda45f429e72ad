"""The images on which an artefact lost most: image, truth, baseline, artefact; of classes also what became wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from fp4deploy.bench.evidence import PixelCounts, read_evidence
from fp4deploy.bench.records import Evidence
from fp4deploy.bench.runtimes.like import Like
from fp4deploy.bench.runtimes.open import open_for_images
from fp4deploy.bench.runtimes.protocol import Runtime
from fp4deploy.data import IGNORE, Sample
from fp4deploy.data.sample import Pixels
from fp4deploy.errors import Fp4DeployError
from fp4deploy.models import ModelCard
from fp4deploy.report.figures.task_pictures import DIFFERENCE, PICTURES, Seen, faded
from fp4deploy.system.files import atomic_write
from fp4deploy.tasks import task_of

MAX_IMAGES = 5
FOLDER = "lost"


def most_wrong(evidence: Evidence) -> list[str]:
    """The `MAX_IMAGES` images with the largest share of wrong pixels."""
    counts = read_evidence(evidence, "The counts")
    assert isinstance(counts, PixelCounts)
    hit, labelled = counts.hit.sum(1), counts.truth.sum(1)
    right = np.where(labelled, hit / np.maximum(labelled, 1), 1.0)  # nothing is wrong where all is void
    return [counts.images[place] for place in np.argsort(right, kind="stable")[:MAX_IMAGES]]


def draw_lost(
    artefact: Path,
    baseline: Path | None,
    images: Sequence[str],
    data: Path,
    split: str,
    folder: Path,
    like: Like | None = None,
) -> list[Path]:
    """Write one PNG an image into `folder`/lost; the baseline's column is left out where it cannot be run.

    like: the card of ONNX files that have none.

    Returns:
        The files, in the order of `images`; names that the split does not have are passed over.

    Raises:
        InputError: the artefact or the data cannot be read, or the folder cannot be written.
    """
    runtime = open_for_images(artefact, like=like)
    try:
        other = open_for_images(baseline, like=like) if baseline is not None else None
    except Fp4DeployError:
        other = None
    models = [model for model in (other, runtime) if model is not None]
    card = runtime.card
    if card.volume is not None:
        return []  # a volume is no one picture; the slices of a report show where models differ
    dataset = task_of(card).for_card(card, data, split, labelled=True)
    wanted = dict.fromkeys(images)
    samples = (dataset.load(index) for index in range(len(dataset)))
    found = {sample.name: sample for sample in samples if sample.name in wanted}
    written = []
    drawn = [name for name in wanted if name in found]
    for name, stem in zip(drawn, _stems(drawn), strict=True):
        path = folder / FOLDER / f"{stem}.png"
        with atomic_write(path) as temporary:
            Image.fromarray(_panels(card, found[name], models)).save(temporary, format="PNG")
        written.append(path)
    return written


def _panels(card: ModelCard, sample: Sample, models: Sequence[Runtime]) -> Pixels:
    """Image, truth, and what each model predicts, side by side; of classes also the pixels that became wrong."""
    kind = PICTURES[card.task]
    seen = kind.see(card, sample, models)
    drawn = [kind.draw(seen.image, labels, card) for labels in (seen.truth, *seen.predictions)]
    wrong = [became_wrong(seen)] if kind.legend else []
    return np.concatenate([seen.image, *drawn, *wrong], axis=1)


def became_wrong(seen: Seen) -> Pixels:
    """The image in grey, its pixels marked that are wrong in the last prediction, and right in one before it."""
    before, last = seen.predictions[:-1], seen.predictions[-1]
    wrong = (last != seen.truth) & (seen.truth != IGNORE)
    for each in before:
        wrong &= each == seen.truth
    grey = faded(seen.image)
    grey[wrong] = DIFFERENCE
    return grey


def _stems(names: Sequence[str]) -> list[str]:
    """Of files that any system takes; a number tells apart those that would be equal."""
    stems = [re.sub(r"[^A-Za-z0-9._-]+", "_", Path(name).stem) or "image" for name in names]
    folded = [stem.casefold() for stem in stems]
    return [f"{stem}.{number}" if folded.count(stem.casefold()) > 1 else stem for number, stem in enumerate(stems, 1)]
