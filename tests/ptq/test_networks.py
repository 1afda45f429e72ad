"""Every method and correction on networks that are not built in, of each library and of a user's own file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp4deploy.models import ModelCard, name_model, save_checkpoint
from fp4deploy.models.build import network_for
from fp4deploy.ptq import METHODS, quantize_checkpoint
from fp4deploy.ptq.correction import CHOICES
from fp4deploy.qat import load_model, quantized_layers
from tests.models.libraries import need_library_of

# Returns more than the logits, passes arguments by name, calls one layer twice and catches whatever a layer raises.
OWN_FILE = '''
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x, *, skip):
        y = torch.relu(self.norm1(self.conv1(input=x)))
        return skip + self.norm2(self.conv2(y)), y


class Network(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.shared = nn.Conv2d(16, 16, 1)
        self.head = nn.Conv2d(16, num_classes, 1)

    def forward(self, x):
        try:
            x = self.stem(x)
            for block in self.blocks:
                x, inner = block(x, skip=x)
            x = self.shared(torch.relu(self.shared(x)))
            return {"out": self.head(x), "inner": inner}
        except BaseException as error:
            raise RuntimeError("this network failed") from error


def make(num_classes):
    return Network(num_classes)
'''
SPECS = ("FILE", "smp:Unet/resnet18", "timm:resnet18", "monai:BasicUNet", "torchvision:lraspp_mobilenet_v3_large")
SIZE = 32


@pytest.fixture(scope="module", params=SPECS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FP16 checkpoint of random weights; its model is named, as `--model` does."""
    folder = tmp_path_factory.mktemp("network")
    text = request.param
    if text == "FILE":
        (folder / "net.py").write_text(OWN_FILE)
        text = f"{folder / 'net.py'}:make"
    else:
        need_library_of(text)
    arguments = {"features": [16, 16, 32, 32, 32, 16]} if text.startswith("monai:") else {}
    card = ModelCard(
        "fp16", 1.0, ("a", "b", "c"), SIZE, SIZE, (0.5,) * 3, (0.5,) * 3, True, architecture=text, arguments=arguments
    )
    name_model(text)
    torch.manual_seed(0)
    save_checkpoint(folder / "fp16.safetensors", network_for(card), card)
    return folder / "fp16.safetensors"


@pytest.mark.parametrize("correction", CHOICES)
def test_every_correction(checkpoint: Path, correction: str, tmp_path: Path) -> None:
    result = quantize_checkpoint(checkpoint, images(), tmp_path / "nvfp4.safetensors", "amax", correction=correction)
    assert bool(result.corrected) == (correction != "none")


@pytest.mark.parametrize("method", METHODS)
def test_every_method(checkpoint: Path, method: str, tmp_path: Path) -> None:
    quantize_checkpoint(checkpoint, images(), tmp_path / "nvfp4.safetensors", method, correction="none", iterations=2)
    model, card = load_model(tmp_path / "nvfp4.safetensors")
    assert card.recipe == METHODS[method].recipe
    assert quantized_layers(model)
    with torch.no_grad():
        assert model(images()[0]).isfinite().all()


def images() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.rand(2, 3, SIZE, SIZE, generator=random) for _ in range(2)]
