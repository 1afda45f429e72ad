"""The layers that produce the outputs of a network of several stay in FP16, each like the only one of another."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fp4deploy.models import DetectionHead
from fp4deploy.models.detector import UNetDetector
from fp4deploy.models.output import with_logits
from fp4deploy.models.unet import build_unet
from fp4deploy.qat import layer_plan, prepare
from fp4deploy.qat.output_layers import _say_assumed

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def unsaid() -> None:
    _say_assumed.cache_clear()


class Heads(nn.Module):
    """Three heads on one trunk; `form`: how results are returned, `asks_for_size`: control flow depends on one."""

    def __init__(self, form: str = "dict", asks_for_size: bool = False) -> None:
        super().__init__()
        self.form, self.asks_for_size = form, asks_for_size
        self.stem, self.body = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.depth, self.head, self.score = nn.Conv2d(16, 1, 1), nn.Conv2d(16, 4, 1), nn.Linear(16, 2)
        self.last = nn.Conv2d(16, 16, 1)
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        if self.asks_for_size and x.shape[2] % 2:
            raise ValueError("odd")
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


def test_a_single_output_keeps_the_last_layer_alone() -> None:
    assert {name for name, each in precisions(Heads("single")).items() if each == "FP16"} == {"stem", "last"}


def test_where_tracing_stops_the_network_names_its_output_layers() -> None:
    model = Heads(asks_for_size=True)
    with pytest.warns(UserWarning, match=r"Heads cannot be traced .* last layer, last, .* output_layers = "):
        assert precisions(model)["head"] == "FP4"
    layer_plan(model, include="head")  # which asks for no output layer
    model.output_layers = ("head", "depth")  # type: ignore[assignment]
    assert [precisions(model)[name] for name in ("head", "depth", "score")] == ["FP16", "FP16", "FP4"]
    model.output_layers = ()  # type: ignore[assignment]
    assert [precisions(model)[name] for name in ("head", "last")] == ["FP4", "FP16"]


def test_the_warning_is_shown_once() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(2):
            prepare(Heads(asks_for_size=True))
            layer_plan(Heads(asks_for_size=True))
    assert len(shown) == 1


def test_networks_of_commands_have_one_output_and_do_not_warn() -> None:
    network = with_logits(Heads("tuple", asks_for_size=True), "heads", 4, "0")
    for model in (network, build_unet(4, 0.125, digits=True), UNetDetector(DetectionHead("fcos", 2), 0.125)):
        layer_plan(model)


def test_an_output_that_is_no_tensor_is_none() -> None:
    class WithNone(Heads):
        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.stem(x)), self.depth(self.stem(x)), None

    assert {name for name, each in precisions(WithNone()).items() if each == "FP16"} == {"stem", "head", "depth"}


def test_of_a_sum_the_layer_called_last_is_the_output_layer() -> None:
    class Sum(Heads):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.last(self.stem(x))
            return self.body(x) + self.head(x).mean(), self.depth(x)

    assert {name for name, each in precisions(Sum()).items() if each == "FP16"} == {"stem", "head", "depth"}


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
