"""Boxes that a file decodes, against those of its raw output: of all batches, class, score and place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fp4deploy.detection.decode import FoundBoxes, in_image
from fp4deploy.errors import GateError
from fp4deploy.export.verify import outputs
from fp4deploy.models import ModelCard
from fp4deploy.models.boxes import DetectionHead

HEAD = DetectionHead("fcos", 3, width=16, max_detections=100)
CARD = ModelCard("fp16", 1.0, ("a", "b", "c"), 64, 96, (0.5,) * 3, (1.0,) * 3, False, task="detection", head=HEAD)
SIZE = (64, 96)


def found(seed: int, count: int) -> FoundBoxes:
    random = np.random.default_rng(seed)
    corners = random.uniform(0, 40, (count, 2))
    boxes = np.concatenate([corners, corners + random.uniform(5, 20, (count, 2))], 1).astype(np.float32)
    return boxes, random.integers(0, 3, count), np.sort(random.uniform(0.2, 0.9, count))[::-1].astype(np.float32)


def compared(monkeypatch: pytest.MonkeyPatch, batches: list[tuple[FoundBoxes, FoundBoxes]]) -> None:
    """Of each batch the file gives the second of a pair for its first image, and torch the first."""
    waiting = iter(range(len(batches)))

    def run(names: Any, feeds: dict[str, np.ndarray]) -> Any:
        assert feeds["x"].shape == (1, 3, *SIZE)
        number = next(waiting)
        return np.full((1, 1, 1), number, np.float32), None, *batches[number][1]

    def decoded(raw: torch.Tensor, head: DetectionHead, *sizes: tuple[int, int]) -> Any:
        assert sizes == (SIZE, SIZE)
        return in_image(batches[int(raw[0, 0])][0], head, SIZE, SIZE)

    session = SimpleNamespace(run=run, get_inputs=lambda: [SimpleNamespace(name="x")])
    monkeypatch.setattr(outputs, "verifying_session", lambda model: session)
    monkeypatch.setattr(outputs, "decode_boxes", decoded)
    outputs.require_same_boxes(None, CARD, [torch.zeros(2, 3, *SIZE)] * len(batches))  # type: ignore[arg-type]


def other(of: FoundBoxes, change: str, at: int = 0) -> FoundBoxes:
    boxes, classes, scores = (each.copy() for each in of)
    if change == "place":
        boxes[at] += 0.3
    elif change == "class":
        classes[at] = (classes[at] + 1) % 3
    elif change == "score":
        scores[at] += 2e-4
    elif change == "one less":
        boxes, classes, scores = boxes[1:], classes[1:], scores[1:]
    elif change == "order":
        boxes, classes, scores = boxes[::-1], classes[::-1], scores[::-1]
    elif change == "last bits":
        boxes, scores = boxes * np.float32(1 + 1e-6), scores * np.float32(1 + 1e-6)
    return boxes, classes, scores


@pytest.mark.parametrize("change", ["", "order", "last bits"])
def test_the_same_boxes_pass(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    compared(
        monkeypatch,
        [(found(seed, count), other(found(seed, count), change)) for seed, count in ((1, 5), (2, 0), (3, 9))],
    )


@pytest.mark.parametrize(
    ("change", "unmatched", "of"), [("place", 2, 18), ("class", 2, 18), ("score", 2, 18), ("one less", 1, 17)]
)
def test_another_box_is_counted_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, change: str, unmatched: int, of: int
) -> None:
    first, second = found(1, 5), found(3, 4)
    with pytest.raises(GateError, match=rf"^{unmatched} of {of} boxes that the ONNX file decodes differ"):
        compared(monkeypatch, [(first, other(first, change)), (second, second)])


def test_one_in_a_hundred_of_all_batches_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    many, few = found(1, 99), found(2, 1)
    compared(monkeypatch, [(many, many), (few, other(few, "class"))])  # 2 of 200
    with pytest.raises(GateError, match=r"^4 of 200 boxes"):
        compared(monkeypatch, [(many, other(many, "class", at=7)), (few, other(few, "class"))])
