"""Models of ModelOpt: a file that it wrote, what is kept and what is not, and the way back where it is installed."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.export.onnx.layers import layers_of
from fp4deploy.formats import quantize_nvfp4
from fp4deploy.interop.modelopt import (
    Quantized,
    Quantizer,
    _quantizer,
    _refusal,
    from_modelopt,
    quantizers_in,
    read_modelopt,
    to_modelopt,
)  # fmt: skip
from fp4deploy.qat import calibrate, prepare, quantized_layers
from fp4deploy.qat.plan import eight_bits
from tests.interop.modelopt_network import network

FILE = Path(__file__).with_name("modelopt_0.47.pt")
INSTALLED = importlib.util.find_spec("modelopt") is not None
ABSENT = "ModelOpt is not installed: pip install -e '.[modelopt]' -c constraints.txt"


@pytest.fixture
def quantized() -> Quantized:
    return read_modelopt(FILE)


def test_a_file_of_modelopt_is_read_without_it(quantized: Quantized) -> None:
    formats = {name: {own: each.format for own, each in both.items()} for name, both in quantized.quantizers.items()}
    assert formats == {
        "2": {"input": "NVFP4", "weight": "NVFP4"}, "4": {"input": "FP8", "weight": "FP8"},
        "5": {"input": "INT8", "weight": "INT8"}, "6": {"weight": "NVFP4"}, "9": {"input": "NVFP4", "weight": "NVFP4"},
    }  # fmt: skip
    assert quantized.tensors.keys() == network().state_dict().keys()
    assert quantized.version == "0.47.0"


@pytest.mark.parametrize(("layer", "count"), [("2", 16), ("2", 1), ("9", 16), ("9", 1)])
def test_a_weight_that_a_scale_of_its_input_divides_is_whole_again(layer: str, count: int, tmp_path: Path) -> None:
    """As of SmoothQuant and AWQ: a scale for each input channel, or one for all."""
    content = torch.load(FILE, weights_only=True)
    weights, scale = content["model_state_dict"], torch.linspace(0.5, 2.5, count)
    weight = weights[f"{layer}.weight"].clone()
    weights[f"{layer}.weight"] = weight / scale.view(1, -1, *(1,) * (weight.ndim - 2))
    weights[f"{layer}.input_quantizer._pre_quant_scale"] = scale
    torch.save(content, tmp_path / "smoothed.pt")
    torch.testing.assert_close(read_modelopt(tmp_path / "smoothed.pt").tensors[f"{layer}.weight"], weight)
    weights[f"{layer}.input_quantizer._pre_quant_scale"] = torch.ones(3)
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(InputError, match=f"{layer} multiplies its input by a scale .3. that its weight"):
        read_modelopt(tmp_path / "other.pt")


def test_weights_amaxes_and_formats_are_kept_and_the_rest_is_named(quantized: Quantized) -> None:
    model = network()
    found = {each.layer: each for each in from_modelopt(model, quantized)}
    assert {name: each.precision for name, each in found.items()} == {
        "2": "FP4", "4": "FP8", "5": "FP16", "6": "FP16", "9": "FP4"
    }  # fmt: skip
    assert found["2"].lost == ["blocks along axis -1 of the weight and -1 of the input, the width: cut along the input "
                               "channels instead"]  # fmt: skip
    assert found["4"].lost == ["one scale for the weight: one for each output channel instead"]
    assert found["5"].lost == ["its format, INT8"]
    assert found["6"].lost == ["one operand alone is quantised, and a GEMM in FP4 or FP8 needs both"]
    assert found["9"].lost == []
    layers = quantized_layers(model)
    assert {name: bool(eight_bits(layer.recipe)) for name, layer in layers.items()} == {
        "2": False,
        "4": True,
        "9": False,
    }
    for name, layer in layers.items():
        assert float(layer.input_amax) == float(quantized.quantizers[name]["input"].amax)  # type: ignore[arg-type]
        assert torch.equal(layer.weight, quantized.tensors[f"{name}.weight"])


def test_its_export_is_blocked_along_the_contracted_axis(quantized: Quantized) -> None:
    model = network()
    from_modelopt(model, quantized)
    graph = export_graph(model, (3, 8, 8))
    precisions = {layer.name: layer.precision for layer in layers_of(graph)}
    assert [name for name, precision in precisions.items() if precision == "FP4"] == ["2", "9"]
    assert precisions["4"] == "FP8"
    weight = quantized.tensors["2.weight"].permute(2, 3, 0, 1)
    scales = next(each for each in graph.graph.initializer if each.name == "2.weight.scales")
    expected = quantize_nvfp4(weight).scales.view(torch.uint8).movedim(-2, 0).flatten(1)
    assert scales.raw_data == expected.contiguous().numpy().tobytes()


def test_what_cannot_be_taken_over_is_said(quantized: Quantized, tmp_path: Path) -> None:
    fields = copy.deepcopy(quantized.quantizers)
    object.__setattr__(fields["2"]["input"], "amax", None)
    object.__setattr__(fields["4"]["input"], "scaled", True)
    object.__setattr__(fields["9"]["weight"], "amax", torch.tensor(0.01))
    found = {each.layer: each for each in from_modelopt(network(), Quantized(quantized.tensors, fields))}
    assert found["2"].lost == ["its input has no amax: calibrate it"]
    assert found["4"].lost == ["the scale that multiplies its input first"]
    assert "the weight's amax 0.01" in found["9"].lost[0]
    with pytest.raises(InputError, match="None of the quantised layers can be taken over. 5: its format, INT8"):
        from_modelopt(network(), Quantized(quantized.tensors, {"5": fields["5"]}))
    with pytest.raises(InputError, match="The weights are of another network"):
        from_modelopt(torch.nn.Sequential(torch.nn.Linear(4, 4)), quantized)
    with pytest.raises(InputError, match="has no quantisers of ModelOpt"):
        quantizers_in(network())
    torch.save({"model_state_dict": {}}, tmp_path / "plain.pt")
    with pytest.raises(InputError, match="holds no quantised model of ModelOpt"):
        read_modelopt(tmp_path / "plain.pt")
    torch.save({"modelopt_state": print}, tmp_path / "code.pt")
    with pytest.raises(InputError, match="holds more than tensors"):
        read_modelopt(tmp_path / "code.pt")
    with pytest.raises(InputError, match="There is no file"):
        read_modelopt(tmp_path / "absent.pt")


def prepared() -> torch.nn.Module:
    torch.manual_seed(0)
    model = prepare(network(), "nvfp4_qat", include=["2", "4", "9"], fp8=["4"])
    calibrate(model, torch.randn(2, 3, 8, 8))
    return model


@pytest.mark.skipif(not INSTALLED, reason=ABSENT)
def test_to_modelopt_and_back() -> None:
    model = prepared()
    other, lost = to_modelopt(model)
    assert [(each.layer, each.precision, len(each.lost)) for each in lost] == [
        ("2", "FP4", 1),
        ("4", "FP8", 0),
        ("9", "FP4", 0),
    ]
    again = network()
    from_modelopt(again, quantizers_in(other))
    for name, layer in quantized_layers(model).items():
        found = quantized_layers(again)[name]
        assert torch.equal(found.weight, layer.weight)
        assert float(found.input_amax) == float(layer.input_amax)  # type: ignore[arg-type]
        assert eight_bits(found.recipe) == eight_bits(layer.recipe)
    x = torch.randn(2, 16, 8, 8)
    with torch.no_grad():
        expected = model.get_submodule("4")(x)
        assert (other.get_submodule("4")(x) - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.skipif(INSTALLED, reason="ModelOpt is installed")
def test_without_modelopt_the_extra_is_named() -> None:
    with pytest.raises(UnavailableError, match="to_modelopt needs modelopt, which is missing"):
        to_modelopt(prepared())


@pytest.mark.skipif(not INSTALLED, reason=ABSENT)
def test_to_modelopt_takes_a_calibrated_model() -> None:
    with pytest.raises(InputError, match="a prepared and calibrated model"):
        to_modelopt(network())


@pytest.mark.parametrize(("bits", "enabled"), [((4, 3), True), (8, True), (4, False)], ids=["fp8", "int8", "awq"])
@pytest.mark.parametrize("layer", ["2", "6"])
def test_a_smoothed_layer_gets_its_own_weight_back(tmp_path: Path, bits: object, enabled: bool, layer: str) -> None:
    """Of W / s and s x, as SmoothQuant and AWQ keep them; also where the input is not quantised."""
    torch.manual_seed(0)
    kinds = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.ReLU()]
    source = nn.Sequential(*kinds, nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 5)).eval()
    tensors, states = {name: value.clone() for name, value in source.state_dict().items()}, {}
    for name in ("2", "6", "8"):
        for operand in ("input", "weight"):
            off = operand == "input" and name == layer and not enabled
            own = bits if name == layer else (4, 3)
            states[f"{name}.{operand}_quantizer"] = {"_num_bits": own, "_axis": None, "_disabled": off}
            tensors[f"{name}.{operand}_quantizer._amax"] = torch.tensor(4.0)
    weight = tensors[f"{layer}.weight"]
    scale = torch.rand(weight.shape[1]) * 3 + 0.1
    tensors[f"{layer}.weight"] = weight / scale.view(-1, *(1,) * (weight.ndim - 2))
    tensors[f"{layer}.input_quantizer._pre_quant_scale"] = scale
    history = [("quantize", {"config": {}, "metadata": {"quantizer_state": states}})]
    content = {"modelopt_state": {"modelopt_state_dict": history}, "model_state_dict": tensors}
    torch.save(content, tmp_path / "m.pt")
    found = copy.deepcopy(source)
    said = {each.layer: each.precision for each in from_modelopt(found, read_modelopt(tmp_path / "m.pt"))}
    assert said[layer] == "FP16"
    assert torch.allclose(found.get_submodule(layer).weight, source.get_submodule(layer).weight, rtol=1e-5)
    tensors[f"{layer}.input_quantizer._pre_quant_scale"] = torch.ones(7)
    torch.save(content, tmp_path / "m.pt")
    with pytest.raises(InputError, match=rf"^{layer} multiplies its input by a scale \[7\]"):
        read_modelopt(tmp_path / "m.pt")


Edit = Callable[[dict[str, Any], dict[str, Any]], object]


def edited(path: Path, edit: Edit) -> Quantized:
    """What is read of a file of two FP8 layers after `edit` of its tensors and of the states of its quantisers."""
    network, names = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), ("0", "1")
    tensors: dict[str, Any] = {name: value.clone() for name, value in network.state_dict().items()}
    quantizers = [f"{name}.{own}_quantizer" for name in names for own in ("input", "weight")]
    states: dict[str, Any] = {name: {"_num_bits": (4, 3), "_axis": None, "_disabled": False} for name in quantizers}
    tensors |= {f"{name}._amax": torch.tensor(2.0) for name in quantizers}
    edit(tensors, states)
    history = [("quantize", {"config": {}, "metadata": {"quantizer_state": states}})]
    torch.save({"modelopt_state": {"modelopt_state_dict": history}, "model_state_dict": tensors}, path / "m.pt")
    return read_modelopt(path / "m.pt")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda t, s: t.update({"1.weight_quantizer.svdquant_lora_a": torch.ones(4, 32)}),
            "svdquant_lora_a is not known",
        ),
        (lambda t, s: t.update({"1.weight_quantizer._scale": torch.ones(32)}), "_scale is not known here"),
        (
            lambda t, s: t.update({"1.weight": t["1.weight"].to(torch.float8_e4m3fn)}),
            "1 holds the codes of its weight, fl",
        ),
        (
            lambda t, s: t.update({"1.weight": torch.ones(32, 16, dtype=torch.uint8)}),
            "1 holds the codes of its weight, ui",
        ),
    ],
    ids=["svdquant", "scale", "fp8", "packed"],
)
def test_what_may_be_a_part_of_the_weight_is_refused(tmp_path: Path, edit: Edit, said: str) -> None:
    with pytest.raises(InputError, match=said):
        edited(tmp_path, edit)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda t, s: s["1.input_quantizer"].update(_rotate=True), ("FP16", "it rotates its operands first")),
        (
            lambda t, s: s["1.weight_quantizer"].update(_rotate={"enable": True}),
            ("FP16", "it rotates its operands first"),
        ),
        (lambda t, s: s["1.input_quantizer"].update(_bias={-1: None}), ("FP16", "it adds an offset first")),
        (lambda t, s: s["1.input_quantizer"].update(_unsigned=True), ("FP16", "codes without a sign")),
        (lambda t, s: s.update({"1.output_quantizer": s["0.input_quantizer"]}), ("FP8", "output_quantizer: left out")),
        (lambda t, s: s["1.input_quantizer"].update(_rotate={"enable": False}), ("FP8", "")),
    ],
)
def test_what_a_quantiser_does_besides_is_named(tmp_path: Path, edit: Edit, expected: tuple[str, str]) -> None:
    quantized = edited(tmp_path, edit)
    first, second = from_modelopt(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), quantized)
    assert (first.precision, len(first.lost)) == ("FP8", 1)
    lost = [each for each in second.lost if "one scale for the weight" not in each]
    assert (second.precision, "; ".join(lost)) == expected


@pytest.mark.parametrize("amax", [float("inf"), float("nan"), 0.0, -1.0])
def test_an_amax_that_is_none_leaves_a_layer_in_fp16(amax: float) -> None:
    weight = Quantizer((2, 1), block=(-1, 16), scale_bits=(4, 3))
    x = replace(weight, amax=torch.tensor(amax))
    assert _refusal(nn.Linear(16, 16), weight, x) == "the amax of its input is not positive and finite"
    assert _refusal(nn.Linear(16, 16), weight, replace(x, amax=torch.tensor(1.0))) == ""


def test_operands_of_two_formats_leave_a_layer_in_fp16() -> None:
    four, eight = Quantizer((2, 1), block=(-1, 16), scale_bits=(4, 3)), Quantizer((4, 3), amax=torch.tensor(1.0))
    whole = Quantizer(8, amax=torch.tensor(1.0))
    assert _refusal(nn.Linear(16, 16), four, eight) == "operands in NVFP4 and FP8"
    assert _refusal(nn.Linear(16, 16), eight, replace(four, amax=torch.tensor(1.0))) == "operands in FP8 and NVFP4"
    assert _refusal(nn.Linear(16, 16), whole, eight) == "operands in INT8 and FP8"


def test_blocks_over_two_axes_are_of_no_format() -> None:
    state = {"_num_bits": (2, 1), "_block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
    one, both = _quantizer(state), _quantizer({**state, "_block_sizes": {-1: 16, -2: 16, "scale_bits": (4, 3)}})
    assert one is not None
    assert both is not None
    assert (one.format, both.format) == ("NVFP4", "E2M1 in blocks of 16")
