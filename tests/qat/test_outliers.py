"""Outlier channels in MXFP8: the format, the three GEMMs by their formulas, the selection, checkpoints and resume."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4deploy.data import generate_shapes
from fp4deploy.errors import InputError
from fp4deploy.formats import fake_quantize_nvfp4
from fp4deploy.formats.mxfp8 import fake_quantize_mxfp8
from fp4deploy.qat import RECIPES, QuantSpec, load_model, prepare, quantized_layers, set_products
from fp4deploy.qat.layers import QuantizedLayer
from fp4deploy.qat.oscillation import OscillationResets
from fp4deploy.qat.outlier_selection import OutlierSelection
from fp4deploy.qat.outliers import OutlierChannels
from fp4deploy.qat.recipes import OutlierControl, Recipe, WeightReset
from fp4deploy.runs import create_run
from fp4deploy.train import load_config, train_models
from fp4deploy.train.loop import Trainer

NAME = "tetrajet_v2_outcontrol"
PLAIN = QuantSpec()
NEAREST = replace(
    RECIPES[NAME],
    name="nearest",
    dgrad_gradient=PLAIN,
    dgrad_weight=PLAIN,
    wgrad_gradient=PLAIN,
    wgrad_activation=PLAIN,
)
E4M3 = sorted(
    {float(value) for value in torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn) if value == value}
)


def mxfp8_by_hand(block: list[float]) -> list[float]:
    """One block of at most 32, in Python: the scale by trying powers of two, the element by distance, ties to even."""
    largest = max(abs(value) for value in block)
    if largest == 0:
        return [0.0] * len(block)
    exponent = next(e for e in range(-127, 128) if largest <= 448 * 2.0**e)
    scale = 2.0**exponent
    found = []
    for value in block:
        nearest = min(abs(code - value / scale) for code in E4M3)
        ties = [code for code in E4M3 if abs(code - value / scale) == nearest]
        even = [code for code in ties if not int(torch.tensor(code).to(torch.float8_e4m3fn).view(torch.uint8)) & 1]
        found.append((ties if len(ties) == 1 else even)[0] * scale)
    return found


@pytest.mark.parametrize("size", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("power", [-40, -8, 0, 12])
def test_mxfp8_by_hand(size: int, power: int) -> None:
    torch.manual_seed(size)
    x = torch.randn(3, size) * 2.0**power
    x[0, 0] = 448 * 2.0**power
    x[1, 0] = math.nextafter(448.0, 500.0) * 2.0**power
    x[2] = 0
    expected = [[value for part in row.split(32) for value in mxfp8_by_hand(part.tolist())] for row in x.double()]
    assert fake_quantize_mxfp8(x).tolist() == expected
    assert torch.equal(fake_quantize_mxfp8(x.T.contiguous(), 0), fake_quantize_mxfp8(x).T)


def test_a_block_with_nan_or_infinity_is_nan_and_the_others_are_not() -> None:
    x = torch.ones(2, 64)
    x[0, 3], x[1, 40] = math.nan, math.inf
    bad = fake_quantize_mxfp8(x).isnan()
    assert bad[0, :32].all()
    assert bad[1, 32:].all()
    assert not bad[0, 32:].any()
    assert not bad[1, :32].any()


def four(x: Tensor, axis: int) -> Tensor:
    return fake_quantize_nvfp4(x, (axis,))[0]


def with_outliers(layer: nn.Module, recipe: Recipe | str = NEAREST) -> QuantizedLayer:
    """The quantised layer, in training, six of its 64 channels in MXFP8."""
    model = prepare(nn.Sequential(layer), recipe, include=["0"]).train()
    found = quantized_layers(model)["0"]
    norms = torch.zeros(64)
    norms[[3, 17, 18, 31, 40, 63]] = torch.tensor([6.0, 5, 4, 3, 2, 1])
    found.choose_outliers(norms)
    assert found.outliers is not None
    assert found.outliers.chosen.tolist() == [3, 17, 18, 31, 40, 63]
    return found


def step(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(Y, dX, dW, G) of a loss whose gradient differs from place to place."""
    x = x.clone().requires_grad_()
    y = layer(x)
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=y.dtype)
    y.backward(gradient)
    assert x.grad is not None
    weight: Any = layer.weight
    return y.detach(), x.grad, weight.grad, gradient


def split(x: Tensor, outliers: OutlierChannels, axis: int) -> tuple[Tensor, Tensor]:
    return x.index_select(axis, outliers.chosen), x.index_select(axis, outliers.others)


def test_linear_by_the_formulas() -> None:
    torch.manual_seed(0)
    layer = with_outliers(nn.Linear(64, 24, bias=False).double())
    x = torch.randn(40, 64, dtype=torch.float64)
    y, dx, dw, g = step(layer, x)
    outliers: Any = layer.outliers
    (x_i, x_r), (w_i, w_r) = split(x, outliers, 1), split(layer.weight.detach(), outliers, 1)
    x_i, w_i, x_r, w_r = fake_quantize_mxfp8(x_i), fake_quantize_mxfp8(w_i), four(x_r, 1), four(w_r, 1)
    torch.testing.assert_close(y, x_r @ w_r.T + x_i @ w_i.T, rtol=1e-12, atol=1e-12)
    w = torch.empty(24, 64, dtype=torch.float64)
    w[:, outliers.chosen], w[:, outliers.others] = w_i, w_r
    torch.testing.assert_close(dx, four(g, 1) @ four(w, 0), rtol=1e-12, atol=1e-12)
    expected = torch.empty_like(w)
    expected[:, outliers.others] = four(g, 0).T @ four(x_r, 0)
    expected[:, outliers.chosen] = fake_quantize_mxfp8(g, 0).T @ fake_quantize_mxfp8(x_i, 0)
    torch.testing.assert_close(dw, expected, rtol=1e-12, atol=1e-12)


def shifted(x: Tensor, kernel: int, stride: int, padding: int, width: int) -> Tensor:
    """[columns, N, C, H, W']: what each column of a filter reads of a map."""
    edge = F.pad(x, (padding, padding))
    return torch.stack([edge[..., at : at + (width - 1) * stride + 1 : stride] for at in range(kernel)])


def correlated(rows: Tensor, wide: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """[O, C, rows of the filter, columns]: sums over pixels of [N, O, H', W'] by what `shifted` gave."""
    edge, height = F.pad(wide, (0, 0, padding, padding)), rows.shape[2]
    cut = [edge[..., at : at + (height - 1) * stride + 1 : stride, :] for at in range(kernel)]
    return torch.einsum("nohw,rknchw->ocrk", rows, torch.stack(cut))


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (1, 1, 0)])
def test_convolution_by_the_formulas(kernel: int, stride: int, padding: int) -> None:
    torch.manual_seed(0)
    layer = with_outliers(nn.Conv2d(64, 24, kernel, stride, padding, bias=False).double())
    x = torch.randn(2, 64, 8, 8, dtype=torch.float64)
    y, dx, dw, g = step(layer, x)
    outliers: Any = layer.outliers
    (x_i, x_r), (w_i, w_r) = split(x, outliers, 1), split(layer.weight.detach(), outliers, 1)
    x_i, w_i = fake_quantize_mxfp8(x_i, 1), fake_quantize_mxfp8(w_i, 1)
    x_r, w_r = four(x_r, 1), four(w_r, 1)
    expected = F.conv2d(x_r, w_r, None, stride, padding) + F.conv2d(x_i, w_i, None, stride, padding)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    w = torch.empty_like(layer.weight)
    w.data[:, outliers.chosen], w.data[:, outliers.others] = w_i, w_r
    extra = x.shape[2] - ((y.shape[2] - 1) * stride - 2 * padding + kernel)
    back = F.conv_transpose2d(four(g, 1), four(w.detach(), 0), None, stride, padding, extra)
    torch.testing.assert_close(dx, back, rtol=1e-12, atol=1e-12)
    rows = g.flatten(2) if kernel == 1 else g
    parts = {}
    for name, part, quantize in (("others", x_r, four), ("chosen", x_i, fake_quantize_mxfp8)):
        columns = shifted(part, kernel, stride, padding, g.shape[-1])
        wide = quantize(columns.flatten(-2) if kernel == 1 else columns, -1).view(columns.shape)
        parts[name] = correlated(quantize(rows, -1).view(g.shape), wide, kernel, stride, padding)
    torch.testing.assert_close(dw[:, outliers.others], parts["others"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dw[:, outliers.chosen], parts["chosen"], rtol=1e-12, atol=1e-12)


def test_transposed_convolution_by_the_formulas() -> None:
    torch.manual_seed(0)
    layer = with_outliers(nn.ConvTranspose2d(64, 24, 2, 2, bias=False).double())
    x = torch.randn(2, 64, 5, 4, dtype=torch.float64)
    y, _, dw, g = step(layer, x)
    outliers: Any = layer.outliers
    (x_i, x_r), (w_i, w_r) = split(x, outliers, 1), split(layer.weight.detach(), outliers, 0)
    x_i, w_i, x_r, w_r = fake_quantize_mxfp8(x_i, 1), fake_quantize_mxfp8(w_i, 0), four(x_r, 1), four(w_r, 0)
    expected = F.conv_transpose2d(x_r, w_r, None, 2) + F.conv_transpose2d(x_i, w_i, None, 2)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    wide = shifted(g, 2, 2, 0, x.shape[-1])
    for part, quantize, at in ((x_r, four, outliers.others), (x_i, fake_quantize_mxfp8, outliers.chosen)):
        product = correlated(quantize(part, -1), quantize(wide, -1), 2, 2, 0)
        torch.testing.assert_close(dw[at], product, rtol=1e-12, atol=1e-12)


def test_the_gradients_of_the_recipe_are_right_on_average() -> None:
    """Stochastic rounding and Hadamard transforms: means of many steps, against the GEMMs of what they quantise."""
    torch.manual_seed(0)
    layer = with_outliers(nn.Linear(64, 16, bias=False), NAME)
    x, outliers = torch.randn(32, 64), layer.outliers
    assert outliers is not None
    steps = []
    for _ in range(150):
        layer.zero_grad()
        steps.append(step(layer, x))
    g, w = steps[0][3], layer.quantized_weight()
    dx, dw = (torch.stack([each[at] for each in steps]) for at in (1, 2))
    for found, exact in ((dx, g @ w), (dw[:, :, outliers.others], g.T @ four(x[:, outliers.others], 1))):
        one = (found - exact).square().mean().sqrt()
        assert (found.mean(0) - exact).square().mean().sqrt() < 0.15 * one  # a 12th of it is what chance leaves


def test_before_the_selection_it_is_tetrajet_v2() -> None:
    x = torch.randn(32, 64)
    found = []
    for recipe in (NAME, "tetrajet_v2"):
        torch.manual_seed(1)
        layer = nn.Linear(64, 24)
        prepare(nn.Sequential(layer), recipe, include=["0"]).train()
        torch.manual_seed(2)
        found.append(step(layer, x))
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


def test_the_channels_of_the_largest_norms_over_the_window_are_chosen() -> None:
    model = prepare(
        nn.Sequential(nn.Conv2d(32, 8, 3), nn.Conv2d(8, 4, 1, groups=4)),
        replace(RECIPES[NAME], name="soon", outlier_control=OutlierControl(0.1, 0.1, 3)),
        include=["*"],
    ).train()
    conv, grouped = quantized_layers(model).values()
    assert grouped.outlier_channels is None, "a layer of several groups has none"
    selection = OutlierSelection(quantized_layers(model), 20)
    batches = [torch.randn(2, 32, 6, 6) * torch.rand(32, 1, 1) for _ in range(8)]
    changes = []
    for number, batch in enumerate(batches):
        changes.append(selection.update(number))
        model(batch)
    sums = sum(batch.movedim(1, 0).flatten(1).norm(dim=1) for batch in batches[2:5])
    assert changes == [number in (2, 5) for number in range(8)]
    assert conv.outlier_channels is not None
    assert conv.outlier_channels.tolist() == torch.as_tensor(sums).argsort(descending=True)[:3].tolist()
    assert conv.channel_norms is None
    model.eval()
    assert not selection.update(30)


def test_a_reset_leaves_the_outliers() -> None:
    layer = with_outliers(nn.Linear(64, 8), replace(NEAREST, weight_reset=WeightReset(0.0, 4, 2, 1e-9)))
    resets = OscillationResets({"0": layer}, 8)
    for number in range(4):
        before = layer.weight.detach().clone()
        resets.update(number)
        if number < 3:
            with torch.no_grad():
                layer.weight += 0.05 * torch.randn(8, 64)
    outliers: Any = layer.outliers
    changed = (layer.weight != before).any(0)
    assert changed[outliers.others].any()
    assert not changed[outliers.chosen].any()


def test_a_wrong_recipe_or_checkpoint_is_refused() -> None:
    with pytest.raises(InputError, match="outlier_control goes with double_quantization"):
        replace(RECIPES["nvfp4_train"], name="x", outlier_control=OutlierControl())
    with pytest.raises(InputError, match="share and start are from 0"):
        replace(NEAREST, outlier_control=OutlierControl(share=1.5))
    layer = with_outliers(nn.Linear(64, 8))
    state = layer.state_dict()
    for channels in ([3, 3, 1, 2, 4, 5], [64, 1, 2, 3, 4, 5]):
        with pytest.raises(InputError, match="outlier_channels holds"):
            layer.load_state_dict({**state, "outlier_channels": torch.tensor(channels)})


LAYERS = {
    "linear": (lambda: nn.Linear(64, 24), (40, 64)),
    "conv": (lambda: nn.Conv2d(64, 24, 3, 2, 1), (2, 64, 9, 8)),
    "dilated": (lambda: nn.Conv2d(64, 24, 3, 1, 2, dilation=2), (2, 64, 9, 8)),
    "1x1": (lambda: nn.Conv2d(64, 24, 1), (2, 64, 8, 8)),
    "transposed": (lambda: nn.ConvTranspose2d(64, 24, 2, 2), (2, 64, 5, 4)),
}


@pytest.mark.usefixtures("one_byte")
@pytest.mark.parametrize("name", LAYERS)
def test_packed_products_are_the_emulations(name: str) -> None:
    """Y, dX, dW and db in float64, where nothing but an operand can differ."""
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = with_outliers(make().double(), NAME)
    x, found = torch.randn(shape, dtype=torch.float64), []
    for products in ("emulated", "fp4"):
        layer.products = products
        layer.zero_grad()
        y, dx, dw, _ = step(layer, x)
        bias: Any = layer.bias
        found.append((y, dx, dw.clone(), bias.grad.clone()))
    for emulated, packed in zip(*found, strict=True):
        torch.testing.assert_close(packed, emulated, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["linear", "conv"])
def test_packed_products_keep_little_of_the_activation(name: str) -> None:
    """58 of 64 channels in 4.5 bits, six in the activation's dtype."""
    make, shape = LAYERS[name]
    layer, x, kept = with_outliers(make(), NAME), torch.randn(shape), []
    layer.products = "fp4"
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        layer(x)
    chosen, fine, codes, scales = kept[0], kept[1], kept[2], kept[3]
    assert chosen.numel() == x.numel() * 6 // 64
    assert fine.shape[1] == 6
    assert (codes.dtype, scales.dtype) == (torch.uint8, torch.float8_e4m3fn)
    assert not any(each.numel() == x.numel() and each.is_floating_point() for each in kept)


def test_packed_products_take_the_recipe() -> None:
    set_products(prepare(nn.Sequential(nn.Linear(64, 8)), NAME, include=["0"]), "fp4")


@pytest.mark.parametrize("stop", [2, pytest.param(5, marks=pytest.mark.variants)])
def test_a_training_chooses_resumes_exactly_and_loads(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = replace(RECIPES[NAME], outlier_control=OutlierControl(0.2, 0.1, 3))
    monkeypatch.setitem(RECIPES, NAME, soon)
    generate_shapes(tmp_path / "data", train=8, val=2, size=32, seed=0)
    sets = [f"data.root={tmp_path / 'data'}", f"recipe={NAME}", "model.scale=0.125", "data.height=32", "data.width=32"]
    sets += ["train.from_scratch=true", "train.epochs=4", "train.batch_size=4", "train.evaluate_every=4"]
    config, original = load_config(None, [*sets, "telemetry.every=0"]), Trainer.step
    straight, broken = create_run(tmp_path / "straight"), create_run(tmp_path / "broken")
    train_models(config, straight, ("nvfp4",))

    def interrupted(self: Trainer, *batch: Tensor) -> None:
        if self.progress.step == stop:
            raise KeyboardInterrupt
        original(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_models(config, broken, ("nvfp4",))
    train_models(config, broken, ("nvfp4",), resume=True)
    models = [load_model(run.checkpoint("nvfp4"))[0] for run in (straight, broken)]
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    chosen = [layer for layer in quantized_layers(models[0]).values() if layer.outliers is not None]
    assert len(chosen) == len([name for name in states[0] if name.endswith("outlier_channels")]) > 0
