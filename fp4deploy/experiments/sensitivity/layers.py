"""The study of layers: which error NVFP4 adds in each, of which operand, from which channels.

Each layer that the model quantises is looked at in two ways, on images, everything else in full precision:

    inside     error of its own output, rms over the rms of the output: its input alone quantised, its weight alone,
               both. `shift` is the share of the error's energy that is one number a channel, which a bias takes back
    at the end error of the network's output with this layer alone quantised: its input, its weight, both

`scales` is the share of an operand's squared error that comes of rounding block scales to E4M3: what it loses with
exact scales (amax / 6) is left. `half` is the smallest share of the input channels that makes half of the output's
error by the input: channel c adds E[(x_c - x'_c)^2] |W_c|^2, errors of different channels taken as independent.
`channels` are the largest. Where a few channels make most of it, scales a channel may help (`qat.equalize`); where all
layers lose alike, only more bits or training do.

`together` is what the network loses with every layer quantised: its input alone, its weights alone, both.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp4deploy.errors import InputError
from fp4deploy.experiments.sensitivity.study import difference_of, logits_of
from fp4deploy.formats import E2M1_MAX, NVFP4_BLOCK, pad_to_blocks, round_e2m1
from fp4deploy.graph.costs import work_of_layers
from fp4deploy.models import ModelCard
from fp4deploy.qat import calibrate, load_model, prepare, quantized_layers, restore
from fp4deploy.qat.equalize import column_squares
from fp4deploy.qat.layers import QuantizedLayer
from fp4deploy.qat.recipes import QuantSpec, Recipe, find_recipe
from fp4deploy.qat.telemetry.statistics import encode

OPERANDS = ("input", "weight", "both")
LARGEST = 8  # channels that are named
SAMPLE = 1 << 19  # elements of an input of which block scales are compared


@dataclass(frozen=True)
class LayerError:
    """One layer; errors are rms over rms, shares lie in [0, 1], None where a share is of nothing.

    inside, at_end: by operand, of `OPERANDS`. changed: share of the output whose largest channel changes, both
    quantised. scales: by "input" and "weight". channels: (input channel, share of the error by the input).
    """

    layer: str
    kind: str
    in_channels: int
    macs: float
    inside: dict[str, float]
    shift: float | None
    at_end: dict[str, float]
    changed: float
    scales: dict[str, float | None]
    half: float | None
    channels: list[tuple[int, float]]


@dataclass(frozen=True)
class LayerStudy:
    """All layers in the model's order, and what they lose together."""

    checkpoint: str
    recipe: str
    images: int
    together: dict[str, float]
    changed: float
    layers: list[LayerError]


def study_layers(
    checkpoint: Path, batches: Iterable[Tensor], recipe: str | None = None, on_gpu: bool = False
) -> LayerStudy:
    """Study a checkpoint of either precision; its weights are taken as they are.

    Args:
        batches: model inputs, each [N, 3, H, W]; scales are calibrated on them too.
        recipe: None: that of the checkpoint's card, or nvfp4_qat.

    Raises:
        InputError: not a checkpoint, no images, an unknown recipe, or one without blocks of NVFP4.
    """
    device = torch.device("cuda" if on_gpu and torch.cuda.is_available() else "cpu")
    inputs = [batch.to(device) for batch in batches]
    if not inputs:
        raise InputError("The study of layers needs images. Give it some with --data DIR.")
    model, card = load_model(Path(checkpoint), device)
    chosen = find_recipe(recipe or card.recipe or "nvfp4_qat")
    forms = _forms(chosen)
    restore(model)
    plain = copy.deepcopy(model)
    quantized = {name: _prepared(model, form, card, inputs) for name, form in forms.items()}
    layers = quantized_layers(quantized["both"])
    expected = logits_of(plain, inputs)
    work = work_of_layers(plain, {name: plain.get_submodule(name) for name in layers}, inputs[0][:1])
    total = sum(each.macs for each in work.values())
    inside = _inside(plain, {form: quantized_layers(each) for form, each in quantized.items()}, inputs)
    rows = []
    for name, layer in layers.items():
        ends = {form: difference_of(expected, _alone(each, name, inputs)) for form, each in quantized.items()}
        rows.append(
            LayerError(
                name,
                type(plain.get_submodule(name)).__name__,
                layer.in_channels_of_weight() * layer.gemms().groups,
                work[name].macs / max(1, total),
                at_end={form: _rounded(end[1]) for form, end in ends.items()},
                changed=_rounded(ends["both"][0]),
                **inside[name],
            )
        )
    whole = {form: difference_of(expected, logits_of(each, inputs)) for form, each in quantized.items()}
    together = {form: _rounded(each[1]) for form, each in whole.items()}
    return LayerStudy(str(checkpoint), chosen.name, sum(map(len, inputs)), together, _rounded(whole["both"][0]), rows)


def _forms(recipe: Recipe) -> dict[str, Recipe]:
    operands = (recipe.activation, recipe.weight)
    if any(spec is None or spec.format != "nvfp4" for spec in operands) or not recipe.straight_through:
        raise InputError(
            f"The study of layers is of NVFP4 inputs and weights, and of gradients that pass straight through; "
            f"'{recipe.name}' has others. Give one such as: --recipe nvfp4_qat"
        )
    inputs = replace(recipe, name=f"{recipe.name}, inputs", weight=None, weight_reset=None)
    weights = replace(
        recipe, name=f"{recipe.name}, weights", activation=None, amax_timing="current", amax_learned=False
    )
    return {"input": inputs, "weight": weights, "both": recipe}


def _prepared(model: nn.Module, recipe: Recipe, card: ModelCard, inputs: Sequence[Tensor]) -> nn.Module:
    """A copy in which the layers of the card are quantised by `recipe`, all of them in NVFP4."""
    found = prepare(copy.deepcopy(model), recipe, card.include, card.exclude, example_inputs=inputs[0][:1])
    calibrate(found, inputs)
    return found.eval()


def _alone(model: nn.Module, name: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs with this layer alone quantised."""
    others = [layer for other, layer in quantized_layers(model).items() if other != name]
    try:
        for layer in others:
            layer.quantizing = False
        return logits_of(model, inputs)
    finally:
        for layer in others:
            layer.quantizing = True


@torch.no_grad()
def _inside(
    plain: nn.Module, quantized: dict[str, dict[str, QuantizedLayer]], inputs: Sequence[Tensor]
) -> dict[str, dict[str, Any]]:
    """What each layer loses of its own output, for the inputs that it has in full precision."""
    sums = {name: _Sums({form: layers[name] for form, layers in quantized.items()}) for name in quantized["both"]}
    hooks = [plain.get_submodule(name).register_forward_hook(each.add) for name, each in sums.items()]
    try:
        logits_of(plain, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: each.found() for name, each in sums.items()}


class _Sums:
    """Sums over the batches of one layer, from a forward hook on the plain one."""

    def __init__(self, layers: dict[str, QuantizedLayer]) -> None:
        self.layers, self.count, self.size = layers, 0, 0.0
        self.errors = dict.fromkeys(layers, 0.0)
        self.shift: Any = 0.0
        self.by_channel: Any = 0.0
        self.scales: dict[str, list[float]] = {"input": [0.0, 0.0], "weight": [0.0, 0.0]}

    def add(self, _layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x, axis = inputs[0], self.layers["both"].gemms().input_axis
        self.size += float(output.double().square().sum())
        for form, layer in self.layers.items():
            error = layer(x).float() - output.float()
            self.errors[form] += float(error.double().square().sum())
        channels = error.movedim(axis, 0).flatten(1)  # of "both", the last
        self.shift, self.count = self.shift + channels.double().sum(1), self.count + channels.shape[1]
        squares = (self.layers["input"].quantized_input(x) - x).float().movedim(axis, 0).flatten(1).square()
        self.by_channel = self.by_channel + squares.sum(1) * column_squares(_layer)
        self._compare(
            "input", x, self.layers["input"].recipe.activation, (axis,), (self.layers["both"].gemms().groups,)
        )

    def _compare(
        self, operand: str, x: Tensor, spec: QuantSpec | None, axes: tuple[int, ...], groups: tuple[int, ...]
    ) -> None:
        """Squared errors with block scales in E4M3 and exact."""
        assert spec is not None
        amax = self.layers["both"].input_amax if operand == "input" else None
        coded = encode(x, spec, axes, groups, amax, SAMPLE)
        blocks = pad_to_blocks(coded.source.float(), (coded.source.ndim - 1,), NVFP4_BLOCK).unflatten(
            -1, (-1, NVFP4_BLOCK)
        )
        step = blocks.abs().amax(-1, keepdim=True) / E2M1_MAX
        exact = torch.where(step > 0, round_e2m1(blocks / step.clamp(min=1e-38)) * step, 0.0)
        self.scales[operand][0] += float((coded.values - coded.source).double().square().sum())
        self.scales[operand][1] += float((exact - blocks).double().square().sum())

    def found(self) -> dict[str, Any]:
        """The fields of `LayerError` that are of the layer itself."""
        layer = self.layers["weight"]
        gemms = layer.gemms()
        self._compare("weight", layer.weight.detach(), layer.recipe.weight, gemms.weight_axes, gemms.weight_groups)
        error, total = self.errors["both"], float(self.by_channel.sum())
        shares = (self.by_channel / total).sort(descending=True) if total > 0 else None
        half = None if shares is None else int((shares.values.cumsum(0) < 0.5).sum()) + 1
        largest = [] if shares is None else list(zip(shares.indices.tolist(), shares.values.tolist(), strict=True))
        return {
            "inside": {form: _rounded(math.sqrt(each / max(self.size, 1e-30))) for form, each in self.errors.items()},
            "shift": _share(float(self.shift.square().sum()) / max(1, self.count), error),
            "scales": {operand: _share(each - exact, each) for operand, (each, exact) in self.scales.items()},
            "half": None if half is None else _rounded(half / len(self.by_channel)),
            "channels": [(at, _rounded(share)) for at, share in largest[:LARGEST]],
        }


def _share(part: float, whole: float) -> float | None:
    return _rounded(part / whole) if whole > 0 else None


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
