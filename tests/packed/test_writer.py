"""The operators of a compiled network, not compiled: against the network node by node."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import fp4deploy as fd
from fp4deploy.export.to_packed import pack_model
from fp4deploy.formats import Nvfp4Tensor, global_scale
from fp4deploy.packed import PackedFile, PackedNetwork, packed_file, row_norms
from fp4deploy.packed.graph import Graph, Layer, Pad, Resize, Take, quantizes_itself
from fp4deploy.packed.program import trace
from fp4deploy.packed.shapes import shapes_of
from fp4deploy.packed.writer import Writer, _patches, is_channels_last, only_moves
from fp4deploy.qat import round_to_deployed
from tests.export.packable_networks import NETWORKS, OWN_QUANTIZERS, deployed, packed_network, with_own_quantizers
from tests.samples import sample

CPU = torch.device("cpu")
# Other ones than the sample of tests/export/test_packed_networks.py. To pack one takes a second.
NAMES = [*sample([*reversed(NETWORKS)], every=3), *sample([*OWN_QUANTIZERS], every=1)]


def packed(model: nn.Module, x: torch.Tensor) -> PackedFile:
    return packed_file(Path("own.fp4"), None, *pack_model(deployed(model, x), x, dynamic_size=False))


@lru_cache
def network(name: str) -> tuple[PackedFile, torch.Tensor]:
    torch.manual_seed(0)
    if name in OWN_QUANTIZERS:
        graph, tensors = pack_model(with_own_quantizers(name), torch.randn(2, 3, 16, 16))
        return packed_file(Path("own.fp4"), None, graph, tensors), torch.randn(2, 3, 16, 16)
    return packed_network(name)


def written(file: PackedFile, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    writer = Writer(file, CPU, dtype)
    with torch.no_grad():
        return writer.outputs(writer.tensors(), [x])


@pytest.mark.parametrize("name", NAMES)
def test_networks_compute_what_they_compute_node_by_node(name: str) -> None:
    file, x = network(name)
    for y, expected in zip(written(file, x), tree_leaves(PackedNetwork(file)(x)), strict=True):
        assert (y - expected).norm() <= 2e-7 * expected.norm()


def test_a_norm_takes_in_the_sum_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but by the operator's reference: the numbers stay."""
    file, x = network("SegFormer block")
    expected = written(file, x, torch.float16)
    monkeypatch.setattr(row_norms, "layer_norm", SimpleNamespace(supports=lambda width, *_: width % 16 == 0))
    writer = Writer(file, CPU, torch.float16)
    assert len(writer.rows.norms) >= 2
    assert writer.rows.sums
    with torch.no_grad():
        found = writer.outputs(writer.tensors(), [x])
    module, tensors, _ = trace(writer, [x.half()])
    names = [str(node.target) for node in module.graph.nodes]
    assert names.count("fp4deploy.layer_norm_values.default") == len(writer.rows.norms)
    assert not any("aten.layer_norm" in name for name in names)
    with torch.no_grad():
        traced = module(*tensors, x.half())
    for y, wanted, again in zip(found, expected, traced, strict=True):
        assert (y.float() - wanted.float()).norm() <= 0.02 * wanted.float().norm()
        assert torch.equal(y, again)


def test_a_sum_of_what_is_in_float32_is_no_part_of_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = network("SegFormer block")[0].graph
    monkeypatch.setattr(row_norms, "layer_norm", SimpleNamespace(supports=lambda width, *_: width % 16 == 0))
    (name, *_) = row_norms.row_norms(graph, (), torch.float16, CPU).sums
    (node,) = (each for each in graph.nodes if each.outputs[0].name == name)
    for part in node.inputs:
        assert name not in row_norms.row_norms(graph, {part}, torch.float16, CPU).sums


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("mode", "dtype"), sample([torch.no_grad, torch.inference_mode], [torch.float32, torch.float16], every=2)
)
def test_what_is_traced_computes_the_same_bits_from_fewer_tensors(name: str, mode: Any, dtype: torch.dtype) -> None:
    file, x = network(name)
    x = x.to(dtype)
    writer = Writer(file, CPU, dtype)
    with mode():
        expected = writer.outputs(writer.tensors(), [x])
        module, tensors, _ = trace(writer, [x])
        assert all(torch.equal(*pair) for pair in zip(module(*tensors, x), expected, strict=True))
    computed = [node for node in module.graph.nodes if node.op == "call_function" and not node.all_input_nodes]
    assert not computed  # no positions, no constants: they are among the tensors


@pytest.mark.parametrize("name", [case for case in NAMES if case.values[0] in NETWORKS])
def test_operands_in_float16_are_those_of_the_file(name: str) -> None:
    """Weights and activations are codes times scales times a power of two, and the factor is what that leaves."""
    file, _ = network(name)
    writer = Writer(file, CPU, torch.float16)
    layers = [node for node in file.graph.nodes if isinstance(node, Layer) and node.precision == "nvfp4"]
    assert layers
    for node in layers:
        codes, scales, amax = (file.tensors[f"{node.layer}.weight.{part}"] for part in ("codes", "scales", "amax"))
        weight = writer.weights[node.layer]
        kept = weight.values.movedim(0, 1) if node.op.startswith("conv_transpose") else weight.values
        kept = kept.movedim(1, -1)
        q = Nvfp4Tensor(codes, scales, amax, kept.shape, node.e4m3_max)
        unit = float(global_scale(amax, node.e4m3_max))
        read = writer.scales[str(file.graph.forms()[node.inputs[0]].amax)]
        assert read.exponent is not None
        torch.testing.assert_close(kept.double() * weight.unit, q.dequantize(torch.float32).double(), rtol=3e-7, atol=0)
        ones = replace(q, amax=torch.tensor(6.0 * node.e4m3_max)).dequantize(torch.float32)
        ratio = (kept.float() / ones)[ones != 0].unique()
        assert len(ratio) == 1  # one power of two
        assert torch.frexp(ratio)[0].item() == 0.5
        assert weight.unit == pytest.approx(unit / ratio.item())
        source = float(global_scale(read.amax)) / 2.0**read.exponent
        assert writer.units[node.outputs[0].name] == pytest.approx(weight.unit * source)


@pytest.mark.parametrize("name", NAMES)
def test_float16_is_near(name: str) -> None:
    """FP4 amplifies the last bits of FP16: only a wrong factor is farther off than this."""
    file, x = network(name)
    for y, expected in zip(written(file, x, torch.float16), tree_leaves(PackedNetwork(file)(x)), strict=True):
        assert (y.float() - expected).norm() <= 0.25 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [case for case in NAMES if case.values[0] in OWN_QUANTIZERS])
def test_a_layer_that_quantises_what_it_reads(name: str, dtype: torch.dtype) -> None:
    """Of 16 bits: every layer by itself, by the same numbers, whose sum is rounded once."""
    file, _ = network(name)
    writer, steps = Writer(file, CPU, dtype), PackedNetwork(file, dtype=dtype)
    shapes = shapes_of(file.graph)
    for node in (node for node in file.graph.nodes if isinstance(node, Layer) and quantizes_itself(node)):
        given = [torch.randn(shapes[name]).mul(3).to(dtype) for name in node.inputs]
        (expected,) = steps.run_node(node, list(given))
        found = writer._layer(node, given, writer.tensors())
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


class Operators(nn.Module):
    """What the networks above have not: taken positions, a norm of an unscaled sum, two sizes of nearest resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.norm, self.third = nn.GroupNorm(4, 32), nn.Conv2d(48, 16, 1)
        self.up, self.head = nn.ConvTranspose2d(16, 16, 2, 2), nn.Conv2d(16, 4, 3, padding=1)
        self.register_buffer("order", torch.tensor([2, 0, 1, *range(3, 16)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        z = torch.nn.functional.interpolate(torch.relu(self.norm(self.second(y))), size=(7, 10), mode="nearest")
        y = torch.nn.functional.interpolate(y, size=(7, 10), mode="nearest")
        y = self.third(torch.cat([y, z], 1))[:, self.order]
        return self.head(torch.nn.functional.interpolate(torch.relu(self.up(y)), scale_factor=2.0))


def operators() -> tuple[PackedFile, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(1, 3, 10, 14)
    return packed(Operators(), x), x


def test_other_operators() -> None:
    file, x = operators()
    assert {Take, Resize} <= {type(node) for node in file.graph.nodes}
    (y,), expected = written(file, x), PackedNetwork(file)(x)
    assert isinstance(expected, torch.Tensor)
    assert (y - expected).norm() <= 2e-7 * expected.norm()


class Normed(nn.Module):
    """A layer in FP4 that reads the image, and a norm: operands are equal in FP16 and FP32, and no codes follow."""

    def __init__(self, norm: nn.Module, bias: bool = False, relu: bool = False, both: bool = False) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(16, 32, 3, padding=1, bias=bias), norm
        self.relu, self.both = relu, both
        with torch.no_grad():
            self.layer.weight *= 0.03

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        y = torch.relu(y) if self.relu else y
        z = torch.relu(self.norm(y))
        return (y, z) if self.both else z


@pytest.mark.parametrize(
    ("norm", "options", "deferred"),
    [
        (nn.GroupNorm(4, 32, eps=1e-3), {}, True),
        (nn.GroupNorm(4, 32, eps=1e-3), {"bias": True}, True),  # the norm's node adds it
        (nn.InstanceNorm2d(32, eps=1e-3, affine=True), {}, True),
        (nn.InstanceNorm2d(32, eps=1e-3, affine=True), {"bias": True}, True),
        (nn.GroupNorm(4, 32, eps=1e-3), {"relu": True}, False),
        (nn.GroupNorm(4, 32, eps=1e-3), {"both": True}, False),  # an output has its values
        (nn.BatchNorm2d(32), {}, False),
    ],
)
def test_float16_of_equal_operands_is_float32_but_for_roundings(
    monkeypatch: pytest.MonkeyPatch, norm: nn.Module, options: dict[str, bool], deferred: bool
) -> None:
    """The factor of a sum is applied, or left to a norm, which then takes its epsilon and its bias with it."""
    torch.manual_seed(2)
    x = torch.randn(2, 16, 9, 11).half().float()
    model = Normed(norm, **options).eval()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    fd.prepare(model, include="layer")
    fd.calibrate(model, [x])
    round_to_deployed(model)
    file = packed_file(Path("own.fp4"), None, *pack_model(model, x, dynamic_size=False))
    writer = Writer(file, CPU, torch.float16)
    assert bool(writer.factors) == deferred
    assert all(not 0.99 < factor < 1.01 for factor, _ in writer.factors.values())
    for large in (0, x.numel() * 2 + 1):  # statistics by the operator of this package, and by torch's
        monkeypatch.setattr("fp4deploy.packed.writer.LARGE_MAP", large)
        for y, expected in zip(written(file, x, torch.float16), written(file, x), strict=True):
            torch.testing.assert_close(y.float(), expected, rtol=3e-3, atol=3e-3 * expected.abs().max().item())


def test_paddings_of_no_pixels_are_left_out() -> None:
    """Of a decoder that pads to the size of an encoder's map, where both are equal: to a compiler they are clamps."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            high, wide = x.shape[2] - y.shape[2], x.shape[3] - y.shape[3]
            return self.last(nn.functional.pad(y, (0, wide, 0, high), "replicate"))

    model, x = Padded(), torch.randn(1, 16, 8, 12)
    fd.prepare(model, include="*")
    fd.calibrate(model, [x])
    file = packed_file(Path("own.fp4"), None, *pack_model(model.eval(), x, dynamic_size=True))
    assert any(isinstance(node, Pad) for node in file.graph.nodes)
    module, *_ = trace(Writer(file, CPU, torch.float32), [x])
    assert not any("pad" in str(node.target) for node in module.graph.nodes)
    (y,), expected = written(file, x), PackedNetwork(file)(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


def test_weights_of_zeros_before_a_norm() -> None:
    model = Normed(nn.GroupNorm(4, 32)).eval()
    nn.init.zeros_(model.layer.weight)
    x = torch.randn(1, 16, 4, 4)
    fd.prepare(model, include="layer")
    fd.calibrate(model, [x])
    file = packed_file(Path("own.fp4"), None, *pack_model(model, x, dynamic_size=False))
    assert written(file, x, torch.float16)[0].eq(0).all()


def test_a_tensor_of_the_file_may_have_any_name() -> None:
    """Here that of a layer's weight, which the module's code reads as well."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).relu()) @ self.a.weight

    torch.manual_seed(0)
    x = torch.randn(2, 4, 32)
    model = Tied().eval()
    fd.prepare(model, include=["a", "b"])
    fd.calibrate(model, [x])
    file = packed_file(Path("own.fp4"), None, *pack_model(model, x, dynamic_size=False))
    expected = PackedNetwork(file)(x)
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(written(file, x)[0], expected, rtol=1e-5, atol=1e-6)
    assert (written(file, x, torch.float16)[0].float() - expected).norm() < 0.05 * expected.norm()


def test_blocks_move_after_they_are_quantised() -> None:
    file, _ = operators()
    maps = [torch.zeros(1, 16, 4, 4), torch.zeros(1, 24, 4, 4)]
    moved = [(node, form) for node in file.graph.nodes for form in node.outputs if only_moves(node, form, maps[:1])]
    assert {node.op for node, _ in moved} <= {"resize", "concat"}
    assert moved
    concat = [(node, form) for node, form in moved if node.op == "concat"]
    assert all(not only_moves(node, form, maps) for node, form in concat)  # a block would span both


class Dense(nn.Module):
    """A decoder as of a UNet++: concatenations of concatenations and of what is resized, in whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"a": (3, 16), "b": (16, 16), "c": (32, 32), "d": (64, 16), "e": (16, 5)}
        self.layers = nn.ModuleDict({name: nn.Conv2d(*shape, 3, padding=1) for name, shape in shapes.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = self.layers
        a = layers["a"](x).relu()
        up = F.interpolate(layers["b"](F.max_pool2d(a, 2)).relu(), scale_factor=2)
        c = layers["c"](torch.cat([up, a], 1)).relu()
        inner = torch.cat([c, a], 1)
        d: torch.Tensor = layers["d"](torch.cat([up, inner], 1)).relu()
        return layers["e"](d) + inner[:, :5]  # type: ignore[no-any-return]


@lru_cache
def dense() -> tuple[PackedFile, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 12)
    return packed(Dense(), x), x


def test_parts_of_a_concatenation_are_joined_once_by_the_layer_that_reads_them() -> None:
    file, x = dense()
    assert any(node.op == "concat" for node in file.graph.nodes)
    torch.testing.assert_close(written(file, x)[0], PackedNetwork(file)(x), rtol=1e-6, atol=1e-6)
    writer = Writer(file, CPU, torch.float16)
    module, _, _ = trace(writer, [x.half()])
    joined = [node.args[0] for node in module.graph.nodes if "fp4deploy.concatenate" in str(node.target)]
    assert sorted(map(len, joined)) == [2, 3]


def with_another_amax(graph: Graph, tensors: dict[str, torch.Tensor], factor: float) -> PackedFile:
    """A network whose second input is packed with an amax of its own, so many times that of the first."""
    (form,) = graph.inputs[1].outputs
    changed = graph.inputs[1].model_copy(update={"outputs": [form.model_copy(update={"amax": "other.amax"})]})
    graph = graph.model_copy(update={"inputs": [graph.inputs[0], changed]})
    return packed_file(Path("own.fp4"), None, graph, {**tensors, "other.amax": tensors[str(form.amax)] * factor})


def two_sources(factor: float) -> tuple[PackedFile, list[torch.Tensor]]:
    """Two images, packed with amaxes that differ by a factor and read by one convolution."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(32, 16, 3, padding=1)

        def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.cat([one, other], 1))

    torch.manual_seed(0)
    images = [torch.randn(1, 16, 6, 6).half().float() for _ in range(2)]
    model = Two().eval()
    fd.prepare(model, include="layer")
    fd.calibrate(model, [tuple(images)])
    return with_another_amax(*pack_model(model, tuple(images), dynamic_size=False), factor), images


@pytest.mark.parametrize("factor", [1.0, 1.7])
def test_two_sources_of_different_amax_keep_the_unit_of_the_contract(factor: float) -> None:
    file, images = two_sources(factor)
    expected = PackedNetwork(file)(*images)
    assert isinstance(expected, torch.Tensor)
    for dtype in (torch.float32, torch.float16):
        writer = Writer(file, CPU, dtype)
        with torch.no_grad():
            (y,) = writer.outputs(writer.tensors(), images)
        torch.testing.assert_close(y.float(), expected, rtol=3e-3, atol=3e-3)


def test_two_nodes_of_a_layer_have_a_factor_each() -> None:
    """Of inputs with amaxes of their own: no file of this package has that, but a file may."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(16, 16, 3, padding=1)

        def forward(self, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(one), self.layer(other)

    torch.manual_seed(0)
    images = [torch.randn(1, 16, 6, 6).half().float() for _ in range(2)]
    model = Twice().eval()
    fd.prepare(model, include="layer")
    fd.calibrate(model, [tuple(images)])
    file = with_another_amax(*pack_model(model, tuple(images), dynamic_size=False), 5)
    writer = Writer(file, CPU, torch.float16)
    with torch.no_grad():
        found = writer.outputs(writer.tensors(), images)
    for y, expected in zip(found, tree_leaves(PackedNetwork(file)(*images)), strict=True):
        torch.testing.assert_close(y.float(), expected, rtol=3e-3, atol=3e-3)


def test_which_maps_are_in_channels_last() -> None:
    x: Any = torch.zeros(2, 4, 3, 5)
    assert not is_channels_last(x)
    assert is_channels_last(x.contiguous(memory_format=torch.channels_last))
    assert not is_channels_last(torch.zeros(2, 1, 3, 5).contiguous(memory_format=torch.channels_last))  # both
    assert not is_channels_last(torch.zeros(2, 3, 5))


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv2d(16, 24, 4, 4), (9, 13)),  # pixels beyond whole patches
        (nn.Conv2d(16, 24, (2, 3), (2, 3), bias=False), (6, 9)),
        (nn.Conv2d(16, 24, 1), (5, 7)),
        (nn.Conv1d(16, 24, 3, 3), (10,)),
        (nn.Conv3d(16, 24, 2, 2), (4, 5, 6)),
    ],
    ids=str,
)
def test_patches_are_rows_in_the_order_of_a_filter(layer: Any, size: tuple[int, ...]) -> None:
    x = torch.randn(2, 16, *size)
    taps = layer.kernel_size
    rows, filters = _patches(x.movedim(1, -1), taps), layer.weight.movedim(1, -1).flatten(1)
    y = nn.functional.linear(rows, filters, layer.bias).movedim(-1, 1)
    torch.testing.assert_close(y, layer(x), rtol=1e-4, atol=1e-5)
