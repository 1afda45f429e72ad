"""Running statistics of batch norms, measured again for the weights that are scored and kept.

A batch norm evaluates with the mean and variance that training has tracked: averages over the last steps, of weights
that moved meanwhile, and in quantisation-aware training at first those of the network without quantisers. What is
scored has other weights, the moving average, and is quantised from its first layer to its last. So the statistics are
taken again before a validation, as the mean over some training batches of what that very network sees. They fold into
the neighbouring convolution as before, and cost nothing in deployment. The training goes on with its own.

Norms without running statistics (GroupNorm, InstanceNorm, LayerNorm) have nothing to measure.

Sources: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", 2018 (for averaged
weights); Sun et al., "Hybrid 8-bit Floating Point (HFP8) Training and Inference for Deep Neural Networks", 2019 (for
quantised ones).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class NormStatistics:
    """The measured statistics of a model's batch norms, beside those that it tracks."""

    def __init__(self, model: nn.Module) -> None:
        self.norms = [each for each in model.modules() if isinstance(each, _BatchNorm) and each.track_running_stats]
        self._measured: list[torch.Tensor] = []

    @torch.no_grad()
    def measure(self, forward: Callable[[torch.Tensor], object], batches: Iterable[torch.Tensor]) -> None:
        """Measure on `batches` of images, in evaluation mode but for the norms; kept for `applied`.

        Variances are means over batches, as torch tracks them.
        """
        own, momenta = self._buffers(), [norm.momentum for norm in self.norms]
        kept = [buffer.clone() for buffer in own]
        try:
            for norm in self.norms:
                norm.reset_running_stats()
                norm.momentum = None  # a cumulative mean
                norm.train()
            for images in batches:
                forward(images)
            self._measured = [buffer.clone() for buffer in own]
        finally:
            for norm, momentum in zip(self.norms, momenta, strict=True):
                norm.momentum = momentum
                norm.eval()
            _put(own, kept)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the norms have what was measured last; afterwards, and after an exception, their own again."""
        own = self._buffers() if self._measured else []
        kept = [buffer.clone() for buffer in own]
        _put(own, self._measured)
        try:
            yield
        finally:
            _put(own, kept)

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer for norm in self.norms for buffer in norm.buffers(recurse=False)]


@torch.no_grad()
def _put(buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)  # in place: a CUDA graph of the step reads this memory
