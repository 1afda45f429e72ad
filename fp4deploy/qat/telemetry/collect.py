"""Telemetry of one training step: statistics of every layer's weight, input and gradients, as one table.

    tensor               raw statistics   quantised as
    weight               whole            the recipe's weight operand
    activation           sample           the recipe's activation operand, with the amax that this step used
    gradient             whole            not quantised: it is a result, of the weight
    output_gradient      sample           the recipe's dgrad_gradient, else wgrad_gradient; only where there is one

A snapshot changes nothing: it draws no random numbers, moves no amax, and leaves the forward as it is. A plain model is
observed by hooks that exist for one forward. The fused UNet never calls its layers; it passes on what it feeds them
(`FusedUNet.observe_inputs`) before its kernels quantise it. A compiled model ignores hooks: a few images go through the
plain model as well.

Activations are sampled, about `SAMPLE` elements each: all channels of a regular grid of pixels, over all images of the
batch or, in the fused UNet, over a few. A dynamic global amax is that of the whole tensor. Nothing waits for the device
before `Table.read`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.graph.modes import evaluating
from fp4deploy.qat.fused_unet import FusedUNet
from fp4deploy.qat.layers import QUANTIZED, TRANSPOSED, QuantizedLayer
from fp4deploy.qat.recipes import QuantSpec
from fp4deploy.qat.telemetry.statistics import Row, coded_row, encode, raw_row, sample

SAMPLE = 1 << 19
WEIGHT, ACTIVATION, GRADIENT, OUTPUT_GRADIENT = "weight", "activation", "gradient", "output_gradient"
LINEAR = {"mean", "std", "min", "max", "dequantized_mean", "dequantized_std"}  # what a factor on the tensor multiplies

Key = tuple[str, str]  # (layer, tensor)
Codes = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Statistics:
    """One snapshot, on the host.

    values: (layer, tensor) -> statistic -> value, NaN where it is undefined.
    codes: (layer, tensor) -> elements of each of the 16 codes; of quantised tensors only.
    extras: the scalars that were added to the table.
    """

    values: dict[Key, dict[str, float]]
    codes: dict[Key, list[int]]
    extras: dict[str, float]


@dataclass
class Table:
    """One snapshot, on the device: rows of sums, the tensor of each, and scalars of the step."""

    rows: list[tuple[Key, Row]] = field(default_factory=list)
    extras: dict[str, torch.Tensor] = field(default_factory=dict)

    def read(self) -> Statistics:
        """Fetch everything in one copy; waits for the device.

        Gradients of outputs are divided by the extra "loss_scale", with which the loss was multiplied.
        """
        scalars = [value.detach().double().reshape(1) for value in self.extras.values()]
        parts = [*scalars, *(row.sums for _, row in self.rows)]
        numbers = torch.cat(parts).tolist() if parts else []
        extras = dict(zip(self.extras, numbers, strict=False))
        start, scale = len(extras), extras.get("loss_scale", 1.0)
        values: dict[Key, dict[str, float]] = {}
        codes: dict[Key, list[int]] = {}
        for key, row in self.rows:
            found, counts = row.finish(numbers[start : start + len(row.sums)])
            start += len(row.sums)
            if key[1] == OUTPUT_GRADIENT:
                found = {name: value / scale if name in LINEAR else value for name, value in found.items()}
            values[key] = found
            if row.is_coded:
                codes[key] = counts
        return Statistics(values, codes, extras)


class Watcher:
    """Observes the GEMM layers (convolutions and linear layers) of one model."""

    def __init__(self, model: nn.Module, limit: int = SAMPLE) -> None:
        self.model, self.limit = model, limit
        self.layers = {
            name: layer
            for name, layer in model.named_modules()
            if type(layer) in QUANTIZED or isinstance(layer, QuantizedLayer)
        }
        self.seen: dict[Key, Row] = {}
        self.previous: Codes = {}  # packed codes of the weights at the last snapshot
        self.windows: dict[str, torch.Tensor] = {}  # of the weight gradients of the last snapshot
        self.seed = 0

    @contextmanager
    def watching(self, images: torch.Tensor, seed: int = 0) -> Iterator[None]:
        """Observe the forward that runs in this context, and its backward.

        Args:
            images: the forward's input; enter the context inside the autocast that the forward runs in.
            seed: of stochastic rounding in the statistics.
        """
        self.seen, self.seed = {}, seed
        if isinstance(self.model, FusedUNet) and self.model.fuses(images):
            names = {layer: name for name, layer in self.layers.items()}
            with self.model.observe_inputs(
                lambda layer, *read: self._observed(names[layer], layer, *read),
                lambda layer, *step: self._gradient_of(names[layer], layer, *step),
            ):
                yield
            return
        with ExitStack() as hooks:
            for name, layer in self.layers.items():
                hooks.callback(layer.register_forward_hook(self._hook(name)).remove)
            yield

    @torch.no_grad()
    def probe(self, images: torch.Tensor, seed: int = 0, most: int = 2) -> None:
        """Run and observe an extra forward of at most `most` images, in evaluation mode."""
        with evaluating(self.model), self.watching(images, seed):
            self.model(images[:most])

    @torch.no_grad()
    def snapshot(self, **extras: torch.Tensor) -> Table:
        """The table of this step, still on the device: what was observed, the weights and their gradients.

        Args:
            extras: scalars of the step, on the device; weight gradients are expected without the "loss_scale".
        """
        table = Table(extras=extras)
        for name, layer in self.layers.items():
            weight = cast(torch.Tensor, layer.weight)
            table.rows.append(((name, WEIGHT), self._weight(name, layer, weight)))
            for tensor in (ACTIVATION, OUTPUT_GRADIENT):
                if (name, tensor) in self.seen:
                    table.rows.append(((name, tensor), self.seen[name, tensor]))
            if weight.grad is not None:
                table.rows.append(((name, GRADIENT), raw_row(weight.grad)))
                self.windows[name] = window(weight.grad, contracted_axis(layer)).clone()
        self.seen = {}
        return table

    def _weight(self, name: str, layer: nn.Module, weight: torch.Tensor) -> Row:
        if not isinstance(layer, QuantizedLayer) or not _has_codes(layer.recipe.weight):
            return raw_row(weight)
        gemms = layer.gemms()
        coded = encode(weight, layer.recipe.weight, gemms.weight_axes, gemms.weight_groups, seed=self.seed)
        row = coded_row(coded, self.previous.get(name))
        self.previous[name] = coded.packed
        return row

    def _hook(self, name: str) -> Callable[..., None]:
        def watch(layer: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            x = inputs[0]
            self._activation(name, layer, x)
            self._gradient_of(name, layer, x, output)

        return watch

    def _gradient_of(self, name: str, layer: nn.Module, x: torch.Tensor, output: torch.Tensor) -> None:
        recipe = layer.recipe if isinstance(layer, QuantizedLayer) else None
        if output.requires_grad and recipe and (recipe.dgrad_gradient or recipe.wgrad_gradient):
            output.register_hook(lambda gradient: self._output_gradient(name, layer, gradient, x))

    def _observed(self, name: str, layer: nn.Module, shape: torch.Size, read: Callable[[slice], torch.Tensor]) -> None:
        with torch.no_grad():
            self._activation(name, layer, read(_evenly_spaced(shape, self.limit)))

    @torch.no_grad()
    def _activation(self, name: str, layer: nn.Module, x: torch.Tensor) -> None:
        axis = -1 if isinstance(layer, nn.Linear) else 1 - cast(torch.Tensor, layer.weight).ndim
        with _without_autocast(x.device.type):
            if isinstance(layer, QuantizedLayer) and _has_codes(layer.recipe.activation) and not layer.observing:
                spec, groups = layer.recipe.activation, (layer.gemms().groups,)
                try:
                    row = coded_row(encode(x, spec, (axis,), groups, _used_amax(layer), self.limit, self.seed))
                except InputError:  # not calibrated: there are no codes yet
                    row = raw_row(sample(x.detach(), (axis,), self.limit))
            else:
                row = raw_row(sample(x.detach(), (axis,), self.limit))
        self.seen[name, ACTIVATION] = row

    @torch.no_grad()
    def _output_gradient(self, name: str, layer: Any, gradient: torch.Tensor, x: torch.Tensor) -> None:
        recipe, gemms = layer.recipe, layer.gemms()
        with _without_autocast(gradient.device.type):
            if recipe.dgrad_gradient is not None:
                axis, groups = gemms.input_axis, (gemms.groups,)
                found = encode(gradient, recipe.dgrad_gradient, (axis,), groups, None, self.limit, self.seed)
            else:
                rows = _wgrad_rows(layer, gradient, x)
                found = encode(rows, recipe.wgrad_gradient, (gemms.wgrad_axis,), limit=self.limit, seed=self.seed)
        self.seen[name, OUTPUT_GRADIENT] = coded_row(found)


def _has_codes(spec: QuantSpec | None) -> TypeGuard[QuantSpec]:
    """The 16 codes of FP4, whose statistics these are; eight bits are described by their values."""
    return spec is not None and spec.in_four_bits


def window(x: torch.Tensor, axis: int, rows: int = 32, columns: int = 64) -> torch.Tensor:
    """The first rows and columns of a weight, or of its gradient, as a matrix: output channels by what they contract.

    `axis`, the contraction axis, runs fastest, so that a block lies in one row: a tap's channels, then the next tap's.
    """
    return x.detach().movedim(axis, -1)[:rows, ..., :columns].flatten(1)[:, :columns]


def contracted_axis(layer: nn.Module) -> int:
    """The axis of a layer's weight that its forward GEMM contracts."""
    return 0 if isinstance(layer, TRANSPOSED) else 1


def _without_autocast(device: str) -> AbstractContextManager[object]:
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def _used_amax(layer: QuantizedLayer) -> torch.Tensor | None:
    """The static amax that the last forward quantised its input with; None for a dynamic one."""
    if not layer.is_static:
        return None
    amax = layer.delayed_amax if layer.is_delayed and layer.training else None
    amax = cast(torch.Tensor, layer.input_amax) if amax is None else amax
    return torch.where(amax > 0, amax, float("nan"))


def _wgrad_rows(layer: nn.Module, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The output's gradient as the wgrad GEMM reads it: rows over tokens or pixels."""
    if isinstance(layer, nn.Linear):
        return gradient.flatten(0, -2)
    if gradient.ndim == cast(torch.Tensor, layer.weight).ndim - 1:  # without a batch axis
        gradient, x = gradient[None], x[None]
    rows: torch.Tensor = cast(Any, layer).gemms().wgrad_gradient(gradient, x.shape)
    return rows


def _evenly_spaced(shape: torch.Size, limit: int) -> slice:
    """Evenly spaced images of a batch [N, ...] that together have `limit` elements, at least two."""
    count = min(shape[0], max(2, -(-limit * shape[0] // max(1, shape.numel()))))
    step = max(1, shape[0] // max(1, count))
    return slice(0, count * step, step)
