"""Objects of a runtime: their average precision, and on request the files that other tools read.

DIR/results.json                COCO results: an RLE or a box for each object, at the size of the original image
DIR/scores.json                 AP, AP50, AP75, by size and class; of boxes also the kinds of errors and the confusion
DIR/panoptic.json, panoptic/    segments as PNG and their list, COCO's panoptic format (instance models)
DIR/overlays/                   the objects over the images
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from fp4deploy.bench.evidence import Accuracy, write_matches
from fp4deploy.bench.runtimes.protocol import Runtime
from fp4deploy.data import VAL, eval_loader
from fp4deploy.data.inspection.digest import DigestedDataset
from fp4deploy.data.part import part_of
from fp4deploy.detection import DetectionEvaluation, Detections
from fp4deploy.detection.draw import draw_boxes
from fp4deploy.errors import InputError
from fp4deploy.instances import Instances, write_results
from fp4deploy.instances.draw import draw_instances
from fp4deploy.instances.evaluation import ObjectEvaluation
from fp4deploy.instances.panoptic import PanopticWriter
from fp4deploy.models import ModelCard
from fp4deploy.models.boxes import SHOWN
from fp4deploy.models.heads import ClassHead
from fp4deploy.system.files import atomic_write, write_json
from fp4deploy.tasks import task_of

OVERLAYS = 16  # pictures written with the results, evenly spaced


def evaluate_objects(
    runtime: Runtime,
    data: Path,
    batch: int,
    progress: Callable[[int, int], None] | None = None,
    max_detections: int | None = None,
    results: Path | None = None,
    split: str = VAL,
    limit: int | None = None,
) -> Accuracy:
    """Average precision of a runtime over a split, of masks or of boxes.

    Args:
        max_detections: most objects of an image; None: as the card says.
        results: folder for the results, which may exist.
        limit: measure on so many images of the split, evenly spaced.

    Raises:
        InputError: the data does not fit the model or cannot be read, or the folder cannot be written.
    """
    task, card = task_of(runtime.card), _limited(runtime.card, max_detections)
    dataset = part_of(task.for_card(card, data, split), limit)
    digested = DigestedDataset(dataset)
    evaluation: Any = task.evaluation(dataset, card)
    finish = _keep(results, evaluation) if results is not None else None
    decodes = isinstance(evaluation, DetectionEvaluation) and getattr(runtime, "decodes", False)
    transform = task.transform(card.size, card.mean, card.std)
    seen = 0
    for images, indices in eval_loader(digested, transform, batch, 0):
        if decodes:
            evaluation.update_decoded(runtime.detect(images.numpy()), indices)  # type: ignore[attr-defined]
        else:
            outputs = torch.from_numpy(runtime.infer(images.numpy()))
            if outputs.shape[1] != card.channels:
                raise InputError(
                    f"The model's output has {outputs.shape[1]} channels, its card has {card.channels}. Export it "
                    "again."
                )
            evaluation.update(outputs, indices)
        seen += len(images)
        if progress:
            progress(seen, len(dataset))
    scores, more = evaluation.compute(), evaluation.details()
    if finish:
        finish({**scores.to_json(), "per_class": scores.per_class, **more})
    assert scores.matches is not None
    truth = json.dumps(evaluation.ground_truth, sort_keys=True, default=str)
    digest = hashlib.sha256((digested.digest() + truth).encode()).hexdigest()
    return Accuracy(scores, write_matches(scores.matches), digest, **more)


def _limited(card: ModelCard, max_detections: int | None) -> ModelCard:
    assert card.head is not None
    assert not isinstance(card.head, ClassHead)
    if not max_detections:
        return card
    return dataclasses.replace(card, head=dataclasses.replace(card.head, max_detections=max_detections))


Finish = Callable[[dict[str, Any]], None]


def _keep(folder: Path, evaluation: Any) -> Finish:
    """Write what belongs to single images as an evaluation finds it; the function that writes the rest at the end."""
    files = _Files(folder, evaluation)
    evaluation.listener = files.add
    return files.finish


class _Files:
    def __init__(self, folder: Path, evaluation: ObjectEvaluation[object]) -> None:
        self.folder, self.evaluation, self.dataset = folder, evaluation, evaluation.dataset
        masks = evaluation.scored == "segm"
        self.panoptic = PanopticWriter(folder, self.dataset) if masks else None
        self.every = max(1, len(self.dataset) // OVERLAYS)

    def add(self, index: int, found: Instances | Detections) -> None:
        if self.panoptic is not None and isinstance(found, Instances):
            self.panoptic.add(index, found)
        if index % self.every == 0:
            image = self.dataset.load(index).image
            if isinstance(found, Instances):
                drawn = draw_instances(image, found.ids)
            else:
                drawn = draw_boxes(image, found.above(SHOWN))
            with atomic_write(self.folder / "overlays" / self.dataset.picture_name(index)) as temporary:
                Image.fromarray(drawn).save(temporary, format="PNG")

    def finish(self, scores: dict[str, object]) -> None:
        if self.panoptic is not None:
            self.panoptic.finish()
        write_results(self.evaluation.results(), self.folder / "results.json")
        write_json(self.folder / "scores.json", scores)
