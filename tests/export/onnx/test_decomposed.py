from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from fp4deploy.errors import InputError
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.quantize_function import QUANTIZE_OP, dynamic_quantize_function
from fp4deploy.export.onnx.session import portable_session
from fp4deploy.formats import decode_e2m1, deployed_amax, global_amax, global_scale, quantize_nvfp4, unpack_codes
from fp4deploy.qat import quantized_layers
from tests.export.exported_models import images, initializer, shapes, unet

AMAX = 2.7
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def quantiser(shape: list[int | str], axis: int, scale: float, **changes: object) -> onnx.ModelProto:
    """x -> quantise -> dequantise -> y, FP32 in and out."""
    attributes = {"axis": axis, "block_size": 16, "scale_type": 17, **changes}
    nodes = [
        helper.make_node(QUANTIZE_OP, ["x", "s"], ["codes", "scales"], name="q.quantize", domain="trt", **attributes),
        helper.make_node("DequantizeLinear", ["scales", "s"], ["steps"]),
        helper.make_node("DequantizeLinear", ["codes", "steps"], ["y"], axis=axis, block_size=16),
    ]
    inputs = [helper.make_tensor_value_info("x", T.FLOAT, shape)]
    outputs = [helper.make_tensor_value_info("y", T.FLOAT, shape)]
    constants = [numpy_helper.from_array(np.array(scale, np.float32), "s")]
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("trt", 1)]
    graph = helper.make_graph(nodes, "q", inputs, outputs, constants)
    functions = [dynamic_quantize_function()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11, functions=functions)


def quantise_in_ort(x: NDArray[np.float32], axis: int, scale: float) -> list[NDArray[np.float32]]:
    """[block scales decoded from E4M3, element values, dequantised] in ONNX Runtime; the first two in blocks."""
    model = to_portable(quantiser(["N", *x.shape[1:]], axis, scale))
    names = [next(n for n in model.graph.node if n.name == role).output[0] for role in ("q.scale", "q.values")]
    model.graph.output.extend(helper.make_tensor_value_info(name, T.FLOAT, None) for name in names)
    return portable_session(model).run([*names, "y"], {"x": x})


def awkward(name: str) -> NDArray[np.float32]:
    """[2, 48, 40] inputs that break careless implementations."""
    random = np.random.default_rng(7)
    x = random.standard_normal((2, 48, 40)).astype(np.float32)
    if name == "heavy tails":
        x = (random.standard_t(1.5, x.shape) * np.exp(random.normal(0, 8, (2, 48, 1)))).astype(np.float32)
    elif name == "zeros":
        x[:, ::3], x[:, 16:32], x[0, 0] = 0, 0, -0.0
    elif name == "tiny":
        x *= np.float32(1e-30)
        x[1] *= np.float32(1e-8)
    elif name == "beyond the amax":
        x *= np.float32(40)
    elif name == "huge":
        x *= np.float32(1e30)
    elif name == "ties":
        steps = np.array([0.0, *TIES, 6.0, -0.25, -0.75, -1.75, -2.5, -5.0, 0.5, 3.0], np.float32)
        x = np.broadcast_to(np.tile(steps, 3)[None, :, None], x.shape).copy()
        x *= np.exp2(random.integers(-6, 1, (2, 1, 40))).astype(np.float32)
    elif name == "scale ties":
        exact = np.float32(AMAX / 448 / 6) * (1 + np.arange(40, dtype=np.float32) / 16)
        x = np.broadcast_to(exact * 6, x.shape) * np.sign(x)
    return np.ascontiguousarray(x, np.float32)


CASES = ("normal", "heavy tails", "zeros", "tiny", "beyond the amax", "huge", "ties", "scale ties")


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("case", CASES)
def test_scales_and_codes_are_those_of_formats(case: str, axis: int) -> None:
    scale = global_scale(np.float32(AMAX))
    x = awkward(case)
    expected = quantize_nvfp4(torch.from_numpy(x).movedim(1, -1), amax=float(global_amax(scale)))
    x = x if axis == 1 else np.ascontiguousarray(x.swapaxes(1, 2))
    d8, q, y = quantise_in_ort(x, axis, float(scale))
    if axis == 1:  # [N, blocks, 16, P] -> [N, P, blocks, 16]
        d8, q, y = d8.transpose(0, 3, 1, 2), q.transpose(0, 3, 1, 2), y.swapaxes(1, 2)
    assert (d8[..., 0] == expected.scales.float().numpy()).all()
    values = decode_e2m1(unpack_codes(expected.codes)).numpy()
    assert (q.reshape(values.shape) == values).all()
    assert (y == expected.dequantize().numpy()).all()


def test_rounding_is_right_around_every_boundary() -> None:
    """A block that holds a 6 has e = 1 for amax 2688, so that only the rounding of the graph is seen."""
    points = np.array([*TIES, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.5, 6.0], np.float32)
    ulps = np.arange(-200, 201, dtype=np.int32)
    near = (points.view(np.int32)[:, None] + ulps).view(np.float32).ravel()
    random = np.random.default_rng(0).uniform(0, 6, 60_000).astype(np.float32)
    u = np.minimum(np.concatenate([near, random, np.geomspace(1e-40, 1, 4000, dtype=np.float32)]), 6)
    u = np.resize(np.concatenate([u, -u]), (-(-2 * len(u) // 15), 15)).astype(np.float32)
    x = np.concatenate([np.full((len(u), 1), 6, np.float32), u], axis=1)
    _, q, _ = quantise_in_ort(x[:, :, None], 1, 1.0)
    expected = decode_e2m1(unpack_codes(quantize_nvfp4(torch.from_numpy(x), amax=2688.0).codes)).numpy()
    assert (q.reshape(expected.shape) == expected).all()


@pytest.mark.parametrize("amax", [1e-38, 1e-30, 3e30, 1e38])
def test_extreme_global_scales(amax: float) -> None:
    scale = global_scale(amax)
    x = awkward("normal") * np.float32(amax / 3)
    expected = quantize_nvfp4(torch.from_numpy(x).movedim(1, -1), amax=float(global_amax(scale)))
    d8, _, _ = quantise_in_ort(x, 1, float(scale))
    assert (d8[:, :, 0].transpose(0, 2, 1) == expected.scales.float().numpy()).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_non_finite_input_shows_and_stays_in_its_block(poison: float) -> None:
    x = awkward("normal")
    clean = quantise_in_ort(x, 1, float(global_scale(np.float32(AMAX))))[2]
    x[0, 17, 3] = poison
    y = quantise_in_ort(x, 1, float(global_scale(np.float32(AMAX))))[2]
    assert np.isnan(y[0, 17, 3])
    assert np.isnan(poison) or np.isnan(y[0, 16:32, 3]).all()
    y[0, 16:32, 3] = clean[0, 16:32, 3]
    assert (y == clean).all()


@pytest.mark.parametrize("make", [unet, shapes])
def test_weights_are_those_of_formats(make: Callable) -> None:
    torch_model, canonical = make()
    portable = to_portable(canonical)
    for name, layer in quantized_layers(torch_model).items():
        codes = numpy_helper.to_array(initializer(portable, f"{name}.weight.dequantized.int8"))
        halves = numpy_helper.to_array(initializer(portable, f"{name}.weight.dequantized.half_steps"))
        assert codes.dtype == np.int8
        weight = layer.weight.detach()
        if isinstance(layer, torch.nn.ConvTranspose2d):
            weight = weight.permute(1, 2, 3, 0)
        elif isinstance(layer, torch.nn.Conv2d):
            weight = weight.permute(0, 2, 3, 1)
        expected = quantize_nvfp4(weight)
        deployed = deployed_amax(expected.amax)
        values = (codes.astype(np.float32) * halves).reshape(*expected.codes.shape[:-1], -1)
        shipped = dataclasses.replace(expected, amax=deployed).dequantize().numpy()
        assert (values[..., : weight.shape[-1]] == shipped).all(), name
        assert not values[..., weight.shape[-1] :].any()


def test_the_decomposed_graph_has_standard_operators_in_fp32_only() -> None:
    _, canonical = unet()
    portable = to_portable(canonical)
    onnx.checker.check_model(portable, full_check=True)
    assert not portable.functions
    assert {node.domain for node in portable.graph.node} == {""}
    assert {entry.domain for entry in portable.opset_import} == {""}
    assert {tensor.data_type for tensor in portable.graph.initializer} <= {T.FLOAT, T.INT8, T.INT64}
    assert portable.graph.input[0].type.tensor_type.elem_type == T.FLOAT
    assert portable.graph.output[0].type.tensor_type.elem_type == T.FLOAT
    kept, given = ({each.key: each.value for each in model.metadata_props} for model in (portable, canonical))
    assert (kept.pop("fp4deploy.form"), given.pop("fp4deploy.form")) == ("decomposed", "canonical")
    assert kept == given
    assert canonical.graph.input[0].type.tensor_type.elem_type == T.FLOAT16  # the argument is not changed


def test_runtime_folds_the_weights(tmp_path) -> None:
    """Decoding weights for each image would cost more than the convolutions."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    content = to_portable(unet()[1]).SerializeToString()
    onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(tmp_path / "optimized.onnx")
    assert not [tensor.name for tensor in optimized.graph.initializer if tensor.data_type == T.INT8]
    constants = {tensor.name for tensor in optimized.graph.initializer}
    convolutions = [node for node in optimized.graph.node if node.op_type in ("Conv", "ConvTranspose")]
    assert convolutions
    assert all(node.input[1] in constants for node in convolutions)


@pytest.mark.parametrize(("make", "shape", "tolerance"), [(unet, (3, 32, 32), 0.35), (shapes, (3, 16, 24), 0.05)])
def test_the_decomposed_graph_follows_torch(make: Callable, shape: tuple[int, ...], tolerance: float) -> None:
    torch_model, canonical = make()
    x = images(3, shape)
    with torch.no_grad():
        expected = torch_model(x).numpy()
    logits = portable_session(to_portable(canonical)).run(None, {"image": x.numpy()})[0]
    assert np.sqrt(((logits - expected) ** 2).mean() / (expected**2).mean()) < tolerance


def test_the_decomposed_fp16_graph_equals_torch() -> None:
    torch_model, canonical = unet(None)
    x = images(3)
    with torch.no_grad():
        expected = torch_model(x).numpy()
    logits = portable_session(to_portable(canonical)).run(None, {"image": x.numpy()})[0]
    assert np.abs(logits - expected).max() < 1e-4
    assert (logits.argmax(1) == expected.argmax(1)).mean() > 0.999


def test_batch_is_dynamic() -> None:
    session = portable_session(to_portable(shapes()[1]))
    x = images(3, (3, 16, 24)).numpy()
    together = session.run(None, {"image": x})[0]
    alone = np.concatenate([session.run(None, {"image": x[i : i + 1]})[0] for i in range(3)])
    assert together.shape == (3, 5)
    assert np.abs(together - alone).max() < 0.05 * np.abs(alone).max()


def _blocks_of(size: int, model: onnx.ModelProto) -> None:
    for attribute in (attribute for node in model.graph.node for attribute in node.attribute):
        if attribute.name == "block_size":
            attribute.i = size


def _float_scale(model: onnx.ModelProto) -> None:
    model.graph.initializer.pop()
    model.graph.input.append(helper.make_tensor_value_info("s", T.FLOAT, []))


def _codes_out(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Cast", ["codes"], ["z"], to=T.FLOAT))
    model.graph.output.append(helper.make_tensor_value_info("z", T.FLOAT, None))


@pytest.mark.parametrize(
    ("shape", "change", "message"),
    [
        (["N", 40, 8], None, "multiple of 16"),
        (["N", 48, 8], partial(_blocks_of, 32), "multiple of 32"),
        (["N", 64, 8], partial(_blocks_of, 64), "blocks are of 64; valid are 16 and 32"),
        (["N", 32, 8], _float_scale, "constant scalar"),
        (["N", 32, 8], _codes_out, "straight into DequantizeLinear"),
    ],
)
def test_forms_that_cannot_be_decomposed_are_refused(shape: list, change: Callable | None, message: str) -> None:
    model = quantiser(shape, 1, 0.01)
    if change:
        change(model)
    with pytest.raises(InputError, match=message):
        to_portable(model)


def test_foreign_operator_is_named() -> None:
    model = quantiser(["N", 32, 8], 1, 0.01)
    model.graph.node.append(helper.make_node("Frobnicate", ["y"], ["z"], name="odd", domain="other"))
    model.graph.output.append(helper.make_tensor_value_info("z", T.FLOAT, None))
    model.opset_import.append(helper.make_opsetid("other", 1))
    with pytest.raises(InputError, match="odd"):
        to_portable(model)


@pytest.mark.parametrize(("op", "window"), [("MaxPool", 2), ("AveragePool", 2), ("MaxPool", 5)])
def test_zeros_before_a_pooling_stay_zeros(op: str, window: int) -> None:
    """ONNX Runtime joins the two nodes unless the padding names its axes: a maximum would then ignore the zeros."""
    nodes = [
        helper.make_node("Pad", ["x", "pads"], ["padded"]),
        helper.make_node(op, ["padded"], ["y"], kernel_shape=[window, window], strides=[1, 1], pads=[0, 0, 0, 0]),
    ]
    inputs = [helper.make_tensor_value_info("x", T.FLOAT, ["N", 3, 4, 6])]
    outputs = [helper.make_tensor_value_info("y", T.FLOAT, None)]
    pads = numpy_helper.from_array(np.array([0, 0, 2, 1, 0, 0, 3, 2], np.int64), "pads")
    graph = helper.make_graph(nodes, "pooled", inputs, outputs, [pads])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    x = -torch.rand(2, 3, 4, 6) - 1
    (found,) = portable_session(to_portable(model)).run(None, {"x": x.numpy()})
    pool = torch.nn.functional.max_pool2d if op == "MaxPool" else torch.nn.functional.avg_pool2d
    expected = pool(torch.nn.functional.pad(x, (1, 2, 2, 3)), window, 1)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
