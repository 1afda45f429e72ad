"""What `check` forecasts of torch layers is what lowering plans for their exported graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.lowering.forecast import forecast, in_fp8
from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.qat import calibrate, layer_plan, prepare, quantized_layers
from tests.samples import sample


class Forms(nn.Module):
    """Every form of a layer that lowering tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Conv2d(16, 32, 1)
        self.plain = nn.Conv2d(32, 32, 3, padding=1)
        self.strided = nn.Conv2d(32, 32, 3, stride=2, padding=1)
        self.uneven = nn.Conv2d(32, 32, (3, 5), padding=(1, 2))
        self.wide = nn.Conv2d(32, 32, 7, padding=3)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.slow_up = nn.ConvTranspose2d(16, 16, 4, stride=2, padding=1)
        self.grouped, self.grouped_point = nn.Conv2d(32, 32, 3, padding=1, groups=2), nn.Conv2d(32, 32, 1, groups=2)
        self.slices, self.voxels = nn.Conv3d(16, 16, (1, 3, 3), padding=(0, 1, 1)), nn.Conv3d(16, 32, 1)
        self.point_up, self.voxels_up = nn.ConvTranspose2d(16, 16, 1), nn.ConvTranspose3d(32, 16, 1)
        self.gate, self.linear_gate = nn.Conv2d(16, 1, 1), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.uneven(self.strided(self.plain(self.point(x)))))
        x = self.point_up(self.slow_up(self.up(self.grouped_point(self.grouped(x)))))
        x = self.voxels_up(self.voxels(self.slices(x.unsqueeze(2)))).squeeze(2)
        return self.gate(x) + self.linear_gate(x.movedim(1, -1)).movedim(-1, 1)


class Odd(nn.Module):
    """Each number of a layer other than usual, alone."""

    def __init__(self) -> None:
        super().__init__()
        self.strided_point, self.same = nn.Conv2d(16, 16, 1, stride=2), nn.Conv2d(16, 16, 3, padding="same")
        self.lopsided = nn.Conv2d(16, 16, 3, stride=(2, 1), padding=1)
        self.dilated, self.unpadded = nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.Conv2d(16, 16, 3)
        self.lopsided_up = nn.ConvTranspose2d(16, 16, 3, stride=(2, 1), padding=1)
        self.dilated_up = nn.ConvTranspose2d(16, 16, 3, stride=2, padding=1, dilation=2)
        self.grouped_up = nn.ConvTranspose2d(16, 32, 4, stride=2, padding=1)
        self.split_up = nn.ConvTranspose2d(32, 32, 2, stride=2, groups=2)
        self.still_up, self.steps_up = nn.ConvTranspose2d(32, 16, 3, padding=1), nn.ConvTranspose2d(16, 16, 2, stride=3)
        self.line = nn.Conv2d(16, 16, (1, 3))
        self.last = nn.Conv2d(16, 16, 1)
        self.columns, self.rows = nn.Conv2d(16, 1, (3, 1), padding=(1, 0)), nn.Conv2d(16, 1, (1, 3), padding=(0, 1))
        self.two, self.one_up = nn.Conv2d(16, 2, 1), nn.ConvTranspose2d(16, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.unpadded(self.dilated(self.lopsided(self.same(self.strided_point(x)))))
        x = self.split_up(self.grouped_up(self.dilated_up(self.lopsided_up(x))))
        x = self.last(self.line(self.steps_up(self.still_up(x))))
        return self.columns(x) + self.rows(x) + self.two(x) + self.one_up(x)


def graph_of(kind: type[nn.Module], size: int) -> tuple[nn.Module, object]:
    torch.manual_seed(0)
    model = prepare(kind(), include="*").eval()
    image = torch.randn(1, 16, size, size)
    calibrate(model, image)
    return model, export_graph(model, tuple(image.shape[1:]))


@pytest.fixture(scope="module")
def exported() -> tuple[nn.Module, object]:
    return graph_of(Forms, 8)


@pytest.fixture(scope="module")
def odd() -> tuple[nn.Module, object]:
    return graph_of(Odd, 16)


@pytest.mark.parametrize(
    ("forms", "conv"), sample(["exported", "odd"], ["auto", "qdq", "gemm", "fp8", "plugin"], every=2)
)
def test_forecast_is_the_plan(forms: str, conv: str, request: pytest.FixtureRequest) -> None:
    model, graph = request.getfixturevalue(forms)
    backend = "tensorrt" if conv == "plugin" else "tensorrt-rtx"
    planned = {layer.name: (layer.compute, layer.weights) for layer in lower(graph, conv, backend).layers}
    found = {name: forecast(layer, conv) for name, layer in quantized_layers(model).items()}
    assert {name: (each.compute, each.weights) for name, each in found.items()} == planned


def test_what_is_trained_in_fp8_for_an_engine_is_what_it_multiplies_in_fp8(exported: tuple[nn.Module, object]) -> None:
    """The recipe with FP8 convolutions has more: what the engine decodes to FP16, and convolutions with groups."""
    _, graph = exported
    model = Forms()
    found = in_fp8(model, layer_plan(model, include="*", fp8=()), "auto")
    assert set(found) == {layer.name for layer in lower(graph, "auto", "tensorrt-rtx").layers if layer.compute == "FP8"}
    plans = {plan.name: plan.precision for plan in layer_plan(model, "nvfp4_fp8_qat", include="*")}
    more = {name for name, precision in plans.items() if precision == "FP8"} - set(found)
    of_one_tap = {"grouped_point", "point_up", "voxels", "voxels_up"}
    assert more == {"wide", "slow_up", "grouped", "slices"} | of_one_tap
    by_recipe = quantized_layers(prepare(Forms(), "nvfp4_fp8_qat", include="*"))
    in_fp16 = {"wide", "slow_up", "point_up", "voxels_up"}
    assert {name for name in more if forecast(by_recipe[name], "auto").compute == "FP16"} == in_fp16
    assert in_fp8(model, layer_plan(model, include="*", fp8=()), "gemm") == ()
    trained = prepare(model, include="*", fp8=found)
    assert {name: forecast(layer, "auto").compute for name, layer in quantized_layers(trained).items()} == {
        layer.name: layer.compute for layer in lower(graph, "auto", "tensorrt-rtx").layers
    }


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_a_layer_that_pads_otherwise_is_refused_by_name(mode: str) -> None:
    model = prepare(
        nn.Sequential(nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1, padding_mode=mode)), include="1"
    )
    calibrate(model, torch.randn(1, 16, 8, 8))
    with pytest.raises(
        InputError, match=f"Layer 1 pads its quantised input .mode '{'edge' if mode == 'replicate' else mode}'"
    ):
        lower(export_graph(model.eval(), (16, 8, 8)), "auto", "tensorrt-rtx")
