"""The few layers that lose most in FP4 for the work that FP4 saves in them: those to leave in FP16 or FP8.

Each quantised layer is put into FP4 alone, everything else in full precision, and e is the error of the network's
output, squared and relative. Layers are taken by the largest e per multiply-accumulate, as many as fit into a share of
the multiply-accumulates of all quantised layers. Squared errors of layers add up where they are small and independent,
so that this is the greedy choice of the knapsack problem that `experiments.search` solves exactly for other budgets.
Errors lie orders of magnitude apart (`fp4deploy telemetry layers` shows them), and the layers of the largest are often
narrow ones at full resolution, or with next to no work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fp4deploy.graph.costs import MULTIPLYING, work_of_layers
from fp4deploy.graph.modes import evaluating
from fp4deploy.models.card import ModelCard
from fp4deploy.qat.batches import arguments_of, first_tensor, run
from fp4deploy.qat.layers import QuantizedLayer
from fp4deploy.qat.plan import eight_bits
from fp4deploy.qat.prepare import quantized_layers

ENOUGH_IMAGES = 32  # on which every layer is put into FP4 alone


@torch.no_grad()
def sensitive_layers(model: nn.Module, batches: Iterable[object], share: float, fp4: float = 0.0) -> list[str]:
    """The names of the layers, the largest error per multiply-accumulate first.

    Args:
        model: prepared and calibrated. Layers of FP8, INT8 and W4A8 are not asked.
        batches: model inputs on the model's device, of which the first `ENOUGH_IMAGES` are taken.
        share: the most of the multiply-accumulates of all quantised layers that they may have, in [0, 1].
        fp4: the least of those of the whole network, its unquantised layers included, that stays in FP4, in [0, 1].
    """
    layers, asked = quantized_layers(model), _enough(batches)
    errors: dict[str, float] = {}
    try:
        with evaluating(model):
            _only(layers, ())
            expected = [_outputs(model, batch) for batch in asked]
            multiplying = {name: each for name, each in model.named_modules() if isinstance(each, MULTIPLYING)}
            work = work_of_layers(model, {**multiplying, **layers}, arguments_of(model, asked[0]))
            macs = {name: work[name].macs for name in layers}
            for name, layer in layers.items():
                if layer.recipe.precision != "FP4" or not macs[name]:
                    continue
                _only(layers, (name,))
                found = (_error(_outputs(model, batch), each) for batch, each in zip(asked, expected, strict=True))
                errors[name] = sum(found)
    finally:
        _only(layers, layers)
    least = fp4 * sum(each.macs for each in work.values())
    left, chosen = min(share * sum(macs.values()), sum(macs[name] for name in errors) - least), []
    for name in sorted(errors, key=lambda name: errors[name] / macs[name], reverse=True):
        if macs[name] <= left:
            chosen.append(name)
            left -= macs[name]
    return chosen


def fp8_layers(model: nn.Module) -> list[str]:
    """The layers of a prepared model that are FP8, to be named with others: a recipe decides only where none is."""
    return [name for name, layer in quantized_layers(model).items() if eight_bits(layer.recipe) == "FP8"]


def with_sensitive(card: ModelCard, form: str, names: Collection[str]) -> ModelCard:
    """A card with these layers in "fp16" or "fp8"."""
    if form == "fp16":
        return replace(card, exclude=(*(card.exclude or ()), *names)) if names else card
    return replace(card, formats=card.formats | {form: (*card.formats.get(form, ()), *names)}) if names else card


def _enough(batches: Iterable[object]) -> list[object]:
    found: list[Any] = []
    for batch in batches:
        found.append(batch)
        if sum(len(first_tensor(each)) for each in found) >= ENOUGH_IMAGES:
            break
    return found


def _only(layers: dict[str, QuantizedLayer], names: Collection[str]) -> None:
    for name, layer in layers.items():
        layer.quantizing = name in names


def _outputs(model: nn.Module, batch: object) -> Tensor:
    """Every number that the network gives, as one row."""
    leaves = [each for each in tree_leaves(run(model, batch)) if isinstance(each, Tensor) and each.is_floating_point()]
    return torch.cat([each.float().flatten() for each in leaves])


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).square().sum() / expected.square().sum().clamp(min=1e-30))
