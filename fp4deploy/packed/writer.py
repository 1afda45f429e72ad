"""Writes a packed network down as ATen operators on decoded values, in forms that a compiler fuses.

    writer = Writer(file, device, torch.float16)
    outputs = writer.outputs(writer.tensors(), [image])

The nodes of the file become the operators that `operators.compute` calls, or others of the same numbers that compile
to less code: norms, activations, additions, resizing, concatenation and quantisation then become part of the kernel
that writes what a GEMM or a convolution reads (`program`). Called without a compiler it is the reference of what is
compiled.

**Layers.** What a layer in NVFP4 reads are decoded values (`fusion.values`), in FP16 or BF16 times a power of two, in
which they are exact. Its weight is decoded once, times another. cuBLAS and cuDNN sum in FP32; what the powers of two
leave of both global scales multiplies the sum: a number in [1, 2), unless scales are very small or large. So operands
are those of the file, bit for bit, and a sum differs by its order and, for a convolution, by one rounding to FP16.

A layer in W4A8, FP8 or INT8 reads a plain activation and quantises it (`fusion.eight_bits`). Both operands are exact in
BF16; the sum is FP32 and multiplied with both scales before it is rounded.

**Precision between layers.** In FP16 what lies between two layers is computed in FP32 and rounded where it is written.
Run node by node, every node rounds; the compiled network is the closer one to the numbers of a CPU, which are FP32.
What is computed with numbers that FP16 does not hold is written in FP32 (`wide`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F

from fp4deploy.formats import EIGHT_BITS, Nvfp4Tensor, global_scale
from fp4deploy.formats.constants import NVFP4_BLOCK, nvfp4_range
from fp4deploy.fusion.concatenate import concatenate
from fp4deploy.fusion.eight_bits import codes, mxfp8_values
from fp4deploy.fusion.group_norm import group_norm_map
from fp4deploy.fusion.layer_norm import layer_norm_values
from fp4deploy.fusion.resize import interpolate_linear, interpolate_nearest
from fp4deploy.fusion.values import EXPONENTS, Scale, scale_of, values
from fp4deploy.fusion.windows import MAX_POOL_TAPS, MAX_TAPS, depthwise_conv2d, max_pool2d
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
    Pad,
    Permute,
    Pool,
    Repeat,
    Reshape,
    Resize,
    Roll,
    Select,
    Slice,
    Take,
    constants_of,
    quantizes_itself,
    weight_names,
)
from fp4deploy.packed.operators import Context, compute, positions_of, read_tensors
from fp4deploy.packed.own_quantizer import own_weight
from fp4deploy.packed.row_norms import row_norms
from fp4deploy.packed.shapes import Shape, shapes_of, weight_order, weight_shape
from fp4deploy.packed.wide import wide_activations
from fp4deploy.plugins.gemm.convolution.depthwise import in_order
from fp4deploy.plugins.gemm.convolution.operators import own_kernel
from fp4deploy.plugins.quantize import norm_pack as _norm_pack  # noqa: F401 - registers norm_coefficients
from fp4deploy.plugins.quantize.layout import CHANNELS_LAST
from fp4deploy.rest import rest_of

Key = str | tuple[str, str]  # a tensor of the file; what is made of one of a layer, or of an amax
Tensors = dict[Key, torch.Tensor]
LAYOUT = (Flip, Permute, Repeat, Reshape, Roll, Select, Slice, Take)  # nodes that write no feature map
# Elements from which kernels of this package take the statistics of a norm. Measured fact: one H200, torch 2.11,
# 2026-11-29: of [1, 64, 64, 256] 12.6 us against 8.2 of the compiler's, of [1, 352, 480, 32] 19.1 against 20.3, of
# [16, 352, 480, 32] 146 against 166; of sixteen sizes two, InstanceNorms of 2^24 and 2^26, are on the other side.
LARGE_MAP = 1 << 22
ACTIVATION = -12  # exponent of the unit of activations: what is left for weights keeps their product in FP16's range


@dataclass(frozen=True, eq=False)
class Weight:
    """A layer's weight as torch's operator takes it; unit: what one of its values stands for.

    read, scales: of a layer in FP8 or INT8: the scale of its input, and float32 [O], both scales of each output.
    """

    values: torch.Tensor
    unit: float = 1.0
    read: float = 1.0
    scales: torch.Tensor | None = None


class Writer:
    """Writes the nodes of a packed file as operators, for activations of one dtype.

    device: where the tensors lie; dtype: float16 or bfloat16, in which decoded operands go by powers of two, or
        float32.
    """

    def __init__(self, file: PackedFile, device: torch.device, dtype: torch.dtype) -> None:
        self.graph, self.forms, self.dtype = file.graph, file.graph.forms(), dtype
        self.wide = wide_activations(self.graph, file.tensors, rest_of(dtype))
        self.narrow = dtype != torch.float32
        self.rows = row_norms(file.graph, self.wide, dtype, device)
        layers = [node for node in file.graph.nodes if isinstance(node, Layer)]
        held = {name for node in layers for name in weight_names(node)} - constants_of(file.graph)
        self.vectors = read_tensors(file.graph, file.tensors, held, device, dtype)
        self.scales = self._scales(file, layers)
        shapes = shapes_of(file.graph)
        self.weights = {node.layer: self._weight(file, node, shapes, device) for node in layers}
        self.positions, self.device = positions_of(file.graph, device), device
        last = {name: number for number, node in enumerate(file.graph.nodes) for name in node.inputs}
        last |= {each.activation: len(file.graph.nodes) for each in file.graph.outputs}
        self.last_read = [  # by each node: what is freed then
            [name for name in dict.fromkeys(node.inputs) if last[name] == number]
            for number, node in enumerate(file.graph.nodes)
        ]
        self.convolved = {name for node in layers if not isinstance(node, Linear) for name in node.inputs}
        # Python's numbers by a layer's first output: no tensor is read while a graph is traced.
        self.units = {node.outputs[0].name: self._unit(node) for node in layers}
        self.factors = self._factors(layers, {each.activation for each in file.graph.outputs})

    def tensors(self) -> Tensors:
        """Everything that the operators read besides the inputs, by name."""
        named: Tensors = {("weight", name): weight.values for name, weight in self.weights.items()}
        named |= {("scales", name): each.scales for name, each in self.weights.items() if each.scales is not None}
        for amax, scale in self.scales.items():
            named |= {("sixth", amax): scale.sixth, ("encode", amax): scale.encode}
        named.update(self.vectors.items())
        return named

    def outputs(self, tensors: Tensors, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of the network, from `tensors()` and inputs of the sizes that are to be written down."""
        # A tensor; a tuple of the two parts of a sum that the LayerNorm which reads it first adds up; or a list of the
        # parts of a concatenation that a layer reads.
        live: dict[str, Any] = {}
        sizes = {
            f"{each.name}.{axis}": size
            for each, x in zip(self.graph.inputs, inputs, strict=True)
            for axis, size in enumerate(x.shape)
        }
        for each, x in zip(self.graph.inputs, inputs, strict=True):
            if each.dtype != "int64":
                x = encode_input(x).to(self.dtype) if self.graph.digits else x.to(self.dtype)
            live |= {form.name: self._form(x, form, tensors) for form in each.outputs}
        for number, node in enumerate(self.graph.nodes):
            first, found = node.outputs[0].name, [live[name] for name in node.inputs]
            read = [part for each in found for part in (each if isinstance(each, list) else [each])]
            if first in self.rows.norms:
                live |= self._row_norm(cast(Norm, node), read[0], tensors)
            elif first in self.rows.sums and read[0].shape == read[1].shape:
                live[first] = (read[0], read[1])
            for name in self.last_read[number]:
                live.pop(name)
            if first in live:
                continue
            dtype = self.dtype
            if self.wide:
                dtype = torch.float32 if self._is_wide(node) else dtype
                read = [x.to(dtype) if x.is_floating_point() else x for x in read]
            context = Context(tensors.__getitem__, sizes, self.positions, dtype, self.device)
            early = [form for form in node.outputs if only_moves(node, form, read)]
            for form in early:
                moved = [self._form(x, form, tensors) for x in read]
                joins = isinstance(node, Concat)
                live[form.name] = moved if joins else in_channels_last(self._compute(node, moved, context))
            if len(early) == len(node.outputs):
                continue
            y = self._layer(node, read, tensors) if isinstance(node, Layer) else self._compute(node, read, context)
            written = {form.name for form in node.outputs}
            is_map = any(map(is_channels_last, read)) and not isinstance(node, LAYOUT)
            if y.is_floating_point() and (is_map or written & self.convolved):
                y = in_channels_last(y.to(dtype))
            live |= {form.name: self._form(y, form, tensors) for form in node.outputs if form not in early}
        return [live[each.activation] for each in self.graph.outputs]

    def _is_wide(self, node: Node) -> bool:
        return any(form.name in self.wide for form in node.outputs)

    def _form(self, y: torch.Tensor, form: Form, tensors: Tensors) -> torch.Tensor:
        """A plain activation in one of its forms."""
        x = F.max_pool2d(y, 2) if form.pooled else y
        if not x.is_floating_point():
            return x
        if form.amax is not None:
            return self._quantized(x, form, tensors)
        return x.to(torch.float32 if form.name in self.wide else self.dtype)

    def _row_norm(self, node: Norm, x: object, tensors: Tensors) -> dict[str, torch.Tensor]:
        """A LayerNorm of an activation, or of two that are to be added up: its outputs, and the sum."""
        first, second = x if isinstance(x, tuple) else (x, None)
        second = None if second is None else second.contiguous()
        form = next(form for form in node.outputs if form.amax and form.axis == "last" and not form.pooled)
        weight, bias = (None if node.layer is None else tensors[f"{node.layer}.{part}"] for part in ("weight", "bias"))
        plain = len(node.outputs) > 1
        scale = self._scale(str(form.amax), tensors)
        total, y, q = layer_norm_values(first.contiguous(), second, weight, bias, scale, node.eps, plain)
        written = {each.name: q if each is form else self._form(y, each, tensors) for each in node.outputs}
        return written if second is None else written | {node.inputs[0]: total}

    def _quantized(self, x: torch.Tensor, form: Form, tensors: Tensors) -> torch.Tensor:
        return values(x, self._scale(str(form.amax), tensors), 1 if form.axis == "channels" else -1, self.dtype)

    def _scale(self, name: str, tensors: Tensors) -> Scale:
        sixth, encode = tensors["sixth", name], tensors["encode", name]
        return replace(self.scales[name], sixth=sixth, encode=encode, amax=tensors[name])

    def _layer(self, node: Layer, inputs: list[torch.Tensor], tensors: Tensors) -> torch.Tensor:
        weight, scale = tensors["weight", node.layer], self.units[node.outputs[0].name]
        bias = tensors[node.bias] if node.bias else None
        if node.outputs[0].name in self.factors:
            scale, bias = 1.0, None
        if quantizes_itself(node):
            return self._quantizing(node, inputs, weight, bias, tensors.get(("scales", node.layer)))
        if isinstance(node, Linear):
            return self._linear(node, inputs[0], weight, bias, scale)
        x = inputs[0] if len(inputs) == 1 else concatenate([x.movedim(1, -1) for x in inputs]).movedim(-1, 1)
        if isinstance(node, Conv2d) and _is_of_patches(node, weight, x):
            rows, filters = _patches(x.movedim(1, -1), weight.shape[2:]), weight.movedim(1, -1).flatten(1)
            return self._linear(node, rows, filters, bias, scale).movedim(-1, 1)
        return self._convolution(cast("Conv2d | ConvTranspose2d", node), x, weight, bias, scale)

    def _convolution(
        self,
        node: Conv2d | ConvTranspose2d,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """Bias and ReLU are the kernel's own where it is of this package and nothing multiplies its sum.

        Else they are part of what reads it: torch adds a bias to cuDNN's result in a pass of its own (88 of 1034 us of
        a ConvNeXt, one image, one H200, torch 2.11, 2026-11-29).
        """
        relu, whole = isinstance(node, Conv2d) and node.relu, scale == 1
        if isinstance(node, Conv2d) and _is_depthwise(node, weight) and math.prod(weight.shape[2:]) <= MAX_TAPS:
            y = depthwise_conv2d(x, weight, node.stride, node.padding, node.dilation) * scale
        else:
            within = whole and _has_own_kernel(node, weight, x.device)
            beyond = node.output_padding if isinstance(node, ConvTranspose2d) else [0] * len(node.stride)
            transposed = isinstance(node, ConvTranspose2d)
            places = (node.stride, node.padding, node.dilation, beyond, node.groups, transposed, relu and within)
            y = torch.ops.fp4deploy.convolution(x.movedim(1, -1), weight, bias if within else None, *places)
            y = y.movedim(-1, 1)
            if within or (whole and bias is None and not relu):
                return y
            y = y if whole else y.float() * scale
        y = y if bias is None else y + bias.view(-1, *(1,) * (y.ndim - 2))
        return in_channels_last((y.relu() if relu else y).to(self.dtype))

    def _quantizing(
        self,
        node: Layer,
        inputs: list[torch.Tensor],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scales: torch.Tensor | None,
    ) -> torch.Tensor:
        """A layer that quantises what it reads, as `own_quantizer.multiply`; a linear one is a convolution of rows."""
        linear, read = isinstance(node, Linear), self.weights[node.layer].read
        axis = -1 if linear else 1
        if scales is None:
            parts = [mxfp8_values(x, axis) for x in inputs]
        else:
            parts = [codes(x, read, cast(str, node.precision)) for x in inputs]
        pixels = [x.movedim(axis, -1) for x in parts]
        x = pixels[0] if len(pixels) == 1 else concatenate(pixels)
        if linear:
            rows, places = x.reshape(1, -1, x.shape[-1]), ([1], [0], [1], [0], 1, False)
            y = torch.ops.fp4deploy.wide_convolution(rows, weight[..., None], *places).view(*x.shape[:-1], len(weight))
        else:
            place = cast("Conv2d | ConvTranspose2d", node)
            beyond = place.output_padding if isinstance(place, ConvTranspose2d) else [0] * len(place.stride)
            geometry = (place.stride, place.padding, place.dilation, beyond, place.groups)
            y = torch.ops.fp4deploy.wide_convolution(x, weight, *geometry, isinstance(place, ConvTranspose2d))
        y = y if scales is None else y * scales
        y = y if bias is None else y + bias
        y = (y.relu() if getattr(node, "relu", False) else y).to(self.dtype)
        return y if linear else y.movedim(-1, 1)

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
        if _normalizes_maps(node) and x.ndim in CHANNELS_LAST and x.dtype != torch.float32:
            return self._normalized(cast("Norm | GroupNormReLU", node), x, context)
        pools = isinstance(node, Pool) and node.op == "max_pool" and len(node.kernel) == 2 and not node.ceil_mode
        if pools and math.prod(cast(Pool, node).kernel) <= MAX_POOL_TAPS:
            node = cast(Pool, node)
            return max_pool2d(x, node.kernel, node.stride, node.padding, node.dilation)
        if isinstance(node, Concat) and node.dim == 1 and any(map(is_channels_last, inputs)):
            return torch.cat([x.movedim(1, -1) for x in inputs], -1).movedim(-1, 1)  # in channels_last
        if isinstance(node, Pad) and not any(context.sizes_of(node.pad)):
            return x
        if isinstance(node, Resize) and node.mode != "bicubic":
            size = None if node.size is None else context.sizes_of(node.size)
            if node.mode.startswith("nearest"):
                return interpolate_nearest(x, size, node.scale, node.mode == "nearest-exact")
            return interpolate_linear(x, size, node.scale, node.align_corners)
        return compute(node, inputs, context)

    def _normalized(self, node: Norm | GroupNormReLU, x: torch.Tensor, context: Context) -> torch.Tensor:
        """A GroupNorm or InstanceNorm of a feature map or volume: its affine map, by kernels if it is large, applied.

        Of x / s for a factor s, which the norm cancels: its bias is divided by s, its epsilon by the square.
        """
        channels, (factor, name) = x.shape[1], self.factors.get(node.inputs[0], (1.0, None))
        groups = channels if isinstance(node, Norm) and node.op == "instance_norm" else node.groups
        name = node.bias if isinstance(node, GroupNormReLU) and node.bias else name
        bias = context.tensor(name) / factor if name else None
        weight, beta = (
            torch.full((channels,), value, device=x.device)
            if node.layer is None
            else context.tensor(f"{node.layer}.{part}")
            for part, value in (("weight", 1.0), ("bias", 0.0))
        )
        pixels = x.movedim(1, -1)
        rows = pixels.flatten(1, -3)  # of all slices
        arguments = (bias, weight, beta, groups, node.eps / factor**2)
        if x.numel() < LARGE_MAP:
            pair = group_norm_map(rows.flatten(1, 2), *arguments)
        else:
            pair = torch.ops.fp4deploy.norm_coefficients(rows, *arguments).unbind(1)
        a, b = (each.view(-1, *(1,) * (x.ndim - 2), channels) for each in pair)
        y = (pixels.to(torch.float32) * a + b).movedim(-1, 1)
        return y.relu() if isinstance(node, GroupNormReLU) else y

    def _factors(self, layers: Sequence[Layer], kept: set[str]) -> dict[str, tuple[float, str | None]]:
        """By activation: what its layer's sum is not multiplied with, and the bias that is not added to it, since only
        norms by kernels read it.

        Both in a pass of their own took 450 of 3980 us of a BasicUNet, 16 images (one H200, torch 2.11, 2026-11-29).
        """
        factors = {}
        for node in layers:
            name = node.outputs[0].name
            unit = self.units[name]
            readers = [each for each in self.graph.nodes if name in each.inputs]
            alone = len(node.outputs) == 1 and node.outputs[0].amax is None and name not in kept and bool(readers)
            convolution = isinstance(node, Conv2d | ConvTranspose2d) and len(node.stride) > 1
            rectified = isinstance(node, Conv2d) and node.relu
            normalized = all(_normalizes_maps(each) and not self._is_wide(each) for each in readers)
            second = node.bias and any(isinstance(each, GroupNormReLU) and each.bias for each in readers)
            if alone and convolution and not rectified and normalized and not second and unit:
                factors[name] = unit, node.bias
        return factors if self.narrow else {}

    def _scales(self, file: PackedFile, layers: Sequence[Layer]) -> dict[str, Scale]:
        """By the name of an amax. A layer of several sources reads them in one unit."""
        whole = set[str]()
        names = sorted({form.amax for form in self.forms.values() if form.amax})
        for node in layers:
            read = {str(self.forms[name].amax) for name in node.inputs if self.forms[name].amax}
            if len({float(file.tensors[name]) for name in read}) > 1:
                whole |= read
        exact = names if self.narrow else []
        return {
            name: scale_of(self.vectors[name], ACTIVATION if name in exact and name not in whole else None)
            for name in names
        }

    def _unit(self, node: Layer) -> float:
        """What a layer's sum of decoded operands is multiplied with."""
        if node.precision != "nvfp4" or not self.narrow:
            return 1.0
        read = self.scales[str(self.forms[node.inputs[0]].amax)]
        source = 1.0 if read.exponent is None else float(global_scale(read.amax)) / 2.0**read.exponent
        return self.weights[node.layer].unit * source

    def _weight(self, file: PackedFile, node: Layer, shapes: Mapping[str, Shape], device: torch.device) -> Weight:
        names = weight_names(node)
        axis = -1 if isinstance(node, Linear) else 1
        channels = sum(shapes[name][axis] for name in node.inputs)
        if quantizes_itself(node):
            parts = [file.tensors[name].to(device) for name in names]
            own = own_weight(node, parts, weight_shape(file.graph, node, channels))
            operand = own.values.to(torch.bfloat16)
            if own.scales is None or own.amax is None:
                return Weight(operand)
            given = EIGHT_BITS[node.precision].scale(own.amax)
            outputs = shapes[node.outputs[0].name][axis]
            return Weight(operand, read=float(given), scales=given * own.scales.repeat(outputs // len(own.scales)))
        if node.precision != "nvfp4":
            kept = file.tensors[names[0]].to(device, self.dtype)
            kept = kept.permute(weight_order(node, kept.ndim))
            return Weight(in_order(kept) if isinstance(node, Conv2d) and _is_depthwise(node, kept) else kept)
        elements, scales, amax = (file.tensors[name].to(device) for name in names)
        packed = Nvfp4Tensor(
            elements, scales, amax, torch.Size(weight_shape(file.graph, node, channels)), node.e4m3_max
        )
        if not self.narrow:
            decoded, unit = packed.dequantize(self.dtype), 1.0
        else:
            # Both units together next below both global scales, so that the sum is rounded in the range of the output.
            read = self.scales[str(self.forms[node.inputs[0]].amax)]
            first, scale = read.exponent or 0, float(global_scale(amax, node.e4m3_max))
            both = scale if read.exponent is None else scale * float(global_scale(read.amax))
            low, high = EXPONENTS
            exponent = max(low, min(high, math.floor(math.log2(both)) - first)) if both > 0 else low
            whole = torch.full_like(amax, nvfp4_range(node.e4m3_max) * 2.0**exponent)
            decoded, unit = replace(packed, amax=whole).dequantize(self.dtype), scale / 2.0**exponent
        return Weight(decoded.permute(weight_order(node, decoded.ndim)), unit)


def is_channels_last(x: torch.Tensor) -> bool:
    """Whether a tensor is a feature map in channels_last, and not in NCHW as well."""
    layout = CHANNELS_LAST.get(x.ndim)
    return layout is not None and x.is_contiguous(memory_format=layout) and not x.is_contiguous()


def in_channels_last(y: torch.Tensor) -> torch.Tensor:
    """`y`, written in channels_last where it is written at all.

    A compiler chooses the order in memory of what it writes by the operators that read it, and of a chain of
    elementwise operators, reshapes and reductions it often chose NCHW between two kernels that want NHWC: FPN(resnet50)
    took 4.15 ms instead of 1.10 (1 x 512x1024, one H200, torch 2.11, 2026-11-28). A copy in the order of NHWC says
    which. It is no kernel of its own, being elementwise.
    """
    if y.ndim not in CHANNELS_LAST:
        return y
    pixels = torch.ops.aten.clone.default(y.movedim(1, -1), memory_format=torch.contiguous_format)
    return pixels.movedim(-1, 1)


def _normalizes_maps(node: Node) -> bool:
    """Whether a node is a norm that is computed as an affine map of a feature map."""
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


def _is_of_patches(node: Conv2d, weight: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a convolution is a GEMM of patches that do not overlap, such as pixels, and no kernel of this package is.

    cuDNN has no good kernel for them: the first layer of a ViT-S (16x16, eight images of 224x224) took 62 us, the 8x8
    of a SegFormer 22 (one H200, torch 2.11, 2026-11-29), for work of 2 us. As GEMMs, the whole ViT
    took 0.65 ms instead of 0.73, the SegFormer, one image of 512x512, 0.59 instead of 0.63.
    """
    apart = list(weight.shape[2:]) == list(node.stride) and node.groups == 1
    plain = not any(node.padding) and (set(node.dilation) == {1} or set(node.stride) == {1})
    return apart and plain and not _has_own_kernel(node, weight, x.device)


def _patches(pixels: torch.Tensor, taps: Sequence[int]) -> torch.Tensor:
    """[N, *S, C] as [N, *(S / K), K * ... * C], a patch in the order of a filter; parts of patches are left out."""
    sizes = [size // k for size, k in zip(pixels.shape[1:-1], taps, strict=True)]
    for axis, (size, k) in enumerate(zip(sizes, taps, strict=True), 1):
        pixels = pixels.narrow(axis, 0, size * k)
    split = pixels.reshape(len(pixels), *(each for pair in zip(sizes, taps, strict=True) for each in pair), -1)
    places, within = range(1, 2 * len(taps), 2), range(2, 2 * len(taps) + 1, 2)
    return split.permute(0, *places, *within, split.ndim - 1).flatten(len(taps) + 1)


def _has_own_kernel(node: Conv2d | ConvTranspose2d, weight: torch.Tensor, device: torch.device) -> bool:
    places = (node.stride, node.padding, node.dilation)
    return node.op == "conv2d" and own_kernel(device, weight, *places, node.groups) is not None


def _is_depthwise(node: Conv2d, weight: torch.Tensor) -> bool:
    return node.op == "conv2d" and node.groups == weight.shape[0] > 1 and weight.shape[1] == 1
