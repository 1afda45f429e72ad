"""Equalisation: a factor for each channel, from a normalisation to the layers that read it, before quantisation.

A block of NVFP4 has one scale for 16 neighbouring channels, and a channel far below the largest of its block keeps few
of the 16 codes. A norm with an affine map y = w n + b can give each channel another size, and the layers that multiply
it take the factor back:

    w_c, b_c <- w_c / s_c, b_c / s_c        W[:, c] <- s_c W[:, c]        s_c = (A_c)^a / (V_c)^(1 - a)

with A_c the root mean square of the channel where a quantised layer reads it, V_c that of the layer's weights for it,
each relative to the geometric mean over the layer's channels, and a = 1/2: what one of the two GEMM operands loses
in range the other gains. Between norm and layer may be what keeps the factor of a channel: ReLU and LeakyReLU,
poolings, resizing, padding with zeros, concatenations and parts of channels, and sums, whose addends get one factor.
Where a channel reaches anything else (ReLU6, another norm, an output), and where other code reads the same weights,
its factor is 1. The s_c are powers of two, so
that the network in full precision computes the same numbers as before, and files, engines and kernels know nothing of
it.

Sources: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019; Xiao et al.,
"SmoothQuant", 2023 (activation against weight, folded into norms). Following the factor through a captured graph, and
powers of two, are this project's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fp4deploy.graph import Graph, Node, capture
from fp4deploy.graph.copies import copied
from fp4deploy.graph.modes import evaluating
from fp4deploy.qat.batches import arguments_of, run

AFFINE = ("batch_norm", "group_norm", "instance_norm")
KEEPING = ("relu", "leaky_relu", "max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "resize")
MULTIPLYING = ("conv", "conv_transpose")
FIXED = 0  # the channel whose factor is 1
LARGEST = 3  # |log2 s|


class _Channels:
    """Which channels of which values have one factor: numbers, joined where they have to agree."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self._parent = graph, [FIXED]
        self.of: dict[str, list[int]] = {}  # value -> a number for each channel
        self.norms: dict[str, list[int]] = {}
        self.readers: dict[str, list[int]] = {}  # layer -> the channels it multiplies
        for name in graph.inputs:
            self.of[name] = self._fixed(name)
        for node in graph.nodes:
            self.of[node.name] = self._written(node)
        for _, name in graph.outputs:
            self._fix(self.of[name])

    def of_layer(self, name: str) -> list[int]:
        """The channels that a norm writes, or a layer multiplies."""
        return self.norms.get(name) or self.readers[name]

    def fix_layer(self, name: str) -> None:
        self._fix(self.of_layer(name))

    def root(self, number: int) -> int:
        while self._parent[number] != number:
            number = self._parent[number]
        return number

    def _written(self, node: Node) -> list[int]:
        inputs = [self.of[name] for name in node.inputs.values()]
        count, own = self._count(node.name), node.parameters.get("weight") == f"{node.layer}.weight"
        if node.op in AFFINE and own and node.parameters.get("bias") == f"{node.layer}.bias":
            self._fix(inputs[0])
            return self._same(self.norms.setdefault(node.layer, self._new(count)), self.norms[node.layer])
        if node.op in MULTIPLYING and own and len(inputs) == 1:
            self._same(self.readers.setdefault(node.layer, inputs[0]), inputs[0])
            return [FIXED] * count
        if (found := self._kept(node, inputs)) is not None and len(found) == count:
            return found
        for each in inputs:
            self._fix(each)
        return [FIXED] * count

    def _kept(self, node: Node, inputs: Sequence[list[int]]) -> list[int] | None:
        """The channels of a node that keeps their factors; None of another one."""
        attributes, first = node.attributes, inputs[0] if inputs else []
        if node.op in KEEPING and len(inputs) == 1:
            return first
        if node.op == "pad" and not attributes.get("value") and len(attributes["pad"]) <= 2 * (self._axes(node) - 2):
            return first
        if node.op == "concat" and attributes["dim"] == 1:
            return [number for each in inputs for number in each]
        if node.op == "slice":
            ends = [attributes[name] for name in ("start", "end", "step")]
            whole = attributes["dim"] == 1 and all(isinstance(each, int) for each in ends)
            return first[slice(*ends)] if whole else first if attributes["dim"] > 1 else None
        if node.op in ("add", "sub") and len(inputs) == 2 and self._alike(node):
            return self._same(*inputs)
        return None

    def _same(self, one: list[int], other: list[int]) -> list[int]:
        for first, second in zip(one, other, strict=True):
            low, high = sorted((self.root(first), self.root(second)))
            self._parent[high] = low
        return one

    def _fix(self, numbers: list[int]) -> None:
        self._same(numbers, [FIXED] * len(numbers))

    def _new(self, count: int) -> list[int]:
        numbers = list(range(len(self._parent), len(self._parent) + count))
        self._parent += numbers
        return numbers

    def _axes(self, node: Node) -> int:
        return len(self.graph.values[node.name].shape)

    def _alike(self, node: Node) -> bool:
        shapes = {self.graph.values[name].shape for name in node.inputs.values()}
        return len(shapes) == 1

    def _count(self, name: str) -> int:
        shape = self.graph.values[name].shape
        return shape[1] if len(shape) > 2 and isinstance(shape[1], int) else 0

    def _fixed(self, name: str) -> list[int]:
        return [FIXED] * self._count(name)


class _Reads(TorchFunctionMode):
    """Notes, as `elsewhere`, whose weights other code than norms and convolutions reads: `self.conv.weight.mean()`."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.elsewhere: set[str] = set()
        self._of = {id(each): name for name in names for each in model.get_submodule(name).parameters(recurse=False)}

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call, and note whose weights are read; a shape or type of them is none."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.__name__.startswith((*AFFINE, *MULTIPLYING)):
            self.elsewhere |= {self._of[id(each)] for each in tree_leaves((args, kwargs)) if id(each) in self._of}
        return result


@torch.no_grad()
def equalize(
    model: nn.Module, batches: Iterable[object], quantized: Collection[str], share: float = 0.5
) -> dict[str, Tensor]:
    """Equalise a network that is not quantised yet, in place.

    Args:
        batches: model inputs on the model's device, as of `calibrate`.
        quantized: names of the layers that will be; others get the factor and do not choose it.
        share: a above, from 0 (weights alone are made equal) to 1 (activations alone).

    Returns:
        The factors s of each norm that has others than 1, float32 [C].

    Raises:
        InputError: the network cannot be captured as a graph.

    >>> model = nn.Sequential(nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 4, 1))
    >>> model[0].weight.data = torch.tensor([1.0, 64.0])
    >>> equalize(model.eval(), [torch.rand(2, 2, 4, 4)], ["2"])["0"].diff() > 0
    tensor([True])
    """
    kept = list(batches)
    channels = _Channels(capture(copied(model).cpu(), _example(model, kept[0])))
    with evaluating(model):
        wanted = _factors(model, kept, channels, quantized, share)
    found: dict[str, Tensor] = {}
    for name in (*channels.norms, *channels.readers):
        layer: Any = model.get_submodule(name)
        factor = torch.tensor([wanted.get(channels.root(number), 1.0) for number in channels.of_layer(name)])
        if bool((factor == 1).all()):
            continue
        if name in channels.norms:
            found[name] = factor
            for value in (layer.weight, layer.bias):
                value.div_(factor.to(value))
        else:
            _columns(layer).mul_(_as_columns(layer, factor).to(layer.weight))
    return found


def _example(model: nn.Module, batch: object) -> Any:
    given = arguments_of(model, batch)
    return given[0] if isinstance(given, tuple) and len(given) == 1 else given


def _factors(
    model: nn.Module, batches: list[object], channels: _Channels, quantized: Collection[str], share: float
) -> dict[int, float]:
    """The factor of each free channel, by its root: the geometric mean of what its readers want."""
    squares: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            square = inputs[0].detach().float().movedim(1, 0).flatten(1).square().mean(1)
            squares[name] = squares[name] + square if name in squares else square

        return hook

    names = [name for name in channels.readers if name in quantized]
    hooks = [model.get_submodule(name).register_forward_pre_hook(watch(name)) for name in names]
    try:
        with _Reads(model, (*channels.norms, *channels.readers)) as reads:
            for batch in batches:
                run(model, batch)
    finally:
        for each in hooks:
            each.remove()
    for name in reads.elsewhere:
        channels.fix_layer(name)
    logs: dict[int, list[float]] = {}
    for name in names:
        layer = model.get_submodule(name)
        both = torch.stack([squares[name].cpu(), column_squares(layer).cpu()])
        live = (both > 0).all(0)
        own = 0.5 * both.clamp(min=1e-38).log2()
        own = own - own[:, live].mean(1, keepdim=True)
        for number, log, alive in zip(
            channels.readers[name], (share * own[0] - (1 - share) * own[1]).tolist(), live.tolist(), strict=True
        ):
            if alive and channels.root(number) != FIXED:
                logs.setdefault(channels.root(number), []).append(log)
    return {
        number: 2.0 ** max(-LARGEST, min(LARGEST, round(math.fsum(each) / len(each)))) for number, each in logs.items()
    }


def column_squares(layer: object) -> Tensor:
    """Sum of the squared weights of each input channel of a convolution or linear layer, float32 [C]."""
    weight = _columns(layer).float().square()
    return weight.sum([axis for axis in range(weight.ndim) if axis not in _column_axes(layer)]).flatten()


def _columns(layer: Any) -> Tensor:
    """The weight of a layer as [groups, outputs, inputs, ...], transposed ones as [groups, inputs, outputs, ...]; a
    view."""
    weight: Tensor = layer.weight.detach()
    return weight.unflatten(0, (getattr(layer, "groups", 1), -1))


def _column_axes(layer: object) -> tuple[int, int]:
    return (0, 1) if isinstance(layer, nn.modules.conv._ConvTransposeNd) else (0, 2)


def _as_columns(layer: object, factor: Tensor) -> Tensor:
    """Factors of the input channels in the shape that `_columns` is multiplied with."""
    columns, axes = _columns(layer), _column_axes(layer)
    return factor.view([size if axis in axes else 1 for axis, size in enumerate(columns.shape)])
