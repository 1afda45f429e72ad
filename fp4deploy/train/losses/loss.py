"""What a training step asks of a loss: targets made of the labels alone, then the loss of outputs and targets.

The two are apart so that a CUDA graph of the step can begin behind work whose shapes differ from batch to batch.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor


class Loss(Protocol):
    """`loss(outputs, labels)` -> float32 scalar. A subclass defines `of`, and what it does otherwise than here."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss from the labels as they are loaded."""
        return self.of(outputs, *self.targets(labels))

    def targets(self, labels: Tensor) -> tuple[Tensor, ...]:
        """What `of` compares the outputs with; its shapes need not be the batch's."""
        return (labels,)

    def of(self, outputs: Tensor, *targets: Any, **named: Any) -> Tensor:
        """The loss from what `targets` made of the labels."""
        ...

    def warnings(self) -> list[str]:
        """What was noticed in training, each once."""
        return []


class LabelLoss(Loss):
    """Cross-entropy of one class an image, in FP32: logits [N, classes], int64 [N]; `smoothing` goes to all classes."""

    def __init__(self, smoothing: float = 0.0) -> None:
        self.smoothing = smoothing

    def of(self, outputs: Tensor, *targets: Any, **named: Any) -> Tensor:
        """The mean over the images."""
        return F.cross_entropy(outputs.float(), targets[0], label_smoothing=self.smoothing)
