"""What each node computes, in torch: one function a node, for tensors of any device.

The same functions run on tensors without data (`shapes`), so that the shapes that a checker derives are those that the
executor gets. Nodes that multiply packed operands by kernels are in `network`; `convolve` is what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.graph.sizes import evaluate
from fp4deploy.packed.graph import (
    Activation,
    AdaptivePool,
    Affine,
    ArgMax,
    Arithmetic,
    Aten,
    Attention,
    Compare,
    Concat,
    Constant,
    Conv2d,
    ConvTranspose2d,
    CumulativeSum,
    Experts,
    Flip,
    Fold,
    Graph,
    GroupNormReLU,
    Layer,
    Linear,
    Matmul,
    Norm,
    Pad,
    Permute,
    PixelShuffle,
    Pool,
    PReLU,
    Reduce,
    Repeat,
    Reshape,
    Resize,
    Roll,
    Select,
    Size,
    Slice,
    Softmax,
    Step,
    Take,
    Unfold,
    Variance,
    Where,
    parts_of,
)
from fp4deploy.plugins.quantize.window import max_pool
from fp4deploy.rest import FP16, POSITIONS


@dataclass(frozen=True)
class Context:
    """What a node reads besides activations.

    tensor: name -> float32 tensor of the file, or decoded weights of experts. sizes: "<input>.<axis>" -> its
    size. positions: those of `Take`, on the device; a CUDA graph cannot copy them from the host, and reads them as long
    as it is replayed. dtype: of plain activations.
    """

    tensor: Callable[[str], torch.Tensor]
    sizes: dict[str, int]
    positions: Mapping[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"  # of what a node makes of nothing

    def size(self, size: Size) -> int:
        """The value of a size."""
        return size if isinstance(size, int) else evaluate(tuple(size), self.sizes)

    def sizes_of(self, sizes: list[Any]) -> list[int]:
        """The values of several."""
        return [self.size(size) for size in sizes]


def positions_of(graph: Graph, device: torch.device) -> dict[tuple[int, ...], torch.Tensor]:
    """What the nodes `take` of a graph read as `Context.positions`."""
    takes = {tuple(node.indices) for node in graph.nodes if isinstance(node, Take)}
    return {indices: torch.tensor(indices, device=device) for indices in takes}


def read_tensors(
    graph: Graph, tensors: Mapping[str, torch.Tensor], held: Collection[str], device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """What `Context.tensor` gives: float32, without those of layers (`held`), and weights of experts decoded."""
    experts = {node.tensor: node for node in graph.nodes if isinstance(node, Experts)}
    parts = {name for weight in experts for name in parts_of(weight)}
    found = {k: x.to(device, torch.float32) for k, x in tensors.items() if k not in held and k not in parts}
    for weight, node in experts.items():
        codes, scales, amax = (tensors[name].to(device) for name in parts_of(weight))
        shape = torch.Size((*codes.shape[:-1], 2 * codes.shape[-1]))
        found[weight] = Nvfp4Tensor(codes, scales, amax, shape, node.e4m3_max).dequantize(dtype)
    return found


# Operators of ATen that a file may name: functions of their arguments alone, whose result has a size that follows from
# sizes. One more is one name here, in every way of running a network.
ATEN = (
    "acos", "acosh", "arange", "asin", "asinh", "atan", "atan2", "atanh", "cosh", "cumprod", "embedding", "erfc",
    "exp2", "fmod", "frac", "gather", "grid_sampler_2d", "grid_sampler_3d", "hypot", "index", "index_select", "lgamma",
    "log10", "log2", "logaddexp", "prod", "remainder", "scatter", "sinh", "sort", "tan", "topk", "tril", "triu",
    "trunc", "_fft_c2c", "_fft_c2r", "_fft_r2c",
)  # fmt: skip
COMPLEX = ("_fft_c2c", "_fft_r2c")  # of these the results
INDICES = ("index", "indices")  # arguments that are positions


def aten_function(name: str) -> torch._ops.OpOverload:
    """The operator "name.overload".

    Raises:
        ValueError: it is not on the list.
    """
    operator, _, overload = name.partition(".")
    if operator not in ATEN or overload not in getattr(torch.ops.aten, operator).overloads():
        raise ValueError(f"'{name}' is no operator that a packed network may name")
    found: torch._ops.OpOverload = getattr(getattr(torch.ops.aten, operator), overload)
    return found


NUMBERS = {"leaky_relu": 1, "elu": 1, "clamp": 2, "softplus": 2}  # how many numbers an activation function has


def compute(node: Step, inputs: list[torch.Tensor], context: Context) -> torch.Tensor:
    """The plain result of a node that is no `Layer`, from plain inputs; whole numbers stay so where they only move."""
    if not isinstance(node, TAKES_WHOLE):
        inputs = [as_numbers(x, context.dtype) for x in inputs]
    return _TABLE[type(node)](node, inputs, context)


def as_numbers(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers as floating point ones; others as they are."""
    return x if x.is_floating_point() or x.is_complex() else x.to(dtype)


def convolve(node: Layer, inputs: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A layer of plain operands; the weight with torch's axes."""
    x = torch.cat(inputs, 1) if len(inputs) > 1 else inputs[0]
    if isinstance(node, ConvTranspose2d):
        places = (node.stride, node.padding, node.output_padding, node.groups, node.dilation)
        y: torch.Tensor = getattr(F, node.op)(x, weight, bias, *places)
        return y
    if isinstance(node, Conv2d):
        y = getattr(F, node.op)(x, weight, bias, node.stride, node.padding, node.dilation, node.groups)
        return y.relu() if node.relu else y
    y = F.linear(x, weight, bias)
    return y.relu() if isinstance(node, Linear) and node.relu else y


def affine_channels(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """x scale + shift along axis 1, in FP32, rounded once."""
    shape = (-1, *(1,) * (x.ndim - 2))
    return (x.float() * scale.view(shape) + shift.view(shape)).to(x.dtype)


def _affine(node: Affine, inputs: list[torch.Tensor], context: Context) -> torch.Tensor:
    return affine_channels(inputs[0], *(context.tensor(f"{node.layer}.{part}") for part in ("scale", "shift")))


def _group_norm_relu(node: GroupNormReLU, inputs: list[torch.Tensor], context: Context) -> torch.Tensor:
    x = inputs[0]
    if node.bias:
        x = x + context.tensor(node.bias).to(x.dtype).view(-1, 1, 1)
    weight, bias = (context.tensor(f"{node.layer}.{part}").to(x.dtype) for part in ("weight", "bias"))
    return _grouped(x, node.groups, weight, bias, node.eps).relu()


def _norm(node: Norm, inputs: list[torch.Tensor], context: Context) -> torch.Tensor:
    x, weight, bias = inputs[0], None, None
    if node.layer is not None:
        weight, bias = (context.tensor(f"{node.layer}.{part}").to(x.dtype) for part in ("weight", "bias"))
    if node.op == "layer_norm":
        return F.layer_norm(x, node.shape, weight, bias, node.eps)
    if node.op == "instance_norm":
        return F.instance_norm(x, weight=weight, bias=bias, eps=node.eps)
    return _grouped(x, node.groups, weight, bias, node.eps)


def _grouped(
    x: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """GroupNorm, on a CPU of rows in memory: torch's kernel for channels_last loses the mean's last bits, of which a
    volume of equal voxels has nothing else (`plugins.quantize.norm_float32`)."""
    return F.group_norm(x.contiguous() if x.device.type == "cpu" else x, groups, weight, bias, eps)


def _activation(node: Activation, inputs: list[torch.Tensor], _: Context) -> torch.Tensor:
    if node.function == "clamp":
        low, high = node.parameters  # FP16's ends are no limits to numbers of a larger range
        return torch.clamp(inputs[0], low if low > -FP16.largest else None, high if high < FP16.largest else None)
    if node.function == "gelu_tanh":
        return F.gelu(inputs[0], approximate="tanh")
    function: Any = getattr(F, node.function, None) or getattr(torch, node.function)
    return function(inputs[0], *node.parameters)


def _arithmetic(node: Arithmetic, inputs: list[torch.Tensor], _: Context) -> torch.Tensor:
    other: Any = inputs[1] if len(inputs) == 2 else node.number
    if node.alpha != 1:
        other = other * node.alpha
    if len(inputs) == 1 and node.op in ("maximum", "minimum"):
        return torch.clamp(inputs[0], **{"min" if node.op == "maximum" else "max": other})
    return getattr(torch, node.op)(inputs[0], other)


def _compare(node: Compare, inputs: list[torch.Tensor], context: Context) -> torch.Tensor:
    other: Any = inputs[1] if len(inputs) == 2 else node.number
    compare: Any = torch.eq if node.op == "equal" else getattr(torch, node.op)
    return compare(inputs[0], other).to(context.dtype)


def _pool(node: Pool, inputs: list[torch.Tensor], _: Context) -> torch.Tensor:
    x, stride, pool = inputs[0], node.stride, getattr(F, f"{node.op}{len(node.kernel)}d")
    if node.op == "max_pool" and len(node.kernel) == 2:
        windows = (node.kernel, node.stride, node.padding, node.dilation)
        kernel, steps, padding, dilation = ((each[0], each[1]) for each in windows)
        return max_pool(x, kernel, steps, padding, dilation, node.ceil_mode)
    if node.op == "max_pool":
        return pool(x, node.kernel, stride, node.padding, node.dilation, node.ceil_mode)
    return pool(x, node.kernel, stride, node.padding, node.ceil_mode, node.count_padding)


def _reduce(node: Reduce, inputs: list[torch.Tensor], _: Context) -> torch.Tensor:
    x = inputs[0]
    if node.function == "norm":
        return torch.linalg.vector_norm(x, 2, node.dims, node.keep)
    return getattr(torch, node.function)(x, node.dims, node.keep)


def _argmax(node: ArgMax, inputs: list[torch.Tensor], _: Context) -> torch.Tensor:
    x = inputs[0]
    if x.shape[node.dim] > POSITIONS:
        raise ValueError(f"an axis of {x.shape[node.dim]} has positions that FP16 does not hold")
    return x.argmax(node.dim, node.keep).to(x.dtype)


def _resize(node: Resize, inputs: list[torch.Tensor], context: Context) -> torch.Tensor:
    corners = None if node.mode.startswith("nearest") else node.align_corners
    size = None if node.size is None else context.sizes_of(node.size)
    return F.interpolate(inputs[0], size, node.scale, node.mode, corners)


def _slice(node: Slice, inputs: list[torch.Tensor], context: Context) -> torch.Tensor:
    end = None if node.end is None else context.size(node.end)
    index: list[Any] = [slice(None)] * node.dim + [slice(context.size(node.start), end, node.step)]
    return inputs[0][tuple(index)]


def _take(node: Take, inputs: list[torch.Tensor], context: Context) -> torch.Tensor:
    x = inputs[0]
    if max(node.indices) >= x.shape[node.dim]:
        raise ValueError(f"position {max(node.indices)} of an axis of {x.shape[node.dim]}")
    positions = context.positions.get(tuple(node.indices))
    return x.index_select(node.dim, torch.tensor(node.indices, device=x.device) if positions is None else positions)


def _pad(node: Pad, inputs: list[torch.Tensor], context: Context) -> torch.Tensor:
    value = node.value if node.mode == "constant" else None
    return F.pad(inputs[0], context.sizes_of(node.pad), node.mode, value)


def _attention(node: Attention, inputs: list[torch.Tensor], _: Context) -> torch.Tensor:
    q, k, v, *mask = inputs
    if mask and q.dtype != torch.float32:  # -1e9 of the network's code is -Inf in FP16, and a row of them NaN
        mask = [mask[0].clamp(min=torch.finfo(q.dtype).min)]
    return F.scaled_dot_product_attention(q, k, v, mask[0] if mask else None, is_causal=node.causal, scale=node.scale)


def _aten(node: Aten, inputs: list[torch.Tensor], context: Context) -> torch.Tensor:
    function = aten_function(node.function)
    given: dict[str, Any] = {name: _argument(value, context) for name, value in node.arguments.items()}
    if node.function.startswith("arange"):
        return torch.arange(**given, dtype=torch.int64, device=context.device)
    for role, x in zip(node.roles, inputs, strict=True):
        name, _, place = role.partition(".")
        if place:
            given.setdefault(name, []).append(_operand(node, name, x))
        else:
            given[name] = _operand(node, name, x)
    if node.function.startswith(("gather", "index_select", "scatter")):  # a GPU would end the process
        given["index"] = given["index"].clamp(0, given["self"].shape[given["dim"]] - 1)
    elif node.function.startswith("embedding"):
        given["indices"] = given["indices"].clamp(0, given["weight"].shape[0] - 1)
    elif node.function.startswith("index."):
        sizes = given["self"].shape
        given["indices"] = [at.clamp(-size, size - 1) for at, size in zip(given["indices"], sizes, strict=False)]
    results = function(**given)
    y = results[node.result] if isinstance(results, tuple | list) else results
    if not y.is_complex() and not y.is_floating_point() and max(inputs[0].shape, default=1) > POSITIONS:
        raise ValueError(f"an axis of {max(inputs[0].shape)} has positions that FP16 does not hold")
    return y if y.is_complex() else y.to(context.dtype)


def _operand(node: Aten, name: str, x: torch.Tensor) -> torch.Tensor:
    if name in INDICES:
        return x.to(torch.int64)
    if node.function.startswith("_fft_c2") and not x.is_complex():
        return x.to(torch.complex64)
    return x.to(torch.float32) if x.is_floating_point() else x


def _argument(value: object, context: Context) -> Any:
    """A number or text as it is, the value of an expression of sizes, or several."""
    if not isinstance(value, list):
        return value
    if any(isinstance(each, str) for each in value):
        return context.size(value)
    return [context.size(each) if isinstance(each, list) else each for each in value]


# A name read from torch by `node.op` or `node.function` is a literal of the node's class, which reading a file checks.
_TABLE: dict[type[Step], Callable[..., torch.Tensor]] = {
    Affine: _affine,
    GroupNormReLU: _group_norm_relu,
    Norm: _norm,
    Activation: _activation,
    PReLU: lambda node, x, context: F.prelu(x[0], context.tensor(node.tensor).to(x[0].dtype)),
    Arithmetic: _arithmetic,
    Compare: _compare,
    Where: lambda node, x, context: torch.where(x[0] != 0, x[1], x[2]),
    Constant: lambda node, x, context: context.tensor(node.tensor),
    Experts: lambda node, x, context: context.tensor(node.tensor),
    Concat: lambda node, x, context: torch.cat(x, node.dim),
    Pool: _pool,
    AdaptivePool: lambda node, x, context: getattr(F, f"adaptive_{node.function}_pool{len(node.size)}d")(
        x[0], context.sizes_of(node.size)
    ),
    Reduce: _reduce,
    Variance: lambda node, x, context: torch.var(x[0], node.dims, correction=node.correction, keepdim=node.keep),
    CumulativeSum: lambda node, x, context: torch.cumsum(x[0], node.dim),
    ArgMax: _argmax,
    Resize: _resize,
    PixelShuffle: lambda node, x, context: getattr(F, node.op)(x[0], node.factor),
    Unfold: lambda node, x, context: torch.ops.aten.im2col(x[0], node.kernel, node.dilation, node.padding, node.stride),
    Fold: lambda node, x, context: torch.ops.aten.col2im(
        x[0], context.sizes_of(node.size), node.kernel, node.dilation, node.padding, node.stride
    ),
    Reshape: lambda node, x, context: getattr(x[0], node.op)(context.sizes_of(node.shape)),
    Permute: lambda node, x, context: x[0].permute(node.dims),
    Slice: _slice,
    Select: lambda node, x, context: x[0].select(node.dim, context.size(node.index)),
    Roll: lambda node, x, context: torch.roll(x[0], context.sizes_of(node.shifts), node.dims),
    Flip: lambda node, x, context: torch.flip(x[0], node.dims),
    Repeat: lambda node, x, context: x[0].repeat(context.sizes_of(node.counts)),
    Take: _take,
    Pad: _pad,
    Matmul: lambda node, x, context: torch.matmul(x[0], x[1]),
    Softmax: lambda node, x, context: getattr(torch, node.op)(x[0], node.dim),
    Attention: _attention,
    Aten: _aten,
}


TAKES_WHOLE = (Aten, Compare, Concat, Flip, Permute, Repeat, Reshape, Roll, Select, Slice, Take)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """A feature map whose NHWC view is contiguous, or a volume whose NDHWC is; any other tensor as it is."""
    if x.ndim not in (4, 5):
        return x
    pixels = x.movedim(1, -1)
    return x if pixels.is_contiguous() else pixels.contiguous().movedim(-1, 1)
