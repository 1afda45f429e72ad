"""Tasks: what a model's labels, outputs and scores mean.

protocol.py     what every stage asks of a task
images.py       what tasks of images have in common
semantic.py     a class for every pixel
instance.py     an object for every pixel of a thing
detection.py    a box for every object
classification.py  a class for every image
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fp4deploy.data import PhotoDataset, SegmentationDataset, are_photos
from fp4deploy.data.sample import evenly
from fp4deploy.models.card import ModelCard
from fp4deploy.tasks.classification import ClassificationTask
from fp4deploy.tasks.detection import DetectionTask
from fp4deploy.tasks.instance import InstanceTask
from fp4deploy.tasks.protocol import Evaluation, Task, TaskScores, readable
from fp4deploy.tasks.semantic import SemanticTask

TASKS: dict[str, Task] = {
    task.name: task for task in (SemanticTask(), InstanceTask(), DetectionTask(), ClassificationTask())
}

__all__ = ["TASKS", "Evaluation", "Task", "TaskScores", "image_batches", "images_for", "key_of", "readable", "task_of"]


def task_of(card: ModelCard) -> Task:
    """The task that a model was trained for."""
    return TASKS[card.task]


def key_of(metric: str) -> str:
    """The key in files of a score by its title.

    >>> key_of("mIoU")
    'miou'
    """
    return next(task.key for task in TASKS.values() if task.metric == metric)


def images_for(card: ModelCard, data: Path, split: str, known: bool = False) -> SegmentationDataset:
    """A split of which only the images are looked at: of a dataset, or of a plain folder of images.

    known: a dataset has to have the model's classes.

    Raises:
        InputError: there are no images, or the data cannot be read.
    """
    if are_photos(data):
        return PhotoDataset(data, split, card.class_names)
    task = task_of(card)
    known = known or card.volume is not None  # which also says how volumes are read
    return task.for_card(card, data, split) if known else task.open(data, split, labelled=False)


def image_batches(card: ModelCard, dataset: SegmentationDataset, count: int, batch: int) -> Iterator[Tensor]:
    """`count` images, evenly spaced, sized and normalised as the card says, in batches."""
    transform = task_of(card).transform(card.size, card.mean, card.std)
    places = evenly(len(dataset), count)
    for start in range(0, len(places), batch):
        yield torch.stack([transform(dataset.load(place))[0] for place in places[start : start + batch]])
