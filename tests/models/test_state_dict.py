"""Checkpoints of state dicts: the number of classes by the sizes of tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.models import name_model, parse_spec, read_card
from fp4deploy.models.build import build_model
from fp4deploy.models.card import numbered
from fp4deploy.models.state_dict import checkpoint_of, is_state_dict
from fp4deploy.qat import load_model
from tests.models.libraries import need_library_of

SPECS = (
    "unet:0.125",
    "FILE",
    "smp:Unet/resnet18",
    "torchvision:lraspp_mobilenet_v3_large",
    "timm:resnet18",
    "monai:BasicUNet",
)
OWN = """
from torch import nn


def make(num_classes, width=16):
    twice = nn.Conv2d(width, 2 * num_classes, 1)  # a layer of twice the classes comes first
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), twice, nn.Conv2d(2 * num_classes, num_classes, 1))
"""


@pytest.mark.parametrize("spec", SPECS)
def test_the_weights_say_how_many_classes_there_are(tmp_path: Path, spec: str) -> None:
    if spec == "FILE":
        (tmp_path / "net.py").write_text(OWN)
        spec = f"{tmp_path / 'net.py'}:make"
        name_model(spec)
    elif not spec.startswith("unet"):
        need_library_of(spec)
    source: nn.Module = build_model(parse_spec(spec), 3)
    tensors = {f"model.module.{name}": value for name, value in source.state_dict().items()}
    torch.save({"model": tensors}, tmp_path / "w.pth")
    out = tmp_path / "w.safetensors"
    said = checkpoint_of(tmp_path / "w.pth", parse_spec(spec), out, (64, 64), (0.5,) * 3, (0.5,) * 3, ("a", "b", "c"))
    card = read_card(out)
    assert (card.class_names, card.channels, card.precision) == (("a", "b", "c"), 3, "fp16"), said
    assert card.spec.same_network(parse_spec(spec))
    expected = {name: value.half().float() for name, value in source.state_dict().items() if value.ndim > 1}
    loaded = load_model(out, model=spec)[0].state_dict()
    assert all(
        torch.equal(loaded[f"network.{name}" if f"network.{name}" in loaded else name], value)
        for name, value in expected.items()
    )
    assert (is_state_dict(tmp_path / "w.pth"), is_state_dict(out)) == (True, False)


@pytest.mark.parametrize("names", [(), ("a", "b", "c"), ("a", "b"), ("a", "b", "c", "d")])
@pytest.mark.parametrize("background", [False, True])
def test_the_first_class_is_background_only_where_it_is_the_one_that_was_named(
    names: tuple[str, ...], background: bool, tmp_path: Path
) -> None:
    spec = parse_spec("unet:0.125")
    torch.save(build_model(spec, 3).state_dict(), tmp_path / "w.pth")
    said = checkpoint_of(
        tmp_path / "w.pth",
        spec,
        tmp_path / "w.safetensors",
        (32, 48),
        (0.1, 0.2, 0.3),
        (0.4, 0.5, 0.6),
        names,
        background,
    )
    card, fits = read_card(tmp_path / "w.safetensors"), len(names) == 3
    assert card.class_names == (names if fits else numbered(3))
    assert card.background == (background and fits)
    assert (card.size, card.mean, card.std) == ((32, 48), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert ("--classes" in said) != fits


def test_no_layer_starts_from_random_weights(tmp_path: Path) -> None:
    spec = parse_spec("unet:0.125")
    tensors = build_model(spec, 3).state_dict()
    del tensors["head.bias"]
    torch.save(tensors, tmp_path / "w.pth")
    with pytest.raises(InputError, match=r"1 tensor missing \(head\.bias\)"):
        checkpoint_of(tmp_path / "w.pth", spec, tmp_path / "w.safetensors", (32, 32), (0.5,) * 3, (0.5,) * 3)
    assert not (tmp_path / "w.safetensors").exists()
