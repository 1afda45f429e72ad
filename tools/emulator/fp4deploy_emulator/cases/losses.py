"""Cases of the kernels of losses: sums in an order of their own, near those of float64."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch

from fp4deploy.plugins.losses import segmentation
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, normal
from fp4deploy_emulator.cases.cuda import BFLOAT, FLOAT, HALF, emulated

IGNORED = 255


def segmentation_loss(
    shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format, smoothing: float = 0.0
) -> Callable[[Setting, Outcome], None]:
    """Sums of cross-entropy and Dice, and the gradient of a weighted sum of them, against autograd in float64.

    By two blocks, so that one has several tiles where the map is larger than two.
    """

    def case(setting: Setting, outcome: Outcome) -> None:
        n, classes, h, w = shape
        logits = (3 * normal(setting, *shape)).to(dtype).to(memory_format=layout)
        target = (normal(setting, n, h, w, seed=1).abs() * classes).long() % classes
        target[0, 0, : w // 2] = IGNORED
        weight, upstream = normal(setting, classes, seed=2).abs(), normal(setting, 2 + 3 * classes, seed=3)
        for weights in (None, weight):
            with emulated(setting, outcome), mock.patch.object(segmentation, "BLOCKS", 2):
                sums = segmentation._sums(logits, target, weights, smoothing, IGNORED)
                gradient = segmentation._gradient(logits, target, weights, upstream, smoothing, IGNORED)
            exact = logits.double().requires_grad_()
            expected = _exact(exact, target, weights, smoothing)
            (expected @ upstream.double()).backward()
            assert exact.grad is not None
            outcome.compare(torch.isclose(sums.double(), expected, rtol=1e-5, atol=1e-5).byte(), _true(sums))
            rounded = exact.grad.to(dtype).double()
            bound = {FLOAT: 1e-5, HALF: 2**-10, BFLOAT: 2**-7}[dtype]
            outcome.compare(torch.isclose(gradient.double(), rounded, rtol=bound, atol=2e-6).byte(), _true(gradient))

    return case


def _exact(logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, smoothing: float) -> torch.Tensor:
    """The definition, pixel by pixel."""
    classes = logits.shape[1]
    labelled = target != IGNORED
    log_p, y = logits.log_softmax(1).movedim(1, -1)[labelled], target[labelled]
    w = torch.ones(len(y), dtype=torch.float64) if weight is None else weight.double()[y]
    truth = torch.nn.functional.one_hot(y, classes).double()
    entropy = -(w[:, None] * log_p * ((1 - smoothing) * truth + smoothing / classes)).sum()
    p = log_p.exp()
    return torch.cat([entropy.view(1), w.sum().view(1), (p * truth).sum(0), p.sum(0), truth.sum(0)])


def _true(like: torch.Tensor) -> torch.Tensor:
    return torch.ones(like.shape, dtype=torch.uint8)


LAST, FIRST = torch.channels_last, torch.contiguous_format
CASES = (
    Case("segmentation loss", "losses", segmentation_loss((2, 12, 17, 31), HALF, LAST)),
    Case("segmentation loss, NCHW, smoothed", "losses", segmentation_loss((3, 3, 13, 19), FLOAT, FIRST, 0.1)),
    Case("segmentation loss, 81 classes", "losses", segmentation_loss((1, 81, 9, 17), BFLOAT, LAST, 0.1)),
    Case("segmentation loss, 300 classes", "losses", segmentation_loss((1, 300, 5, 8), HALF, FIRST)),
    Case("segmentation loss, one class", "losses", segmentation_loss((1, 1, 3, 3), HALF, LAST)),
)
