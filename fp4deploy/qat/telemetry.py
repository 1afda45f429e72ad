"""Looking at a training step: every layer's weight, input, weight gradient and quantised gradient, as one table.

    tensor               raw statistics   quantised as
    weight               whole            the recipe's weight operand
    activation           sample           the recipe's activation operand, with the amax that this step used
    gradient             whole            nothing quantises it: it is a result, of the weight
    output_gradient      sample           the recipe's dgrad_gradient, else wgrad_gradient; only where there is one

A look changes nothing: it draws no random numbers, moves no amax, and leaves the forward that is taken as it is. A
plain model is watched by hooks, which are there for one forward. The fused UNet never calls its layers; it shows what
it feeds them instead (`FusedUNet.show_inputs`), before its kernels quantise it. A compiled model ignores hooks: a few of
its images go through the plain model as well.

Activations are looked at in a sample of about `SAMPLE` elements: all channels of a regular grid of pixels, over all
images of the batch or, in the fused UNet, over a few. A dynamic global amax is that of the whole tensor. Nothing waits
for the device before `Table.read`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from fp4deploy.qat.fused_unet import FusedUNet
from fp4deploy.qat.layers import QUANTIZED, QuantConvTranspose2d, QuantizedLayer
from fp4deploy.qat.telemetry_statistics import CODED, CODES, RAW, code_moments, encode, quantized_row, raw_row, sample

SAMPLE = 1 << 19
WEIGHT, ACTIVATION, GRADIENT, OUTPUT_GRADIENT = "weight", "activation", "gradient", "output_gradient"
TENSORS = (WEIGHT, ACTIVATION, GRADIENT, OUTPUT_GRADIENT)
LINEAR = {"mean", "std", "min", "max", "dequantized_mean", "dequantized_std"}  # what a factor on the tensor multiplies
COUNTS = {"count", "nan", "inf"}

Key = tuple[str, str]  # (layer, tensor)
Codes = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Statistics:
    """One look, on the host.

    values: (layer, tensor) -> statistic -> value, NaN where it is undefined.
    codes: (layer, tensor) -> elements of each of the 16 codes; of quantised tensors only.
    """

    values: dict[Key, dict[str, float]]
    codes: dict[Key, list[int]]


@dataclass
class Table:
    """One look, on the device: rows of numbers, and what they are of."""

    rows: list[torch.Tensor] = field(default_factory=list)
    keys: list[tuple[Key, bool]] = field(default_factory=list)
    scale: torch.Tensor | None = None  # what the loss was multiplied with

    def add(self, key: Key, raw: torch.Tensor, coded: torch.Tensor | None) -> None:
        """Add the rows of one tensor."""
        self.rows += [raw] if coded is None else [raw, coded]
        self.keys.append((key, coded is not None))

    def read(self) -> Statistics:
        """Fetch everything in one copy; waits for the device."""
        scale = [] if self.scale is None else [self.scale.detach().double().reshape(1)]
        numbers = torch.cat([*scale, *self.rows]).tolist() if self.rows else []
        factor = 1 / numbers[0] if scale and self.rows else 1.0
        start, values, codes = len(scale), {}, {}
        for key, quantized in self.keys:
            names = (*RAW, *CODED) if quantized else RAW
            found = dict(zip(names, numbers[start : start + len(names)], strict=True))
            start += len(names)
            if key[1] == OUTPUT_GRADIENT:
                found = {name: value * factor if name in LINEAR else value for name, value in found.items()}
            if quantized:
                counts = numbers[start : start + CODES]
                start += CODES
                found |= code_moments(counts)
                codes[key] = [int(count) for count in counts]
            values[key] = found
        return Statistics(values, codes)


class Watcher:
    """Watches the products (convolutions and linear layers) of one model."""

    def __init__(self, model: nn.Module, limit: int = SAMPLE) -> None:
        self.model, self.limit = model, limit
        self.layers = {
            name: layer
            for name, layer in model.named_modules()
            if type(layer) in QUANTIZED or isinstance(layer, QuantizedLayer)
        }
        self.seen: dict[Key, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.previous: Codes = {}  # packed codes of the weights at the last look
        self.seed = 0

    @contextmanager
    def watching(self, images: torch.Tensor, seed: int = 0) -> Iterator[None]:
        """Watch the forward that is made inside, and the backward that belongs to it.

        Args:
            images: the forward's input; inside whatever autocast it runs in.
            seed: of stochastic rounding in the statistics.
        """
        self.seen, self.seed = {}, seed
        if isinstance(self.model, FusedUNet) and self.model.fuses(images):
            names = {layer: name for name, layer in self.layers.items()}
            with self.model.show_inputs(lambda layer, *shown: self._shown(names[layer], layer, *shown)):
                yield
            return
        with ExitStack() as hooks:
            for name, layer in self.layers.items():
                hooks.callback(layer.register_forward_hook(self._hook(name)).remove)
            yield

    @torch.no_grad()
    def probe(self, images: torch.Tensor, seed: int = 0, most: int = 2) -> None:
        """Watch a forward of at most `most` images that is made for nothing else, in evaluation mode."""
        training = self.model.training
        self.model.eval()
        try:
            with self.watching(images, seed):
                self.model(images[:most])
        finally:
            self.model.train(training)

    @torch.no_grad()
    def look(self, scale: torch.Tensor | None = None) -> Table:
        """What was watched, the weights as they are and their gradients: the table of this step, still on the device.

        Args:
            scale: what the loss was multiplied with, float32 []; weight gradients are expected without it.
        """
        table = Table(scale=scale)
        for name, layer in self.layers.items():
            weight = cast(torch.Tensor, layer.weight)
            coded = None
            if isinstance(layer, QuantizedLayer) and layer.recipe.weight is not None:
                product = layer.product()
                found = encode(weight, layer.recipe.weight, product.weight_axes, product.weight_groups, seed=self.seed)
                coded = quantized_row(found, self.previous.get(name))
                self.previous[name] = found.packed
            table.add((name, WEIGHT), raw_row(weight), coded)
            for tensor in (ACTIVATION, OUTPUT_GRADIENT):
                if (name, tensor) in self.seen:
                    table.add((name, tensor), *self.seen[name, tensor])
            if weight.grad is not None:
                table.add((name, GRADIENT), raw_row(weight.grad), None)
        self.seen = {}
        return table

    def _hook(self, name: str) -> Callable[..., None]:
        def watch(layer: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            x = inputs[0]
            self._activation(name, layer, x)
            recipe = layer.recipe if isinstance(layer, QuantizedLayer) else None
            if output.requires_grad and recipe and (recipe.dgrad_gradient or recipe.wgrad_gradient):
                output.register_hook(lambda gradient: self._output_gradient(name, layer, gradient, x))

        return watch

    def _shown(self, name: str, layer: nn.Module, shape: torch.Size, read: Callable[[slice], torch.Tensor]) -> None:
        with torch.no_grad():
            self._activation(name, layer, read(_spread(shape, self.limit)))

    @torch.no_grad()
    def _activation(self, name: str, layer: nn.Module, x: torch.Tensor) -> None:
        axis = -1 if isinstance(layer, nn.Linear) else -3
        coded = None
        with torch.autocast(x.device.type, enabled=False):
            if isinstance(layer, QuantizedLayer) and layer.recipe.activation is not None and not layer.observing:
                spec, groups = layer.recipe.activation, (layer.product().groups,)
                coded = quantized_row(encode(x, spec, (axis,), groups, _used_amax(layer), self.limit, self.seed))
            self.seen[name, ACTIVATION] = raw_row(sample(x.detach(), (axis,), self.limit)), coded

    @torch.no_grad()
    def _output_gradient(self, name: str, layer: Any, gradient: torch.Tensor, x: torch.Tensor) -> None:
        recipe, product = layer.recipe, layer.product()
        with torch.autocast(gradient.device.type, enabled=False):
            raw = raw_row(sample(gradient.detach(), (product.input_axis,), self.limit))
            if recipe.dgrad_gradient is not None:
                axis, groups = product.input_axis, (product.groups,)
                found = encode(gradient, recipe.dgrad_gradient, (axis,), groups, None, self.limit, self.seed)
            else:
                rows = _wgrad_rows(layer, gradient, x)
                found = encode(rows, recipe.wgrad_gradient, (product.wgrad_axis,), limit=self.limit, seed=self.seed)
            self.seen[name, OUTPUT_GRADIENT] = raw, quantized_row(found)


def _used_amax(layer: QuantizedLayer) -> torch.Tensor | None:
    """The static amax that the forward which has just been made quantised its input with; None for a dynamic one."""
    if not layer.is_static:
        return None
    amax = layer.delayed_amax if layer.is_delayed and layer.training else None
    amax = cast(torch.Tensor, layer.input_amax) if amax is None else amax
    return torch.where(amax > 0, amax, float("nan"))


def _wgrad_rows(layer: nn.Module, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The output's gradient as the weight gradient's product takes it: rows over tokens or pixels."""
    if isinstance(layer, nn.Linear):
        return gradient.flatten(0, -2)
    if gradient.ndim == 3:
        gradient, x = gradient[None], x[None]
    if isinstance(layer, QuantConvTranspose2d):
        unfolded: torch.Tensor = layer.product().wgrad_operands(gradient, x.detach())[0]
        return unfolded
    return gradient.flatten(2)


def _spread(shape: torch.Size, limit: int) -> slice:
    """Images of [N, ...] spread over the batch that together have `limit` elements, two at least."""
    wanted = min(shape[0], max(2, -(-limit * shape[0] // max(1, shape.numel()))))
    step = max(1, shape[0] // max(1, wanted))
    return slice(0, wanted * step, step)
