"""`--conv plugin`: which nodes take the place of which layers, what passes between them, and that numbers stay."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from fp4deploy.export.engine.plugin_nodes import plugin_nodes
from fp4deploy.export.lowering.lower import LoweredModel, lower
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.session import portable_session
from fp4deploy.plugins.tensorrt.definitions import GEOMETRY
from tests.export.exported_models import images, initializer, unet
from tests.export.lowering.engine_graphs import CanonicalGraph, unet_graph, widened
from tests.export.lowering.plugin_evaluator import evaluate_plugins
from tests.export.lowering.test_lowering_gemm import FORMS, evaluate, one_layer

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")


def lowered(model: onnx.ModelProto) -> LoweredModel:
    found = lower(model, "plugin", "tensorrt")
    onnx.checker.check_model(found.model)
    return found


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.op_type != "Identity"]


def random_image(channels: int, height: int, width: int, batch: int = 2) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((batch, channels, height, width)).astype(np.float16)


def chain(between: str, channels: int = 32, amax: float = 4.0) -> onnx.ModelProto:
    """Two convolutions with something between them."""
    graph = CanonicalGraph(seed=3)
    x = graph.conv("first", graph.image(6, 5, channels=channels), 32)
    if between == "relu":
        x = (graph.add("Relu", [x[0]], "relu"), *x[1:])
    elif between == "norm":
        x = graph.norm_relu("norm", x)
    elif between == "pool":
        x = graph.pool("pool", x)
    elif between == "read twice":
        graph.conv("second", x, 24, amax=amax)
        return graph.model(graph.conv("head", x, 4, kernel=1, fp4=False))
    return graph.model(graph.conv("second", x, 24, amax=amax))


@pytest.mark.parametrize("channels", [32, 24])
@pytest.mark.parametrize("form", ["up", *FORMS])
def test_a_plugin_computes_the_convolution(form: str, channels: int) -> None:
    canonical = one_layer(form, channels)
    found = lowered(canonical)
    product = "nvfp4_conv_transpose2d" if form == "up" else "nvfp4_conv2d"
    assert operators(found.model) == ["nvfp4_quantize", product, "Transpose"]
    assert not found.fp4
    image = random_image(channels, 6, 4)
    expected = evaluate(canonical, image.astype(np.float32))
    np.testing.assert_allclose(
        evaluate_plugins(found.model, image), expected, rtol=0, atol=1e-3 * np.abs(expected).max()
    )


@pytest.mark.parametrize("form", ["up", "3x3"])
def test_no_code_and_no_scale_changes(form: str) -> None:
    canonical, name = one_layer(form, 32), "up.0" if form == "up" else "encoder.conv"
    model = lowered(canonical).model
    taps = 2 if form == "up" else 3
    codes, scales = (initializer(model, f"{name}.plugin.weight_{each}") for each in ("codes", "scales"))
    assert (list(codes.dims), codes.data_type) == ([24, taps, taps, 16], T.INT8)
    assert (list(scales.dims), scales.data_type) == ([24, taps, taps, 2], T.INT8)
    assert codes.raw_data == initializer(canonical, f"{name}.weight.codes").raw_data
    assert scales.raw_data == initializer(canonical, f"{name}.weight.scales").raw_data
    scale = numpy_helper.to_array(initializer(canonical, f"{name}.input.global_scale"))
    amax = numpy_helper.to_array(initializer(model, f"{name}.plugin.input_amax"))
    assert amax == np.float32(scale * np.float32(2688))
    for role, source in (("input_scale", "input.global_scale"), ("weight_scale", "weight.global_scale")):
        number = numpy_helper.to_array(initializer(model, f"{name}.plugin.{role}"))
        assert (number.dtype, number.shape) == (np.float32, (1,))
        assert number == numpy_helper.to_array(initializer(canonical, f"{name}.{source}"))
    assert not any(tensor.data_type == T.FLOAT4E2M1 for tensor in model.graph.initializer)
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    assert kinds[f"{name}.plugin.quantize.0"] == kinds[f"{name}.plugin.quantize.1"] == T.INT8


def test_attributes_of_a_node() -> None:
    model = lowered(one_layer("3x3 stride 2", channels=24)).model
    (quantize, product) = plugin_nodes(model)
    assert quantize.attributes == {"channels": [24]}
    assert tuple(product.attributes) == GEOMETRY
    numbers = {"kernel": [3, 3], "channels": [24], "out_channels": [24], "stride": [2], "padding": [1], "dilation": [1]}
    assert product.attributes == {**numbers, "relu": [0]}
    for node in model.graph.node:
        if node.domain == "fp4deploy":
            values: dict[str, Any] = {each.name: helper.get_attribute_value(each) for each in node.attribute}
            assert (values["plugin_namespace"], values["plugin_version"], values["aot"]) == (b"fp4deploy", b"1", 1)


@pytest.mark.parametrize("between", ["nothing", "relu"])
def test_codes_pass_between_plugins(between: str) -> None:
    canonical = chain(between)
    model = lowered(canonical).model
    assert operators(model) == ["nvfp4_quantize", "nvfp4_conv2d_packed", "nvfp4_conv2d", "Transpose"]
    first, second = (node for node in model.graph.node if node.op_type.startswith("nvfp4_conv2d"))
    assert list(second.input[:2]) == list(first.output)
    assert [node.attributes["relu"] for node in plugin_nodes(model)[1:]] == [[int(between == "relu")], [0]]
    scale = numpy_helper.to_array(initializer(canonical, "second.input.global_scale"))
    assert numpy_helper.to_array(initializer(model, "first.plugin.output_amax")) == np.float32(scale * np.float32(2688))
    image = random_image(32, 6, 5)
    found, expected = evaluate_plugins(model, image), evaluate(canonical, image.astype(np.float32))
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)


@pytest.mark.parametrize("between", ["norm", "pool", "read twice"])
def test_what_is_read_in_another_way_stays_fp16(between: str) -> None:
    model = lowered(chain(between)).model
    packed = [node for node in plugin_nodes(model) if node.plugin.packed]
    assert not packed
    assert operators(model).count("nvfp4_quantize") == (1 if between == "read twice" else 2)


def test_two_readers_share_codes_or_have_their_own() -> None:
    for amax, quantisers in ((4.0, 1), (8.0, 2)):
        graph = CanonicalGraph()
        x = graph.image(6, 6, channels=32)
        first, second = graph.conv("first", x, 16), graph.conv("second", x, 16, amax=amax)
        summed = graph.add("Add", [first[0], second[0]], "sum")
        model = lowered(graph.model((summed, *first[1:]))).model
        assert operators(model).count("nvfp4_quantize") == quantisers
        image = random_image(32, 6, 6)
        assert np.isfinite(evaluate_plugins(model, image)).all()


def joined(first: int, second: int, amax: float = 4.0) -> onnx.ModelProto:
    graph = CanonicalGraph(seed=2)
    x = graph.image(4, 6, channels=16)
    skip = graph.norm_relu("norm", graph.conv("skip", x, first, fp4=False), groups=4)
    up = graph.up("up", graph.pool("pool", x), second)
    return graph.model(graph.conv("join", graph.concat("concat", skip, up), 24, amax=amax))


def test_a_concatenation_is_never_written() -> None:
    canonical = joined(32, 20)
    model = lowered(canonical).model
    assert "Concat" not in operators(model)
    up, two = plugin_nodes(model)[1], plugin_nodes(model)[3]
    assert (up.plugin.name, two.plugin.name) == ("nvfp4_conv_transpose2d_packed", "nvfp4_conv2d_two")
    assert two.attributes["channels"] == [32, 20]
    node = next(node for node in model.graph.node if node.op_type == "nvfp4_conv2d_two")
    assert list(node.input[3:5]) == [f"up.plugin.convolution.{index}" for index in (0, 1)]
    image = random_image(16, 4, 6)
    found, expected = evaluate_plugins(model, image), evaluate(canonical, image.astype(np.float32))
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)


@pytest.mark.parametrize("conv", ["plugin", "auto", "gemm"])
def test_axes_from_the_end_are_the_same_axes(conv: str) -> None:
    canonical = joined(32, 20)
    ranks = {each.name: len(each.dims) for each in canonical.graph.initializer}
    turned = onnx.ModelProto.FromString(canonical.SerializeToString())
    for node in turned.graph.node:
        for attribute in node.attribute:
            rank = 4 if node.op_type == "Concat" else ranks.get(node.input[0], 0)
            if attribute.name == "axis":
                attribute.i -= rank if attribute.i >= 0 else -rank
    assert turned.SerializeToString() != canonical.SerializeToString()
    backend = "tensorrt" if conv == "plugin" else "tensorrt-rtx"
    first, second = (lower(model, conv, backend) for model in (canonical, turned))
    assert operators(second.model) == operators(first.model)
    assert second.layers == first.layers


def test_a_block_across_both_halves_is_quantised_whole() -> None:
    canonical = joined(20, 32)
    model = lowered(canonical).model
    assert "Concat" in operators(model)
    assert [node.plugin.name for node in plugin_nodes(model)][1:] == [
        "nvfp4_conv_transpose2d",
        "nvfp4_quantize",
        "nvfp4_conv2d",
    ]
    image = random_image(16, 4, 6)
    found, expected = evaluate_plugins(model, image), evaluate(canonical, image.astype(np.float32))
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)


def test_a_concatenation_that_is_also_read_whole_is_written() -> None:
    """A transposed convolution takes one source: what it needs in FP16 is not packed for the other reader."""
    graph = CanonicalGraph(seed=4)
    x = graph.image(4, 6, channels=16)
    both = graph.concat("concat", graph.conv("first", x, 32), graph.conv("second", x, 16))
    small, large = graph.conv("join", both, 16), graph.up("up", both, 16)
    summed = graph.add("Add", [graph.pool("pool", large)[0], small[0]], "sum")
    canonical = graph.model((summed, *small[1:]))
    found = lowered(canonical)
    assert {node.plugin.name for node in plugin_nodes(found.model)} == {
        *("nvfp4_quantize", "nvfp4_conv2d", "nvfp4_conv2d_two", "nvfp4_conv_transpose2d"),
    }
    assert not {"Conv", "ConvTranspose"} & set(operators(found.model))
    image = random_image(16, 4, 6)
    got, expected = evaluate_plugins(found.model, image), evaluate(canonical, image.astype(np.float32))
    assert np.linalg.norm(got - expected) < 0.02 * np.linalg.norm(expected)


def test_the_unet() -> None:
    """11 plugins; every upsampled activation stays packed, and without FP16 rounding the results are exact."""
    _, canonical = unet()
    found = lowered(canonical)
    names = [node.plugin.name for node in plugin_nodes(found.model)]
    assert {name: names.count(name) for name in set(names)} == {
        "nvfp4_quantize": 11,
        "nvfp4_conv2d": 7,
        "nvfp4_conv2d_two": 2,
        "nvfp4_conv_transpose2d_packed": 2,
    }
    assert {layer.form for layer in found.layers if layer.requested == "FP4"} == {"plugin"}
    pictures = images(2).numpy()
    (logits,) = portable_session(to_portable(canonical)).run(None, {"image": pictures})
    got = torch.from_numpy(evaluate_plugins(widened(found.model), pictures, wide=True))
    expected = torch.from_numpy(logits).float()
    assert (got - expected).norm() < 1e-5 * expected.norm()
    rounded = torch.from_numpy(
        evaluate_plugins(found.model, pictures)
    ).float()  # random weights: close calls everywhere
    assert (rounded.argmax(1) == expected.argmax(1)).float().mean() > 0.85


def test_layers_that_no_plugin_takes_stay_what_they_were() -> None:
    canonical = chain("norm")
    for node in canonical.graph.node:
        for entry in node.attribute:
            if node.name == "second" and entry.name == "pads":
                entry.ints[:] = [1, 0, 1, 2]
    found = lowered(canonical)
    layers = {layer.name: layer for layer in found.layers}
    assert (layers["first"].form, layers["second"].form) == ("plugin", "qdq")
    assert found.fp4
    assert "TRT_FP4DynamicQuantize" in operators(found.model)
    for entry in next(node for node in canonical.graph.node if node.name == "first").attribute:
        if entry.name == "strides":
            entry.ints[:] = [1, 2]
    assert {layer.form for layer in lower(canonical, "plugin", "tensorrt").layers if layer.requested == "FP4"} == {
        "qdq"
    }


def test_the_plan() -> None:
    layers = {layer.name: layer for layer in lowered(unet_graph(0.25, 32, 32)).layers}
    conv, up = layers["encoder.1.conv2"], layers["up.1"]
    assert (conv.form, conv.compute, conv.weights) == (up.form, up.compute, up.weights) == ("plugin", "FP4", "FP4")
    assert conv.compute_nodes == ("encoder.1.conv2.plugin.convolution",)
    assert set(conv.nodes) == {f"encoder.1.conv2.plugin.{role}" for role in ("quantize", "convolution", "image")}
    assert conv.macs == 9 * 32 * 32 * 16 * 16
    assert layers["head"].form == "plain"


def test_a_module_used_twice() -> None:
    graph = CanonicalGraph()
    x = graph.conv("shared", graph.image(8, 8, channels=16), 16)
    count, constants = len(graph.nodes), {tensor.name for tensor in graph.initializers}
    value = CanonicalGraph(nodes=graph.nodes, layers=graph.layers).conv("shared", x, 16)
    for node in graph.nodes[count:]:
        node.output[:] = [f"{name}.again" for name in node.output]
        node.name += ".again"
        node.input[:] = [name if name in constants or name == "shared" else f"{name}.again" for name in node.input]
    found = lowered(graph.model((f"{value[0]}.again", *value[1:])))
    assert operators(found.model) == ["nvfp4_quantize", "nvfp4_conv2d_packed", "nvfp4_conv2d", "Transpose"]
    (layer,) = found.layers
    assert len(layer.compute_nodes) == 2
    assert np.isfinite(evaluate_plugins(found.model, random_image(16, 8, 8))).all()
    assert json.dumps([node.name for node in found.model.graph.node]).count("shared.plugin_2") == 2
