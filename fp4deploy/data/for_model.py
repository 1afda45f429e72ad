"""The split of a dataset that a trained model is measured on: opened with the classes that the model knows."""

from __future__ import annotations

from pathlib import Path

from fp4deploy.data.coco.boxes import BoxDataset
from fp4deploy.data.coco.dataset import CocoDataset
from fp4deploy.data.dataset import open_boxes, open_dataset, open_instances
from fp4deploy.data.sample import VAL, SegmentationDataset
from fp4deploy.data.volumes.dataset import VolumeDataset
from fp4deploy.errors import InputError
from fp4deploy.models.card import ModelCard
from fp4deploy.models.heads import InstanceHead


def validation_set(card: ModelCard, data: Path, split: str = VAL) -> SegmentationDataset:
    """Open the validation split, or another one, with the classes a model knows, in the model's order.

    Classes that are called by their numbers are those of the data, if these are as many.

    Raises:
        InputError: the data lacks one of the classes, or has no such split.
    """
    named = card.class_names[1:] if card.background else card.class_names
    expected = card.class_names
    try:
        dataset = open_dataset(data, split, named or None, card.volume)
    except InputError:
        if not card.numbered or card.background:
            raise
        dataset = open_dataset(data, split, None, card.volume)
        expected = dataset.class_names if len(dataset.class_names) == len(expected) else expected
    if isinstance(dataset, VolumeDataset) != (card.volume is not None):
        own, given = ("images", "volumes") if card.volume is None else ("volumes", "images")
        raise InputError(f"The model reads {own}, and {data} holds {given}. Give the --data it was trained on.")
    if expected and dataset.class_names != expected:
        raise InputError(
            f"The model knows the classes {_listed(card.class_names)}; {data} gives {_listed(dataset.class_names)}. "
            "Give the --data it was trained on."
        )
    if not len(dataset):
        raise InputError(f"The split {split} of {data} holds no images. Check it with: fp4deploy data check {data}")
    return dataset


def instance_set(card: ModelCard, data: Path, numbered: bool = False, split: str = VAL) -> CocoDataset:
    """Open the validation split, or another one, with the classes and the stuff a model knows.

    Raises:
        InputError: the data has no instances, or lacks one of the classes.
    """
    assert isinstance(card.head, InstanceHead)
    stuff = [card.class_names[number] for number in card.head.stuff]
    return open_instances(data, split, card.class_names[1:], stuff, numbered)


def box_set(card: ModelCard, data: Path, split: str = VAL) -> BoxDataset:
    """Open the validation split, or another one, with the boxes of the classes a model knows.

    Raises:
        InputError: the data has no boxes, or lacks one of the classes.
    """
    return open_boxes(data, split, card.class_names[1:])


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
