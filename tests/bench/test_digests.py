"""Measurements are of one split: whatever changes what is measured on changes its digest, and nothing else does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fp4deploy.bench.evaluate import evaluate
from fp4deploy.bench.instances import evaluate_objects
from fp4deploy.models import InstanceHead, ModelCard
from fp4deploy.models.boxes import DetectionHead
from tests.contract.results.of_files import dataset

CARD = ModelCard("fp16", 0.125, ("background", "c3", "c4"), 24, 40, (0.5,) * 3, (0.2,) * 3, True)
CARDS = {
    "semantic": CARD,
    "instance": dataclasses.replace(CARD, task="instance", head=InstanceHead("centres", 3)),
    "detection": dataclasses.replace(CARD, task="detection", head=DetectionHead("fcos", 2, (8,), 8, 1)),
}


class Silent:
    """Finds nothing."""

    name, device, precision = "silent", "nowhere", "FP32"

    def __init__(self, card: ModelCard) -> None:
        self.card = card

    def infer(self, images: Any) -> Any:
        size = (15,) if self.card.task == "detection" else images.shape[2:]
        return np.full((len(images), self.card.channels, *size), -9, np.float32)


def edit(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def of(root: Path) -> None:
        path = root / "annotations" / "instances_val2017.json"
        tree = json.loads(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree))

    return of


def pixel(root: Path) -> None:
    path = root / "val2017" / "2.png"
    pixels = np.asarray(Image.open(path)).copy()
    pixels[3, 4, 1] ^= 1
    Image.fromarray(pixels).save(path)


ALL, PIXELS = tuple(CARDS), ("semantic", "instance")
EDITS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "a pixel": (pixel, ALL),
    "a class": (edit(lambda tree: tree["annotations"][0].update(category_id=4)), ALL),
    "a shape": (edit(lambda tree: tree["annotations"][0]["segmentation"][0].__setitem__(2, 9)), PIXELS),
    "a box": (edit(lambda tree: tree["annotations"][0]["bbox"].__setitem__(2, 9)), ("detection",)),
    "a crowd": (edit(lambda tree: tree["annotations"][1].update(iscrowd=1)), ALL),
    "an object": (edit(lambda tree: tree["annotations"].pop(0)), ALL),
    "an image": (edit(lambda tree: tree["images"][0].update(file_name="2.png")), ALL),
    "the layout of the text": (edit(lambda tree: tree.update(info="x")), ()),
}  # fmt: skip


def digest(card: ModelCard, root: Path) -> str:
    if card.task == "semantic":
        return evaluate(Silent(card), root).data_sha256
    return evaluate_objects(Silent(card), root, 2).data_sha256


@pytest.mark.parametrize("task", CARDS)
@pytest.mark.parametrize("name", EDITS)
def test_what_is_measured_on_has_a_digest(name: str, task: str, tmp_path: Path) -> None:
    root = dataset(tmp_path / "data")
    before = digest(CARDS[task], root)
    change, tasks = EDITS[name]
    change(root)
    assert (digest(CARDS[task], root) != before) == (task in tasks)
