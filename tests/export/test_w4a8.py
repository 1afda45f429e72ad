"""W4A8, MXFP4 weights and MXFP8 activations, from a prepared module to its files."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from onnx import helper
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.export.onnx.layers import layers_of, planned_layers
from fp4deploy.export.to_onnx import export_onnx, portable_name
from fp4deploy.export.to_packed import pack
from fp4deploy.formats import Mxfp4Tensor, Mxfp8Tensor, fake_quantize_mxfp4, fake_quantize_mxfp8
from fp4deploy.packed import PackedNetwork, read_packed
from fp4deploy.packed.describe import describe_packed
from fp4deploy.plugins.gemm.training import Window
from fp4deploy.qat import layer_plan, prepare
from fp4deploy.qat.load import deployed
from tests.export.packable_networks import Mixed


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return prepare(Mixed(), "w4a8_qat").eval()


def test_a_layer_multiplies_the_two_formats(model: nn.Module) -> None:
    plans = {plan.name: plan.precision for plan in layer_plan(model)}
    assert plans == {"stem": "FP16", "head": "FP16"} | dict.fromkeys(("body", "skip", "up", "point"), "W4A8")
    assert "X MXFP8 ceil RN along C, W^T MXFP4 floor RN along C" in str(model)
    x, layer = torch.randn(2, 24, 8, 8), model.body
    expected = nn.functional.conv2d(
        fake_quantize_mxfp8(x, 1), fake_quantize_mxfp4(layer.weight.detach(), 1), layer.bias, 2, 1
    )
    assert torch.equal(layer(x), expected)
    assert [name for name, _ in model.named_buffers()] == []  # nothing to calibrate


def test_a_packed_file_has_the_weight_and_computes_the_same(model: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 16, 16)
    written = pack(model, tmp_path / "mixed.fp4", example_inputs=x)
    assert written.verification is not None
    file = read_packed(tmp_path / "mixed.fp4")
    assert {node.precision for node in file.graph.nodes if hasattr(node, "precision")} == {"w4a8", "fp16"}
    assert file.graph.format() == 10
    codes, scales = (file.tensors[f"body.weight.{part}"] for part in ("codes", "scales"))
    assert [*codes.shape, *scales.shape] == [40, 3, 3, 16, 40, 3, 3, 1]
    assert {codes.dtype, scales.dtype} == {torch.uint8}
    network = PackedNetwork(file)
    body = next(node for node in file.graph.nodes if getattr(node, "layer", "") == "body")
    seen = torch.randn(1, 24, 8, 8)
    (found,) = network.run_node(body, [seen])
    assert torch.equal(found, deployed(model).body(seen).relu())
    assert network.precision_of(body) == "W4A8 as FP32"
    rows = {row[0]: row[2] for row in describe_packed(file)[2]}
    assert (rows["body"], rows["skip"]) == ("W4A8", "W4A8 decoded")


def multiplied(x: Mxfp8Tensor, w: Mxfp4Tensor, window: Window, pixels: tuple[int, int], *rest: object) -> torch.Tensor:
    """What `gather_gemm` computes."""
    dtype, bias, inverse = rest
    source, filters = x.dequantize().permute(0, 3, 1, 2), w.dequantize()
    if inverse:
        more = [size - (n - 1) * s + 2 * p - d * (k - 1) - 1 for size, n, k, s, p, d in zip(
            pixels, source.shape[2:], window.kernel, window.stride, window.padding, window.dilation, strict=True
        )]  # fmt: skip
        y = F.conv_transpose2d(
            source, filters.permute(3, 0, 1, 2), bias, window.stride, window.padding, more, 1, window.dilation
        )
    else:
        y = F.conv2d(source, filters.permute(0, 3, 1, 2), bias, window.stride, window.padding, window.dilation)
    assert tuple(y.shape[2:]) == pixels
    return y.permute(0, 2, 3, 1).to(dtype)


def test_a_kernel_gets_the_places_of_each_layer(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels as on Blackwell, here torch in their place; the layer of two groups has none."""
    pack(model, tmp_path / "mixed.fp4", example_inputs=torch.randn(2, 3, 16, 16), verify=False)
    decoded, network = (PackedNetwork(read_packed(tmp_path / "mixed.fp4")) for _ in range(2))
    monkeypatch.setattr("fp4deploy.packed.network.gather_gemm", multiplied)
    network.has_mixed_kernels = True
    shapes = {"body": (1, 24, 9, 8), "up": (2, 40, 4, 5), "point": (1, 6, 7, 64), "skip": (1, 64, 6, 6)}
    for node in (node for node in network.graph.nodes if getattr(node, "layer", "") in shapes):
        x = torch.randn(shapes[node.layer])
        network._load_weight(node, (x.shape[-1 if node.op == "linear" else 1],))
        (expected,), (found,) = decoded.run_node(node, [x]), network.run_node(node, [x])
        assert network.precision_of(node) == ("W4A8 as FP32" if node.layer == "skip" else "W4A8")
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected)


def test_single_layers_of_an_nvfp4_model_are_in_it() -> None:
    mixed = prepare(Mixed(), "nvfp4_qat+delayed", w4a8=["body", "up"], fp8="point")
    found = {plan.name: plan.precision for plan in layer_plan(mixed)}
    assert found == {"stem": "FP16", "body": "W4A8", "skip": "FP4", "up": "W4A8", "point": "FP8", "head": "FP16"}
    assert [name for name, _ in mixed.named_buffers()] == ["skip.input_amax", "point.input_amax"]
    assert mixed.body.recipe.name == mixed.skip.recipe.name
    with pytest.raises(InputError, match="up is among the layers of both fp8 and w4a8"):
        prepare(Mixed(), w4a8="up", fp8=["up", "body"])


def test_groups_that_a_block_would_cross_stay_out() -> None:
    grouped = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3, groups=2), nn.Conv2d(32, 4, 1))
    plans = layer_plan(grouped, "w4a8_qat")
    assert [plan.precision for plan in plans] == ["FP16"] * 3
    assert "a block of 32 would cross groups" in plans[1].reason
    with pytest.raises(InputError, match="a block of 32 would cross groups"):
        prepare(grouped, "w4a8_qat", include="1")


def test_the_onnx_file_has_both_operands_in_blocks(model: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 16, 16)
    written = export_onnx(model, x, tmp_path / "mixed.onnx", portable=True)
    assert written.verification is not None
    assert written.fp4_layers == 4
    canonical = onnx.load(tmp_path / "mixed.onnx")
    assert {plan["precision"] for plan in planned_layers(canonical).values()} == {"FP16", "W4A8"}
    blocked = [node for node in canonical.graph.node if "block_size" in {each.name for each in node.attribute}]
    assert [node.op_type for node in blocked].count("QuantizeLinear") == 4
    assert {helper.get_node_attr_value(node, "block_size") for node in blocked} == {32}
    assert [layer.precision for layer in layers_of(canonical)].count("W4A8") == 4
    assert [layer.precision for layer in layers_of(onnx.load(portable_name(written.path)))].count("W4A8") == 4
    with pytest.raises(InputError, match="4 layers are W4A8 .body.*no block scales that are powers of two"):
        lower(canonical)


def test_a_graph_finds_the_scale_of_every_block() -> None:
    """Amax values one ulp from 448 times a power of two, where a logarithm alone is wrong.

    Beside them elements that only the right scale holds: those far below the amax lose bits to a larger one.
    """
    steps = torch.arange(-100, 101, dtype=torch.float32)
    edges = 448 * torch.exp2(steps)
    amax = torch.cat([edges, torch.nextafter(edges, edges * 2), torch.nextafter(edges, edges / 2)])
    below = torch.exp2(-18 * torch.rand(len(amax), 31, generator=torch.Generator().manual_seed(0)))
    rows = torch.cat([amax[:, None], amax[:, None] * below], 1)
    layer = prepare(nn.Linear(32, 32, bias=False), "w4a8_qat")
    nn.init.eye_(layer.weight)
    portable = to_portable(export_graph(layer, rows[:2], rest="fp32"))
    session = ort.InferenceSession(portable.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: rows.numpy()})
    assert torch.equal(torch.from_numpy(found), fake_quantize_mxfp8(rows))
