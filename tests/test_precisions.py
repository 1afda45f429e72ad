"""The table of formats that layers may have: everything that names one is made of it, and one more is an entry."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from cli.commands.stages.quantize import LayerOptions
from fp4deploy.errors import InputError
from fp4deploy.export.lowering.forecast import forecast
from fp4deploy.formats import fake_quantize_mxfp8
from fp4deploy.interop.nnunet.quantization import plan_network, quantization_of
from fp4deploy.interop.nnunet.quantization import prepare_as as prepare_folder
from fp4deploy.models import ModelCard
from fp4deploy.precisions import LAYER_FORMATS, PRECISIONS, LayerFormat
from fp4deploy.ptq import quantize
from fp4deploy.ptq.methods import METHODS
from fp4deploy.qat import RECIPES, layer_plan, prepare
from fp4deploy.qat.load import prepare_as
from fp4deploy.qat.recipes import OPERANDS, QuantSpec
from fp4deploy.train.sections import QuantSection
from tests.fuzz.predicted import CARD


def test_options_settings_recipes_and_methods_are_those_of_the_table() -> None:
    assert [each.name for each in fields(LayerOptions)] == ["include", "exclude", *LAYER_FORMATS]
    assert QuantSection.model_fields.keys() > LAYER_FORMATS.keys()
    assert {f"{name}_qat" for name in LAYER_FORMATS} <= RECIPES.keys()
    assert [METHODS[name].recipe for name in LAYER_FORMATS] == [f"{name}_qat" for name in LAYER_FORMATS]
    assert PRECISIONS == ("FP4", "W4A8", "FP8", "INT8")
    assert QuantSection(fp8=["a"], int8=[]).selections == {"fp8": ["a"], "int8": []}


def test_one_more_format_is_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = QuantSpec("mxfp8", scale_rule="ceil")
    each = {"format": "mxfp8", "scale_rule": "ceil"}
    monkeypatch.setitem(LAYER_FORMATS, "w8a8", LayerFormat(each, each, "a test"))
    monkeypatch.setitem(OPERANDS, "w8a8", (spec, spec))
    x, network = torch.randn(4, 64), nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))
    expected = nn.functional.linear(
        fake_quantize_mxfp8(x, -1), fake_quantize_mxfp8(network[0].weight, -1), network[0].bias
    )
    card = replace(CARD, precision="nvfp4", recipe="nvfp4_qat", include=("*",), formats={"w8a8": ("0",)})
    assert ModelCard.from_json(card.to_json()) == card
    for model in (prepare(network, include="*", w8a8=["0"]), prepare_as(network, card)):
        assert [plan.precision for plan in layer_plan(model)] == ["W8A8", "FP4"]
        torch.testing.assert_close(model[0](x), expected)
    assert forecast(network[0], "auto").compute == "FP16"
    quantize(network, x, "amax", include="*", w8a8="2")
    assert [plan.precision for plan in layer_plan(network)] == ["FP4", "W8A8"]


def test_plans_of_nnunet_have_a_field_for_each_format() -> None:
    network = nn.Sequential()
    network.decoder = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 16))
    network.decoder.deep_supervision = False  # type: ignore[assignment]
    planned = plan_network(network, torch.zeros(1, 32), "nvfp4_qat", include="*", int8="*.1", w4a8=["decoder.2"])
    plans = planned.of_plans({"configurations": {"a": {}}}, "a")
    said = plans["configurations"]["a"]
    assert said["fp4deploy"] == {"recipe": "nvfp4_qat", "layers": ("decoder.0", "decoder.1", "decoder.2"), "fp8": (),
                                 "int8": ("decoder.1",), "w4a8": ("decoder.2",), "rest": "fp16"}  # fmt: skip
    again = quantization_of(json.loads(json.dumps(said)), "plans.json")
    assert again == replace(planned, formats={"fp8": (), **planned.formats})
    assert [plan.precision for plan in layer_plan(prepare_folder(network, again))] == ["FP4", "INT8", "W4A8"]


def test_a_format_that_is_none_is_refused() -> None:
    with pytest.raises(
        InputError, match="'fp9' is neither an option nor a format .* Did you mean 'fp8'. Formats: fp8, int8, w4a8"
    ):
        prepare(nn.Linear(16, 16), fp9=["*"])
