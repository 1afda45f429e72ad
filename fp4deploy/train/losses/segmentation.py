"""Cross-entropy plus Dice, both ignoring pixels labelled 255, both computed in FP32 whatever the logits' dtype.

Cross-entropy drives every pixel but is content with the frequent classes; Dice, one minus the overlap of a class with
its prediction, weighs a small class like a large one. With p the softmax, y the one-hot truth and w the weight of a
class (1 by default), over labelled pixels and over the classes c present in the batch:

    cross-entropy = sum_i w[y_i] * -log p_i[y_i]  /  sum_i w[y_i]
    dice          = 1 - sum_c w_c (2 sum p_c y_c + s) / (sum p_c + sum y_c + s)  /  sum_c w_c,      s = 1

The Tversky loss is Dice with weights a of false positives and b of false negatives, where a = b = 1/2 gives Dice:
2 (a sum p_c + b sum y_c + (1 - a - b) sum p_c y_c) stands in place of sum p_c + sum y_c.

With label smoothing e the -log p of the true class weighs 1 - e, and the mean over all classes e. With several
processes the sums run over all of them (`distributed.summed`), so that the loss is that of the whole batch, however it
is spread.

So the loss is 2 + 3 C sums over the pixels, and then arithmetic of C numbers. `class_sums` computes them: on a GPU by
a kernel that reads the logits once (`plugins.losses.segmentation`), elsewhere by torch.

Absent classes are left out of Dice (their overlap would be s over their false positives, whatever the model does);
cross-entropy still punishes those. Source: Milletari, Navab, Ahmadi, "V-Net", 2016, for the Dice loss; Salehi,
Erdogmus, Gholipour, "Tversky loss function for image segmentation using 3D fully convolutional deep networks", 2017.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fp4deploy.data.sample import IGNORE
from fp4deploy.plugins.losses.segmentation import segmentation_sums, supports
from fp4deploy.train.distributed import summed
from fp4deploy.train.losses.loss import Loss

SMOOTH = 1.0
DICE = (0.5, 0.5)  # weights of false positives and false negatives
TINY = 1e-12


def dice_loss(logits: torch.Tensor, target: torch.Tensor, class_weights: torch.Tensor | None = None) -> torch.Tensor:
    """Soft multi-class Dice loss.

    Args:
        logits: [N, C, H, W], or with D before H; any float dtype.
        target: int64 [N, H, W], class ids or 255.
        class_weights: float [C], or None for equal weights.

    Returns:
        scalar in [0, 1], float32 (float64 for float64 logits); 0, with zero gradients, where no pixel is labelled.
    """
    return _dice(class_sums(logits, target), class_weights)


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, class_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean cross-entropy of the labelled pixels; arguments and result as of `dice_loss`, without its upper bound."""
    return _cross_entropy(class_sums(logits, target, class_weights))


class SegmentationLoss(Loss):
    """`cross_entropy` * CE + `dice` * Dice, a float32 scalar; `balance` weighs classes in the cross-entropy alone.

    tversky: weights of false positives and false negatives in Dice.
    """

    def __init__(
        self,
        cross_entropy: float = 1.0,
        dice: float = 1.0,
        class_weights: torch.Tensor | None = None,
        label_smoothing: float = 0.0,
        balance: torch.Tensor | None = None,
        tversky: tuple[float, float] = DICE,
    ) -> None:
        self.cross_entropy, self.dice, self.class_weights = cross_entropy, dice, class_weights
        self.label_smoothing, self.balance, self.tversky = label_smoothing, balance, tversky
        self._placed: dict[torch.device, tuple[torch.Tensor | None, torch.Tensor | None]] = {}

    def of(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Loss of logits [N, C, *size] against int64 targets [N, *size]; 0 where no pixel is labelled."""
        weights, balance = self._weights_on(logits.device)
        for_entropy = balance if weights is None else weights if balance is None else weights * balance
        sums = summed(class_sums(logits, target, for_entropy, self.label_smoothing))
        return self.cross_entropy * _cross_entropy(sums) + self.dice * _dice(sums, weights, self.tversky)

    def _weights_on(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Class weights and `balance` on a device, copied once: a copy from the host cannot be in a CUDA graph."""
        if device not in self._placed:
            weights, balance = (w if w is None else w.to(device) for w in (self.class_weights, self.balance))
            self._placed[device] = weights, balance
        return self._placed[device]


def class_sums(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, smoothing: float = 0.0
) -> torch.Tensor:
    """The sums over labelled pixels that both losses are made of.

    Returns:
        [2 + 3 C], float32 (float64 for float64 logits): w -log p[y], smoothed; w; then for each class c p_c where it
        is the truth, p_c, and the pixels whose truth it is.
    """
    if logits.ndim == target.ndim + 1 > 4:  # the sums do not know how pixels lie
        logits, target = logits.flatten(2, -2), target.flatten(1, -2)
    if supports(logits, target, weight):
        return segmentation_sums(logits, target, weight, smoothing, IGNORE)
    with torch.autocast(logits.device.type, enabled=False):
        log_probability = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(dim=1)
    labelled = target != IGNORE
    weights = None if weight is None else weight.to(log_probability.dtype)
    counted = labelled if weights is None else weights[target.where(labelled, 0)] * labelled
    entropy = F.nll_loss(log_probability, target, weight=weights, ignore_index=IGNORE, reduction="sum")
    if smoothing:
        entropy = (1 - smoothing) * entropy - smoothing * (log_probability.mean(1) * counted).sum()
    classes = torch.arange(log_probability.shape[1], device=target.device).view(1, -1, 1, 1)
    truth = target.where(labelled, -1).unsqueeze(1) == classes  # bool [N, C, H, W]
    probability = log_probability.exp() * labelled.unsqueeze(1)
    axes = (0, 2, 3)
    sums = [
        entropy.view(1),
        counted.sum().view(1),
        *(each.sum(axes) for each in (probability * truth, probability, truth)),
    ]
    return torch.cat([each.to(probability.dtype) for each in sums])


def _cross_entropy(sums: torch.Tensor) -> torch.Tensor:
    return sums[0] / sums[1].clamp(min=TINY)


def _dice(sums: torch.Tensor, class_weights: torch.Tensor | None, tversky: tuple[float, float] = DICE) -> torch.Tensor:
    overlap, mass, size = sums[2:].view(3, -1)
    positives, negatives = tversky
    whole = 2 * (positives * mass + negatives * size + (1 - positives - negatives) * overlap)
    dice = (2 * overlap + SMOOTH) / (whole + SMOOTH)
    weight = (size > 0).to(dice.dtype)
    if class_weights is not None:
        weight = weight * class_weights.to(dice.dtype)
    return ((1 - dice) * weight).sum() / weight.sum().clamp(min=TINY)
