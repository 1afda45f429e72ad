"""Experts of a mixture: their weights are quantised each alone, in training, evaluation and files."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import InputError
from fp4deploy.export.onnx.layer_constants import expert_constants
from fp4deploy.formats import fake_quantize_nvfp4, quantize_nvfp4
from fp4deploy.qat import deployed, grouped_linear
from fp4deploy.qat.experts import QuantExperts, expert_weights, experts_of, weights_held
from fp4deploy.qat.fp4_gemms.autograd import packed_gemms
from fp4deploy.qat.operators.gemms import LinearGemms


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
    model.experts.quantizing = False  # as while a calibration runs
    with weights_held(model):
        assert torch.equal(model.experts(x, chosen), fd.restore(again).experts(x, chosen))
    model.experts.quantizing = True
    with weights_held(model):
        assert torch.equal(model.experts(x, chosen), plain(x, chosen))
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


class Sorted(nn.Module):
    """Tokens sorted by expert: torch's grouped GEMM, or a loop over experts, as libraries have them."""

    def __init__(self, loop: bool, transposed: bool) -> None:
        super().__init__()
        self.num_experts, self.is_transposed, self.loop = 3, transposed, loop
        self.up = nn.Parameter(torch.randn((3, 32, 48) if transposed else (3, 48, 32)))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if not self.loop:
            weight = self.up if self.is_transposed else self.up.transpose(-2, -1)
            return F.grouped_mm(x, weight, offs=ends)
        parts = zip(ends.diff(prepend=ends.new_zeros(1)).tolist(), x.tensor_split(ends[:-1].long()), strict=True)
        each = [(number, part) for number, (count, part) in enumerate(parts) if count]
        if self.is_transposed:
            return torch.cat([part @ self.up[torch.tensor(number)] for number, part in each])
        return torch.cat([F.linear(part, self.up[number]) for number, part in each])


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_training_step_multiplies_packed_operands_in_all_three_gemms(loop: bool, transposed: bool) -> None:
    torch.manual_seed(0)
    layer, ends = Sorted(loop, transposed), torch.tensor([5, 5, 33], dtype=torch.int32)
    plain = layer.up.detach().clone().requires_grad_()
    rows = plain.mT if transposed else plain
    x, same = (torch.randn(33, 32, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    fd.prepare(nn.Sequential(layer), "nvfp4_train", include=["*"])[0](x.detach(), ends)  # blocks of 16 x 16
    model = fd.prepare(nn.Sequential(layer), "fp4_all_the_way", include=["*"])
    assert "in training X NVFP4 RN along C, W^T NVFP4 RN along C, G NVFP4 SR along O" in repr(layer)
    assert fd.layer_plan(model)[0].reason.endswith("but in a training step")
    torch.manual_seed(2)
    y = layer(x, ends)
    y.square().sum().backward()
    torch.manual_seed(2)
    if loop:
        parts = [(0, same[:5]), (2, same[5:])]
        recipe = fd.RECIPES["fp4_all_the_way"]
        expected = torch.cat([packed_gemms(part, rows[at], None, LinearGemms(), recipe) for at, part in parts])
    else:
        expected = grouped_linear(same, rows, ends, recipe="fp4_all_the_way")
    expected.square().sum().backward()
    assert torch.equal(y, expected)
    assert x.grad is not None
    assert same.grad is not None
    assert torch.equal(x.grad, same.grad)
    found = layer._parameters["up"]
    assert found is not None
    assert found.grad is not None
    assert plain.grad is not None
    assert torch.equal(found.grad, plain.grad)
    weights = torch.stack([fake_quantize_nvfp4(each, (1,))[0] for each in rows.detach()])
    owners = torch.tensor([0] * 5 + [2] * 28)
    with torch.no_grad():  # what files hold: weights
        torch.testing.assert_close(model.eval()[0](x, ends), torch.einsum("tc,toc->to", x, weights[owners]))


class Gated(Sorted):
    """One row of an expert's weight is a vector, and no operand of a packed GEMM."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        gate: torch.Tensor = x @ self.up[0][0]
        return super().forward(x, ends) * gate[:, None].sigmoid()


def test_a_product_with_a_row_of_a_weight_is_the_librarys() -> None:
    torch.manual_seed(0)
    layer, ends = Gated(loop=True, transposed=False), torch.tensor([5, 5, 33], dtype=torch.int32)
    fd.prepare(nn.Sequential(layer), "fp4_all_the_way", include=["*"])
    layer(torch.randn(33, 32), ends).square().sum().backward()
    found = layer._parameters["up"]
    assert found is not None
    assert found.grad is not None
    assert found.grad.isfinite().all()


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
