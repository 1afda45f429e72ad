"""Networks of three spatial axes: the built-in UNet follows size and spacing, and other sources say what they take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.models import ModelCard, build_model, parse_spec
from fp4deploy.models.build import network_for
from fp4deploy.models.unet import UNet
from fp4deploy.models.volumes import Intensity, NetworkInput, VolumeInput
from fp4deploy.qat.fused_unet import fuse_unet, has_kernels
from tests.models.libraries import need_library_of

pytestmark = pytest.mark.usefixtures("whole_unets")


def card(depth: int = 8, spacing: tuple[float, float, float] = (4.0, 1.0, 1.0), **fields: object) -> ModelCard:
    volume = VolumeInput(depth, spacing, ("T1", "T2"), (Intensity(), Intensity()))
    given = {"mean": (0.0, 0.0), "std": (1.0, 1.0), "volume": volume, **fields}
    return ModelCard("fp16", 0.125, ("background", "a", "b"), 32, 16, background=True, **given)  # type: ignore[arg-type]


def test_thick_slices_are_pooled_last() -> None:
    network = network_for(card())
    assert isinstance(network, UNet)
    assert isinstance(network.pool, nn.ModuleList)
    assert [each.kernel_size for each in network.pool] == [(1, 2, 2), (1, 2, 2), (2, 2, 1), (1, 1, 1)]
    assert [up.kernel_size for up in network.up] == [(1, 1, 1), (2, 2, 1), (1, 2, 2), (1, 2, 2)]
    assert network(torch.zeros(1, 2, 8, 32, 16)).shape == (1, 3, 8, 32, 16)
    assert type(fuse_unet(network)) is UNet, "the fused kernels are of images"
    assert not has_kernels(network)


def test_the_card_says_what_is_read() -> None:
    found = ModelCard.from_json(card().to_json())
    assert (found.size, found.input_shape) == ((8, 32, 16), (2, 8, 32, 16))
    assert found.resized((4, 8, 8)).size == (4, 8, 8)
    with pytest.raises(InputError, match="Give DxHxW"):
        found.resized((8, 8))
    with pytest.raises(InputError, match="the input has 2 channels"):
        ModelCard.from_json(card(mean=(0.0,)).to_json())
    with pytest.raises(InputError, match="with the task 'semantic' alone"):
        ModelCard.from_json(card(digits=True).to_json())


@pytest.mark.parametrize("spec", ["monai:BasicUNet", "smp:Unet", "timm:resnet18", "torchvision:fcn_resnet50"])
def test_networks_of_libraries(spec: str) -> None:
    inputs = NetworkInput(2, (16, 32, 32), (1.0, 1.0, 1.0))
    if spec.startswith("monai"):
        need_library_of(spec)
        network = build_model(parse_spec(spec, {"features": [8] * 6}), 3, inputs=inputs)
        assert network(torch.zeros(1, 2, 16, 32, 32)).shape == (1, 3, 16, 32, 32)
        return
    with pytest.raises(InputError, match="For volumes take --model unet, monai:NAME"):
        build_model(parse_spec(spec), 3, inputs=inputs)
