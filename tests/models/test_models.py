"""UNet, model card, checkpoints and the mIoU metric."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp4deploy.errors import InputError
from fp4deploy.models import ModelCard, build_unet, load_weights, read_card, save_checkpoint
from fp4deploy.models.checkpoint import read_signed

pytestmark = pytest.mark.usefixtures("whole_unets")
CARD = ModelCard("fp16", 0.125, ("background", "a", "b"), 32, 32, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), True)


@pytest.mark.parametrize(("scale", "widths"), [(0.125, (8, 128)), (0.25, (16, 256)), (1.0, (64, 1024))])
def test_widths_and_output_shape(scale: float, widths: tuple[int, int]) -> None:
    with torch.device("meta"):
        model = build_unet(5, scale)
        logits = model(torch.empty(2, 3, 48, 64))
    assert (model.encoder[0].conv1.out_channels, model.encoder[-1].conv2.out_channels) == widths
    assert logits.shape == (2, 5, 48, 64)


def test_scale_one_has_the_parameters_of_the_classic_unet() -> None:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build_unet(11, 1.0).parameters())
    assert 31.0e6 < parameters < 31.1e6


@pytest.mark.parametrize("scale", [0.0, -1.0, 0.1, 0.2, 0.06])
def test_impossible_scales_name_the_valid_ones(scale: float) -> None:
    with pytest.raises(InputError, match=r"0\.125"):
        build_unet(3, scale)


def test_two_files_of_equal_content_have_equal_bytes(tmp_path: Path) -> None:
    model, extra = build_unet(3, 0.125), {name: f"straße {name}" for name in "zyxwvutsrqponmlkjihgfedcba"}
    save_checkpoint(tmp_path / "a.safetensors", model, CARD, extra)
    save_checkpoint(tmp_path / "b.safetensors", model, CARD, dict(reversed(extra.items())))
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert read_signed(tmp_path / "a.safetensors")


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    model, path = build_unet(3, 0.125), tmp_path / "best.safetensors"
    save_checkpoint(path, model, CARD, {"epoch": "3"})
    assert read_card(path) == CARD
    other = build_unet(3, 0.125)
    load_weights(other, path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("classes", "scale"), [(3, 0.25), (4, 0.125)])
def test_checkpoint_of_another_model_is_refused(tmp_path: Path, classes: int, scale: float) -> None:
    path = tmp_path / "best.safetensors"
    save_checkpoint(path, build_unet(3, 0.125), CARD)
    with pytest.raises(InputError, match="does not fit this model.*scale"):
        load_weights(build_unet(classes, scale), path)


def test_broken_checkpoints_are_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    with pytest.raises(InputError, match="There is no checkpoint"):
        read_card(path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(InputError, match="not a readable safetensors"):
        read_card(path)
    model = build_unet(3, 0.125)
    with torch.no_grad():
        model.head.bias[1] = math.nan
    save_checkpoint(path, model, CARD)
    with pytest.raises(InputError, match=r"NaN or Inf in head\.bias"):
        load_weights(build_unet(3, 0.125), path)


def test_a_file_of_very_many_tensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "many.safetensors"
    save_file({name: torch.zeros(0) for name in "abc"}, path)
    assert read_signed(path)[1].keys() == set("abc")
    monkeypatch.setattr("fp4deploy.models.checkpoint.MAX_TENSORS", 2)
    with pytest.raises(InputError, match="it holds 3 tensors, and 2 is the limit"):
        read_signed(path)


def test_card_that_is_no_card() -> None:
    for text in ("", "[]", "{}", '{"mean": 3}'):
        with pytest.raises(InputError, match="model card"):
            ModelCard.from_json(text)
