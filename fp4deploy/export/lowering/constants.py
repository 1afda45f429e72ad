"""Compute resizes of constants before the build.

A transformer resizes its position embedding to the grid of the image, with antialiasing, which TensorRT's parser
refuses. In a file of one image size the embedding and its new size are constants, so that ONNX Runtime can compute the
resize, with the nodes before it, and the engine gets the result.
"""

from __future__ import annotations

import math

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from fp4deploy.export.onnx.session import portable_session

KEPT = ("QuantizeLinear", "DequantizeLinear")  # precision is the plan's, and ONNX Runtime has no FP4
RANDOM = ("Random", "Bernoulli", "Multinomial")  # beginnings of names
MAX_ELEMENTS = 1 << 26  # of a result; a larger one stays a node


class FoldResizes(InPlacePass):
    """Replace each Resize of a constant by its value, an initializer of the same name."""

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        found = [value for value in _constants(graph) if _is_resized(value)]
        if not found:
            return PassResult(model, False)
        part = ir.Model(ir.convenience.extract(graph, [], found), ir_version=model.ir_version)
        results = portable_session(ir.to_proto(part)).run(None, {})
        for value, array in zip(found, results, strict=True):
            name = f"{value.name}.constant"
            constant = ir.val(name, value.dtype, array.shape, const_value=ir.tensor(array, name=name))
            graph.register_initializer(constant)
            value.replace_all_uses_with(constant, replace_graph_outputs=True)
        return PassResult(model, True)


def _constants(graph: ir.Graph) -> dict[ir.Value, None]:
    """Outputs of nodes that compute from constants alone, the same at every inference."""
    found: dict[ir.Value, None] = {}
    for node in graph:
        known = all(value is None or value in found or value.is_initializer() for value in node.inputs)
        if (
            known
            and node.domain == ""
            and not (node.op_type in KEPT or node.op_type.startswith(RANDOM) or _nests(node))
        ):
            found |= dict.fromkeys(node.outputs)
    return found


def _nests(node: ir.Node) -> bool:
    """Whether the node holds graphs, which may read values from outside."""
    return any(each.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for each in node.attributes.values())


def _is_resized(value: ir.Value) -> bool:
    node, shape = value.producer(), value.shape
    return (
        node is not None
        and node.op_type == "Resize"
        and shape is not None
        and shape.is_static()
        and math.prod(shape.numpy()) <= MAX_ELEMENTS
    )
