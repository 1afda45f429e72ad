"""The images on which an artefact lost most: image, truth, baseline, artefact; of classes also what became wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fp4deploy.bench.evidence import PixelCounts, read_evidence
from fp4deploy.bench.records import Evidence
from fp4deploy.bench.runtimes.like import Like
from fp4deploy.bench.runtimes.open import open_for_images
from fp4deploy.bench.runtimes.protocol import Runtime
from fp4deploy.data import IGNORE, EvalTransform, NumberedEvalTransform, Sample
from fp4deploy.data.palette import Palette, colours, tinted
from fp4deploy.detection.draw import draw_boxes
from fp4deploy.errors import Fp4DeployError
from fp4deploy.instances import decode
from fp4deploy.instances.draw import draw_instances
from fp4deploy.models import ModelCard
from fp4deploy.models.heads import InstanceHead
from fp4deploy.report.figures.box_overlays import find_boxes, true_boxes
from fp4deploy.report.figures.overlays import DIFFERENCE, Pixels, faded
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
    draw = DRAWN[card.task]
    wanted = dict.fromkeys(images)
    samples = (dataset.load(index) for index in range(len(dataset)))
    found = {sample.name: sample for sample in samples if sample.name in wanted}
    written = []
    drawn = [name for name in wanted if name in found]
    for name, stem in zip(drawn, _stems(drawn), strict=True):
        path = folder / FOLDER / f"{stem}.png"
        with atomic_write(path) as temporary:
            Image.fromarray(draw(card, found[name], models)).save(temporary, format="PNG")
        written.append(path)
    return written


def _semantic(card: ModelCard, sample: Sample, models: Sequence[Runtime]) -> Pixels:
    """The columns of one image at the size of the model's input."""
    tensor, mask = EvalTransform(card.height, card.width, card.mean, card.std)(sample)
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (card.mean, card.std))
    image = ((tensor.numpy() * std + mean).clip(0, 1) * 255).round().astype(np.uint8).transpose(1, 2, 0)
    outputs = [model.infer(tensor.numpy()[None])[0] for model in models]
    predictions = [output.argmax(0).astype(np.uint8) for output in outputs]
    palette = colours(card.class_names, card.background)
    return _row(image, mask.numpy().astype(np.uint8), predictions, palette)


def _instances(card: ModelCard, sample: Sample, models: Sequence[Runtime]) -> Pixels:
    """The columns of one image at its own size: image, truth, and the objects that each model finds."""
    assert isinstance(card.head, InstanceHead)
    assert sample.instances is not None
    tensor, _ = NumberedEvalTransform(card.height, card.width, card.mean, card.std)(sample)
    size = (sample.mask.shape[0], sample.mask.shape[1])
    outputs = [torch.from_numpy(model.infer(tensor.numpy()[None])[0]) for model in models]
    drawn = [draw_instances(sample.image, decode(output, card.head, size).ids) for output in outputs]
    truth = draw_instances(sample.image, sample.instances, sample.mask == IGNORE)
    return np.concatenate([sample.image, truth, *drawn], axis=1)


def _boxes(card: ModelCard, sample: Sample, models: Sequence[Runtime]) -> Pixels:
    """The columns of one image at its own size: image, true boxes, and the boxes that each model finds."""
    drawn = [draw_boxes(sample.image, find_boxes(model, sample)) for model in models]
    return np.concatenate([sample.image, draw_boxes(sample.image, true_boxes(sample)), *drawn], axis=1)


def _labels(card: ModelCard, sample: Sample, models: Sequence[Runtime]) -> Pixels:
    """The columns of one image at its own size, in the colours of its class and of those that the models give it."""
    transform = task_of(card).transform(card.size, card.mean, card.std)
    image = transform(sample)[0].numpy()[None]
    predictions = [np.full(sample.mask.shape, model.infer(image)[0].argmax(), np.uint8) for model in models]
    palette = colours(card.class_names, card.background)
    return _row(sample.image, sample.mask.astype(np.uint8), predictions, palette)


DRAWN = {"semantic": _semantic, "instance": _instances, "detection": _boxes, "classification": _labels}


def _row(image: Pixels, truth: Pixels, predictions: Sequence[Pixels], palette: Palette) -> Pixels:
    """Panels side by side [H, columns * W, 3]; the last one marks pixels that are wrong, and were right before."""
    wrong = (predictions[-1] != truth) & (truth != IGNORE)
    if len(predictions) > 1:
        wrong &= predictions[0] == truth
    grey = faded(image)
    grey[wrong] = DIFFERENCE
    return np.concatenate([image, *(tinted(image, mask, palette) for mask in (truth, *predictions)), grey], axis=1)


def _stems(names: Sequence[str]) -> list[str]:
    """Of files that any system takes; a number tells apart those that would be equal."""
    stems = [re.sub(r"[^A-Za-z0-9._-]+", "_", Path(name).stem) or "image" for name in names]
    folded = [stem.casefold() for stem in stems]
    return [f"{stem}.{number}" if folded.count(stem.casefold()) > 1 else stem for number, stem in enumerate(stems, 1)]
