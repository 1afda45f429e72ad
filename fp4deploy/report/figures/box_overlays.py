"""Overlays of detectors: image, truth, FP16, NVFP4, and the boxes that only one of the two models has.

Boxes of a score from `SHOWN` are drawn. A box is matched where one of the same class in the other model overlaps it
by an IoU of a half at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fp4deploy.bench.runtimes.protocol import Runtime
from fp4deploy.bench.runtimes.pytorch import TorchRuntime
from fp4deploy.data import IGNORE, LetterboxTransform, Sample, box_set
from fp4deploy.data.sample import spread
from fp4deploy.detection import Detections, decode_boxes
from fp4deploy.detection.decode import iou
from fp4deploy.detection.draw import draw_boxes
from fp4deploy.models.boxes import SHOWN as SCORE
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.report.figures.instance_overlays import enlarged
from fp4deploy.report.figures.overlays import CANDIDATES, Overlay, Pixels, faded, most_telling, png_uri

MATCHED = 0.5  # IoU


def draw_box_overlays(fp16: Path, nvfp4: Path, data: Path) -> list[Overlay]:
    """Overlays of two checkpoints of one run: the images with the most objects, and that where they differ most."""
    models = TorchRuntime(fp16), TorchRuntime(nvfp4)
    dataset = box_set(models[0].card, data)
    found: list[_Prediction] = []
    for index in spread(len(dataset), CANDIDATES):
        sample = dataset.load(index)
        first, second = (find_boxes(model, sample) for model in models)
        names = models[0].card.class_names
        found.append(_Prediction(sample.name, sample.image, true_boxes(sample), first, second, names))
    *rich, worst = most_telling(found, lambda each: each.differing, lambda each: len(each.truth))
    return [each.draw(each is worst) for each in (*rich, worst)]


@dataclass(frozen=True, eq=False)
class _Prediction:
    name: str
    image: Pixels
    truth: Detections
    first: Detections
    second: Detections
    names: Sequence[str]

    @property
    def differing(self) -> float:
        return unmatched_share(self.first, self.second)

    def draw(self, worst: bool) -> Overlay:
        image = enlarged(self.image)
        factor = image.shape[0] / self.image.shape[0]
        truth, first, second = (_scaled(each, factor) for each in (self.truth, self.first, self.second))
        grey = faded(image)
        for one, other in ((first, second), (second, first)):
            grey = draw_boxes(grey, _chosen(one, unmatched(one, other)), self.names)
        pictures = {
            "image": image,
            "truth": draw_boxes(image, truth, self.names),
            "FP16": draw_boxes(image, first, self.names),
            "NVFP4": draw_boxes(image, second, self.names),
            "difference": grey,
        }
        uris = {title: png_uri(pixels) for title, pixels in pictures.items()}
        return Overlay(self.name, uris, self.differing, worst, counted="boxes")


def find_boxes(model: Runtime, sample: Sample) -> Detections:
    """The boxes of a model on an image, of those scores that are drawn."""
    card = model.card
    assert isinstance(card.head, DetectionHead)
    image = LetterboxTransform(card.height, card.width, card.mean, card.std)(sample)[0].numpy()[None]
    size = (sample.image.shape[0], sample.image.shape[1])
    output = torch.from_numpy(model.infer(image)[0])
    return decode_boxes(output, card.head, (card.height, card.width), size).above(SCORE)


def true_boxes(sample: Sample) -> Detections:
    """The annotated boxes of a sample of a `BoxDataset`, without crowds."""
    assert sample.boxes is not None
    whole = sample.boxes[sample.boxes[:, 0] != IGNORE]
    return Detections(whole[:, 1:].astype(np.float32), whole[:, 0].astype(np.int64), np.ones(len(whole), np.float32))


def unmatched(one: Detections, other: Detections) -> NDArray[np.bool_]:
    """Which boxes of `one` have no match in `other`, bool [K]."""
    same = one.classes[:, None] == other.classes[None]
    return ~((iou(one.boxes, other.boxes) >= MATCHED) & same).any(1)


def unmatched_share(one: Detections, other: Detections) -> float:
    """Share of the boxes of both models that have no match in the other."""
    count = len(one) + len(other)
    return float(unmatched(one, other).sum() + unmatched(other, one).sum()) / count if count else 0.0


def _scaled(found: Detections, factor: float) -> Detections:
    return Detections(found.boxes * np.float32(factor), found.classes, found.scores)


def _chosen(found: Detections, which: NDArray[np.bool_]) -> Detections:
    return Detections(found.boxes[which], found.classes[which], found.scores[which])
