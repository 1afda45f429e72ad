"""Equalisation: the network in full precision is the same to the last bit, and FP4 loses less of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from fp4deploy.export.to_packed import pack
from fp4deploy.formats import quantize_nvfp4
from fp4deploy.models import build_unet, spec
from fp4deploy.qat import calibrate, layer_plan, load_model, prepare
from fp4deploy.qat.equalize import LARGEST, equalize
from fp4deploy.runs import create_run
from fp4deploy.train import Config, train_models, with_settings
from tests.train.small_network import NORMED


class Joined(nn.Module):
    """Norms behind a sum, a concatenation, a part of channels, ReLU6, and groups; what each reads says its name."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.one, self.two = nn.BatchNorm2d(8), nn.InstanceNorm2d(8, affine=True)
        self.of_sum = nn.Conv2d(8, 4, 1)
        self.low, self.high, self.six = nn.GroupNorm(2, 8), nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.of_both = nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.of_part = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.of_six = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.stem(x)
        added = functional.leaky_relu(self.one(x) + self.two(x), 0.1)
        high = functional.pad(functional.max_pool2d(functional.relu(self.high(x)), 2), (1, 1, 1, 1))
        low = functional.interpolate(self.low(x), size=high.shape[2:], mode="bilinear")
        both = torch.cat([low, high], 1)
        six = functional.relu6(self.six(x))
        return self.of_sum(added), self.of_both(both), self.of_part(both[:, 10:14]), self.of_six(six)


def uneven(model: nn.Module) -> nn.Module:
    """Channels of very different sizes, as some trained norms have them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.GroupNorm | nn.BatchNorm2d | nn.InstanceNorm2d):
                layer.weight.mul_(torch.exp2(1.5 * torch.randn(layer.weight.shape, generator=generator)))
    return model.eval()


def test_factors_follow_channels_through_the_graph_and_full_precision_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model = uneven(Joined())
    images = torch.randn(2, 3, 8, 8)
    before = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(images)
        factors = equalize(model, [images], ["of_sum", "of_both", "of_part", "of_six"])
        assert all(torch.equal(x, y) for x, y in zip(model(images), expected, strict=True))
    assert factors.keys() == {"one", "two", "low", "high"}  # a sum has one factor, and ReLU6 none
    assert torch.equal(factors["one"], factors["two"])
    for factor in factors.values():
        assert torch.equal(factor.log2(), factor.log2().round())
        assert factor.log2().abs().max() <= LARGEST
    for name, factor in factors.items():
        old, new = before.get_submodule(name), model.get_submodule(name)
        assert torch.equal(new.weight * factor, old.weight)
        assert torch.equal(new.bias * factor, old.bias)
    both = torch.cat([factors["low"], factors["high"]])
    assert torch.equal(model.of_both.weight, before.of_both.weight * both.view(-1, 1, 1, 1))
    part = both[10:14].view(2, 1, 2, 1, 1)
    assert torch.equal(model.of_part.weight.unflatten(0, (2, 2)), before.of_part.weight.unflatten(0, (2, 2)) * part)
    assert torch.equal(model.of_six.weight, before.of_six.weight)


BETWEEN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "relu": lambda x, y: x.relu(),
    "leaky": lambda x, y: functional.leaky_relu(x, 0.1),
    "relu6": lambda x, y: functional.relu6(x),
    "elu": lambda x, y: functional.elu(x),
    "abs": lambda x, y: x.abs(),
    "sigmoid": lambda x, y: x.sigmoid(),
    "clamp": lambda x, y: x.clamp(-0.5, 0.5),
    "square": lambda x, y: x * x,
    "number added": lambda x, y: x + 1.0,
    "number multiplied": lambda x, y: x * 0.5,
    "sum": lambda x, y: x + y,
    "difference": lambda x, y: x - y,
    "product": lambda x, y: x * y,
    "gate": lambda x, y: x * y.mean((2, 3), keepdim=True).sigmoid(),
    "larger": torch.maximum,
    "zeros around": lambda x, y: functional.pad(x, (1, 2, 0, 1)),
    "ones around": lambda x, y: functional.pad(x, (1, 2, 0, 1), value=1.0),
    "mirrored": lambda x, y: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
    "channels of zeros": lambda x, y: functional.pad(x[:, 4:], (0, 0, 0, 0, 0, 4)),
    "max pool": lambda x, y: functional.max_pool2d(x, 3, 2, 1),
    "mean pool": lambda x, y: functional.avg_pool2d(x, 3, 2, 1),
    "resize": lambda x, y: functional.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "halves": lambda x, y: torch.cat([x[:, :8], y[:, 8:]], 1),
    "turned": lambda x, y: x.flip(1),
    "shuffled": lambda x, y: functional.channel_shuffle(x, 4),
    "softmax": lambda x, y: x.softmax(1),
    "normalised": lambda x, y: functional.normalize(x, dim=1),
    "all channels": lambda x, y: x + x.mean(1, keepdim=True),
}


class Between(nn.Module):
    """Two norms and two convolutions around a function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm2d(16), nn.GroupNorm(4, 16)
        self.conv, self.other = nn.Conv2d(16, 16, 1, bias=False), nn.Conv2d(16, 8, 3, groups=2)
        self.function = BETWEEN[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.function(self.one(x), self.two(x))
        return self.conv(found)[:, :8, 1:-1, 1:-1] + self.other(found)


class Every(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Between(name) for name in BETWEEN)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [part(x) for part in self.parts]


def test_whatever_lies_between_full_precision_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model, images = uneven(Every()), 2 * torch.randn(2, 16, 8, 8)
    quantized = [name for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)]
    with torch.no_grad():
        expected = model(images)
        factors = equalize(model, [images], quantized)
        same = [torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in zip(model(images), expected, strict=True)]
    assert [name for name, equal in zip(BETWEEN, same, strict=True) if not equal] == []
    found = {list(BETWEEN)[int(name.split(".")[1])] for name in factors}
    assert found == {
        *(
            "relu",
            "leaky",
            "sum",
            "difference",
            "mirrored",
            "zeros around",
            "max pool",
            "mean pool",
            "resize",
            "halves",
        ),
    }


@pytest.mark.parametrize("name", ["norm", "conv"])
def test_weights_that_other_code_reads_stay(name: str) -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(self.norm(x).relu().to(self.conv.weight.dtype)) * self.get_submodule(name).weight.mean()

    torch.manual_seed(0)
    model, images = uneven(Penalised()), torch.randn(2, 16, 8, 8)
    with torch.no_grad():
        expected = model(images)
        assert not equalize(model, [images], ["conv"])
        assert torch.equal(model(images), expected)


def test_a_factor_is_the_square_root_of_activation_over_weight() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3)).eval()
    with torch.no_grad():
        model[0].weight[3] *= 16
        model[1].weight[:, 5] *= 1 / 16
        model[0].weight[7] = 0  # nothing to make equal
    factor = equalize(model, [torch.randn(4, 16, 8, 8)], ["1"])["0"]
    others = factor[[0, 1, 2, 4, 6]]
    assert factor[3] / others.median() == 4
    assert factor[5] / others.median() == 4
    assert factor[7] == 1


def test_fp4_loses_less_of_an_uneven_network() -> None:
    torch.manual_seed(0)
    model = uneven(build_unet(4, 0.125))
    images = torch.randn(2, 3, 32, 32)
    names = [plan.name for plan in layer_plan(model) if plan.precision == "FP4"]
    errors = []
    with torch.no_grad():
        expected = model(images)
        for equalized in (False, True):
            quantized = copy.deepcopy(model)
            if equalized:
                equalize(quantized, [images], names)
            calibrate(prepare(quantized), [images])
            errors.append((quantized(images) - expected).square().sum().sqrt() / expected.square().sum().sqrt())
    assert errors[1] < 0.9 * errors[0]


def test_a_training_starts_equalised_and_its_checkpoint_loads(tiny: Config, tmp_path: Path) -> None:
    spec.name_model(NORMED)
    run = create_run(tmp_path / "run")
    settings = [f"model.spec={NORMED}", "quant.equalize=true", "train.epochs=1", "quant.include=[head]"]
    config = with_settings(tiny, settings)
    train_models(config, run, ("fp16",))
    fp16 = load_file(run.checkpoint("fp16"))
    train_models(config, run, ("nvfp4_ptq",))
    found = load_file(run.checkpoint("nvfp4_ptq"))
    factor = fp16["norm.weight"] / found["norm.weight"]
    assert factor.unique().numel() > 1
    assert torch.equal(found["head.weight"], fp16["head.weight"] * factor.view(1, -1, 1, 1))
    assert torch.equal(found["body.weight"], fp16["body.weight"])
    packed = pack(run.checkpoint("nvfp4_ptq"), tmp_path / "net.fp4", data=config.data.root, images=2)
    assert packed.verification is not None  # compared with torch; codes are those of the scaled weights
    weight = load_model(run.checkpoint("nvfp4_ptq"))[0].get_submodule("head").weight
    codes = quantize_nvfp4(weight.detach().movedim(1, -1)).codes
    held = {name: value for name, value in packed.file.tensors.items() if value.dtype == torch.uint8}
    assert any(torch.equal(value.flatten(), codes.flatten()) for value in held.values())


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_share_says_whose_channels_are_made_equal(share: float) -> None:
    torch.manual_seed(0)
    model = uneven(nn.Sequential(nn.BatchNorm2d(32), nn.Conv2d(32, 16, 1)))
    with torch.no_grad():
        model[1].weight.mul_(torch.exp2(torch.randn(1, 32, 1, 1)))
    images = torch.randn(8, 32, 4, 4)
    equalize(model, [images], ["1"], share)
    with torch.no_grad():
        sizes = model[0](images).square().mean((0, 2, 3)) if share else model[1].weight.square().mean((0, 2, 3))
    assert sizes.sqrt().log2().std() < 0.4  # of powers of two, uniform within half a binade: 0.29
