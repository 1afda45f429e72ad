"""Operands of the GEMMs and convolutions of an ONNX graph, whoever wrote it.

An operand is followed from the operator back through casts and changes of layout to the DequantizeLinear that decodes
it, or to a float tensor. What matters for hardware is where the scale's blocks run once the operand has arrived: a
tensor core applies one scale to neighbours along the axis that is summed over. So every element is given the number of
its block, the numbers go through the same Reshape and Transpose as the data, and the axes along which neighbours share
a number are the block's axes. A tool may block a convolution's weight along the kernel's width; it looks right in
simulation, and no hardware can multiply it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from fp4deploy.export.onnx.canonical import GEMM_OPS
from fp4deploy.export.onnx.quantize_function import (
    DEQUANTIZE_OPS,
    QUANTIZE_OP,
    SELECTING,
    STATIC_QUANTIZE_OPS,
    TRT_DOMAIN,
)
from fp4deploy.export.onnx.trt_operators import with_shapes
from fp4deploy.precisions import OF_ENGINES

FORMATS = {
    "FLOAT4E2M1": "FP4",
    "FLOAT8E4M3FN": "FP8",
    "FLOAT8E5M2": "FP8",
    "INT8": "INT8",
    "UINT8": "INT8",
    "INT4": "INT4",
    "UINT4": "INT4",
    "FLOAT16": "FP16",
    "BFLOAT16": "BF16",
    "FLOAT": "FP32",
    "DOUBLE": "FP64",
}
QUANTIZED = (*OF_ENGINES, "INT4")
FAKE_QUANTIZE = {"TRT_FP4QDQ": "FP4"}  # quantise and dequantise in one node, in ModelOpt's files before conversion
LAYOUT = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Pad")
PASSING = (*LAYOUT, "Cast", "Identity")
LARGEST = 2**26  # elements whose blocks are followed
UNKNOWN_SIZE = 16  # stands for a dynamic extent: no block is decided by it


@dataclass(frozen=True)
class Operand:
    """One operand as it reaches its operator.

    format: FP4, FP8, INT8, INT4, FP16, BF16, FP32; "" where the file does not tell.
    scaling: "tensor", "channel", "block of 16"; "" where nothing is quantised.
    axes: where blocks run, such as "input channels"; "" where there are no blocks or they cannot be followed.
    scales: format of the block scales: E4M3, E8M0, FP16, FP32.
    dynamic: the scale is computed from the values at run time.
    contracted: blocks run along the contraction axis alone; None without blocks, or where they cannot be followed.
    axis, rank, extent: the blocked axis where the tensor is quantised (negative: from the end), the number of its axes
        and the axis' size there; 0 where unknown.
    shifted: the codes have a zero point other than 0.
    fixable: `audit --fix` writes the codes without a zero point: they are constants or a quantiser's, of constant
        scales that are not of blocks.
    """

    format: str
    scaling: str = ""
    axes: tuple[str, ...] = ()
    scales: str = ""
    dynamic: bool = False
    contracted: bool | None = None
    axis: int = 0
    rank: int = 0
    extent: int = 0
    tensorrt: bool = False
    shifted: bool = False
    fixable: bool = False

    @property
    def quantized(self) -> bool:
        return self.format in QUANTIZED

    def __str__(self) -> str:
        parts = [self.format or "unknown"]
        if self.scaling:
            where = f" along {' and '.join(self.axes)}" if self.axes else ""
            parts.append(f"{self.scaling}{where}")
        if self.scales:
            parts.append(f"{self.scales} scales")
        return ", ".join(parts)


@dataclass(frozen=True)
class Multiplication:
    """One GEMM or convolution: its node, operator, operands, and the shape of its weight (() where unknown).

    bias: format of a bias whose type is not that of the operands, or whose codes are decoded; "" where they agree.
    decoded: the bias is; `constant_bias`: of constant codes, so that `audit --fix` writes its values.
    """

    name: str
    operator: str
    weight: Operand
    activation: Operand
    weight_shape: tuple[int, ...]
    bias: str = ""
    decoded: bool = False
    constant_bias: bool = False

    @property
    def requested(self) -> str:
        """Precision that the file asks for: that of both operands, or of the weight alone ("FP4 weights")."""
        weight, activation = self.weight.format, self.activation.format
        if weight == activation:
            return weight
        if self.weight.quantized and not self.activation.quantized:
            return f"{weight} weights"
        return f"{weight} x {activation}"


def multiplications(model: onnx.ModelProto) -> list[Multiplication]:
    """Every GEMM and convolution of a graph, in its order; subgraphs and functions are not entered.

    Integer operators that hold their scales themselves (QLinearConv, MatMulInteger, ...) are listed as INT8.
    """
    graph = ir.from_proto(with_shapes(model)).graph
    found = []
    for number, node in enumerate(graph):
        if node.op_type in GEMM_OPS and len(node.inputs) > 1:
            found.append(_multiplication(node, number))
        elif node.op_type in INTEGER_OPS:
            name = node.name or f"{node.op_type}_{number}"
            integer = Operand("INT8", "tensor")
            found.append(Multiplication(name, node.op_type, integer, integer, ()))
        elif node.op_type == "MatMulNBits":
            bits = node.attributes["bits"].as_int() if "bits" in node.attributes else 4
            weight = Operand(f"INT{bits}", f"block of {node.attributes['block_size'].as_int()}")
            activation = Operand(_format(node.inputs[0]))
            found.append(Multiplication(node.name or str(number), node.op_type, weight, activation, ()))
    return found


INTEGER_OPS = ("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "QGemm")


def _multiplication(node: ir.Node, number: int) -> Multiplication:
    activation, weight = node.inputs[0], node.inputs[1]
    bias = node.inputs[2].producer() if len(node.inputs) > 2 and node.inputs[2] is not None else None
    decoder = bias if bias is not None and bias.op_type == "DequantizeLinear" else None
    return Multiplication(
        name=node.name or f"{node.op_type}_{number}",
        operator=node.op_type,
        weight=_operand(weight, *_weight_axes(node)),
        activation=_operand(activation, *_activation_axes(node)),
        weight_shape=_shape(weight),
        bias=_other_bias(node, decoder),
        decoded=decoder is not None,
        constant_bias=decoder is not None and "block_size" not in decoder.attributes and _constant(decoder, 0, 1),
    )


@dataclass(frozen=True)
class Reader:
    """An operator that reads FP4 values and multiplies nothing, such as a pooling."""

    name: str
    operator: str
    activation: Operand


def other_readers(model: onnx.ModelProto) -> list[Reader]:
    """Readers of FP4 activations that are no GEMM or convolution; ModelOpt's default settings quantise poolings."""
    found = []
    for node in ir.from_proto(with_shapes(model)).graph:
        if node.op_type in (*GEMM_OPS, *PASSING, *DEQUANTIZE_OPS) or not node.inputs:
            continue
        rank = len(_shape(node.inputs[0]))
        operand = _operand(node.inputs[0], [f"axis {axis}" for axis in range(rank)], rank - 1)
        if operand.format == "FP4":
            found.append(Reader(node.name or node.op_type, node.op_type, operand))
    return found


def _other_bias(node: ir.Node, decoder: ir.Node | None) -> str:
    if decoder is not None:
        codes = decoder.inputs[0]
        return codes.dtype.name if codes is not None and codes.dtype is not None else ""
    operand, bias = _format(node.inputs[0]), _format(node.inputs[2]) if len(node.inputs) > 2 else ""
    return bias if bias and operand and bias != operand else ""


def _weight_axes(node: ir.Node) -> tuple[list[str], int]:
    """(names of the weight's axes, which of them is contracted)."""
    rank = len(_shape(node.inputs[1])) or (2 if node.op_type in ("MatMul", "Gemm") else 4)
    kernel = _spatial("kernel", rank - 2)
    if node.op_type == "Conv":
        return ["output channels", "input channels", *kernel], 1
    if node.op_type == "ConvTranspose":
        return ["input channels", "output channels", *kernel], 0
    batch = [f"batch axis {axis}" for axis in range(rank - 2)]
    transposed = node.op_type == "Gemm" and "transB" in node.attributes and node.attributes["transB"].as_int() == 1
    names = (
        [*batch, "output features", "input features"] if transposed else [*batch, "input features", "output features"]
    )
    return names, rank - 1 if transposed else rank - 2


def _activation_axes(node: ir.Node) -> tuple[list[str], int]:
    rank = len(_shape(node.inputs[0])) or len(_shape(node.inputs[1])) or 2
    if node.op_type in ("Conv", "ConvTranspose"):
        return ["batch", "input channels", *_spatial("image", rank - 2)], 1
    rows = [f"row axis {axis}" for axis in range(rank - 1)]
    transposed = node.op_type == "Gemm" and "transA" in node.attributes and node.attributes["transA"].as_int() == 1
    return (["input features", "row axis 0"], 0) if transposed else ([*rows, "input features"], rank - 1)


def _spatial(what: str, count: int) -> list[str]:
    names = {1: ["width"], 2: ["height", "width"], 3: ["depth", "height", "width"]}
    return [f"{what} {name}" for name in names.get(count, [f"axis {axis}" for axis in range(max(count, 0))])]


def _operand(value: ir.Value | None, names: list[str], contracted: int) -> Operand:
    path: list[ir.Node] = []
    for node in _upwards(value):
        if node.op_type in FAKE_QUANTIZE:
            size = node.attributes["block_size"].as_int() if "block_size" in node.attributes else 16
            shape = _sizes(node.outputs[0])
            return _blocked(
                FAKE_QUANTIZE[node.op_type], "E4M3", size, -1, shape, path, names, contracted, dynamic=False
            )
        if node.op_type in DEQUANTIZE_OPS:
            found = _dequantized(node, path, names, contracted)
            selects = any(each.op_type in SELECTING for each in path)
            return Operand(_format(value)) if selects and found.scaling != "tensor" else found
        if node.op_type not in (*PASSING, *SELECTING):
            break
        path.append(node)
    return Operand(_format(value))


def _upwards(value: ir.Value | None) -> Iterator[ir.Node]:
    node = value.producer() if value is not None else None
    while node is not None:
        yield node
        above = node.inputs[0] if node.inputs else None
        node = above.producer() if above is not None else None


def _dequantized(node: ir.Node, path: list[ir.Node], names: list[str], contracted: int) -> Operand:
    codes, scale = node.inputs[0], node.inputs[1]
    producer = codes.producer() if codes is not None else None
    dynamic = producer is not None and producer.op_type == QUANTIZE_OP
    foreign = TRT_DOMAIN in (node.domain, producer.domain if producer is not None else "")
    form = "FP4" if dynamic else "FP8" if node.op_type != "DequantizeLinear" else _code_format(codes)
    size = node.attributes["block_size"].as_int() if "block_size" in node.attributes else 0
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    zero = _tensor(node, 2)
    shifted = zero is not None and bool(np.any(zero.numpy().astype(np.float32)))
    if not size:
        shape = _shape(scale)
        scaling = "channel" if math.prod(shape or (1,)) > 1 else "tensor"
        quantised = producer is not None and producer.op_type == "QuantizeLinear"
        fixable = _constant(node, 1) and (quantised or _constant(node, 0))
        return Operand(form, scaling, tensorrt=foreign, shifted=shifted, fixable=fixable)
    scales = "E8M0" if node.op_type == "TRT_MXFP8DequantizeLinear" else _scale_format(scale)
    blocked = _blocked(form, scales, size, axis, _sizes(codes), path, names, contracted, dynamic)
    return replace(blocked, tensorrt=foreign, shifted=shifted)


def _code_format(codes: ir.Value | None) -> str:
    """Format of codes: the type of the zero point that they were quantised with, else their own."""
    producer = codes.producer() if codes is not None else None
    if producer is not None and producer.op_type in STATIC_QUANTIZE_OPS and len(producer.inputs) > 2:
        return _format(producer.inputs[2]) or _format(codes)
    return _format(codes)


def _scale_format(scale: ir.Value | None) -> str:
    """Format of block scales: of the codes of a scale that is itself decoded, else of the scale."""
    producer = scale.producer() if scale is not None else None
    while producer is not None and producer.op_type == "Cast":
        scale = producer.inputs[0]
        producer = scale.producer() if scale is not None else None
    if producer is not None and producer.op_type == "DequantizeLinear":
        inner = producer.inputs[0]
        above = inner.producer() if inner is not None else None
        if above is not None and above.op_type == QUANTIZE_OP:
            return "E4M3"
        scale = inner
    dtype = scale.dtype.name if scale is not None and scale.dtype is not None else ""
    return {"FLOAT8E4M3FN": "E4M3", "FLOAT8E8M0": "E8M0"}.get(dtype, FORMATS.get(dtype, dtype))


def _blocked(
    form: str,
    scales: str,
    size: int,
    axis: int,
    shape: tuple[int, ...],
    path: Sequence[ir.Node],
    names: list[str],
    contracted: int,
    dynamic: bool,
) -> Operand:
    known = -len(shape) <= axis < len(shape)
    numbers = _arriving_blocks(shape, axis, size, path)
    along: list[int] = []
    if numbers is not None and numbers.ndim == len(names):
        along = [index for index in range(numbers.ndim) if _shared(numbers, index)]
    return Operand(
        form,
        f"block of {size}",
        axes=tuple(names[index] for index in along),
        scales=scales,
        dynamic=dynamic,
        contracted=along == [contracted] if along else None,  # none: a block holds one element
        axis=axis % len(shape) - len(shape) if known else 0,
        rank=len(shape) if known else 0,
        extent=shape[axis] if known else 0,
    )


def _arriving_blocks(shape: tuple[int, ...], axis: int, size: int, path: Sequence[ir.Node]) -> NDArray[Any] | None:
    """Number of its block of every element, where it arrives; None where that cannot be followed."""
    if not shape or math.prod(shape) > LARGEST or not -len(shape) <= axis < len(shape):
        return None
    axis %= len(shape)
    extents = list(shape)
    blocks = -(-extents[axis] // size)
    within = np.arange(extents[axis]) // size
    extents[axis] = 1
    others = np.arange(math.prod(extents), dtype=np.int64).reshape(extents)
    column = within.reshape([-1 if index == axis else 1 for index in range(len(shape))])
    numbers: NDArray[Any] = others * blocks + column
    for node in reversed(path):
        moved = _moved(numbers, node)
        if moved is None:
            return None
        numbers = moved
    return numbers


def _moved(x: NDArray[Any], node: ir.Node) -> NDArray[Any] | None:
    """What a change of layout does to `x`."""
    try:
        if node.op_type == "Transpose":
            order = node.attributes["perm"].as_ints() if "perm" in node.attributes else None
            return np.transpose(x, order)
        if node.op_type in ("Reshape", "Flatten", "Squeeze", "Unsqueeze"):
            target = _target(x, node)
            return None if target is None else x.reshape(target)
        if node.op_type == "Pad":
            return _pad(x, node)
    except (ValueError, IndexError):
        return None
    return x  # Cast, Identity


def _target(x: NDArray[Any], node: ir.Node) -> list[int] | None:
    """Shape that a Reshape, Flatten, Squeeze or Unsqueeze gives `x`."""
    if node.op_type == "Flatten":
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
        return [math.prod(x.shape[:axis]), -1]
    if node.op_type == "Reshape":
        given = _integers(node, 1)
        if given is None:
            shape = list(_sizes(node.outputs[0]))
            return shape if math.prod(shape) == x.size else None
        return [x.shape[index] if size == 0 else size for index, size in enumerate(given)]
    shape = list(_sizes(node.outputs[0]))
    return shape if shape and math.prod(shape) == x.size else None


def _pad(x: NDArray[Any], node: ir.Node) -> NDArray[Any] | None:
    amounts = _integers(node, 1)
    if amounts is None or min(amounts) < 0 or (len(node.inputs) > 3 and node.inputs[3] is not None):
        return None
    rank = x.ndim
    return np.pad(x, [(amounts[axis], amounts[axis + rank]) for axis in range(rank)], constant_values=-1)


def _shared(numbers: NDArray[Any], axis: int) -> bool:
    """Whether neighbours along this axis are in one block; what was padded is in none."""
    below = [slice(None)] * numbers.ndim
    above = list(below)
    below[axis], above[axis] = slice(None, -1), slice(1, None)
    first = numbers[tuple(below)]
    return bool(((first == numbers[tuple(above)]) & (first >= 0)).any())


def _integers(node: ir.Node, at: int) -> list[int] | None:
    constant = _tensor(node, at)
    return None if constant is None else [int(size) for size in constant.numpy().reshape(-1)]


def _tensor(node: ir.Node, at: int) -> ir.TensorProtocol | None:
    """A constant operand, of an initializer or a Constant node."""
    value = node.inputs[at] if len(node.inputs) > at else None
    return ir.convenience.get_const_tensor(value) if value is not None else None


def _constant(node: ir.Node, *places: int) -> bool:
    return all(_tensor(node, at) is not None for at in places)


def _format(value: ir.Value | None) -> str:
    return FORMATS.get(value.dtype.name, value.dtype.name) if value is not None and value.dtype is not None else ""


def _shape(value: ir.Value | None) -> tuple[int, ...]:
    """Shape with `UNKNOWN_SIZE` for dynamic extents; () where the rank is unknown."""
    if value is None:
        return ()
    if value.shape is None:
        return tuple(value.const_value.shape.numpy()) if value.const_value is not None else ()
    return tuple(size if isinstance(size, int) else UNKNOWN_SIZE for size in value.shape)


def _sizes(value: ir.Value | None) -> tuple[int, ...]:
    """As `_shape`, with a batch of 1: blocks never cross items."""
    shape = _shape(value)
    dynamic = value is not None and value.shape is not None and shape and not isinstance(value.shape[0], int)
    return (1, *shape[1:]) if dynamic else shape
