"""Overlays of instance models: image, truth, FP16, NVFP4, and the pixels on which the two models differ.

Each model numbers objects in the order of its scores, so that numbers cannot be compared. Two objects are the same
where their IoU is above a half, which is true of one partner at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fp4deploy.bench.runtimes.pytorch import TorchRuntime
from fp4deploy.data import IGNORE, NumberedEvalTransform, instance_set
from fp4deploy.data.sample import spread
from fp4deploy.instances import Instances, decode
from fp4deploy.instances.draw import draw_instances, label_objects
from fp4deploy.models.heads import InstanceHead
from fp4deploy.report.figures.overlays import CANDIDATES, DIFFERENCE, Overlay, Pixels, faded, most_telling, png_uri

LARGEST = 420  # side of a picture in pixels
MAX_TEXTS = 12  # of a picture: the objects of the highest scores
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
    for index in spread(len(dataset), CANDIDATES):
        sample = dataset.load(index)
        assert sample.instances is not None
        size = (sample.mask.shape[0], sample.mask.shape[1])
        image = transform(sample)[0].numpy()[None]
        outputs = [torch.from_numpy(model.infer(image)[0]) for model in models]
        first, second = (decode(output, head, size) for output in outputs)
        void = sample.mask == IGNORE
        texts = [_true_texts(sample.instances, sample.mask, card.class_names)]
        texts += [_texts(found, card.class_names) for found in (first, second)]
        predictions.append(_Prediction(sample.name, sample.image, sample.instances, void, first.ids, second.ids, texts))
    *rich, worst = most_telling(predictions, lambda each: each.differing, lambda each: int(each.truth.max()))
    return [each.draw(each is worst) for each in (*rich, worst)]


@dataclass(frozen=True, eq=False)
class _Prediction:
    """What both models predict for one image [H, W, 3]: maps [H, W] of numbers of objects; texts to write on them."""

    name: str
    image: Pixels
    truth: Ids
    void: NDArray[np.bool_]
    first: Ids
    second: Ids
    texts: list[list[str]]

    @property
    def differing(self) -> float:
        return float(different(self.first, self.second).mean())

    def draw(self, worst: bool) -> Overlay:
        grey = faded(self.image)
        grey[different(self.first, self.second)] = DIFFERENCE
        pictures = {
            "image": self.image,
            "truth": draw_instances(self.image, self.truth, self.void),
            "FP16": draw_instances(self.image, self.first),
            "NVFP4": draw_instances(self.image, self.second),
            "difference": grey,
        }
        larger = {title: enlarged(pixels) for title, pixels in pictures.items()}
        factor = larger["image"].shape[0] / self.image.shape[0]
        for title, ids, texts in zip(
            ("truth", "FP16", "NVFP4"), (self.truth, self.first, self.second), self.texts, strict=True
        ):
            larger[title] = label_objects(larger[title], ids, texts, factor)
        uris = {title: png_uri(pixels) for title, pixels in larger.items()}
        return Overlay(self.name, uris, self.differing, worst)


def enlarged(pixels: Pixels) -> Pixels:
    """The picture with a larger side of `LARGEST` pixels, so that text on it can be read."""
    factor = LARGEST / max(pixels.shape[:2])
    size = max(1, round(pixels.shape[1] * factor)), max(1, round(pixels.shape[0] * factor))
    resized: Pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))
    return resized


def _texts(found: Instances, names: Sequence[str]) -> list[str]:
    return [f"{names[int(number)]} {score:.2f}" for number, score in zip(found.classes, found.scores, strict=True)][
        :MAX_TEXTS
    ]


def _true_texts(ids: Ids, mask: NDArray[np.uint8], names: Sequence[str]) -> list[str]:
    """The class of each annotated object, which its pixels have in the mask."""
    texts = []
    for number in range(1, int(ids.max(initial=0)) + 1):
        inside = mask[ids == number]
        known = inside[inside != IGNORE]
        texts.append(names[int(np.bincount(known).argmax())] if len(known) else "")
    return texts


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
