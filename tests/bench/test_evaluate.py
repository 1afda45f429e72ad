"""Accuracy is measured on the validation split, with the classes and size of the model card."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp4deploy.bench.evaluate import evaluate
from fp4deploy.bench.runtimes.open import open_runtime
from fp4deploy.data import EvalTransform, open_dataset, open_instances, validation_set
from fp4deploy.data.part import part_of
from fp4deploy.errors import InputError
from fp4deploy.metrics import SegmentationScore
from fp4deploy.models import ModelCard, read_card
from fp4deploy.runs import Run


class Oracle:
    """Predicts the truth of the validation split, in its order; `shift` is added to every class id."""

    name, device, precision = "oracle", "nowhere", "FP32"

    def __init__(self, card: ModelCard, data: Path, shift: int = 0) -> None:
        self.card = card
        dataset = open_dataset(data, "val")
        transform = EvalTransform(card.height, card.width, card.mean, card.std)
        self.masks = [transform(dataset.load(index))[1].numpy() for index in range(len(dataset))]
        self.shift, self.place, self.batches = shift, 0, []

    def infer(self, images: np.ndarray) -> np.ndarray:
        count = len(self.card.class_names)
        masks = np.stack(self.masks[self.place : self.place + len(images)])
        self.place += len(images)
        self.batches.append(len(images))
        predicted = (np.where(masks == 255, 0, masks) + self.shift) % count
        return (np.arange(count)[None, :, None, None] == predicted[:, None]).astype(np.float32)

    def time(self, images: np.ndarray, warmup: int, iterations: int, max_seconds: float) -> list[float]:
        raise AssertionError("not timed here")


@pytest.fixture
def card(untrained: Run) -> ModelCard:
    return read_card(untrained.checkpoint("fp16"))


def test_the_truth_scores_one(card: ModelCard, shapes: Path) -> None:
    seen: list[tuple[int, int]] = []
    oracle = Oracle(card, shapes)
    found = evaluate(oracle, shapes, batch=4, progress=lambda done, total: seen.append((done, total)))
    scores = found.scores
    assert scores.miou == pytest.approx(1.0)
    assert scores.pixel_accuracy == pytest.approx(1.0)
    assert oracle.batches == [4, 2]
    assert seen == [(4, 6), (6, 6)]


def test_always_wrong_scores_zero(card: ModelCard, shapes: Path) -> None:
    assert evaluate(Oracle(card, shapes, shift=1), shapes).scores.miou == 0.0


def test_same_number_as_torch(untrained: Run, shapes: Path) -> None:
    """The bench's loop over a runtime gives what a plain loop over the model gives."""
    import torch

    from fp4deploy.qat import load_model

    model, card = load_model(untrained.checkpoint("fp16"))
    dataset = open_dataset(shapes, "val")
    transform = EvalTransform(card.height, card.width, card.mean, card.std)
    score = SegmentationScore(len(card.class_names), card.class_names)
    for index in range(len(dataset)):
        image, mask = transform(dataset.load(index))
        with torch.inference_mode():
            score.update(model(image[None]), mask[None])
    found = evaluate(open_runtime(untrained.checkpoint("fp16")), shapes).scores
    assert found.miou == pytest.approx(score.compute().miou, abs=1e-4)


def test_classes_of_the_card_are_asked_of_the_data(card: ModelCard, shapes: Path) -> None:
    some = dataclasses.replace(card, class_names=("background", "star", "circle"))
    assert validation_set(some, shapes).class_names == ("background", "star", "circle")


def test_other_classes_are_refused(card: ModelCard, shapes: Path) -> None:
    other = dataclasses.replace(card, class_names=("background", "cat"))
    with pytest.raises(InputError, match="no class 'cat'"):
        validation_set(other, shapes)


def test_no_background_in_the_model(card: ModelCard, shapes: Path) -> None:
    other = dataclasses.replace(card, class_names=("circle", "star"), background=False)
    with pytest.raises(InputError, match="Give the --data it was trained on"):
        validation_set(other, shapes)


class Constant(Oracle):
    """A model of two classes, whatever its card says."""

    def infer(self, images: np.ndarray) -> np.ndarray:
        return np.zeros((len(images), 2, *images.shape[2:]), np.float32)


def test_a_model_without_names_needs_the_right_number_of_classes(card: ModelCard, shapes: Path) -> None:
    constant = Constant(card, shapes)
    constant.card = dataclasses.replace(card, class_names=())
    with pytest.raises(InputError, match=r"output has 2 classes, and .* has 7"):
        evaluate(constant, shapes)


def test_a_limit_measures_evenly_spaced_images(card: ModelCard, shapes: Path) -> None:
    whole = open_dataset(shapes, "val")
    part = part_of(whole, 3)
    assert [part.load(place).name for place in range(len(part))] == [whole.load(place).name for place in (0, 2, 4)]
    assert part_of(whole, None) is whole
    assert part_of(whole, 6) is whole
    oracle = Oracle(card, shapes)
    oracle.masks = oracle.masks[::2]
    found = evaluate(oracle, shapes, batch=2, limit=3)
    assert oracle.batches == [2, 1]
    assert found.scores.miou == pytest.approx(1.0)
    assert found.data_sha256 != evaluate(Oracle(card, shapes), shapes).data_sha256


def test_the_objects_of_a_part_are_those_of_its_images(shapes: Path) -> None:
    whole = open_instances(shapes, "val")
    truth = part_of(whole, 2).ground_truth()
    kept = {image["id"] for image in truth["images"]}
    assert len(kept) == 2
    expected = [entry for entry in whole.ground_truth()["annotations"] if entry["image_id"] in kept]
    assert [entry["bbox"] for entry in truth["annotations"]] == [entry["bbox"] for entry in expected]
    assert len(whole) == 6


class Bare:
    """A dataset that is no COCO file."""

    class_names, background, layout = ("a", "b"), False, "masks"

    def __len__(self) -> int:
        return 5

    def load(self, index: int) -> str:
        return f"image {index}"


def test_a_part_of_masks() -> None:
    part: Any = part_of(Bare(), 2)
    assert (len(part), part.class_names, part.layout) == (2, ("a", "b"), "masks")
    assert [part.load(0), part.load(1)] == ["image 0", "image 2"]
