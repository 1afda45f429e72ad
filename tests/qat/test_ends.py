"""The layers that read the input and those that give the outputs stay in FP16, by what is called."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp4deploy.models import DetectionHead, ModelCard, save_checkpoint
from fp4deploy.models.build import network_for
from fp4deploy.models.detector import UNetDetector
from fp4deploy.models.output import with_logits
from fp4deploy.models.unet import build_unet
from fp4deploy.qat import calibrate, layer_plan, load_model, prepare, prepare_as, quantized_layers
from fp4deploy.qat.ends import Ends, _say_assumed, ends_of
from tests.samples import sample

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def unsaid() -> None:
    _say_assumed.cache_clear()


OWN = """
from torch import nn
class Own(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.aux, self.head = nn.Conv2d(32, classes, 1), nn.Conv2d(32, classes, 1)
        self.stem, self.two, self.three = nn.Conv2d(3, 32, 1), nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 1)
    def forward(self, x):
        x = self.three(self.two(self.stem(x).relu()).relu()).relu()
        return (self.head(x), self.aux(x)) if self.training else self.head(x)
"""


class Heads(nn.Module):
    """Three heads on one trunk; `form`: how results are returned, `only`: the size that its code accepts."""

    def __init__(self, form: str = "dict", only: int | None = None) -> None:
        super().__init__()
        self.form, self.only = form, only
        self.stem, self.body = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.depth, self.head, self.score = nn.Conv2d(16, 1, 1), nn.Conv2d(16, 4, 1), nn.Linear(16, 2)
        self.last = nn.Conv2d(16, 16, 1)
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        if self.only and x.shape[2] != self.only:
            raise ValueError("size")
        x = self.last(self.body(self.stem(x).relu()).relu()).relu()
        self.kept = x
        head = nn.functional.interpolate(self.head(x), scale_factor=2)
        depth, score = self.depth(x).sigmoid(), self.score(x.mean((2, 3)))
        if self.form == "single":
            return head + depth.mean() + score.mean()
        return {"head": head, "more": [depth, score]} if self.form == "dict" else (head, (depth, score))


def precisions(model: nn.Module) -> dict[str, str]:
    return {plan.name: plan.precision for plan in layer_plan(model)}


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_every_output_has_its_layer_in_fp16(form: str) -> None:
    plans = {plan.name: plan for plan in layer_plan(Heads(form))}
    kept = {name for name, plan in plans.items() if plan.precision == "FP16"}
    assert kept == {"stem", "depth", "head", "score"}
    assert {plans[name].reason.partition(":")[0] for name in ("depth", "head", "score")} == {"output layer"}


def test_all_heads_of_a_sum_are_output_layers() -> None:
    kept = {name for name, each in precisions(Heads("single")).items() if each == "FP16"}
    assert kept == {"stem", "depth", "head", "score"}


def test_where_nothing_is_executed_the_network_names_its_output_layers() -> None:
    model = Heads(only=100)
    said = r"Heads can be neither traced .* nor executed .* stem and last, .* example_inputs=x.* output_layers = "
    with pytest.warns(UserWarning, match=said):
        assert precisions(model)["head"] == "FP4"
    layer_plan(model, include="head")  # which asks for no output layer
    model.output_layers = ("head", "depth")  # type: ignore[assignment]
    assert [precisions(model)[name] for name in ("head", "depth", "score")] == ["FP16", "FP16", "FP4"]
    model.output_layers = ()  # type: ignore[assignment]
    assert [precisions(model)[name] for name in ("head", "last")] == ["FP4", "FP16"]


def test_a_checkpoint_of_the_order_of_registration_loads_with_the_layers_that_it_has_scales_of(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    card = ModelCard(
        "nvfp4", 1.0, ("a", "b"), 32, 32, (0.5,) * 3, (0.2,) * 3, False, "nvfp4_qat", f"{tmp_path}/own.py:Own"
    )
    network = network_for(card, "test", card.architecture)
    prepare(
        network, include=["two", "head"]
    )  # FP16: the first and the last in the order of registration, aux and three
    calibrate(network, torch.rand(2, 3, 32, 32))
    save_checkpoint(tmp_path / "old.safetensors", network, card)
    loaded, _ = load_model(tmp_path / "old.safetensors", model=card.architecture)
    assert list(quantized_layers(loaded)) == ["head", "two"]
    new = prepare_as(network_for(card, "test", card.architecture), card)
    assert list(quantized_layers(new)) == ["aux", "two", "three"]
    calibrate(new, torch.rand(2, 3, 32, 32))
    save_checkpoint(tmp_path / "new.safetensors", new, card)
    loaded, _ = load_model(tmp_path / "new.safetensors", model=card.architecture)
    assert list(quantized_layers(loaded)) == ["aux", "two", "three"]


def test_the_warning_is_shown_once() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(2):
            prepare(Heads(only=100))
            layer_plan(Heads(only=100))
    assert len(shown) == 1


def test_networks_of_commands_have_one_output_and_do_not_warn() -> None:
    network = with_logits(Heads("tuple", only=64), "heads", 4, "0")
    for model in (network, build_unet(4, 0.125, digits=True), UNetDetector(DetectionHead("fcos", 2), 0.125)):
        layer_plan(model)


def test_an_output_that_is_no_tensor_is_none() -> None:
    class WithNone(Heads):
        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.stem(x)), self.depth(self.stem(x)), None

    assert {name for name, each in precisions(WithNone()).items() if each == "FP16"} == {"stem", "head", "depth"}


def test_of_a_sum_in_one_of_several_outputs_both_are_output_layers() -> None:
    class Sum(Heads):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.last(self.stem(x))
            return self.body(x) + self.head(x).mean(), self.depth(x)

    kept = {name for name, each in precisions(Sum()).items() if each == "FP16"}
    assert kept == {"stem", "body", "head", "depth"}


def test_the_model_and_its_hooks_see_nothing_of_the_tracing() -> None:
    model, calls = Heads().train(), []
    model.body.register_forward_hook(lambda *given: calls.append(given))
    model.register_forward_pre_hook(lambda *given: calls.append(given))
    prepare(model)
    assert not calls
    assert model.kept is None
    assert model.training
    assert precisions(model) == precisions(Heads()), "a prepared model is described as it is"
    model(torch.zeros(1, 3, 8, 8))
    assert len(calls) == 2


def conv(channels: int, out: int) -> nn.Conv2d:
    return nn.Conv2d(channels, out, 3, padding=1)


class Network(nn.Module):
    """Layers in an unhelpful order of registration; `way`: which forward, `steady`: fx can trace it."""

    def __init__(self, way: str, steady: bool) -> None:
        super().__init__()
        self.way, self.steady = way, steady
        self.head, self.low, self.two, self.stem = nn.Conv2d(64, 5, 1), nn.Conv2d(64, 5, 1), conv(64, 64), conv(16, 64)
        self.one, self.other, self.aux = conv(64, 64), conv(16, 64), nn.Conv2d(64, 5, 1)

    def forward(self, x: torch.Tensor) -> Any:
        if not self.steady and x.shape[1] != 16:
            raise ValueError("channels")
        stem = self.stem(x).relu()
        one = self.one.forward(stem) if self.way == "forward" else self.one(stem)
        middle = self.two(one.relu()).relu()
        if self.way == "auxiliary":
            return (self.head(middle), self.aux(middle)) if self.training else self.head(middle)
        if self.way == "lent":
            middle = middle + nn.functional.conv2d(
                stem, self.other.weight.mean(1, keepdim=True).expand(64, 64, 3, 3), padding=1
            )
        if self.way == "lent, called":
            middle = middle + nn.functional.conv2d(stem, self.one.weight, padding=1)
        if self.way == "sum":
            return self.low(stem) + self.head(middle)
        if self.way == "stems":
            return self.head(self.two(self.one(stem).relu() + self.other(x)))
        if self.way == "residual":
            return middle + self.one(middle + self.two(middle))
        if self.way == "shared":
            return self.head(self.one(middle)), self.head(middle)
        if self.way == "in place":
            result = torch.zeros_like(middle[:, :10])
            result[:, :5] = self.head(middle)
            result[:, 5:].copy_(self.low(stem))
            return result
        return self.head(middle)


WAYS = {
    "plain": (("stem",), ("head",)),
    "auxiliary": (("stem",), ("head",)),
    "sum": (("stem",), ("low", "head")),
    "lent": (("stem",), ("head",)),
    "lent, called": (("stem",), ("head",)),
    "forward": (("stem",), ("head",)),
    "stems": (("stem", "other"), ("head",)),
    "residual": (("stem",), ("one",)),
    "shared": (("stem",), ("head",)),
    "in place": (("stem",), ("head", "low")),
}


@pytest.mark.parametrize(("way", "steady"), sample(WAYS, [True, False], every=2))
def test_both_ends_are_found_by_calls_and_not_by_registration(way: str, steady: bool) -> None:
    model = Network(way, steady)
    found = ends_of(model, lambda layer: isinstance(layer, nn.Conv2d))
    assert (set(found.first), set(found.outputs)) == tuple(map(set, WAYS[way]))
    plans = {plan.name: plan for plan in layer_plan(model)}
    lent = {name for name, plan in plans.items() if "outside of its own call" in plan.reason}
    assert lent == {"lent": {"other"}, "lent, called": {"one"}}.get(way, set())  # a layer is a call
    if way == "auxiliary":
        assert plans["aux"].precision == "FP4"


def test_an_input_of_the_caller_is_executed() -> None:
    model = Heads(only=100)
    plans = layer_plan(model, example_inputs=torch.zeros(1, 3, 100, 100))
    kept = {plan.name for plan in plans if plan.precision == "FP16"}
    assert kept == {"stem", "depth", "head", "score"}
    prepared = prepare(model, example_inputs=(torch.zeros(1, 3, 100, 100),))
    assert type(prepared.last).__name__ == "QuantConv2d"


def test_executing_changes_neither_buffers_nor_random_numbers_nor_a_prepared_model() -> None:
    class Counting(Network):
        def __init__(self) -> None:
            super().__init__("plain", False)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1 + 0 * torch.rand(())
            if float(self.calls) < 0:  # which needs data
                return x
            return super().forward(x)

    model = Counting()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    plan = layer_plan(prepare(model))
    assert torch.equal(torch.rand(1), expected)
    assert model.calls == 0
    assert plan == layer_plan(prepare(model)), "a prepared network, which is not calibrated"
    assert [each.name for each in plan if each.precision == "FP16"] == ["head", "stem"]


def test_a_stem_that_cannot_be_quantised_is_the_one_that_reads_the_image() -> None:
    class Own(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.ifft2(torch.fft.fft2(super().forward(x))).real

    model = nn.Sequential(Own(16, 32, 3), conv(32, 32), conv(32, 5))
    assert [plan.precision for plan in layer_plan(model)] == ["FP16", "FP4", "FP16"]


def test_of_a_compiled_module_the_names_are_those_of_the_wrapper() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, about itself
        compiled: Any = torch.compile(Network("sum", True))
    found = ends_of(compiled, lambda layer: isinstance(layer, nn.Conv2d))
    assert found == Ends(("_orig_mod.stem",), ("_orig_mod.low", "_orig_mod.head"))


class Tokens(nn.Module):
    """Token ids and a mask of them -> logits; the rows of an embedding are no image."""

    def __init__(self, functional: bool = False) -> None:
        super().__init__()
        self.functional = functional
        self.embed, self.query, self.out = nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 32)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = nn.functional.embedding(ids, self.embed.weight) if self.functional else self.embed(ids)
        x = self.query(x)
        if mask is not None:
            x = x * mask[..., None]
        y: torch.Tensor = self.head(torch.relu(self.out(x)))
        return y


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("given", [None, {"ids": torch.ones(2, 5, dtype=torch.int64), "mask": torch.ones(2, 5).long()}])
def test_a_network_of_tokens_has_no_first_layer(functional: bool, given: Any) -> None:
    model = Tokens(functional)
    assert [plan.name for plan in layer_plan(model, example_inputs=given) if plan.precision == "FP4"] == [
        "query",
        "out",
    ]


def test_a_network_of_tokens_that_nothing_can_execute_has_no_first_layer() -> None:
    class Unexecuted(Tokens):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            if ids.shape[0] != 100:
                raise ValueError
            return super().forward(ids, mask)

    with pytest.warns(UserWarning, match="its last layer in the order of registration, head, is taken"):
        assert [plan.name for plan in layer_plan(Unexecuted()) if plan.precision == "FP4"] == ["query", "out"]


def test_a_unet_that_encodes_its_image_is_traced() -> None:
    """Not taken in the order of registration, which happens to be right, after 48 executions that end with errors."""
    model = build_unet(4, 0.125, digits=True)
    model._modules["encoder"] = model._modules.pop("encoder")
    kinds = (nn.Conv2d, nn.ConvTranspose2d)
    assert ends_of(model, lambda layer: isinstance(layer, kinds)) == Ends(("encoder.0.conv1",), ("head",))


class Guided(nn.Module):
    """The image is read by two parallel stems, and again further down; `traced`: by code that torch.fx can follow."""

    def __init__(self, traced: bool) -> None:
        super().__init__()
        self.traced, self.guide = traced, nn.Conv2d(19, 16, 1)
        self.left, self.right, self.head = nn.Conv2d(3, 16, 1), nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.traced and x.shape[2] < 1:
            raise ValueError
        y = self.left(x).relu() + self.right(x).relu()
        return self.head(self.guide(torch.cat([x, y], 1)).relu())


@pytest.mark.parametrize("traced", [True, False])
def test_a_layer_that_reads_the_image_again_is_not_the_first(traced: bool) -> None:
    found = ends_of(Guided(traced), lambda layer: isinstance(layer, nn.Conv2d), torch.zeros(1, 3, 8, 8))
    assert found == Ends(("left", "right"), ("head",))


class Told(nn.Module):
    """An image and what another network says of it, as a linear layer reads it and, `mapped`, as a convolution does."""

    def __init__(self, traced: bool) -> None:
        super().__init__()
        self.traced, self.stem, self.head = traced, nn.Conv2d(3, 32, 1), nn.Conv2d(32, 4, 1)
        self.queries, self.states, self.mapped = nn.Linear(32, 32), nn.Linear(48, 32), nn.Conv2d(5, 32, 1)

    def forward(self, x: torch.Tensor, more: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        if not self.traced and x.shape[2] < 1:
            raise ValueError
        y = (self.stem(x) + self.mapped(more)).flatten(2).mT
        y = y + nn.functional.scaled_dot_product_attention(self.queries(y), *(self.states(text),) * 2)
        return self.head(y.mT[..., None])


@pytest.mark.parametrize("traced", [True, False])
def test_what_another_network_gives_to_a_linear_layer_is_no_image(traced: bool) -> None:
    inputs = {"text": torch.zeros(1, 7, 48), "x": torch.zeros(1, 3, 8, 8), "more": torch.zeros(1, 5, 8, 8)}
    found = ends_of(Told(traced), lambda layer: isinstance(layer, nn.Conv2d | nn.Linear), inputs)
    assert found == Ends(("stem", "mapped"), ("head",))
    plans = layer_plan(Told(traced), example_inputs=inputs)
    assert [plan.name for plan in plans if plan.precision == "FP4"] == ["queries", "states"]


class Conditioned(nn.Module):
    """Patches and a number, each read by a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.patch, self.head = nn.Linear(16, 32), nn.Linear(48, 32), nn.Linear(32, 8)

    def forward(self, number: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        return self.head(self.number(number)[:, None] + self.patch(patches))


def test_without_a_map_every_input_may_be_the_image() -> None:
    for inputs in (None, (torch.zeros(1, 16), torch.zeros(1, 7, 48))):
        found = ends_of(Conditioned(), lambda layer: isinstance(layer, nn.Linear), inputs)
        assert found == Ends(("number", "patch"), ("head",))
