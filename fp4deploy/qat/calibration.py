"""Calibration by percentile: an activation scale that leaves out the largest outliers.

`prepare.calibrate` takes the largest magnitude that a layer sees. A percentile p below 100 takes, batch by batch, the
magnitude that p percent of the elements do not exceed, and of those the largest. It is where a learned amax has to
start: an amax that nothing exceeds has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.qat.layers import QuantizedLayer
from fp4deploy.qat.prepare import calibrate, quantized_layers

SAMPLE = 2**20  # elements of a batch that are sorted, evenly spaced


@torch.no_grad()
def calibrate_percentile(
    model: nn.Module, batches: torch.Tensor | Iterable[object], percentile: float = 100.0, rest: str = "fp16"
) -> None:
    """Set every `input_amax` to the given percentile of the magnitudes its layer sees, quantisers switched off.

    Args:
        batches: one batch or several, as of `calibrate`.
        percentile: above 0, at most 100 (exactly the largest magnitude).
        rest: as of `calibrate`.

    Raises:
        InputError: `percentile` is out of range.
    """
    if not 0 < percentile <= 100:
        raise InputError(f"The percentile of a calibration is {percentile:g}; valid values lie above 0, up to 100.")
    if percentile == 100:
        calibrate(model, batches, rest)
        return
    layers = quantized_layers(model)
    largest: dict[str, torch.Tensor] = {}

    def observe(name: str, layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        value = _percentile(inputs[0], percentile)
        largest[name] = torch.maximum(largest[name], value) if name in largest else value

    hooks = [layer.register_forward_pre_hook(partial(observe, name)) for name, layer in layers.items()]
    try:
        calibrate(model, batches, rest)
    finally:
        for hook in hooks:
            hook.remove()
    for name, value in largest.items():
        _lower(layers[name], value)


def _percentile(x: torch.Tensor, percentile: float) -> torch.Tensor:
    magnitude = x.detach().flatten()
    magnitude = magnitude[:: max(1, magnitude.numel() // SAMPLE)].float().abs()
    return magnitude[magnitude.isfinite()].quantile(percentile / 100)


def _lower(layer: QuantizedLayer, value: torch.Tensor) -> None:
    """An input that is mostly zeros keeps the scale it has."""
    if layer.input_amax is not None and value > 0:
        layer.input_amax.copy_(torch.minimum(layer.input_amax, value))
