"""Formats, block axes and verdicts for graphs of this project and of other tools, and the accounts of runtimes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

from fp4deploy.audit.operands import multiplications
from fp4deploy.audit.ort_profile import profile_rows
from fp4deploy.audit.report import Audit, AuditRow, audit_file
from fp4deploy.audit.targets import TARGETS
from fp4deploy.errors import InputError
from fp4deploy.export.lowering.pattern import weight_initializer
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.interop.placement import with_placed_quantizers
from fp4deploy.qat import calibrate, prepare
from tests.interop.onnx_files import Onnx

FP4, FP8 = TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E4M3FN


def _constant(name: str, kind: int, shape: list[int]) -> onnx.TensorProto:
    count = int(np.prod(shape)) if shape else 1
    size = {FP4: (count + 1) // 2, FP8: count, TensorProto.FLOAT8E8M0: count, TensorProto.INT8: count}.get(kind)
    raw = bytes(size) if size is not None else np.ones(count, np.float32).tobytes()
    return helper.make_tensor(name, kind, shape, raw, raw=True)


def _model(
    nodes: list[onnx.NodeProto], constants: list[onnx.TensorProto], shape: list[Any], out: list[Any]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, out)],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24), helper.make_opsetid("trt", 1)])


def _weight(shape: list[int], axis: int, block: int = 16, scales: int = FP8) -> tuple[list[Any], list[Any]]:
    """FP4 weight "w" of two-level scales; blocks along `axis` as it lies in the file."""
    blocks = [size if index != axis % len(shape) else size // block for index, size in enumerate(shape)]
    constants = [_constant("codes", FP4, shape), _constant("scales", scales, blocks), _constant("s", 1, [])]
    nodes = [
        helper.make_node("DequantizeLinear", ["scales", "s"], ["steps"]),
        helper.make_node("DequantizeLinear", ["codes", "steps"], ["w"], axis=axis, block_size=block),
    ]
    if scales != FP8:
        nodes = [helper.make_node("DequantizeLinear", ["codes", "scales"], ["w"], axis=axis, block_size=block)]
    return nodes, constants


def _dynamic(source: str, target: str, axis: int) -> list[onnx.NodeProto]:
    names = [f"{target}.codes", f"{target}.scales"]
    quantize = helper.make_node(
        "TRT_FP4DynamicQuantize", [source, "s"], names, domain="trt", axis=axis, block_size=16, scale_type=17
    )
    steps = helper.make_node("DequantizeLinear", [names[1], "s"], [f"{target}.steps"])
    values = helper.make_node("DequantizeLinear", [names[0], f"{target}.steps"], [target], axis=axis, block_size=16)
    return [quantize, steps, values]


def _matmul(axis_a: int = -1, axis_w: int = 0, scales: int = FP8, shape: tuple[int, ...] = (4, 64)) -> onnx.ModelProto:
    nodes, constants = _weight([64, 32], axis_w, scales=scales)
    product = helper.make_node("MatMul", ["a", "w"], ["y"], name="product")
    return _model([*nodes, *_dynamic("x", "a", axis_a), product], constants, list(shape), [*shape[:-1], 32])


def _convolution(weight_axis: int, image_axis: int) -> onnx.ModelProto:
    """As a simulation would write it: 4-D tensors, blocks along any axis."""
    nodes, constants = _weight([32, 64, 16, 16], weight_axis)
    convolution = helper.make_node("Conv", ["a", "w"], ["y"], name="conv")
    return _model(
        [*nodes, *_dynamic("x", "a", image_axis), convolution], constants, ["N", 64, 32, 48], ["N", 32, 17, 33]
    )


def _one(model: onnx.ModelProto) -> Any:
    (layer,) = multiplications(model)
    return layer


def test_an_fp4_matmul_runs_in_fp4() -> None:
    layer = _one(_matmul())
    assert layer.requested == "FP4"
    assert str(layer.weight) == "FP4, block of 16 along input features, E4M3 scales"
    assert layer.activation.dynamic
    assert layer.weight.contracted
    assert layer.activation.contracted
    assert TARGETS["tensorrt-rtx"].rule(layer).runs == "FP4"
    assert TARGETS["onnxruntime"].rule(layer).runs == "refused"


@pytest.mark.parametrize(
    ("model", "runs", "reason"),
    [
        (_matmul(axis_w=1), "FP16", "weight's blocks run along output features"),
        (_matmul(axis_a=-2, shape=(16, 64)), "FP16", "activation's blocks run along row axis 0"),
        (_matmul(scales=TensorProto.FLOAT8E8M0), "refused", "MXFP4"),
        (_matmul(shape=(2, 3, 4, 64)), "refused", "takes 2 or 3"),
        (_convolution(3, -1), "refused", "takes 2 or 3"),
        (_convolution(1, -1), "refused", "along axis -3 of 4"),
    ],
)
def test_what_does_not_run_in_fp4_says_why(model: onnx.ModelProto, runs: str, reason: str) -> None:
    verdict = TARGETS["tensorrt-rtx"].rule(_one(model))
    assert verdict.runs == runs
    assert reason in verdict.reason
    assert verdict.fell_back("FP4")


@pytest.mark.parametrize(
    ("axis", "name"), [(0, "output channels"), (1, "input channels"), (2, "kernel height"), (3, "kernel width")]
)
def test_the_axis_of_a_weights_blocks(axis: int, name: str) -> None:
    layer = _one(_convolution(axis, -1))
    assert layer.weight.axes == (name,)
    assert layer.weight.contracted == (axis == 1)
    assert layer.activation.axes == ("image width",)
    assert layer.activation.contracted is False


def test_blocks_are_followed_through_layout() -> None:
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3),
        torch.nn.Conv2d(32, 40, 3, padding=1),
        torch.nn.ConvTranspose2d(40, 32, 2, stride=2),
        torch.nn.Conv2d(32, 8, 1),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 144, 16),
        torch.nn.Linear(16, 4),
    )
    prepare(network)
    calibrate(network, [torch.randn(2, 3, 8, 8)])
    layers = multiplications(export_graph(network, (3, 8, 8)))
    asked = [layer.requested for layer in layers]
    assert asked == ["FP16", "FP4", "FP4", "FP4", "FP4", "FP16"]
    for layer in layers[1:5]:
        axis = "input features" if layer.operator in ("MatMul", "Gemm") else "input channels"
        assert layer.weight.axes == layer.activation.axes == (axis,)
        assert layer.weight.contracted
        assert layer.activation.contracted
    runs = [TARGETS["tensorrt-rtx"].rule(layer).runs for layer in layers]
    assert runs == ["FP16", "FP16", "FP16", "refused", "FP4", "FP16"]


Moves = list[tuple[str, tuple[int, ...] | None, dict[str, Any]]]
LAYOUTS: list[tuple[tuple[int, ...], Moves]] = [
    ((32, 48), []),
    ((32, 48), [("Identity", None, {}), ("Cast", None, {"to": 1})]),
    ((32, 48), [("Transpose", None, {})]),
    ((32, 48), [("Transpose", None, {"perm": [1, 0]})]),
    ((2, 16, 48), [("Transpose", None, {"perm": [2, 0, 1]}), ("Reshape", (0, -1), {})]),
    ((32, 48), [("Reshape", (48, 32), {})]),
    ((32, 48), [("Reshape", (0, 3, 16), {}), ("Transpose", None, {"perm": [1, 0, 2]}), ("Reshape", (-1, 16), {})]),
    ((2, 16, 48), [("Flatten", None, {})]),
    ((2, 16, 48), [("Flatten", None, {"axis": 2})]),
    ((2, 16, 48), [("Flatten", None, {"axis": -1})]),
    ((32, 1, 48), [("Squeeze", (1,), {})]),
    ((32, 1, 48), [("Squeeze", None, {})]),
    ((32, 48), [("Unsqueeze", (0,), {})]),
    ((32, 48), [("Unsqueeze", (2,), {}), ("Transpose", None, {"perm": [2, 1, 0]}), ("Squeeze", (0,), {})]),
    ((32, 48), [("Pad", (0, 0, 0, 8), {})]),
    ((32, 48), [("Pad", (16, 0, 0, 0), {})]),
    ((32, 48), [("Pad", (1, 2, 3, 4), {}), ("Transpose", None, {})]),
]


def _moved(nodes: list[onnx.NodeProto], constants: list[onnx.TensorProto], first: str, moves: Moves) -> str:
    """The name of what the operators make of `first`."""
    for number, (op, numbers, attributes) in enumerate(moves):
        inputs = [first]
        if numbers is not None:
            constants.append(numpy_helper.from_array(np.array(numbers), f"numbers.{number}"))
            inputs.append(f"numbers.{number}")
        first = f"moved.{number}"
        nodes.append(helper.make_node(op, inputs, [first], **attributes))
    return first


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize(("shape", "moves"), LAYOUTS)
def test_blocks_lie_where_onnx_runtime_moves_their_elements(shape: tuple[int, ...], moves: Moves, axis: int) -> None:
    if shape[axis] % 16:
        shape = (16, *shape[1:])
    nodes, constants = _weight(list(shape), axis)
    named = _moved(nodes, constants, "w", moves)
    blocks = np.arange(1, 1 + np.prod(shape) // 16, dtype=np.float32)
    ids = np.moveaxis(blocks.reshape(*np.delete(shape, axis), -1).repeat(16, -1), -1, axis)
    moving: list[onnx.NodeProto] = []
    place = _moved(moving, held := [numpy_helper.from_array(ids, "w")], "w", moves)
    graph = helper.make_graph(moving, "g", [], [helper.make_tensor_value_info(place, 1, None)], held)
    copied = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    moved = ort.InferenceSession(copied.SerializeToString()).run(None, {})[0]
    assert moved.size >= np.prod(shape)
    along = [at for at in range(moved.ndim) if ((np.diff(moved, axis=at) == 0) & (np.delete(moved, 0, at) > 0)).any()]
    names = [*(f"batch axis {at}" for at in range(moved.ndim - 2)), "input features", "output features"]
    inner, outer = moved.shape[-2:]
    product = helper.make_node("MatMul", ["x", named], ["y"])
    layer = _one(_model([*nodes, product], constants, [4, inner], [*moved.shape[:-2], 4, outer]))
    assert layer.weight.axes == tuple(names[at] for at in along)
    assert layer.weight.contracted == (along == [moved.ndim - 2] if along else None)


def _is_fp8(kind: int, scale: list[int], axis: int) -> onnx.ModelProto:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s"], ["a"]),
        helper.make_node("DequantizeLinear", ["codes", "scale"], ["w"], axis=axis),
        helper.make_node("Conv", ["a", "w"], ["y"], name="conv"),
    ]
    constants = [
        _constant("codes", kind, [32, 64, 3, 3]), _constant("scale", 1, scale),
        _constant("s", 1, []), _constant("zero", kind, []),
    ]  # fmt: skip
    return _model(nodes, constants, [1, 64, 8, 8], [1, 32, 6, 6])


@pytest.mark.parametrize("scale", [[], [32]])
def test_fp8_convolutions_run_in_fp8(scale: list[int]) -> None:
    layer = _one(_is_fp8(FP8, scale, 0))
    assert layer.requested == "FP8"
    assert TARGETS["tensorrt-rtx"].rule(layer).runs == "FP8"
    assert TARGETS["onnxruntime"].rule(layer).runs == "FP32"


def test_quantisers_of_tensorrt_in_files_of_modelopt() -> None:
    """Its own export writes operators of TensorRT, and types their codes as UINT8."""

    def encoded(source: str, target: str) -> list[onnx.NodeProto]:
        quantize = helper.make_node("TRT_FP8QuantizeLinear", [source, "s"], [f"{target}.codes"], domain="trt")
        dequantize = helper.make_node("TRT_FP8DequantizeLinear", [f"{target}.codes", "s"], [target], domain="trt")
        return [quantize, dequantize]

    convolution = helper.make_node("Conv", ["a", "w"], ["y"], name="conv")
    constants = [_constant("weight", 1, [32, 64, 3, 3]), _constant("s", 1, [])]
    nodes = [*encoded("x", "a"), *encoded("weight", "w"), convolution]
    model = _model(nodes, constants, [1, 64, 8, 8], [1, 32, 6, 6])
    model.graph.value_info.append(helper.make_tensor_value_info("a.codes", TensorProto.UINT8, [1, 64, 8, 8]))
    layer = _one(model)
    assert (str(layer.weight), str(layer.activation)) == ("FP8, tensor", "FP8, tensor")
    assert TARGETS["tensorrt-rtx"].rule(layer).runs == "FP8"
    assert "does not have" in TARGETS["onnxruntime"].rule(layer).reason
    weight = weight_initializer(ir.from_proto(model).graph[-1])
    assert weight is not None
    assert weight.name == "weight"


def test_codes_have_the_type_of_their_zero_point() -> None:
    model = _is_fp8(FP8, [], 0)
    model.graph.value_info.append(helper.make_tensor_value_info("xq", TensorProto.UINT8, [1, 64, 8, 8]))
    model.graph.node[0].domain = "trt"  # as ModelOpt writes it, so that no type is inferred
    layer = _one(model)
    assert layer.requested == "FP8"
    assert TARGETS["onnxruntime"].rule(layer).runs == "refused"


def test_weights_alone() -> None:
    nodes, constants = _weight([64, 32], 0)
    model = _model([*nodes, helper.make_node("MatMul", ["x", "w"], ["y"])], constants, [4, 64], [4, 32])
    layer = _one(model)
    assert layer.requested == "FP4 weights"
    verdict = TARGETS["tensorrt-rtx"].rule(layer)
    assert (verdict.runs, verdict.fell_back(layer.requested)) == ("FP32", False)


class Random(CalibrationDataReader):
    """Two random images."""

    def __init__(self) -> None:
        self.images = iter(np.random.default_rng(0).normal(size=(2, 1, 3, 8, 8)).astype(np.float32))

    def get_next(self) -> dict[str, np.ndarray] | None:
        image = next(self.images, None)
        return None if image is None else {"x": image}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A convolution and a GEMM, quantised by ONNX Runtime's own tool in both of its forms."""
    folder = tmp_path_factory.mktemp("quantized")
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(random.normal(size=shape).astype(np.float32), name)
        for name, shape in (("kernel", (16, 3, 3, 3)), ("matrix", (576, 8)))
    ]
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["c"], name="conv"),
        helper.make_node("Flatten", ["c"], ["f"]),
        helper.make_node("MatMul", ["f", "matrix"], ["y"], name="product"),
    ]
    model = _model(nodes, weights, [1, 3, 8, 8], [1, 8])
    del model.opset_import[1]
    model.opset_import[0].version, model.ir_version = 21, 10
    onnx.save(model, folder / "plain.onnx")
    for form in (QuantFormat.QDQ, QuantFormat.QOperator):
        quantize_static(folder / "plain.onnx", folder / f"{form.name}.onnx", Random(), quant_format=form)
    return folder


def test_integer_graphs_of_onnx_runtime(quantized: Path) -> None:
    plain, pairs, operators = (audit_file(quantized / f"{name}.onnx").rows for name in ("plain", "QDQ", "QOperator"))
    assert [row.runs for row in plain] == ["FP32", "FP32"]
    assert [(row.requested, row.runs) for row in pairs] == [("INT8", "refused")] * 2  # its images have a zero point
    assert all("zero point" in row.reason for row in pairs)
    assert [(row.requested, row.runs) for row in operators] == [("INT8", "refused")] * 2
    assert all(row.fell_back for row in operators)


def test_a_convolution_in_blocked_layout_has_the_name_of_its_node() -> None:
    called = {"op_name": "Conv", "provider": "CPUExecutionProvider", "input_type_shape": [{"float": [1, 16, 8, 8]}]}
    event = {"cat": "Node", "name": "encoder.0.conv1_nchwc_kernel_time", "dur": 12, "args": called}
    (row,) = profile_rows([event], Path("profile.json"))
    assert (row["onnx_nodes"], row["runs"]) == (["encoder.0.conv1"], "FP32")


def test_a_profile_says_what_ran(quantized: Path) -> None:
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(quantized / "profile")
    session = ort.InferenceSession(quantized / "QDQ.onnx", options, providers=["CPUExecutionProvider"])
    for _ in range(3):
        session.run(None, {"x": np.zeros((1, 3, 8, 8), np.float32)})
    profile = Path(session.end_profiling())
    alone = audit_file(profile)
    assert [row.runs for row in alone.rows] == ["INT8", "INT8"]
    assert {row.requested for row in alone.rows} == {""}
    against = audit_file(profile, model=quantized / "QDQ.onnx")
    assert sorted((row.layer, row.requested, row.runs, row.fell_back) for row in against.rows) == [
        ("conv", "INT8", "INT8", False),
        ("product", "INT8", "INT8", False),
    ]


def test_kernels_called_after_the_value_they_write_find_their_nodes(tmp_path: Path) -> None:
    """Blocked layouts and fused activations, of a residual block whose nodes are called as torch's exporter does."""
    net = Onnx((1, 16, 8, 8))
    beside = net.conv("beside", "image", 16, 16, 1)
    inner = net.node("Relu", net.conv("inner", "image", 16, 16))
    net.node("Relu", net.node("Add", net.conv("outer", inner, 16, 16), beside))
    last = net.conv("last", net.nodes[-1].output[0], 16, 16)
    model = net.model(last)
    for number, node in enumerate(model.graph.node):
        node.name = f"node_{node.op_type}_{number}"
    onnx.save(model, tmp_path / "net.onnx")
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = ort.InferenceSession(tmp_path / "net.onnx", options, providers=["CPUExecutionProvider"])
    session.run(None, {"image": np.zeros((1, 16, 8, 8), np.float32)})
    rows = audit_file(Path(session.end_profiling()), model=tmp_path / "net.onnx").rows
    named = sorted((row.layer, row.requested, row.runs) for row in rows)
    assert named == [(node.name, "FP32", "FP32") for node in model.graph.node if node.op_type == "Conv"]


def _engine(precision: str) -> dict[str, Any]:
    tensor = {"Name": "a", "Dimensions": [4, 64], "Format/Datatype": precision}
    return {
        "Layers": [
            {"Name": "quantise", "LayerType": "kgen", "Inputs": [tensor], "Outputs": [tensor]},
            {
                "Name": "gemm_0",
                "LayerType": "gemm",
                "Inputs": [tensor],
                "Outputs": [{"Name": "y", "Dimensions": [4, 32], "Format/Datatype": "Half"}],
                "TacticName": "sm120_gemm",
                "Metadata": "[ONNX Layer: other]\x1f[ONNX Layer: product]",
            },
        ],
        "Bindings": ["x", "y"],
    }


@pytest.mark.parametrize(
    ("precision", "runs", "fell_back"),
    [
        ("FP4E2M1", "FP4", False),
        ("Half", "FP16", True),
        ("FP8E4M3", "FP8", True),
        ("Row major linear FP16 format", "FP16", True),
        ("Thirty-two wide channel vectorized row major Int8 format.", "INT8", True),
        ("Half of a channel vectorized for Int8, FP4 format", "FP4", False),  # the type is the last word of a sentence
        ("secret", "unknown", True),
    ],
)
def test_an_engine_says_what_runs(precision: str, runs: str, fell_back: bool, tmp_path: Path) -> None:
    onnx.save(_matmul(), tmp_path / "model.onnx")
    (tmp_path / "layers.json").write_text(json.dumps(_engine(precision)))
    (row,) = audit_file(tmp_path / "layers.json", model=tmp_path / "model.onnx").rows
    assert (row.layer, row.requested, row.runs, row.fell_back) == ("product", "FP4", runs, fell_back)


@pytest.mark.parametrize(
    ("place", "weight"),
    [
        *(("Constants", weight) for weight in ("FP4E2M1", "FP8E4M3", "Int8", "Half", "Float")),
        *(("Inputs", weight) for weight in ("FP4E2M1", "Int8", "Half", "Float")),  # FP8 of several axes: block scales
    ],
)
@pytest.mark.parametrize("activation", ["FP4E2M1", "FP8E4M3", "Int8", "Half", "Float"])
def test_an_operand_that_is_narrower_is_decoded(activation: str, weight: str, place: str, tmp_path: Path) -> None:
    """Weights that are stored in FP4 and multiplied in FP16 are no FP4 GEMM; scales and biases are no operands."""
    given = [_tensor(weight, [64, 32]), *([_tensor("FP8E4M3", [1, 4, 32])] if weight == "FP4E2M1" else [])]
    engine = _engine(activation)
    engine["Layers"][1].setdefault(place, []).extend(given)
    engine["Layers"][1].setdefault("Constants", []).extend([_tensor("Float", []), _tensor("Half", [32])])
    widths = {"FP4E2M1": "FP4", "FP8E4M3": "FP8", "Int8": "INT8", "Half": "FP16", "Float": "FP32"}
    expected = widths[max(activation, weight, key=list(widths).index)]
    assert _run(engine, tmp_path) == (expected, expected != "FP4")


@pytest.mark.parametrize("added", ["Half", "Float"])
@pytest.mark.parametrize("kind", ["FP4E2M1", "FP8E4M3", "Int8"])
def test_a_feature_map_that_is_added_is_no_operand(kind: str, added: str, tmp_path: Path) -> None:
    for place in ("Inputs", "Constants"):
        engine = _engine(kind)
        layer = engine["Layers"][1]
        layer["Inputs"] = [_tensor(kind, [4, 64]), _tensor(added, [4, 32])]
        layer["Constants"] = [_tensor(added, [1, 32])]
        layer[place].append(_tensor(kind, [64, 32]))
        assert _run(engine, tmp_path)[0] == {"FP4E2M1": "FP4", "FP8E4M3": "FP8", "Int8": "INT8"}[kind]


@pytest.mark.parametrize("bias", ["Half", "Float"])
def test_a_bias_alone_is_no_operand(bias: str, tmp_path: Path) -> None:
    """Of products of two activations, and where the weight is not listed."""
    for inputs in (["FP4E2M1"], ["FP4E2M1", "FP8E4M3", "FP4E2M1", "FP8E4M3"]):
        engine = _engine("FP4E2M1")
        engine["Layers"][1]["Inputs"] = [_tensor(kind, [1, 4, 64]) for kind in inputs]
        engine["Layers"][1]["Constants"] = [_tensor(bias, [32])]
        assert _run(engine, tmp_path) == ("FP4", False)


def _tensor(kind: str, shape: list[int]) -> dict[str, Any]:
    return {"Name": kind, "Dimensions": shape, "Format/Datatype": kind}


def _run(engine: dict[str, Any], folder: Path) -> tuple[str, bool]:
    """What the one product of an engine runs in, and whether it fell back."""
    onnx.save(_matmul(), folder / "model.onnx")
    (folder / "layers.json").write_text(json.dumps(engine))
    (row,) = audit_file(folder / "layers.json", model=folder / "model.onnx").rows
    return row.runs, row.fell_back


def test_a_node_that_no_kernel_names_is_a_row(tmp_path: Path) -> None:
    onnx.save(_matmul(), tmp_path / "model.onnx")
    engine = _engine("FP4E2M1")
    engine["Layers"][1]["Metadata"] = ""
    (tmp_path / "layers.json").write_text(json.dumps(engine))
    rows = audit_file(tmp_path / "layers.json", model=tmp_path / "model.onnx").rows
    assert [(row.layer, row.runs, row.fell_back) for row in rows] == [
        ("gemm_0", "FP4", False),
        ("product", "unknown", True),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"{", "cannot be read as JSON"),
        ("a.json", b"[" * 100_000, "deeper than 64 levels"),
        ("a.json", b"{}", "neither layer information"),
        ("a.json", b'{"Layers": ["conv1", "conv2"]}', "profilingVerbosity=detailed"),
        ("a.json", b'{"Layers": []}', "profilingVerbosity=detailed"),
        ("a.onnx", b"\0" * 50, "ONNX"),
        ("b.onnx", None, "does not exist"),
        ("b.json", None, "no file"),
    ],
)
def test_other_files_are_refused(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        audit_file(tmp_path / name)


def test_an_unknown_target_lists_the_known(tmp_path: Path) -> None:
    onnx.save(_matmul(), tmp_path / "model.onnx")
    with pytest.raises(InputError, match="tensorrt-rtx, tensorrt, onnxruntime"):
        audit_file(tmp_path / "model.onnx", "tpu")


def _gemm_of_modelopt(bias: int) -> onnx.ModelProto:
    """As ModelOpt writes a linear layer: operands cast to FP16, codes among the inputs, a name for a size it lost."""
    nodes, constants = _weight([32, 64], 1)
    half = [helper.make_node("Cast", [name], [f"{name}16"], to=TensorProto.FLOAT16) for name in ("a", "w")]
    product = helper.make_node("Gemm", ["a16", "w16", "bias"], ["product"], name="fc", transB=1)
    bias_value = helper.make_tensor("bias", bias, [32], bytes(32 * (4 if bias == TensorProto.FLOAT else 2)), raw=True)
    last = helper.make_node("Cast", ["product"], ["y"], to=TensorProto.FLOAT)
    model = _model([*_dynamic("x", "a", -1), *nodes, *half, product, last], [*constants, bias_value], [4, 64], [4, 32])
    model.graph.input.append(helper.make_tensor_value_info("codes", FP4, [32, 64]))
    model.graph.value_info.append(helper.make_tensor_value_info("a16", TensorProto.FLOAT16, [4, "lost"]))
    return model


def test_a_bias_of_another_type_than_the_operands_is_refused() -> None:
    """ModelOpt writes an FP32 bias beside FP16 operands unless the whole file is FP16; TensorRT-RTX refuses it."""
    assert TARGETS["tensorrt-rtx"].rule(_one(_gemm_of_modelopt(TensorProto.FLOAT16))).runs == "FP4"
    verdict = TARGETS["tensorrt-rtx"].rule(_one(_gemm_of_modelopt(TensorProto.FLOAT)))
    assert (verdict.runs, verdict.reason) == ("refused", "its bias is FP32, and its operands are of another type")


def test_a_pooling_of_fp4_values_is_listed_where_its_quantizer_is_refused(tmp_path: Path) -> None:
    """The engine refuses the whole file for it, whatever its layers are in."""
    weight = numpy_helper.from_array(np.ones((8, 64, 3, 3), np.float32), "w")
    pool = helper.make_node("MaxPool", ["a"], ["pooled"], name="pool", kernel_shape=[2, 2])
    conv = helper.make_node("Conv", ["pooled", "w"], ["y"], name="conv")
    model = _model(
        [*_dynamic("x", "a", -1), pool, conv], [_constant("s", 1, []), weight], [1, 64, 32, 32], [1, 8, 29, 29]
    )
    onnx.save(model, tmp_path / "m.onnx")
    conv_row, pool_row = audit_file(tmp_path / "m.onnx").rows
    assert (conv_row.layer, conv_row.runs) == ("conv", "FP32")
    assert (pool_row.layer, pool_row.operator, pool_row.runs, pool_row.fell_back) == (
        "pool",
        "MaxPool",
        "refused",
        True,
    )
    assert pool_row.reason == "its input is quantised with 4 axes; TRT_FP4DynamicQuantize takes 2 or 3"


@pytest.mark.parametrize(("kernel", "runs"), [((5, 5), "FP8"), ((4, 8), "FP8"), ((7, 7), "FP16")])
def test_fp8_convolutions_have_at_most_32_taps(kernel: tuple[int, int], runs: str) -> None:
    weight = [_constant("codes", FP8, [32, 16, *kernel]), _constant("s", 1, []), _constant("zero", FP8, [])]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "zero"], ["x.codes"]),
        helper.make_node("DequantizeLinear", ["x.codes", "s"], ["a"]),
        helper.make_node("DequantizeLinear", ["codes", "s"], ["w"]),
        helper.make_node("Conv", ["a", "w"], ["y"], name="conv"),
    ]
    layer = _one(_model(nodes, weight, [1, 16, 32, 32], [1, 32, 33 - kernel[0], 33 - kernel[1]]))
    assert TARGETS["tensorrt-rtx"].rule(layer).runs == runs


def test_a_graph_that_reads_itself_is_refused(tmp_path: Path) -> None:
    """Following the operand to where it comes from would not end."""
    nodes = [
        helper.make_node("Identity", ["b"], ["a"]),
        helper.make_node("Cast", ["a"], ["b"], to=TensorProto.FLOAT),
        helper.make_node("Conv", ["x", "a"], ["y"], name="conv"),
    ]
    (tmp_path / "m.onnx").write_bytes(_model(nodes, [], [1, 3, 8, 8], [1, 4, 6, 6]).SerializeToString())
    with pytest.raises(InputError, match="'a' depends on itself"):
        audit_file(tmp_path / "m.onnx")


def test_a_node_without_its_inputs_is_one_error(tmp_path: Path) -> None:
    nodes = [helper.make_node("DequantizeLinear", ["x"], ["a"]), helper.make_node("Conv", ["a", "x"], ["y"])]
    (tmp_path / "m.onnx").write_bytes(_model(nodes, [], [1, 3, 8, 8], [1, 4, 6, 6]).SerializeToString())
    with pytest.raises(InputError, match="is not a graph that can be used here"):
        audit_file(tmp_path / "m.onnx")


def test_layer_information_of_other_types_is_refused(tmp_path: Path) -> None:
    layer = {"Name": "c", "LayerType": ["Convolution"], "Inputs": [{"Format/Datatype": {}}]}
    (tmp_path / "layers.json").write_text(json.dumps({"Layers": [layer]}))
    with pytest.raises(InputError, match=r"layer 0: LayerType = .* valid string"):
        audit_file(tmp_path / "layers.json")


def test_the_summary_counts_every_narrow_precision() -> None:
    def found(*runs: str) -> str:
        rows = (AuditRow("l", "Conv", "FP8", "", "", each, "", each in ("FP16", "refused")) for each in runs)
        return Audit("net.onnx", "target", "evidence", tuple(rows)).summary()

    assert found("FP8", "FP8", "FP16") == "0 of 3 layers run in FP4, 2 in FP8; 1 fall back."
    assert found("FP4", "INT8", "refused") == "1 of 3 layers run in FP4, 1 in INT8; 1 refused."


def _decoded_constant(kind: int, shape: tuple[int, ...], place: int, zero: int | None, block: int) -> onnx.ModelProto:
    """x @ w + b, of which one is decoded; its zero point is of a Constant node."""
    scale = np.full((shape[0] // block, *shape[1:]) if block else (), 0.1, np.float32)
    offset = helper.make_tensor("zero", kind, scale.shape, [zero or 0] * scale.size)
    decoder = helper.make_node(
        "DequantizeLinear",
        ["codes", "scale", *(["zero"] if zero is not None else [])],
        ["decoded"],
        **({"axis": 0, "block_size": block} if block else {}),
    )
    names = ["x", "w", "b"]
    names[place] = "decoded"
    constants = [
        helper.make_tensor("codes", kind, shape, [1] * int(np.prod(shape))), numpy_helper.from_array(scale, "scale"),
        numpy_helper.from_array(np.ones((64, 32), np.float32), "w"),
        numpy_helper.from_array(np.ones(32, np.float32), "b"),
    ]  # fmt: skip
    nodes = [helper.make_node("Constant", [], ["zero"], value=offset), decoder, helper.make_node("Gemm", names, ["y"])]
    return _model(nodes, constants, ["N", 64], ["N", 32])


@pytest.mark.parametrize(
    ("model", "fixed"),
    [
        (_decoded_constant(TensorProto.INT8, (64, 32), 1, 5, 0), True),
        (_decoded_constant(TensorProto.INT4, (64, 32), 1, 1, 32), False),
        (_decoded_constant(TensorProto.UINT8, (32,), 2, None, 0), True),
        (_decoded_constant(FP8, (32,), 2, None, 0), True),
    ],
)
def test_fix_is_named_where_it_mends(tmp_path: Path, model: onnx.ModelProto, fixed: bool) -> None:
    path = tmp_path / "a file.onnx"
    onnx.save(model, path)
    (row,) = audit_file(path).rows
    assert row.runs == "refused"
    assert (f"fp4deploy audit '{path}' --fix OUT.onnx" in row.reason) == fixed
    onnx.save(with_placed_quantizers(model)[0], path)
    assert [row.runs != "refused" for row in audit_file(path).rows] == [fixed]
