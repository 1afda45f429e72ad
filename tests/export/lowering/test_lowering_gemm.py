"""The lowerings compute what the canonical graph computes, and change no code and no scale."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from fp4deploy.errors import InputError
from fp4deploy.export.lowering.gemm import Geometry, geometry, is_upsampling
from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.lowering.pattern import find_fp4_layers
from fp4deploy.export.onnx.decomposed import to_portable
from tests.export.lowering.engine_graphs import CanonicalGraph, unet_graph, widened

IMAGE = (6, 4)
FORMS = {  # kernel, stride, dilation
    "1x1": (1, 1, 1),
    "3x3": (3, 1, 1),
    "3x3 stride 2": (3, 2, 1),
    "5x5": (5, 1, 1),
    "1x1 stride 2": (1, 2, 1),
    "3x3 dilation 2": (3, 1, 2),
}


def one_layer(form: str, channels: int = 32, out: int = 24) -> onnx.ModelProto:
    graph = CanonicalGraph(seed=3)
    x = graph.image(*IMAGE, channels=channels)
    if form == "up":
        return graph.model(graph.up("up.0", x, out))
    kernel, stride, dilation = FORMS[form]
    return graph.model(graph.conv("encoder.conv", x, out, kernel=kernel, stride=stride, dilation=dilation))


def with_function(model: onnx.ModelProto, canonical: onnx.ModelProto) -> onnx.ModelProto:
    """Give the lowered graph back the meaning of the engine's quantiser, so that it can be evaluated."""
    model.functions.extend(canonical.functions)
    return model


def evaluate(model: onnx.ModelProto, image: np.ndarray) -> np.ndarray:
    (result,) = ReferenceEvaluator(widened(model)).run(None, {"image": image})
    return result


def packed(model: onnx.ModelProto, suffix: str) -> dict[str, bytes]:
    return {tensor.name: tensor.raw_data for tensor in model.graph.initializer if tensor.name.endswith(suffix)}


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")
@pytest.mark.parametrize("channels", [32, 24])
@pytest.mark.parametrize("form", ["up", *FORMS])
def test_gemm_computes_the_convolution(form: str, channels: int) -> None:
    canonical = one_layer(form, channels)
    lowered = with_function(lower(canonical, "gemm").model, canonical)
    onnx.checker.check_model(lowered, full_check=True)
    assert operators(lowered).count("MatMul") == 1
    assert not {"Conv", "ConvTranspose"} & set(operators(lowered))
    image = np.random.default_rng(5).standard_normal((2, channels, *IMAGE)).astype(np.float32)
    expected = evaluate(canonical, image)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(evaluate(lowered, image), expected, rtol=0, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize("form", ["1x1", "up", "3x3"])
def test_no_code_and_no_scale_changes(form: str) -> None:
    canonical = one_layer(form)
    lowered = lower(canonical, "gemm").model
    for suffix in (".codes", ".scales", ".weight.global_scale"):
        assert packed(lowered, suffix) == packed(canonical, suffix)
    (codes,) = [tensor for tensor in lowered.graph.initializer if tensor.name.endswith(".codes")]
    assert codes.data_type == onnx.TensorProto.FLOAT4E2M1


def test_transposed_convolution_becomes_four_rows_an_output() -> None:
    lowered = lower(one_layer("up", channels=32, out=24)).model
    shapes = {tensor.name: list(tensor.dims) for tensor in lowered.graph.initializer}
    assert shapes["up.0.weight.codes"] == [96, 32]
    assert shapes["up.0.weight.scales"] == [96, 2]
    assert [len(numpy_helper.to_array(t)) for t in lowered.graph.initializer if t.name == "up.0.gemm.bias"] == [96]


def test_auto_lowers_what_costs_nothing_and_qdq_nothing() -> None:
    canonical = unet_graph(0.25, 32, 32)
    forms = {layer.name: layer.form for layer in lower(canonical, "auto").layers}
    assert {name for name, form in forms.items() if form == "gemm"} == {"up.0", "up.1", "up.2", "up.3"}
    assert forms["encoder.0.conv1"] == forms["head"] == "plain"
    assert forms["decoder.3.conv2"] == "fp8"
    kept = lower(canonical, "qdq")
    assert [n for n in operators(kept.model) if n != "Identity"] == [n for n in operators(canonical) if n != "Identity"]
    assert {layer.form for layer in kept.layers} == {"qdq", "plain"}


def test_plan_says_what_is_wanted_planned_and_why() -> None:
    layers = {layer.name: layer for layer in lower(unet_graph(0.25, 32, 32, classes=4)).layers}
    conv, up, first = layers["encoder.1.conv2"], layers["up.1"], layers["encoder.0.conv1"]
    assert (conv.requested, conv.compute, conv.weights) == ("FP4", "FP8", "FP8")
    assert "no FP4 convolution" in conv.reason
    assert "by the time model, not measured" in conv.reason
    assert (up.requested, up.compute, up.weights) == ("FP4", "FP4", "FP4")
    assert (first.requested, first.compute, first.weights) == ("FP16", "FP16", "FP16")
    assert first.reason == "kept by the recipe"
    # multiply-accumulates of one image, counted by hand
    assert conv.macs == 9 * 32 * 32 * 16 * 16
    assert up.macs == 4 * 128 * 64 * 4 * 4
    assert first.macs == 9 * 3 * 16 * 32 * 32
    assert layers["head"].macs == 16 * 4 * 32 * 32


def test_lowering_leaves_the_canonical_model_alone() -> None:
    canonical = one_layer("up")
    before = canonical.SerializeToString()
    lower(canonical, "gemm")
    assert canonical.SerializeToString() == before


def test_module_used_twice() -> None:
    graph = CanonicalGraph()
    x = graph.conv("shared", graph.image(8, 8, channels=16), 16, kernel=1)
    second = CanonicalGraph(nodes=graph.nodes, initializers=[], layers=graph.layers)
    count = len(graph.nodes)
    value = second.conv("shared", x, 16, kernel=1)
    for node in graph.nodes[count:]:  # the second use reads the same constants and has values of its own
        node.output[:] = [f"{name}.again" for name in node.output]
        node.name += ".again"
        node.input[:] = [
            name if name in constants(graph) or name == "shared" else f"{name}.again" for name in node.input
        ]
    lowered = lower(graph.model((f"{value[0]}.again", *value[1:])), "auto")
    assert operators(lowered.model).count("MatMul") == 2
    (layer,) = lowered.layers
    assert len(layer.compute_nodes) == 2
    assert layer.macs == 2 * 16 * 16 * 64
    onnx.checker.check_model(with_function(lowered.model, one_layer("1x1")), full_check=True)


def constants(graph: CanonicalGraph) -> set[str]:
    return {tensor.name for tensor in graph.initializers}


def test_modes_are_refused_in_plain_words() -> None:
    with pytest.raises(
        InputError, match=r"TensorRT-RTX takes no plugins.*--backend tensorrt\..*: auto, qdq, gemm, fp8\."
    ):
        lower(one_layer("3x3"), "plugin", "tensorrt-rtx")
    with pytest.raises(InputError, match="Did you mean 'gemm'"):
        lower(one_layer("3x3"), "gem")


def replace_constant(model: onnx.ModelProto, name: str, array: np.ndarray) -> None:
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(array, name))


def test_channels_not_a_multiple_of_16_name_the_layer() -> None:
    model = one_layer("3x3", channels=32)
    for node in model.graph.node:
        if node.op_type == "TRT_FP4DynamicQuantize":
            node.input[0] = "narrow"
            shape = numpy_helper.from_array(np.array([0, 40, 24], np.int64), "narrow_shape")
            reshape = onnx.helper.make_node("Reshape", ["image", "narrow_shape"], ["narrow"], name="narrow")
    model.graph.initializer.append(shape)
    model.graph.node.insert(0, reshape)
    with pytest.raises(InputError, match=r"Layer encoder\.conv: .*40, not a multiple of 16.*Pad .* to 48"):
        lower(model)


def test_weight_blocks_not_a_multiple_of_16_name_the_layer() -> None:
    model = one_layer("1x1", channels=32)
    for tensor in model.graph.initializer:
        if tensor.name == "encoder.conv.weight.codes":
            tensor.dims[:] = [32, 24]
    with pytest.raises(InputError, match=r"Layer encoder\.conv: its contracted weights \(K\) are 24"):
        lower(model)


def test_unquantised_input_names_the_layer() -> None:
    model = one_layer("3x3")
    (conv,) = [node for node in model.graph.node if node.op_type == "Conv"]
    conv.input[0] = "image"
    with pytest.raises(InputError, match=r"Layer encoder\.conv: .*input is not quantised by TRT_FP4DynamicQuantize"):
        lower(model)


def test_computed_global_scale_names_the_layer() -> None:
    model = one_layer("3x3")
    for node in model.graph.node:
        if node.op_type == "TRT_FP4DynamicQuantize":
            node.input[1] = "computed"
    model.graph.node.insert(0, onnx.helper.make_node("Identity", ["encoder.conv.input.global_scale"], ["computed"]))
    with pytest.raises(InputError, match=r"Layer encoder\.conv: the global scale .* must be one constant"):
        lower(model)


def test_the_decomposed_graph_is_not_built() -> None:
    with pytest.raises(InputError, match="looks like the decomposed graph"):
        lower(to_portable(one_layer("3x3")))


def test_fp4_of_an_older_opset_is_refused() -> None:
    model = one_layer("3x3")
    model.opset_import[0].version = 21
    with pytest.raises(InputError, match="opset 21, and FP4 tensors exist from opset 23"):
        lower(model)


@pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")
@pytest.mark.parametrize("pads", [[2, 1, 0, 1], [0, 2, 2, 0], [1, 0, 1, 2]], ids=str)
def test_gemm_pads_each_side_as_the_convolution_does(pads: list[int]) -> None:
    """top, left, bottom, right; the sums keep the size of the output."""
    canonical = one_layer("3x3")
    (conv,) = [node for node in canonical.graph.node if node.op_type == "Conv"]
    (attribute,) = [each for each in conv.attribute if each.name == "pads"]
    attribute.ints[:] = pads
    lowered = with_function(lower(canonical, "gemm").model, canonical)
    assert operators(lowered).count("MatMul") == 1
    image = np.random.default_rng(5).standard_normal((1, 32, *IMAGE)).astype(np.float32)
    expected = evaluate(canonical, image)
    np.testing.assert_allclose(evaluate(lowered, image), expected, rtol=0, atol=3e-6 * np.abs(expected).max())


@pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")
@pytest.mark.parametrize("form", ["3x3", "up"])
def test_a_layer_without_a_bias(form: str) -> None:
    canonical = one_layer(form)
    (node,) = [node for node in canonical.graph.node if node.op_type in ("Conv", "ConvTranspose")]
    bias = node.input.pop()
    kept = [tensor for tensor in canonical.graph.initializer if tensor.name != bias]
    del canonical.graph.initializer[:]
    canonical.graph.initializer.extend(kept)
    lowered = with_function(lower(canonical, "gemm").model, canonical)
    assert operators(lowered).count("MatMul") == 1
    image = np.random.default_rng(6).standard_normal((1, 32, *IMAGE)).astype(np.float32)
    expected = evaluate(canonical, image)
    np.testing.assert_allclose(evaluate(lowered, image), expected, rtol=0, atol=3e-6 * np.abs(expected).max())


@pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")
@pytest.mark.parametrize("dilations", [[1, 1], [2, 1], [1, 2]], ids=str)
@pytest.mark.parametrize("strides", [[1, 1], [2, 1], [1, 3]], ids=str)
@pytest.mark.parametrize("form", ["1x1", "3x3"])
def test_rows_columns_and_sides_have_their_own_geometry(form: str, strides: list[int], dilations: list[int]) -> None:
    canonical = one_layer(form)
    (node,) = [node for node in canonical.graph.node if node.op_type == "Conv"]
    given = {"strides": strides, "dilations": dilations, "pads": [2, 3, 1, 4]}
    del node.attribute[:]
    node.attribute.extend(helper.make_attribute(name, value) for name, value in given.items())
    del canonical.graph.value_info[:]
    canonical.graph.output[0].type.tensor_type.ClearField("shape")
    lowered = with_function(lower(canonical, "gemm").model, canonical)
    assert operators(lowered).count("MatMul") == 1
    image = np.random.default_rng(7).standard_normal((1, 32, *IMAGE)).astype(np.float32)
    expected = evaluate(canonical, image)
    np.testing.assert_allclose(evaluate(lowered, image), expected, rtol=0, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize(("name", "value"), [("group", 2), ("dilations", [2, 2]), ("pads", [1, 1, 1, 1])])
def test_only_a_plain_2x2_transposed_convolution_is_upsampling(name: str, value: object) -> None:
    canonical = one_layer("up")
    (layer,) = find_fp4_layers(ir.from_proto(canonical))
    assert is_upsampling(layer)
    (node,) = [node for node in canonical.graph.node if node.op_type == "ConvTranspose"]
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])
    (layer,) = find_fp4_layers(ir.from_proto(canonical))
    assert not is_upsampling(layer)


def test_groups_that_the_weight_does_not_have_are_refused() -> None:
    canonical = one_layer("1x1")
    (node,) = [node for node in canonical.graph.node if node.op_type == "Conv"]
    node.attribute.append(helper.make_attribute("group", 2))
    with pytest.raises(InputError, match=r"its input has \d+ channels and its weight \d+, in 2 groups"):
        find_fp4_layers(ir.from_proto(canonical))


@pytest.mark.parametrize(("name", "value"), [("auto_pad", "SAME_UPPER")])
def test_only_a_plain_convolution_is_a_gemm(name: str, value: object) -> None:
    canonical = one_layer("1x1")
    (layer,) = find_fp4_layers(ir.from_proto(canonical))
    assert geometry(layer) == Geometry((1, 1), (1, 1), (0, 0, 0, 0), IMAGE)
    (node,) = [node for node in canonical.graph.node if node.op_type == "Conv"]
    node.attribute.append(helper.make_attribute(name, value))
    (layer,) = find_fp4_layers(ir.from_proto(canonical))
    assert geometry(layer) is None
