"""Weights of a package under the names of an encoder: by the order of layers, every shape compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import pretrained_encoder
from fp4deploy.models.initial import load_initial


def layers(prefix: str, channels: int = 8) -> dict[str, torch.Tensor]:
    """A convolution in channels_last and its norm."""
    weight = torch.randn(channels, 3, 3, 3).contiguous(memory_format=torch.channels_last)
    norm = {f"{prefix}norm.weight": torch.rand(channels), f"{prefix}norm.num_batches_tracked": torch.tensor(7)}
    return {f"{prefix}weight": weight, **norm}


def test_names_are_given_in_the_order_of_layers(tmp_path: Path) -> None:
    given = {**layers("_stem."), "_fc.weight": torch.zeros(10, 8), "_bn1.weight": torch.zeros(8)}
    found = pretrained_encoder.renamed(given, layers("model."))
    assert list(found) == ["model.weight", "model.norm.weight"]
    assert torch.equal(found["model.weight"], given["_stem.weight"].half())
    save_file(found, tmp_path / "weights.safetensors")


def test_other_shapes_are_refused() -> None:
    with pytest.raises(SystemExit, match="2 tensors of the file do not match the 2 of the encoder"):
        pretrained_encoder.renamed(layers("_stem.", 16), layers("model."))


def test_the_file_starts_an_encoder(tmp_path: Path) -> None:
    """As `--init` reads it: FP16 values in FP32 parameters, all of the child `encoder`."""
    network = torch.nn.ModuleDict({"encoder": torch.nn.Conv2d(3, 8, 3, bias=False), "head": torch.nn.Conv2d(8, 2, 1)})
    given = {"_stem.weight": torch.randn(8, 3, 3, 3)}
    save_file(pretrained_encoder.renamed(given, {"weight": network["encoder"].weight}), tmp_path / "w.safetensors")
    assert "all of encoder" in load_initial(network, tmp_path / "w.safetensors")
    assert torch.equal(network["encoder"].weight, given["_stem.weight"].half().float())
