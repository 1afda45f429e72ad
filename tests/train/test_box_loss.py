"""Loss of a detector: values worked out by hand, formulas written a second time, and which place finds which object."""

from __future__ import annotations

import math

import pytest
import torch

from fp4deploy.models.boxes import DetectionHead
from fp4deploy.train.losses.boxes import BACKGROUND, BoxLoss, BoxTargets, assign, centre_ness, focal_loss, giou

HEAD = DetectionHead("fcos", 2, width=16)
SIZE = (64, 64)
COUNTS = (256, 64, 16, 4)  # places of the strides 4, 8, 16, 32


def labels(*rows: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows).reshape(1, -1, 5)


def positive(targets: BoxTargets) -> torch.Tensor:
    """Places with an object, bool [N, P]."""
    return targets.classes >= 0


def where(targets: torch.Tensor) -> list[int]:
    return targets.nonzero()[:, 0].tolist()


def test_focal_loss_by_hand() -> None:
    """p = 1/2: alpha (1/2)^2 log 2 for an object, 1 - alpha for none; p = 0.9 of an object: alpha 0.01 log(1 / 0.9)."""
    logits = torch.tensor([0.0, 0.0, math.log(9.0)], dtype=torch.float64)
    found = focal_loss(logits, torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))
    expected = [0.25 * 0.25 * math.log(2), 0.75 * 0.25 * math.log(2), 0.25 * 0.01 * -math.log(0.9)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("alpha", "gamma"), [(0.25, 2.0), (0.5, 0.0), (0.9, 3.0)])
def test_focal_loss_against_probabilities(alpha: float, gamma: float) -> None:
    torch.manual_seed(0)
    logits, truth = torch.randn(50, dtype=torch.float64), (torch.rand(50) > 0.5).double()
    for x, y, found in zip(
        logits.tolist(), truth.tolist(), focal_loss(logits, truth, alpha, gamma).tolist(), strict=True
    ):
        p = 1 / (1 + math.exp(-x))
        right, weight = (p, alpha) if y else (1 - p, 1 - alpha)
        assert found == pytest.approx(-weight * (1 - right) ** gamma * math.log(right), rel=1e-9)


def corner_giou(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """GIoU from corners, as the paper writes it."""
    across = max(0.0, min(one[2], other[2]) - max(one[0], other[0]))
    down = max(0.0, min(one[3], other[3]) - max(one[1], other[1]))
    shared = across * down
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    union = sum(areas) - shared
    hull = (max(one[2], other[2]) - min(one[0], other[0])) * (max(one[3], other[3]) - min(one[1], other[1]))
    return shared / union - (hull - union) / hull


def test_giou_by_hand_and_from_corners() -> None:
    """[-1, 1]^2 and [0, 1]^2 around the origin: IoU 1/4, hull = union. Shifted boxes: IoU 1/7, hull 9, union 7."""
    pairs = torch.tensor([[[1.0, 1, 1, 1]], [[2.0, 2, 1, 1]]]).transpose(1, 2)
    assert giou(pairs[:1], torch.tensor([[[0.0], [0], [1], [1]]])).item() == pytest.approx(0.25)
    first, second = torch.tensor([[[1.0], [1], [1], [1]]]), torch.tensor([[[0.0], [0], [2], [2]]])
    assert giou(first, second).item() == pytest.approx(1 / 7 - 2 / 9)
    torch.manual_seed(1)
    one, other = torch.rand(1, 4, 30) * 3 + 0.01, torch.rand(1, 4, 30) * 3 + 0.01
    for at, found in enumerate(giou(one, other)[0].tolist()):
        boxes = [(-d[0], -d[1], d[2], d[3]) for d in (one[0, :, at].tolist(), other[0, :, at].tolist())]
        assert found == pytest.approx(corner_giou(*boxes), abs=1e-5)


def test_centre_ness_by_hand() -> None:
    found = centre_ness(torch.tensor([[[1.0, 1.0], [1.0, 2.0], [1.0, 4.0], [1.0, 2.0]]]))
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.5]]))


@pytest.mark.parametrize(("side", "stride"), [(8, 4), (63, 4), (64, 4), (65, 8), (129, 16), (257, 32), (4000, 32)])
def test_the_larger_side_chooses_the_stride(side: float, stride: int) -> None:
    found = assign(labels((1, 32 - side / 2, 30, 32 + side / 2, 34)), HEAD, SIZE)
    strides = HEAD.priors(*SIZE)[2]
    assert set(strides[positive(found)[0]].tolist()) == {stride}


def test_places_near_the_centre_learn_the_distances_to_the_edges() -> None:
    found = assign(labels((2, 8, 8, 24, 24)), HEAD, SIZE)
    places_found = where(positive(found)[0])
    assert places_found == [row * 16 + column for row in (2, 3, 4, 5) for column in (2, 3, 4, 5)]
    assert set(found.classes[0, places_found].tolist()) == {1}
    at = 3 * 16 + 2  # centre (10, 14)
    torch.testing.assert_close(found.distances[0, :, at], torch.tensor([2.0, 6.0, 14.0, 10.0]) / 4)
    assert (found.classes[0][~positive(found)[0]] == BACKGROUND).all()


def test_a_box_smaller_than_a_stride_has_the_place_of_its_centre() -> None:
    found = assign(labels((1, 20.1, 12.1, 20.6, 12.9)), HEAD, SIZE)
    assert where(positive(found)[0]) == [3 * 16 + 5]
    assert (found.distances > 0).all()


def test_a_box_at_the_border_stays_inside_the_map() -> None:
    found = assign(labels((1, 60, 60, 64, 64)), HEAD, SIZE)
    assert 255 in where(positive(found)[0])


def test_the_smallest_of_several_objects_takes_a_place() -> None:
    found = assign(labels((1, 0, 0, 40, 40), (2, 18, 18, 22, 22)), HEAD, SIZE)
    assert found.classes[0, [4 * 16 + 4, 5 * 16 + 5]].tolist() == [
        0,
        1,
    ]  # the centre of the small one
    inner = assign(labels((1, 0, 0, 40, 40), (2, 16, 16, 24, 24)), HEAD, SIZE)
    assert inner.classes[0, 5 * 16 + 5] == 1
    assert 0 in inner.classes[0].tolist()


def test_crowds_and_rows_without_a_box() -> None:
    found = assign(labels((255, 0, 0, 32, 32), (-1, 0, 0, 0, 0), (1, 8, 8, 16, 16), (1, 40, 40, 40, 50)), HEAD, SIZE)
    x, y, _, _ = HEAD.priors(*SIZE)
    inside = (x < 32) & (y < 32)
    assert (found.ignored[0] == (inside & ~positive(found)[0])).all()
    assert positive(found).any()
    assert x[positive(found)[0]].max() < 16


def outputs_of(targets_of: torch.Tensor) -> torch.Tensor:
    """Outputs that say exactly what the labels ask for."""
    found = assign(targets_of, HEAD, SIZE)
    outputs = torch.full((1, HEAD.channels, sum(COUNTS)), -20.0)
    outputs[:, 2:6] = found.distances.log()
    for number in range(2):
        outputs[0, number][found.classes[0] == number] = 20.0
    outputs[:, 6] = torch.logit(centre_ness(found.distances).clamp(1e-6, 1 - 1e-6))
    return outputs


def test_perfect_outputs_cost_only_the_entropy_of_centre_ness() -> None:
    boxes = labels((1, 8, 8, 24, 24), (2, 30, 30, 62, 50))
    loss = BoxLoss(HEAD, SIZE, (1.0, 1.0, 0.0))
    assert loss(outputs_of(boxes), boxes).item() == pytest.approx(0.0, abs=1e-5)
    worse = outputs_of(boxes)
    worse[:, 2:6] += 0.5
    assert loss(worse, boxes).item() > 0.2


@pytest.mark.parametrize("rows", [[(-1, 0, 0, 0, 0)], [(255, 0, 0, 64, 64)]])
def test_nothing_to_find_is_a_finite_loss(rows: list[tuple[float, ...]]) -> None:
    outputs = torch.randn(1, HEAD.channels, sum(COUNTS), requires_grad=True)
    loss = BoxLoss(HEAD, SIZE)(outputs, labels(*rows))
    loss.backward()
    assert math.isfinite(loss.item())
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()
    assert (loss.item() == 0) == (rows[0][0] == 255)


def test_gradients_of_all_three_parts() -> None:
    torch.manual_seed(0)
    outputs = torch.randn(2, HEAD.channels, sum(COUNTS), dtype=torch.float64, requires_grad=True)
    boxes = torch.cat((labels((1, 8, 8, 24, 24)), labels((2, 0, 0, 50, 60))))
    loss = BoxLoss(HEAD, SIZE)
    picked = torch.zeros_like(outputs)
    chosen = [(0, 1, 37), (0, 4, 3 * 16 + 3), (1, 6, 7 * 16 + 6), (1, 0, 300)]
    loss(outputs, boxes).backward()
    assert outputs.grad is not None
    for place in chosen:
        picked.zero_()
        picked[place] = 1e-6
        with torch.no_grad():
            slope = (loss(outputs + picked, boxes) - loss(outputs - picked, boxes)).item() / 2e-6
        assert outputs.grad[place].item() == pytest.approx(slope, rel=1e-4, abs=1e-9)
