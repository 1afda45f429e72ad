"""`--conv fp8`: what is written, what it computes, and that TensorRT-RTX takes it in FP8."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from fp4deploy.export.engine.build import build_engine
from fp4deploy.export.lowering.fp8 import decoded_weight, to_fp8
from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.lowering.pattern import find_fp4_layers
from fp4deploy.export.onnx.decomposed import to_portable
from tests.export.lowering.engine_graphs import CanonicalGraph


def convolutions(channels: int = 32, size: int = 16) -> onnx.ModelProto:
    """A 3x3, a strided and a 2x2 transposed convolution in FP4 between two in FP16."""
    graph = CanonicalGraph()
    x = graph.conv("deep", graph.conv("first", graph.image(size, size), channels, fp4=False), channels)
    x = graph.up("up", graph.pool("pool", x), channels)
    return graph.model(graph.conv("head", x, 4, kernel=1, fp4=False))


def test_weights_are_the_fp4_weights_within_half_a_step_of_e4m3() -> None:
    layer = next(each for each in find_fp4_layers(ir.from_proto(convolutions())) if each.name == "deep")
    weight = decoded_weight(layer)
    codes, scale = to_fp8(weight)
    again = codes.astype(np.float32) * scale.astype(np.float32).reshape(-1, 1, 1, 1)
    normal = np.abs(weight) > scale.astype(np.float32).reshape(-1, 1, 1, 1) * 2.0**-6
    assert normal.mean() > 0.5
    assert (np.abs(again - weight)[normal] <= np.abs(weight)[normal] * 2.0**-4 * 1.001).all()
    assert np.abs(codes.astype(np.float32)).reshape(len(codes), -1).max(1).min() >= 416  # each channel uses the range


def test_the_lowered_graph_computes_the_same_within_fp8() -> None:
    """Both graphs in ONNX Runtime; the FP4 rounding of activations is what differs most."""
    model = convolutions()
    image = np.random.default_rng(0).standard_normal((2, 3, 16, 16)).astype(np.float16)
    kinds = {layer.name: (layer.form, layer.compute, layer.weights) for layer in lower(model, "fp8").layers}
    assert kinds["deep"] == ("fp8", "FP8", "FP8")
    assert kinds["up"] == ("gemm", "FP4", "FP4")
    eight = lower(onnx.shape_inference.infer_shapes(only_convolution()), "fp8").model
    assert all(node.op_type != "TRT_FP4DynamicQuantize" for node in eight.graph.node)
    found, expected = (run(each, image) for each in (eight, to_portable(only_convolution())))
    assert np.linalg.norm(found - expected) < 0.12 * np.linalg.norm(expected)
    assert np.linalg.norm(found - expected) > 0
    onnx.checker.check_model(eight)


def only_convolution() -> onnx.ModelProto:
    """The network without the layers that become FP4 GEMMs, which ONNX Runtime cannot run."""
    graph = CanonicalGraph()
    x = graph.conv("deep", graph.conv("first", graph.image(16, 16), 32, fp4=False), 32)
    return graph.model(graph.conv("head", x, 4, kernel=1, fp4=False))


def run(model: onnx.ModelProto, image: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    wide = session.get_inputs()[0].type == "tensor(float)"
    return np.asarray(session.run(None, {"image": image.astype(np.float32) if wide else image})[0], np.float32)


def test_a_scale_that_fp16_cannot_hold_keeps_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4deploy.export.lowering import fp8

    monkeypatch.setattr(fp8, "activation_scale", lambda layer: 1e-6)
    kinds = {layer.name: layer.form for layer in lower(convolutions(), "fp8").layers}
    assert kinds["deep"] == "qdq"


@pytest.mark.rtx
@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="TensorRT-RTX is not installed")
def test_tensorrt_rtx_convolves_in_fp8(tmp_path: Path) -> None:
    onnx.save(convolutions(), tmp_path / "model.onnx")
    engine = build_engine(tmp_path / "model.onnx", tmp_path / "model.plan", conv="fp8")
    engine.ledger.require_no_fallback()
    rows = {row.layer: (row.requested, row.planned, row.actual, row.weights) for row in engine.ledger.layers}
    assert rows["deep"] == ("FP4", "FP8", "FP8", "FP8")
    assert rows["up"] == ("FP4", "FP4", "FP4", "FP4")


@pytest.mark.rtx
@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="TensorRT-RTX is not installed")
def test_kernels_of_more_than_32_taps_are_not_planned_in_fp8(tmp_path: Path) -> None:
    """The compiler decodes FP8 weights of 7x7, and a plan that said FP8 would be a fallback."""
    graph = CanonicalGraph()
    x = graph.conv("wide", graph.conv("first", graph.image(16, 16), 32, fp4=False), 32, kernel=7)
    onnx.save(graph.model(graph.conv("head", x, 4, kernel=1, fp4=False)), tmp_path / "model.onnx")
    engine = build_engine(tmp_path / "model.onnx", tmp_path / "model.plan", conv="fp8")
    engine.ledger.require_no_fallback()
    rows = {row.layer: (row.requested, row.planned, row.actual) for row in engine.ledger.layers}
    assert rows["wide"] == ("FP4", "FP16", "FP16")
