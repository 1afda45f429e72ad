"""What pictures of a task show: an image, its labels, what models predict, and where two predictions differ.

| task | picture | what differs |
|---|---|---|
| semantic | the network's input in the colours of its classes; of a volume one axial slice | pixels |
| classification | the image in the colour of its class | all pixels or none |
| instance | the image, each object in a colour | pixels that belong to different objects |
| detection | the image with its boxes, of scores from `SCORE` | boxes without a match in the other model |

A box is matched where one of the same class in the other model overlaps it by an IoU of a half at least. Each model
numbers objects in the order of its scores, so that numbers cannot be compared: two objects are the same where their IoU
is above a half, which is true of one partner at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fp4deploy.bench.runtimes.protocol import Runtime
from fp4deploy.data import IGNORE, Sample
from fp4deploy.data.palette import colours, tinted
from fp4deploy.data.sample import Pixels
from fp4deploy.detection import Detections, decode_boxes
from fp4deploy.detection.decode import iou
from fp4deploy.detection.draw import draw_boxes
from fp4deploy.instances import decode
from fp4deploy.instances.draw import draw_instances, label_objects
from fp4deploy.models import ModelCard
from fp4deploy.models.boxes import SHOWN as SCORE
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.heads import InstanceHead
from fp4deploy.tasks import task_of

DIFFERENCE = (214, 51, 108)
SLICE = 320  # pixels of the longer side of a slice of a volume, as an integer multiple of its voxels
LARGEST = 420  # side in pixels of a picture with text on it
MAX_TEXTS = 12  # of a picture: the objects of the highest scores
MATCHED = 0.5  # IoU of boxes

Ids = NDArray[np.int32]


class Seen(NamedTuple):
    """An image [H, W, 3], its truth and the prediction of each model, in the form of the task."""

    name: str
    image: Pixels
    truth: Any
    predictions: list[Any]


class ClassPictures:
    """Maps [H, W] of class ids, at the size of the first model's input."""

    unit, legend = "pixels", True

    def see(self, card: ModelCard, sample: Sample, models: Sequence[Runtime]) -> Seen:
        """An image, its truth, and what models predict."""
        tensor, mask = task_of(card).transform(card.size, card.mean, card.std)(sample)
        normalised, truth = tensor.numpy(), mask.numpy().astype(np.uint8)
        predictions = [_resized(_output(model, sample).argmax(0).astype(np.uint8), truth.shape) for model in models]
        if card.volume is not None:
            return slice_of(Seen(sample.name, normalised[0], truth, predictions))
        mean, std = (np.array(values, dtype=np.float32)[:, None, None] for values in (card.mean, card.std))
        image = ((normalised * std + mean).clip(0, 1) * 255).round().astype(np.uint8).transpose(1, 2, 0)
        return Seen(sample.name, image, truth, predictions)

    def unlike(self, first: Any, second: Any) -> NDArray[np.bool_]:
        """Pixels [H, W] in which two predictions differ."""
        differing: NDArray[np.bool_] = first != second
        return differing

    def differing(self, first: object, second: object) -> float:
        """Share of what is counted (`unit`) in which two predictions differ."""
        return float(self.unlike(first, second).mean())

    def richness(self, truth: Any) -> int:
        """How many classes or objects an image has."""
        return int((np.unique(truth) != IGNORE).sum())

    def draw(self, image: Pixels, labels: Any, card: ModelCard) -> Pixels:
        """Labels over an image."""
        return tinted(image, labels, colours(card.class_names, card.background))

    def shown(self, image: Pixels) -> Pixels:
        """An image at the size of `named` and `difference`."""
        return image

    def named(self, image: Pixels, labels: Any, card: ModelCard) -> Pixels:
        """`draw` with what can be written on it: classes and scores."""
        return self.draw(image, labels, card)

    def difference(self, image: Pixels, first: object, second: object, _card: ModelCard) -> Pixels:
        """An image in grey, and on it where two predictions differ."""
        grey = faded(image)
        grey[self.unlike(first, second)] = DIFFERENCE
        return self.shown(grey)


class LabelPictures(ClassPictures):
    """The class of an image at each of its pixels."""

    def see(self, card: ModelCard, sample: Sample, models: Sequence[Runtime]) -> Seen:
        """An image, its truth, and what models predict."""
        found = [np.full(sample.mask.shape, _output(model, sample).argmax(), np.uint8) for model in models]
        return Seen(sample.name, sample.image, sample.mask.astype(np.uint8), found)


class Objects(NamedTuple):
    """Numbers of objects [H, W], a text for each, and crowds, which are not scored."""

    ids: Ids
    texts: list[str]
    void: NDArray[np.bool_] | None = None


class ObjectPictures(ClassPictures):
    """`Objects` at the image's own size."""

    legend = False

    def see(self, card: ModelCard, sample: Sample, models: Sequence[Runtime]) -> Seen:
        """An image, its objects, and those that models find."""
        assert sample.instances is not None
        texts = _true_texts(sample.instances, sample.mask, card.class_names)
        truth = Objects(sample.instances, texts, sample.mask == IGNORE)
        return Seen(sample.name, sample.image, truth, [self._find(card, sample, model) for model in models])

    def _find(self, card: ModelCard, sample: Sample, model: Runtime) -> Objects:
        head = model.card.head
        assert isinstance(head, InstanceHead)
        found = decode(torch.from_numpy(_output(model, sample)), head, (sample.mask.shape[0], sample.mask.shape[1]))
        scored = zip(found.classes[:MAX_TEXTS], found.scores[:MAX_TEXTS], strict=True)
        return Objects(found.ids, [f"{card.class_names[int(number)]} {score:.2f}" for number, score in scored])

    def unlike(self, first: Any, second: Any) -> NDArray[np.bool_]:
        """Pixels [H, W] that belong to different objects."""
        return different(first.ids, second.ids)

    def richness(self, truth: Any) -> int:
        """How many objects an image has."""
        return int(truth.ids.max(initial=0))

    def draw(self, image: Pixels, labels: Any, _card: ModelCard) -> Pixels:
        """Objects over an image."""
        return draw_instances(image, labels.ids, labels.void)

    def shown(self, image: Pixels) -> Pixels:
        """An image, enlarged."""
        return enlarged(image)

    def named(self, image: Pixels, labels: Any, card: ModelCard) -> Pixels:
        """Objects with their texts."""
        larger = self.shown(self.draw(image, labels, card))
        return label_objects(larger, labels.ids, labels.texts, larger.shape[0] / image.shape[0])


class BoxPictures(ObjectPictures):
    """`Detections` at the image's own size."""

    unit = "boxes"

    def see(self, card: ModelCard, sample: Sample, models: Sequence[Runtime]) -> Seen:
        """An image, its boxes without crowds, and those that models find."""
        assert sample.boxes is not None
        whole = sample.boxes[sample.boxes[:, 0] != IGNORE]
        ones = np.ones(len(whole), np.float32)
        truth = Detections(whole[:, 1:].astype(np.float32), whole[:, 0].astype(np.int64), ones)
        return Seen(sample.name, sample.image, truth, [_find_boxes(model, sample) for model in models])

    def differing(self, first: Any, second: Any) -> float:
        """Share of the boxes of both models that have no match in the other."""
        count = len(first) + len(second)
        return float(unmatched(first, second).sum() + unmatched(second, first).sum()) / count if count else 0.0

    def richness(self, truth: Any) -> int:
        """How many boxes an image has."""
        return len(truth)

    def draw(self, image: Pixels, labels: Any, _card: ModelCard) -> Pixels:
        """Boxes over an image."""
        return draw_boxes(image, labels)

    def named(self, image: Pixels, labels: Any, card: ModelCard) -> Pixels:
        """Boxes with class and score."""
        return self._on(self.shown(image), image, labels, card)

    def difference(self, image: Pixels, first: Any, second: Any, card: ModelCard) -> Pixels:
        """An image in grey, and on it the boxes that one model alone has."""
        grey = faded(self.shown(image))
        for one, other in ((first, second), (second, first)):
            alone = unmatched(one, other)
            chosen = Detections(one.boxes[alone], one.classes[alone], one.scores[alone])
            grey = self._on(grey, image, chosen, card)
        return grey

    def _on(self, larger: Pixels, image: Pixels, labels: Detections, card: ModelCard) -> Pixels:
        factor = np.float32(larger.shape[0] / image.shape[0])
        return draw_boxes(larger, Detections(labels.boxes * factor, labels.classes, labels.scores), card.class_names)


PICTURES: dict[str, ClassPictures] = {
    "semantic": ClassPictures(),
    "classification": LabelPictures(),
    "instance": ObjectPictures(),
    "detection": BoxPictures(),
}


def most_telling(kind: ClassPictures, seen: Sequence[Seen], shown: int) -> list[tuple[Seen, float]]:
    """The richest of some images, and last the one on which models differ most from the first; each with how much."""
    found = [
        (each, max((kind.differing(each.predictions[0], x) for x in each.predictions[1:]), default=0.0))
        for each in seen
    ]
    worst = max(found, key=lambda pair: pair[1])
    others = sorted((pair for pair in found if pair is not worst), key=lambda pair: -kind.richness(pair[0].truth))
    return [*others[: shown - 1], worst]


def faded(image: Pixels) -> Pixels:
    """An image in light grey, on which colours are seen."""
    return np.repeat(image.mean(axis=2, keepdims=True) * 0.5 + 110, 3, axis=2).astype(np.uint8)


def enlarged(pixels: Pixels) -> Pixels:
    """The picture with a larger side of `LARGEST` pixels, so that text on it can be read."""
    factor = LARGEST / max(pixels.shape[:2])
    size = max(1, round(pixels.shape[1] * factor)), max(1, round(pixels.shape[0] * factor))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def grey_slice(voxels: NDArray[np.number], at: int) -> Pixels:
    """An axial slice of [D, H, W] as uint8 [H, W, 3], between the 0.5 and 99.5 percentiles of all; anterior is up."""
    low, high = np.percentile(voxels, (0.5, 99.5))
    grey = ((voxels[at, ::-1] - low) / max(high - low, 1e-6) * 255).clip(0, 255).astype(np.uint8)
    return np.repeat(grey[..., None], 3, -1)


def slice_of(seen: Seen) -> Seen:
    """The axial slice of a window [D, H, W] in which the models differ most, of several the one with most classes."""
    first, *others = seen.predictions
    differing = sum(((first != each).sum((1, 2)) for each in others), np.zeros(len(first), np.int64))
    labelled = ((seen.truth > 0) & (seen.truth != IGNORE)).sum((1, 2))
    at = int(np.lexsort((labelled, differing))[-1])
    grey = grey_slice(seen.image, at)
    times = max(1, SLICE // max(grey.shape[:2]))
    masks = [np.kron(each[at, ::-1], np.ones((times, times), np.uint8)) for each in (seen.truth, *seen.predictions)]
    image = grey.repeat(times, 0).repeat(times, 1)
    return Seen(f"{seen.name}, slice {at}", image, masks[0], masks[1:])  # anterior is up


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


def unmatched(one: Detections, other: Detections) -> NDArray[np.bool_]:
    """Which boxes of `one` have no match in `other`, bool [K]."""
    same = one.classes[:, None] == other.classes[None]
    return ~((iou(one.boxes, other.boxes) >= MATCHED) & same).any(1)


def _output(model: Runtime, sample: Sample) -> NDArray[Any]:
    card = model.card
    return model.infer(task_of(card).transform(card.size, card.mean, card.std)(sample)[0].numpy()[None])[0]


def _resized(mask: NDArray[np.uint8], size: tuple[int, ...]) -> NDArray[np.uint8]:
    """A map of a model whose input has another size, for a comparison of models."""
    if mask.shape == size:
        return mask
    return np.asarray(Image.fromarray(mask).resize((size[1], size[0]), Image.Resampling.NEAREST))


def _find_boxes(model: Runtime, sample: Sample) -> Detections:
    """The boxes of a model on an image, of those scores that are drawn."""
    card = model.card
    assert isinstance(card.head, DetectionHead)
    output, size = torch.from_numpy(_output(model, sample)), (sample.image.shape[0], sample.image.shape[1])
    return decode_boxes(output, card.head, (card.height, card.width), size).above(SCORE)


def _true_texts(ids: Ids, mask: NDArray[np.uint8], names: Sequence[str]) -> list[str]:
    """The class of each annotated object, which its pixels have in the mask."""
    texts = []
    for number in range(1, int(ids.max(initial=0)) + 1):
        inside = mask[ids == number]
        known = inside[inside != IGNORE]
        texts.append(names[int(np.bincount(known).argmax())] if len(known) else "")
    return texts
