"""ONNX files as torch modules: equal to ONNX Runtime, names kept, and what is refused in words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from fp4deploy.errors import GateError, InputError
from fp4deploy.interop.onnx_network import OnnxNetwork, network_of, read_network
from fp4deploy.interop.onnx_operators import OPERATORS
from fp4deploy.interop.quantize_onnx import compare_with_file
from tests.interop.onnx_files import Onnx, segmenter

IMAGE = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def equal_to_onnx_runtime(model: onnx.ModelProto) -> OnnxNetwork:
    onnx.checker.check_model(model)
    network = network_of(model, "the file")
    network.check_shapes((3, 16, 16))
    assert compare_with_file(network, model, [IMAGE], "the file") < 1e-5
    return network


def test_a_network_computes_what_its_file_does_under_its_names() -> None:
    network = equal_to_onnx_runtime(segmenter())
    layers = [name for name, layer in network.named_modules() if name and not any(layer.children())]
    assert layers == ["stem.0", "stem.1", "block.conv", "block.depthwise", "gate", "up", "head"]
    assert network(IMAGE.repeat(3, 1, 1, 1)).shape == (3, 4, 16, 16)


def test_a_file_for_one_image_takes_several() -> None:
    net = Onnx(size=(1, 3, 16, 16))
    pooled = net.node("GlobalAveragePool", net.conv("conv", "image", 3, 8))
    flat = net.node("Reshape", pooled, net.integers("shape", 1, 8))
    network = equal_to_onnx_runtime(net.model(net.node("MatMul", flat, net.normal("w", 8, 4))))
    assert network(torch.cat([IMAGE, 2 * IMAGE])).shape == (2, 4)


def test_files_in_fp16_are_computed_in_fp32() -> None:
    model = segmenter(kind=TensorProto.FLOAT16)
    model.graph.initializer[-1].CopyFrom(onnx.numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales"))
    network = network_of(model, "the file")
    assert compare_with_file(network, model, [IMAGE], "the file") < 1e-2
    assert all(parameter.dtype == torch.float32 for parameter in network.parameters())


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("Abs", {}), ("Ceil", {}), ("Elu", {"alpha": 0.7}), ("Erf", {}), ("Exp", {}), ("Floor", {}),
        ("HardSigmoid", {}), ("LeakyRelu", {"alpha": 0.2}), ("LogSoftmax", {"axis": 1}), ("Neg", {}), ("Sigmoid", {}),
        ("Softmax", {"axis": 1}), ("Softplus", {}), ("Tanh", {}), ("Mish", {}), ("HardSwish", {}),
        ("GlobalMaxPool", {}), ("Identity", {}),
        ("DepthToSpace", {"blocksize": 2}), ("DepthToSpace", {"blocksize": 2, "mode": "CRD"}),
        ("AveragePool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}),
        ("AveragePool", {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1], "count_include_pad": 1}),
        ("AveragePool", {"kernel_shape": [2, 2], "strides": [2, 2], "auto_pad": "VALID"}),
        ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
        ("MaxPool", {"kernel_shape": [2, 2], "pads": [1, 0, 0, 1]}),
        ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
        ("ReduceMax", {"axes": [1], "keepdims": 0}), ("ReduceMean", {"axes": [2, 3]}), ("ReduceMin", {"axes": [1]}),
        ("ReduceSumSquare", {"axes": [1]}),
        ("Transpose", {"perm": [0, 2, 3, 1]}), ("Flatten", {"axis": 2}),
    ],
)  # fmt: skip
def test_operators_of_one_input(op: str, attributes: dict[str, Any]) -> None:
    net = Onnx(opset=22 if op == "Mish" else 17)
    equal_to_onnx_runtime(net.model(net.node(op, net.conv("conv", "image", 3, 8), **attributes)))


def beside_defaults(net: Onnx, x: str) -> Iterator[str]:
    """Operators of a map [N, 8, 13, 10] with every attribute at several values, axes from either end."""
    node, whole, sides = net.node, net.integers, {1: 8, 2: 13, 3: 10, -3: 8, -2: 13, -1: 10}
    pads: list[dict[str, Any]] = [{}, {"pads": [1, 0, 0, 1]}, {"pads": [0, 1, 1, 0]}, {"pads": [1, 1, 1, 1]}]
    pads += [{"auto_pad": kind} for kind in ("SAME_UPPER", "SAME_LOWER", "VALID")]
    for strides, padding, up in itertools.product(([2, 1], [1, 3]), pads, (0, 1)):
        window = {"kernel_shape": [3, 2], "strides": strides, **padding}
        if not (up and "auto_pad" in padding):
            window |= {"ceil_mode": up}
        yield node("MaxPool", x, **window)
        yield node("AveragePool", x, count_include_pad=1, **window)
    yield node("MaxPool", x, kernel_shape=[3, 2], dilations=[1, 2], pads=[1, 1, 1, 0])
    for axis, side in sides.items():
        yield node("Concat", x, node("Neg", x), axis=axis)
        yield node("Gather", x, net.constant(f"{axis}.places", [[0, -1, 1], [1, 0, -2]], np.int64), axis=axis)
        yield node("Split", x, whole(f"{axis}.parts", 1, side - 1), axis=axis, outputs=2)
        yield node("Unsqueeze", x, whole(f"{axis}.axis", axis))
        for number, (start, end, step) in enumerate(((1, -1, 2), (-3, 100, 1), (-100, 3, 1), (0, 9, 4))):
            names = [whole(f"{axis}.{number}.{at}", each) for at, each in enumerate((start, end, axis, step))]
            yield node("Slice", x, *names)
        inner = (8, 13, 10)[axis if axis < 0 else axis - 1 :]
        for epsilon in (1e-5, 0.3):
            gain = net.normal(f"{axis}.{epsilon}.gain", *inner)
            yield node("LayerNormalization", x, gain, axis=axis, epsilon=epsilon)
        yield from (node(op, x, axis=axis) for op in ("Softmax", "LogSoftmax", "Flatten"))
        yield from (node("Flatten", x, axis=edge) for edge in (-4, 0, 4) if axis == 1)
        for op, keep in itertools.product(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSumSquare"), (0, 1)):
            yield node(op, x, axes=[axis], keepdims=keep)
        yield node("ReduceSum", x, whole(f"{axis}.summed", axis), keepdims=0)
    for start, more in ((1, {}), (1, {"end": 3}), (-2, {}), (0, {"end": -1})):
        shape = node("Concat", node("Shape", x, start=start, **more), whole(f"{start}{more}", -1), axis=0)
        yield node("Reshape", x, shape)
    yield node("Flatten", node("ReduceSum", x, whole("all but one", 0, 2, 3), keepdims=0))
    flat = node("Flatten", node("GlobalAveragePool", x))
    for alpha, beta, turned in itertools.product((1.0, 0.5), (1.0, 2.0), (0, 1)):
        weight = net.normal(f"{alpha}{beta}{turned}.w", *((5, 8) if turned else (8, 5)))
        yield node(
            "Gemm", flat, weight, net.normal(f"{alpha}{beta}{turned}.b", 5), alpha=alpha, beta=beta, transB=turned
        )
    yield from (node("HardSigmoid", x, alpha=0.7, beta=beta) for beta in (0.1, 0.5))
    yield node("Sub", net.constant("from_one", 1.0), x)
    yield node("Pow", net.constant("of_two", 2.0), x)


def test_attributes_beside_their_defaults() -> None:
    net = Onnx(size=("N", 3, 13, 10))
    model = net.model(*beside_defaults(net, net.conv("conv", "image", 3, 8, 1)))
    image = torch.randn(2, 3, 13, 10, generator=torch.Generator().manual_seed(0))
    assert compare_with_file(network_of(model, "the file"), model, [image], "the file") < 1e-5


def shapes(net: Onnx, x: str) -> list[str]:
    """Values computed with constants and shapes."""
    y, whole, node = net.normal("y", 8, 1, 1), net.integers, net.node
    one, zero = whole("one", 1), whole("zero", 0)
    size = node("Shape", x)
    side = node("Gather", size, net.constant("third", 2, np.int64))
    doubled = node("Mul", node("Unsqueeze", side, zero), whole("two", 2))
    target = node("Concat", node("Slice", size, zero, whole("two_first", 2)), doubled, doubled, axis=0)
    ones = node("ConstantOfShape", whole("four", 4), value=helper.make_tensor("v", TensorProto.INT64, [1], [1]))
    kept = node("Where", node("Equal", target, whole("minus", -1)), ones, target)
    return [
        *(node(op, x, y) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "PRelu", "Sum")),
        node("Pow", node("Abs", x), net.constant("three", 3.0)),
        node("Reciprocal", node("Exp", x)), node("Sqrt", node("Abs", x)), node("Log", node("Exp", x)),
        node("Clip", x, net.constant("low", -0.5), net.constant("high", 0.5)),
        node("Expand", node("ReduceMean", x, axes=[2, 3]), size),
        node("Resize", x, "", "", kept, coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
        node("Resize", x, "", "", kept, mode="cubic", coordinate_transformation_mode="half_pixel"),
        node("Resize", x, "", "", kept, mode="linear", coordinate_transformation_mode="align_corners"),
        node("Pad", x, whole("pads", 0, 0, 1, 2, 0, 0, 3, 0), net.constant("fill", 1.5)),
        node("Pad", x, whole("reflected", 0, 0, 1, 1, 0, 0, 1, 1), mode="reflect"),
        node("Slice", x, whole("from", 1), whole("to", -1), whole("axis", 2), whole("step", 2)),
        node("Split", x, whole("parts", 2, 6), axis=1, outputs=2),
        node("Gather", x, whole("chosen", 0, 3, -1), axis=1),
        node("Squeeze", node("Gather", x, one, axis=1), one), node("Unsqueeze", x, zero),
        node("ReduceSum", x, whole("last", -1), keepdims=0), node("Cast", x, to=TensorProto.FLOAT),
        node("Where", node("Equal", x, x), x, y), node("Dropout", x),
        node("LayerNormalization", x, net.normal("gain", 16), net.normal("shift", 16)),
        node("InstanceNormalization", x, net.normal("scale", 8), net.normal("bias", 8)),
    ]  # fmt: skip


def test_operators_with_constants_and_shapes() -> None:
    net = Onnx()
    equal_to_onnx_runtime(net.model(*shapes(net, net.conv("conv", "image", 3, 8))))


PLACES = ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners", "half_pixel_symmetric")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def resized(size: float, **attributes: Any) -> onnx.ModelProto:
    """By a factor, or to a whole number of pixels."""
    net = Onnx(size=(1, 3, 16, 16))
    by = net.constant("factors", [1, 1, size, size]), ""
    to = "", net.integers("sizes", 1, 8, int(size), int(size))
    x = net.conv("conv", "image", 3, 8, 1)
    return net.model(net.node("Resize", x, "", *(to if isinstance(size, int) else by), **attributes))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_a_resize_is_onnx_runtimes_or_refused(mode: str, place: str) -> None:
    computed, refused = set(), []
    for rounding, size in itertools.product(ROUNDINGS if mode == "nearest" else ("",), (2.0, 0.5, 1.3, 7, 1)):
        named = {"nearest_mode": rounding} if rounding else {}
        model = resized(size, mode=mode, coordinate_transformation_mode=place, **named)
        network = network_of(model, "the file")
        try:
            network.check_shapes((3, 16, 16))
        except InputError as error:
            refused.append(str(error))
            continue
        assert compare_with_file(network, model, [IMAGE], "the file") < 1e-5
        computed.add((rounding, size))
    assert all(f"coordinates '{place}'" in each for each in refused)
    written = {"asymmetric": {("floor", 7), ("floor", 2.0)}, "half_pixel": {("round_prefer_ceil", 7)}}  # by torch
    smooth = {("", 2.0), ("", 7)} if place in ("half_pixel", "align_corners") else set()
    assert computed >= (written.get(place, set()) if mode == "nearest" else smooth)


@pytest.mark.parametrize(
    ("size", "target", "attributes"),
    [
        (20, 44, {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
        (14, 18, {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
        (14, 36, {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
        (16, 32, {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor", "cubic_coeff_a": -0.5}),
        (16, 32, {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor", "exclude_outside": 1}),
    ],
)
def test_a_resize_that_agrees_is_not_refused(size: int, target: int, attributes: dict[str, Any]) -> None:
    net = Onnx(size=(1, 3, size, size))
    to = net.integers("sizes", 1, 8, target, target)
    x = net.conv("conv", "image", 3, 8, 1)
    model = net.model(net.node("Resize", x, "", "", to, mode="nearest", **attributes))
    network = network_of(model, "the file")
    network.check_shapes((3, size, size))
    assert compare_with_file(network, model, [torch.randn(1, 3, size, size)], "the file") < 1e-5


@pytest.mark.parametrize(
    ("name", "value"),
    [("antialias", 1), ("cubic_coeff_a", -0.5), ("exclude_outside", 1), ("keep_aspect_ratio_policy", "not_larger")],
)
def test_settings_of_a_resize_that_torch_has_not_are_refused(name: str, value: object) -> None:
    mode = {"mode": "cubic", "coordinate_transformation_mode": "half_pixel", name: value}
    network = network_of(resized(24, **mode), "the file")
    with pytest.raises(InputError, match=rf"\(Resize\): {name}\."):
        network.check_shapes((3, 16, 16))


@pytest.mark.parametrize(("before", "by"), [(-1, 3), (1, -3), (-1, -3)])
def test_sizes_are_divided_towards_zero(before: int, by: int) -> None:
    net = Onnx(size=("N", 3, "H", "W"))
    x, whole = net.conv("conv", "image", 3, 8), net.integers
    side = net.node("Slice", net.node("Shape", x), whole("from", 2), whole("to", 3))  # 16
    quotient = net.node("Div", net.node("Mul", side, whole("sign", before)), whole("by", by))
    end = net.node("Add", quotient, whole("rows", 8))
    network = equal_to_onnx_runtime(net.model(net.node("Slice", x, whole("first", 0), end, whole("axis", 2))))
    free = {0: torch.export.Dim("N"), 2: torch.export.Dim.DYNAMIC}
    program = torch.export.export(network, (IMAGE.repeat(2, 1, 1, 1),), dynamic_shapes=(free,))
    for size in (16, 17, 19):
        assert program.module()(torch.ones(3, 3, size, 16)).shape[2] == 8 + int(size * before / by)


def test_every_operator_is_compared_with_onnx_runtime() -> None:
    net = Onnx()
    shapes(net, "image")
    seen = {node.op_type for node in (*net.nodes, *segmenter().graph.node)}
    marks: Any = test_operators_of_one_input.pytestmark  # type: ignore[attr-defined]
    seen |= {op for op, _ in marks[0].args[1]}
    assert set(OPERATORS) - seen == {"Gelu", "Upsample"}  # of opset 20, and gone since opset 10


GEOMETRIES: list[dict[str, Any]] = [
    {}, {"strides": [2, 1]}, {"dilations": [1, 2]}, {"pads": [1, 0, 1, 0]}, {"group": 2}, {"auto_pad": "VALID"},
    {"kernel_shape": [3, 2]},
]  # fmt: skip
OF_CONV: list[dict[str, Any]] = [{"pads": [1, 0, 0, 2]}, {"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"}]


def one_layer(op: str, bias: bool, **attributes: Any) -> onnx.ModelProto:
    net, groups = Onnx(size=(1, 3, 16, 16)), attributes.get("group", 1)
    x = net.conv("conv", "image", 3, 8, 1)
    net.normal("w", *((6, 8 // groups, 3, 2) if op == "Conv" else (8, 6 // groups, 3, 2)))
    net.normal("b", 6)
    return net.model(net.node(op, x, *["w", "b"][: 1 + bias], **attributes))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        *(("Conv", each) for each in (*GEOMETRIES, *OF_CONV)),
        *(("ConvTranspose", each) for each in (*GEOMETRIES, {"output_padding": [1, 0], "strides": [2, 2]})),
    ],
)
def test_layers_with_each_attribute_and_without_any(op: str, attributes: dict[str, Any], bias: bool) -> None:
    model = one_layer(op, bias, **attributes)
    assert compare_with_file(network_of(model, "the file"), model, [IMAGE], "the file") < 1e-5


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("Conv", {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
        *(("ConvTranspose", each) for each in (*OF_CONV, {"output_shape": [9, 9]})),
    ],
)
def test_layers_that_torch_has_not_are_refused(op: str, attributes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"\({op}\)"):
        network_of(one_layer(op, True, **attributes), "the file")


def as_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same network with its constants as nodes: numbers and lists in the attributes that are for them, too."""
    found = onnx.ModelProto.FromString(model.SerializeToString())
    nodes = []
    for tensor in found.graph.initializer:
        content = onnx.numpy_helper.to_array(tensor)
        name = {"i": "value_int", "f": "value_float"}[content.dtype.kind] + ("s" if content.ndim else "")
        given = {"value": tensor} if content.ndim > 1 or content.dtype.itemsize == 1 else {name: content.tolist()}
        nodes.append(helper.make_node("Constant", [], [tensor.name], name=f"the_{tensor.name}", **given))
    del found.graph.initializer[:]
    nodes += found.graph.node
    del found.graph.node[:]
    found.graph.node.extend(nodes)
    return found


def test_constants_are_initializers_or_nodes() -> None:
    net = Onnx()
    of_shapes = net.model(*shapes(net, net.conv("conv", "image", 3, 8)))
    for model in (segmenter(), of_shapes):
        network = equal_to_onnx_runtime(as_nodes(model))
        assert [*network.state_dict()] == [*network_of(model, "the file").state_dict()]


def test_constants_through_operators_that_only_move_them_are_weights() -> None:
    """Exporters write a transposed, cast or reshaped weight as operators on a constant."""
    net = Onnx()
    pooled = net.node("Flatten", net.node("GlobalAveragePool", net.conv("conv", "image", 3, 8)))
    stored = net.node("Cast", net.constant("w", np.ones((5, 8)), np.float16), to=TensorProto.FLOAT)
    turned = net.node("Transpose", net.node("Identity", stored), perm=[1, 0])
    network = equal_to_onnx_runtime(net.model(net.node("MatMul", pooled, turned)))
    assert any(isinstance(layer, torch.nn.Linear) for layer in network.modules())


def test_layers_of_uneven_padding_and_folded_factors() -> None:
    net = Onnx()
    x = net.conv("same", "image", 3, 8, 4, pads=[1, 2, 2, 1], strides=[2, 1])
    x = net.conv("automatic", x, 8, 8, 3, pads=[0, 0, 0, 0], dilations=[2, 2])
    shared = net.normal("shared.weight", 8, 8, 1, 1)
    x = net.node("Conv", net.node("Conv", x, shared), shared)
    pooled = net.node("Flatten", net.node("GlobalAveragePool", x))
    weight, bias = net.normal("fc.w", 8, 5), net.normal("fc.b", 5)
    network = equal_to_onnx_runtime(net.model(net.node("Gemm", pooled, weight, bias, alpha=0.5, beta=2.0)))
    assert sum(isinstance(layer, torch.nn.Conv2d) for layer in network.modules()) == 3


@pytest.mark.parametrize(
    ("op", "vectors", "attributes"),
    [
        ("BatchNormalization", 4, {"epsilon": 0.5}), ("BatchNormalization", 4, {}),
        ("InstanceNormalization", 2, {"epsilon": 0.5}), ("InstanceNormalization", 2, {}),
        ("GroupNormalization", 2, {"epsilon": 0.5, "num_groups": 4}), ("GroupNormalization", 2, {"num_groups": 2}),
    ],
)  # fmt: skip
def test_norms_have_their_epsilon(op: str, vectors: int, attributes: dict[str, Any]) -> None:
    """The values are small, so that another epsilon gives other numbers."""
    net = Onnx(opset=21 if op == "GroupNormalization" else 17)
    small = net.node("Mul", net.conv("conv", "image", 3, 8), net.constant("factor", 1e-2))
    given = [
        net.constant(str(at), np.linspace(1e-5, 1e-4, 8) if at > 1 else np.linspace(0.5, 1.5, 8))
        for at in range(vectors)
    ]
    model = net.model(net.node(op, small, *given, **attributes))
    assert compare_with_file(network_of(model, "the file"), model, [IMAGE], "the file") < 1e-5


@pytest.mark.parametrize(
    "attributes",
    [
        {"strides": [2, 1], "output_padding": [1, 0], "dilations": [1, 2]}, {"group": 4, "pads": [1, 1, 1, 1]},
        {"strides": [3, 2], "pads": [1, 0, 1, 0], "group": 2},
    ],
)  # fmt: skip
def test_transposed_convolutions_have_their_attributes(attributes: dict[str, Any]) -> None:
    net = Onnx()
    weight = net.normal("w", 8, 12 // attributes.get("group", 1), 3, 3)
    up = net.node("ConvTranspose", net.conv("conv", "image", 3, 8), weight, net.normal("b", 12), **attributes)
    equal_to_onnx_runtime(net.model(up))


def broken(change: str) -> onnx.ModelProto:
    net = Onnx()
    x = net.conv("conv", "image", 3, 8)
    if change == "loop":
        branch = helper.make_graph([], "g", [], [helper.make_tensor_value_info(x, TensorProto.FLOAT, None)])
        x = net.node("If", net.constant("c", True, np.bool_), then_branch=branch, else_branch=branch)
    elif change == "domain":
        x = net.node("Magic", x, domain="com.example")
    elif change == "unknown":
        x = net.node("NonZero", x)
    elif change == "quantised":
        x = net.node("QuantizeLinear", x, net.constant("s", 1.0))
    elif change == "nan":
        x = net.node("Mul", x, net.constant("nan", np.diag([np.nan] + 7 * [1.0])[:, :1, None]))  # one of eight
    elif change == "huge":
        x = net.node("Resize", x, "", "", net.integers("sizes", 1, 8, 100_000, 100_000))
    elif change == "huge pad":
        x = net.node("Pad", x, net.integers("pads", 0, 0, 60_000, 60_000, 0, 0, 0, 0))
    elif change == "channels":
        x = net.conv("next", x, 16, 8)
    elif change == "text":
        x = net.node("Reshape", x, net.integers("shape", 7, 7))
    elif change == "no layers":
        net = Onnx()
        x = net.node("Relu", "image")
    model = net.model(x)
    if change == "two inputs":
        model.graph.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, [1]))
    elif change == "not an image":
        model.graph.input[0].type.tensor_type.shape.dim.pop()
    elif change == "training":
        model.graph.node[0].op_type = "BatchNormalization"
    return model


REFUSED = {
    "loop": "If holds a subgraph",
    "domain": "the operator Magic is of the domain com.example",
    "unknown": "(NonZero): not an operator that this reader knows",
    "quantised": "quantised already (QuantizeLinear)",
    "nan": "The constant nan holds NaN or infinity",
    "huge": "elements; at most",
    "huge pad": "elements; at most",
    "channels": "(Conv): it cannot take its inputs",
    "text": "(Reshape): it cannot take its inputs",
    "no layers": "nothing to quantise",
    "two inputs": "The file has 2 inputs",
    "not an image": "read are images [N, C, H, W]",
    "training": "(BatchNormalization): it needs 4 constant vectors",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_is_refused(change: str) -> None:
    with pytest.raises(InputError) as error:
        network_of(broken(change), "the file").check_shapes((3, 16, 16))
    assert REFUSED[change] in str(error.value)
    assert "\n" not in str(error.value)


def test_a_network_that_is_not_its_file_is_found() -> None:
    model = segmenter()
    network = network_of(model, "the file")
    with torch.no_grad():
        network.get_submodule("head").bias[0] += 1.0  # type: ignore[index]
    with pytest.raises(GateError, match="differs from the file in ONNX Runtime"):
        compare_with_file(network, model, [IMAGE], "the file")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"not onnx")
    with pytest.raises(InputError, match="is not an ONNX"):
        read_network(tmp_path / "x.onnx")
    with pytest.raises(InputError, match="does not exist"):
        read_network(tmp_path / "y.onnx")


def test_of_several_outputs_the_layer_of_each_is_the_output_s(tmp_path: Path) -> None:
    net = Onnx(size=("N", 3, 16, 16))
    trunk = net.node("Relu", net.conv("trunk", "image", 3, 32))
    depth = net.node("Sigmoid", net.conv("depth", trunk, 32, 16, 1))
    head = net.conv("head", trunk, 32, 16, 1)
    onnx.save(net.model(head, net.node("Add", depth, depth)), tmp_path / "two.onnx")
    network = read_network(tmp_path / "two.onnx")
    assert network.output_layers == ("head", "depth")
    onnx.save(net.model(head), tmp_path / "one.onnx")
    assert read_network(tmp_path / "one.onnx").output_layers == ()
