"""Operators of TensorRT in files of other tools, such as those that ModelOpt exports.

ModelOpt writes FP8 with `TRT_FP8QuantizeLinear`, or with QuantizeLinear in TensorRT's domain, FP4 activations with
`TRT_FP4DynamicQuantize` without the function that defines it, and lists its FP4 weights among the inputs of the graph.
TensorRT takes all that. Shape inference stops at the first such operator, and ONNX Runtime refuses the file.

    with_shapes(model)     the nodes of the file, with shapes beyond these operators
    standardized(model)    Q/DQ of ONNX, constants that are no inputs, and shapes: what `to_portable` takes
"""

from __future__ import annotations

import onnx
import onnx.helper
import onnx.shape_inference

from fp4deploy.export.onnx.quantize_function import QUANTIZE_OP, TRT_DOMAIN, dynamic_quantize_function

STANDARD = {
    "TRT_FP8QuantizeLinear": "QuantizeLinear",
    "TRT_FP8DequantizeLinear": "DequantizeLinear",
    "QuantizeLinear": "QuantizeLinear",
    "DequantizeLinear": "DequantizeLinear",
}


def has_trt_operators(model: onnx.ModelProto) -> bool:
    """Whether the graph has nodes of TensorRT's domain that no function of the file defines."""
    defined = {function.name for function in model.functions if function.domain == TRT_DOMAIN}
    return any(node.domain == TRT_DOMAIN and node.op_type not in defined for node in model.graph.node)


def with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with inferred shapes; the nodes are those of the file."""
    if not has_trt_operators(model):
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    shaped = onnx.ModelProto()
    shaped.CopyFrom(model)
    del shaped.graph.value_info[:]
    shaped.graph.value_info.extend(standardized(model).graph.value_info)
    return shaped


def standardized(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with inferred shapes in operators of ONNX, except `TRT_FP4DynamicQuantize` and its function."""
    if not has_trt_operators(model):
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    standard = onnx.ModelProto()
    standard.CopyFrom(model)
    graph = standard.graph
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    del graph.input[:], graph.value_info[:]
    graph.input.extend(inputs)
    for node in graph.node:
        if node.domain == TRT_DOMAIN and node.op_type in STANDARD:
            _standardize(node, graph)
    add_quantize_function(standard)
    standard = onnx.shape_inference.infer_shapes(standard, data_prop=True)
    known = {value.name for value in standard.graph.value_info}  # the file's own may name sizes that inference found
    standard.graph.value_info.extend(value for value in model.graph.value_info if value.name not in known)
    return standard


def _standardize(node: onnx.NodeProto, graph: onnx.GraphProto) -> None:
    """Q/DQ of ONNX: the zero point says that the codes are E4M3."""
    if node.op_type == "TRT_FP8QuantizeLinear" and len(node.input) == 2:
        zero = f"{node.output[0]}.zero_point"
        graph.initializer.append(onnx.helper.make_tensor(zero, onnx.TensorProto.FLOAT8E4M3FN, [], b"\0", raw=True))
        node.input.append(zero)
    node.domain, node.op_type = "", STANDARD[node.op_type]
    types = [attribute for attribute in node.attribute if attribute.name == "output_dtype"]
    for attribute in types:  # TensorRT's own
        node.attribute.remove(attribute)


def add_quantize_function(model: onnx.ModelProto) -> None:
    """The meaning of TensorRT's quantiser, where the file lacks it."""
    domains = {node.domain for node in model.graph.node if node.op_type == QUANTIZE_OP}
    if domains == {TRT_DOMAIN} and not any(function.name == QUANTIZE_OP for function in model.functions):
        model.functions.append(dynamic_quantize_function())
        if not any(entry.domain == TRT_DOMAIN for entry in model.opset_import):
            model.opset_import.append(onnx.helper.make_opsetid(TRT_DOMAIN, 1))
