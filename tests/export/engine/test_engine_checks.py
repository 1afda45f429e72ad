"""A contraction that blocks of 16 do not fill is refused before a compiler sees it, and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from fp4deploy.about import ABOUT_KEY, about
from fp4deploy.data import IMAGE_MEAN, IMAGE_STD
from fp4deploy.errors import InputError
from fp4deploy.export.engine.build import build_engine, prepare_engine
from fp4deploy.models.card import CARD_KEY, ModelCard
from tests.export.exported_models import initializer, unet
from tests.export.lowering.engine_graphs import CanonicalGraph


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks come first: a compiler that is reached fails the test."""
    monkeypatch.setattr("fp4deploy.export.engine.build._compile", lambda *_: pytest.fail("the compiler was asked"))
    monkeypatch.setattr("fp4deploy.export.engine.backend.Backend.require_installed", lambda _: None)


def refused(tmp_path: Path, model: onnx.ModelProto, message: str) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    with pytest.raises(InputError, match=message) as caught:
        build_engine(path, tmp_path / "model.plan")
    assert caught.value.exit_code == 2
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


def exported() -> onnx.ModelProto:
    """A UNet as the exporter writes it, which also records the shapes of its constants in value_info."""
    model = onnx.ModelProto()
    model.CopyFrom(unet()[1])
    return model


def shorten(model: onnx.ModelProto, layer: str, size: int) -> None:
    """Cut the codes of a layer to K = size, shape and bytes."""
    codes = initializer(model, f"{layer}.weight.codes")
    codes.dims[1] = size
    codes.raw_data = codes.raw_data[: codes.dims[0] * size // 2]


@pytest.mark.parametrize(
    ("layer", "size", "multiple"), [("encoder.1.conv1", 136, 144), ("encoder.1.conv2", 280, 288), ("up.0", 1016, 1024)]
)
def test_shortened_weight_of_an_export(tmp_path: Path, layer: str, size: int, multiple: int) -> None:
    model = exported()
    assert any(value.name == f"{layer}.weight.codes" for value in model.graph.value_info)
    shorten(model, layer, size)
    refused(tmp_path, model, rf"Layer {layer}: .*\(K\) are {size}, not a multiple of 16.* to {multiple},")


@pytest.mark.parametrize(("named", "kept"), [("ab" * 32, True), ("ab", False), (3, False)])
def test_where_an_engine_comes_from(tmp_path: Path, named: object, kept: bool) -> None:
    """The checkpoint that the source names, if it is a digest, and the colours of the card's classes."""
    card = ModelCard("fp16", 0.25, ("sky", "a", "b"), 16, 16, IMAGE_MEAN, IMAGE_STD, True)
    graph = CanonicalGraph()
    model = graph.model(graph.conv("conv", graph.image(16, 16), 3, fp4=False), function=False)
    for key, value in ((CARD_KEY, card.to_json()), (ABOUT_KEY, json.dumps({"checkpoint_sha256": named}))):
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, tmp_path / "model.onnx")
    found = prepare_engine(tmp_path / "model.onnx", arch="sm86").about
    assert found == about(card, str(named) if kept else None)
    assert found["palette"] == [None, [76, 110, 245], [250, 176, 5]]


@pytest.mark.parametrize("layer", ["encoder.1.conv1", "up.0"])
def test_weight_a_block_too_short_for_its_scales(tmp_path: Path, layer: str) -> None:
    model = exported()
    size = initializer(model, f"{layer}.weight.codes").dims[1]
    shorten(model, layer, size - 16)
    refused(tmp_path, model, f"Layer {layer}: needs one block scale for 16 codes")


@pytest.mark.parametrize("layer", ["encoder.1.conv1", "up.0"])
def test_weight_with_fewer_bytes_than_its_shape(tmp_path: Path, layer: str) -> None:
    model = exported()
    codes = initializer(model, f"{layer}.weight.codes")
    rows, size = codes.dims
    codes.raw_data = codes.raw_data[: -4 * rows]
    refused(tmp_path, model, f"Layer {layer}: .* make K = {size - 8}. K must be {size}, a multiple of 16")


@pytest.mark.parametrize("name", ["encoder.1.conv1.weight.scales", "up.0.bias", "encoder.1.conv1.input.flat_shape"])
def test_constant_with_fewer_bytes_than_its_shape(tmp_path: Path, name: str) -> None:
    model = exported()
    initializer(model, name).raw_data = initializer(model, name).raw_data[:-1]
    refused(tmp_path, model, f"The constant {name} has shape .* do not match")


def channels_of_40(add: Callable[[CanonicalGraph], onnx.ModelProto], taps: tuple[int, int]) -> onnx.ModelProto:
    """A layer of 32 input channels rewritten to 40, with shapes that all agree and rounded-up block scales."""
    model = add(CanonicalGraph())
    codes, scales = initializer(model, "layer.weight.codes"), initializer(model, "layer.weight.scales")
    size = taps[0] * taps[1] * 40
    for tensor, width, row in ((codes, size, size // 2), (scales, -(-size // 16), -(-size // 16))):
        tensor.dims[1] = width
        tensor.raw_data = bytes(tensor.dims[0] * row)
    for name, shape in (
        ("layer.input.flat_shape", [0, 40, 64]),
        ("layer.input.image_shape", [0, 40, 8, 8]),
        ("layer.weight.shape", [16, *taps, 40]),
    ):
        initializer(model, name).CopyFrom(numpy_helper.from_array(np.array(shape, np.int64), name))
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 40
    return model


@pytest.mark.parametrize(
    ("kernel", "taps"), [(3, (3, 3)), (1, (1, 1)), (4, (4, 4)), (0, (2, 2))], ids=["3x3", "1x1", "4x4", "up"]
)
def test_forty_channels_with_consistent_shapes(tmp_path: Path, kernel: int, taps: tuple[int, int]) -> None:
    def add(graph: CanonicalGraph) -> onnx.ModelProto:
        x = graph.image(8, 8, channels=32)
        return graph.model(graph.conv("layer", x, 16, kernel=kernel) if kernel else graph.up("layer", x, 16))

    refused(tmp_path, channels_of_40(add, taps), r"Layer layer: .*\(K\) are 40, not a multiple of 16.* to 48,")


def test_weight_read_by_an_operator_that_is_no_layer(tmp_path: Path) -> None:
    graph = CanonicalGraph()
    half = graph._weight("table", 16, taps=1, channels=32)
    value, *_ = graph.image(1, 16, channels=1)
    model = graph.model((graph.add("Einsum", [value, half], "product", equation="nchw,wk->nchk"), 1, 1, 40))
    codes, scales = initializer(model, "table.weight.codes"), initializer(model, "table.weight.scales")
    codes.dims[1], codes.raw_data = 40, bytes(16 * 20)
    scales.dims[1], scales.raw_data = 3, bytes(16 * 3)
    refused(tmp_path, model, r"Layer table: its contracted weights \(K\) are 40, not a multiple of 16.* to 48,")
