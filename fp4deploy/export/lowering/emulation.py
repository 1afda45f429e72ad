"""The arithmetic of an engine in standard operators, for ONNX Runtime on any machine.

An engine does not compute the canonical graph but the lowered one: convolutions with operands rounded again to FP8,
FP4 weights decoded to FP16, im2col, transposed convolutions as GEMMs, and FP16 between layers, or what else the rest
is. So the accuracy of the canonical file is not that of the engine, and this graph's is, up to the order of FP32 sums
and to what a compiler fuses: it may round less often than the graph says.

    canonical ONNX --lower--> lowered --rounded where it holds FP16 or BF16, decomposed--> standard operators, FP32

Layers that become plugins multiply FP4 operands exactly, as the canonical graph does: they stay as they are.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.quantize_function import DEQUANTIZE_OPS, QUANTIZE_OP, STATIC_QUANTIZE_OPS
from fp4deploy.export.onnx.trt_operators import add_quantize_function
from fp4deploy.models.card import CARD_KEY

# What begins the names of Identity nodes that stand for two casts until the rest is FP32.
ROUND = {ir.DataType.FLOAT16: "round_to_half.", ir.DataType.BFLOAT16: "round_to_bf16."}
CONVOLUTIONS = ("Conv", "ConvTranspose")
SAME_VALUES = (  # what they give is among what they take
    *("Cast", "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Pad", "Relu", "Reshape"),
    *("Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where", "Constant", QUANTIZE_OP),
    *DEQUANTIZE_OPS,
    *STATIC_QUANTIZE_OPS,
)


def emulated_engine(model: onnx.ModelProto, conv: str) -> onnx.ModelProto:
    """What an engine built of a canonical file with this `--conv` form computes, as a file of standard operators.

    Args:
        model: of one image size.

    Returns:
        A new model: FP32 in and out, with the metadata of the card.

    Raises:
        InputError: it cannot be lowered, or decomposed.
    """
    lowered = lower(model, conv, "tensorrt", plugins=False)  # RTX's repeated scales are equal constants
    add_quantize_function(lowered.model)
    graph = ir.from_proto(onnx.shape_inference.infer_shapes(lowered.model, data_prop=True))
    _mark(graph)
    found = ir.from_proto(to_portable(ir.to_proto(graph)))
    _round(found)
    proto = ir.to_proto(found)
    kept = {each.key: each.value for each in proto.metadata_props}
    card = {each.key: each.value for each in model.metadata_props if each.key == CARD_KEY}
    onnx.helper.set_model_props(proto, {**kept, **card})
    return proto


def _mark(model: ir.Model) -> None:
    """An Identity after everything that computes FP16 or BF16, or is cast to it, and after operands decoded to it."""
    for node in list(model.graph):
        for value in node.outputs:
            if value.dtype not in ROUND:
                continue
            decoded = node.op_type == "Cast" and any(use.node.op_type in CONVOLUTIONS for use in value.uses())
            if decoded or node.op_type not in SAME_VALUES or (node.op_type == "Cast" and _is_wide(node.inputs[0])):
                _insert_after(model.graph, node, value)


def _is_wide(value: ir.Value | None) -> bool:
    """Whether a value is FP32 that was not rounded before: an input, or computed, and perhaps moved since."""
    while value is not None and value.dtype == ir.DataType.FLOAT:
        producer = value.producer()
        if producer is None or producer.op_type not in SAME_VALUES:
            return True
        value = producer.inputs[0] if producer.inputs else None
    return False


def _insert_after(graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
    assert value.dtype is not None
    mark = ir.node("Identity", [value], name=f"{ROUND[value.dtype]}{value.name}")
    out = mark.outputs[0]
    out.name, out.shape = f"{value.name}.rounded", value.shape
    out.dtype = value.dtype
    for use in list(value.uses()):
        if use.node is not mark:
            use.node.replace_input_with(use.idx, out)
    for place, output in enumerate(graph.outputs):
        if output is value:
            out.name, value.name = value.name, f"{value.name}.exact"
            graph.outputs[place] = out
    graph.insert_after(node, mark)


def _round(model: ir.Model) -> None:
    """The marks, as a cast to FP16 or BF16 and back."""
    kinds = {node: kind for node in model.graph for kind, name in ROUND.items() if (node.name or "").startswith(name)}
    for mark, kind in kinds.items():
        half = ir.node("Cast", [mark.inputs[0]], {"to": int(kind)})
        full = ir.node("Cast", [half.outputs[0]], {"to": int(ir.DataType.FLOAT)})
        half.outputs[0].name = f"{mark.outputs[0].name}.half"
        ir.convenience.replace_nodes_and_values(
            model.graph, mark, [mark], [half, full], [mark.outputs[0]], [full.outputs[0]]
        )
