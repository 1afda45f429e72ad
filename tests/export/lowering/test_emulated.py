"""The arithmetic of an engine in standard operators: each form against torch, with FP16 where the graph holds it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from fp4deploy.export import export_graph
from fp4deploy.export.lowering.emulation import emulated_engine
from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.session import portable_session
from fp4deploy.qat import deployed
from fp4deploy.rest import BF16
from tests.export.lowering.engine_graphs import CanonicalGraph

Array = NDArray[np.float32]


def convolutions() -> tuple[onnx.ModelProto, Array]:
    """FP16, then FP4 of every kind: 3x3, 2x2 transposed, 1x1; and an image whose numbers FP16 holds."""
    graph = CanonicalGraph()
    x = graph.conv("first", graph.image(12, 20), 32, fp4=False)
    x = graph.conv("point", graph.up("up", graph.conv("deep", x, 32), 32), 32, kernel=1)
    found = graph.model(graph.conv("head", x, 4, kernel=1, fp4=False))
    image = np.random.default_rng(1).standard_normal((2, 3, 12, 20)).astype(np.float16)
    return found, image.astype(np.float32)


def run(model: onnx.ModelProto, image: Array) -> Array:
    found: Array = portable_session(model).run(None, {"image": image})[0]
    return found


def distance(one: Array, other: Array) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize("conv", ["qdq", "gemm", "plugin"])
def test_forms_with_the_operands_of_the_file_differ_by_fp16_alone(conv: str) -> None:
    """A rounding moves a value over a boundary of E2M1 now and then; no operand is rounded to another format."""
    model, image = convolutions()
    found, exact = run(emulated_engine(model, conv), image), run(to_portable(model), image)
    assert 0 < distance(found, exact) < 0.03
    assert np.array_equal(found, found.astype(np.float16))
    assert not np.array_equal(exact, exact.astype(np.float16))


@pytest.mark.parametrize("conv", ["auto", "fp8"])
def test_a_convolution_in_fp8_reads_operands_that_are_rounded_again(conv: str) -> None:
    model, image = convolutions()
    assert {layer.name: layer.compute for layer in lower(model, conv).layers}["deep"] == "FP8"
    found, exact = run(emulated_engine(model, conv), image), run(to_portable(model), image)
    forms = run(emulated_engine(model, "gemm"), image)
    assert distance(found, exact) > 2 * distance(forms, exact)
    assert distance(found, exact) < 0.2


def test_an_fp8_convolution_is_torchs() -> None:
    """y = conv(fp8(x), fp8 weight), computed by torch from the constants of the lowered file."""
    graph = CanonicalGraph()
    model = graph.model(graph.conv("deep", graph.image(9, 7, channels=32), 16))
    constants = {each.name: each for each in lower(model, "fp8").model.graph.initializer}

    def half(name: str) -> torch.Tensor:
        return torch.from_numpy(onnx.numpy_helper.to_array(constants[name]).astype(np.float32))

    codes = torch.frombuffer(bytearray(constants["deep.weight"].raw_data), dtype=torch.float8_e4m3fn)
    weight = codes.float().reshape(16, 32, 3, 3) * half("deep.weight.scale").view(-1, 1, 1, 1)
    image = np.random.default_rng(2).standard_normal((1, 32, 9, 7)).astype(np.float16).astype(np.float32)
    step = half("deep.fp8.scale")
    x = (torch.from_numpy(image) / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step
    expected = F.conv2d(x, weight, half("deep.bias"), padding=1).half().float().numpy()
    found = run(emulated_engine(model, "fp8"), image)
    assert distance(found, expected) < 3e-4
    assert distance(run(to_portable(model), image), expected) > 3e-2


def test_what_leaves_fp16s_range_is_infinite_as_in_the_engine() -> None:
    model, image = convolutions()
    for each in model.graph.initializer:
        if each.name == "first.weight":
            big = onnx.numpy_helper.to_array(each) * np.float16(2000)
            each.CopyFrom(onnx.numpy_helper.from_array(big.astype(np.float16), each.name))
    image = 100 * image
    assert np.isfinite(run(to_portable(model), image)).all()
    assert not np.isfinite(run(emulated_engine(model, "gemm"), image)).all()


def test_a_rest_in_bf16_is_rounded_to_bf16() -> None:
    """The image, each result, and that of a transposed convolution, which stands between Casts."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(8, 4, 1)).eval()
    model, image = export_graph(network, (3, 12, 20), rest="bf16"), torch.randn(2, 3, 12, 20)
    x, rounded = image.bfloat16().float(), deployed(network, BF16)
    with torch.inference_mode():
        for layer in rounded:
            x = layer(x).bfloat16().float()
    found = run(emulated_engine(model, "auto"), image.numpy())
    assert np.array_equal(found, torch.from_numpy(found).bfloat16().float().numpy())
    assert distance(found, x.numpy()) < 2e-4 < 2e-3 < distance(run(to_portable(model), image.numpy()), x.numpy())


class Moved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() * 0.7).flatten(2).to(x.dtype)


def test_what_is_computed_in_fp32_and_moved_is_rounded_where_it_is_cast() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), Moved()).eval()
    found = run(emulated_engine(export_graph(network, (3, 12, 20)), "auto"), torch.randn(2, 3, 12, 20).numpy())
    assert np.array_equal(found, found.astype(np.float16))


def test_the_card_of_the_file_is_kept() -> None:
    model, _ = convolutions()
    onnx.helper.set_model_props(model, {"fp4deploy.card": "{}", **{e.key: e.value for e in model.metadata_props}})
    assert {each.key for each in emulated_engine(model, "auto").metadata_props} >= {"fp4deploy.card"}
