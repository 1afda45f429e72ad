"""Every method and correction on networks that are not built in, of each library and of a user's own file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp4deploy.data import open_dataset
from fp4deploy.models import ModelCard, name_model, save_checkpoint
from fp4deploy.models.build import network_for
from fp4deploy.ptq import METHODS
from fp4deploy.ptq.correction import CHOICES
from fp4deploy.qat import load_model, quantized_layers
from tests.cli.command_line import Invoke
from tests.models.libraries import need_library_of
from tests.samples import sample

# Returns more than the logits, passes a block's arguments by name, calls one layer twice and catches all it can.
OWN_FILE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x, *, skip):
        y = torch.relu(self.norm1(self.conv1(x)))
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
"""
SPECS = ("FILE", "smp:Unet/resnet18", "timm:resnet18", "monai:BasicUNet", "torchvision:lraspp_mobilenet_v3_large")
SIZE = 32


@pytest.fixture(scope="module", params=SPECS)
def checkpoint(
    request: pytest.FixtureRequest, shapes: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """An FP16 checkpoint of random weights, and the model spec that names its network."""
    folder, classes = tmp_path_factory.mktemp("network"), open_dataset(shapes, "train").class_names
    text = request.param
    if text == "FILE":
        (folder / "net.py").write_text(OWN_FILE)
        text = f"{folder / 'net.py'}:make"
    else:
        need_library_of(text)
    arguments = {"features": [16, 16, 32, 32, 32, 16]} if text.startswith("monai:") else {}
    card = ModelCard(
        "fp16", 1.0, classes, SIZE, SIZE, (0.5,) * 3, (0.5,) * 3, True, architecture=text, arguments=arguments
    )
    name_model(text)
    torch.manual_seed(0)
    save_checkpoint(folder / "fp16.safetensors", network_for(card), card)
    return folder / "fp16.safetensors", text


def quantised(invoke: Invoke, checkpoint: tuple[Path, str], shapes: Path, *options: object) -> ModelCard:
    """The card of what the command writes."""
    path, model = checkpoint
    few = ("--data", shapes, "--images", 4, "--batch", 2, "--iterations", 2)
    result = invoke("quantize", path, "--model", model, *few, "--out", "nvfp4.safetensors", *options)
    assert result.exit_code == 0, result.stderr
    network, card = load_model(Path("nvfp4.safetensors"))
    assert quantized_layers(network)
    with torch.no_grad():
        assert network(torch.rand(1, 3, SIZE, SIZE)).isfinite().all()
    return card


@pytest.mark.parametrize("correction", CHOICES)
def test_every_correction(invoke: Invoke, checkpoint: tuple[Path, str], shapes: Path, correction: str) -> None:
    quantised(invoke, checkpoint, shapes, "--method", "amax", "--correction", correction)


@pytest.mark.parametrize("method", sample(METHODS, every=3))  # tests/ptq has them all
def test_every_method(invoke: Invoke, checkpoint: tuple[Path, str], shapes: Path, method: str) -> None:
    card = quantised(invoke, checkpoint, shapes, "--method", method)
    assert card.recipe == METHODS[method].recipe
