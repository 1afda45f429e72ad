"""Cross-entropy plus Dice, both ignoring pixels labelled 255, both computed in FP32 whatever the logits' dtype.

Cross-entropy drives every pixel but is content with the frequent classes; Dice, one minus the overlap of a class with
its prediction, weighs a small class like a large one. With p the softmax and y the one-hot truth over labelled pixels:

    dice = 1 - mean over classes c present in the batch of  (2 sum p_c y_c + s) / (sum p_c + sum y_c + s),   s = 1

Source: Milletari, Navab, Ahmadi, "V-Net", 2016, for the Dice loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fp4deploy.metrics import IGNORE

SMOOTH = 1.0


def dice_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Soft multi-class Dice loss.

    Args:
        logits: [N, C, H, W], any float dtype.
        target: int64 [N, H, W], class ids or 255.

    Returns:
        float32 scalar in [0, 1]; 0, with zero gradients, where no pixel is labelled.
    """
    labelled = (target != IGNORE).unsqueeze(1)
    probability = logits.float().softmax(dim=1) * labelled
    truth = F.one_hot(target.where(target != IGNORE, 0), logits.shape[1]).movedim(-1, 1) * labelled
    axes = (0, 2, 3)
    size = truth.sum(axes).float()
    overlap = (probability * truth).sum(axes)
    dice = (2 * overlap + SMOOTH) / (probability.sum(axes) + size + SMOOTH)
    present = size > 0
    return ((1 - dice) * present).sum() / present.sum().clamp(min=1)


class SegmentationLoss:
    """`cross_entropy` * CE + `dice` * Dice, a float32 scalar."""

    def __init__(self, cross_entropy: float = 1.0, dice: float = 1.0) -> None:
        self.cross_entropy, self.dice = cross_entropy, dice

    def __call__(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Loss of logits [N, C, H, W] against int64 targets [N, H, W]; 0 where no pixel is labelled."""
        labelled = (target != IGNORE).sum().clamp(min=1)
        entropy = F.cross_entropy(logits.float(), target, ignore_index=IGNORE, reduction="sum") / labelled
        return self.cross_entropy * entropy + self.dice * dice_loss(logits, target)
