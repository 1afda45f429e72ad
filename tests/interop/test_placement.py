"""Q/DQ pairs moved to where an engine uses them: what is changed, which numbers stay, engines before and after."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.quantization import CalibrationDataReader, quantize_static

from fp4deploy.audit.report import audit_file
from fp4deploy.export.engine.build import build_engine
from fp4deploy.interop.placement import Edit, with_placed_quantizers
from tests.interop.onnx_files import Onnx
from tests.samples import sample

SIZE = (1, 16, 8, 8)


class Quantized(Onnx):
    """Graphs with INT8 weights and pairs of QuantizeLinear and DequantizeLinear anywhere."""

    def pair(self, x: str, scale: float = 0.03, zero: int = 0, dtype: Any = np.int8) -> str:
        constants = self.constant(f"{x}.scale", scale), self.constant(f"{x}.zero", zero, dtype)
        return self.node("DequantizeLinear", self.node("QuantizeLinear", x, *constants), *constants)

    def layer(self, x: str, before: int = 16) -> str:
        name = f"layer_{len(self.nodes)}"
        weight = self.random.normal(size=(16, before, 3, 3)) / 12
        scale = np.abs(weight).max((1, 2, 3)) / 127
        codes = self.constant(f"{name}.codes", np.rint(weight / scale[:, None, None, None]), np.int8)
        decoded = self.node("DequantizeLinear", codes, self.constant(f"{name}.scales", scale), axis=0)
        bias = self.constant(f"{name}.bias", self.random.normal(size=16) / 4)
        return self.node("Conv", x, decoded, bias, pads=[1] * 4)


def _activation(net: Quantized) -> str:
    return net.layer(net.node("Relu", net.pair(net.layer(net.pair("image")))))


def _resized(net: Quantized) -> str:
    scales = net.constant("scales", [1, 1, 2, 2])
    x = net.pair(net.node("Relu", net.layer(net.pair("image"))))
    return net.layer(net.node("Resize", x, "", scales, mode="nearest"))


def _concat(net: Quantized) -> str:
    x = net.pair("image")
    one, two = (net.pair(net.node("Relu", net.layer(x)), scale) for scale in (0.02, 0.03))
    return net.layer(net.node("Concat", one, two, axis=1), 32)


def _normalised(net: Quantized) -> str:
    x = net.pair(net.layer(net.pair("image")))
    numbers = [net.constant(f"norm.{at}", np.full(16, value)) for at, value in enumerate((1.5, 0.1, 0.2, 0.9))]
    return net.layer(net.pair(net.node("Relu", net.node("BatchNormalization", x, *numbers))))


def _residual(net: Quantized) -> str:
    x = net.node("Relu", net.layer(net.pair("image")))
    return net.layer(net.pair(net.node("Relu", net.node("Add", net.pair(net.layer(net.pair(x))), x))))


def _bias(net: Quantized) -> str:
    x = net.layer(net.pair("image"))
    scale, codes = net.constant("bias.scale", np.full(16, 1e-3)), net.constant("bias.codes", np.arange(16), np.int32)
    bias = net.node("DequantizeLinear", codes, scale, axis=0)
    convolution = next(node for node in net.nodes if node.op_type == "Conv")
    convolution.input[2] = bias
    net.nodes.remove(convolution)
    net.nodes.append(convolution)
    return x


def _statistics(net: Quantized) -> str:
    numbers = [net.constant(f"norm.{at}", np.full(16, value)) for at, value in enumerate((1.5, 0.1, 0.2, 0.9))]
    scale, codes = net.constant("bias.scale", np.full(16, 1e-3)), net.constant("bias.codes", np.arange(16), np.int32)
    numbers[1] = net.node("DequantizeLinear", codes, scale, axis=0)
    x = net.node("BatchNormalization", net.layer(net.pair("image")), *numbers)
    return net.layer(net.pair(net.node("Relu", x)))


def _unsigned(net: Quantized) -> str:
    """As ONNX Runtime's tool writes it: the codes without a sign are the Relu."""
    return net.layer(net.pair(net.layer(net.pair("image", zero=3)), zero=0, dtype=np.uint8))


CASES: list[tuple[Callable[[Quantized], str], list[str], int]] = [  # graph, what is done, decibels that remain
    (_activation, ["quantised after Relu", "goes into Relu unrounded"], 300),
    (_resized, ["quantised after Resize"], 300),
    (_concat, ["quantised after Concat"], 30),
    (_normalised, ["goes into BatchNormalization unrounded"], 30),
    (_residual, ["goes into Add unrounded", "adds the residual"], 25),
    (_bias, ["its bias is a constant"], 300),
    (_statistics, ["its bias is a constant"], 300),
    (_unsigned, ["INT8 without a zero point"] * 2, 30),
]


def _outputs(model: onnx.ModelProto) -> Any:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    image = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
    return session.run(None, {"image": image})[0]


def _decibels(one: Any, other: Any) -> float:
    return float(10 * np.log10(np.square(one).sum() / max(np.square(one - other).sum(), 1e-35)))


@pytest.mark.parametrize(("make", "done", "least"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_pair_is_moved_and_says_what_becomes_of_the_numbers(
    make: Callable[[Quantized], str], done: list[str], least: int, tmp_path: Path
) -> None:
    net = Quantized(SIZE, opset=21)
    model = net.model(make(net))
    fixed, edits = with_placed_quantizers(model)
    onnx.checker.check_model(fixed, full_check=True)
    assert len(edits) == len(done)
    assert all(text in edit.done for text, edit in zip(done, edits, strict=True)), edits
    assert _decibels(_outputs(model), _outputs(fixed)) > least
    assert edits[0].exact == (least == 300)
    again = with_placed_quantizers(fixed)
    assert again[1] == []
    onnx.save(model, tmp_path / "given.onnx")
    refused = [row for row in audit_file(tmp_path / "given.onnx").rows if row.runs == "refused"]
    assert bool(refused) == (make in (_bias, _unsigned))  # as the parser of TensorRT-RTX does
    assert all("--fix" in row.reason for row in refused)
    onnx.save(fixed, tmp_path / "fixed.onnx")
    assert [(row.requested, row.runs) for row in audit_file(tmp_path / "fixed.onnx").rows] == [
        ("INT8", "INT8") for node in model.graph.node if node.op_type == "Conv"
    ]


@pytest.mark.parametrize(
    ("zero", "dtype", "most"), [(100, np.int8, 228), (-100, np.int8, 227), (200, np.uint8, 200), (20, np.uint8, 235)]
)
def test_codes_without_a_zero_point_reach_as_far_on_either_side(zero: int, dtype: Any, most: int) -> None:
    net = Quantized(SIZE)
    fixed, _ = with_placed_quantizers(net.model(net.layer(net.pair("image", 0.03, zero, dtype))))
    tensors = {each.name: onnx.numpy_helper.to_array(each) for each in fixed.graph.initializer}
    quantizer = next(node for node in fixed.graph.node if node.op_type == "QuantizeLinear")
    assert float(tensors[quantizer.input[1]]) == pytest.approx(0.03 * most / 127)
    assert tensors[quantizer.input[2]] == 0


@pytest.mark.parametrize("scales", [(0.02, 0.5, 0.03), (0.5, 0.02, 0.03)])
def test_a_concatenation_is_quantised_with_its_largest_scale(scales: tuple[float, ...]) -> None:
    """Any other one cuts off what a part holds."""
    net = Quantized(SIZE)
    parts = [net.pair(net.node("Relu", net.layer(net.pair("image"))), scale) for scale in scales]
    model, _ = with_placed_quantizers(net.model(net.layer(net.node("Concat", *parts, axis=1), 48)))
    makers = {output: node for node in model.graph.node for output in node.output}
    last = next(node for node in reversed(model.graph.node) if node.op_type == "Conv")
    quantizer = makers[makers[last.input[0]].input[0]]
    held = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    assert (quantizer.op_type, makers[quantizer.input[0]].op_type) == ("QuantizeLinear", "Concat")
    assert float(held[quantizer.input[1]]) == pytest.approx(0.5)


def test_a_value_without_a_range_is_left_as_it_is() -> None:
    net = Quantized(SIZE, opset=21)
    model = net.model(net.layer(net.node("Relu", net.layer(net.pair("image")))))
    assert with_placed_quantizers(model)[1] == []


@pytest.mark.parametrize("make", sample([_activation, _resized, _bias, _concat, _unsigned], every=2))
def test_the_engine_multiplies_in_int8_that_did_not(make: Callable[[Quantized], str], tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("TensorRT-RTX is not installed (pip install tensorrt-rtx)")
    net = Quantized(SIZE, opset=21)
    model = net.model(make(net))
    onnx.save(model, tmp_path / "before.onnx")
    onnx.save(with_placed_quantizers(model)[0], tmp_path / "after.onnx")
    if make not in (_bias, _unsigned):  # which the parser refuses
        before = build_engine(tmp_path / "before.onnx", tmp_path / "before.plan").ledger
        assert "FP16" in before.shares() or "FP32" in before.shares()
    after = build_engine(tmp_path / "after.onnx", tmp_path / "after.plan").ledger
    assert set(after.shares()) == {"INT8"}
    after.require_requested()


def test_files_of_onnx_runtime_build_after_it(tmp_path: Path) -> None:
    """Its tool quantises biases to INT32 and activations with a zero point, and leaves a Relu to unsigned codes."""
    net = Onnx((1, 3, 16, 16))
    x = net.node("Relu", net.conv("a", "image", 3, 16))
    onnx.save(net.model(net.conv("b", x, 16, 4)), tmp_path / "plain.onnx")

    class Random(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [{"image": np.random.default_rng(0).normal(size=(1, 3, 16, 16)).astype(np.float32)}]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    quantize_static(tmp_path / "plain.onnx", tmp_path / "int8.onnx", Random(), per_channel=True)
    fixed, edits = with_placed_quantizers(onnx.load(tmp_path / "int8.onnx"))
    assert {"its bias is a constant, and no longer quantised"} < {edit.done for edit in edits}
    assert Edit("conv_0", "its bias is a constant, and no longer quantised", True) in edits
    image = Random().left[0]["image"]
    plain, again = (
        ort.InferenceSession(each, providers=["CPUExecutionProvider"]).run(None, {"image": image})[0]
        for each in (str(tmp_path / "plain.onnx"), fixed.SerializeToString())
    )
    assert _decibels(plain, again) > 28
    assert not {node.op_type for node in fixed.graph.node if "uint8" in node.op_type}
    zeros = [tensor for tensor in fixed.graph.initializer if tensor.data_type == onnx.TensorProto.UINT8]
    assert zeros == []


def _sum(net: Quantized) -> str:
    """A residual block of a detector: the sum has no quantiser of its own, and its parts have other scales."""
    x = net.pair(net.node("Relu", net.layer(net.pair("image"))), 0.02)
    return net.layer(net.node("Add", x, net.pair(net.node("Relu", net.layer(x)), 0.03)))


def _half(net: Quantized) -> str:
    """One half of the channels, cut where the file computes the middle, as torch's older exporter writes `chunk`."""
    x = net.pair(net.node("Relu", net.layer(net.pair("image"))))
    middle = net.node("Div", net.node("Gather", net.node("Shape", x), net.integers("one", 1), axis=0),
                      net.integers("two", 2))  # fmt: skip
    return net.layer(net.node("Slice", x, net.integers("zero", 0), middle, net.integers("axis", 1)), 8)


def _rows(model: onnx.ModelProto, path: Path) -> list[tuple[str, str]]:
    onnx.save(model, path)
    return [(row.requested, row.runs) for row in audit_file(path).rows]


def test_a_sum_is_quantised_by_the_ranges_of_its_parts(tmp_path: Path) -> None:
    net = Quantized(SIZE, opset=21)
    model = net.model(_sum(net))
    fixed, edits = with_placed_quantizers(model)
    assert [(edit.done, edit.exact) for edit in edits] == [
        ("its operand is quantised after Add, right before it", False)
    ]
    assert _decibels(_outputs(model), _outputs(fixed)) > 30
    assert _rows(model, tmp_path / "given.onnx")[-1] == ("INT8 weights", "FP32")
    assert _rows(fixed, tmp_path / "fixed.onnx") == [("INT8", "INT8")] * 3


@pytest.mark.parametrize("make", [_sum, _half])
def test_shares_of_an_engine_are_of_the_work_at_sizes_that_the_file_computes(
    make: Callable[[Quantized], str], tmp_path: Path
) -> None:
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("TensorRT-RTX is not installed (pip install tensorrt-rtx)")
    net = Quantized(SIZE, opset=17)
    model = net.model(make(net))
    rows = _rows(model, tmp_path / "net.onnx")
    ledger = build_engine(tmp_path / "net.onnx", tmp_path / "net.plan").ledger
    assert [row.macs for row in ledger.layers] == [
        8 * 8 * 9 * 16 * channels for channels in ((16, 16, 16) if make is _sum else (16, 8))
    ]
    assert [row.actual for row in ledger.layers] == [runs for _, runs in rows]
