"""A packed network as one graph of ATen operators for one set of input shapes, compiled by Inductor.

    graph, tensors = trace(file, device, {"image": (1, 3, 512, 512)})      fx.GraphModule and its first inputs
    program = compile_program(...)                                          what computes the outputs

The nodes of the file are written down as the operators that `operators.compute` calls, with every size a number, and
the compiler does what hand-written steps do for the networks that they were written for: norms, activations, additions,
resizing, concatenation and quantisation become the prologue of what reads them, layouts are decided for the whole graph.

**Layers.** What a GEMM or a convolution in NVFP4 reads are decoded values (`fusion.values`): in FP16 times a power of two,
in which they are exact. Its weight is decoded once, times another. cuBLAS and cuDNN sum in FP32; what the powers of two
leave of both global scales, a number in [1, 2) unless a scale is beyond 2^-14, multiplies the sum. So operands are those
of the file, bit for bit, and a sum differs by its order and, for a convolution, by one rounding to FP16.

**Precision between layers.** In FP16 what lies between two layers is computed in FP32 and rounded where it is written.
Run node by node every node rounds; the compiled network is the closer one to the numbers of a CPU, which are FP32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, log2
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx

from fp4deploy.formats import Nvfp4Tensor, global_scale
from fp4deploy.formats.constants import NVFP4_BLOCK, nvfp4_range
from fp4deploy.fusion.resize import interpolate_linear, interpolate_nearest
from fp4deploy.fusion.values import EXPONENTS, Scale, scale_of, values
from fp4deploy.fusion.windows import MAX_TAPS, depthwise_conv2d, max_pool2d
from fp4deploy.models.input_encoding import encode_input
from fp4deploy.packed.file import PackedFile
from fp4deploy.packed.graph import (
    Concat,
    Conv2d,
    ConvTranspose2d,
    Flip,
    Form,
    GroupNormReLU,
    Layer,
    Linear,
    Node,
    Norm,
    Permute,
    Pool,
    Repeat,
    Reshape,
    Resize,
    Roll,
    Select,
    Slice,
    Take,
    weight_names,
)
from fp4deploy.packed.operators import Context, compute
from fp4deploy.packed.shapes import Shape, shapes_of, weight_order, weight_shape
from fp4deploy.plugins.gemm.convolution import small_k
from fp4deploy.plugins.gemm.convolution.operators import FORMATS
from fp4deploy.plugins.quantize import norm_pack as _norm_pack  # noqa: F401 - registers norm_coefficients

Tensors = dict[str, torch.Tensor]
LAYOUT = (Flip, Permute, Repeat, Reshape, Roll, Select, Slice, Take)  # nodes that write no feature map
ACTIVATION = -12  # exponent of the unit of activations: what is left for weights keeps their product in FP16's range


@dataclass(frozen=True, eq=False)
class Weight:
    """A layer's weight as torch's operator takes it; scale: what its product is multiplied with, 1 where that is exact."""

    values: torch.Tensor
    scale: float


class Writer:
    """Writes the nodes of a packed file as operators, for activations of one dtype.

    device: where the tensors lie; dtype: float16, in which decoded operands go by powers of two, or float32.
    """

    def __init__(self, file: PackedFile, device: torch.device, dtype: torch.dtype) -> None:
        self.graph, self.dtype = file.graph, dtype
        layers = [node for node in file.graph.nodes if isinstance(node, Layer)]
        held = {name for node in layers for name in weight_names(node)}
        self.vectors = {k: v.to(device, torch.float32) for k, v in file.tensors.items() if k not in held}
        self.scales = self._scales(file, layers)
        shapes = shapes_of(file.graph)
        self.weights = {node.layer: self._weight(file, node, shapes, device) for node in layers}
        self.convolved = {name for node in layers if not isinstance(node, Linear) for name in node.inputs}
        self.factors = self._factors(layers, {each.activation for each in file.graph.outputs})

    def tensors(self) -> Tensors:
        """Everything that the operators read besides the inputs, by name."""
        named = {f"{name}.weight": weight.values for name, weight in self.weights.items()}
        for amax, scale in self.scales.items():
            named |= {f"{amax}.sixth": scale.sixth, f"{amax}.decode": scale.decode}
        return named | self.vectors

    def outputs(self, tensors: Tensors, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of the network, from `tensors()` and inputs of the sizes that are to be written down."""
        live: Tensors = {}
        sizes = {
            f"{each.name}.{axis}": size
            for each, x in zip(self.graph.inputs, inputs, strict=True)
            for axis, size in enumerate(x.shape)
        }
        context = Context(tensors.__getitem__, sizes)
        for each, x in zip(self.graph.inputs, inputs, strict=True):
            x = x.to(self.dtype)
            x = encode_input(x) if self.graph.digits else x
            live |= {form.name: self._form(x, form, tensors) for form in each.outputs}
        for node in self.graph.nodes:
            read = [live[name] for name in node.inputs]
            early = [form for form in node.outputs if only_moves(node, form, read)]
            for form in early:
                y = self._compute(node, [self._form(x, form, tensors) for x in read], context)
                live[form.name] = in_channels_last(y) if isinstance(node, Resize) else y
            if len(early) == len(node.outputs):
                continue
            y = self._layer(node, read, tensors) if isinstance(node, Layer) else self._compute(node, read, context)
            written = {form.name for form in node.outputs}
            if (any(map(is_channels_last, read)) and not isinstance(node, LAYOUT)) or written & self.convolved:
                y = in_channels_last(y.to(self.dtype))
            live |= {form.name: self._form(y, form, tensors) for form in node.outputs if form not in early}
        return [live[each.activation] for each in self.graph.outputs]

    def _form(self, y: torch.Tensor, form: Form, tensors: Tensors) -> torch.Tensor:
        """A plain activation in one of its forms."""
        x = F.max_pool2d(y, 2) if form.pooled else y
        return x.to(self.dtype) if form.amax is None else self._quantized(x, form, tensors)

    def _quantized(self, x: torch.Tensor, form: Form, tensors: Tensors) -> torch.Tensor:
        name = str(form.amax)
        held = replace(
            self.scales[name], sixth=tensors[f"{name}.sixth"], decode=tensors[f"{name}.decode"], amax=tensors[name]
        )
        return values(x, held, 1 if form.axis == "channels" else -1, self.dtype)

    def _layer(self, node: Layer, inputs: list[torch.Tensor], tensors: Tensors) -> torch.Tensor:
        weight, scale = tensors[f"{node.layer}.weight"], self.weights[node.layer].scale
        scale = 1.0 if node.outputs[0].name in self.factors else scale
        bias = tensors[node.bias] if node.bias else None
        if isinstance(node, Linear):
            return self._linear(node, inputs[0], weight, bias, scale)
        x = torch.cat([each.movedim(1, -1) for each in inputs], -1).movedim(-1, 1) if len(inputs) > 1 else inputs[0]
        place = cast("Conv2d | ConvTranspose2d", node)
        relu = isinstance(place, Conv2d) and place.relu
        if isinstance(place, Conv2d) and _is_depthwise(place, weight):
            y = depthwise_conv2d(x, weight, place.stride, place.padding, place.dilation) * scale
        elif isinstance(place, Conv2d) and _is_pointwise(place, weight, x):
            y = self._linear(place, x.movedim(1, -1), weight.flatten(1), bias, scale)
            return y.movedim(-1, 1)
        else:
            plain = scale == 1
            y = torch.ops.fp4deploy.convolution(
                x, weight, bias if plain else None, place.stride, place.padding, place.dilation,
                getattr(place, "output_padding", [0] * len(place.stride)), place.groups,
                isinstance(place, ConvTranspose2d), relu and plain,
            )  # fmt: skip
            if plain:
                return y
            y = y.float() * scale
        y = y if bias is None else y + bias.view(-1, *(1,) * (y.ndim - 2))
        return in_channels_last((y.relu() if relu else y).to(self.dtype))

    def _linear(
        self, node: Linear | Conv2d, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        """The factor is cuBLAS's alpha: the FP32 sum times it, plus the bias, is rounded once."""
        rows = x.reshape(-1, x.shape[-1])
        added = torch.zeros((), dtype=self.dtype, device=x.device) if bias is None else bias.to(self.dtype)
        y = torch.addmm(added, rows, weight.t(), beta=0 if bias is None else 1, alpha=scale)
        y = y.reshape(*x.shape[:-1], weight.shape[0])
        return y.relu() if node.relu else y

    def _compute(self, node: Node, inputs: list[torch.Tensor], context: Context) -> torch.Tensor:
        """`operators.compute`, in the form that compiles best."""
        x = inputs[0] if inputs else torch.empty(0)
        if _has_kernel(node) and x.ndim == 4 and x.dtype == torch.float16:
            return self._normalized(cast("Norm | GroupNormReLU", node), x, context)
        if isinstance(node, Pool) and node.op == "max_pool" and len(node.kernel) == 2 and not node.ceil_mode:
            return max_pool2d(x, node.kernel, node.stride, node.padding, node.dilation)
        if isinstance(node, Concat) and node.dim == 1 and any(map(is_channels_last, inputs)):
            return torch.cat([x.movedim(1, -1) for x in inputs], -1).movedim(-1, 1)
        if isinstance(node, Resize) and node.mode != "bicubic":
            size = None if node.size is None else context.sizes_of(node.size)
            if node.mode.startswith("nearest"):
                return interpolate_nearest(x, size, node.scale, node.mode == "nearest-exact")
            return interpolate_linear(x, size, node.scale, node.align_corners)
        return compute(node, inputs, context)

    def _normalized(self, node: Norm | GroupNormReLU, x: torch.Tensor, context: Context) -> torch.Tensor:
        """A GroupNorm or InstanceNorm of a feature map: its affine map by kernels, in one pass over x, then applied.

        Of x / s for a factor s, which the norm cancels: its bias is divided by s, its epsilon by the square.
        """
        channels, factor = x.shape[1], self.factors.get(node.inputs[0], 1.0)
        groups = channels if isinstance(node, Norm) and node.op == "instance_norm" else node.groups
        bias = context.tensor(node.bias) / factor if isinstance(node, GroupNormReLU) and node.bias else None
        weight, beta = (
            torch.full((channels,), value, device=x.device)
            if node.layer is None
            else context.tensor(f"{node.layer}.{part}")
            for part, value in (("weight", 1.0), ("bias", 0.0))
        )
        pixels = x.permute(0, 2, 3, 1)
        operator = torch.ops.fp4deploy.norm_coefficients
        a, b = operator(pixels, bias, weight, beta, groups, node.eps / factor**2).unbind(1)
        y = (pixels.to(torch.float32) * a[:, None, None] + b[:, None, None]).permute(0, 3, 1, 2)
        return y.relu() if isinstance(node, GroupNormReLU) else y

    def _factors(self, layers: Sequence[Layer], kept: set[str]) -> dict[str, float]:
        """By activation: what it lacks of a layer's product, where kernels of norms alone read it, and no bias is added."""
        factors = {}
        for node in layers:
            name = node.outputs[0].name
            readers = [each for each in self.graph.nodes if name in each.inputs]
            alone = len(node.outputs) == 1 and node.outputs[0].amax is None and name not in kept and bool(readers)
            convolution = isinstance(node, Conv2d | ConvTranspose2d) and len(node.stride) == 2 and node.bias is None
            rectified = isinstance(node, Conv2d) and node.relu
            if alone and convolution and not rectified and all(map(_has_kernel, readers)):
                factors[name] = self.weights[node.layer].scale
        return factors if self.dtype == torch.float16 else {}

    def _scales(self, file: PackedFile, layers: Sequence[Layer]) -> dict[str, Scale]:
        """By the name of an amax. A layer of several sources reads them in one unit."""
        names = sorted({form.amax for form in file.graph.forms().values() if form.amax})
        forms, whole = file.graph.forms(), set[str]()
        for node in layers:
            read = {str(forms[name].amax) for name in node.inputs if forms[name].amax}
            if len({float(file.tensors[name]) for name in read}) > 1:
                whole |= read
        exact = names if self.dtype == torch.float16 else []
        return {
            name: scale_of(self.vectors[name], ACTIVATION if name in exact and name not in whole else None)
            for name in names
        }

    def _weight(self, file: PackedFile, node: Layer, shapes: Mapping[str, Shape], device: torch.device) -> Weight:
        names = weight_names(node)
        if node.precision == "fp16":
            kept = file.tensors[names[0]].to(device, self.dtype)
            return Weight(kept.permute(weight_order(node, kept.ndim)), 1.0)
        codes, scales, amax = (file.tensors[name].to(device) for name in names)
        axis = -1 if isinstance(node, Linear) else 1
        channels = sum(shapes[name][axis] for name in node.inputs)
        packed = Nvfp4Tensor(codes, scales, amax, torch.Size(weight_shape(file.graph, node, channels)), node.e4m3_max)
        read = self.scales[str(file.graph.forms()[node.inputs[0]].amax)]
        if self.dtype != torch.float16:
            decoded, scale = packed.dequantize(self.dtype), 1.0
        else:
            unit = float(global_scale(amax, node.e4m3_max))
            if read.exponent is not None:
                unit *= float(global_scale(read.amax))
            # Both units together next below both global scales, so that the sum is rounded in the range of the output.
            low, high = EXPONENTS
            first = read.exponent or 0
            exponent = max(low, min(high, floor(log2(unit)) - first)) if unit > 0 else low
            whole = torch.full_like(amax, nvfp4_range(node.e4m3_max) * 2.0**exponent)
            decoded = replace(packed, amax=whole).dequantize(torch.float16)
            scale = unit / 2.0 ** (exponent + first)
        return Weight(decoded.permute(weight_order(node, decoded.ndim)), scale)


def is_channels_last(x: torch.Tensor) -> bool:
    """Whether a tensor is a feature map in channels_last, and not in NCHW as well."""
    layout = FORMATS.get(x.ndim)
    return layout is not None and x.is_contiguous(memory_format=layout) and not x.is_contiguous()


def in_channels_last(y: torch.Tensor) -> torch.Tensor:
    """`y`, written in channels_last where it is written at all.

    A compiler chooses the order in memory of what it writes by the operators that read it, and of a chain of elementwise
    operators, reshapes and reductions it often chose NCHW between two kernels that want NHWC: a copy in the order of NHWC
    says which. It is no kernel of its own, being elementwise.
    """
    if y.ndim not in FORMATS:
        return y
    pixels = torch.ops.aten.clone.default(y.movedim(1, -1), memory_format=torch.contiguous_format)
    return pixels.movedim(-1, 1)


def _has_kernel(node: Node) -> bool:
    """Whether a node is a norm whose statistics a kernel of this package takes."""
    return isinstance(node, GroupNormReLU) or (isinstance(node, Norm) and node.op != "layer_norm")


def only_moves(node: Node, form: Form, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a node moves whole blocks of a packed form: then its inputs are quantised, of which there is less.

    Nearest resizing and concatenation of whole blocks: a block is 16 channels of one pixel.
    """
    if form.amax is None or form.axis != "channels" or form.pooled:
        return False
    if isinstance(node, Resize):
        return node.mode.startswith("nearest")
    return isinstance(node, Concat) and node.dim == 1 and all(x.shape[1] % NVFP4_BLOCK == 0 for x in inputs)


def _is_pointwise(node: Conv2d, weight: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a convolution is a GEMM of its pixels, and no kernel for small K computes it."""
    outputs, channels, *taps = weight.shape
    one = math.prod((*taps, *node.stride, node.groups)) == 1 and not any(node.padding)
    small = small_k.runs(x.device) and node.op == "conv2d" and small_k.takes(channels, outputs, (1, 1))
    return one and not small


def _is_depthwise(node: Conv2d, weight: torch.Tensor) -> bool:
    single = node.op == "conv2d" and node.groups == weight.shape[0] > 1 and weight.shape[1] == 1
    return single and weight.shape[2] * weight.shape[3] <= MAX_TAPS


def trace(writer: Writer, inputs: Sequence[torch.Tensor]) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The graph of a network for inputs of these sizes, and the tensors that it takes before them."""
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors = writer.tensors()
    names = list(tensors)

    def run(*arguments: torch.Tensor) -> list[torch.Tensor]:
        read = dict(zip(names, arguments[: len(names)], strict=True))
        return writer.outputs(read, arguments[len(names) :])

    with torch.no_grad():
        module = make_fx(run, pre_dispatch=True)(*tensors.values(), *inputs)
        return module, _folded(module, list(tensors.values()))


def _folded(module: fx.GraphModule, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Compute once what depends on tensors of the file alone; the tensors that are left, in the order of placeholders.

    Casts of biases, positions of a resize, tables of relative positions: a compiler would compute them in every pass, in
    kernels of their own where a library's GEMM reads them.
    """
    graph = module.graph
    places = [node for node in graph.nodes if node.op == "placeholder"]
    known: dict[fx.Node, torch.Tensor] = dict(zip(places, tensors, strict=False))
    for node in graph.nodes:
        if node.op == "get_attr":
            known[node] = getattr(module, node.target)
        if node.op != "call_function" or any(each not in known for each in node.all_input_nodes):
            continue
        read = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        value = node.target(*read[0], **read[1])
        most = max(SMALL, *(known[each].numel() for each in node.all_input_nodes), 0)
        if isinstance(value, torch.Tensor) and value.numel() <= most:
            known[node] = value
    first = next(node for node in places if node not in known)
    needed = [node for node in known if any(user not in known for user in node.users)]
    kept: dict[fx.Node, torch.Tensor] = {}
    while needed:
        node = needed.pop()
        if node in kept or node not in known:
            continue
        if _is_view(node, known):
            del known[node]  # stays in the graph: what it is a view of is taken instead
            needed += node.all_input_nodes
        else:
            kept[node] = known[node]
    for number, node in enumerate(kept):
        with graph.inserting_before(first):
            place = graph.placeholder(f"tensor_{number}")
        place.meta = dict(node.meta)
        node.replace_all_uses_with(place, delete_user_cb=lambda user: user not in known)
    for node in reversed(list(known)):
        graph.erase_node(node)
    module.recompile()
    return list(kept.values())


def _is_view(node: fx.Node, known: Mapping[fx.Node, torch.Tensor]) -> bool:
    """Whether a known tensor shares the memory of what it is made of."""
    memory = known[node].untyped_storage().data_ptr()
    return any(known[each].untyped_storage().data_ptr() == memory for each in node.all_input_nodes)


SMALL = 1 << 16  # elements of a tensor that is computed once even if it is larger than what it is made of
OPTIONS: dict[str, Any] = {
    # An activation is written where nodes of the file end, not in the middle of one: the sum of a depthwise convolution.
    "realize_acc_reads_threshold": 256,
    "realize_opcount_threshold": 1024,
    "assert_indirect_indexing": False,  # indices are the graph's own: positions of a resize, of a table
    "coordinate_descent_tuning": False,
}


def compile_program(
    writer: Writer, inputs: Sequence[torch.Tensor], options: Mapping[str, Any] | None = None
) -> Callable[..., list[torch.Tensor]]:
    """What computes the outputs for inputs of these sizes; compiled here, in a minute where nothing is in the cache."""
    from torch._inductor import standalone_compile

    module, tensors = trace(writer, inputs)
    with torch.no_grad():
        compiled = standalone_compile(
            module,
            [*tensors, *inputs],
            dynamic_shapes="from_example_inputs",
            options={"config_patches": {**OPTIONS, **(options or {})}},
        )

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(compiled(*tensors, *inputs))

    return run
