"""The study of tails: why the normalisations, the first and the output layer stay in high precision.

A block of NVFP4 shares one scale, set by its largest element; what is far below that element is rounded coarsely. Heavy
tails (kurtosis far above 3, a large amax / std) are what NVFP4 quantises badly. The study takes a trained checkpoint
and says of every tensor how heavy its tails are and what NVFP4 would leave of it, whether the model quantises it or
not:

    weights, biases, affine parameters   along the contracted axis; a vector along its own
    inputs                               of every product and normalisation, a sample over all batches

SQNR is of the whole signal. GroupNorm's weights lie close to 1 and NVFP4 gets the 1 right, so theirs is high while what
training taught them, the distance from 1, is rounded away: `lost`, 1 - correlation^2 of raw and dequantised, is the
share of a tensor's variance that does not survive.

Tails explain; what decides is the output. So each layer is put into NVFP4 alone, everything else in high precision (a
product with its weights and its input, a normalisation with its parameters or with its input), and the study counts
the pixels whose class changes and the error of the logits. Next to the damage it lists what could be saved: the layer's
share of the parameters and of the multiply-accumulates.

A normalisation in NVFP4 is emulated only: its parameters or its input are rounded, what it computes stays FP32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4deploy.data import validation_set
from fp4deploy.errors import InputError
from fp4deploy.formats import fake_quantize_nvfp4
from fp4deploy.graph.costs import MULTIPLYING, work_of_layers
from fp4deploy.models import read_card
from fp4deploy.qat import QuantSpec, calibrate, layer_plan, load_model, prepare, restore
from fp4deploy.qat.plan import NORMS, channel_axis
from fp4deploy.qat.telemetry.collect import contracted_axis
from fp4deploy.qat.telemetry.statistics import coded_row, encode
from fp4deploy.tasks import image_batches

NVFP4 = QuantSpec()
PRODUCTS = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
SAMPLE = 1 << 21


@dataclass(frozen=True)
class TensorTails:
    """One tensor. tensor: "weight", "bias" or "input"; kept: why the layer stays in high precision, "" for FP4.

    kurtosis: Pearson's; peak: amax / std; sqnr_db: of NVFP4; lost: share of the variance that NVFP4 loses; elements:
    looked at. None where undefined.
    """

    layer: str
    kind: str
    tensor: str
    kept: str
    elements: int
    kurtosis: float | None
    peak: float | None
    sqnr_db: float | None
    lost: float | None


@dataclass(frozen=True)
class LayerDamage:
    """One layer in NVFP4 alone.

    what: what was quantised; changed: share of pixels whose class changes; logit_error: rms of the change over the rms
    of the logits; parameters, macs: the layer's share of the model's.
    """

    layer: str
    kind: str
    what: str
    kept: str
    changed: float
    logit_error: float
    parameters: float
    macs: float


@dataclass(frozen=True)
class Study:
    """Everything, with the model it is of."""

    checkpoint: str
    precision: str
    images: int
    tensors: list[TensorTails]
    damage: list[LayerDamage]


def study_kurtosis(checkpoint: Path, batches: Iterable[torch.Tensor], on_gpu: bool = False) -> Study:
    """Study a checkpoint (of either precision; its weights are taken as they are) on images.

    Args:
        batches: model inputs, each [N, 3, H, W].
        on_gpu: run the model on a GPU where there is one.

    Raises:
        InputError: not a checkpoint, or no images.
    """
    device = torch.device("cuda" if on_gpu and torch.cuda.is_available() else "cpu")
    inputs = [batch.to(device) for batch in batches]
    if not inputs:
        raise InputError("The study of kurtosis needs images. Give it some with --data DIR.")
    model, card = load_model(Path(checkpoint), inputs[0].device)
    restore(model)
    kept = {plan.name: "" if plan.precision == "FP4" else plan.reason for plan in layer_plan(model)}
    layers: dict[str, nn.Module] = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, (*PRODUCTS, *NORMS))
    }
    seen = _inputs(model, layers, inputs)
    multiplying = {name: layer for name, layer in layers.items() if isinstance(layer, MULTIPLYING)}
    work = work_of_layers(model, multiplying, inputs[0][:1])
    macs = dict.fromkeys(layers, 0) | {name: each.macs for name, each in work.items()}
    tensors = [row for name, layer in layers.items() for row in _tails(name, layer, kept[name], seen[name])]
    damage = _damage(model, layers, kept, inputs, macs)
    return Study(str(checkpoint), card.precision, sum(len(images) for images in inputs), tensors, damage)


def study_images(checkpoint: Path, data: Path, count: int, batch: int = 4) -> Iterator[torch.Tensor]:
    """`count` validation images, evenly spaced, sized and normalised as the checkpoint's card says.

    Raises:
        InputError: not a checkpoint, or data that does not fit it.
    """
    card = read_card(checkpoint)
    return image_batches(card, validation_set(card, data), count, batch)


def _inputs(
    model: nn.Module, layers: dict[str, nn.Module], batches: Sequence[torch.Tensor]
) -> dict[str, list[torch.Tensor]]:
    """What every layer reads: a sample of each batch, [pixels, channels]."""
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in layers}

    def hook(name: str) -> Callable[..., None]:
        def watch(layer: nn.Module, inputs: tuple[torch.Tensor, ...], _output: torch.Tensor) -> None:
            x = inputs[0].detach()
            rows = x.movedim(channel_axis(layer, x), -1).flatten(0, -2)
            step = max(1, rows.numel() * len(batches) // SAMPLE) | 1  # odd, see qat.telemetry_statistics.sample
            seen[name].append(rows[::step].contiguous())

        return watch

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    try:
        with torch.no_grad():
            for images in batches:
                model(images)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _tails(name: str, layer: nn.Module, kept: str, inputs: list[torch.Tensor]) -> list[TensorTails]:
    parts: list[tuple[str, torch.Tensor, int]] = []
    weight: Any = layer.weight
    bias: Any = layer.bias
    if weight is not None:
        parts.append(("weight", weight.detach(), contracted_axis(layer) if weight.ndim > 1 else 0))
    if bias is not None:
        parts.append(("bias", bias.detach(), 0))
    parts.append(("input", torch.cat(inputs), -1))
    rows = []
    for tensor, x, axis in parts:
        row = coded_row(encode(x, NVFP4, (axis,)))
        found, _ = row.finish(row.sums.tolist())
        largest = max(abs(found["min"]), abs(found["max"]))
        peak = largest / found["std"] if found["std"] > 0 else math.nan
        numbers = (
            _finite(found["kurtosis"]),
            _finite(peak),
            _finite(found["sqnr_db"]),
            _lost(found),
        )
        rows.append(TensorTails(name, type(layer).__name__, tensor, kept, x.numel(), *numbers))
    return rows


def _lost(found: dict[str, float]) -> float | None:
    """1 - r^2; all of it where values that differ became one."""
    erased = found["std"] > 0 and found["dequantized_std"] == 0
    return 1.0 if erased else _finite(1 - found["correlation"] ** 2)


def _damage(
    model: nn.Module,
    layers: dict[str, nn.Module],
    kept: dict[str, str],
    batches: Sequence[torch.Tensor],
    macs: dict[str, int],
) -> list[LayerDamage]:
    reference = logits_of(model, batches)
    parameters = sum(value.numel() for value in model.parameters())
    total = sum(macs.values())
    rows = []
    for name, layer in layers.items():
        for what, change in _changes(name, layer):
            changed = copy.deepcopy(model)
            change(changed, batches)
            moved, error = difference_of(reference, logits_of(changed, batches))
            share = sum(value.numel() for value in layer.parameters()) / parameters
            kind = type(layer).__name__
            rows.append(LayerDamage(name, kind, what, kept[name], moved, error, share, macs[name] / max(1, total)))
    return rows


Change = Callable[[nn.Module, Sequence[torch.Tensor]], None]


def _changes(name: str, layer: nn.Module) -> list[tuple[str, Change]]:
    """(what, how) of what may be put into NVFP4 of one layer, in a copy of the model."""
    if isinstance(layer, PRODUCTS):

        def product(model: nn.Module, batches: Sequence[torch.Tensor]) -> None:
            prepare(model, "nvfp4_qat", include=[name])
            calibrate(model, batches)

        return [("weight and input", product)]

    def parameters(model: nn.Module, batches: Sequence[torch.Tensor]) -> None:
        for value in model.get_submodule(name).parameters():
            value.data.copy_(fake_quantize_nvfp4(value.data)[0])

    def reads(model: nn.Module, batches: Sequence[torch.Tensor]) -> None:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs: (fake_quantize_nvfp4(inputs[0], (1,) if inputs[0].ndim == 4 else (-1,))[0],)
        )

    found: list[tuple[str, Change]] = [("parameters", parameters)] if any(True for _ in layer.parameters()) else []
    return [*found, ("input", reads)]


@torch.no_grad()
def logits_of(model: nn.Module, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The output of a network for each batch."""
    return [model(images) for images in batches]


def difference_of(reference: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> tuple[float, float]:
    """(share of pixels with another class, rms of the change over the rms of the logits)."""
    pixels = moved = 0
    error = power = 0.0
    for first, second in zip(reference, other, strict=True):
        differs = first.argmax(1) != second.argmax(1)
        pixels, moved = pixels + differs.numel(), moved + int(differs.sum())
        error += float((second - first).double().square().sum())
        power += float(first.double().square().sum())
    return moved / max(1, pixels), math.sqrt(error / power) if power else math.nan


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
