"""A state dict and a folder of photos: `fp4deploy quantize X.pth --model net.py:make --data images/`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fp4deploy.models import name_model, parse_spec, read_card, save_checkpoint
from fp4deploy.models.build import build_model
from fp4deploy.qat import load_model
from tests.cli.command_line import Invoke

NETWORK = """
from torch import nn


def make():
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 2, 1))


def one():
    return nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 1, 1))
"""
FEW = ("--method", "amax", "--images", 4, "--correction", "none")


def weights(path: Path, spec: str) -> dict[str, Any]:
    """The state dict of a network, also written to `path`."""
    name_model(spec)
    tensors = build_model(parse_spec(spec), 2).state_dict()
    torch.save(tensors, path)
    return tensors


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten images without labels, in two folders."""
    draw = np.random.default_rng(0)
    for number in range(10):
        path = tmp_path / "photos" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (40, 70, 3), dtype=np.uint8)).save(path)
    return tmp_path / "photos"


@pytest.fixture
def net(tmp_path: Path) -> str:
    """The spec of a network in a file."""
    (tmp_path / "net.py").write_text(NETWORK)
    return "net.py:make"


@pytest.mark.parametrize("container", [None, "state_dict", "model"])
def test_a_state_dict_goes_all_the_way_on_photos(
    invoke: Invoke, tmp_path: Path, photos: Path, net: str, container: str | None
) -> None:
    tensors = {f"module.{name}": value for name, value in weights(tmp_path / "x.pth", net).items()}
    torch.save({container: tensors, "epoch": 3} if container else tensors, tmp_path / "x.pth")
    result = invoke("quantize", "x.pth", "--model", net, "--data", photos, *FEW)
    assert result.exit_code == 0, result.stderr
    assert "class unchanged against x.fp16.safetensors" in result.stderr
    assert "class_0, class_1 (their names: --classes)" in result.stderr
    assert "2 images" in result.stderr, "every fifth of ten is kept to compare on"
    assert "--data DATASET --model net.py:make" in result.stderr, "photos have no labels to measure on"
    card = read_card(Path("x.fp16.safetensors"))
    assert (card.height, card.width, card.class_names) == (32, 64, ("class_0", "class_1"))
    network, card = load_model(Path("x.fp16.safetensors"))
    assert torch.equal(network[0].weight.half(), tensors["module.0.weight"].half())
    result = invoke("export", "x.nvfp4-amax.safetensors", "--data", photos, "--model", net)
    assert result.exit_code == 0, result.stderr
    assert Path("x.nvfp4-amax.onnx").is_file()


def test_a_dataset_names_the_classes_and_scores(invoke: Invoke, tmp_path: Path, photos: Path, net: str) -> None:
    weights(tmp_path / "x.pth", net)
    for at, path in enumerate(sorted(photos.rglob("*.png"))):
        split = "val" if at % 2 else "train"
        (tmp_path / "set" / "masks" / split).mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / split).mkdir(exist_ok=True)
        Image.fromarray(np.tri(40, 70, dtype=np.uint8)).save(tmp_path / "set" / "masks" / split / path.name)
        path.rename(tmp_path / "set" / split / path.name)
    (tmp_path / "set" / "classes.txt").write_text("sky\nroad\n")
    more = ("--size", "32", "--mean", "0,0,0", "--std", "1,1,1")
    result = invoke("quantize", "x.pth", "--model", net, "--data", "set", *FEW, *more)
    assert result.exit_code == 0, result.stderr
    card = read_card(Path("x.nvfp4-amax.safetensors"))
    assert (card.class_names, card.height, card.width, card.mean) == (("sky", "road"), 32, 32, (0, 0, 0))
    assert "mIoU" in result.stderr
    invoke("quantize", "x.pth", "--model", net, "--data", "set", *FEW, *more, "--classes", "class_0,class_1")
    measured = invoke("bench", "x.nvfp4-amax.safetensors", "--data", "set", "--model", net, "--json", "-")
    assert measured.exit_code == 0, measured.stderr
    assert json.loads(measured.stdout)["artifacts"][0]["miou"] is not None, "numbered classes are those of the data"


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("x.pth", "--data", "photos"), ("weights alone", "--model SPEC")),
        (("x.pth", "--model", "net.py:make"), ("--data DIR",)),
        (
            ("x.pth", "--model", "unet:0.125", "--data", "photos"),
            ("fit this network", "missing", "--model SPEC"),
        ),
        (("one.pth", "--model", "net.py:one", "--data", "photos"), ("one channel", "torch.cat")),
        (("absent.pth", "--model", "net.py:make", "--data", "photos"), ("no file absent.pth",)),
        (("x.pth", "--model", "net.py:make", "--data", "photos", "--size", "0"), ("--size", "352x480")),
        (("x.pth", "--model", "net.py:make", "--data", "photos", "--outputs", "values"), ("--outputs", ".onnx")),
    ],
)
def test_what_is_missing_is_named(
    invoke: Invoke, tmp_path: Path, photos: Path, net: str, arguments: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    weights(tmp_path / "x.pth", net)
    weights(tmp_path / "one.pth", "net.py:one")
    result = invoke("quantize", *arguments)
    assert result.exit_code == 2, result.output
    assert all(text in result.stderr for text in texts), result.stderr
    assert not list(tmp_path.glob("*.safetensors"))


def test_weights_of_another_program_are_not_replaced(invoke: Invoke, tmp_path: Path, photos: Path, net: str) -> None:
    tensors = weights(tmp_path / "x.pth", net)
    target = tmp_path / "x.fp16.safetensors"

    def refused(name: str) -> None:
        before = target.read_bytes()
        result = invoke("quantize", name, "--model", net, "--data", photos, *FEW)
        assert (result.exit_code, "would be replaced" in result.stderr) == (2, True), result.output
        assert target.read_bytes() == before

    save_file(tensors, target)
    refused("x.pth")
    refused(target.name)
    target.unlink()
    assert invoke("quantize", "x.pth", "--model", net, "--data", photos, *FEW).exit_code == 0
    shutil.copy(tmp_path / "x.pth", tmp_path / "x.pt")
    refused("x.pt")  # of the same stem
    card = read_card(target)
    save_checkpoint(target, load_model(target, model=net)[0], card)  # as a training would
    refused("x.pth")
