"""Resetting weights that oscillate between two codes: OsciReset of TetraJet-v2.

Late in a training a weight near the threshold between two codes moves little, and its quantised value Q(w), as the
forward GEMM reads it, jumps from one code to the other and back. Over a window of T steps both movements are summed,
element by element,

    D_w = sum_{t=1..T} |w_t - w_{t-1}|          D_Q = sum_{t=1..T} |Q(w_t) - Q(w_{t-1})|          r = D_Q / D_w

with r = 0 where the weight did not move. A weight that travels has r near 1; one that oscillates has its code's jumps
against hardly any movement of its own. After the next step every weight with r >= ratio is set to its code's value,
w <- Q(w), away from both thresholds of its code. The optimiser's moments stay as they are.

Steps count from the first one after `start`: in a period, step 0 takes the weights that the sums start from, steps 1
to T sum, step T + 1 resets. Dampening (`train.losses.auxiliary`) pulls every weight to its code all the time instead.

Source: Chen et al., "TetraJet-v2", arXiv 2510.27527, and the authors' code, thu-ml/TetraJet-v2-NVFP4Training on GitHub,
olmo/quantization_real/oscillation_reset.py and calibrate.py: detection by `distance_ratio`, every weight tracked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fp4deploy.qat.layers import QuantizedLayer


@dataclass
class _Window:
    """What a window keeps of one weight, each with its shape and dtype."""

    weight: torch.Tensor
    quantized: torch.Tensor
    moved: torch.Tensor
    jumped: torch.Tensor


class OscillationResets:
    """The resets of a training, for the layers whose recipe has them."""

    def __init__(self, layers: Mapping[str, QuantizedLayer], steps: int) -> None:
        """For `layers` by name; `steps`: the optimiser steps of the whole training."""
        resets = {name: layer for name, layer in layers.items() if layer.recipe.weight_reset is not None}
        self._layers = {name: layer for name, layer in resets.items() if layer.holds_weight}
        self._steps = steps
        self._windows: dict[str, _Window] = {}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Follow the weights after the optimiser's step of this number, counted from 0, and reset where it is time."""
        for name, layer in self._layers.items():
            reset = layer.recipe.weight_reset
            assert reset is not None
            since = step - math.ceil(reset.start * self._steps)
            phase = since % reset.period
            if since < 0 or phase > reset.window + 1:
                continue
            weight, quantized = layer.weight.detach(), layer.quantized_weight()
            if phase == 0:
                zero = torch.zeros_like(weight)
                self._windows[name] = _Window(weight.clone(), quantized, zero, zero.clone())
            elif name not in self._windows:
                continue  # the training was resumed from a state that has none
            elif phase <= reset.window:
                window = self._windows[name]
                window.moved += (weight - window.weight).abs()
                window.jumped += (quantized - window.quantized).abs()
                window.weight, window.quantized = weight.clone(), quantized
            else:
                window = self._windows.pop(name)
                oscillates = (window.moved > 0) & (window.jumped >= reset.ratio * window.moved)
                if layer.outliers is not None:  # they have no code to sit between
                    oscillates.index_fill_(layer.gemms().weight_axes[1], layer.outliers.chosen, False)
                weight.copy_(torch.where(oscillates, quantized, weight))

    def state(self) -> dict[str, torch.Tensor]:
        """What an exact resume within a window needs, by name; empty outside of one."""
        return {f"{name}.{key}": value for name, window in self._windows.items() for key, value in vars(window).items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state` gave.

        Raises:
            KeyError: a part of it is missing.
        """
        self._windows = {}
        for name, layer in self._layers.items():
            if f"{name}.weight" in state:
                values = {key: state[f"{name}.{key}"].to(layer.weight) for key in _Window.__annotations__}
                self._windows[name] = _Window(**values)
