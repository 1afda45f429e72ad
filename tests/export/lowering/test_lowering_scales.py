"""Global scales of decoded operands become vectors: no value changes, and equal layers share kernels in the plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from fp4deploy.export.engine.build import build_engine
from fp4deploy.export.lowering.lower import lower
from tests.export.exported_models import UNET_SHAPE, images, unet
from tests.export.lowering.engine_graphs import CanonicalGraph, unet_graph

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")


def two_convolutions(channels: int = 32, out: int = 32) -> onnx.ModelProto:
    """Two 3x3 convolutions and an upsampling, each with global scales of its own."""
    graph = CanonicalGraph(seed=2)
    x = graph.conv("first", graph.image(6, 4, channels=channels), out, amax=3.7)
    return own_scales(graph.model(graph.up("up", graph.conv("second", x, out, amax=5.3), 16)))


def own_scales(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give every layer global scales that no other layer has, as training does."""
    for index, tensor in enumerate(model.graph.initializer):
        if tensor.name.endswith("global_scale"):
            scale = numpy_helper.to_array(tensor) * np.float32(1 + index / 997)
            tensor.CopyFrom(numpy_helper.from_array(scale, tensor.name))
    return model


def global_scales(model: onnx.ModelProto) -> dict[str, tuple[np.ndarray, int]]:
    """Name of every DequantizeLinear that reads block scales -> (its global scale, its axis)."""
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {
        node.name: (constants[node.input[1]], next((a.i for a in node.attribute if a.name == "axis"), 1))
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and node.input[1] in constants
    }


def evaluate(model: onnx.ModelProto, canonical: onnx.ModelProto, image: np.ndarray) -> np.ndarray:
    if not model.functions:
        model.functions.extend(canonical.functions)
    onnx.checker.check_model(model, full_check=True)
    (result,) = ReferenceEvaluator(model).run(None, {"image": image})
    return np.asarray(result)


@pytest.mark.parametrize("channels", [32, 24, 16, 3])
def test_values_are_the_same_bits(channels: int) -> None:
    canonical = two_convolutions(channels)
    image = np.random.default_rng(4).standard_normal((2, channels, 6, 4)).astype(np.float16)
    expected = evaluate(canonical, canonical, image)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_array_equal(evaluate(lower(canonical, "qdq").model, canonical, image), expected)


def test_exported_unet_keeps_its_bits() -> None:
    _, canonical = unet()
    image = images(1, UNET_SHAPE).numpy().astype(np.float16)
    expected = evaluate(canonical, canonical, image)
    np.testing.assert_array_equal(evaluate(lower(canonical, "qdq").model, canonical, image), expected)


def test_convolutions_get_vectors_and_gemms_keep_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp4deploy.export.lowering.lower.prefers_fp8", lambda layer: None)
    canonical = two_convolutions()
    before, after = global_scales(canonical), global_scales(lower(canonical, "auto").model)
    assert before.keys() == after.keys()
    for name, (scale, axis) in after.items():
        (scalar, _) = before[name]
        extent = {"first.weight": (32,), "second.weight": (32,), "first.input": (2,), "second.input": (2,)}
        layer = name.removesuffix(".scales_dequantized")
        assert scale.shape == extent.get(layer, ()), layer
        assert axis == (0 if layer in ("first.weight", "second.weight") else 1)
        assert scale.dtype == np.float32
        assert set(scale.reshape(-1)) == {scalar.item()}


def test_quantisers_keep_the_scalar_and_weights_their_bytes() -> None:
    canonical = two_convolutions()
    lowered = lower(canonical, "qdq").model
    tensors = {tensor.name: tensor for tensor in lowered.graph.initializer}
    quantisers = [node for node in lowered.graph.node if node.op_type == "TRT_FP4DynamicQuantize"]
    assert [list(tensors[node.input[1]].dims) for node in quantisers] == [[], [], []]
    for tensor in canonical.graph.initializer:
        if tensor.name.endswith((".codes", ".scales")):
            assert tensors[tensor.name].raw_data == tensor.raw_data


@pytest.mark.parametrize(("conv", "backend"), [("gemm", "tensorrt-rtx"), ("qdq", "tensorrt")])
def test_all_gemms_and_tensorrt_keep_every_scalar(conv: str, backend: str) -> None:
    lowered = lower(two_convolutions(), conv, backend).model
    assert {scale.shape for scale, _ in global_scales(lowered).values()} == {()}


@pytest.mark.rtx
@pytest.mark.nightly
class TestRtx:
    """What it does to plans of TensorRT-RTX."""

    @pytest.fixture(autouse=True)
    def _rtx(self) -> None:
        pytest.importorskip("tensorrt_rtx")

    def test_equal_layers_share_their_decoding_kernels(self, tmp_path: Path) -> None:
        sizes = []
        for layers in (1, 2, 3):
            graph = CanonicalGraph()
            x = graph.image(16, 16, channels=32)
            for index in range(layers):
                x = graph.conv(f"conv{index}", x, 32)
            onnx.save(own_scales(graph.model(x)), tmp_path / "model.onnx")
            sizes.append(build_engine(tmp_path / "model.onnx", tmp_path / "model.plan", conv="qdq").size_bytes)
        # one more layer is one more quantiser (its scale is in its source), and no decoding kernel
        assert sizes[2] - sizes[1] < 1.5 * 134_000

    def test_fp4_weights_halve_a_wide_plan(self, tmp_path: Path) -> None:
        sizes = {}
        for fp4 in (True, False):
            path = tmp_path / f"{fp4}.onnx"
            onnx.save(own_scales(unet_graph(1.0, 96, 96, fp4=fp4)), path)
            sizes[fp4] = build_engine(path, path.with_suffix(".plan"), conv="qdq").size_bytes
        assert sizes[True] <= 0.445 * sizes[False]
