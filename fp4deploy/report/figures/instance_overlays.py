"""Overlays of instance models: image, truth, FP16, NVFP4, and the pixels on which the two models differ.

Each model numbers objects in the order of its scores, so that numbers cannot be compared. Two objects are the same
where their IoU is above a half, which is true of one partner at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fp4deploy.bench.runtimes.pytorch import TorchRuntime
from fp4deploy.data import IGNORE, NumberedEvalTransform, instance_set
from fp4deploy.instances import decode
from fp4deploy.instances.draw import draw_instances
from fp4deploy.models.heads import InstanceHead
from fp4deploy.report.figures.overlays import CANDIDATES, DIFFERENCE, SHOWN, Overlay, Pixels, png_uri

LARGEST = 420  # side of a picture in pixels
Ids = NDArray[np.int32]


def draw_instance_overlays(fp16: Path, nvfp4: Path, data: Path) -> list[Overlay]:
    """Overlays of two checkpoints of one run: the images with the most objects, and that where they differ most."""
    models = TorchRuntime(fp16), TorchRuntime(nvfp4)
    card = models[0].card
    head = card.head
    assert isinstance(head, InstanceHead)
    dataset = instance_set(card, data, numbered=True)
    transform = NumberedEvalTransform(card.height, card.width, card.mean, card.std)
    predictions: list[_Prediction] = []
    for index in sorted({round(place) for place in np.linspace(0, len(dataset) - 1, CANDIDATES)}):
        sample = dataset.load(index)
        assert sample.instances is not None
        size = (sample.mask.shape[0], sample.mask.shape[1])
        image = transform(sample)[0].numpy()[None]
        outputs = [torch.from_numpy(model.infer(image)[0]) for model in models]
        first, second = (decode(output, head, size).ids for output in outputs)
        void = sample.mask == IGNORE
        predictions.append(_Prediction(sample.name, sample.image, sample.instances, void, first, second))
    worst = max(predictions, key=lambda prediction: prediction.differing)
    rich = sorted(
        (prediction for prediction in predictions if prediction is not worst),
        key=lambda prediction: -int(prediction.truth.max()),
    )
    return [prediction.draw(prediction is worst) for prediction in (*rich[: SHOWN - 1], worst)]


@dataclass(frozen=True, eq=False)
class _Prediction:
    """What both models predict for one image [H, W, 3]; maps [H, W] of numbers of objects."""

    name: str
    image: Pixels
    truth: Ids
    void: NDArray[np.bool_]
    first: Ids
    second: Ids

    @property
    def differing(self) -> float:
        return float(different(self.first, self.second).mean())

    def draw(self, worst: bool) -> Overlay:
        grey = np.repeat(self.image.mean(axis=2, keepdims=True) * 0.5 + 110, 3, axis=2).astype(np.uint8)
        grey[different(self.first, self.second)] = DIFFERENCE
        pictures = {
            "image": self.image,
            "truth": draw_instances(self.image, self.truth, self.void),
            "FP16": draw_instances(self.image, self.first),
            "NVFP4": draw_instances(self.image, self.second),
            "difference": grey,
        }
        uris = {title: png_uri(pixels, LARGEST) for title, pixels in pictures.items()}
        return Overlay(self.name, uris, self.differing, worst)


def different(first: Ids, second: Ids) -> NDArray[np.bool_]:
    """Pixels [H, W] that belong to different objects, or to one on one side only."""
    across = int(second.max(initial=0)) + 1
    pair = first.astype(np.int64) * across + second
    shared = np.bincount(pair.reshape(-1), minlength=(int(first.max(initial=0)) + 1) * across).reshape(-1, across)
    union = shared.sum(1, keepdims=True) + shared.sum(0, keepdims=True) - shared
    same = 2 * shared > union
    same[0], same[:, 0] = False, False
    same[0, 0] = True
    return ~same[first, second]
