"""Every method on a small network: the interface, what it improves, and a checkpoint that every stage takes."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.models import read_card
from fp4deploy.ptq import METHODS, quantize, quantize_checkpoint
from fp4deploy.ptq.correction import correct
from fp4deploy.ptq.matrix import WeightMatrix
from fp4deploy.ptq.reconstruct import SoftRounding
from fp4deploy.qat import load_model, prepare, quantized_layers
from fp4deploy.runs import Run
from fp4deploy.system.progress import Bar
from tests.samples import sample


class Block(nn.Module):
    """Two convolutions with norms, so that there is a unit with several layers."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(4, after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


def network() -> nn.Module:
    torch.manual_seed(0)
    up = nn.ConvTranspose2d(32, 16, 2, stride=2)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), Block(16, 32), nn.MaxPool2d(2), up, Block(16, 16), nn.Conv2d(16, 4, 1)
    ).eval()


@pytest.fixture(scope="module")
def images() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 3, 18, 18) for _ in range(2)]


def error(model: nn.Module, reference: nn.Module, batches: list[torch.Tensor]) -> float:
    with torch.no_grad():
        return sum(float((model(x) - reference(x)).square().mean()) for x in batches)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_leaves_fixed_points_of_quantisation(method: str, images: list[torch.Tensor]) -> None:
    model = network()
    reference = copy.deepcopy(model)
    found = quantize(model, images, method, iterations=10, correction="none")
    layers = quantized_layers(model)
    assert len(layers) == 5
    assert error(model, reference, images) < 0.2 * error(nn.Identity(), lambda x: torch.zeros_like(x), images)  # type: ignore[arg-type]
    for layer in layers.values():
        assert layer.input_amax > 0 if layer.is_static else layer.recipe.precision == "W4A8"  # type: ignore[operator]
        if METHODS[method].weights != "nearest":
            weight = layer.weight.detach()  # type: ignore[union-attr,operator]
            assert torch.allclose(layer.quantized_weight(), weight, rtol=1e-5, atol=1e-7)
    assert (found.recipe, found.images) == (METHODS[method].recipe, 4)


class Registered(nn.Module):
    """Layers that are called in one order, and registered in the same or the opposite one."""

    def __init__(self, opposite: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = {
            "stem": nn.Conv2d(3, 16, 3), "norm1": nn.GroupNorm(4, 16), "conv1": nn.Conv2d(16, 32, 3),
            "norm2": nn.GroupNorm(4, 32), "conv2": nn.Conv2d(32, 16, 1), "head": nn.Conv2d(16, 4, 1),
        }  # fmt: skip
        self.order = list(layers)
        for name in reversed(layers) if opposite else layers:
            self.add_module(name, layers[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = self.get_submodule(name)(x)
            x = x.relu() if name.startswith("norm") else x
        return x


@pytest.mark.parametrize(
    ("method", "correction"),
    [*sample(METHODS, ["both"], every=2), ("amax", "bias"), pytest.param("amax", "norm", marks=pytest.mark.variants)],
)
def test_the_order_of_registration_changes_nothing(method: str, correction: str, images: list[torch.Tensor]) -> None:
    first, second = Registered(False).eval(), Registered(True).eval()
    for model in (first, second):
        quantize(model, images, method, iterations=3, correction=correction)
    states = first.state_dict(), second.state_dict()
    assert list(states[0]) != list(states[1])
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_better_methods_are_better_where_they_are_fitted(images: list[torch.Tensor]) -> None:
    reference = network()
    errors = {}
    for method, correction in (("amax", "none"), ("gptq", "none"), ("gptq", "norm"), ("brecq", "none")):
        model = copy.deepcopy(reference)
        quantize(model, images, method, iterations=60, correction=correction)
        errors[method, correction] = error(model, reference, images)
    assert errors["gptq", "none"] < errors["amax", "none"]
    assert errors["gptq", "norm"] < errors["gptq", "none"]
    assert errors["brecq", "none"] < errors["amax", "none"]


def test_reconstruction_is_never_worse_than_nearest(images: list[torch.Tensor]) -> None:
    found = quantize(network(), images, "brecq", iterations=30)
    assert list(found.units) == ["1", "3", "4"]
    assert all(after <= before for before, after in found.units.values())
    assert any(after < before for before, after in found.units.values())


def test_faar_aligns_layers_and_then_the_network(images: list[torch.Tensor]) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Conv2d(3, 16, 3), Block(16, 16), nn.Conv2d(16, 4, 1)).eval()
    model = copy.deepcopy(reference)
    found = quantize(model, images, "faar", iterations=20, correction="none")
    assert list(found.units) == ["1.conv1", "1.conv2", "network"]
    before, after = found.units["network"]
    assert after < before
    assert error(model, reference, images) / len(images) == pytest.approx(after, rel=1e-4)


@pytest.mark.parametrize("method", ["faar", "brecq"])
def test_blocks_take_keywords_change_their_inputs_and_return_several_tensors(
    images: list[torch.Tensor], method: str
) -> None:
    torch.manual_seed(0)
    model = Several().eval()
    found = quantize(model, images, method, iterations=20, correction="none").units
    assert list(found) == (["block"] if method == "brecq" else ["block.conv2", "network"])
    assert all(after <= before for before, after in found.values())
    assert any(after < before for before, after in found.values())


def test_a_program_sees_progress_unless_it_shows_its_own(
    images: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(Bar, "phase", lambda self, text, done=0, of=None: seen.append(text))
    quantize(network(), images, "gptq", progress=lambda text, done, of: None)
    assert not seen
    quantize(network(), images, "gptq")
    assert {"activations", "inputs of the layers", "weights of the layers", "correction of the layers"} <= set(seen)


def test_a_block_without_tensors_in_its_output_is_refused(images: list[torch.Tensor]) -> None:
    model = Several().eval()
    forward = model.block.forward
    model.block.forward = lambda *inputs, **named: Opaque(forward(*inputs, **named))
    with pytest.raises(InputError, match=r"^block \(Changing\) returns no tensor"):
        quantize(model, images, "brecq", iterations=1, correction="none")


class Opaque(list[object]):
    """A list that is no list to torch's trees."""


class Changing(nn.Module):
    """Scales its input in place; the skip comes by name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor, *, skip: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x *= 0.5
        y = self.conv1(x)
        return self.conv2(y) + skip, {"inner": y}


class Several(nn.Module):
    """Two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Conv2d(3, 16, 3), Changing(), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x)
        y, inner = self.block(x, skip=x.clone())
        return {"out": self.last(y), "inner": inner["inner"]}


def test_soft_roundings_follow_their_formula() -> None:
    """w' = step (lo + h (hi - lo)); hard ones are the nearest codes, soft ones start at the weight itself."""
    torch.manual_seed(3)
    layer = nn.Linear(32, 4)
    soft = SoftRounding(layer.weight, WeightMatrix.of(layer), None)
    weight = layer.weight.detach()
    step, low, gap = (getattr(soft, name) for name in ("step", "low", "gap"))
    h = (1.2 * torch.sigmoid(soft.v) - 0.1).clamp(0, 1)
    soft.hard = False
    assert torch.equal(soft(weight), (step * (low + h * gap)).flatten(1))
    free = ((gap > 0) & (h > 0.03) & (h < 0.97)).flatten(1)
    assert free.sum() > 64
    assert torch.allclose(soft(weight)[free], weight[free], atol=1e-6)
    undecided = ((1 - (2 * h - 1) ** 2) * (gap > 0)).sum()
    assert soft.undecided(2.0).item() == pytest.approx(undecided.item(), rel=1e-5)
    soft.hard = True
    codes = soft(weight).unflatten(-1, (-1, 16)) / step
    assert torch.isin(codes.abs().round(decimals=4), torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])).all()
    assert ((soft(weight) - weight).abs() <= (step * gap).flatten(1) / 2 + 1e-6)[free].all()
    with torch.no_grad():
        soft.v.fill_(9.0)
    soft.soften()
    assert soft.v.max().item() == pytest.approx(2.197)


def test_bias_correction_restores_the_mean_of_every_channel(images: list[torch.Tensor]) -> None:
    model = nn.Sequential(nn.Linear(16, 8)).eval()
    reference = copy.deepcopy(model)
    prepare(model, "nvfp4_qat+dynamic", include="*")
    x = [torch.rand(64, 16)]
    assert correct(model, reference, x, "bias") == ["0"]
    with torch.no_grad():
        assert torch.allclose(model(x[0]).mean(0), reference(x[0]).mean(0), atol=1e-6)


class MapNorm(nn.LayerNorm):
    """Over the channels of maps [N, C, H, W]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv1d(4, 8, 1), nn.GroupNorm(2, 8)),  # [N, channels, length]: three axes, as tokens have
        (nn.Conv1d(4, 8, 1), nn.BatchNorm1d(8)),
        (nn.Conv3d(4, 8, 1), nn.InstanceNorm3d(8, affine=True)),
        (nn.Linear(5, 8), nn.LayerNorm(8)),  # [N, tokens, channels]
        (nn.Conv2d(4, 8, 1), MapNorm(8)),  # whose own code moves the channels
    ],
    ids=lambda layers: type(layers[1]).__name__,
)
def test_norm_correction_is_of_the_channels_that_the_layer_has(layers: tuple[nn.Module, nn.Module]) -> None:
    """The mean of every channel is back, whatever the rank of what holds it."""
    torch.manual_seed(3)
    reference = nn.Sequential(*layers).eval()
    model = copy.deepcopy(reference)
    x = [torch.randn({2: (6, 4, 5), 3: (6, 4, 5), 4: (6, 4, 7, 8), 5: (6, 4, 2, 3, 5)}[layers[0].weight.ndim])]
    axis = -1 if type(layers[1]) is nn.LayerNorm else 1
    with torch.no_grad():
        model[0].weight += 0.1 * torch.randn_like(model[0].weight)
        model[0].bias += 0.5
    correct(model, reference, x, "norm")
    with torch.no_grad():
        means = [each(x[0]).movedim(axis, 0).flatten(1).mean(1) for each in (model, reference)]
    torch.testing.assert_close(*means, rtol=0, atol=1e-5)


def test_norm_correction_is_the_regression_of_the_channel() -> None:
    torch.manual_seed(2)
    reference = nn.Sequential(nn.Conv2d(4, 8, 1), nn.GroupNorm(2, 8)).eval()
    model = copy.deepcopy(reference)
    x = [torch.randn(3, 4, 6, 6)]
    with torch.no_grad():
        model[0].weight += 0.03 * torch.randn_like(model[0].weight)
        y, other = (each(x[0]).movedim(1, 0).flatten(1).double() for each in (reference, model))
    correct(model, reference, x, "norm")
    with torch.no_grad():
        found = model(x[0]).movedim(1, 0).flatten(1).double()
    for channel in range(8):
        design = torch.stack([other[channel], torch.ones(len(other[channel]), dtype=torch.float64)], 1)
        fitted = design @ torch.linalg.lstsq(design, y[channel, :, None]).solution
        assert torch.allclose(found[channel], fitted[:, 0], atol=1e-4)


def test_a_channel_is_scaled_by_no_more_than_two() -> None:
    """A channel of noise, or of next to nothing, has a slope that says nothing."""
    torch.manual_seed(4)
    reference = nn.Sequential(nn.Conv2d(4, 5, 1, bias=False), nn.BatchNorm2d(5)).eval()
    model, x = copy.deepcopy(reference), [torch.randn(3, 4, 6, 6)]
    with torch.no_grad():
        model[0].weight *= torch.tensor([10.0, 1.25, 1.0, 0.8, 0.1]).view(-1, 1, 1, 1)
    correct(model, reference, x, "norm")
    with torch.no_grad():
        slopes = model[1].weight / reference[1].weight
        means = [each(x[0]).mean((0, 2, 3)) for each in (model, reference)]
    torch.testing.assert_close(slopes, torch.tensor([0.5, 0.8, 1.0, 1.25, 2.0]), rtol=1e-4, atol=0)
    torch.testing.assert_close(*means, rtol=0, atol=1e-5)


def test_what_cannot_be_is_refused(images: list[torch.Tensor]) -> None:
    with pytest.raises(InputError, match="--method is 'gtpq'. Did you mean 'gptq'"):
        quantize(network(), images, "gtpq")
    with pytest.raises(InputError, match="--correction is 'all'"):
        quantize(network(), images, "amax", correction="all")
    with pytest.raises(InputError, match="--activations is 'max'"):
        quantize(network(), images, "amax", activations="max")
    with pytest.raises(InputError, match="needs images"):
        quantize(network(), [], "amax")


def test_a_checkpoint_is_taken_like_a_trained_one(untrained: Run, tmp_path: Path) -> None:
    from fp4deploy.export.onnx.graph import export_graph

    card = read_card(untrained.checkpoint("fp16"))
    x = torch.randn(2, 3, card.height, card.width)
    out = tmp_path / "nvfp4.safetensors"
    quantize_checkpoint(untrained.checkpoint("fp16"), [x], out, "sweep", correction="bias")
    model, written = load_model(out)
    assert written == replace(card, precision="nvfp4", recipe="nvfp4_4o6_weight_qat")
    assert len(quantized_layers(model)) == 11
    assert export_graph(model, (3, card.height, card.width), written).graph.node
    with pytest.raises(InputError, match="is nvfp4 already"):
        quantize_checkpoint(out, [x], tmp_path / "again.safetensors")


def test_the_layers_that_lose_most_are_left_out_and_the_file_says_so(untrained: Run, tmp_path: Path) -> None:
    card, out = read_card(untrained.checkpoint("fp16")), tmp_path / "nvfp4.safetensors"
    x = torch.randn(2, 3, card.height, card.width)
    options = {"fp16_macs": 0.1, "fp8_macs": 0.1, "exclude": ["up.0"]}
    result = quantize_checkpoint(untrained.checkpoint("fp16"), [x], out, "amax", correction="none", **options)
    model, written = load_model(out)
    layers = quantized_layers(model)
    assert written.exclude == ("up.0", *result.sensitive["fp16"])
    assert written.formats == {"fp8": tuple(result.sensitive["fp8"])}
    assert result.sensitive["fp16"]
    assert {name for name, layer in layers.items() if layer.recipe.activation.format == "fp8"} == set(
        result.sensitive["fp8"]
    )
    assert not {"up.0", *result.sensitive["fp16"]} & layers.keys()
    plain = tmp_path / "plain.safetensors"
    quantize_checkpoint(untrained.checkpoint("fp16"), [x], plain, "amax", correction="none", exclude=["up.0"])
    expected, _ = load_model(untrained.checkpoint("fp16"))
    assert error(model, expected, [x]) < 0.8 * error(load_model(plain)[0], expected, [x])


def test_layers_chosen_by_their_error_join_those_that_were_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), *(nn.Conv2d(16, 16, 3) for _ in range(7)), nn.Conv2d(16, 4, 1))
    named = {"int8": ["2"], "fp8": ["3"], "exclude": ["4"]}
    x = torch.randn(2, 3, 20, 20)
    chosen = quantize(model, x, "amax", correction="none", fp16_macs=0.2, fp8_macs=0.5, **named).sensitive
    formats = {name: layer.recipe.activation.format for name, layer in quantized_layers(model).items()}
    assert formats.pop("2") == "int8"
    assert {name for name, form in formats.items() if form == "fp8"} == {"3", *chosen["fp8"]}
    assert set("1234567") - {"2"} - formats.keys() == {"4", *chosen["fp16"]}
    assert chosen["fp16"]
    assert chosen["fp8"]


def test_layers_of_a_network_of_arguments_are_left_out() -> None:
    model = Tokens()
    batch = {"ids": torch.randint(0, 32, (4, 6)), "mask": torch.ones(4, 6)}
    result = quantize(model, [batch], "amax", include=["one", "two"], fp16_macs=0.5, correction="none")
    assert len(result.sensitive["fp16"]) == 1
    assert quantized_layers(model).keys() == {"one", "two"} - set(result.sensitive["fp16"])


def test_a_least_share_of_the_work_stays_in_fp4() -> None:
    """The first and the last layer count as well; without the option nothing becomes FP8."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3), *(nn.Conv2d(16, 16, 3, padding=1) for _ in range(6)), nn.Conv2d(16, 4, 1))
    x, shares = torch.randn(2, 3, 12, 12), {}
    for least in (0.0, 0.5, 0.8):
        model = nn.Sequential(*copy.deepcopy(layers))
        found = quantize(model, x, "amax", correction="none", fp4_macs=least).sensitive
        macs = {str(at): each.weight.numel() * 100 for at, each in enumerate(layers)}  # of 10 x 10 pixels
        in_fp4 = quantized_layers(model).keys() - set(found.get("fp8", []))
        shares[least] = sum(macs[name] for name in in_fp4) / sum(macs.values())
        assert bool(found) == bool(least)
    assert shares[0.5] < shares[0.8] < shares[0.0]
    assert shares[0.5] >= 0.5
    assert shares[0.8] >= 0.8


class Tokens(nn.Module):
    """Token ids -> logits; a mask by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.norm = nn.Embedding(32, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.two, self.head = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.norm(torch.relu(self.one(self.embed(ids))))
        x = x if mask is None else x * mask[..., None]
        return {"logits": self.head(torch.relu(self.two(x)))}


@pytest.mark.parametrize("method", ["gptq", "brecq"])
@pytest.mark.parametrize("several", [False, True])
def test_a_batch_may_be_a_dict_of_arguments(method: str, several: bool) -> None:
    torch.manual_seed(0)
    model = Tokens()
    batch = {"ids": torch.randint(32, (4, 6)), "mask": torch.ones(4, 6, dtype=torch.int64)}
    result = quantize(model, [batch, batch] if several else batch, method, iterations=2, correction="both")
    assert result.images == (8 if several else 4)
    assert list(quantized_layers(model)) == ["one", "two"]
    assert result.corrected == ["one", "norm", "two"]
    assert model.eval()(**batch)["logits"].isfinite().all()


def test_a_batch_without_a_tensor_is_named() -> None:
    with pytest.raises(InputError, match="holds no tensor but str"):
        quantize(Tokens(), ["ids"])
