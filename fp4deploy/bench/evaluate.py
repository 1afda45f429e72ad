"""Accuracy of a runtime on a dataset's validation split, or on its test split.

The images go through the loader and the transform that training validates with, sized and normalised as the model card
says, so that a difference between two rows of a table is a difference between two artefacts and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from fp4deploy.bench.instances import evaluate_instances
from fp4deploy.bench.runtimes.protocol import Runtime
from fp4deploy.data import VAL, EvalTransform, eval_loader, validation_set
from fp4deploy.errors import InputError
from fp4deploy.instances import InstanceScores
from fp4deploy.metrics import Scores, SegmentationScore

BATCH = 8
Progress = Callable[[int, int], None]  # images done, images in all


def evaluate_task(
    runtime: Runtime,
    data: Path,
    batch: int = BATCH,
    progress: Progress | None = None,
    max_detections: int | None = None,
    results: Path | None = None,
    split: str = VAL,
) -> Scores | InstanceScores:
    """Scores of a runtime's own task: mIoU, or AP; `max_detections` and `results` as of `evaluate_instances`.

    Raises:
        InputError: the data does not fit the model, or cannot be read; `results` of a semantic model.
    """
    if runtime.card.head is not None:
        return evaluate_instances(runtime, data, batch, progress, max_detections, results, split)
    if results is not None or max_detections is not None:
        raise InputError(
            "--results and --max-dets are for instance models, and this one predicts a class for every pixel. Leave "
            "them out, or train one with: fp4deploy train --task instance"
        )
    return evaluate(runtime, data, batch, progress, split)


def evaluate(
    runtime: Runtime, data: Path, batch: int = BATCH, progress: Progress | None = None, split: str = VAL
) -> Scores:
    """mIoU, IoU per class and pixel accuracy of a semantic runtime over a split.

    Raises:
        InputError: the data does not fit the model, or cannot be read.
    """
    card = runtime.card
    dataset = validation_set(card, data, split)
    score = SegmentationScore(len(dataset.class_names), dataset.class_names)
    transform = EvalTransform(card.height, card.width, card.mean, card.std)
    seen = 0
    for images, masks in eval_loader(dataset, transform, batch, 0):
        logits = torch.from_numpy(runtime.infer(images.numpy()))
        if logits.shape[1] != len(dataset.class_names):
            raise InputError(
                f"The model's output has {logits.shape[1]} classes, and {data} has {len(dataset.class_names)}. "
                "Give the --data it was trained on."
            )
        score.update(logits, masks)
        seen += len(images)
        if progress:
            progress(seen, len(dataset))
    return score.compute()
