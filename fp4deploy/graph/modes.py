"""Evaluation mode for a while, as the modules were before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, a model is in evaluation mode; afterwards each module is in its own again, a frozen BatchNorm too.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    >>> with evaluating(model):
    ...     pass
    >>> model.training, model[1].training
    (True, False)
    """
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module in model.modules():
            module.training = before.get(module, before[model])
