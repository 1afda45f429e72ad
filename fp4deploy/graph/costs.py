"""What linear layers and convolutions do for one image: multiply-accumulates, elements read and written.

convolution              output elements x input channels of a group x taps
transposed convolution   input elements x output channels of a group x taps
linear                   output elements x input features

Everything else is memory traffic and is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from fp4deploy.graph.modes import evaluating

MULTIPLYING = (nn.Linear, nn.modules.conv._ConvNd)  # transposed convolutions are of the second class


class Work(NamedTuple):
    """Elements and multiply-accumulates of all calls of a layer."""

    read: int = 0
    written: int = 0
    macs: int = 0


@torch.no_grad()
def work_of_layers(
    model: nn.Module, layers: Mapping[str, nn.Module], image: torch.Tensor | Sequence[object] | Mapping[str, object]
) -> dict[str, Work]:
    """The work of layers of `MULTIPLYING` in a forward pass of one image [1, C, H, W], or of the arguments of one,
    which is run for it."""
    work = dict.fromkeys(layers, Work())

    def count(name: str, layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        weight, before = layer.weight, work[name]
        assert isinstance(weight, torch.Tensor)
        transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
        read, written = inputs[0].numel(), output.numel()
        macs = (read if transposed else written) * weight[0].numel()
        work[name] = Work(before.read + read, before.written + written, before.macs + macs)

    handles = [layer.register_forward_hook(partial(count, name)) for name, layer in layers.items()]
    try:
        with evaluating(model):
            if isinstance(image, Mapping):
                model(**image)
            else:
                model(*([image] if isinstance(image, torch.Tensor) else image))
    finally:
        for handle in handles:
            handle.remove()
    return work
