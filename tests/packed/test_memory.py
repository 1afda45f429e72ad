"""Bytes of weights and of activations, against counts made another way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.to_packed import pack
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.models import build_unet
from fp4deploy.packed import PackedNetwork, activation_bytes, full_precision, plain_bytes
from fp4deploy.packed.memory import _reading_bytes, feature_map_bytes
from fp4deploy.packed.shapes import shapes_of
from fp4deploy.qat import calibrate, prepare
from tests.packed.small_networks import packed
from tests.samples import sample


@pytest.mark.parametrize("recipe", [None, "nvfp4_qat"])
@pytest.mark.parametrize("scale", [0.125, 0.25])
def test_plain_bytes_are_two_a_parameter(recipe: str | None, scale: float) -> None:
    model, file = packed(recipe, scale)
    assert plain_bytes(file.graph) == 2 * sum(parameter.numel() for parameter in model.parameters())
    if recipe is None:
        assert file.weight_bytes == plain_bytes(file.graph)


class Called(nn.Module):
    """A convolution that is called twice, layers in groups, transposed and linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.twice = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.groups, self.up = nn.Conv2d(32, 32, 1, groups=2, bias=False), nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.linear, self.head = nn.Linear(16, 24), nn.Conv2d(24, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.twice(self.stem(x)).relu()).relu()
        x = self.up(self.groups(x)).relu().movedim(1, -1)
        return self.head(self.linear(x).movedim(-1, 1))


@pytest.mark.parametrize("formats", sample([{}, {"fp8": "*"}, {"w4a8": "linear"}, {"int8": "twice"}], every=2))
def test_parameters_count_once_however_often_they_are_read(formats: dict[str, str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8, 8)
    model = prepare(Called().eval(), example_inputs=x, **formats)
    calibrate(model, x)
    graph = pack(model, tmp_path / "a.fp4", example_inputs=x, verify=False).file.graph
    assert (
        plain_bytes(graph) == plain_bytes(full_precision(graph)) == 2 * sum(each.numel() for each in model.parameters())
    )


def test_weights_of_a_full_sized_unet_take_less_than_three_tenths() -> None:
    """Counted from the shapes: 9 bits a code pair and its share of a scale, the rest as it is."""
    _, file = packed()
    model = build_unet(5, 1.0)
    count = {name: parameter.numel() for name, parameter in model.named_parameters()}
    packed_names = {name.removesuffix(".codes") for name in file.tensors if name.endswith(".weight.codes")}
    assert len(packed_names) == 11
    bytes_packed = sum(9 * count[name] // 16 + 8 for name in packed_names)
    rest = sum(2 * value for name, value in count.items() if name not in packed_names)
    assert bytes_packed + rest <= 0.30 * 2 * sum(count.values())
    small = {name: parameter.numel() for name, parameter in packed()[0].named_parameters()}
    expected = sum(9 * small[name] // 16 + 8 for name in packed_names)
    expected += sum(2 * value for name, value in small.items() if name not in packed_names)
    assert file.weight_bytes == expected


@pytest.mark.parametrize("scale", [0.125, 0.25])
def test_the_fp16_graph_of_an_nvfp4_file_is_that_of_the_fp16_file(scale: float) -> None:
    _, file = packed("nvfp4_qat", scale)
    _, plain = packed(None, scale)
    as_fp16 = activation_bytes(full_precision(file.graph), 64, 48)
    assert as_fp16 == activation_bytes(plain.graph, 64, 48) == activation_bytes(full_precision(plain.graph), 64, 48)
    assert activation_bytes(file.graph, 64, 48) < as_fp16


def test_the_peak_of_a_unet_by_hand() -> None:
    """FP16: skip, upsampled activation and their concatenation. Packed: the last normalisation, plain in and out."""
    pixels, channels = 64 * 48, 16
    assert activation_bytes(packed(None)[1].graph, 64, 48) == pixels * 2 * (channels + channels + 2 * channels)
    assert activation_bytes(packed()[1].graph, 64, 48, batch=3) == 3 * pixels * 2 * (channels + channels)


def test_reading_an_image_as_digits_counts() -> None:
    """At scale 0.125 it is the peak: RGB, 13 digits in FP16 and nine bytes of them packed, against 8 channels twice."""
    pixels = 64 * 48
    _, file = packed("nvfp4_qat", 0.125, True, True)
    assert activation_bytes(file.graph, 64, 48) == pixels * (2 * 3 + 2 * 13 + 9)
    _, plain = packed("nvfp4_qat", 0.125, False, True)
    assert activation_bytes(plain.graph, 64, 48) == pixels * 41
    for graph, each in ((file.graph, 2 * 3 + 2 * 13 + 9), (plain.graph, 2 * 3 + 9)):  # the peaks are of one size
        shape = (1, 3, 64, 48)
        assert _reading_bytes(graph, graph.inputs[0], shape, shapes_of(graph, {"x": shape})) == pixels * each
    _, wide = packed("nvfp4_qat", 0.25, True, True)
    assert activation_bytes(wide.graph, 64, 48) < activation_bytes(packed()[1].graph, 64, 48)


@pytest.mark.parametrize(("digits", "everything"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("scale", [0.125, 0.25])
def test_activations_have_the_bytes_that_are_counted(scale: float, digits: bool, everything: bool) -> None:
    _, file = packed("nvfp4_qat", scale, digits, everything)
    network, graph = PackedNetwork(file), file.graph
    shapes = shapes_of(graph, {"x": (2, 3, 32, 32)})
    image = graph.inputs[0]
    names, read = [form.name for form in image.outputs], network.read_input(image, torch.randn(2, 3, 32, 32))
    live = dict(zip(names, read, strict=True))
    if everything:
        (form,), (packed_image,) = image.outputs, read
        assert packed_image.codes.nbytes + packed_image.scales.nbytes == feature_map_bytes(form, shapes[form.name])
    for node in graph.nodes:
        written = network.run_node(node, [live[name] for name in node.inputs])
        for form, activation in zip(node.outputs, written, strict=True):
            live[form.name] = activation
            is_packed = isinstance(activation, Nvfp4Tensor)  # a plain one is FP32 on the CPU
            real = activation.codes.nbytes + activation.scales.nbytes if is_packed else 2 * activation.numel()
            assert real == feature_map_bytes(form, shapes[form.name]), form


def test_a_size_that_does_not_fit() -> None:
    with pytest.raises(InputError, match="multiples of 4, such as 100 x 108"):
        activation_bytes(packed()[1].graph, 100, 110)


def test_an_early_output_is_held_to_the_end(tmp_path: Path) -> None:
    class Chain(nn.Module):
        def __init__(self, early: bool) -> None:
            super().__init__()
            self.layers, self.early = nn.ModuleList(nn.Conv2d(16, 16, 1) for _ in range(3)), early

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            a = self.layers[0](x)
            c = self.layers[2](self.layers[1](a))
            return (a, c) if self.early else (c,)

    counted = []
    for early in (False, True):
        file = pack(Chain(early), tmp_path / f"{early}.fp4", example_inputs=torch.zeros(1, 16, 8, 8), verify=False).file
        counted.append(activation_bytes(file.graph, 8, 8))
    one = 2 * 16 * 8 * 8
    assert counted == [2 * one, 3 * one]
    for batch, expected in ((None, 5), (2, 2)):  # any, and the file's own alone
        file = pack(
            Chain(False), tmp_path / "b.fp4", example_inputs=torch.zeros(2, 16, 8, 8), verify=False, batch=batch
        ).file
        assert activation_bytes(file.graph, 8, 8, batch=5) == expected * 2 * one
