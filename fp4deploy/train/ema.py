"""An exponential moving average of the weights, which is what is evaluated and kept.

After every step, shadow <- d shadow + (1 - d) weight, with d = min(decay, (1 + n) / (10 + n)) at step n, so that a
short training does not average over its start. The mean of the weights along a noisy path is a better model than its
last point, and its score moves less from one evaluation to the next.

Quantiser state. A tracked `input_amax` is an upper bound that already moves slowly, and the average of upper bounds
is none: the averaged model takes the one of the trained model. A learned amax is a parameter and averaged like one.
The codes of the averaged model are made from the averaged weights; averaging codes would give values that FP4 does
not have.

Every process of a distributed training holds the same weights, so each keeps the same average without a word to the
others.

Source: Polyak, Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


class WeightAverage:
    """Averages of a model's parameters by name, float32, beside the model."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Start from the weights that `model` has now; `decay` in [0, 1)."""
        self.decay = decay
        self.parameters = dict(model.named_parameters())
        self.shadow = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average after the step with this number, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        weights = [parameter.detach() for parameter in self.parameters.values()]
        torch._foreach_lerp_(list(self.shadow.values()), weights, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model holds the average inside, and its own weights again after it, also after an exception."""
        kept = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self._put(self.shadow)
        try:
            yield
        finally:
            self._put(kept)

    def state(self) -> dict[str, torch.Tensor]:
        """What an exact resume needs."""
        return dict(self.shadow)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take back what `state` gave.

        Raises:
            KeyError: a parameter has no average in it.
        """
        for name, shadow in self.shadow.items():
            shadow.copy_(state[name])

    @torch.no_grad()
    def _put(self, values: Mapping[str, torch.Tensor]) -> None:
        torch._foreach_copy_(
            [parameter.detach() for parameter in self.parameters.values()], [values[name] for name in self.parameters]
        )
