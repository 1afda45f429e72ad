"""The planned precision of each torch layer of a lowered graph, which the ledger compares with the actual one.

Layers are found by the weights their Conv, ConvTranspose, MatMul, Gemm or plugin reads, and by the names that the
exporter gave to nodes and constants. Layers without weights to multiply (GroupNorm) are known from the exporter's
metadata alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import onnx_ir as ir

from fp4deploy.export.ledger.ledger import PlannedLayer
from fp4deploy.export.lowering.conv_transpose import phases
from fp4deploy.export.lowering.fp8 import why_not_fp8
from fp4deploy.export.lowering.gemm import geometry, is_upsampling
from fp4deploy.export.lowering.linear import PART
from fp4deploy.export.lowering.pattern import Fp4Layer, attribute, chain, layer_name, weight_initializer
from fp4deploy.export.onnx.canonical import GEMM_OPS
from fp4deploy.export.onnx.quantize_function import DEQUANTIZE_OPS, SELECTING, STATIC_QUANTIZE_OPS
from fp4deploy.plugins.tensorrt.definitions import NAMESPACE, QUANTIZE

MARK = ".plugin"  # between a layer's name and the role of a constant of its plugin

_SAME_SHAPE = ("Relu", "GroupNormalization", "InstanceNormalization", "Identity", "Cast", "Sigmoid")
_CODES = {ir.DataType.FLOAT8E4M3FN: "FP8", ir.DataType.INT8: "INT8"}
_PRECISIONS = {ir.DataType.FLOAT16: "FP16", ir.DataType.FLOAT: "FP32", ir.DataType.BFLOAT16: "BF16"}


def count_macs(model: ir.Model) -> dict[str, int]:
    """Multiply-accumulates for one image of every layer that multiplies; 0 where a shape is unknown."""
    macs: dict[str, int] = {}
    for node in model.graph:
        if node.op_type in GEMM_OPS:
            macs[_name(node)] = macs.get(_name(node), 0) + _macs(node)
    return macs


def is_sized(model: ir.Model) -> bool:
    """Whether all extents are known at which weights are applied."""
    pixels = [_pixels(node) for node in model.graph if node.op_type in GEMM_OPS]
    return all(each is not None and all(isinstance(size, int) for size in each) for each in pixels)


def plan_layers(
    model: ir.Model,
    requests: dict[str, dict[str, str]],
    fp4_layers: dict[str, Fp4Layer],
    lowered: dict[str, str],
    macs: dict[str, int],
    conv: str,
    plugins: Collection[str] = (),
    fp8: Mapping[str, str] | None = None,
    inputs: Mapping[str, str] | None = None,
    decoded: Mapping[str, str] | None = None,
    widened: Collection[str] = (),
) -> tuple[PlannedLayer, ...]:
    """Plan of every layer of a lowered model, those that multiply first, in graph order.

    Args:
        requests: torch layer name -> {kind, precision, reason} as the exporter wrote it.
        fp4_layers: FP4 layers by name, as they were before lowering.
        lowered: name -> reason of the layers that became GEMMs.
        macs: name -> multiply-accumulates for one image, counted before lowering.
        plugins: names of the layers that became plugins.
        fp8: name -> reason of the FP4 layers that became FP8 convolutions.
        inputs: name -> operator whose result is quantised (`placement`), before lowering.
        decoded: name -> reason of the FP4 layers whose weights were decoded (`decode`).
        widened: names of nodes between Casts to FP32, which the compiler removes: it multiplies in BF16.
    """
    computing: dict[str, list[ir.Node]] = {}
    for node in model.graph:
        own = plugin_layer(node) or _layer_of_part(node, fp4_layers)
        if own is not None:
            computing.setdefault(own, []).append(node)
        elif node.op_type in GEMM_OPS and (_name(node) in requests or weight_initializer(node) is not None):
            computing.setdefault(_name(node), []).append(node)
    names = [*computing, *(name for name in requests if name not in computing)]
    owned = _nodes_by_layer(model, computing, names)
    plan = []
    for name in names:
        nodes, request = computing.get(name, []), requests.get(name, {})
        layer, first = fp4_layers.get(name), nodes[0] if nodes else None
        requested = request.get("precision") or ("FP4" if layer is not None else _asked(first) or "FP16")
        form, compute, weights, reason = _forecast(
            layer, first, requested, lowered.get(name), conv, request.get("reason", ""), name in plugins
        )
        if conv == "plugin" and layer is not None and layer.dtype != ir.DataType.FLOAT16:
            reason = f"{reason}; no plugin, since plugins read and write FP16"
        if fp8 is not None and name in fp8:
            form, compute, weights, reason = "fp8", "FP8", "FP8", fp8[name]
        if decoded is not None and name in decoded:
            high = high_precision(fp4_layers[name].dtype)
            form, compute, weights, reason = "plain", high, high, decoded[name]
        if first is not None and first.name in widened:
            compute, weights = ("BF16" if each == "FP32" else each for each in (compute, weights))
        parts = {_name(node) for node in nodes} - {name}
        if len(parts) > 1:
            reason = f"{reason}; in {len(parts)} parts, because its result is read in parts"
        kind = request.get("kind") or (layer.kind if layer else GEMM_OPS[first.op_type] if first is not None else "")
        plan.append(
            PlannedLayer(
                name=name,
                kind=kind,
                requested=requested,
                form=form,
                compute=compute,
                weights=weights,
                reason=reason,
                macs=macs.get(name, 0),
                nodes=owned[name],
                compute_nodes=tuple(node.name or "" for node in nodes),
                input=(inputs or {}).get(name, ""),
                largest=request.get("largest", ""),
            )
        )
    return tuple(plan)


def plugin_layer(node: ir.Node) -> str | None:
    """The layer that a GEMM plugin of a lowered graph computes; None for every other node."""
    if node.domain != NAMESPACE or node.op_type == QUANTIZE.name:
        return None
    names = [value.name or "" for value in node.inputs if value is not None]
    return next(name.rpartition(f"{MARK}.")[0] for name in names if f"{MARK}.weight_codes" in name)


def _layer_of_part(node: ir.Node, fp4_layers: Collection[str]) -> str | None:
    """The layer whose GEMM is written in parts, of which this node is one."""
    name = _name(node).rpartition(PART)[0] if node.op_type in GEMM_OPS else ""
    return name if name in fp4_layers else None


def _name(node: ir.Node) -> str:
    return layer_name(node, weight_initializer(node))


def _macs(node: ir.Node) -> int:
    """Multiply-accumulates for one image; 0 where a shape is unknown."""
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if weight is None or weight.shape is None:
        return 0
    pixels = _pixels(node)
    kernel = math.prod(size for size in weight.shape if isinstance(size, int))
    return kernel * math.prod(size if isinstance(size, int) else 1 for size in pixels) if pixels is not None else 0


def _pixels(node: ir.Node) -> list[int | ir.SymbolicDim] | None:
    """Extents that a weight is applied at: output pixels of a convolution, input pixels of a transposed one."""
    if GEMM_OPS[node.op_type] == "Linear":
        shape = known_shape(node.inputs[0])
        return shape[1:-1] if shape is not None else None
    if node.op_type == "Conv" and node.outputs[0].shape is not None:
        return list(node.outputs[0].shape)[2:]
    shape = known_shape(node.inputs[0])
    if shape is None or node.op_type == "ConvTranspose":
        return shape[2:] if shape is not None else None
    strides = attribute(node, "strides", [1, 1])
    assert isinstance(strides, list)
    return [
        -(-size // stride) if isinstance(size, int) else size for size, stride in zip(shape[2:], strides, strict=True)
    ]


def known_shape(value: ir.Value | None) -> list[int | ir.SymbolicDim] | None:
    """Shape of a value, looked for above operators that keep it (inference stops at GroupNormalization)."""
    while value is not None:
        if value.shape is not None:
            return list(value.shape)
        producer = value.producer()
        value = producer.inputs[0] if producer is not None and producer.op_type in _SAME_SHAPE else None
    return None


def _forecast(
    layer: Fp4Layer | None, node: ir.Node | None, requested: str, gemm: str | None, conv: str, kept: str, plugin: bool
) -> tuple[str, str, str, str]:
    """(form, planned compute precision, planned weight storage, reason) of one layer."""
    if layer is None:
        dtype = node.outputs[0].dtype if node is not None else None
        high = high_precision(dtype)
        stored = weight_initializer(node) if node is not None else None
        eight = _asked(node) if stored is not None else ""
        if node is not None and eight and eight in (requested, _CODES.get(stored.dtype)):  # type: ignore[union-attr, arg-type]
            problem = why_not_fp8(_kernel(node), node.op_type == "ConvTranspose", eight)
            reason = "; ".join(text for text in (kept, problem) if text)
            return eight.lower(), high if problem else eight, eight, reason
        if requested in ("FP4", *_CODES.values()):
            return "plain", requested, requested, f"the file holds no {requested} weights for this layer"
        return "plain", high, high, kept
    if plugin:
        return "plugin", "FP4", "FP4", f"{layer.kind} in FP4 as a plugin, because TensorRT has no FP4 convolution"
    if gemm is not None:
        return "gemm", "FP4", "FP4", gemm
    if layer.kind == "Linear":
        return "gemm", "FP4", "FP4", "linear layer as an FP4 GEMM"
    if is_upsampling(layer):
        why = f"kept as a convolution by --conv {conv}; --conv auto makes it an FP4 GEMM"
    elif geometry(layer) is not None or phases(layer) is not None:
        why = "TensorRT has no FP4 convolution: FP4 weights are decoded for it; --conv gemm makes it FP4 im2col"
    else:
        why = "TensorRT has no FP4 convolution, and this form is not a single GEMM"
    return "qdq", high_precision(layer.dtype), "FP4", why


def high_precision(dtype: ir.DataType | None) -> str:
    """The name of a type that is not quantised; FP16 where it is not known."""
    return _PRECISIONS.get(dtype, "FP16") if dtype is not None else "FP16"


def _kernel(node: ir.Node) -> list[int]:
    """Extents of a convolution's kernel; [] of a GEMM and where they are not known."""
    shape = node.inputs[1].shape if node.inputs[1] is not None and node.op_type.startswith("Conv") else None
    return [size for size in shape[2:] if isinstance(size, int)] if shape is not None else []


def _asked(node: ir.Node | None) -> str:
    """FP8 or INT8 where both operands of a GEMM or convolution are decoded from it, as other tools ask for it."""
    found = {_decoded_from(value) for value in node.inputs[:2]} if node is not None and len(node.inputs) > 1 else set()
    return found.pop() if len(found) == 1 else ""


def _decoded_from(value: ir.Value | None) -> str:
    codes = next((node.inputs[0] for node in chain(value, SELECTING) if node.op_type in DEQUANTIZE_OPS), None)
    if codes is None:
        return ""
    producer, dtype = codes.producer(), codes.dtype
    if producer is not None and producer.op_type in STATIC_QUANTIZE_OPS and len(producer.inputs) > 2:
        zero = producer.inputs[2]
        dtype = zero.dtype if zero is not None and zero.dtype is not None else dtype
    return _CODES.get(dtype, "") if dtype is not None else ""


def _nodes_by_layer(
    model: ir.Model, computing: dict[str, list[ir.Node]], names: list[str]
) -> dict[str, tuple[str, ...]]:
    """ONNX node names of every layer: computing it, named after it, reading its constants, or feeding its weight."""
    owned: dict[str, dict[str, None]] = {name: {} for name in names}
    for name, nodes in computing.items():
        for node in nodes:
            owned[name].update({(above.name or ""): None for above in (node, *chain(node.inputs[1]))})
    for node in model.graph:
        constants = [value.name or "" for value in node.inputs if value is not None and value.is_initializer()]
        prefixes = (prefix for text in (node.name or "", *constants) for prefix in _prefixes(text))
        owner = next((prefix for prefix in prefixes if prefix in owned), None)
        if owner is not None:
            owned[owner][node.name or ""] = None
    return {name: tuple(nodes) for name, nodes in owned.items()}


def _prefixes(text: str) -> list[str]:
    """Dotted (or slashed) prefixes of a name, longest first: "a.b.weight" -> "a.b.weight", "a.b", "a"."""
    parts = text.replace("/", ".").strip(".").split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
