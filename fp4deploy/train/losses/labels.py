"""Cross-entropy of one class an image, in FP32 whatever the logits' type."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fp4deploy.train.losses.loss import Loss


class LabelLoss(Loss):
    """Logits [N, classes], classes int64 [N]; `smoothing` of the weight goes to all classes alike."""

    def __init__(self, smoothing: float = 0.0) -> None:
        self.smoothing = smoothing

    def of(self, outputs: Tensor, *targets: Any, **named: Any) -> Tensor:
        """The mean over the images."""
        return F.cross_entropy(outputs.float(), targets[0], label_smoothing=self.smoothing)
