"""What a graph in BF16 has in FP32: its inputs and outputs, and operators that ONNX does not define for BF16.

    image FLOAT -> Cast -> BFLOAT16 ...                   numpy, which feeds every runtime, has no BF16
    x -> Cast -> Einsum in FLOAT -> Cast -> BFLOAT16      the operator's schema says which types it takes

Each such operator stands between Casts of its own; one after the other costs two Casts more than it must, which
compilers remove.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from fp4deploy.export.onnx.canonical import OPSET
from fp4deploy.export.onnx.writer import NodeWriter

NARROW, WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT
NARROW_NAME = "tensor(bfloat16)"


def is_undefined(node: ir.Node) -> bool:
    """Whether a node reads or writes BF16 where the operator's schema has no BF16."""
    if node.domain not in ("", "ai.onnx"):
        return False
    schema = onnx.defs.get_schema(node.op_type, OPSET)
    types = {each.type_param_str: each.allowed_type_strs for each in schema.type_constraints}
    pairs = [(value, _formal(schema.inputs, place)) for place, value in enumerate(node.inputs)]
    pairs += [(value, _formal(schema.outputs, place)) for place, value in enumerate(node.outputs)]
    return any(
        value is not None
        and value.dtype == NARROW
        and formal is not None
        and NARROW_NAME not in types.get(formal, [formal])
        for value, formal in pairs
    )


class WidenOperators(InPlacePass):
    """Casts around operators that do not take BF16; postcondition: `widened` has the names of their nodes."""

    def __init__(self, lacks_bf16: Callable[[ir.Node], bool] = is_undefined) -> None:
        """lacks_bf16: of a node; by default, that ONNX does not define it."""
        super().__init__()
        self.lacks_bf16 = lacks_bf16
        self.widened: list[str] = []

    def call(self, model: ir.Model) -> PassResult:
        for node in [each for each in model.graph if self.lacks_bf16(each)]:
            _widen(model.graph, node)
            self.widened.append(str(node.name))
        return PassResult(model, modified=bool(self.widened))


class WidenEnds(InPlacePass):
    """FP32 inputs and outputs where they are BF16, with a Cast behind and before each."""

    def call(self, model: ir.Model) -> PassResult:
        graph, modified = model.graph, False
        for value in [each for each in graph.inputs if each.dtype == NARROW]:
            readers = list(value.uses())
            cast = _cast(NodeWriter(graph, str(value.name), before=next(iter(graph))), "bf16", value, NARROW)
            for reader, place in readers:
                reader.replace_input_with(place, cast)
            value.dtype, modified = WIDE, True
        for place, value in enumerate(graph.outputs):
            if value.dtype == NARROW:
                name = value.name
                result = _cast(NodeWriter(graph, str(name), before=None), "fp32", value, WIDE)
                value.name, result.name = f"{name}.bf16", name
                graph.outputs[place], modified = result, True
        return PassResult(model, modified)


def _formal(parameters: Sequence[onnx.defs.OpSchema.FormalParameter], place: int) -> str | None:
    """The type, or the name of the types, of an operand; the last one may stand for several."""
    return parameters[min(place, len(parameters) - 1)].type_str if parameters else None


def _widen(graph: ir.Graph, node: ir.Node) -> None:
    writer = NodeWriter(graph, str(node.name), before=node)
    for place, value in enumerate(node.inputs):
        if value is not None and value.dtype == NARROW:
            node.replace_input_with(place, _cast(writer, f"wide_{place}", value, WIDE))
    nodes = [*graph, None]
    behind = NodeWriter(graph, str(node.name), before=nodes[nodes.index(node) + 1])
    for place, value in enumerate(node.outputs):
        if value.dtype == NARROW:
            readers, kept = list(value.uses()), value in graph.outputs
            value.dtype = WIDE
            narrow = _cast(behind, f"narrow_{place}", value, NARROW)
            for reader, at in readers:
                reader.replace_input_with(at, narrow)
            if kept:
                narrow.name, value.name = value.name, f"{value.name}.wide"
                graph.outputs[graph.outputs.index(value)] = narrow


def _cast(writer: NodeWriter, role: str, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    return writer.add("Cast", role, value, dtype=dtype, shape=value.shape, to=int(dtype))
