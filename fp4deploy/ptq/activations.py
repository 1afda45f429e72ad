"""The static amax of every layer's input, chosen on calibration images.

amax         the largest magnitude seen
percentile   the magnitude that `percentile` per cent of the elements do not exceed
mse          of several shares of the amax the one with the smallest squared error of the quantised input

With blocks of 16 an outlier costs its own block only, so the amax is rarely far from the best choice; a smaller one
clips, and buys finer block scales for blocks far below the amax, whose E4M3 scale would be subnormal.

Source of choosing a clipping range by squared error: Banner et al., "Post-Training 4-Bit Quantization of Convolution
Networks for Rapid-Deployment", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp4deploy.errors import InputError
from fp4deploy.ptq.forward import deployed_rest
from fp4deploy.qat import calibrate, quantized_layers
from fp4deploy.qat.batches import run
from fp4deploy.qat.calibration import calibrate_percentile
from fp4deploy.qat.operators.quantizers import quantize_operand

CHOICES = ("amax", "percentile", "mse")
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
PERCENTILE = 99.99


@torch.no_grad()
def calibrate_activations(
    model: nn.Module, batches: Sequence[object], choice: str = "amax", percentile: float = PERCENTILE
) -> None:
    """Set every `input_amax` of a prepared model, quantisers switched off while it is measured.

    Raises:
        InputError: an unknown choice, or a percentile out of range.
    """
    if choice not in CHOICES:
        raise InputError(f"--activations is '{choice}'. Valid: {', '.join(CHOICES)}.")
    if choice == "percentile":
        calibrate_percentile(model, batches, percentile, deployed_rest().name)
        return
    calibrate(model, batches, deployed_rest().name)
    if choice == "mse":
        _search(model, batches)


def _search(model: nn.Module, batches: Sequence[object]) -> None:
    layers = {name: layer for name, layer in quantized_layers(model).items() if layer.input_amax is not None}
    device = next(model.parameters()).device
    errors = {name: torch.zeros(len(SHARES), dtype=torch.float64, device=device) for name in layers}

    def measure(name: str) -> Any:
        def hook(layer: Any, inputs: tuple[Tensor, ...]) -> None:
            x, gemms = inputs[0].detach(), layer.gemms()
            for place, share in enumerate(SHARES):
                amax = share * layer.input_amax
                quantized, _ = quantize_operand(x, layer.recipe.activation, (gemms.input_axis,), amax, (gemms.groups,))
                errors[name][place] += (quantized - x).double().square().sum()

        return hook

    handles = [layer.register_forward_pre_hook(measure(name)) for name, layer in layers.items()]
    amaxes = {name: layer.input_amax.clone() for name, layer in layers.items() if layer.input_amax is not None}
    try:
        for layer in layers.values():
            layer.observing = True
        for batch in batches:
            run(model, batch)
    finally:
        for handle in handles:
            handle.remove()
        for layer in layers.values():
            layer.observing = False
    for name, layer in layers.items():
        best = SHARES[int(errors[name].argmin())]
        layer.input_amax.copy_(best * amaxes[name])  # type: ignore[union-attr]
