"""Layers in FP16 by the kernel for small K: which layers, which images it reads as they are, and what it gives.

`small_k.fallback` is told that there is a GPU; launches go to the emulator.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from fp4deploy.errors import UnavailableError
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.packed import PackedNetwork, plain_layers
from fp4deploy.packed.graph import Conv2d, GroupNormReLU, Norm
from fp4deploy.packed.operators import channels_last, convolve
from fp4deploy.packed.producers import Produce, plan
from fp4deploy.plugins.gemm.convolution import small_k
from fp4deploy.plugins.quantize import norm_pack, pointwise_pack
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.nvcc import find_nvcc
from fp4deploy.rest import rest_of
from fp4deploy_emulator.cases.case import Outcome, Setting
from fp4deploy_emulator.cases.cuda import emulated
from tests.export.packable_networks import packed_network
from tests.packed.small_networks import images, packed

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="there is no nvcc")


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_k, "fallback", Fallback("FP16 convolutions of small K", "torch"))
    monkeypatch.setattr(small_k.fallback, "runs", lambda device: not small_k.fallback.refused(device))


def plain(network: PackedNetwork) -> list[Conv2d]:
    found = [node for node in network.graph.nodes if isinstance(node, Conv2d) and node.precision != "nvfp4"]
    assert found[0].inputs[0] == network.graph.inputs[0].outputs[0].name
    return found


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("digits", [False, True])
def test_first_and_last_layer(digits: bool) -> None:
    """Both of a UNet; its image is read as it is, unless it is encoded as FP4 first."""
    network = PackedNetwork(packed("nvfp4_qat", 0.25, digits)[1])
    layers = plain(network)
    assert len(layers) == 2
    assert all(plain_layers.small_k_kernel(node, network._plain, network.device) for node in layers)
    others = [node for node in network.graph.nodes if node not in layers]
    assert not any(plain_layers.small_k_kernel(node, network._plain, network.device) for node in others)
    image = network.graph.inputs[0].outputs[0].name
    assert network._as_given == (set() if digits else {image})
    x = images(1)
    read = network.read(x)
    assert isinstance(read, torch.Tensor)
    assert (read is x) == (not digits)


def test_nowhere_without_the_kernel() -> None:
    network = PackedNetwork(packed("nvfp4_qat", 0.25)[1])
    assert not any(plain_layers.small_k_kernel(node, network._plain, network.device) for node in network.graph.nodes)
    assert network._as_given == set()


@needs_nvcc
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(("which", "rest"), [(0, "fp16"), (1, "fp16"), (0, "bf16")])
def test_a_layer_of_a_network(which: int, rest: str) -> None:
    """The reference to a rounding, and moments exactly where a GroupNorm follows."""
    network = PackedNetwork(packed("nvfp4_qat", 0.25, rest=rest)[1])
    halve(network, dtype := rest_of(rest).dtype)
    node = plain(network)[which]
    channels = network._plain[node.layer].shape[1]
    x = torch.randn(2, channels, 19, 37).contiguous(memory_format=torch.channels_last)
    x = images(2, size=32) if which == 0 else x.to(dtype)
    moments: dict[str, Any] = {}
    outcome = Outcome()
    with emulated(Setting(arch="sm_90"), outcome):
        (y,) = network.run_node(node, [x], moments=moments)
    assert outcome.kernels == 1
    assert isinstance(y, torch.Tensor)
    bias = network._vectors[node.bias] if node.bias else None
    weight = network._plain[node.layer].permute(0, 2, 3, 1)
    geometry = plain_layers.plain_geometry(node)[:2]
    wanted = small_k.conv2d_reference(x.permute(0, 2, 3, 1), weight, bias, *geometry, node.relu)
    torch.testing.assert_close(y.permute(0, 2, 3, 1), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
    normed = any(isinstance(each, GroupNormReLU) and y_name(node) in each.inputs for each in network.graph.nodes)
    assert (y_name(node) in moments) == normed == (which == 0)


@needs_nvcc
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    "name", [pytest.param("InstanceNorm UNet", marks=pytest.mark.variants), "InstanceNorm UNet, volumes"]
)
def test_a_step_takes_the_moments_of_a_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """InstanceNorm and LeakyReLU after a convolution that works in tiles, at an odd size: x is not read for them.

    Of volumes tiles are those of slices, of which the lower ones have fewer rows.
    """
    network, image = instance_norms(name)
    halve(network)
    image, (inputs, steps) = image[..., :-3, :-5], plan(network.graph)
    first, second = steps[:2]
    assert isinstance(first, Conv2d)
    assert isinstance(second, Produce)
    network.schedule(inputs, steps)
    monkeypatch.setattr(norm_pack.fallback, "runs", lambda _: True)
    monkeypatch.setattr(pointwise_pack.fallback, "runs", lambda _: True)
    moments: dict[str, Any] = {}
    outcome = Outcome()
    with emulated(Setting(arch="sm_90"), outcome):
        (x,) = network.run_step(first, [image], {}, moments)
        assert list(moments) == second.inputs == [y_name(first)]
        assert moments[y_name(first)].tile != (0, 0)
        (y,) = network.run_step(second, [x], {}, moments)
        assert not moments
        assert outcome.statistics.entries == {"small_k_conv", "combine_moments", "pointwise_pack"}
        (again,) = network.run_step(second, [x], {})
    assert "chunk_moments" in outcome.statistics.entries
    monkeypatch.setattr(norm_pack.fallback, "runs", lambda _: False)
    monkeypatch.setattr(pointwise_pack.fallback, "runs", lambda _: False)
    (expected,) = network.run_step(second, [x], {})
    assert isinstance(expected, Nvfp4Tensor)
    assert isinstance(x, torch.Tensor)
    weight, bias = network._plain[first.layer].float(), network._vectors[str(first.bias)]
    wanted = convolve(first, [image.half().float()], weight, bias)
    torch.testing.assert_close(x.float(), wanted, rtol=2e-3, atol=1e-3)
    for each in (y, again):
        assert isinstance(each, Nvfp4Tensor)
        assert float((each.codes != expected.codes).float().mean()) < 2e-3


def test_nodes_one_by_one_leave_no_moments() -> None:
    """A norm that torch computes takes those that a convolution gave."""
    network, x = instance_norms()
    (node, *_) = [node for node in network.graph.nodes if isinstance(node, Norm)]
    moments: dict[str, Any] = {node.inputs[0]: "of a convolution", "another": "stays"}
    y = torch.randn(2, 16, 7, 9, dtype=network.dtype)
    network.run_node(node, [y], moments=moments)
    assert list(moments) == ["another"]
    assert network._normed == set()
    network.schedule(*plan(network.graph))
    norms = [each for each in network.graph.nodes if isinstance(each, Norm)]
    assert network._normed == {name for each in norms for name in each.inputs}
    network.schedule(network.graph.inputs, list(network.graph.nodes))
    assert network._normed == set()
    assert isinstance(network(x), torch.Tensor)


def instance_norms(name: str = "InstanceNorm UNet") -> tuple[PackedNetwork, torch.Tensor]:
    """A network of convolutions, InstanceNorm and LeakyReLU, and what it reads."""
    file, x = packed_network(name, True)
    return PackedNetwork(file), x


def halve(network: PackedNetwork, dtype: torch.dtype = torch.float16) -> None:
    """Activations and weights of layers as on a GPU."""
    network.dtype = dtype
    for name, weight in network._plain.items():
        network._plain[name] = weight.to(dtype)


def y_name(node: Conv2d) -> str:
    return node.outputs[0].name


@pytest.mark.usefixtures("anywhere")
def test_torch_takes_over_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel does not compile: from then on the image is converted, and nobody tries again."""
    network = PackedNetwork(packed("nvfp4_qat", 0.25)[1])
    node, x, calls = plain(network)[0], images(1), []
    expected = convolve(node, [channels_last(x)], network._plain[node.layer], None)
    assert node.bias is None

    def refuse(*_: object) -> None:
        calls.append(1)
        raise UnavailableError("it does not compile")

    monkeypatch.setattr(small_k, "conv2d", refuse)
    with pytest.warns(UserWarning, match="small K fall back to torch on cpu: it does not compile"):
        got = network.run_node(node, network.read_input(network.graph.inputs[0], x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = network.run_node(node, network.read_input(network.graph.inputs[0], x))
    assert len(calls) == 1
    for y in (*got, *again):
        assert isinstance(y, torch.Tensor)
        assert torch.equal(y, expected)
