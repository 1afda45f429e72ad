"""Shapes of all activations for given sizes of the inputs.

    shapes_of(graph)                       {"image": (1, 3, 96, 96), "encoder.0.conv1": (1, 16, 96, 96), ...}
    shapes_of(graph, {"image": (4, 3, 64, 64)})

Shapes have torch's axes, whatever form an activation has. A node whose operands do not fit is named.

Nodes run on tensors without data (torch's meta device), so that torch itself decides what fits. That is slow: the first
such call imports torch._dynamo, 2 to 3 seconds, and each takes up to milliseconds. The usual nodes of a convolutional
network therefore have a formula (`_by_formula`), for operands that surely fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from fp4deploy.errors import InputError, first_line
from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.graph.sizes import SizeError, output_size, transposed_size
from fp4deploy.models.input_encoding import ENCODED_CHANNELS
from fp4deploy.packed.graph import (
    Activation,
    AdaptivePool,
    Affine,
    Arithmetic,
    Compare,
    Concat,
    Conv2d,
    ConvTranspose2d,
    Graph,
    GroupNormReLU,
    Input,
    Layer,
    Linear,
    Node,
    Pool,
    Reduce,
    Resize,
    axes_of,
    is_quantized,
    named,
)
from fp4deploy.packed.operators import Context, compute, convolve

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

MAX_ELEMENTS = 1 << 28  # of one activation, for one item of the batch
KERNEL_ELEMENTS = (1 << 31) - 1  # 32-bit offsets of the kernels
MODES = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}  # of `Resize`, by their axes
TRIALS = (2, 4, 8, 16, 32, 64, 128)  # multiples to which a size that does not fit is rounded, for the message


def shapes_of(graph: Graph, inputs: Mapping[str, Shape] | None = None) -> Shapes:
    """The shape of every activation.

    Args:
        inputs: shapes by the names of the inputs; None for the graph's examples.

    Raises:
        InputError: naming the node whose operands do not fit, or an activation that is too large.
    """
    found: Shapes = {}
    sizes: dict[str, int] = {}
    for each in graph.inputs:
        shape = tuple(each.shape) if inputs is None else inputs[each.name]
        sizes |= {f"{each.name}.{axis}": size for axis, size in enumerate(shape)}
        read = (shape[0], ENCODED_CHANNELS, *shape[2:]) if graph.digits else shape
        _add(found, each, read, sizes)
    context = Context(lambda name: _empty(stored_shape(graph, name)), sizes, device="meta")
    for number, node in enumerate(graph.nodes):
        try:
            _add(found, node, _result(graph, node, [found[name] for name in node.inputs], context), sizes)
        except (InputError, SizeError) as error:
            raise InputError(f"Node {number} of the graph ({node.op} '{named(node)}'): {error}") from None
        except (RuntimeError, ValueError, LookupError, TypeError, ZeroDivisionError, OverflowError) as error:
            raise InputError(f"Node {number} of the graph ({node.op} '{named(node)}'): {first_line(error)}") from None
    return found


def fitting(graph: Graph, inputs: Mapping[str, Shape]) -> Shapes:
    """`shapes_of` at run time: what does not fit is refused with sizes that would.

    Raises:
        InputError: other inputs than the graph's, or a size that the network cannot take.
    """
    for each in graph.inputs:
        shape = inputs[each.name]
        kept = [axis for axis in range(len(each.shape)) if axis not in each.free]
        if len(shape) != len(each.shape) or 0 in shape or any(shape[axis] != each.shape[axis] for axis in kept):
            raise InputError(f"The network takes {expected(graph, each)}, not {list(shape)}.")
    try:
        return shapes_of(graph, inputs)
    except InputError as error:
        for multiple in TRIALS:
            rounded, odd = (
                {each.name: _rounded(each, inputs[each.name], multiple, step) for each in graph.inputs}
                for step in (multiple, 2 * multiple)
            )
            if _fits(graph, rounded) and _fits(graph, odd):
                height, width = next(shape[2:4] for shape in rounded.values() if len(shape) == 4)
                given = next(shape[2:4] for shape in inputs.values() if len(shape) == 4)
                raise InputError(
                    f"Images of {given[0]} x {given[1]} pixels do not fit this network: height and width must be "
                    f"multiples of {multiple}, such as {height} x {width}."
                ) from None
        raise error


def expected(graph: Graph, each: Input) -> str:
    """What an input looks like, for messages."""
    names = ["N", "C", "H", "W"] if len(each.shape) == 4 else ["N", *(f"L{axis}" for axis in range(1, 6))]
    sizes = [names[axis] if axis in each.free else str(size) for axis, size in enumerate(each.shape)]
    kind = "RGB images" if len(sizes) == 4 and sizes[1] == "3" else f"'{each.name}'"
    return f"{kind} [{', '.join(sizes)}]"


def stored_shape(graph: Graph, name: str) -> list[int]:
    """Of a tensor, or of weights of experts, whose codes are half as wide."""
    if name in graph.tensors:
        return graph.tensors[name].shape
    *rows, width = graph.tensors[f"{name}.codes"].shape
    return [*rows, 2 * width]


def weight_shape(graph: Graph, node: Layer, channels: int) -> list[int]:
    """[O, KH, KW, C] of a convolution's weight and [O, C] of a linear one, channels without padding."""
    kept = f"{node.layer}.weight"
    name = f"{kept}.codes" if is_quantized(node) else kept
    groups = node.groups if isinstance(node, Conv2d) else 1
    return [*graph.tensors[name].shape[:-1], channels // groups]


def _result(graph: Graph, node: Node, inputs: list[Shape], context: Context) -> Shape:
    weight = _checked_weight(graph, node, inputs) if isinstance(node, Layer) else []
    known = _by_formula(node, inputs, weight, context)
    if known is not None and all(size > 0 for size in known):
        return known
    tensors = [_empty(shape) for shape in inputs]
    if not isinstance(node, Layer):
        return tuple(compute(node, tensors, context).shape)
    bias = None if node.bias is None else context.tensor(node.bias)
    return tuple(convolve(node, tensors, _empty(weight).permute(weight_order(node, len(weight))), bias).shape)


def _checked_weight(graph: Graph, node: Layer, inputs: list[Shape]) -> list[int]:
    """The shape of a layer's weight, which fits the number of its inputs' axes and channels."""
    spatial = isinstance(node, (Conv2d, ConvTranspose2d))
    axes = axes_of(node) if isinstance(node, Conv2d | ConvTranspose2d) else 0
    wanted = {1: "[N, C, L]", 2: "[N, C, H, W]", 3: "[N, C, D, H, W]"}.get(axes, "")
    _require(not spatial or all(len(shape) == axes + 2 for shape in inputs), f"it reads feature maps {wanted}")
    channels = sum(shape[1 if spatial else -1] for shape in inputs)
    shape = weight_shape(graph, node, channels)
    _require(len(shape) == axes + 2, f"its weight has {len(shape)} axes")
    groups = getattr(node, "groups", 1)
    _require(channels % groups == 0, f"{groups} groups do not divide {channels} channels")
    if axes == 2 and node.precision == "nvfp4":
        width, deep = inputs[0][3], -(-channels // NVFP4_BLOCK) * NVFP4_BLOCK
        _require(width * shape[1] * deep <= KERNEL_ELEMENTS, "a row of its input is beyond 2^31 elements")
    return shape


def _by_formula(node: Node, inputs: list[Shape], weight: list[int], context: Context) -> Shape | None:
    """The result of a usual node whose operands fit; None, or a size below 1, where torch is to decide."""
    if not inputs:
        return None
    first = inputs[0]
    if isinstance(node, Linear):
        return (*first[:-1], weight[0])
    if isinstance(node, Conv2d | ConvTranspose2d):
        joined = _joined(inputs, 1)
        return joined and _convolved(node, joined, weight)
    if isinstance(node, Concat):
        return _joined(inputs, node.dim)
    if isinstance(node, Activation):
        return first
    if isinstance(node, Affine):
        return first if len(first) > 1 else None
    if isinstance(node, GroupNormReLU):
        fits = len(first) == 4 and first[1] % node.groups == 0 and math.prod(first) > node.groups
        return first if fits else None
    if isinstance(node, Arithmetic | Compare):
        return first if all(shape == first for shape in inputs) else None
    if isinstance(node, Reduce):
        fits = len(set(node.dims)) == len(node.dims) and max(node.dims) < len(first)
        kept = (
            1 if axis in node.dims else size for axis, size in enumerate(first) if node.keep or axis not in node.dims
        )
        return tuple(kept) if fits else None
    return _resampled(node, first, context)


def _joined(shapes: list[Shape], axis: int) -> Shape | None:
    """Shapes that differ along one axis, concatenated there."""
    first = shapes[0]
    if axis >= len(first) or len({(*shape[:axis], 0, *shape[axis + 1 :]) for shape in shapes}) > 1:
        return None
    return (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])


def _convolved(node: Conv2d | ConvTranspose2d, source: Shape, weight: list[int]) -> Shape:
    """The formulas in torch's documentation of both modules; a kernel beyond the padded input gives a size below 1."""
    channels, *kernel, _ = weight
    if isinstance(node, Conv2d):
        return (source[0], channels, *_windows(source[2:], kernel, node))
    axes = zip(source[2:], kernel, node.stride, node.padding, node.dilation, node.output_padding, strict=True)
    return (source[0], channels * node.groups, *(transposed_size(*axis) for axis in axes))


def _windows(sizes: Shape, kernel: list[int], node: Any) -> list[int]:
    """How many windows of a kernel lie in the padded sizes."""
    axes = zip(sizes, kernel, node.stride, node.padding, node.dilation, strict=True)
    return [output_size(*axis) for axis in axes]


def _resampled(node: Node, source: Shape, context: Context) -> Shape | None:
    """Pools and resizing over all axes after the channels."""
    lead, spatial = source[:2], source[2:]
    if isinstance(node, Pool) and len(node.kernel) == len(spatial) and not node.ceil_mode:
        axes = zip(node.padding, node.kernel, spatial, strict=True)
        usual = all(2 * pad <= taps <= size for pad, taps, size in axes)
        return (*lead, *_windows(spatial, node.kernel, node)) if usual else None
    if isinstance(node, AdaptivePool) and len(node.size) == len(spatial):
        return (*lead, *context.sizes_of(node.size))
    if isinstance(node, Resize) and MODES.get(node.mode, len(spatial)) == len(spatial):
        if node.size is not None and len(node.size) == len(spatial):
            return (*lead, *context.sizes_of(node.size))
        if node.scale is not None and len(node.scale) == len(spatial):
            return (*lead, *(int(size * scale) for size, scale in zip(spatial, node.scale, strict=True)))
    return None


def weight_order(node: Layer, rank: int) -> tuple[int, ...]:
    """Axes of a weight O, taps, C in the order of torch's operator."""
    taps = tuple(range(1, rank - 1))
    if isinstance(node, ConvTranspose2d):
        return (rank - 1, 0, *taps)
    return (0, rank - 1, *taps) if isinstance(node, Conv2d) else tuple(range(rank))


def _add(found: Shapes, node: Node | Input, shape: Shape, sizes: Mapping[str, int]) -> None:
    batch = max(1, next(iter(sizes.values())))
    _require(0 not in shape, f"its result {list(shape)} is empty")
    _require(math.prod(shape) <= MAX_ELEMENTS * batch, f"its result {list(shape)} has more than 2^28 elements an item")
    for form in node.outputs:
        pooled = shape
        if form.pooled:
            _require(isinstance(node, GroupNormReLU), "only group_norm_relu pools")
            _require(min(shape[-2:]) > 1, f"{shape[-2]} x {shape[-1]} pixels cannot be pooled")
            pooled = (*shape[:-2], shape[-2] // 2, shape[-1] // 2)
        found[form.name] = pooled


def _rounded(each: Input, shape: Shape, multiple: int, step: int) -> Shape:
    """Free sizes at `multiple` plus whole steps; a step of twice as much gives odd multiples."""

    def near(axis: int, size: int) -> int:
        if axis not in each.free or axis < 2:
            return size
        return multiple + max(0, round((size - multiple) / step)) * step

    return tuple(near(axis, size) for axis, size in enumerate(shape))


def _fits(graph: Graph, inputs: Mapping[str, Shape]) -> bool:
    if not any(len(shape) == 4 for shape in inputs.values()):
        return False
    try:
        shapes_of(graph, inputs)
    except InputError:
        return False
    return True


def _empty(shape: Shape | list[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), device="meta")


def _require(condition: bool, cause: str) -> None:
    if not condition:
        raise InputError(cause)
