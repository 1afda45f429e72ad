"""Losses against plain float64 formulas, and on batches with nothing to learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp4deploy.train import SegmentationLoss, dice_loss
from fp4deploy.train.distributed import summed
from fp4deploy.train.losses.segmentation import cross_entropy


def sample(classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, classes, 5, 6, generator=generator)
    target = torch.randint(0, classes - 1, (2, 5, 6), generator=generator)
    target[0, :2] = 255
    return logits, target


def dice_by_hand(logits: torch.Tensor, target: torch.Tensor) -> float:
    probability = logits.double().softmax(1)
    losses = []
    for c in range(logits.shape[1]):
        overlap = size = mass = 0.0
        for n, y, x in (target != 255).nonzero().tolist():
            p, t = probability[n, c, y, x].item(), float(target[n, y, x] == c)
            overlap, size, mass = overlap + p * t, size + t, mass + p
        if size:
            losses.append(1 - (2 * overlap + 1) / (mass + size + 1))
    return sum(losses) / len(losses)


def test_dice_is_the_formula_over_labelled_pixels_and_present_classes() -> None:
    logits, target = sample()
    assert dice_loss(logits, target).item() == pytest.approx(dice_by_hand(logits, target), rel=1e-5)


def test_cross_entropy_is_the_mean_over_labelled_pixels() -> None:
    logits, target = sample()
    chosen = logits.double().log_softmax(1).gather(1, target.where(target != 255, 0).unsqueeze(1)).squeeze(1)
    expected = -chosen[target != 255].mean()
    assert SegmentationLoss(1.0, 0.0)(logits, target).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_parts_are_weighted() -> None:
    logits, target = sample()
    entropy, dice = SegmentationLoss(1, 0)(logits, target), SegmentationLoss(0, 1)(logits, target)
    assert SegmentationLoss(2, 0.5)(logits, target).item() == pytest.approx((2 * entropy + 0.5 * dice).item())


@pytest.mark.parametrize(
    "options",
    [{}, {"class_weights": torch.arange(4.0)}, {"balance": torch.arange(4.0)}, {"label_smoothing": 0.3}],
    ids=list,
)
def test_ignored_pixels_count_for_nothing(options: dict[str, Any]) -> None:
    logits, target = sample()
    hidden = (target == 255).unsqueeze(1).expand_as(logits)
    loss, others = SegmentationLoss(**options), torch.where(hidden, 3 * logits.roll(1, 1), logits)
    logits.requires_grad_()
    value = loss(logits, target)
    value.backward()
    assert torch.equal(value, loss(others, target))
    assert not logits.grad[hidden].any()
    assert logits.grad[~hidden].any()


def test_an_all_ignored_batch_gives_zero_and_zero_gradients() -> None:
    logits = torch.randn(1, 3, 4, 4, requires_grad=True)
    loss = SegmentationLoss()(logits, torch.full((1, 4, 4), 255))
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


def test_dice_gradient_agrees_with_finite_differences() -> None:
    logits, target = sample(3)
    logits = (logits[:1, :, :2, :3]).clone().requires_grad_()
    target = target[:1, 2:4, :3]
    dice_loss(logits, target).backward()
    for index in [(0, 0, 0, 0), (0, 1, 1, 2), (0, 2, 0, 1)]:
        moved = logits.detach().clone()
        moved[index] += 1e-2
        back = logits.detach().clone()
        back[index] -= 1e-2
        slope = (dice_loss(moved, target) - dice_loss(back, target)) / 2e-2
        assert logits.grad[index].item() == pytest.approx(slope.item(), abs=2e-4)


def test_half_precision_logits_are_summed_in_fp32() -> None:
    logits = torch.zeros(1, 2, 400, 400, dtype=torch.float16)
    target = torch.zeros(1, 400, 400, dtype=torch.long)
    assert torch.isfinite(SegmentationLoss()(logits, target))


def test_gradients_pass_gradcheck_in_float64() -> None:
    logits, target = sample(3)
    logits = logits[:, :, :3, :3].double().requires_grad_()
    target, weights = target[:, :3, :3], torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    for loss in (dice_loss, cross_entropy):
        assert torch.autograd.gradcheck(lambda x, loss=loss: loss(x, target, weights), logits)


def test_equal_weights_change_nothing_and_a_weight_of_zero_hides_a_class() -> None:
    logits, target = sample()
    plain = SegmentationLoss()(logits, target)
    assert SegmentationLoss(class_weights=torch.full((4,), 3.0))(logits, target).item() == pytest.approx(plain.item())
    hidden = target.where(target != 1, 255)
    weights = torch.tensor([1.0, 0.0, 1.0, 1.0])
    expected = cross_entropy(logits, hidden)
    assert cross_entropy(logits, target, weights).item() == pytest.approx(expected.item())
    only = torch.full_like(target, 1)
    loss = SegmentationLoss(class_weights=weights)(logits, only)
    assert loss.item() == 0


def test_class_weights_are_copied_to_a_device_once() -> None:
    """A copy in every step would wait for the GPU, and keep the step from being a CUDA graph."""
    loss = SegmentationLoss(class_weights=torch.ones(4), balance=torch.ones(4))
    first, again = (loss._weights_on(torch.device("meta")) for _ in range(2))
    assert all(x is not None and x.is_meta and x is y for x, y in zip(first, again, strict=True))


def test_cross_entropy_weighs_a_pixel_by_its_class() -> None:
    logits = torch.tensor([[[[2.0, -1.0]], [[0.5, 1.0]]]])  # [1, 2, 1, 2]
    target = torch.tensor([[[0, 1]]])
    nll = -logits.double().log_softmax(1)
    expected = (3 * nll[0, 0, 0, 0] + 1 * nll[0, 1, 0, 1]) / 4
    assert cross_entropy(logits, target, torch.tensor([3.0, 1.0])).item() == pytest.approx(expected.item(), rel=1e-6)


def test_gradients_of_sums_over_processes_have_the_mean_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """DistributedDataParallel takes the mean of the processes' gradients: of two here, that see p and 2 p."""
    weight = torch.tensor([1.0, -3.0], requires_grad=True)
    (3 * weight).square().sum().backward()
    alone, weight.grad = weight.grad, None
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda total: total.copy_(3 * weight.detach()))
    for factor in (1, 2):
        total = summed(factor * weight)
        assert torch.equal(total, 3 * weight)
        total.square().sum().backward()
    assert alone is not None
    assert weight.grad is not None
    assert torch.equal(weight.grad / 2, alone)


def test_tversky_weighs_false_positives_and_false_negatives() -> None:
    logits, target = sample()
    labelled = target != 255
    truth = torch.nn.functional.one_hot(target.where(labelled, 0), 4)[labelled].double()  # [pixels, classes]
    p = logits.double().softmax(1).movedim(1, -1)[labelled]
    hits, wrong, missed = (p * truth).sum(0), (p * (1 - truth)).sum(0), ((1 - p) * truth).sum(0)
    index = (hits + 0.5) / (hits + 0.3 * wrong + 0.7 * missed + 0.5)
    loss = SegmentationLoss(0.0, 1.0, tversky=(0.3, 0.7))(logits, target)
    assert loss.item() == pytest.approx((1 - index[:3]).mean().item(), rel=1e-6)  # no pixel is of class 3
    assert torch.equal(SegmentationLoss(0.0, 1.0, tversky=(0.5, 0.5))(logits, target), dice_loss(logits, target))
    foreground = SegmentationLoss(0.0, 1.0, torch.tensor([0.0, 1.0, 1.0, 1.0]), tversky=(0.3, 0.7))(logits, target)
    assert foreground.item() == pytest.approx((1 - index[1:3]).mean().item(), rel=1e-6)
