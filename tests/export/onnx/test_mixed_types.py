"""Code that computes in FP32 within a network of FP16: its layers are FP32 in the file, until it casts back."""

from __future__ import annotations

import pytest
import torch
from onnx import TensorProto
from torch import nn

import fp4deploy as fd
from fp4deploy.export.onnx.layers import layers_of


class InFp32(nn.Module):
    """A region without autocast, with a layer of each kind, and a product that torch refuses for mixed types."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.back = back
        self.first, self.inner, self.up = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 1), nn.ConvTranspose2d(32, 32, 2, 2)
        self.group, self.instance = nn.GroupNorm(4, 32), nn.InstanceNorm2d(32, affine=True)
        self.batch, self.layer = nn.BatchNorm2d(32), nn.LayerNorm(32)
        self.linear, self.last = nn.Linear(32, 32), nn.Conv2d(32, 4, 1)
        self.mix = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.first(image)
        with torch.autocast(x.device.type, enabled=False):
            y = self.batch(self.instance(self.group(self.up(self.inner(x.float() * 300) / 300))))
            z = self.linear(self.layer(y.permute(0, 2, 3, 1))) @ self.mix
            z = z.permute(0, 3, 1, 2)
        return self.last(z.to(x.dtype) if self.back else z)  # type: ignore[no-any-return]


NAMES = ["inner", "up", "group", "instance", "batch", "layer", "linear"]


def network(back: bool) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return InFp32(back).eval(), torch.rand(2, 3, 8, 8).half().float()


@pytest.mark.parametrize("back", [True, False])
def test_layers_that_read_fp32_compute_in_it(back: bool) -> None:
    model, images = network(back)
    graph = fd.export_graph(model, (3, 8, 8))
    precisions = {layer.name: layer.precision for layer in layers_of(graph)}
    assert precisions.pop("first") == "FP16"
    assert precisions.pop("last") == ("FP16" if back else "FP32")
    assert precisions == dict.fromkeys(NAMES, "FP32")
    kind = graph.graph.output[0].type.tensor_type.elem_type
    assert kind == (TensorProto.FLOAT16 if back else TensorProto.FLOAT)
    found = fd.verify(model, graph, images)
    assert found.share == 1
    assert found.largest < 1e-4


def test_quantised_layers_among_them_read_and_give_fp16() -> None:
    model, images = network(False)
    fd.prepare(model, include=["inner", "up", "linear"])
    fd.calibrate(model, images)
    graph = fd.export_graph(model.eval(), (3, 8, 8))
    precisions = {layer.name: layer.precision for layer in layers_of(graph)}
    assert [name for name, precision in precisions.items() if precision == "FP4"] == ["inner", "up", "linear"]
    assert fd.verify(model, graph, images).passed


def test_positions_in_fp32_sample_a_map_in_fp16() -> None:
    class Warped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.flow = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 2, 3, padding=1)
            self.last = nn.Conv2d(32, 4, 1)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            x = self.features(image)
            same = torch.eye(2, 3, device=x.device)[None].expand(x.shape[0], -1, -1)
            at = nn.functional.affine_grid(same, list(x.shape), align_corners=False)
            flow = 0.1 * torch.tanh(self.flow(x)).permute(0, 2, 3, 1)
            return self.last(nn.functional.grid_sample(x, at + flow, align_corners=False, padding_mode="border"))

    torch.manual_seed(0)
    model, images = Warped().eval(), torch.rand(2, 3, 8, 8).half().float()
    found = fd.verify(model, fd.export_graph(model, (3, 8, 8)), images)
    assert found.share == 1
    assert found.largest < 1e-2
