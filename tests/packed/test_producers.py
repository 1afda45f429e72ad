"""Steps instead of nodes: which nodes become one, and that the bytes stay."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.export.to_packed import pack_model
from fp4deploy.export.verify.packed import leaves
from fp4deploy.packed import PackedFile, PackedNetwork, packed_file
from fp4deploy.packed.graph import (
    Activation,
    Affine,
    Concat,
    Conv2d,
    ConvTranspose2d,
    GroupNormReLU,
    Node,
    Norm,
    Pad,
    Pool,
    Resize,
)
from fp4deploy.packed.network import packed_form
from fp4deploy.packed.producers import Move, Produce, normalized, plan
from tests.export.packable_networks import NETWORKS, deployed, packed_network
from tests.packed.small_networks import packed
from tests.samples import sample


def steps(name: str) -> list[Any]:
    return list(plan(packed_network(name)[0].graph)[1])


@pytest.mark.parametrize("name", sample(NETWORKS, every=3))
def test_the_results_of_the_nodes(name: str) -> None:
    """On the CPU, by the reference of the kernel; the norms of one network are summed in another order."""
    file, x = packed_network(name)
    network, planned = PackedNetwork(file), PackedNetwork(file)
    planned.inputs, planned.steps = plan(file.graph)
    planned.pack = packed_form  # steps move codes and scales
    for one, other in zip(leaves(planned(x)), leaves(network(x)), strict=True):
        if name.startswith("InstanceNorm UNet"):
            assert float((one - other).norm() / other.norm()) < 0.02
        else:
            assert torch.equal(one, other)


def test_a_residual_network_has_one_step_between_convolutions() -> None:
    """BatchNorm, ReLU, both branches of an addition and packing; what is resized or concatenated is packed before."""
    found = steps("ResNet encoder")
    produced = [step for step in found if isinstance(step, Produce)]
    assert not [step for step in found if isinstance(step, (Affine, Resize)) and _packs(step)]
    adds = [step for step in produced if len(step.inputs) == 2]
    assert Counter((step.first is not None, step.second is not None, step.activation) for step in adds) == {
        (True, False, "relu"): 1,
        (True, True, "relu"): 2,
    }
    assert all(step.activation == "relu" for step in produced)
    moves = [step for step in found if isinstance(step, Move)]
    assert moves
    assert all(form.amax for step in moves for form in step.outputs)


def _packs(node: Node) -> bool:
    return any(form.amax for form in node.outputs)


@pytest.mark.parametrize("name", ["InstanceNorm UNet", "InstanceNorm UNet, volumes"])
def test_norms_and_activations_are_one_step(name: str) -> None:
    found = steps(name)
    produced = [step for step in found if isinstance(step, Produce)]
    assert len(produced) == 10
    assert all(isinstance(step.first, Norm) and step.activation == "leaky_relu" and step.slope for step in produced)
    assert not [step for step in found if isinstance(step, (Norm, Activation))]


def test_norms_read_what_one_convolution_writes() -> None:
    """In one plain form, so that it gives the moments with it; a transposed convolution gives none."""
    found = steps("InstanceNorm UNet")
    names = normalized(found)
    assert len(names) == 10
    writers = [step for step in found if any(form.name in names for form in step.outputs)]
    assert len(writers) == 10
    for step in writers:
        assert isinstance(step, Conv2d)
        assert [form.amax for form in step.outputs] == [None]
    assert normalized(packed_network("InstanceNorm UNet")[0].graph.nodes) == set()
    ours = packed()[1].graph
    assert normalized(ours.nodes) == {node.inputs[0] for node in ours.nodes if isinstance(node, GroupNormReLU)} != set()


def test_a_concatenation_of_packed_parts() -> None:
    concats = [step for step in steps("ASPP") if isinstance(step, Move) and isinstance(step.node, Concat)]
    assert [len(step.inputs) for step in concats] == [4]


class Padded(nn.Module):
    """Skips of a UNet whose upsampled side is padded by what it lacks: here nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1)
        self.up, self.join = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(32, 16, 3, padding=1)
        self.head = nn.Conv2d(16, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.first(x).relu()
        y = F.pad(self.up(F.pad(self.down(skip).relu(), (0, 0, 0, 0))), (0, 0, 0, 0), "replicate")
        y = F.pad(self.join(torch.cat([skip, y], 1)), (0, 0, 0, 0))
        return F.pad(self.head(F.pad(y, (0, 0, 0, 0), "replicate")), (0, 0, 0, 0), "replicate")


def padded() -> tuple[PackedFile, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 48)
    return packed_file(Path("own.fp4"), None, *pack_model(deployed(Padded(), x), x)), x


def test_a_padding_of_no_pixels_is_no_step() -> None:
    """A transposed convolution writes what the next one reads, packed; only an output of the network stays."""
    file, x = padded()
    assert len([node for node in file.graph.nodes if isinstance(node, Pad)]) == 5
    inputs, found = plan(file.graph)
    (last,) = [step for step in found if isinstance(step, Pad)]
    assert last is found[-1]
    (up,) = [step for step in found if isinstance(step, ConvTranspose2d)]
    assert [form.amax is not None for form in up.outputs] == [True]
    network, planned = PackedNetwork(file), PackedNetwork(file)
    planned.schedule(inputs, found)
    planned.pack = packed_form
    assert torch.equal(leaves(planned(x))[0], leaves(network(x))[0])


class Pooled(nn.Module):
    """Maxima of 2x2 pixels of what steps write, with and without a skip, and of what they do not write."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(c, 16, 3, padding=1, bias=False) for c in (3, 16, 16, 16, 16, 16)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(16) for _ in range(4)])
        self.pool, self.wide, self.head = nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, 5, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        skip = F.leaky_relu(self.norms[0](self.convs[0](x)), 0.1)  # read as it is, and pooled
        side = self.convs[1](skip)
        y = self.norms[1](self.convs[2](self.pool(skip)))
        y = self.convs[3](F.relu(self.pool(y)) + 1)  # pooled between the norm and the activation
        y = self.pool(F.silu(self.norms[2](y) + y))  # a sum
        y = self.wide(self.convs[4](y)) + self.pool(torch.sigmoid(y))  # torch's: another window, no kernel
        y = self.pool(F.relu(y))
        return self.head(y), self.pool(F.relu6(self.norms[3](side)))


def pooled(height: int = 64, width: int = 96) -> tuple[PackedFile, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, height, width)
    return packed_file(Path("own.fp4"), None, *pack_model(deployed(Pooled(), x), x)), x


@pytest.mark.parametrize("size", [pytest.param((64, 96), marks=pytest.mark.variants), (50, 70)])
def test_pooling_is_a_form_of_what_a_step_writes(size: tuple[int, int]) -> None:
    """Also where sizes are odd: then it leaves out a last row or column."""
    file, x = pooled(*size)
    inputs, found = plan(file.graph)
    kinds = [step.kernel for step in found if isinstance(step, Pool)]
    assert kinds == [[3, 3], [2, 2]]
    assert len([node for node in file.graph.nodes if isinstance(node, Pool)]) == 7
    forms = [[form.pooled for form in step.outputs] for step in found if isinstance(step, Produce)]
    assert forms == [[False, True], [True], [True, True], [True], [True]]
    network, planned = PackedNetwork(file), PackedNetwork(file)
    planned.schedule(inputs, found)
    planned.pack = packed_form
    for one, other in zip(leaves(planned(x)), leaves(network(x)), strict=True):
        assert torch.equal(one, other)


class OtherPools(nn.Module):
    """Everything but maxima of 2x2 pixels that lie beside one another, of what a step writes."""

    pools = (
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, 1),
        nn.MaxPool2d((2, 3), 2),
        nn.MaxPool2d(2, 2, dilation=2),
    )

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16)
        self.body, self.head = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 5, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.relu(self.norm(self.stem(x)))
        return tuple(self.head(self.body(pool(y))) for pool in self.pools)


def test_only_maxima_of_two_by_two_pixels_are_a_form() -> None:
    """Of sides that are odd, which is where some of the others differ."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 13, 19)
    file = packed_file(Path("own.fp4"), None, *pack_model(deployed(OtherPools(), x), x, dynamic_size=False))
    network, planned = PackedNetwork(file), PackedNetwork(file)
    inputs, found = plan(file.graph)
    assert len([step for step in found if isinstance(step, Pool)]) == len(OtherPools.pools)
    planned.schedule(inputs, found)
    planned.pack = packed_form
    for one, other in zip(leaves(planned(x)), leaves(network(x)), strict=True):
        assert torch.equal(one, other)


class Position(nn.Module):
    """A learned map of the size of the feature map, which a file holds once for all items of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 5, 1)
        self.map = nn.Parameter(torch.randn(1, 16, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(self.body(F.relu(x + F.interpolate(self.map, x.shape[2:]))))


def positioned() -> tuple[PackedFile, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 3, 8, 8)
    return packed_file(Path("own.fp4"), None, *pack_model(deployed(Position(), x), x)), x


def test_what_all_items_of_a_batch_share_is_not_added_by_a_step() -> None:
    """Its kernel reads a second feature map for each item."""
    file, x = positioned()
    inputs, found = plan(file.graph)
    assert [(type(step.node), len(step.inputs)) for step in found if isinstance(step, Produce)] == [(Activation, 1)]
    network, planned = PackedNetwork(file), PackedNetwork(file)
    planned.schedule(inputs, found)
    planned.pack = packed_form
    assert torch.equal(leaves(planned(x))[0], leaves(network(x))[0])


def test_every_form_is_written_once_and_before_it_is_read() -> None:
    for name in NETWORKS:
        inputs, found = plan(packed_network(name)[0].graph)
        known = {form.name for each in inputs for form in each.outputs}
        for step in found:
            assert set(step.inputs) <= known
            written = {form.name for form in step.outputs}
            assert not written & known
            known |= written
        assert {each.activation for each in packed_network(name)[0].graph.outputs} <= known


def test_our_network_has_its_own_kernels() -> None:
    graph = packed()[1].graph
    assert plan(graph)[1] == list(graph.nodes)
