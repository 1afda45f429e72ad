"""The convolutions that the benchmark of volumes times one by one are those of its network."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    for name in ("packed_volumes", "peers"):
        sys.modules.pop(name, None)
    import packed_volumes

    return packed_volumes


def test_layers_are_those_of_the_network(benchmark: Any) -> None:
    widths, size, found = (32, 64, 96), 16, set()
    with torch.device("meta"):
        model = benchmark.PlainUNet(widths)

    def keep(layer: Any, inputs: tuple[torch.Tensor, ...], _: Any) -> None:
        if 1 not in layer.kernel_size and layer.in_channels > 1:
            taps = (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride[0], layer.transposed)
            found.add((tuple(inputs[0].shape[2:]), *taps))

    for layer in model.modules():
        if isinstance(layer, nn.Conv3d | nn.ConvTranspose3d):
            layer.register_forward_hook(keep)
    logits = model(torch.empty(1, 1, size, size, size, device="meta"))
    assert logits.shape == (1, benchmark.CLASSES, size, size, size)
    layers = {
        (place[1:], sum(channels), outputs, taps, stride, transposed)
        for place, channels, outputs, taps, stride, transposed, _ in benchmark.layers_of(size, widths).values()
    }
    assert layers == found
