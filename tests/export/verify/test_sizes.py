"""Files of open size are compared with torch at other sizes; what differs is refused by operator and layer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import GateError, InputError
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.to_packed import pack_model
from fp4deploy.export.verify.sizes import other_sizes, packed_differs, require_open_sizes
from fp4deploy.models import build_unet
from fp4deploy.models.meaning import CLOSE, known_outputs
from fp4deploy.packed import PackedFile, packed_file
from fp4deploy.packed.file import read_packed
from tests.export.exported_models import initializer
from tests.samples import sample
from tests.shallow import levels

Function = Callable[[torch.Tensor], torch.Tensor]
EXAMPLE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)).half().float()


class Neck(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Network(nn.Module):
    """A function between convolutions, of which one is quantised."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.body = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.neck, self.head = Neck(function), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.neck(self.body(F.relu(self.stem(x)))))


def half(x: torch.Tensor, **mode: object) -> torch.Tensor:
    return x + F.interpolate(F.interpolate(x, scale_factor=0.5, **mode), x.shape[2:])


REFUSED: dict[str, tuple[Function, str]] = {
    "areas of half the size": (lambda x: half(x, mode="area"), "interpolate"),
}
TAKEN: dict[str, Function] = {
    "pooled to 3 x 3": lambda x: x + F.interpolate(F.adaptive_avg_pool2d(x, 3), x.shape[2:]),
    "pooled to 3 rows": lambda x: x + F.interpolate(F.adaptive_avg_pool2d(x, (3, None)), x.shape[2:]),
    "0.8 of the size": lambda x: F.interpolate(x, scale_factor=0.8, mode="bilinear"),
    "rounded up": lambda x: x[:, :, : -(-x.shape[2] // 2)],
    "normalised over all": lambda x: F.layer_norm(x, x.shape[1:]),
    "padded to whole windows": lambda x: F.pad(x, (0, -x.shape[3] % 4, 0, -x.shape[2] % 4)),
}


@pytest.mark.parametrize(("name", "quantized"), sample(REFUSED, [False, True], every=2))
def test_what_holds_a_number_of_one_size_is_refused_by_name(name: str, quantized: bool, tmp_path: Path) -> None:
    function, operator = REFUSED[name]
    model = Network(function).eval()
    if quantized:
        fd.calibrate(fd.prepare(model, include="body"), EXAMPLE)
    where = rf"at 33x51: .* from {operator} in 'neck' \(test_sizes.py, line \d+\) on.* Export it for one size"
    with pytest.raises(GateError, match=where):
        fd.export_onnx(model, EXAMPLE, tmp_path / "open.onnx", dynamic_size=True)
    assert not (tmp_path / "open.onnx").exists()
    assert fd.export_onnx(model, EXAMPLE, tmp_path / "fixed.onnx").verification.passed


@pytest.mark.parametrize("name", sample(TAKEN, every=4))
def test_what_follows_the_size_is_written(name: str, tmp_path: Path) -> None:
    model = Network(TAKEN[name]).eval()
    fd.calibrate(fd.prepare(model, include="body"), EXAMPLE)
    assert fd.export_onnx(model, EXAMPLE, tmp_path / "open.onnx", dynamic_size=True).fp4_layers == 1
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        fd.pack(model, tmp_path / "open.fp4", example_inputs=EXAMPLE)
    one_size = any("the example's size alone" in str(each.message) for each in said)
    assert read_packed(tmp_path / "open.fp4").graph.inputs[0].free == ([0] if one_size else [0, 2, 3])


def test_smoothing_takes_the_factor_that_it_is_given(tmp_path: Path) -> None:
    model = Network(lambda x: half(x[..., 1:], mode="bilinear", antialias=True)).eval()
    assert fd.export_onnx(model, EXAMPLE, tmp_path / "open.onnx", dynamic_size=True).verification.passed
    model = Network(lambda x: half(x, mode="bilinear", antialias=True, align_corners=True)).eval()
    with pytest.raises(InputError, match="interpolate: antialias=True with align_corners=True"):
        fd.export_onnx(model, EXAMPLE, tmp_path / "open.onnx")


def opened(graph: onnx.ModelProto) -> onnx.ModelProto:
    """A graph that was made for one size, with open axes."""
    for size, name in zip(graph.graph.input[0].type.tensor_type.shape.dim[2:], "HW", strict=True):
        size.dim_param = name
    del graph.graph.value_info[:]
    for output in graph.graph.output:
        output.type.tensor_type.ClearField("shape")
    return graph


def test_a_runtime_that_ends_with_an_error_is_named_with_the_operator() -> None:
    model = Network(lambda x: x.flatten(2).relu().unflatten(2, x.shape[2:]).sigmoid()).eval()
    portable = opened(to_portable(fd.export_graph(model, EXAMPLE)))
    with pytest.raises(GateError, match=r"at 33x51: ONNX Runtime ends with an error .* from flatten in 'neck'"):
        require_open_sizes(fd.qat.deployed(model), portable, EXAMPLE, "network")


def test_values_of_an_unquantised_network_are_compared_even_where_classes_are_said() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1)).eval()
    portable = to_portable(fd.export_graph(model, EXAMPLE, dynamic_size=True))
    given = fd.qat.deployed(model), portable, EXAMPLE, "network", known_outputs(said="classes")
    require_open_sizes(*given)
    with torch.no_grad():  # no class changes
        given[0][0].bias.mul_(1 + CLOSE / 20)  # type: ignore[index, union-attr, operator]
    require_open_sizes(*given)  # against the largest value, not against those near 0
    with torch.no_grad():
        for value in given[0].parameters():
            value.mul_(1.1)
    with pytest.raises(GateError, match=r"at 33x51: outputs of up to \S+ differ by up to"):
        require_open_sizes(*given)


def free(file: PackedFile) -> PackedFile:
    """A packed network that was made for one size, with free axes."""
    (image,) = file.graph.inputs
    inputs = [image.model_copy(update={"free": [0, 2, 3]})]
    return replace(file, graph=file.graph.model_copy(update={"inputs": inputs}))


def of_one_size(model: nn.Module) -> PackedFile:
    return free(packed_file(Path("one.fp4"), None, *pack_model(model, EXAMPLE, dynamic_size=False)))


def test_a_packed_network_of_one_size_is_told_apart() -> None:
    model = fd.qat.deployed(Network(lambda x: F.interpolate(F.max_pool2d(x, 2), x.shape[2:], mode="bilinear")).eval())
    found = packed_differs(model, of_one_size(model), EXAMPLE, of_one_size)
    assert re.match(r"At 33x51 .* outputs are \[\[2, 4, 16, 16\]\], .* from interpolate in 'neck' \(", found)


def test_a_packed_network_that_differs_takes_one_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = Network(TAKEN["rounded up"]).eval()
    monkeypatch.setattr("fp4deploy.export.to_packed.packed_differs", lambda *_: "At 33x51 it would be another network.")
    with pytest.warns(UserWarning, match="another network. The packed network takes inputs of the example's size"):
        fd.pack(model, tmp_path / "net.fp4", example_inputs=EXAMPLE)
    assert read_packed(tmp_path / "net.fp4").graph.inputs[0].free == [0]


class TwoInputs(nn.Module):
    """A map of half the size is enlarged to the first one's."""

    def forward(self, image: torch.Tensor, coarse: torch.Tensor) -> torch.Tensor:
        return image + F.interpolate(coarse, scale_factor=2.0)


def test_sizes_are_those_that_torch_takes() -> None:
    with levels(5):
        unet = build_unet(4, 0.125).eval()
    found = other_sizes(unet, torch.zeros(1, 3, 32, 48), {"image": {2: "H", 3: "W"}})
    assert [each.text for each in found] == ["48x80", "96x160"]
    found = other_sizes(nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 34, 54), {"image": {2: "H", 3: "W"}})
    assert [each.text for each in found] == ["33x51", "36x60"]  # not the example's
    found = other_sizes(nn.Conv1d(3, 4, 50), torch.zeros(1, 3, 60), {"x": {2: "L"}})
    assert [each.text for each in found] == ["96", "64"]
    pair = {"image": torch.rand(1, 3, 16, 16), "coarse": torch.rand(1, 3, 8, 8)}
    axes = {"image": {2: "H", 3: "W"}, "coarse": {2: "H_2", 3: "W_2"}}
    found = other_sizes(lambda inputs: TwoInputs()(**inputs), pair, axes)
    assert [each.text for each in found] == ["34x54", "36x60"]
    assert [tuple(x.shape[2:]) for x in found[0].inputs.values()] == [(34, 54), (17, 27)]


def test_values_of_another_size_are_the_examples() -> None:
    whole = torch.arange(12).reshape(1, 1, 3, 4)
    (found, _) = other_sizes(lambda x: x, whole, {"ids": {2: "H", 3: "W"}})
    assert found.inputs.dtype == torch.int64
    assert torch.equal(found.inputs[0, 0, :7, :9], whole[0, 0].repeat(3, 3)[:7, :9])


def test_a_difference_that_networks_without_quantised_layers_do_not_show_names_the_layer() -> None:
    model = Network(F.relu).eval()
    fd.calibrate(fd.prepare(model, include="*"), EXAMPLE)
    portable = to_portable(fd.export_graph(model, EXAMPLE, dynamic_size=True))
    bias = initializer(portable, "body.bias")
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + 0.1, bias.name))
    named = (
        "another network at 33x51: .*; the first layer to differ is head, in .* computed from body. Nothing was written"
    )
    with pytest.raises(GateError, match=named):
        require_open_sizes(fd.qat.deployed(model), portable, EXAMPLE, "network")


def test_a_small_difference_names_the_operator() -> None:
    """Less than a thousandth of the norm of its result."""
    model = Network(lambda x: torch.cat([1e3 * x, x], 1)[:, 15:17]).eval()
    model.head = nn.Conv2d(2, 4, 1)
    with torch.no_grad():
        model.head.weight[:, 0] = 1  # classes far from 0 and near each other
        model.head.bias.fill_(0.1)
    portable = to_portable(fd.export_graph(model, EXAMPLE, dynamic_size=True, rest="fp32"))
    bias = initializer(portable, "head.bias")
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + np.float32([0, 0, 0, 0.2]), bias.name))
    with pytest.raises(GateError, match=r"another network at 33x51: .*, from conv2d in 'head' \(test_sizes.py"):
        require_open_sizes(model, portable, EXAMPLE, "network")


class _Squeezing(nn.Module):
    """Of one sample an axis goes that several keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(channels, 16, 1) for channels in (3, 16, 16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x).mean((2, 3), keepdim=True).squeeze((0, 2))
        return y


def test_an_axis_that_one_sample_loses_is_refused(tmp_path: Path) -> None:
    model, x = fd.prepare(_Squeezing(), "nvfp4_qat"), torch.randn(2, 3, 16, 16)
    fd.calibrate(model, [x])
    with pytest.raises(GateError, match=r"of one sample torch gives \[16, 1\] and the file \[1, 16, 1\]"):
        fd.export_onnx(model.eval(), x, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
