"""Watching a step: what is seen equals what the layers used, nothing is changed, and nothing is fetched before read."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fp4deploy.formats import random_hadamard
from fp4deploy.models import build_unet
from fp4deploy.plugins import available
from fp4deploy.qat import RECIPES, QuantSpec, Recipe, calibrate, prepare, quantized_layers
from fp4deploy.qat.fused_unet import FusedUNet, fuse_unet
from fp4deploy.qat.operators.quantizers import quantize_operand
from fp4deploy.qat.plan import eight_bits
from fp4deploy.qat.telemetry.collect import (
    ACTIVATION,
    GRADIENT,
    OUTPUT_GRADIENT,
    WEIGHT,
    Statistics,
    Table,
    Watcher,
    contracted_axis,
    window,
)
from fp4deploy.qat.telemetry.statistics import SHARES, raw_row
from tests.qat.layer_cases import LAYERS, quantized
from tests.samples import sample


def on_gpu() -> bool:
    return torch.cuda.is_available() and available()


class Net(nn.Module):
    """A convolution of each kind, groups and a linear layer; the middle ones are quantised."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.conv = nn.Conv2d(16, 32, 3, padding=1)
        self.grouped = nn.Conv2d(32, 32, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.linear = nn.Linear(16, 24)
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.up(torch.relu(self.grouped(torch.relu(self.conv(x))))))
        return self.head(torch.relu(self.linear(x.mean((2, 3)))))


QUANTIZED = ("conv", "grouped", "up", "linear")


def net(recipe: str | Recipe | None) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    return prepare(model, recipe) if recipe else model


def images(seed: int = 1, count: int = 6) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, x: torch.Tensor, watcher: Watcher | None = None, seed: int = 0) -> Statistics | None:
    """Forward and backward; looked at with a watcher."""
    torch.manual_seed(seed)
    model.zero_grad()
    if watcher is None:
        model(x).square().mean().backward()
        return None
    with watcher.watching(x, seed=3):
        y = model(x)
    y.square().mean().backward()
    return watcher.snapshot(loss_scale=torch.tensor(4.0)).read()


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_every_recipe_is_seen_whole(recipe: str | None) -> None:
    model = net(recipe)
    seen = step(model, images(), Watcher(model))
    assert seen is not None
    backward = bool(recipe) and (RECIPES[recipe].dgrad_gradient or RECIPES[recipe].wgrad_gradient)
    for name in ("first", *QUANTIZED, "head"):
        quantized = bool(recipe) and name in QUANTIZED
        kinds = {kind for layer, kind in seen.values if layer == name}
        assert kinds == {WEIGHT, ACTIVATION, GRADIENT, *([OUTPUT_GRADIENT] if quantized and backward else [])}
        layer = model.get_submodule(name)
        if recipe == "w4a8_qat":  # no groups of fewer than 32 channels
            quantized = quantized and name in quantized_layers(model)
        quantized = quantized and not eight_bits(layer.recipe)  # FP8 has no statistics of codes
        of_inputs = quantized and recipe != "w4a8_qat"
        assert ((name, WEIGHT) in seen.codes, (name, ACTIVATION) in seen.codes) == (quantized, of_inputs)
        weight = model.get_submodule(name).weight
        assert seen.values[name, WEIGHT]["count"] == weight.numel()
        assert seen.values[name, WEIGHT]["mean"] == pytest.approx(weight.double().mean().item(), rel=1e-9)
        gradient = seen.values[name, GRADIENT]
        assert gradient["std"] == pytest.approx(weight.grad.double().std(correction=0).item(), rel=1e-9)
        assert "sqnr_db" not in gradient
        if quantized:
            assert 10 < seen.values[name, WEIGHT]["sqnr_db"] < 40
            assert sum(seen.codes[name, WEIGHT]) == weight.numel()
    assert seen.extras == {"loss_scale": 4.0}


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_seen_of_the_weights_is_what_the_layer_multiplies(recipe: str) -> None:
    model = net(recipe)
    seen = step(model, images(), Watcher(model))
    assert seen is not None
    for name, layer in quantized_layers(model).items():
        raw, value = layer.weight.detach().double(), layer.quantized_weight().detach().double()
        if layer.recipe.weight.hadamard:  # the layer multiplies transformed operands
            raw = random_hadamard(layer.weight.detach(), layer.gemms().weight_axes[1]).double()
        found = seen.values[name, WEIGHT]
        if eight_bits(layer.recipe):
            assert "sqnr_db" not in found
            continue
        assert found["dequantized_mean"] == pytest.approx(value.mean().item(), rel=1e-7, abs=1e-10)
        noise = 10 * math.log10(raw.square().sum() / (raw - value).square().sum())
        assert found["sqnr_db"] == pytest.approx(noise, rel=1e-9)


@pytest.mark.parametrize("recipe", ["nvfp4_qat", "nvfp4_qat_delayed", "nvfp4_4o6_qat"])
def test_the_static_amax_is_the_one_that_the_step_used(recipe: str) -> None:
    """Small images after large ones, then large after small: tracked and delayed amaxes clip differently."""
    model = net(recipe)
    watcher = Watcher(model)
    for scale in (1.0, 5.0, 0.1):
        used: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        original = type(quantized_layers(model)["conv"]).quantized_input

        def recorded(layer, x, used=used, original=original):  # type: ignore[no-untyped-def]
            y = original(layer, x)
            used[str(id(layer))] = x.detach().double(), y.detach().double()
            return y

        with pytest.MonkeyPatch.context() as patch:
            for kind in {type(layer) for layer in quantized_layers(model).values()}:
                patch.setattr(kind, "quantized_input", recorded)
            seen = step(model, scale * images(), watcher)
        assert seen is not None
        for name, layer in quantized_layers(model).items():
            x, y = used[str(id(layer))]
            found = seen.values[name, ACTIVATION]
            assert found["mean"] == pytest.approx(x.mean().item(), rel=1e-9)
            noise = 10 * math.log10(x.square().sum() / (x - y).square().sum())
            assert found["sqnr_db"] == pytest.approx(noise, rel=1e-9)


@pytest.mark.parametrize("recipe", [None, "nvfp4_qat", "nvfp4_qat_delayed", "nvfp4_train", "tetrajet"])
def test_a_snapshot_changes_nothing(recipe: str | None) -> None:
    watched, plain = net(recipe), net(recipe)
    watcher = Watcher(watched)
    for seed in range(3):
        step(watched, images(seed), watcher, seed)
        step(plain, images(seed), None, seed)
        for a, b in zip(watched.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        for a, b in zip(watched.buffers(), plain.buffers(), strict=True):
            assert torch.equal(a, b)
    assert not any(module._forward_hooks for module in watched.modules())


def test_random_numbers_are_left_alone() -> None:
    """Also by a recipe that rounds weights and activations stochastically."""
    model = net(Recipe("random", QuantSpec(rounding="stochastic"), QuantSpec(rounding="stochastic")))
    states = []
    for watcher in (None, Watcher(model)):
        step(model, images(), watcher)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_activations_of_volumes_with_groups_are_coded_along_their_channels() -> None:
    model = quantized(nn.Conv3d(64, 64, 3, padding=1, groups=4), "nvfp4_train")
    x, watcher = torch.randn(1, 64, 5, 6, 6), Watcher(model)
    with watcher.watching(x):
        model(x)
    coded = watcher.snapshot().read()
    other = quantized(nn.Conv2d(64, 64, 3, padding=1, groups=4), "nvfp4_train")
    flat, of_images = x.flatten(2, 3), Watcher(other)
    with of_images.watching(flat):
        other(flat)
    assert coded.codes["0", ACTIVATION] == of_images.snapshot().read().codes["0", ACTIVATION]


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize(
    "recipe", ["nvfp4_qat", "nvfp4_train", "mx_baseline", Recipe("wgrad", wgrad_gradient=QuantSpec("mxfp4"))]
)
def test_layers_of_every_kind_are_seen(case: str, recipe: str | Recipe) -> None:
    make, shape = LAYERS[case]
    torch.manual_seed(0)
    model = quantized(make(), recipe)
    x = torch.randn(shape)
    watcher = Watcher(model)
    with watcher.watching(x):
        y = model(x)
    y.square().mean().backward()
    seen = watcher.snapshot().read()
    layer = quantized_layers(model)["0"]
    for kind, spec in ((WEIGHT, layer.recipe.weight), (ACTIVATION, layer.recipe.activation)):
        assert (("0", kind) in seen.codes) == (spec is not None)
    if layer.recipe.weight is not None:
        assert sum(seen.codes["0", WEIGHT]) == layer.weight.numel()
        assert sum(seen.codes["0", ACTIVATION]) == x.numel()
    assert (("0", OUTPUT_GRADIENT) in seen.codes) == (not layer.recipe.straight_through)


def test_output_gradients_are_divided_by_the_loss_scale_and_quantised_as_the_recipe_says() -> None:
    model = net("fp4_all_the_way")
    watcher = Watcher(model)
    gradients: dict[str, torch.Tensor] = {}
    handles = [
        layer.register_full_backward_hook(lambda _, __, out, name=name: gradients.__setitem__(name, out[0].detach()))
        for name, layer in quantized_layers(model).items()
    ]
    seen = step(model, images(), watcher)
    assert seen is not None
    for handle in handles:
        handle.remove()
    for name in QUANTIZED:
        found, gradient = seen.values[name, OUTPUT_GRADIENT], gradients[name].double()
        assert found["std"] == pytest.approx(gradient.std(correction=0).item() / 4, rel=1e-9)
        assert found["max"] == pytest.approx(gradient.max().item() / 4, rel=1e-9)
        assert found["sqnr_db"] > 8
        assert sum(seen.codes[name, OUTPUT_GRADIENT]) == gradient.numel()


def test_a_recipe_that_quantises_only_the_weight_gradients_operand() -> None:
    recipe = Recipe("wgrad", wgrad_gradient=QuantSpec())
    model = net(recipe)
    seen = step(model, images(), Watcher(model))
    assert seen is not None
    for name in QUANTIZED:
        assert (name, OUTPUT_GRADIENT) in seen.codes
        assert (name, WEIGHT) not in seen.codes


def test_flips_between_looks() -> None:
    model = net("nvfp4_qat")
    watcher = Watcher(model)
    first = step(model, images(), watcher)
    still = step(model, images(), watcher)
    layer = quantized_layers(model)["conv"]
    gemms = layer.gemms()
    before, _ = quantize_operand(layer.weight.detach(), layer.recipe.weight, gemms.weight_axes)
    with torch.no_grad():
        layer.weight[5, 3, 1, 1] *= -1
    after, _ = quantize_operand(layer.weight.detach(), layer.recipe.weight, gemms.weight_axes)
    moved = step(model, images(), watcher)
    assert first is not None
    assert still is not None
    assert moved is not None
    assert math.isnan(first.values["conv", WEIGHT]["flips"])
    assert all(still.values[name, WEIGHT]["flips"] == 0 for name in QUANTIZED)
    assert int((before != after).sum()) == 1
    assert moved.values["conv", WEIGHT]["flips"] == 1 / layer.weight.numel()
    assert moved.values["up", WEIGHT]["flips"] == 0


def test_a_large_activation_is_sampled() -> None:
    model = net("nvfp4_qat")
    whole, part = step(model, images(), Watcher(model)), step(model, images(), Watcher(model, limit=2000))
    assert whole is not None
    assert part is not None
    assert whole.values["conv", ACTIVATION]["count"] == 6 * 16 * 64
    assert part.values["conv", ACTIVATION]["count"] <= 2000
    ratio = part.values["conv", ACTIVATION]["std"] / whole.values["conv", ACTIVATION]["std"]
    assert ratio == pytest.approx(1, abs=0.15)
    assert part.values["conv", WEIGHT]["count"] == 16 * 32 * 9


def test_an_uncalibrated_layer_says_so_instead_of_failing() -> None:
    model = net("nvfp4_qat+learned").train()  # an evaluated one is refused
    watcher = Watcher(model)
    with watcher.watching(images()), torch.no_grad():
        model(images())
    seen = watcher.snapshot().read()
    assert "sqnr_db" not in seen.values["conv", ACTIVATION]  # nothing is quantised yet
    assert seen.values["conv", ACTIVATION]["count"] > 0


def test_calibration_is_not_taken_for_quantisation() -> None:
    model = net("nvfp4_qat")
    watcher = Watcher(model)
    with watcher.watching(images()):
        calibrate(model, [images()])
    assert ("conv", ACTIVATION) not in watcher.snapshot().read().codes


def test_a_probe_sees_a_few_images_and_leaves_the_mode() -> None:
    model = net("nvfp4_qat").train()
    calibrate(model, [images()])
    amax = quantized_layers(model)["conv"].input_amax.clone()
    watcher = Watcher(model)
    watcher.probe(images(), most=2)
    seen = watcher.snapshot().read()
    assert seen.values["conv", ACTIVATION]["count"] == 2 * 16 * 64
    assert model.training
    assert torch.equal(quantized_layers(model)["conv"].input_amax, amax)


@pytest.mark.parametrize("recipe", sample([None, "nvfp4_qat", "nvfp4_train", "mx_baseline", "nvfp4_qat_2d"], every=2))
def test_a_snapshot_fetches_nothing_before_it_is_read(recipe: str | None) -> None:
    """A model without data: asking for a value anywhere would be an error."""
    model = net(recipe).to("meta")
    watcher = Watcher(model)
    x = images().to("meta")
    with watcher.watching(x):
        y = model(x)
    y.square().mean().backward()
    table = watcher.snapshot(gradient_norm=torch.empty((), device="meta"))
    assert len(table.rows) >= 18
    with pytest.raises((RuntimeError, NotImplementedError)):
        table.read()


def test_a_table_is_fetched_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net("nvfp4_qat")
    watcher = Watcher(model)
    with watcher.watching(images()):
        model(images()).sum().backward()
    table = watcher.snapshot(gradient_norm=torch.tensor(2.0))
    calls: list[str] = []
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)

        def counted(*args, name=name, original=original, **kwargs):  # type: ignore[no-untyped-def]
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    seen = table.read()
    assert calls == ["tolist"]
    assert seen.extras["gradient_norm"] == 2.0


def test_an_empty_table() -> None:
    assert Table().read() == Statistics({}, {}, {})
    row = raw_row(torch.empty(0))
    assert Table([(("a", WEIGHT), row)]).read().values["a", WEIGHT]["count"] == 0


def test_a_window_has_blocks_in_rows() -> None:
    conv, up, linear = nn.Conv2d(20, 40, 3), nn.ConvTranspose2d(20, 40, 2), nn.Linear(100, 50)
    part = window(conv.weight, contracted_axis(conv))
    assert part.shape == (32, 64)
    assert torch.equal(part[7, :20], conv.weight[7, :, 0, 0])
    assert torch.equal(part[7, 20:40], conv.weight[7, :, 0, 1])
    assert torch.equal(window(up.weight, contracted_axis(up))[3, :20], up.weight[:, 3, 0, 0])
    assert torch.equal(window(linear.weight, 1), linear.weight[:32, :64])
    small = nn.Conv2d(3, 4, 1)
    assert window(small.weight, 1).shape == (4, 3)


def test_shares_are_shares() -> None:
    model = net("nvfp4_train")
    seen = step(model, images(), Watcher(model))
    assert seen is not None
    for key in seen.codes:
        for name in SHARES:
            value = seen.values[key][name]
            assert math.isnan(value) if name == "flips" else 0 <= value <= 1, (key, name)


class ObservedUNet(FusedUNet):
    """A fused UNet whose kernels are played by the plain forward: it shows the inputs of its layers by hooks."""

    def fuses(self, x: torch.Tensor) -> bool:
        return True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = [layer for layer in self.modules() if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)]
        handles = [layer.register_forward_hook(self._show_hook) for layer in layers]
        try:
            return super(FusedUNet, self).forward(x)
        finally:
            for handle in handles:
                handle.remove()

    def _show_hook(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self._observe_input(layer, inputs[0].shape, lambda images: inputs[0].detach()[images])


def test_a_fused_unet_observes_what_hooks_would_see() -> None:
    found = []
    for kind in (None, ObservedUNet):
        torch.manual_seed(0)
        model = prepare(build_unet(4, 0.125)).train()
        if kind is not None:
            model.__class__ = kind
        x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        seen = step(model, x, Watcher(model))
        assert seen is not None
        found.append(seen)
        assert "_observe" not in model.__dict__
    hooked, shown = found
    assert hooked.values.keys() == shown.values.keys()
    assert hooked.codes == shown.codes
    for key, values in hooked.values.items():
        assert shown.values[key] == pytest.approx(values, nan_ok=True), key


@pytest.mark.gpu
@pytest.mark.skipif(not on_gpu(), reason="no NVIDIA GPU that kernels run on")
@pytest.mark.parametrize("recipe", ["nvfp4_qat", "nvfp4_qat_delayed", None])
def test_the_fused_forward_is_seen_and_left_alone(recipe: str | None) -> None:
    """Outputs and amaxes bit for bit; activations close to those of the plain forward, which holds FP32 between."""
    found, outputs, amaxes = [], [], []
    for fused, watched in ((True, True), (True, False), (False, True)):
        torch.manual_seed(0)
        model: nn.Module = build_unet(4, 0.25)
        if recipe:
            prepare(model, recipe)
        model = model.cuda().to(memory_format=torch.channels_last).train()
        if fused:
            fuse_unet(model)
        x = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)).cuda()
        x = x.to(memory_format=torch.channels_last)
        watcher = Watcher(model)
        with torch.autocast("cuda", torch.float16):
            if fused:
                assert isinstance(model, FusedUNet)
                assert model.fuses(x)
            if watched:
                with watcher.watching(x):
                    y = model(x)
            else:
                y = model(x)
        outputs.append(y.detach())
        amaxes.append([layer.input_amax.clone() for layer in quantized_layers(model).values()])
        if watched:
            found.append(watcher.snapshot().read())
    assert torch.equal(outputs[0], outputs[1])
    assert all(torch.equal(a, b) for a, b in zip(amaxes[0], amaxes[1], strict=True))
    shown, hooked = found
    assert shown.values.keys() == hooked.values.keys()
    for key, values in hooked.values.items():
        for name in ("mean", "std", "sqnr_db", "correlation"):
            if name in values:
                assert shown.values[key][name] == pytest.approx(values[name], rel=0.1, abs=0.02), (key, name)


def test_recipes_of_ones_own_are_seen() -> None:
    recipe = replace(RECIPES["nvfp4_train"], name="own", dgrad_gradient=None, dgrad_weight=None)
    model = net(recipe)
    seen = step(model, images(), Watcher(model))
    assert seen is not None
    assert ("conv", OUTPUT_GRADIENT) in seen.codes
