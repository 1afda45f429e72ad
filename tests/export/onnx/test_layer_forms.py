"""Forms of layers whose axes can be confused without an error: what is exported computes what torch computes.

All axes that could be exchanged have the same length, and the channels' magnitudes differ, so that blocks along another
axis give other numbers.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.export.onnx.session import portable_session
from fp4deploy.qat import calibrate, prepare, round_to_deployed
from tests.export.exported_models import images, reference_logits


class Network(nn.Module):
    """One layer, its input and output in the layout that it has in a network of images."""

    def __init__(self, layer: nn.Module, last: bool, flat: bool = False) -> None:
        super().__init__()
        self.layer, self.last, self.flat = layer, last, flat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.last:
            return self.layer(x)
        x = x.permute(0, 2, 3, 1)
        return self.layer(x.flatten(1, 2) if self.flat else x)


def exported(
    network: Network, shape: tuple[int, int, int], dynamic_size: bool = False
) -> tuple[onnx.ModelProto, torch.Tensor, torch.Tensor]:
    """The canonical graph, an input, and what torch computes from it."""
    torch.manual_seed(0)
    prepare(network, "nvfp4_qat", include=["layer"])
    x = images(2, shape) * torch.logspace(-2, 0, shape[0])[:, None, None] * torch.linspace(0.1, 1, shape[2])
    x = x.half().float()
    calibrate(network, [x])
    round_to_deployed(network)
    network.eval()
    with torch.no_grad():
        return export_graph(network, shape, dynamic_size=dynamic_size), x, network(x)


def assert_computes(canonical: onnx.ModelProto, x: torch.Tensor, expected: torch.Tensor) -> None:
    largest = float(expected.abs().max())
    for found in (
        reference_logits(canonical, x),
        portable_session(to_portable(canonical)).run(None, {"image": x.numpy()})[0],
    ):
        assert found.shape == tuple(expected.shape)
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=2e-3 * largest)


@pytest.mark.parametrize("flat", [False, True], ids=["4d", "3d"])
@pytest.mark.parametrize("size", [(16, 16), (16, 2)], ids=str)
def test_a_linear_layer_is_quantised_along_its_last_axis(flat: bool, size: tuple[int, int]) -> None:
    network = Network(nn.Linear(16, 24), last=True, flat=flat)
    assert_computes(*exported(network, (16, *size)))


def test_a_linear_layer_of_open_sizes() -> None:
    """The activation has three axes around its quantisation, and four again after it, at any height and width."""
    network = Network(nn.Linear(16, 24), last=True)
    canonical, x, expected = exported(network, (16, 8, 4), dynamic_size=True)
    assert_computes(canonical, x, expected)
    other = x.repeat(1, 1, 1, 3)[:, :, :6]
    with torch.no_grad():
        assert_computes(canonical, other, network(other))


@pytest.mark.parametrize("channels", [(32, 32), (20, 48)], ids=str)
@pytest.mark.parametrize("kernel", [1, (1, 3)], ids=str)
def test_a_transposed_convolution(channels: tuple[int, int], kernel: int | tuple[int, int]) -> None:
    network = Network(nn.ConvTranspose2d(*channels, kernel, stride=1), last=False)
    assert_computes(*exported(network, (channels[0], 6, 8)))


@pytest.mark.parametrize("stride", [1, (2, 1)], ids=str)
def test_a_transposed_convolution_that_adds_as_many_rows_as_its_stride(stride: int | tuple[int, int]) -> None:
    """Which ONNX Runtime does not take as they are."""
    layer = nn.ConvTranspose2d(32, 32, 3, stride, padding=1, output_padding=1, dilation=2)
    assert_computes(*exported(Network(layer, last=False), (32, 6, 8)))
    layer = nn.ConvTranspose2d(32, 32, 3, stride, output_padding=1, dilation=2)
    with pytest.raises(InputError, match=r"layer: .*output_padding=\[1, 1\], padding=\[0, 0\]"):
        exported(Network(layer, last=False), (32, 6, 8))


@pytest.mark.parametrize("channels", [(32, 32), (20, 16)], ids=str)
def test_a_convolution(channels: tuple[int, int]) -> None:
    network = Network(nn.Conv2d(*channels, (3, 1)), last=False)
    assert_computes(*exported(network, (channels[0], 6, 8)))
