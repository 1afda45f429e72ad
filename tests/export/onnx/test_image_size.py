"""One checkpoint, any image size: open height and width, and a size fixed afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.export.onnx.session import portable_session
from fp4deploy.export.onnx.size import fix_size, has_open_size
from fp4deploy.export.verify.exported import verify
from fp4deploy.models import build_unet
from fp4deploy.models.card import CARD_KEY
from tests.export.exported_models import images, prepared
from tests.export.own_networks import DilatedBranches

Sizes = Callable[[int, int], int]
SIZES = ((32, 48), (16, 16), (64, 32))


@cache
def open_sized(name: str) -> tuple[nn.Module, onnx.ModelProto]:
    torch.manual_seed(0)
    network = build_unet(4, 0.125) if name == "unet" else DilatedBranches()
    model = prepared(network, "nvfp4_qat", (3, *SIZES[0]))
    return model, export_graph(model, (3, *SIZES[0]), dynamic_size=True)


@pytest.mark.parametrize("name", [pytest.param("unet", marks=pytest.mark.variants), "ASPP"])
def test_an_open_file_computes_what_torch_computes_at_every_size(name: str) -> None:
    model, canonical = open_sized(name)
    onnx.checker.check_model(canonical, full_check=True)
    names = [size.dim_param or size.dim_value for size in canonical.graph.input[0].type.tensor_type.shape.dim]
    assert names == ["N", 3, "H", "W"]
    for size in SIZES:
        agreement = verify(model, canonical, images(2, (3, *size)))
        assert agreement.passed, (size, agreement)
        assert agreement.pixels == 2 * size[0] * size[1]


class Cut(nn.Module):
    """A convolution, and so many of its rows and columns."""

    def __init__(self, rows: Sizes, columns: Sizes) -> None:
        super().__init__()
        self.conv, self.rows, self.columns = nn.Conv2d(3, 16, 1), rows, columns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, w = x.shape[2:]
        return self.conv(x)[:, :, : self.rows(h, w), : self.columns(h, w)]


@pytest.mark.parametrize(
    ("rows", "columns", "one_node"),
    [
        (lambda h, w: h // 2, lambda h, w: (w // 2 + 3) * h // h // 2, True),
        (lambda h, w: -(-h // 2), lambda h, w: -(w // -3), False),
        (lambda h, w: (w - h) // 4 + 4, lambda h, w: w + (-3 - h) // 8, False),
    ],
)
def test_sizes_are_divided_as_in_python_at_every_size(rows: Sizes, columns: Sizes, one_node: bool) -> None:
    model = Cut(rows, columns).eval()
    canonical = export_graph(model, (3, 16, 16), dynamic_size=True)
    assert one_node is not any(node.op_type == "Mod" for node in canonical.graph.node)
    session = portable_session(to_portable(canonical))
    for h, w in ((16, 16), (17, 16), (16, 17), (23, 20), (20, 23), (21, 11)):
        image = torch.ones(2, 3, h, w)
        assert session.run(None, {"image": image.numpy()})[0].shape == model(image).shape, (h, w)


class Squeezed(nn.Module):
    """Axes of another size than 1 are named, which `squeeze` leaves, as the last lines of PixArt's forward do."""

    def __init__(self, axes: int | tuple[int, ...]) -> None:
        super().__init__()
        self.conv, self.axes = nn.Conv2d(3, 16, 1), axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)[:, :, :1].squeeze(self.axes) * 2


@pytest.mark.parametrize("axes", [1, -2, (1, 2), (1, -1)])
def test_only_axes_of_size_1_are_squeezed(axes: int | tuple[int, ...]) -> None:
    model = Squeezed(axes).eval()
    session, image = portable_session(to_portable(export_graph(model, (3, 8, 8)))), torch.ones(2, 3, 8, 8)
    assert session.run(None, {"image": image.numpy()})[0].shape == model(image).shape


def test_a_fixed_size_gives_the_same_numbers_and_can_be_lowered() -> None:
    _, canonical = open_sized("unet")
    assert has_open_size(canonical)
    fixed = fix_size(canonical, (64, 32))
    assert not has_open_size(fixed)
    onnx.checker.check_model(fixed, full_check=True)
    image = {"image": images(1, (3, 64, 32)).numpy()}
    expected = portable_session(to_portable(canonical)).run(None, image)[0]
    got = portable_session(to_portable(fixed)).run(None, image)[0]
    assert np.mean(np.abs(got - expected) < 1e-4 * np.abs(expected).max()) > 0.9
    assert {layer.form for layer in lower(fixed, "gemm").layers if layer.requested == "FP4"} == {"gemm"}


def test_what_cannot_be_fixed_is_refused() -> None:
    _, canonical = open_sized("unet")
    with pytest.raises(InputError, match="does not take inputs of 18x32"):
        fix_size(canonical, (18, 32))
    with pytest.raises(InputError, match="is fixed"):
        fix_size(fix_size(canonical, (32, 32)), (64, 64))
    with pytest.raises(InputError, match="--size"):
        lower(canonical)


@pytest.mark.parametrize(("size", "volume"), [((24, 40), None), ((8, 24, 40), {"depth": 16, "axis": 2})])
def test_a_file_of_a_fixed_size_has_a_card_of_that_size(size: tuple[int, ...], volume: dict[str, int] | None) -> None:
    free = ("D", "H", "W")[-len(size) :]
    value = onnx.helper.make_tensor_value_info
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("Relu", ["x"], ["y"])],
            "g",
            [value("x", onnx.TensorProto.FLOAT16, ["N", 3, *free])],
            [value("y", onnx.TensorProto.FLOAT16, ["N", 3, *free])],
        )
    )
    card = {"classes": ["a", "b"], "height": 16, "width": 32, "scale": 1.0, "volume": volume}
    onnx.helper.set_model_props(model, {CARD_KEY: json.dumps(card), "other": "kept"})
    fixed = fix_size(model, size)
    assert [each.dim_value for each in fixed.graph.input[0].type.tensor_type.shape.dim][2:] == list(size)
    found = {each.key: each.value for each in fixed.metadata_props}
    volume = volume and {**volume, "depth": size[0]}
    assert json.loads(found[CARD_KEY]) == {**card, "height": 24, "width": 40, "volume": volume}
    assert found["other"] == "kept"
    assert json.loads(model.metadata_props[0].value) == card, "the file that was given is not changed"
