"""What an ONNX file holds, layer by layer, read from the graph itself rather than from its metadata.

A layer is one of `GEMM_OPS` or a normalisation. From its weight input the graph is followed back through layout and
decoding operators to the constants: their element type says how the weight is stored. The layer is FP4 if the weight is
E2M1 (or INT8 holding twice its values, in the decomposed graph) and its input comes out of the FP4 quantiser.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from fp4deploy.errors import InputError
from fp4deploy.export.onnx.canonical import GEMM_OPS, LAYERS_KEY, foreign_graph, metadata_object, read_onnx
from fp4deploy.export.onnx.quantize_function import QUANTIZE_OP
from fp4deploy.export.onnx.trt_operators import with_shapes
from fp4deploy.models.card import CARD_KEY
from fp4deploy.system.schema import parse_json, validated

COLUMNS = ("layer", "kind", "precision", "weights", "weight shape", "input", "output", "bytes", "reason")
_NORMS = {"GroupNormalization", "InstanceNormalization", "BatchNormalization", "LayerNormalization"}
_LAYOUT = {"Reshape", "Pad", "Squeeze"}  # their further inputs are shapes
_PASSING = _LAYOUT | {"Transpose", "Cast", "DequantizeLinear", "Identity", "Mul", "Clip", "Sub", "Add"}
_INPUT_STEPS = 24  # nodes between a layer and its quantiser, at most (twenty in the decomposed graph)
_STORED = {
    "FLOAT4E2M1": "FP4",
    "FLOAT8E4M3FN": "FP8",
    "INT8": "INT8",
    "FLOAT16": "FP16",
    "BFLOAT16": "BF16",
    "FLOAT": "FP32",
}


@dataclass(frozen=True)
class OnnxLayer:
    """One layer of a file.

    kind: torch class name, or the ONNX operator in a foreign file.
    precision: what it computes in: FP4 (weight and input), FP4 weights (input not quantised), FP8, INT8, FP16, FP32.
    weights: how the weight is stored. bytes: of all its constants but shapes.
    shapes: () where the file does not tell; "N" for a dynamic size.
    """

    name: str
    kind: str
    precision: str
    weights: str
    weight_shape: tuple[int, ...]
    input_shape: tuple[int | str, ...]
    output_shape: tuple[int | str, ...]
    bytes: int
    reason: str


def inspect_onnx(path: Path) -> list[OnnxLayer]:
    """List the layers of an ONNX file in the order of its graph.

    Raises:
        InputError: the file is missing, truncated, or not ONNX.
    """
    with foreign_graph(path):
        return layers_of(read_onnx(path))


def describe_onnx(path: Path) -> tuple[dict[str, object], tuple[str, ...], list[tuple[object, ...]], str]:
    """(facts, column names, rows, closing line) of an ONNX file, for printing."""
    with foreign_graph(path):
        return _described(path)


def _described(path: Path) -> tuple[dict[str, object], tuple[str, ...], list[tuple[object, ...]], str]:
    model = read_onnx(path)
    layers = layers_of(model)
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    facts: dict[str, Any] = {
        "file": str(path),
        "bytes": Path(path).stat().st_size,
        "opset": opset,
        "ir_version": model.ir_version,
        "inputs": {value.name: _declared(value) for value in model.graph.input},
        "outputs": {value.name: _declared(value) for value in model.graph.output},
        "card": metadata_object(model, CARD_KEY) or {},
    }
    rows = [
        (each.name, each.kind, each.precision, each.weights, *map(_extents, (each.weight_shape, each.input_shape)),
         _extents(each.output_shape), each.bytes, each.reason)
        for each in layers
    ]  # fmt: skip
    fp4 = sum(layer.precision == "FP4" for layer in layers)
    return facts, COLUMNS, rows, f"{fp4} of {len(layers)} layers in FP4."


def layers_of(model: onnx.ModelProto) -> list[OnnxLayer]:
    """The layers of a model in memory, in the order of its graph."""
    planned = planned_layers(model)
    graph = ir.from_proto(with_shapes(model)).graph
    nodes = [node for node in graph if node.name in planned]
    if not nodes:
        nodes = [node for node in graph if node.op_type in GEMM_OPS.keys() | _NORMS and _owns_weight(node)]
    return [_layer(node, planned.get(node.name or "", {})) for node in nodes]


def planned_layers(model: onnx.ModelProto) -> dict[str, dict[str, str]]:
    """Torch layer name -> {kind, precision, reason} as the exporter wrote it; empty for foreign files."""
    text = next((entry.value for entry in model.metadata_props if entry.key == LAYERS_KEY), "{}")
    try:
        return validated(dict[str, dict[str, str]], parse_json(text, LAYERS_KEY), LAYERS_KEY)
    except InputError:
        return {}


def note_largest(model: onnx.ModelProto, largest: Mapping[str, float]) -> None:
    """Note in a file, in place, the largest magnitude of each layer's result, for the ledger of its engines."""
    planned = planned_layers(model)
    for name, layer in planned.items():
        if name in largest:
            layer["largest"] = f"{largest[name]:.6g}"
    entry = next((each for each in model.metadata_props if each.key == LAYERS_KEY), None)
    if entry is not None:
        entry.value = json.dumps(planned)


def _owns_weight(node: ir.Node) -> bool:
    return len(node.inputs) > 1 and bool(_constants(node.inputs[1]))


def _layer(node: ir.Node, plan: dict[str, str]) -> OnnxLayer:
    operands = [value for value in node.inputs[1:] if value is not None]
    weight = _constants(operands[0]) if operands else []
    constants = {id(value): value for operand in operands for value in _constants(operand)}
    stored = _stored(weight)
    reason = plan.get("reason", "")
    quantised = _is_quantised(node.inputs[0])
    return OnnxLayer(
        name=node.name or str(node.outputs[0].name),
        kind=plan.get("kind", node.op_type),
        precision=_precision(stored, quantised, plan),
        weights=stored,
        weight_shape=_weight_shape(operands, weight),
        input_shape=_shape(node.inputs[0]),
        output_shape=_shape(node.outputs[0]),
        bytes=sum(_bytes(value) for value in constants.values()),
        reason=reason,
    )


def _constants(value: ir.Value | None) -> list[ir.Value]:
    """Constants (shapes excepted) that a value is decoded from; [] where it depends on the model's input."""
    found: dict[int, ir.Value] = {}
    seen: set[int] = set()
    rest = [value]
    while rest:
        value = rest.pop()
        if value is None:
            return []
        if id(value) in seen:
            continue
        seen.add(id(value))
        if value.const_value is not None:
            found[id(value)] = value
            continue
        producer = value.producer()
        if producer is None or producer.op_type not in _PASSING or not producer.inputs:
            return []
        rest += reversed(producer.inputs[:1] if producer.op_type in _LAYOUT else producer.inputs)
    return list(found.values())


def _stored(weight: list[ir.Value]) -> str:
    names = [value.dtype.name for value in weight if value.dtype is not None]
    return next((label for name, label in _STORED.items() if name in names), ", ".join(names))


def _precision(stored: str, quantised: bool, plan: dict[str, str]) -> str:
    if stored in ("FP4", "INT8") and plan.get("precision") == "W4A8":
        return "W4A8"
    if stored == "INT8" and plan.get("precision") == "FP4":
        stored = "FP4"
    if stored == "FP4":
        return "FP4" if quantised else "FP4 weights"
    return stored or plan.get("precision", "")


def _is_quantised(value: ir.Value | None) -> bool:
    """Whether a value comes out of the FP4 quantiser, or of the E4M3 block scales of the decomposed graph."""
    reached = [value] if value is not None else []
    for _ in range(_INPUT_STEPS):
        producers = {node for node in (value.producer() for value in reached) if node is not None}
        if any(node.op_type == QUANTIZE_OP or _is_block_scale(node) for node in producers):
            return True
        passing = [node for node in producers if node.op_type in _PASSING]
        reached = [operand for node in passing for operand in node.inputs if operand is not None]
    return False


def _is_block_scale(node: ir.Node) -> bool:
    return node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT8E4M3FN


def _weight_shape(operands: list[ir.Value], weight: list[ir.Value]) -> tuple[int, ...]:
    value = operands[0] if operands else None
    shape = _shape(value)
    if value is not None and not shape and weight and weight[0].const_value is not None:
        shape = tuple(weight[0].const_value.shape.numpy())
    return tuple(size for size in shape if isinstance(size, int))


def _bytes(value: ir.Value) -> int:
    return value.const_value.nbytes if value.const_value is not None else 0


def _shape(value: ir.Value | None) -> tuple[int | str, ...]:
    if value is None or value.shape is None:
        return ()
    return tuple(size if isinstance(size, int) else str(size) for size in value.shape)


def _declared(value: onnx.ValueInfoProto) -> str:
    kind = value.type.tensor_type
    sizes = [size.dim_param or size.dim_value for size in kind.shape.dim]
    return f"{onnx.TensorProto.DataType.Name(kind.elem_type).lower()} {_extents(tuple(sizes))}"


def _extents(shape: tuple[int | str, ...]) -> str:
    return "x".join(map(str, shape))
