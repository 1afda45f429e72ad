"""Operators that TensorRT-RTX refuses in BF16 stand between Casts to FP32."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from fp4deploy.export import build_engine, export_graph
from fp4deploy.export.lowering.forecast import forecast
from fp4deploy.export.lowering.lower import LACK_BF16, lower
from fp4deploy.qat import calibrate, prepare, quantized_layers
from fp4deploy.rest import BF16, RESTS

WIDE, NARROW = onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16


def network() -> nn.Module:
    """Transposed convolutions in FP4, of a single block and unquantised, and two activations."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Hardswish()),
        nn.Sequential(nn.ConvTranspose2d(16, 32, 4, 2, 1), nn.Mish()),
        nn.ConvTranspose2d(32, 16, 2, 2),
        nn.ConvTranspose2d(16, 1, 1, 2),
        nn.ConvTranspose2d(1, 4, 3, 2),
    ]
    model = nn.Sequential(*layers).eval()
    calibrate(prepare(model, include=["1*", "2", "3"]), torch.randn(1, 3, 8, 8))
    return model


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return network()


@pytest.fixture(scope="module")
def graph(model: nn.Module) -> onnx.ModelProto:
    return export_graph(model, (3, 8, 8), rest="bf16")


def types_of(proto: onnx.ModelProto) -> dict[str, set[int]]:
    """The types that each such operator reads."""
    inferred = onnx.shape_inference.infer_shapes(proto).graph
    known = {each.name: each.data_type for each in inferred.initializer}
    known |= {each.name: each.type.tensor_type.elem_type for each in (*inferred.value_info, *inferred.input)}
    return {
        node.op_type: {known.get(name, 0) for name in node.input} for node in inferred.node if node.op_type in LACK_BF16
    }


def test_what_an_engine_refuses_is_fp32(model: nn.Module, graph: onnx.ModelProto) -> None:
    assert types_of(graph) == {name: {NARROW} for name in LACK_BF16}, "ONNX has them"
    for conv in ("auto", "qdq", "gemm"):
        lowered = lower(graph, conv)
        assert types_of(lowered.model) == {name: {WIDE} for name in LACK_BF16}
        plan = {layer.name: layer for layer in lowered.layers}
        assert (plan["4"].compute, plan["4"].weights) == ("BF16", "BF16")
        for name, layer in quantized_layers(model).items():
            found = forecast(layer, conv, BF16)
            assert (found.compute, found.weights) == (plan[name].compute, plan[name].weights), (conv, name)


@pytest.mark.parametrize("rest", ["fp16", "fp32"])
def test_other_rests_stay(model: nn.Module, rest: str) -> None:
    found = types_of(lower(export_graph(model, (3, 8, 8), rest=rest), "qdq").model)
    (kind,) = {each for kinds in found.values() for each in kinds}
    assert onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize == RESTS[rest].bytes


@pytest.mark.rtx
@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="TensorRT-RTX is not installed")
def test_it_builds(graph: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(graph, tmp_path / "model.onnx")
    engine = build_engine(tmp_path / "model.onnx", tmp_path / "model.plan", conv="qdq")
    engine.ledger.require_no_fallback()
    rows = {row.layer: (row.planned, row.actual) for row in engine.ledger.layers}
    assert {rows[name] for name in ("1.0", "2")} == {("BF16", "BF16")}
