"""Experts of a mixture: their weights are quantised each alone, in training, evaluation and files."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import InputError
from fp4deploy.export.onnx.layer_constants import expert_constants
from fp4deploy.formats import fake_quantize_nvfp4, quantize_nvfp4
from fp4deploy.qat import deployed
from fp4deploy.qat.experts import QuantExperts, expert_weights, experts_of


class Experts(nn.Module):
    """Each token by one expert; as x W^T or, transposed, x W."""

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        self.num_experts, self.is_transposed = 3, transposed
        shape = (3, 32, 48) if transposed else (3, 48, 32)
        self.up = nn.Parameter(torch.randn(shape) * torch.tensor([1.0, 30.0, 0.1])[:, None, None])
        self.up_bias = nn.Parameter(torch.zeros(3, 48))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        weights = self.up[chosen]
        weights = weights.mT if self.is_transposed else weights
        return torch.einsum("tc,toc->to", x, weights) + self.up_bias[chosen]


class Mixture(nn.Module):
    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        self.first, self.body, self.experts = nn.Linear(32, 32), nn.Linear(32, 32), Experts(transposed)
        self.head = nn.Linear(48, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(torch.relu(self.first(x)))
        y: torch.Tensor = self.head(self.experts(x, x.argmax(-1) % 3))
        return y


@pytest.mark.parametrize("transposed", [False, True])
def test_each_expert_is_quantised_alone_along_what_it_contracts(transposed: bool) -> None:
    torch.manual_seed(0)
    model = Mixture(transposed)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    plans = {plan.name: plan for plan in fd.layer_plan(model)}
    assert plans["experts"].precision == "FP4 weights"
    assert "3 experts (up) in blocks of 16 along 32 input channels" in plans["experts"].reason
    fd.prepare(model, example_inputs=torch.randn(4, 32))
    assert "up; nvfp4_qat: W^T NVFP4 RN along C of each expert, X -" in repr(model.experts)
    x, chosen = torch.randn(6, 32), torch.tensor([0, 1, 2, 2, 1, 0])
    plain = Experts(transposed)
    axis = 0 if transposed else 1
    plain.up.data = torch.stack([fake_quantize_nvfp4(each, (axis,))[0] for each in before["experts.up"]])
    assert torch.equal(model.experts(x, chosen), plain(x, chosen))
    assert torch.equal(model.experts.up, before["experts.up"])  # outside its forward
    model.experts(x, chosen).sum().backward()
    assert model.experts._parameters["up"].grad is not None
    assert model.experts._parameters["up"].grad.count_nonzero() > 0
    assert before.keys() == {name for name in model.state_dict() if not name.endswith("input_amax")}
    again = copy.deepcopy(model)
    assert torch.equal(again.experts(x, chosen), plain(x, chosen))
    assert type(fd.restore(model).experts) is Experts


@pytest.mark.parametrize("transposed", [False, True])
def test_files_hold_codes_of_each_expert_and_compute_what_torch_does(transposed: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Mixture(transposed).eval(), torch.randn(8, 32)
    fd.prepare(model, example_inputs=x)
    fd.calibrate(model, x)
    fd.export_onnx(model, x, tmp_path / "net.onnx")
    file = fd.pack(model, tmp_path / "net.fp4", example_inputs=x).file
    weight = model.experts._parameters["up"]
    assert isinstance(weight, torch.Tensor)
    each = [quantize_nvfp4(one) for one in (weight.mT if transposed else weight).detach()]
    assert torch.equal(file.tensors["experts.up.codes"], torch.stack([one.codes for one in each]))
    assert file.tensors["experts.up.amax"].shape == (3, 1)
    assert "experts.up" not in file.tensors
    assert file.graph.format() == 9
    expected = deployed(model)(x).detach().numpy()
    for name in ("net.onnx", "net.fp4"):
        np.testing.assert_allclose(fd.open_runtime(tmp_path / name)(x), expected, rtol=1e-4, atol=1e-5)
    types = {each.data_type for each in onnx.load(tmp_path / "net.onnx").graph.initializer if "experts.up" in each.name}
    assert onnx.TensorProto.FLOAT4E2M1 in types


def test_they_can_be_named_and_left_out(tmp_path: Path) -> None:
    model, x = Mixture().eval(), torch.randn(4, 32)
    fd.prepare(model, include=["*experts*"])
    assert list(experts_of(model)) == ["experts"]
    assert [plan.name for plan in fd.layer_plan(model) if plan.precision != "FP16"] == ["experts"]
    fd.calibrate(model, x)
    assert experts_of(model)["experts"].quantizing
    fd.prepare(model, exclude=["experts"])
    assert not experts_of(model)
    with pytest.raises(InputError, match="'experts' includes nothing that can be quantised.*fp8_qat does not round"):
        fd.prepare(model, "fp8_qat", include=["experts"])


@pytest.mark.parametrize("channels", [24, 32])
def test_what_a_file_cannot_hold_is_refused(channels: int) -> None:
    layer = Experts()
    layer.up = nn.Parameter(torch.randn(3, 48, channels))
    fd.prepare(nn.Sequential(layer), "nvfp4_qat" if channels % 16 else "tetrajet", include=["*"])
    assert isinstance(layer, QuantExperts)
    with pytest.raises(InputError, match=r"0\.up: a file holds experts in NVFP4.*whole blocks of 16.*exclude="):
        expert_constants("0", layer, "up")


def test_a_three_axis_parameter_that_no_number_of_experts_explains_is_none() -> None:
    layer = nn.Module()
    layer.positions, layer.num_experts = nn.Parameter(torch.zeros(1, 64, 32)), 4
    assert expert_weights(layer) == ()
