"""Initial weights whose names have what a trainer puts before them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.models.initial import load_initial


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))


@pytest.mark.parametrize(
    ("start", "more"),
    [
        ("module.", {}),
        ("_orig_mod.", {}),
        ("module._orig_mod.", {}),
        ("_orig_mod.module.", {}),
        ("model.", {}),
        ("net.", {"criterion.weight": torch.ones(2)}),
        ("model._orig_mod.", {}),
        ("module.", {"n_averaged": torch.tensor(3)}),
    ],
)
@pytest.mark.parametrize("container", [None, "state_dict"])
def test_what_a_trainer_puts_before_the_names_is_taken_off(
    tmp_path: Path, start: str, more: dict[str, torch.Tensor], container: str | None
) -> None:
    source, found = network(), network()
    tensors: Any = {f"{start}{name}": value for name, value in source.state_dict().items()} | more
    torch.save({container: tensors} if container else tensors, tmp_path / "w.pth")
    load_initial(found, tmp_path / "w.pth")
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in source.state_dict().items())


def test_another_network_is_refused_as_before(tmp_path: Path) -> None:
    torch.save({"model.other.weight": torch.ones(2)}, tmp_path / "w.pth")
    with pytest.raises(InputError, match=r"tensor unknown \(model\.other\.weight"):
        load_initial(network(), tmp_path / "w.pth")


def test_a_network_that_has_such_a_child_keeps_its_names(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

    source, found = Outer(), Outer()
    torch.save(source.state_dict(), tmp_path / "w.pth")
    load_initial(found, tmp_path / "w.pth")
    assert torch.equal(source.model[0].weight, found.model[0].weight)
