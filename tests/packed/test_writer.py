"""The operators of a compiled network, not compiled: against the network node by node."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fp4deploy.export.to_packed import pack_model
from fp4deploy.formats import Nvfp4Tensor, global_scale
from fp4deploy.packed import PackedFile, PackedNetwork, packed_file
from fp4deploy.packed.graph import Conv2d, Layer, Resize, Take
from fp4deploy.packed.program import trace
from fp4deploy.packed.writer import Writer, is_channels_last, only_moves
from tests.export.packable_networks import NETWORKS, deployed

CPU = torch.device("cpu")


def packed(model: nn.Module, x: torch.Tensor) -> PackedFile:
    return packed_file(Path("own.fp4"), None, *pack_model(deployed(model, x), x, dynamic_size=False))


@lru_cache
def network(name: str) -> tuple[PackedFile, torch.Tensor]:
    torch.manual_seed(0)
    factory, size = NETWORKS[name]
    x = torch.randn(2, 3, *size)
    return packed(factory(), x), x


def written(file: PackedFile, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    writer = Writer(file, CPU, dtype)
    with torch.no_grad():
        return writer.outputs(writer.tensors(), [x])


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_compute_what_they_compute_node_by_node(name: str) -> None:
    file, x = network(name)
    for y, expected in zip(written(file, x), tree_leaves(PackedNetwork(file)(x)), strict=True):
        assert (y - expected).norm() <= 2e-7 * expected.norm()


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_traced_computes_the_same_bits_from_fewer_tensors(name: str) -> None:
    file, x = network(name)
    writer = Writer(file, CPU, torch.float32)
    with torch.no_grad():
        expected = writer.outputs(writer.tensors(), [x])
        module, tensors = trace(writer, [x])
        assert all(torch.equal(*pair) for pair in zip(module(*tensors, x), expected, strict=True))
    computed = [node for node in module.graph.nodes if node.op == "call_function" and not node.all_input_nodes]
    assert not computed  # no positions, no constants: they are among the tensors


@pytest.mark.parametrize("name", NETWORKS)
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
        factor = weight.scale * 2.0**read.exponent / float(global_scale(read.amax))
        torch.testing.assert_close(kept.double() * factor, q.dequantize(torch.float32).double(), rtol=3e-7, atol=0)
        ones = replace(q, amax=torch.tensor(6.0 * node.e4m3_max)).dequantize(torch.float32)
        ratio = (kept.float() / ones)[ones != 0].unique()
        assert len(ratio) == 1  # one power of two
        assert torch.frexp(ratio)[0].item() == 0.5
        assert weight.scale == pytest.approx(
            unit * float(global_scale(read.amax)) / (ratio.item() * 2.0**read.exponent)
        )


@pytest.mark.parametrize("name", NETWORKS)
def test_float16_is_near(name: str) -> None:
    """FP4 amplifies the last bits of FP16: only a wrong factor is farther off than this."""
    file, x = network(name)
    for y, expected in zip(written(file, x, torch.float16), tree_leaves(PackedNetwork(file)(x)), strict=True):
        assert (y.float() - expected).norm() <= 0.25 * expected.norm()


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


def test_a_norm_takes_the_factor_of_the_sum_that_it_reads() -> None:
    file, x = operators()
    writer = Writer(file, CPU, torch.float16)
    factors = {name: writer.factors[name] for name in writer.factors}
    assert len(factors) == 1  # of `second`, which has no bias and is read by the norm alone
    with torch.no_grad():
        (y,) = writer.outputs(writer.tensors(), [x])
        writer.factors = {}
        (scaled,) = writer.outputs(writer.tensors(), [x])
    assert next(iter(factors.values())) != 1
    torch.testing.assert_close(y, scaled, rtol=0.2, atol=0.05)  # once and twice rounded before FP4


def test_blocks_move_after_they_are_quantised() -> None:
    file, _ = operators()
    maps = [torch.zeros(1, 16, 4, 4), torch.zeros(1, 24, 4, 4)]
    moved = [(node, form) for node in file.graph.nodes for form in node.outputs if only_moves(node, form, maps[:1])]
    assert {node.op for node, _ in moved} <= {"resize", "concat"}
    assert moved
    concat = [(node, form) for node, form in moved if node.op == "concat"]
    assert all(not only_moves(node, form, maps) for node, form in concat)  # a block would span both


def test_two_sources_of_different_amax_keep_the_unit_of_the_contract() -> None:
    file, x = network("ResNet encoder")
    two = [node for node in file.graph.nodes if isinstance(node, Conv2d) and len(node.inputs) == 2]
    name = str(file.graph.forms()[(two[0] if two else file.graph.nodes[-1]).inputs[0]].amax)
    if not two:
        pytest.skip("no convolution of two sources in this network")
    tensors = {**file.tensors, name: file.tensors[name] * 2}
    changed = replace(file, tensors=tensors)
    assert written(changed, x)[0].isfinite().all()


def test_which_maps_are_in_channels_last() -> None:
    x: Any = torch.zeros(2, 4, 3, 5)
    assert not is_channels_last(x)
    assert is_channels_last(x.contiguous(memory_format=torch.channels_last))
    assert not is_channels_last(torch.zeros(2, 1, 3, 5).contiguous(memory_format=torch.channels_last))  # both
    assert not is_channels_last(torch.zeros(2, 3, 5))
