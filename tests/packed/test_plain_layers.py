"""Layers in FP16 by the kernel for small K: which layers, which images it reads as they are, and what it gives.

`small_k.runs` is told that there is a GPU; launches go to the emulator.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from fp4deploy.emulator.cases.case import Outcome, Setting
from fp4deploy.emulator.cases.cuda import emulated
from fp4deploy.errors import UnavailableError
from fp4deploy.packed import PackedNetwork, plain_layers
from fp4deploy.packed.graph import Conv2d, GroupNormReLU
from fp4deploy.packed.operators import channels_last, convolve
from fp4deploy.plugins.gemm import small_k
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.nvcc import find_nvcc
from tests.packed.small_networks import images, packed

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="there is no nvcc")


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_k, "fallback", Fallback("FP16 convolutions of small K", "torch"))
    monkeypatch.setattr(small_k, "runs", lambda device: not small_k.fallback.refused(device))


def plain(network: PackedNetwork) -> list[Conv2d]:
    found = [node for node in network.graph.nodes if isinstance(node, Conv2d) and node.precision == "fp16"]
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
@pytest.mark.parametrize("which", [0, 1])
def test_a_layer_of_a_network(which: int) -> None:
    """The reference to a rounding of FP16, and moments exactly where a GroupNorm follows."""
    network = PackedNetwork(packed("nvfp4_qat", 0.25)[1])
    network.dtype = torch.float16
    for name, weight in network._plain.items():
        network._plain[name] = weight.half()
    node = plain(network)[which]
    channels = network._plain[node.layer].shape[1]
    x = torch.randn(2, channels, 19, 37).contiguous(memory_format=torch.channels_last)
    x = images(2, size=32) if which == 0 else x.half()
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
    torch.testing.assert_close(y.permute(0, 2, 3, 1), wanted, rtol=2e-3, atol=1e-4)
    normed = any(isinstance(each, GroupNormReLU) and y_name(node) in each.inputs for each in network.graph.nodes)
    assert (y_name(node) in moments) == normed == (which == 0)


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
