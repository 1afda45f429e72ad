"""Recognise and check the FP4 layers of a canonical NVFP4 ONNX graph.

One quantised layer is three chains that meet in a compute node (all names start with the torch module's name):

    input    x [N,C,H,W] -> Reshape [N,C,H*W] -> TRT_FP4DynamicQuantize(axis 1, global scale) -> (codes, block scales)
             -> DequantizeLinear(scales) -> DequantizeLinear(codes, axis 1, blocks of 16) -> Cast -> Reshape [N,C,H,W]
    weight   codes FLOAT4E2M1 [O, KH*KW*C], block scales FLOAT8E4M3FN [O, KH*KW*C/16], global scale FLOAT []
             -> DequantizeLinear twice -> Cast -> Reshape [O,KH,KW,C] -> Transpose
    compute  Conv, ConvTranspose or MatMul

The blocks of both operands run along the input channels of one tap, the axis the hardware contracts. Checks happen
here, once, before a compiler sees the file: TensorRT answers a malformed block with an internal error far from its
cause.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from fp4deploy.errors import InputError
from fp4deploy.export.onnx.canonical import GEMM_OPS
from fp4deploy.export.onnx.quantize_function import DEQUANTIZE_OPS, QUANTIZE_OP, STATIC_QUANTIZE_OPS
from fp4deploy.formats import NVFP4_BLOCK

SCALE_TYPE_E4M3 = int(ir.DataType.FLOAT8E4M3FN)
OPEN = 0  # height or width of a layer's input, where the graph takes any
_SHAPE_OPS = ("Cast", "Reshape", "Transpose", "Identity", *DEQUANTIZE_OPS)
_REEXPORT = "Export the model again: fp4deploy export --format onnx"


@dataclass(frozen=True)
class Fp4Layer:
    """One layer whose weights are FP4 codes and whose input is quantised while the model runs.

    `half` is the dequantised weight as stored, FP16 or what else the rest is (`dtype`), [O, KH*KW*C]; `shape` is (C, H,
    W), H and W `OPEN` where the graph takes any, None for all but Conv2d and ConvTranspose2d.
    """

    name: str
    kind: str
    compute: ir.Node
    codes: ir.Value
    scales: ir.Value
    half: ir.Value
    quantize: ir.Node
    dequantized: ir.Value
    shape: tuple[int, int, int] | None
    kernel: tuple[int, ...]
    out_channels: int

    @property
    def is_open(self) -> bool:
        """Height and width of the input are open."""
        return self.shape is not None and OPEN in self.shape[1:]

    @property
    def dtype(self) -> ir.DataType:
        """The type of the rest, in which the layer computes where it does not multiply codes."""
        return self.half.dtype or ir.DataType.FLOAT16

    @property
    def source(self) -> ir.Value:
        """The value of that type that is quantised, [N,C,H,W] for convolutions with C already a multiple of 16.

        It is read from the graph each time: lowering one layer replaces the value that the next one quantises.
        """
        value = self.quantize.inputs[0]
        producer = value.producer() if value is not None else None
        if producer is not None and producer.op_type == "Reshape":
            value = producer.inputs[0]
        assert value is not None
        return value


def constant_ints(value: ir.Value | None) -> list[int] | None:
    """Integers of an initialiser or Constant, or None where the value is computed."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return [int(item) for item in tensor.numpy().reshape(-1)] if tensor is not None else None


def attribute(node: ir.Node, name: str, default: list[int] | int | str) -> list[int] | int | str:
    """Attribute of a node in plain Python, or `default`."""
    found = node.attributes.get(name)
    if found is None:
        return default
    return list(found.value) if isinstance(default, list) else found.value


def chain(value: ir.Value | None, through: Collection[str] = ()) -> Iterator[ir.Node]:
    """Nodes from `value` upwards through reshaping, dequantising and operators of `through`, nearest first."""
    node = value.producer() if value is not None else None
    while node is not None and (node.op_type in _SHAPE_OPS or node.op_type in through):
        yield node
        above = node.inputs[0]
        node = above.producer() if above is not None else None


def weight_initializer(node: ir.Node) -> ir.Value | None:
    """Initialiser that a compute node's second operand comes from, or None where both operands are computed.

    Files of other tools may hold the weight unquantised and quantise it in the graph.
    """
    if len(node.inputs) < 2:
        return None
    value = node.inputs[1]
    for above in chain(value):
        value = above.inputs[0]
    quantizer = value.producer() if value is not None else None
    if quantizer is not None and quantizer.op_type in STATIC_QUANTIZE_OPS:
        value = quantizer.inputs[0]
    return value if value is not None and value.is_initializer() else None


def layer_name(node: ir.Node, weight: ir.Value | None) -> str:
    """Torch module name of a compute node, from its weight's name; the node's own name where there is no weight."""
    name = (weight.name or "") if weight is not None else ""
    for suffix in (".weight.codes", ".weight"):
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return node.name or node.op_type


def is_fp4(model: ir.Model) -> bool:
    """Whether any initialiser or quantiser of the model is FP4."""
    if any(value.dtype == ir.DataType.FLOAT4E2M1 for value in model.graph.initializers.values()):
        return True
    return any(node.op_type == QUANTIZE_OP for node in model.graph)


def find_fp4_layers(model: ir.Model) -> list[Fp4Layer]:
    """All FP4 layers in graph order, each checked.

    Raises:
        InputError: a layer breaks a rule of the canonical graph; the message names the layer and the rule.
    """
    for node in model.graph:
        if node.op_type == QUANTIZE_OP:
            _check_quantize(node)
    layers = []
    for node in model.graph:
        weight = weight_initializer(node) if node.op_type in GEMM_OPS else None
        if weight is not None and weight.dtype == ir.DataType.FLOAT4E2M1:
            layers.append(_read_layer(node, weight))
    for node in model.graph:
        if node.op_type == "DequantizeLinear":
            _check_unclaimed(node)
    return layers


class NamedLayers(InPlacePass):
    """A pass over layers of these names."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = frozenset(names)


class LowerNamedLayers(NamedLayers):
    """Lower the FP4 layers of these names, one after the other."""

    @abstractmethod
    def lower(self, graph: ir.Graph, layer: Fp4Layer) -> None:
        """Lower one layer, in place."""

    def call(self, model: ir.Model) -> PassResult:
        layers = [layer for layer in find_fp4_layers(model) if layer.name in self.names]
        for layer in layers:
            self.lower(model.graph, layer)
        return PassResult(model, bool(layers))


def _check_quantize(node: ir.Node) -> None:
    name = (node.name or node.outputs[0].name or QUANTIZE_OP).removesuffix(".quantize").removesuffix(".input")
    if attribute(node, "block_size", NVFP4_BLOCK) != NVFP4_BLOCK or attribute(node, "scale_type", 0) != SCALE_TYPE_E4M3:
        raise InputError(
            f"Layer {name}: {QUANTIZE_OP} needs block_size {NVFP4_BLOCK} and scale_type {SCALE_TYPE_E4M3} "
            f"(FLOAT8E4M3FN). {_REEXPORT}"
        )
    scale = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
    if scale is None or scale.size != 1:
        raise InputError(
            f"Layer {name}: the global scale of {QUANTIZE_OP} must be one constant (amax / (6 * 448)), "
            f"not a value computed while the model runs. {_REEXPORT}"
        )
    shape = _static_shape(node.inputs[0])
    if shape is None:
        return
    if len(shape) not in (2, 3):
        raise InputError(
            f"Layer {name}: the input of {QUANTIZE_OP} has {len(shape)} dimensions, and the engine takes 2 or 3. "
            f"Reshape [N,C,H,W] to [N,C,H*W] before it. {_REEXPORT}"
        )
    axis = attribute(node, "axis", -1)
    assert isinstance(axis, int)
    if axis % len(shape) not in (len(shape) - 1, len(shape) - 2):
        raise InputError(f"Layer {name}: blocks must run along the last axis or the one before, not axis {axis}.")
    check_multiple(name, "input channels (K)", shape[axis])


def _check_unclaimed(node: ir.Node) -> None:
    """Blocks of any FP4 constant, also of one that no layer above was seen to read."""
    codes = node.inputs[0]
    shape = _static_shape(codes) if codes is not None and codes.is_initializer() else None
    axis = attribute(node, "axis", 1)
    assert isinstance(axis, int)
    if codes is None or codes.dtype != ir.DataType.FLOAT4E2M1 or not shape:
        return
    if "block_size" in node.attributes and -len(shape) <= axis < len(shape):
        check_multiple(layer_name(node, codes), "contracted weights (K)", shape[axis])


def check_multiple(name: str, what: str, size: int | None) -> None:
    """Refuse an extent that blocks of 16 do not fill.

    Raises:
        InputError: the message names the layer, the extent and the next multiple.
    """
    if size is None or size <= 0 or size % NVFP4_BLOCK:
        found = "not known at build time" if size is None or size <= 0 else f"{size}, not a multiple of {NVFP4_BLOCK}"
        raise InputError(
            f"Layer {name}: its {what} are {found}, and NVFP4 shares one scale among blocks of {NVFP4_BLOCK} along "
            f"that axis. Pad the channels with zeros to {-(-(size or 1) // NVFP4_BLOCK) * NVFP4_BLOCK}, or exclude the "
            "layer from quantisation and export again; fp4deploy check lists every layer."
        )


def _static_shape(value: ir.Value | None) -> list[int | None] | None:
    """Shape of a constant, of the Reshape that makes the value, or of its type; unknown extents are None."""
    if value is None:
        return None
    if value.const_value is not None:  # what is stored, whatever the file's value_info says of it
        return list(value.const_value.shape.numpy())
    producer = value.producer()
    if producer is not None and producer.op_type == "Reshape":
        target = constant_ints(producer.inputs[1])
        if target is not None:
            return [size if size > 0 else None for size in target]
    if value.shape is None:
        return None
    return [size if isinstance(size, int) else None for size in value.shape]


def _read_layer(node: ir.Node, codes: ir.Value) -> Fp4Layer:
    name = layer_name(node, codes)
    kind = GEMM_OPS[node.op_type]
    dequantize, half, ohwi = _read_weight_chain(name, node)
    scales = _scales_initializer(name, dequantize)
    rows, size = _check_blocks(name, dequantize, codes, scales)
    quantize, dequantized = _read_input_chain(name, node)
    if kind == "Linear":
        return Fp4Layer(name, kind, node, codes, scales, half, quantize, dequantized, None, (1, 1), rows)
    if ohwi is not None and len(ohwi) in (3, 5):  # of one or three axes: no lowering but decoded to FP16
        _check_contents(name, ohwi, rows, size)
        form = f"{node.op_type}{len(ohwi) - 2}d"
        return Fp4Layer(name, form, node, codes, scales, half, quantize, dequantized, None, tuple(ohwi[1:-1]), rows)
    if ohwi is None or len(ohwi) != 4:
        raise InputError(f"Layer {name}: its FP4 weight is not reshaped to [O,KH,KW,C] (OHWI order). {_REEXPORT}")
    out, height, width, channels = ohwi
    _check_contents(name, ohwi, rows, size)
    shape = _input_shape(name, node, channels)
    return Fp4Layer(name, kind, node, codes, scales, half, quantize, dequantized, shape, (height, width), out)


def _check_contents(name: str, ohwi: list[int], rows: int, size: int) -> None:
    check_multiple(name, "input channels (K)", ohwi[-1])
    if (ohwi[0], math.prod(ohwi[1:])) != (rows, size):
        raise InputError(f"Layer {name}: FP4 weight [{rows}, {size}] does not hold OHWI {ohwi}. {_REEXPORT}")


def _read_weight_chain(name: str, node: ir.Node) -> tuple[ir.Node, ir.Value, list[int] | None]:
    """(the block DequantizeLinear, the 2-D FP16 weight below it, the [O,KH,KW,C] it is reshaped to)."""
    half: ir.Value | None = node.inputs[1]
    ohwi: list[int] | None = None
    for above in chain(node.inputs[1]):
        if above.op_type in ("Reshape", "Transpose"):
            half = above.inputs[0]
            ohwi = constant_ints(above.inputs[1]) if above.op_type == "Reshape" else ohwi
        if above.op_type == "DequantizeLinear":
            assert half is not None
            return above, half, ohwi
    raise InputError(f"Layer {name}: its FP4 codes are not dequantised before {node.op_type}. {_REEXPORT}")


def _scales_initializer(name: str, dequantize: ir.Node) -> ir.Value:
    producer = dequantize.inputs[1].producer() if len(dequantize.inputs) > 1 and dequantize.inputs[1] else None
    scales = producer.inputs[0] if producer is not None and producer.op_type == "DequantizeLinear" else None
    if scales is None or not scales.is_initializer() or scales.dtype != ir.DataType.FLOAT8E4M3FN:
        raise InputError(
            f"Layer {name}: the block scales of its weight must be constant FLOAT8E4M3FN values under a global scale. "
            f"{_REEXPORT}"
        )
    return scales


def _check_blocks(name: str, dequantize: ir.Node, codes: ir.Value, scales: ir.Value) -> tuple[int, int]:
    """(O, K) of a stored weight whose blocks of 16 run along K."""
    shape = _static_shape(codes) or []
    if len(shape) != 2 or shape[0] is None or attribute(dequantize, "axis", 1) not in (1, -1):
        raise InputError(
            f"Layer {name}: FP4 codes must be stored as [O, KH*KW*C] with blocks along axis 1. {_REEXPORT}"
        )
    rows, size = shape
    check_multiple(name, "contracted weights (K)", size)
    assert rows is not None
    assert size is not None
    if attribute(dequantize, "block_size", 0) != NVFP4_BLOCK or _static_shape(scales) != [rows, size // NVFP4_BLOCK]:
        raise InputError(
            f"Layer {name}: needs one block scale for {NVFP4_BLOCK} codes, [{rows}, {size // NVFP4_BLOCK}]. {_REEXPORT}"
        )
    return rows, size


def _read_input_chain(name: str, node: ir.Node) -> tuple[ir.Node, ir.Value]:
    """(the dynamic quantiser, the dequantised FP16 value in the quantiser's own shape) of a layer's input."""
    dequantized: ir.Value | None = node.inputs[0]
    first = dequantized.producer() if dequantized is not None else None
    if first is not None and first.op_type == "Pad" and (mode := attribute(first, "mode", "constant")) != "constant":
        raise InputError(
            f"Layer {name} pads its quantised input (mode '{mode}'), and engines quantise right before they multiply. "
            f"Keep it in FP16: prepare(model, exclude='{name}'), or model.exclude in the configuration."
        )
    for above in chain(dequantized):
        if above.op_type in ("Reshape", "Transpose"):
            dequantized = above.inputs[0]
        if above.op_type == "DequantizeLinear":
            codes = above.inputs[0]
            quantize = codes.producer() if codes is not None else None
            if quantize is not None and quantize.op_type == QUANTIZE_OP and dequantized is not None:
                return quantize, dequantized
    raise InputError(
        f"Layer {name}: its weight is FP4 but its input is not quantised by {QUANTIZE_OP}, so no engine can "
        f"compute it in FP4. {_REEXPORT}"
    )


def _input_shape(name: str, node: ir.Node, channels: int) -> tuple[int, int, int]:
    """(C, H, W) of a convolution's input, from the Reshape that restores [N,C,H,W]."""
    value = node.inputs[0]
    shape = _static_shape(value) or []
    if len(shape) != 4 or any(size is None for size in shape[1:]):
        return channels, OPEN, OPEN
    c, h, w = (int(size or 0) for size in shape[1:])
    groups = attribute(node, "group", 1) if node.op_type == "Conv" else 1  # a transposed weight holds all channels
    assert isinstance(groups, int)
    if c != groups * channels:
        each = f", in {groups} groups" if groups > 1 else ""
        raise InputError(f"Layer {name}: its input has {c} channels and its weight {channels}{each}. {_REEXPORT}")
    return c, h, w
