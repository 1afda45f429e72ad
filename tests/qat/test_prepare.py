"""`prepare` and `restore`: what they choose, why, and that nothing else of a model changes."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp4deploy.data import IMAGE_MEAN, IMAGE_STD
from fp4deploy.errors import InputError
from fp4deploy.export.onnx.layer_constants import layer_constants
from fp4deploy.models import ModelCard, build_unet, save_checkpoint
from fp4deploy.qat import (
    RECIPES,
    QuantConv2d,
    QuantSpec,
    Recipe,
    calibrate,
    layer_plan,
    load_model,
    prepare,
    quantized_layers,
    restore,
)
from fp4deploy.qat.fp4_gemms.requirements import require_packed
from fp4deploy.qat.layers import QUANTIZED
from fp4deploy.qat.prepare import set_products
from fp4deploy.qat.recipes import find_recipe
from tests.qat.layer_cases import LAYERS, generator, make, quantized

OFF = Recipe("off")

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


class OwnConv(nn.Conv2d):
    """A convolution with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.body = nn.ModuleDict(
            {
                "conv": nn.Conv2d(32, 32, 3, padding=1),
                "own": OwnConv(32, 32, 1),
                "norm": nn.BatchNorm2d(32),
                "up": nn.ConvTranspose2d(32, 32, 2, stride=2),
            }
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Linear(32, 48)
        self.fc2 = nn.Linear(48, 48)
        self.head = nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        for layer in self.body.values():
            x = layer(x).relu()
        x = self.pool(x).flatten(1)
        return self.head(self.fc2(self.fc1(x).relu()).relu())


def images(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=generator(seed))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and every gradient."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_with_its_quantisers_off_is_the_original_bit_by_bit(name: str) -> None:
    layer, x = make(name)
    original = run(nn.Sequential(copy.deepcopy(layer)), x)
    found = run(prepare(nn.Sequential(layer), OFF, include=["0"]), x)
    assert len(found) == len(original) == 3 + int(layer.bias is not None)
    assert all(torch.equal(one, other) for one, other in zip(found, original, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["linear", "conv", "transposed"])
def test_the_bias_is_added_and_never_quantised(recipe: str, name: str) -> None:
    layer, x = make(name)
    model = prepare(nn.Sequential(layer), recipe, include=["0"])
    with_bias = model(x.detach())
    bias = torch.full_like(layer.bias, 1e-3) + torch.arange(len(layer.bias)) * 1e-5
    with torch.no_grad():
        layer.bias += bias
    shape = (-1,) if name == "linear" else (-1, 1, 1)
    torch.testing.assert_close(model(x.detach()) - with_bias, bias.view(shape).expand_as(with_bias), rtol=0, atol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_restore_gives_the_original_back(recipe: str) -> None:
    model, calls = net(), []
    model.fc1.register_forward_hook(lambda *_: calls.append("forward"))
    model.fc1.register_full_backward_hook(lambda *_: calls.append("backward"))
    handles = [dict(layer.__dict__) for layer in model.modules()]
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    classes = [type(layer) for layer in model.modules()]
    buffers = [name for name, _ in model.named_buffers()]
    before = run(copy.deepcopy(model).eval(), images())

    prepare(model, recipe, include=["*"])
    assert set(quantized_layers(model)) == {"stem", "body.conv", "body.up", "fc1", "fc2", "head"}
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    run(model, images())
    assert calls[-2:] == ["forward", "backward"]
    model.body["norm"].reset_running_stats()

    assert restore(model) is model
    assert [type(layer) for layer in model.modules()] == classes
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_buffers()] == buffers
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    for layer, then in zip(model.modules(), handles, strict=True):
        assert layer.__dict__.keys() == then.keys()
    assert all(torch.equal(a, b) for a, b in zip(run(model.eval(), images()), before, strict=True))
    assert restore(model) is model, "nothing to undo is no error"


def test_a_prepared_model_takes_another_recipe() -> None:
    model, x = net(), images()
    outputs = {}
    for recipe in (*RECIPES, "nvfp4_qat"):
        prepare(model, recipe)
        assert {layer.recipe.name for layer in quantized_layers(model).values()} == {recipe}
        outputs[recipe] = run(copy.deepcopy(model), x)[0]
        fresh = run(prepare(net(), recipe), x)[0]
        assert torch.equal(outputs[recipe], fresh)
    assert len({output.sum().item() for output in outputs.values()}) >= 5


def test_only_a_static_activation_and_outlier_channels_add_a_key() -> None:
    plain = net().state_dict()
    for name, recipe in RECIPES.items():
        model = prepare(net(), name)
        added = set(model.state_dict()) - set(plain)
        static = recipe.activation is not None and recipe.activation.scale == "static"
        expected = {f"{layer}.input_amax" for layer in quantized_layers(model) if static}
        expected |= {f"{layer}.outlier_channels" for layer in quantized_layers(model) if recipe.outlier_control}
        assert added == expected
        assert [k for k in model.state_dict() if k in plain] == list(plain)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_unquantised_checkpoint_loads_strictly(recipe: str) -> None:
    source = net()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1)
    model = prepare(net(), recipe)
    missing = model.load_state_dict(source.state_dict(), strict=True)
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), source.parameters(), strict=True))
    back = restore(model)
    assert net().load_state_dict(back.state_dict(), strict=True)
    with pytest.raises(RuntimeError, match=r"fc1\.weight"):
        model.load_state_dict({k: v for k, v in source.state_dict().items() if k != "fc1.weight"}, strict=True)


def test_a_checkpoint_that_was_trained_keeps_its_amax() -> None:
    trained = prepare(net())
    trained(images() * 3)
    model = prepare(net())
    model.load_state_dict(trained.state_dict(), strict=True)
    for name, layer in quantized_layers(model).items():
        assert layer.input_amax == quantized_layers(trained)[name].input_amax > 0


SELECTIONS: list[tuple[Any, Any, set[str]]] = [
    (None, None, {"body.conv", "body.up", "fc1", "fc2"}),
    (["*"], None, {"stem", "body.conv", "body.up", "fc1", "fc2", "head"}),
    ("*", "body*", {"stem", "fc1", "fc2", "head"}),
    ("fc*", None, {"fc1", "fc2"}),
    (["fc*", "head"], None, {"fc1", "fc2", "head"}),
    (["fc?"], ["fc1"], {"fc2"}),
    (None, ["body.*"], {"fc1", "fc2"}),
    (("fc1",), None, {"fc1"}),
    (lambda name, layer: isinstance(layer, nn.Linear), None, {"fc1", "fc2", "head"}),
    (None, lambda name, layer: name.startswith("fc"), {"body.conv", "body.up"}),
    (["fc*"], lambda name, layer: getattr(layer, "in_features", 0) == 48, {"fc1"}),
    (["ody"], None, {"body.conv", "body.up"}),  # a keyword: no layer has that name
    (["fc", "head"], ["1"], {"fc2", "head"}),
]


@pytest.mark.parametrize(("include", "exclude", "chosen"), SELECTIONS)
def test_names_by_glob_list_and_predicate(include: Any, exclude: Any, chosen: set[str]) -> None:
    model = prepare(net(), "nvfp4_train", include=include, exclude=exclude)
    assert set(quantized_layers(model)) == chosen
    plans = layer_plan(net(), "nvfp4_train", include, exclude)
    assert {plan.name for plan in plans if plan.precision == "FP4"} == chosen
    assert all(plan.reason for plan in plans)


def test_layers_that_cannot_be_quantised_say_why() -> None:
    model = nn.ModuleDict(
        {
            "own": OwnConv(32, 32, 1),
            "line": nn.ConvTranspose1d(32, 32, 3),
            "embedding": nn.Embedding(10, 32),
            "norm": nn.LayerNorm(32),
            "weight_norm": nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)),
            "fine": nn.Linear(32, 32),
        }
    )
    reasons = {plan.name: plan.reason for plan in layer_plan(model, include=["*"]) if plan.precision == "FP16"}
    assert "subclass of Conv2d" in reasons["own"]
    assert reasons["line"] == f"ConvTranspose1d is none of {', '.join(kind.__name__ for kind in QUANTIZED)}"
    assert reasons["embedding"].startswith("embedding: rows")
    assert "normalisation" in reasons["norm"]
    assert "weight_norm" not in reasons
    for name in ("own", "line", "embedding", "norm"):
        with pytest.raises(InputError, match=f"'{name}' includes nothing that can be quantised"):
            prepare(model, include=[name])
    prepare(model, include=["*"])
    assert list(quantized_layers(model)) == ["weight_norm", "fine"]


GROUPS: dict[str, tuple[nn.Module, str, str | None]] = {
    "of 12": (nn.Conv2d(48, 32, 3, groups=4), "nvfp4_qat", "4 groups of 12 input channels"),
    "of 12, transposed": (nn.ConvTranspose2d(48, 32, 3, groups=4), "nvfp4_qat", "4 groups of 12 input channels"),
    "of 20 in one axis": (nn.Conv1d(40, 32, 3, groups=2), "nvfp4_qat_delayed", "2 groups of 20 input channels"),
    "depthwise": (nn.Conv2d(32, 32, 3, groups=32), "nvfp4_4o6_weight_qat", "32 groups of 1 input channels"),
    "of 5 outputs in 16 x 16": (nn.Conv2d(64, 10, 3, groups=2), "nvfp4_qat_2d", "2 groups of 5 output channels"),
    "of 5 outputs": (nn.Conv2d(64, 10, 3, groups=2), "nvfp4_qat", None),
    "of 16 outputs in 16 x 16": (nn.Conv2d(64, 32, 3, groups=2), "nvfp4_qat_2d", None),
    "of 5 outputs, transposed": (nn.ConvTranspose2d(64, 10, 3, groups=2), "nvfp4_qat_2d", None),
    "in FP8": (nn.Conv2d(48, 32, 3, groups=4), "fp8_qat", None),
    "trained without a file": (nn.Conv2d(48, 32, 3, groups=4), "nvfp4_train", None),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_whose_blocks_no_file_holds_stay_even_where_they_are_included(name: str) -> None:
    layer, recipe, reason = GROUPS[name]
    model = nn.ModuleList([copy.deepcopy(layer), nn.Linear(32, 32)])
    plan = layer_plan(model, recipe, include=["*"])[0]
    assert (plan.precision == "FP16") == (reason is not None)
    if reason is None:
        return
    assert plan.reason.startswith(f"{reason}: a block of")
    with pytest.raises(InputError, match=f"'0' includes nothing that can be quantised. 0: {reason}"):
        prepare(model, recipe, include=["0"])
    with pytest.raises(InputError, match=f"0: {reason}.*exclude=\\['0'\\]"):
        layer_constants("0", quantized(copy.deepcopy(layer), recipe)[0])


def test_a_layer_of_few_channels_stays_wherever_it_stands() -> None:
    def planned(channels: int, **chosen: Any) -> list[str]:
        layers = (nn.Conv2d(3, 16, 3), nn.Conv2d(channels, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 2, 1))
        return [plan.precision for plan in layer_plan(nn.ModuleList(layers), **chosen)]

    assert planned(4) == planned(1) == ["FP16", "FP16", "FP4", "FP16"]
    assert planned(5) == ["FP16", "FP4", "FP4", "FP16"]
    assert planned(4, include=["1"]) == ["FP16", "FP4", "FP16", "FP16"]


def test_mistakes_in_a_selection_are_named() -> None:
    with pytest.raises(InputError, match=r"No layer matches 'boddy.*body\.conv"):
        prepare(net(), include=["boddy.*"])
    with pytest.raises(InputError, match="No layer matches 'fc9'"):
        prepare(net(), exclude=["fc9"])
    with pytest.raises(InputError, match="Every layer of this model stays in FP16"):
        prepare(net(), include=lambda name, layer: False)
    with pytest.raises(InputError, match="Unknown recipe"):
        prepare(net(), "nvfp5")
    with pytest.raises(InputError, match=r"No layer matches 'qkv'.*keywords such as 'proj'"):
        prepare(net(), fp8=["qkv"])
    assert not quantized_layers(net())


def test_a_layer_used_under_two_names_is_prepared_once() -> None:
    shared = nn.Linear(32, 32)
    model = nn.Sequential(nn.Linear(32, 32), shared, nn.ReLU(), shared, nn.Linear(32, 4))
    prepare(model, "nvfp4_train")
    assert list(quantized_layers(model)) == ["1"]
    assert model[1] is model[3]
    restore(model)
    assert type(model[3]) is nn.Linear


def test_a_model_that_is_one_layer() -> None:
    layer = nn.Conv2d(32, 32, 1)
    prepare(layer, "tetrajet", include=["*"])
    assert isinstance(layer, QuantConv2d)
    assert list(quantized_layers(layer)) == [""]
    assert type(restore(layer)) is nn.Conv2d


def test_a_spec_can_be_shared_by_layers_without_sharing_their_scales() -> None:
    model = prepare(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), Recipe("s", QuantSpec(scale="static")), ["*"])
    model(torch.ones(1, 16))
    assert model[0].input_amax == 1
    assert model[1].input_amax != 1


def test_preparing_again_changes_the_recipe_or_the_layers_and_keeps_calibrated_scales() -> None:
    model = prepare(nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))))
    calibrate(model, [torch.randn(4, 32, generator=torch.Generator().manual_seed(0))])
    amax = model[1].input_amax.clone()
    prepare(model, "nvfp4_qat_2d")
    assert list(quantized_layers(model)) == ["1", "2"]
    assert model[1].input_amax == amax > 0
    prepare(model, "tetrajet", exclude=["1"])
    assert list(quantized_layers(model)) == ["2"]
    assert type(model[1]) is nn.Linear
    prepare(model, "nvfp4_qat", include=["*"])
    assert list(quantized_layers(model)) == ["0", "1", "2", "3"]


def test_a_static_checkpoint_loads_strictly_into_a_dynamic_recipe() -> None:
    static = prepare(nn.Sequential(nn.Linear(32, 32)), "nvfp4_qat", include=["0"])
    dynamic = prepare(nn.Sequential(nn.Linear(32, 32)), "tetrajet", include=["0"])
    dynamic.load_state_dict(static.state_dict(), strict=True)
    assert torch.equal(dynamic[0].weight, static[0].weight)


def test_recipes_refuse_what_means_nothing() -> None:
    with pytest.raises(InputError, match="amax_decay is 7"):
        Recipe("decay", QuantSpec(), amax_decay=7)
    with pytest.raises(InputError, match="no backward operand"):
        Recipe("double", QuantSpec(), QuantSpec(), double_quantization=True)


@pytest.mark.parametrize("layer", [nn.Linear(64, 32), nn.Conv2d(16, 8, 3)])
def test_one_layer_is_quantised_without_being_named(layer: nn.Module) -> None:
    assert prepare(layer) is layer
    assert type(layer).__name__ in ("QuantLinear", "QuantConv2d")
    assert "nvfp4_qat: X NVFP4 RN static along C, W^T NVFP4 RN along C, G -, W -, G^T -, X (dW) -" in repr(layer)
    assert [plan.precision for plan in layer_plan(layer)] == ["FP4"]


def test_a_printed_layer_says_format_scale_rule_rounding_axis_and_double_quantisation() -> None:
    printed = repr(prepare(nn.Sequential(nn.Conv2d(32, 8, 3), nn.Linear(64, 32)), "tetrajet", include="*"))
    for summed in ("pixels", "tokens"):
        assert (
            f"X MXFP4 ceil RN along C, W^T MXFP4 ceil RN along C, G MXFP4 ceil SR along O, W MXFP4 ceil SR along O, "
            f"G^T MXFP4 ceil SR along {summed}, X (dW) MXFP4 ceil SR along {summed}, double quantization"
        ) in printed
    assert "X FP8 RN static, W^T FP8 RN rows, G -" in repr(prepare(nn.Linear(64, 32), "fp8_qat"))


def test_nothing_to_quantise_says_why() -> None:
    with pytest.raises(InputError, match=r"Every layer of this model stays in FP16 \(0: first layer.*1: output layer"):
        prepare(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1)))
    with pytest.raises(InputError, match="depthwise"):
        prepare(nn.Conv2d(16, 16, 3, groups=16))
    with pytest.raises(InputError, match="no layer that FP4 could compute"):
        prepare(nn.GroupNorm(4, 16))


def test_a_lazy_layer_is_named() -> None:
    model = nn.Sequential(nn.LazyConv2d(16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 4, 1))
    with pytest.raises(InputError, match=r"0 is a lazy layer.*Run one batch"):
        prepare(model)
    model(torch.zeros(1, 3, 8, 8))
    prepare(model)


class Pair(nn.Module):
    """Two inputs that are needed, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 8), nn.Linear(32, 8)

    def forward(self, image: torch.Tensor, depth: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        y = self.one(image) + self.two(depth)
        return y if more is None else y * more


def test_a_batch_gives_as_many_inputs_as_the_forward_needs() -> None:
    image, depth, labels = torch.full((4, 16), 2.0), torch.full((4, 32), 3.0), torch.zeros(4, dtype=torch.long)
    for batch in ((image, depth), [image, depth, labels], ((image, depth), labels), {"image": image, "depth": depth}):
        model = prepare(Pair(), include=["one", "two"])
        calibrate(model, [batch])
        assert [float(layer.input_amax) for layer in quantized_layers(model).values()] == [2, 3]
    with pytest.raises(InputError, match="The forward of Pair needs image, depth; elements of the batch: 1"):
        calibrate(prepare(Pair(), include=["one", "two"]), [(image,)])
    model = prepare(nn.Linear(16, 8))
    calibrate(model, [(image, labels)])
    assert float(model.input_amax) == 2  # type: ignore[arg-type]


def test_what_was_trained_with_quantised_gradients_is_deployed_with_static_scales(tmp_path: Path) -> None:
    """The way of docs/recipes.md: weights keep their bits, activations get a static scale; the file can be exported."""
    names = ("background", "a", "b")
    card = ModelCard("nvfp4", 0.125, names, 32, 32, IMAGE_MEAN, IMAGE_STD, True, "nvfp4_train")
    torch.manual_seed(0)
    trained, deployed = tmp_path / "trained.safetensors", tmp_path / "deployed.safetensors"
    save_checkpoint(trained, prepare(build_unet(3, 0.125), "nvfp4_train"), card)
    model, card = load_model(trained)
    before = {name: layer.quantized_weight().clone() for name, layer in quantized_layers(model).items()}
    with pytest.raises(InputError, match="static global scale"):
        layer_constants("up.0", quantized_layers(model)["up.0"])
    prepare(model, "nvfp4_qat_2d")
    calibrate(model, torch.randn(2, 3, 32, 32))
    save_checkpoint(deployed, model, replace(card, recipe="nvfp4_qat_2d"))
    again, found = load_model(deployed)
    assert found.recipe == "nvfp4_qat_2d"
    layers = quantized_layers(again)
    assert list(layers) == list(before)
    for name, layer in layers.items():
        assert torch.equal(layer.quantized_weight(), before[name])
        assert layer_constants(name, layer) is not None


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_that_cannot_multiply_in_fp4_are_refused_and_nothing_changes(name: str) -> None:
    model = prepare(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32)), name, include=["0", "1"])
    try:
        require_packed(find_recipe(name))
    except InputError as error:
        with pytest.raises(InputError, match=re.escape(str(error))):
            set_products(model, "fp4")
        expected = "emulated"
    else:
        set_products(model, "fp4")
        expected = "fp4"
    assert {layer.products for layer in quantized_layers(model).values()} == {expected}
