"""FP16 for what an FP32 file of another tool leaves unquantised.

Compilers of strongly typed networks multiply an FP32 layer in FP32: an INT8 file whose head is FP32 may be slower than
the same network in FP16. Q/DQ pairs and their scales stay FP32, so that no code has another scale, and so does an
operator that ONNX does not define for FP16, that has a graph of its own, or whose constants FP16 does not hold:

    x FP32 -> Q -> DQ -> Cast -> Conv in FP16 -> Cast -> Q ...

Source: ultralytics 26159, an INT8 engine that was slower than FP16 by its FP32 head.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass

from fp4deploy.export.onnx.writer import NodeWriter
from fp4deploy.rest import FP16

HALF, FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT
QUANTIZERS = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Cast")


def rest_in_fp16(model: ir.Model) -> list[str]:
    """Change a file with inferred types in place; the names of the operators that are FP16 now, in the graph's order.

    >>> import onnx_ir as ir
    >>> text = '<ir_version: 10, opset_import: ["" : 21]> net (float[2] x) => (float[2] y) { y = Relu(x) }'
    >>> model = ir.from_onnx_text(text)
    >>> rest_in_fp16(model)
    ['y']
    >>> [node.op_type for node in model.graph]
    ['Cast', 'Relu', 'Cast']
    """
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    graph, changed = model.graph, list[str]()
    converted: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
    narrowed: set[ir.Value] = set()

    def as_type(value: ir.Value, dtype: ir.DataType, before: ir.Node | None) -> ir.Value:
        if (value, dtype) not in converted:
            writer = NodeWriter(graph, str(value.name), before=before, dtype=dtype)
            role = dtype.name.lower()
            if value.const_value is not None:
                converted[value, dtype] = writer.constant(role, value.const_value.numpy().astype(dtype.numpy()))
            else:
                converted[value, dtype] = writer.add("Cast", role, value, shape=value.shape, to=int(dtype))
        return converted[value, dtype]

    for node in list(graph):
        places = _halved(node, model.opset_imports.get("", 0))
        results = [value for value in node.outputs if places and value.dtype == FLOAT]
        if results or any(value is not None and value.dtype == FLOAT for value in (node.inputs[at] for at in places)):
            changed.append(node.name or str(node.outputs[0].name))
        for place, value in enumerate(node.inputs):
            if value is not None and value.dtype == FLOAT and place in places:
                node.replace_input_with(place, as_type(value, HALF, node))
            elif value is not None and value in narrowed and place not in places:
                node.replace_input_with(place, as_type(value, FLOAT, node))
        for value in results:
            value.dtype = HALF
            narrowed.add(value)
    for place, value in enumerate(graph.outputs):
        if value in narrowed:
            name, value.name = value.name, f"{value.name}.half"
            graph.outputs[place] = as_type(value, FLOAT, None)
            graph.outputs[place].name = name
    RemoveUnusedNodesPass()(model)
    for (value, _), other in converted.items():  # ledgers name layers by their weights
        if value.name not in graph.initializers and other.name in graph.initializers:
            other.name = value.name
    return changed


def _halved(node: ir.Node, opset: int) -> set[int]:
    """Places of the operands that an operator reads in FP16; none where it stays as it is."""
    inner = any(each.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for each in node.attributes.values())
    if node.op_type in QUANTIZERS or node.domain not in ("", "ai.onnx") or inner:
        return set()
    schema = onnx.defs.get_schema(node.op_type, opset)
    types = {each.type_param_str: each.allowed_type_strs for each in schema.type_constraints}
    letters = {  # of a type of its own, such as that of Resize's scales, no letter stands in the schema
        place: schema.inputs[min(place, len(schema.inputs) - 1)].type_str
        for place, value in enumerate(node.inputs)
        if value is not None and value.dtype in (HALF, FLOAT)
    }
    places = {place for place, letter in letters.items() if letter in types}
    used = {letters[place] for place in places} | ({schema.outputs[0].type_str} & {*types})
    constants = [each.const_value for each in node.inputs if each is not None and each.const_value is not None]
    numbers = [torch.from_numpy(np.array(each.numpy())) for each in constants if each.dtype == FLOAT]
    is_defined = all("tensor(float16)" in types[letter] for letter in used)
    return places if is_defined and all(map(FP16.holds_tensor, numbers)) else set()
