"""Networks that change their input, share tensors or compute weights in hooks: files compute what torch does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm, weight_norm

from fp4deploy.errors import InputError
from fp4deploy.export import export_onnx
from fp4deploy.export.to_packed import pack
from fp4deploy.models.checkpoint import read_signed, write_tensors
from fp4deploy.qat import calibrate, layer_plan, prepare
from tests.samples import sample


def conv(channels: int, out: int, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(channels, out, size, padding=size // 2)


class InPlace(nn.Sequential):
    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__(conv(3, 32), nn.ReLU(), conv(32, 32), nn.ReLU(), conv(32, 5, 1))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(x)
        return super().forward(x)


def one_channel(x: Tensor) -> None:
    x[:, 0] = x[:, 0] * 0.5 + 1


@pytest.mark.parametrize(
    ("change", "prepared"),
    sample([lambda x: x.sub_(0.4).div_(0.3), lambda x: x.mul_(2), one_channel], [True, False], every=2),
)
def test_a_network_may_change_its_input(tmp_path: Path, change: Callable[[Tensor], object], prepared: bool) -> None:
    model = InPlace(change)
    if prepared:
        prepare(model)
        calibrate(model, torch.rand(2, 3, 16, 16))
    x = torch.rand(2, 3, 16, 16)
    before = x.clone()
    export_onnx(model.eval(), x, str(tmp_path / "m.onnx"))
    pack(model, tmp_path / "m.fp4", example_inputs=x)
    assert torch.equal(x, before), "the caller's input"


class Tied(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = conv(3, 32), conv(32, 32), conv(32, 32), conv(32, 5, 1)
        self.c.weight = self.b.weight
        if bias:
            self.c.bias = self.b.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.c(3 * self.b(self.a(x).relu()).relu()).relu())


@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_one_weight_have_their_own_biases_and_scales(tmp_path: Path, bias: bool) -> None:
    torch.manual_seed(0)
    model, x = prepare(Tied(bias)), torch.rand(2, 3, 16, 16)
    calibrate(model, x)
    result = pack(model.eval(), tmp_path / "m.fp4", example_inputs=x)
    assert result.verification is not None
    assert result.verification.nodes is None, "end to end"


def test_tensors_that_share_memory_are_written(tmp_path: Path) -> None:
    table = torch.arange(8.0)
    tied = torch.rand(3, 4)
    given = {"a": tied, "b": tied, "t": tied.T, "table": table, "part": table[:4], "empty": torch.empty(0)}
    write_tensors(tmp_path / "t.safetensors", given, {"k": "v"}, signed=True)
    _, found = read_signed(tmp_path / "t.safetensors")
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in given.items()
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "hook",
    [
        weight_norm,
        spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: prune.l1_unstructured(layer, "bias", 0.5),
        lambda layer: setattr(layer, "forward", lambda x: 3 * nn.Conv2d.forward(layer, x)),
    ],
)
def test_a_layer_whose_weight_a_hook_computes_stays_in_fp16_and_is_exported(
    tmp_path: Path, hook: Callable[[nn.Module], object]
) -> None:
    model = nn.Sequential(*InPlace(lambda x: None))
    hook(model[2])
    model.insert(3, conv(32, 32))
    plan = {each.name: each for each in layer_plan(model)}
    assert plan["2"].precision == "FP16"
    assert plan["2"].reason.startswith(("a hook computes its", "its forward was replaced"))
    assert plan["3"].precision == "FP4"
    x = torch.rand(2, 3, 16, 16)
    calibrate(prepare(model), x)
    with warnings.catch_warnings():
        export_onnx(model.eval(), x, str(tmp_path / "m.onnx"))


def calibrated(middle: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = (conv(3, 32), middle, conv(32, 32), nn.ReLU(), conv(32, 32), nn.ReLU(), conv(32, 5, 1))
    model, x = prepare(nn.Sequential(*layers).to(dtype)), torch.randn(2, 3, 32, 32).to(dtype)
    calibrate(model, x)
    return model.eval(), x


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("divisor", [5, 9])
def test_average_pooling_with_another_divisor_is_exported(tmp_path: Path, divisor: int, padded: bool) -> None:
    model, x = calibrated(nn.AvgPool2d((3, 2), 2, 1, count_include_pad=padded, divisor_override=divisor))
    result = export_onnx(model, x, str(tmp_path / "m.onnx"))
    assert result.verification is not None
    assert result.verification.layerwise is None


def test_what_has_no_form_in_onnx_is_named(tmp_path: Path) -> None:
    model, x = calibrated(nn.AvgPool2d(3, 2, 1, ceil_mode=True, divisor_override=5))
    with pytest.raises(InputError, match="ceil_mode and divisor_override=5 has no form .* Set ceil_mode=False"):
        export_onnx(model, x, str(tmp_path / "m.onnx"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_module_in_half_precision_is_packed(tmp_path: Path, dtype: torch.dtype) -> None:
    model, x = calibrated(nn.ReLU(), dtype)
    assert pack(model, tmp_path / "m.fp4", example_inputs=x).verification is not None
    assert next(model.parameters()).dtype == dtype
