"""The few layers that lose most in FP4 for the work that FP4 saves in them: those to leave in FP8.

Each quantised layer is put into FP4 alone, everything else in full precision, and e is the error of the network's
output, squared and relative. Layers are taken by the largest e per multiply-accumulate, as many as fit into a share of
the multiply-accumulates of all quantised layers. Squared errors of layers add up where they are small and independent,
so that this is the greedy choice of the knapsack problem that `experiments.search` solves exactly for other budgets.
Errors lie orders of magnitude apart (`fp4deploy telemetry layers` shows them), and the layers of the largest are often
narrow ones at full resolution, or with next to no work.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fp4deploy.graph.costs import work_of_layers
from fp4deploy.qat.batches import first_tensor, run
from fp4deploy.qat.layers import QuantizedLayer
from fp4deploy.qat.prepare import quantized_layers


@torch.no_grad()
def sensitive_layers(model: nn.Module, batches: Sequence[Any], share: float) -> list[str]:
    """The names of the layers, the largest error per multiply-accumulate first.

    Args:
        model: prepared and calibrated. Layers of FP8 and INT8 are not asked.
        batches: model inputs on the model's device.
        share: the most of the multiply-accumulates of all quantised layers that they may have, in [0, 1].
    """
    was_training = model.training
    model.eval()
    layers = quantized_layers(model)
    try:
        _only(layers, ())
        expected = [_outputs(model, batch) for batch in batches]
        work = work_of_layers(model, layers, first_tensor(batches[0])[:1])
        macs = {name: each.macs for name, each in work.items()}
        errors: dict[str, float] = {}
        for name, layer in layers.items():
            if layer.recipe.activation is None or layer.recipe.activation.in_eight_bits or not macs[name]:
                continue
            _only(layers, (name,))
            found = (_error(_outputs(model, batch), each) for batch, each in zip(batches, expected, strict=True))
            errors[name] = sum(found)
    finally:
        _only(layers, layers)
        model.train(was_training)
    left, chosen = share * sum(macs.values()), []
    for name in sorted(errors, key=lambda name: errors[name] / macs[name], reverse=True):
        if macs[name] <= left:
            chosen.append(name)
            left -= macs[name]
    return chosen


def _only(layers: dict[str, QuantizedLayer], names: Collection[str]) -> None:
    for name, layer in layers.items():
        layer.quantizing = name in names


def _outputs(model: nn.Module, batch: Any) -> Tensor:
    """Every number that the network gives, as one row."""
    leaves = [each for each in tree_leaves(run(model, batch)) if isinstance(each, Tensor) and each.is_floating_point()]
    return torch.cat([each.float().flatten() for each in leaves])


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).square().sum() / expected.square().sum().clamp(min=1e-30))
