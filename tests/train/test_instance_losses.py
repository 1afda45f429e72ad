"""Matching against brute force, losses against plain formulas, gradients, images with nothing and with too much."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fp4deploy.models import InstanceHead
from fp4deploy.models.heads import OFFSET_UNIT
from fp4deploy.train import SegmentationLoss
from fp4deploy.train.losses.centres import MIN_MASS, CentreLoss, centre_targets
from fp4deploy.train.losses.sets import SetLoss, match, pair_cost, select_objects
from tests.instances.perfect import perfect_outputs


def scene(count: int = 2, size: int = 24, objects: int = 4, seed: int = 0) -> torch.Tensor:
    """Labels int64 [N, 2, size, size] of rectangles, and a strip of void."""
    random = np.random.default_rng(seed)
    labels = torch.zeros((count, 2, size, size), dtype=torch.int64)
    for image in labels:
        for number in range(1, objects + 1):
            top, left = random.integers(0, size - 6, 2)
            height, width = random.integers(3, 7, 2)
            image[0, top : top + height, left : left + width] = 1 + number % 2
            image[1, top : top + height, left : left + width] = number
        image[0, :, -2:] = 255
        image[1, :, -2:] = 0
    return labels


def test_the_matching_is_the_cheapest_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    for channels, objects in ((4, 4), (5, 3), (6, 1), (4, 0)):
        cost = torch.randn(3, channels, max(objects, 1), generator=generator)
        pairs = match(cost, np.full(3, objects))
        for matrix, (rows, columns) in zip(cost.tolist(), pairs, strict=True):
            found = sum(matrix[row][column] for row, column in zip(rows, columns, strict=True))
            orders = itertools.permutations(range(channels), objects)
            best = min(sum(matrix[row][column] for column, row in enumerate(order)) for order in orders)
            assert len(rows) == objects
            assert found == pytest.approx(best)


def test_matching_survives_outputs_that_are_no_numbers() -> None:
    cost = torch.tensor([[[float("nan"), 1.0], [float("inf"), 2.0], [0.5, float("-inf")]]])
    rows, columns = match(cost, np.array([2]))[0]
    assert sorted(columns.tolist()) == [0, 1]
    assert len(set(rows.tolist())) == 2


def test_the_cost_of_a_pair_is_bce_and_dice_over_labelled_pixels() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 30, generator=generator, dtype=torch.float64)
    truth = torch.rand(2, 4, 30, generator=generator) > 0.6
    labelled = torch.rand(2, 30, generator=generator) > 0.3
    cost = pair_cost(logits, truth, labelled, bce=2.0, dice=3.0)
    for n, k, m in itertools.product(range(2), range(3), range(4)):
        x, t = logits[n, k][labelled[n]], truth[n, m][labelled[n]].double()
        p = x.sigmoid()
        dice = 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)
        expected = 2.0 * F.binary_cross_entropy_with_logits(x, t) + 3.0 * dice
        assert cost[n, k, m].item() == pytest.approx(expected.item())


def set_loss(masks: int, classes: int = 3, empty: float = 0.5) -> SetLoss:
    return SetLoss(InstanceHead("set", classes, masks=masks), SegmentationLoss(), bce=5.0, dice=2.0, empty=empty)


def centre_loss(classes: int = 3) -> CentreLoss:
    return CentreLoss(InstanceHead("centres", classes), SegmentationLoss(), heatmap=1.0, offset=1.0, sigma=0.15)


def test_the_order_of_the_channels_does_not_matter_to_the_set_loss() -> None:
    labels, loss = scene(), set_loss(6, classes=0)
    outputs = torch.randn(2, 6, 24, 24, generator=torch.Generator().manual_seed(2))
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert loss(outputs[:, order], labels).item() == pytest.approx(loss(outputs, labels).item(), rel=1e-6)
    assert loss(outputs.flip(-1), labels).item() != pytest.approx(loss(outputs, labels).item(), rel=1e-3)


@pytest.mark.parametrize("make", [lambda: set_loss(8), centre_loss])
def test_perfect_outputs_cost_next_to_nothing_and_others_more(make) -> None:
    labels, loss = scene(), make()
    perfect = perfect_outputs(labels, loss.head)
    assert loss(perfect, labels).item() < 0.02
    assert loss(torch.zeros_like(perfect), labels).item() > 0.5


@pytest.mark.parametrize("make", [lambda: set_loss(3), lambda: set_loss(8, classes=0), centre_loss])
def test_gradients_are_those_of_the_formula_and_skip_void(make) -> None:
    labels, loss = scene(count=1, size=12, objects=2), make()
    generator = torch.Generator().manual_seed(3)
    outputs = torch.randn(1, loss.head.channels, 12, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    loss(outputs, labels).backward()
    assert outputs.grad is not None
    void = (labels[:, 0] == 255)[:, None].expand_as(outputs)
    assert not outputs.grad[void].any()
    assert outputs.grad[~void].abs().max() > 0
    direction = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        step = 1e-6
        change = loss(outputs + step * direction, labels) - loss(outputs - step * direction, labels)
    assert (outputs.grad * direction).sum().item() == pytest.approx(change.item() / (2 * step), rel=1e-4)


@pytest.mark.parametrize("make", [lambda: set_loss(4), lambda: set_loss(4, classes=0), centre_loss])
def test_empty_images_push_to_empty(make) -> None:
    labels, loss = torch.zeros((2, 2, 16, 16), dtype=torch.int64), make()
    outputs = torch.zeros(2, loss.head.channels, 16, 16, requires_grad=True)
    value = loss(outputs, labels)
    value.backward()
    assert torch.isfinite(value)
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()
    if loss.head.method == "set":
        assert (loss.head.mask_logits(outputs.grad) > 0).all(), "every mask shrinks"


@pytest.mark.parametrize("make", [lambda: set_loss(4), centre_loss])
def test_images_of_void_alone_cost_nothing(make) -> None:
    labels, loss = torch.zeros((1, 2, 16, 16), dtype=torch.int64), make()
    labels[:, 0] = 255
    outputs = torch.randn(1, loss.head.channels, 16, 16, requires_grad=True)
    loss(outputs, labels).backward()
    assert outputs.grad is not None
    assert not outputs.grad.any()


def test_only_unmatched_channels_are_pushed_to_empty() -> None:
    labels = scene(count=1, objects=2)
    outputs = torch.full((1, 5, 24, 24), -1.0)
    for channel, number in ((4, 1), (2, 2)):
        outputs[0, channel][labels[0, 1] == number] = 4.0
    loud = outputs.clone()
    loud[0, 0] += 3.0
    quiet, weighed = set_loss(5, classes=0, empty=0.0), set_loss(5, classes=0, empty=1.0)
    assert quiet(loud, labels).item() == pytest.approx(quiet(outputs, labels).item())
    assert weighed(loud, labels).item() > weighed(outputs, labels).item() + 0.1


def test_the_largest_objects_are_kept_and_the_others_counted_once() -> None:
    labels = torch.zeros((2, 2, 16, 16), dtype=torch.int64)
    for number, side in ((3, 2), (5, 6), (9, 4)):
        labels[0, :, number : number + side, :side] = torch.tensor([1, number]).view(2, 1, 1)
    labels[0, 1, 3:5, :2], labels[1, 1, 0:3, 0:3] = 3, 7
    truth, kept, left = select_objects(labels[:, 1], 2)
    assert truth.shape == (2, 2, 16, 16)
    assert kept.tolist() == [2, 1]
    assert left.tolist() == [1, 0]
    assert torch.equal(truth[0, 0] | truth[0, 1], (labels[0, 1] == 5) | (labels[0, 1] == 9))
    assert not truth[1, 1].any(), "the second image has one object"
    loss = set_loss(2, classes=0)
    assert loss.warnings() == []
    loss(torch.zeros(2, 2, 16, 16), labels)
    loss(torch.zeros(2, 2, 16, 16), labels)
    (warning,) = loss.warnings()
    assert "2 images" in warning
    assert "2 mask channels" in warning
    assert "2 left out" in warning
    assert loss.warnings() == [], "said once"


def test_centre_targets_are_the_formula() -> None:
    labels = scene(count=2, size=40, objects=5, seed=7)
    ids = labels[:, 1]
    targets = centre_targets(ids, sigma=0.2)
    expected = torch.zeros(ids.shape)
    rows, columns = torch.meshgrid(torch.arange(40), torch.arange(40), indexing="ij")
    for n, image in enumerate(ids):
        for number in image.unique()[1:]:
            where = image == number
            centre = [float(axis[where].double().mean().round()) for axis in (rows, columns)]
            spread = min(max(0.2 * float(where.sum()) ** 0.5, 1.0), 8.0)
            square = (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2
            peak = torch.exp(-square / (2 * spread**2)) * (square <= (3 * spread) ** 2)
            expected[n] = torch.maximum(expected[n], peak)
            apart = torch.stack([centre[0] - rows[where], centre[1] - columns[where]]) / OFFSET_UNIT
            torch.testing.assert_close(targets.offsets[n][:, where], apart.float())
    torch.testing.assert_close(targets.heatmap, expected)
    assert torch.equal(targets.things, ids > 0)
    assert not targets.offsets[:, :, ids[0] == 0][0].any()


def test_peaks_of_touching_objects_stay_apart_and_numbers_may_have_gaps() -> None:
    ids = torch.zeros((1, 30, 40), dtype=torch.int64)
    ids[0, 5:15, 5:15], ids[0, 5:15, 15:25] = 900, 3
    heatmap = centre_targets(ids, 0.15).heatmap[0]
    assert heatmap.max() == 1.0
    assert (heatmap == 1.0).sum() == 2
    assert heatmap[10, 15] < 0.1, "between the two"


def test_a_batch_without_objects_has_no_target() -> None:
    targets = centre_targets(torch.zeros((2, 8, 8), dtype=torch.int64), 0.15)
    assert not targets.heatmap.any()
    assert not targets.offsets.any()
    assert not targets.things.any()


def test_the_heatmap_loss_is_divided_by_the_mass_of_the_peaks() -> None:
    labels = torch.zeros((1, 2, 64, 64), dtype=torch.int64)
    labels[0, :, 10:30, 10:30] = 1
    head = InstanceHead("centres", 2)
    loss = CentreLoss(head, SegmentationLoss(0.0, 0.0), heatmap=1.0, offset=0.0, sigma=0.15)
    targets = centre_targets(labels[:, 1], 0.15)
    outputs = torch.zeros(1, 5, 64, 64)
    mass = max(targets.heatmap.sum().item(), MIN_MASS * 64 * 64)
    assert loss(outputs, labels).item() == pytest.approx(targets.heatmap.square().sum().item() / mass, rel=1e-5)
    labels.zero_()
    head.heatmap(outputs)[:] = 0.1
    assert loss(outputs, labels).item() == pytest.approx(0.01 / MIN_MASS, rel=1e-4)


@pytest.mark.parametrize("parts", [(1.0, 0.0), (0.0, 1.0), (0.7, 3.0)])
def test_the_centre_loss_is_the_formula(parts: tuple[float, float]) -> None:
    """Pixel by pixel: of images of other sides, with void, objects of several classes, and none."""
    labels = torch.cat([scene(count=2, size=20, objects=3, seed=1), torch.zeros((1, 2, 20, 20), dtype=torch.int64)])
    labels = labels[..., 4:]
    head, semantic = InstanceHead("centres", 3), SegmentationLoss()
    outputs = torch.randn(3, 6, 20, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    targets, error, apart, peaks, pixels, things = centre_targets(labels[:, 1], 0.3), 0.0, 0.0, 0.0, 0, 0
    for n, row, column in itertools.product(range(3), range(20), range(16)):
        place = n, slice(None), row, column
        if labels[place][0] != 255:
            truth, pixels = float(targets.heatmap[n, row, column]), pixels + 1
            error, peaks = error + (float(outputs[place][3]) - truth) ** 2, peaks + truth
        if labels[place][1] > 0:
            things += 1
            apart += sum(abs(float(x - y)) for x, y in zip(outputs[place][4:], targets.offsets[place], strict=True)) / 2
    expected = float(semantic(outputs[:, :3], labels[:, 0]))
    expected += parts[0] * error / max(peaks, MIN_MASS * pixels, 1.0) + parts[1] * apart / things
    loss = CentreLoss(head, semantic, *parts, sigma=0.3)
    assert float(loss(outputs, labels)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("make", [lambda: set_loss(4), centre_loss])
def test_half_precision_outputs_are_summed_in_full(make) -> None:
    labels, loss = scene(size=64), make()
    outputs = torch.randn(2, loss.head.channels, 64, 64, generator=torch.Generator().manual_seed(0)).half()
    assert loss(outputs, labels).dtype == torch.float32
    assert loss(outputs, labels).item() == pytest.approx(loss(outputs.float(), labels).item(), rel=1e-6)
