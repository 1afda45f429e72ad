"""Instances of a runtime: their average precision, and on request the files that other tools read.

DIR/results.json                COCO results: one RLE an instance, at the size of the original image
DIR/scores.json                 AP, AP50, AP75, by size and class
DIR/panoptic.json, panoptic/    segments as PNG and their list, COCO's panoptic format
DIR/overlays/                   the instances over the images
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
from fp4deploy.data import VAL, CocoDataset, NumberedEvalTransform, eval_loader, instance_set
from fp4deploy.data.digest import DigestedDataset
from fp4deploy.errors import InputError
from fp4deploy.files import atomic_write
from fp4deploy.instances import InstanceEvaluation, Instances, InstanceScores, write_results
from fp4deploy.instances.draw import draw_instances
from fp4deploy.instances.panoptic import PanopticWriter
from fp4deploy.models import InstanceHead, ModelCard

OVERLAYS = 16  # pictures written with the results, evenly spaced


def evaluate_instances(
    runtime: Runtime,
    data: Path,
    batch: int,
    progress: Callable[[int, int], None] | None = None,
    max_detections: int | None = None,
    results: Path | None = None,
    split: str = VAL,
) -> Accuracy:
    """Average precision of a runtime over a split.

    Args:
        max_detections: most instances of an image; None: as the card says.
        results: folder for the results, which may exist.

    Raises:
        InputError: the data does not fit the model or cannot be read, or the folder cannot be written.
    """
    card = runtime.card
    head = _head(card, max_detections)
    dataset = instance_set(card, data, split=split)
    digested = DigestedDataset(dataset)
    evaluation = InstanceEvaluation(dataset, head)
    files = _Files(results, dataset) if results is not None else None
    transform = NumberedEvalTransform(card.height, card.width, card.mean, card.std)
    seen = 0
    for images, indices in eval_loader(digested, transform, batch, 0):
        outputs = torch.from_numpy(runtime.infer(images.numpy()))
        if outputs.shape[1] != head.channels:
            raise InputError(
                f"The model's output has {outputs.shape[1]} channels, its card has {head.channels}. Export it again."
            )
        for output, index in zip(outputs, indices.tolist(), strict=True):
            found = evaluation.decode(output, index)
            evaluation.add(index, found)
            if files:
                files.add(index, found)
        seen += len(images)
        if progress:
            progress(seen, len(dataset))
    scores = evaluation.compute()
    if files:
        files.finish(evaluation, scores)
    assert scores.matches is not None
    truth = json.dumps(evaluation.ground_truth, sort_keys=True, default=str)
    digest = hashlib.sha256((digested.digest() + truth).encode()).hexdigest()
    return Accuracy(scores, write_matches(scores.matches), digest)


def _head(card: ModelCard, max_detections: int | None) -> InstanceHead:
    assert card.head is not None
    return dataclasses.replace(card.head, max_detections=max_detections) if max_detections else card.head


class _Files:
    """Writes what belongs to single images as they come, and the rest at the end."""

    def __init__(self, folder: Path, dataset: CocoDataset) -> None:
        self.folder, self.dataset = folder, dataset
        self.panoptic = PanopticWriter(folder, dataset)
        self.every = max(1, len(dataset) // OVERLAYS)

    def add(self, index: int, found: Instances) -> None:
        self.panoptic.add(index, found)
        if index % self.every == 0:
            sample = self.dataset.load(index)
            with atomic_write(self.folder / "overlays" / self.dataset.picture_name(index)) as temporary:
                Image.fromarray(draw_instances(sample.image, found.ids)).save(temporary, format="PNG")

    def finish(self, evaluation: InstanceEvaluation, scores: InstanceScores) -> None:
        self.panoptic.finish()
        write_results(evaluation.results(), self.folder / "results.json")
        content: dict[str, Any] = {**scores.to_json(), "per_class": scores.per_class}
        with atomic_write(self.folder / "scores.json") as temporary:
            temporary.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
