"""Perfect outputs decode to what is annotated; imperfect ones do not spoil their neighbours."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from fp4deploy.data import CocoDataset, generate_shapes, open_instances
from fp4deploy.instances import InstanceEvaluation, decode
from fp4deploy.instances.decode import find_centres
from fp4deploy.models import InstanceHead
from tests.instances.perfect import labels_of, perfect_outputs


def blobs(*boxes: tuple[int, int, int, int], size: int = 40) -> torch.Tensor:
    """Labels int64 [1, 2, size, size] of rectangles (top, left, bottom, right) of class 1."""
    labels = torch.zeros((1, 2, size, size), dtype=torch.int64)
    for number, (top, left, bottom, right) in enumerate(boxes, start=1):
        labels[0, 0, top:bottom, left:right] = 1
        labels[0, 1, top:bottom, left:right] = number
    return labels


def score_of_the_truth(dataset: CocoDataset, head: InstanceHead) -> float:
    evaluation = InstanceEvaluation(dataset, head)
    for index in range(len(dataset)):
        evaluation.update(perfect_outputs(labels_of(dataset.load(index)), head), torch.tensor([index]))
    return evaluation.compute().ap


def test_touching_nuclei_are_told_apart() -> None:
    labels = blobs((4, 4, 12, 12), (4, 12, 12, 20), (12, 4, 20, 12), (30, 30, 36, 36))
    head = InstanceHead("centres", 2)
    found = decode(perfect_outputs(labels, head)[0], head, (40, 40))
    assert len(found) == 4
    for number in range(1, 5):
        (decoded,) = np.unique(found.ids[labels[0, 1].numpy() == number])
        assert decoded > 0
    assert not found.ids[labels[0, 1].numpy() == 0].any()
    assert found.classes.tolist() == [1] * 4
    assert found.scores == pytest.approx([1.0] * 4, abs=1e-6)


@pytest.mark.parametrize("method", ["centres", "set"])
def test_outputs_are_read_at_the_image_s_own_size(method: str) -> None:
    head = InstanceHead(method, 2, masks=0 if method == "centres" else 6)  # type: ignore[arg-type]
    labels = blobs((5, 5, 15, 15), (20, 20, 35, 30))
    found = decode(perfect_outputs(labels, head)[0], head, (80, 120))
    assert found.ids.shape == (80, 120)
    assert len(found) == 2
    for top, left, bottom, right in ((10, 15, 30, 45), (40, 60, 70, 90)):
        inner = found.ids[top + 2 : bottom - 2, left + 3 : right - 3]
        assert len(np.unique(inner)) == 1
        assert inner.min() > 0
        assert (found.ids == inner[0, 0]).sum() == pytest.approx((bottom - top) * (right - left), rel=0.1)


@pytest.mark.parametrize("method", ["centres", "set"])
def test_perfect_outputs_score_one_on_generated_scenes(tmp_path: Path, method: str) -> None:
    generate_shapes(tmp_path / "shapes", train=1, val=16, size=96, seed=4)
    dataset = open_instances(tmp_path / "shapes", "val")
    head = InstanceHead(method, 7, masks=0 if method == "centres" else 12, nms=3)  # type: ignore[arg-type]
    assert score_of_the_truth(dataset, head) == pytest.approx(1.0)


@pytest.mark.variants
def test_perfect_outputs_score_one_on_real_nuclei(shared: Path) -> None:
    dataset = open_instances(shared / "data" / "dsb2018", "val")
    chosen = dataset._images = [image for image in dataset.images if image.height <= 520][::4]
    counts = Counter(annotation["image_id"] for annotation in dataset.ground_truth()["annotations"])
    assert max(counts.values()) > 100, "more than COCO's usual limit of detections an image"
    head = InstanceHead("centres", 2, nms=3, max_detections=1000)
    assert len(chosen) > 10
    assert score_of_the_truth(dataset, head) == pytest.approx(1.0)


def test_a_vote_for_a_centre_that_was_missed_does_not_go_to_the_neighbour() -> None:
    labels = blobs((4, 4, 14, 14), (4, 14, 14, 24))
    head = InstanceHead("centres", 2)
    outputs = perfect_outputs(labels, head)[0]
    head.heatmap(outputs)[:, 15:] = 0.0
    found = decode(outputs, head, (40, 40))
    assert len(found) == 1
    assert (found.ids > 0).sum() == 100
    assert (found.ids[labels[0, 1].numpy() == 1] == 1).all()


def test_equal_neighbouring_peaks_are_one_centre() -> None:
    heatmap = torch.zeros(20, 20)
    heatmap[5:7, 5:7] = 0.75
    heatmap[15, 3] = 0.5
    places, scores = find_centres(heatmap, nms=5, threshold=0.1, most=10)
    assert places.tolist() == [[5, 5], [15, 3]]
    assert scores.tolist() == [0.75, 0.5]


def test_peaks_are_limited_by_window_threshold_and_number() -> None:
    heatmap = torch.zeros(20, 20)
    heatmap[2, 2], heatmap[2, 4], heatmap[10, 10], heatmap[18, 18] = 0.9, 0.8, 1.2, 0.05
    assert find_centres(heatmap, 5, 0.1, 10)[0].tolist() == [[10, 10], [2, 2]]
    assert find_centres(heatmap, 3, 0.1, 10)[0].tolist() == [[10, 10], [2, 2], [2, 4]]
    assert find_centres(heatmap, 3, 0.1, 1)[0].tolist() == [[10, 10]]
    assert find_centres(heatmap, 3, 0.0, 10)[0].tolist()[-1] == [18, 18]
    assert find_centres(heatmap, 3, 0.1, 1)[1].tolist() == [1.0], "a score is at most 1"


@pytest.mark.parametrize("value", [0.0, -5.0, float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["centres", "set"])
def test_outputs_that_say_nothing_give_no_object(method: str, value: float) -> None:
    head = InstanceHead(method, 2, masks=0 if method == "centres" else 3)  # type: ignore[arg-type]
    found = decode(torch.full((head.channels, 16, 16), value), head, (20, 24))
    assert len(found) == 0
    assert not found.ids.any()


def test_the_class_is_that_of_most_of_the_probability_inside() -> None:
    labels = blobs((4, 4, 14, 14))
    head = InstanceHead("centres", 4)
    outputs = perfect_outputs(labels, head)[0]
    head.semantic(outputs)[:] = 0.0
    head.semantic(outputs)[0] = 5.0 * (labels[0, 1] == 0)
    head.semantic(outputs)[3, 4:14, 4:14] = 3.0
    head.semantic(outputs)[2, 4:7, 4:14] = 9.0  # a third of the pixels, and surer
    found = decode(outputs, head, (40, 40))
    assert found.classes.tolist() == [3]
    assert 0.4 < found.scores[0] < 0.8


@pytest.mark.parametrize("method", ["centres", "set"])
def test_an_object_is_of_the_likeliest_thing_where_nothing_is_sure(method: str) -> None:
    """Background and stuff may each be likelier than any one thing, where all things together are likelier."""
    head = InstanceHead(method, 5, masks=0 if method == "centres" else 3, stuff=(2,))  # type: ignore[arg-type]
    labels = blobs((2, 2, 12, 14), (16, 20, 38, 34))
    outputs = perfect_outputs(labels, head)[0]
    semantic = head.semantic(outputs)
    semantic[:], inside = torch.tensor([3.0, 0, 0, 0, 0])[:, None, None], labels[0, 1]
    semantic[:, inside == 1] = torch.tensor([0.45, 0.05, 0.01, 0.3, 0.19]).log()[:, None]
    semantic[:, inside == 2] = torch.tensor([0.02, 0.32, 0.42, 0.04, 0.2]).log()[:, None]
    found = decode(outputs, head, (40, 40))
    assert found.classes.tolist() == [1, 3]
    assert found.scores == pytest.approx([0.32, 0.3], rel=0.01)
    assert [found.semantic[found.ids == number][0] for number in (1, 2)] == [2, 0]


def test_a_centre_lies_in_the_middle_of_its_place() -> None:
    """Maps of a quarter of the size; two neighbouring places divide the pixels that vote for themselves."""
    head = InstanceHead("centres", 2, nms=1)
    outputs = torch.zeros(head.channels, 4, 8)
    outputs[0], outputs[1, :, 1:7] = 4.0, 9.0
    outputs[head.classes, 1, 2], outputs[head.classes, 1, 3] = 0.9, 0.8
    found = decode(outputs, head, (16, 32))
    assert len(found) == 2
    assert found.ids[5].tolist()[8:16] == [1] * 4 + [2] * 4
    assert found.ids[4:8, 8:16].tolist() == found.ids[7:3:-1, 8:16].tolist(), "as far above as below"


def test_stuff_gives_no_objects() -> None:
    labels = blobs((4, 4, 14, 14), (20, 20, 30, 30))
    labels[0, 0, 20:30, 20:30] = 2
    head = InstanceHead("centres", 3, stuff=(2,))
    found = decode(perfect_outputs(labels, head)[0], head, (40, 40))
    assert found.classes.tolist() == [1]
    assert (found.semantic[20:30, 20:30] == 2).all()


def test_a_set_of_one_class_needs_no_semantic_channels() -> None:
    head = InstanceHead("set", 0, masks=5)
    labels = blobs((4, 4, 14, 14), (4, 14, 14, 24))
    found = decode(perfect_outputs(labels, head)[0], head, (40, 40))
    assert head.channels == 5
    assert found.classes.tolist() == [1, 1]
    assert [(found.ids == number).sum() for number in (1, 2)] == [100, 100]


def test_only_the_best_detections_are_kept() -> None:
    labels = blobs((4, 4, 14, 14), (20, 20, 30, 30), (4, 20, 14, 30))
    head = InstanceHead("centres", 2, max_detections=2)
    outputs = perfect_outputs(labels, head)[0]
    head.heatmap(outputs)[20:30, 20:30] *= 0.5
    found = decode(outputs, head, (40, 40))
    assert len(found) == 2
    assert not found.ids[22:28, 22:28].any()
