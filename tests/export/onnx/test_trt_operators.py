"""Files in TensorRT's own operators, as ModelOpt writes them: shapes, ONNX Runtime, and what the ledger says."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper

from fp4deploy.bench.runtimes.onnx_file import weights
from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.session import portable_session
from fp4deploy.export.onnx.trt_operators import with_shapes
from fp4deploy.formats import nvfp4_range, quantize_nvfp4

FP4, FP8 = TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E4M3FN
SCALE = 0.0125


def _model(
    nodes: list[onnx.NodeProto], constants: list[onnx.TensorProto], shape: list[int], out: list[int]
) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in (("x", shape), ("y", out)))
    graph = helper.make_graph(nodes, "graph", [x], [y], constants)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("trt", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return (x / SCALE).clamp(-448, 448).to(torch.float8_e4m3fn)


def _weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, 3, 3, 3, generator=generator), torch.randn(8, 16, 3, 3, generator=generator)]


def _fp8(quantize: str, decode: str) -> onnx.ModelProto:
    """Two convolutions in FP8; a size after the first quantiser has a name, as its exporter lost it."""
    nodes, constants = [], [numpy_helper.from_array(np.float32(SCALE), "s"), helper.make_tensor("zero", FP8, [], [0.0])]
    for number, (source, weight) in enumerate(zip(("x", "y0"), _weights(), strict=True)):
        inputs = [source, "s", *(["zero"] if quantize == "QuantizeLinear" else [])]
        nodes += [
            helper.make_node(quantize, inputs, [f"q{number}"], domain="trt"),
            helper.make_node(decode, [f"q{number}", "s"], [f"a{number}"], domain="trt"),
            helper.make_node("DequantizeLinear", [f"conv{number}.weight.codes", "s"], [f"w{number}"]),
            helper.make_node("Conv", [f"a{number}", f"w{number}"], [f"y{number}"], name=f"conv{number}"),
        ]
        raw = _e4m3(weight).view(torch.uint8).numpy().tobytes()
        constants.append(helper.make_tensor(f"conv{number}.weight.codes", FP8, list(weight.shape), raw, raw=True))
    nodes.append(helper.make_node("Relu", ["y1"], ["y"]))
    model = _model(nodes, constants, [1, 3, 12, 12], [1, 8, 8, 8])
    model.graph.value_info.append(helper.make_tensor_value_info("y0", TensorProto.FLOAT, [1, 16, "lost", "lost"]))
    return model


def _linear() -> onnx.ModelProto:
    """Two NVFP4 layers whose codes are listed among the inputs, and no function that defines the quantiser."""
    constants, nodes, source = [], [], "x"
    for number, (rows, size) in enumerate(((32, 64), (16, 32))):
        quantized = quantize_nvfp4(torch.randn(rows, size, generator=torch.Generator().manual_seed(number)))
        scale = np.float32(quantized.amax.item() / nvfp4_range())
        values = [f"{number}.codes", f"{number}.scales", f"{number}.s"]
        constants += [
            helper.make_tensor(values[0], FP4, [rows, size], quantized.codes.numpy().tobytes(), raw=True),
            helper.make_tensor(
                values[1], FP8, [rows, size // 16], quantized.scales.view(torch.uint8).numpy().tobytes(), raw=True
            ),
            numpy_helper.from_array(scale, values[2]),
        ]
        value = numpy_helper.from_array(np.float32(4 / nvfp4_range()))
        nodes += [
            helper.make_node("Constant", [], [f"s{number}"], value=value),
            helper.make_node(
                "TRT_FP4DynamicQuantize", [source, f"s{number}"], [f"q{number}", f"b{number}"], domain="trt", axis=-1,
                block_size=16, scale_type=17, name=f"quantize{number}",
            ),
            helper.make_node("DequantizeLinear", [f"b{number}", f"s{number}"], [f"d{number}"]),
            helper.make_node("DequantizeLinear", [f"q{number}", f"d{number}"], [f"a{number}"], axis=-1, block_size=16),
            helper.make_node("DequantizeLinear", values[1:], [f"e{number}"]),
            helper.make_node("DequantizeLinear", [values[0], f"e{number}"], [f"w{number}"], axis=-1, block_size=16),
            helper.make_node("Gemm", [f"a{number}", f"w{number}"], [f"y{number}"], name=f"fc{number}", transB=1),
        ]  # fmt: skip
        source = f"y{number}"
    nodes.append(helper.make_node("Relu", [source], ["y"]))
    model = _model(nodes, constants, [4, 64], [4, 16])
    model.graph.input.append(helper.make_tensor_value_info("0.codes", FP4, [32, 64]))
    model.graph.value_info.append(helper.make_tensor_value_info("y0", TensorProto.FLOAT, [4, "lost"]))
    return model


@pytest.mark.parametrize(
    ("quantize", "decode"),
    [("TRT_FP8QuantizeLinear", "TRT_FP8DequantizeLinear"), ("QuantizeLinear", "DequantizeLinear")],
)
def test_fp8_of_tensorrt_runs_in_onnx_runtime(quantize: str, decode: str) -> None:
    x = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(2))
    given = portable_session(to_portable(_fp8(quantize, decode))).run(None, {"x": x.numpy()})[0]
    for weight in _weights():
        x = F.conv2d(_e4m3(x).float() * SCALE, _e4m3(weight).float() * SCALE)
    np.testing.assert_allclose(given, x.relu().numpy(), rtol=0.1, atol=0.2)
    assert np.abs(given).max() > 1


def test_fp4_of_modelopt_runs_in_onnx_runtime() -> None:
    model = _linear()
    session = portable_session(to_portable(model))
    assert [each.name for each in session.get_inputs()] == ["x"]
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    given = session.run(None, {"x": x.numpy()})[0]
    for number, (rows, size) in enumerate(((32, 64), (16, 32))):
        weight = quantize_nvfp4(torch.randn(rows, size, generator=torch.Generator().manual_seed(number)))
        x = quantize_nvfp4(x, amax=torch.tensor(4.0)).dequantize(torch.float32) @ weight.dequantize(torch.float32).T
    np.testing.assert_allclose(given, x.relu().numpy(), rtol=1e-4, atol=1e-4)


def test_shapes_are_known_behind_the_quantizer() -> None:
    shapes = {value.name: value.type.tensor_type.shape for value in with_shapes(_linear()).graph.value_info}
    assert [size.dim_value for size in shapes["y0"].dim] == [4, 32]
    assert [node.domain for node in with_shapes(_linear()).graph.node].count("trt") == 2


def test_the_plan_of_a_foreign_file_says_what_it_asks_for() -> None:
    """A layer that is not computed in the format that the file asks for is a fallback, also without our metadata."""
    layers = lower(_fp8("TRT_FP8QuantizeLinear", "TRT_FP8DequantizeLinear")).layers
    assert [(each.name, each.requested, each.compute, each.weights) for each in layers] == [
        ("conv0", "FP8", "FP8", "FP8"), ("conv1", "FP8", "FP8", "FP8")
    ]  # fmt: skip
    assert [each.macs for each in layers] == [16 * 27 * 100, 8 * 144 * 64]
    assert [(each.requested, each.compute) for each in lower(_linear()).layers] == [("FP4", "FP4")] * 2


def test_an_int8_file_asks_for_int8() -> None:
    constants = [
        numpy_helper.from_array(np.float32(SCALE), "s"),
        numpy_helper.from_array(np.int8(0), "zero"),
        numpy_helper.from_array(_weights()[0].numpy(), "conv.weight"),
    ]
    nodes = []
    for source, target in (("x", "a"), ("conv.weight", "w")):
        nodes += [
            helper.make_node("QuantizeLinear", [source, "s", "zero"], [f"{target}.codes"]),
            helper.make_node("DequantizeLinear", [f"{target}.codes", "s", "zero"], [target]),
        ]
    nodes.append(helper.make_node("Conv", ["a", "w"], ["y"], name="conv"))
    model = _model(nodes, constants, [1, 3, 12, 12], [1, 16, 10, 10])
    assert weights(model) == "INT8"  # stored in FP32, as ModelOpt leaves them
    (layer,) = lower(model).layers
    assert (layer.requested, layer.compute, layer.weights, layer.form) == ("INT8", "INT8", "INT8", "int8")
