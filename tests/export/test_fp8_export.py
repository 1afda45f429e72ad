"""FP8 and INT8 layers in files: ONNX's own Q/DQ, equal to torch in ONNX Runtime, planned and built as such."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.engine.build import build_engine
from fp4deploy.export.lowering.cost import prefers_fp8, seconds
from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.lowering.pattern import find_fp4_layers
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.export.onnx.layers import layers_of
from fp4deploy.export.to_onnx import export_onnx
from fp4deploy.export.verify.layerwise import compare_layerwise
from fp4deploy.export.verify.outputs import compare_with_torch
from fp4deploy.formats import quantize_fp8, quantize_int8
from fp4deploy.peaks import find_gpu
from fp4deploy.qat import calibrate, deployed, prepare
from fp4deploy.timing.library import library_time
from tests.export.lowering.engine_graphs import CanonicalGraph

QUANTIZERS = {"fp8": quantize_fp8, "int8": quantize_int8}
EIGHT_BITS = pytest.mark.parametrize("eight", QUANTIZERS)
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@functools.cache
def mixed(eight: str = "fp8") -> tuple[nn.Module, onnx.ModelProto]:
    """A first layer in FP16, 3x3 in eight bits, 1x1 and 2x2 up in FP4, a linear head in eight bits."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.ReLU(),
        nn.Conv2d(24, 16, 1), nn.ConvTranspose2d(16, 16, 2, stride=2), nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    prepare(model.eval(), "nvfp4_qat", include=["2", "5", "6", "8", "11"], **{eight: ["2", "8", "11"]})
    calibrate(model, IMAGES)
    return model, export_graph(model, (3, 16, 16))


@EIGHT_BITS
def test_the_file_holds_codes_and_scales_of_the_reference(eight: str) -> None:
    model, graph = mixed(eight)
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}
    for name, axis in (("2", 0), ("8", 1), ("11", 0)):
        weight = QUANTIZERS[eight](model.get_submodule(name).weight.detach(), axis)  # type: ignore[arg-type]
        codes = weight.codes.T if name == "11" else weight.codes
        np.testing.assert_array_equal(held[f"{name}.weight.codes"].astype(np.float32), codes.float().numpy())
        assert held[f"{name}.weight.scales"].dtype == np.float16
        np.testing.assert_array_equal(held[f"{name}.weight.scales"], weight.scale.flatten().numpy())
    assert {layer.name: layer.precision for layer in layers_of(graph) if layer.weights} == {
        "0": "FP16", "3": "FP16", "5": "FP4", "6": "FP4", **dict.fromkeys(("2", "8", "11"), eight.upper())
    }  # fmt: skip
    assert "trt" not in {entry.domain for entry in export_graph(_alone(f"{eight}_qat"), (16, 8, 8)).opset_import}


def _alone(recipe: str) -> nn.Module:
    model = prepare(nn.Sequential(nn.Conv2d(16, 8, 3)).eval(), recipe, include="*")
    calibrate(model, torch.ones(1, 16, 8, 8))
    return model


@EIGHT_BITS
def test_onnx_runtime_computes_what_torch_does(eight: str) -> None:
    model, graph = mixed(eight)
    portable = to_portable(graph)
    quantisers = {"QuantizeLinear", "DequantizeLinear"} & {node.op_type for node in portable.graph.node}
    assert bool(quantisers) == (eight == "int8")  # whose kernels ONNX Runtime has
    found = compare_with_torch(deployed(model), portable, [IMAGES])
    assert found.largest < 1e-4


def test_layers_are_compared_without_blocks() -> None:
    """One image: the head reads 8 channels, half a block of FP4. Each element of an FP8 layer counts."""
    model, graph = mixed()
    found = compare_layerwise(deployed(model), to_portable(graph), [IMAGES[:1]])
    assert list(found.layers) == ["2", "5", "6", "8", "11"]
    assert (found.share, found.worst) == (1, 0)
    broken = onnx.ModelProto()
    broken.CopyFrom(graph)
    bias = next(tensor for tensor in broken.graph.initializer if tensor.name == "0.bias")
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + np.float16(0.5), bias.name))
    found = compare_layerwise(deployed(model), to_portable(broken), [IMAGES[:1]])
    assert found.blocks["2"] == round(found.layers["2"] * 16 * 16 * 16) > 1000


@EIGHT_BITS
def test_every_layer_is_in_the_file_that_is_written(eight: str, tmp_path: Path) -> None:
    result = export_onnx(mixed(eight)[0], IMAGES, tmp_path / "mixed.onnx", data=[IMAGES[:1]], outputs="values")
    assert (result.fp4_layers, result.unused_layers) == (5, ())


def test_an_uncalibrated_layer_is_named() -> None:
    with pytest.raises(InputError, match="0: its activations were never calibrated"):
        export_graph(prepare(nn.Sequential(nn.Conv2d(16, 8, 3)), "fp8_qat", include="*"), (16, 8, 8))


@EIGHT_BITS
def test_the_plan_keeps_what_the_model_asks_for(eight: str) -> None:
    plan = {layer.name: (layer.requested, layer.compute, layer.form) for layer in lower(mixed(eight)[1]).layers}
    assert plan["2"] == plan["11"] == (eight.upper(), eight.upper(), eight)
    assert plan["8"] == (eight.upper(), "FP16", eight)  # a transposed convolution
    assert plan["5"] == plan["6"] == ("FP4", "FP4", "gemm")
    assert plan["0"] == ("FP16", "FP16", "plain")


@EIGHT_BITS
def test_an_engine_multiplies_in_eight_bits(tmp_path: Path, eight: str) -> None:
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("TensorRT-RTX is not installed (pip install tensorrt-rtx)")
    onnx.save(mixed(eight)[1], tmp_path / "mixed.onnx")
    ledger = build_engine(tmp_path / "mixed.onnx", tmp_path / "mixed.plan").ledger
    ledger.require_no_fallback()
    rows = {row.layer: (row.actual, row.weights) for row in ledger.layers}
    assert rows["2"] == rows["11"] == (eight.upper(), eight.upper())
    assert rows["8"] == ("FP16", eight.upper())
    assert rows["5"] == rows["6"] == ("FP4", "FP4")
    assert set(ledger.shares()) == {"FP4", eight.upper(), "FP16"}
    assert f"1 layer requested {eight.upper()} and got another, 0 fallbacks" in ledger.summary()
    assert ledger.precision == "nvfp4"


def test_the_cost_model_by_hand() -> None:
    gpu = find_gpu("sm120")
    half, eight = seconds(gpu, 64 * 10_000, 9 * 64 * 64, 64 * 10_000, 10_000)
    product = (10_000, 64, 9 * 64)
    moved = 6 * 640_000 + 4.5625 * 36_864 + 2 * 640_000
    assert half == library_time("FP16", *product, moved, gpu).ms / 1e3
    assert eight == library_time("FP8", *product, 4 * 640_000 + 36_864 + 2 * 640_000, gpu).ms / 1e3
    assert half > eight > 2 * 9 * 64 * 64 * 10_000 / gpu.rate("FP8")


def test_auto_chooses_by_the_cost_model() -> None:
    import onnx_ir as ir

    graph = CanonicalGraph()
    x = graph.conv("wide", graph.image(16, 16, channels=32), 32)
    model = ir.from_proto(graph.model(graph.up("up", x, 16)))
    wide, up = find_fp4_layers(model)
    assert "times as fast as FP16 by the time model, not measured" in str(prefers_fp8(wide))
    assert prefers_fp8(up) is None  # a transposed convolution: an FP4 GEMM
