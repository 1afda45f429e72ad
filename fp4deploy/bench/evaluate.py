"""Accuracy of a runtime on a dataset's validation split, or on its test split.

The images go through the loader and the transform that training validates with, sized and normalised as the model card
says, so that a difference between two rows of a table is a difference between two artefacts and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp4deploy.bench.detail import SegmentationDetail
from fp4deploy.bench.evidence import Accuracy, LabelCounts, VoxelCounts, write_pixels
from fp4deploy.bench.instances import evaluate_objects
from fp4deploy.bench.runtimes.protocol import Runtime
from fp4deploy.data import VAL, eval_loader, validation_set
from fp4deploy.data.inspection.digest import DigestedDataset
from fp4deploy.data.part import part_of
from fp4deploy.errors import InputError
from fp4deploy.metrics import SegmentationScore
from fp4deploy.tasks import images_for, task_of
from fp4deploy.tasks.volumes import applied

BATCH = 8
Progress = Callable[[int, int], None]  # images done, images in all


def evaluate_task(
    runtime: Runtime,
    data: Path,
    progress: Progress | None = None,
    max_detections: int | None = None,
    results: Path | None = None,
    split: str = VAL,
    limit: int | None = None,
    labelled: bool = True,
) -> Accuracy:
    """Accuracy of a runtime in its own task: mIoU, or AP; `max_detections` and `results` as of `evaluate_objects`.

    limit: measure on so many images of the split, evenly spaced.
    labelled: False: of a semantic model, a plain folder of images will do, on which there is no score.

    Raises:
        InputError: the data does not fit the model, or cannot be read; `max_detections` of a semantic model.
    """
    if task_of(runtime.card).counts_objects:
        return evaluate_objects(runtime, data, BATCH, progress, max_detections, results, split, limit)
    if task_of(runtime.card).whole_images and max_detections is None:
        return _evaluate_images(runtime, data, BATCH, progress, split, limit, labelled)
    if max_detections is not None:
        raise InputError(
            "--max-dets is for instance models and detectors, and this one predicts a class for every pixel. Leave it "
            "out, or train one with: fp4deploy train --task instance"
        )
    return evaluate(runtime, data, BATCH, progress, split, limit, labelled)


def evaluate(
    runtime: Runtime,
    data: Path,
    batch: int = BATCH,
    progress: Progress | None = None,
    split: str = VAL,
    limit: int | None = None,
    labelled: bool = True,
) -> Accuracy:
    """mIoU, IoU per class, pixel accuracy and what `detail` counts, of a semantic runtime over a split.

    labelled: as of `evaluate_task`.

    Raises:
        InputError: the data does not fit the model, or cannot be read.
    """
    card = runtime.card
    if card.volume is not None:
        return _evaluate_volumes(runtime, data, progress, split, limit)
    opened = validation_set(card, data, split) if labelled else images_for(card, data, split, known=True)
    dataset = DigestedDataset(part_of(opened, limit))
    detail = SegmentationDetail(dataset.class_names, card.background)
    score = SegmentationScore(len(dataset.class_names), dataset.class_names)
    transform = task_of(card).transform(card.size, card.mean, card.std)
    seen = 0
    for images, masks in eval_loader(dataset, transform, batch, 0):
        logits = torch.from_numpy(runtime.infer(images.numpy()))
        if logits.shape[1] != len(dataset.class_names):
            raise InputError(
                f"The model's output has {logits.shape[1]} classes, and {data} has {len(dataset.class_names)}. "
                "Give the --data it was trained on."
            )
        prediction = logits.argmax(dim=1)
        score.update(prediction, masks)
        detail.update(prediction, masks)
        seen += len(images)
        if progress:
            progress(seen, len(dataset))
    digest = dataset.digest()
    counts = detail.counts([dataset.names[index] for index in range(len(dataset))])
    hidden = detail.boundary_f1(), detail.recall_by_size(), counts.never_predicted()
    return Accuracy(score.compute(), write_pixels(counts), digest, *hidden)


def _evaluate_images(
    runtime: Runtime,
    data: Path,
    batch: int,
    progress: Progress | None,
    split: str,
    limit: int | None,
    labelled: bool,
) -> Accuracy:
    """Top-1 and the recall of each class, of a classifier over a split."""
    card, task = runtime.card, task_of(runtime.card)
    opened = task.for_card(card, data, split) if labelled else images_for(card, data, split, known=True)
    dataset = DigestedDataset(part_of(opened, limit))
    evaluation: Any = task.evaluation(dataset, card)
    cells = np.zeros((len(dataset), len(dataset.class_names), 3), np.int64)
    seen, known = 0, len(dataset.class_names)
    for images, labels in eval_loader(dataset, task.transform(card.size, card.mean, card.std), batch, 0):
        logits = torch.from_numpy(runtime.infer(images.numpy()))
        named = labels < known  # a plain folder of images has no classes
        evaluation.update(logits[named], labels[named])
        for place, (truth, found) in enumerate(zip(labels.tolist(), logits.argmax(1).tolist(), strict=True), seen):
            if truth < known:
                cells[place, truth, 0] = truth == found
                cells[place, truth, 1] = cells[place, found, 2] = 1
        seen += len(images)
        if progress:
            progress(seen, len(dataset))
    digest = dataset.digest()
    counts = LabelCounts([dataset.names[index] for index in range(len(dataset))], dataset.class_names, cells)
    return Accuracy(evaluation.compute(), write_pixels(counts), digest, None, {}, counts.never_predicted())


def _evaluate_volumes(
    runtime: Runtime, data: Path, progress: Progress | None, split: str, limit: int | None
) -> Accuracy:
    """mIoU, Dice and distances of a runtime over a split of volumes, at their own spacing."""
    card, task = runtime.card, task_of(runtime.card)
    dataset = part_of(validation_set(card, data, split), limit)
    evaluation: Any = task.evaluation(dataset, card)
    digested = DigestedDataset(dataset)
    for seen, (volumes, index) in enumerate(eval_loader(digested, task.transform(card.size, whole=True), 1), start=1):
        evaluation.update(torch.from_numpy(applied(card, runtime.infer, volumes.numpy())), index)
        if progress:
            progress(seen, len(dataset))
    names, voxels = evaluation.counts()
    counts = VoxelCounts(names, dataset.class_names, voxels)
    return Accuracy(evaluation.compute(), write_pixels(counts), digested.digest(), None, {}, counts.never_predicted())
