"""Which input channels are outliers: chosen once, early in a training, and kept.

For each layer with n the norm of every input channel over the batch (and the places of an image),

    from step `start` on, for `window` steps:      s_c = sum_t ||X_c||_2           then I = the k channels of largest s

Source: as of `outliers`; `start_channel_outlier_accumulate` and `sync_channel_accumulate_and_update_idx` there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fp4deploy.qat.layers import QuantizedLayer


class OutlierSelection:
    """The selections of a training, for the layers whose recipe has outlier channels."""

    def __init__(self, layers: Mapping[str, QuantizedLayer], steps: int) -> None:
        """For `layers` by name; `steps`: the optimiser steps of the whole training."""
        self._layers = {name: layer for name, layer in layers.items() if layer.outlier_channels is not None}
        self._steps = steps

    @torch.no_grad()
    def update(self, step: int) -> bool:
        """Begin or end the sums of what the steps after this one see; `step`: the next one, counted from 0.

        Returns:
            Whether the layers compute something else from now on.
        """
        changed = False
        for layer in self._layers.values():
            control = layer.recipe.outlier_control
            assert control is not None
            first = math.ceil(control.start * self._steps)
            if step == first and layer.channel_norms is None and layer.outliers is None:
                layer.channel_norms = torch.zeros(layer.in_channels_of_weight(), device=layer.weight.device)
                changed = True
            elif step == first + control.window and layer.channel_norms is not None:
                sums = layer.channel_norms
                if torch.distributed.is_available() and torch.distributed.is_initialized():
                    torch.distributed.all_reduce(sums)
                layer.choose_outliers(sums)
                changed = True
        return changed

    def state(self) -> dict[str, torch.Tensor]:
        """What an exact resume within the window needs, by name; empty outside of it."""
        return {name: layer.channel_norms for name, layer in self._layers.items() if layer.channel_norms is not None}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state` gave."""
        for name, layer in self._layers.items():
            layer.channel_norms = state[name].to(layer.weight.device) if name in state else None
