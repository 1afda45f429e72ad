"""Fix the height and width of a canonical file whose image size is open: an engine is built for one size.

The input gets the size, shape inference carries it through the graph, and every Shape that a Reshape reads becomes the
constant it now is (0 for the batch, which stays dynamic). Weights, codes and scales are not touched.
"""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx.shape_inference
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from fp4deploy.errors import InputError, first_line
from fp4deploy.export.onnx.canonical import metadata_object
from fp4deploy.models.card import CARD_KEY
from fp4deploy.models.volumes import VOLUME, Size


def has_open_size(model: onnx.ModelProto) -> bool:
    """Whether any axis of the image but the batch is left open."""
    return bool(model.graph.input) and any(not size.HasField("dim_value") for size in _extents(model)[1:])


def fix_size(model: onnx.ModelProto, size: Size) -> onnx.ModelProto:
    """A copy of a model with an open image size for images of `size`, (height, width) or (depth, height, width).

    Raises:
        InputError: its size is not open, or the network does not take images of this size.
    """
    if not has_open_size(model):
        raise InputError(
            "The image size of this file is fixed. Export one with an open size: fp4deploy export --dynamic-size"
        )
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    named = dict(zip((extent.dim_param for extent in _extents(fixed)[2:]), size, strict=True))
    for each in fixed.graph.input:
        for extent in list(each.type.tensor_type.shape.dim)[2:]:
            if extent.dim_param in named:
                extent.dim_value = named[extent.dim_param]
    for output in fixed.graph.output:
        for extent in list(output.type.tensor_type.shape.dim)[1:]:
            if not extent.HasField("dim_value"):
                extent.Clear()
    del fixed.graph.value_info[:]
    _rewrite_card(fixed, size)
    try:
        fixed.graph.value_info.extend(_inferred(fixed))
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        cause = first_line(error)
        raise InputError(f"The network does not take inputs of {'x'.join(map(str, size))}: {cause}") from error
    graph_model = ir.from_proto(fixed)
    _fold_shapes(graph_model.graph)
    RemoveUnusedNodesPass()(graph_model)
    return ir.to_proto(graph_model)


def fold_sizes(model: ir.Model) -> None:
    """Write what is computed of constants and known sizes as constants, in place, so that shapes behind it are known.

    torch's older exporter cuts `x.chunk(2, 1)` at a size that the file computes, and inference stops there.
    """
    import onnxscript.optimizer  # a quarter of a second, which most commands do not need

    model.graph.sort()  # of other tools' files nodes may stand before what they read
    onnxscript.optimizer.fold_constants(model, onnx_shape_inference=True)
    RemoveUnusedNodesPass()(model)


def _inferred(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Shapes of all values. ONNX infers none behind GroupNormalization, which gives its input's shape."""
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    for node in plain.graph.node:
        if node.op_type == "GroupNormalization":
            identity = onnx.helper.make_node("Identity", node.input[:1], node.output, name=node.name)
            node.CopyFrom(identity)
    return list(onnx.shape_inference.infer_shapes(plain, strict_mode=True, data_prop=True).graph.value_info)


def _extents(model: onnx.ModelProto) -> list[onnx.TensorShapeProto.Dimension]:
    return list(model.graph.input[0].type.tensor_type.shape.dim)


def _fold_shapes(graph: ir.Graph) -> None:
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Shape" and not node.attributes else None
        if source is None or source.shape is None:
            continue
        sizes = [size for size in tuple(source.shape)[1:] if isinstance(size, int)]
        if len(sizes) + 1 != len(source.shape):
            continue
        for reader, index in list(node.outputs[0].uses()):
            if reader.op_type == "Reshape" and index == 1:
                name = f"{node.name}.fixed"
                extents = np.array([0, *sizes], np.int64)
                if name not in graph.initializers:
                    constant = ir.tensor(extents, name=name)
                    graph.register_initializer(ir.val(name, constant.dtype, extents.shape, const_value=constant))
                reader.replace_input_with(1, graph.initializers[name])


def _rewrite_card(model: onnx.ModelProto, size: Size) -> None:
    for entry in model.metadata_props:
        if entry.key == CARD_KEY:
            card = metadata_object(model, CARD_KEY) or {}
            volume = {"volume": {**card["volume"], "depth": size[0]}} if len(size) == VOLUME else {}
            entry.value = json.dumps(card | {"height": size[-2], "width": size[-1]} | volume, sort_keys=True)
