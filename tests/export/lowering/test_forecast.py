"""What `check` forecasts of torch layers is what lowering plans for their exported graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp4deploy.export.lowering.forecast import forecast, in_fp8
from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.qat import calibrate, layer_plan, prepare, quantized_layers


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


@pytest.fixture(scope="module")
def exported() -> tuple[nn.Module, object]:
    torch.manual_seed(0)
    model = prepare(Forms(), include="*").eval()
    image = torch.randn(1, 16, 8, 8)
    calibrate(model, image)
    return model, export_graph(model, tuple(image.shape[1:]))


@pytest.mark.parametrize("conv", ["auto", "qdq", "gemm", "fp8", "plugin"])
def test_forecast_is_the_plan(exported: tuple[nn.Module, object], conv: str) -> None:
    model, graph = exported
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
