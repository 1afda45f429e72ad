"""The precision column names what the layers are quantised to, FP8 among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from onnx import TensorProto, helper

from fp4deploy.bench.artifact import not_run
from fp4deploy.bench.runtimes.open import open_runtime
from fp4deploy.bench.runtimes.precision import of_engine, of_layers, of_onnx
from fp4deploy.export.onnx.canonical import LAYERS_KEY
from fp4deploy.models import read_card
from fp4deploy.ptq import quantize_checkpoint
from fp4deploy.runs import Run
from tests.interop.onnx_files import segmenter


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"method": "fp8"}, "FP8 (emulated)"),
        ({"method": "amax", "fp8": ("encoder.1.conv1",)}, "NVFP4, FP8 (emulated)"),
        ({"method": "amax"}, "NVFP4 (emulated)"),
    ],
)
def test_of_checkpoints(options: dict[str, Any], expected: str, untrained: Run, tmp_path: Path) -> None:
    out, images = tmp_path / "quantised.safetensors", [torch.rand(1, 3, 32, 32)]
    chosen = ("encoder.0.conv2", "encoder.1.conv1")
    quantize_checkpoint(untrained.checkpoint("fp16"), images, out, include=chosen, correction="none", **options)
    assert open_runtime(out).precision == expected


def test_of_onnx_files(untrained: Run) -> None:
    card, model = read_card(untrained.checkpoint("nvfp4")), segmenter()
    assert (of_onnx(model, None), of_onnx(model, card)) == ("", "NVFP4")  # a file that does not list its layers
    plan = {"conv_0": {"precision": "FP16"}, "conv_3": {"precision": "FP8"}}
    helper.set_model_props(model, {LAYERS_KEY: json.dumps(plan)})
    assert of_onnx(model, card) == "FP8"
    plan["conv_5"] = {"precision": "FP4"}
    helper.set_model_props(model, {LAYERS_KEY: json.dumps(plan)})
    assert of_onnx(model, card) == "NVFP4, FP8"


def test_of_a_file_with_tensorrt_s_fp8_weights() -> None:
    """As ModelOpt writes them."""
    codes = helper.make_tensor("w", TensorProto.FLOAT8E4M3FN, [64, 64], bytes(64 * 64), raw=True)
    scale = helper.make_tensor("s", TensorProto.FLOAT, [], [0.1])
    nodes = [
        helper.make_node("TRT_FP8DequantizeLinear", ["w", "s"], ["decoded"], domain="trt"),
        helper.make_node("MatMul", ["x", "decoded"], ["y"], name="product"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 64]) for name in "xy"]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], [codes, scale])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("trt", 1)]
    assert of_onnx(helper.make_model(graph, opset_imports=opsets), None) == "FP8"


def test_of_engines(tmp_path: Path) -> None:
    assert [of_engine(None, name) for name in ("nvfp4", "fp16", "unknown")] == ["NVFP4", "FP16", "unknown"]
    (tmp_path / "a.plan").write_bytes(b"")
    assert not_run(tmp_path / "a.plan", "no GPU").precision == "unknown"
    assert of_layers(["FP16", "FP8", "FP4"]) == "NVFP4, FP8"
