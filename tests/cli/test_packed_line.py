"""The line that `export --format packed` prints: a network of one size says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fp4deploy.cli.commands.stages import export
from torch import nn

from fp4deploy.export import to_packed
from fp4deploy.packed import packed_file


class Ramp(nn.Module):
    def __init__(self, size: Any = None) -> None:
        super().__init__()
        self.conv, self.size = nn.Conv2d(3, 8, 1), size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y if self.size is None else y * torch.ones(self.size)


@pytest.mark.parametrize("size", [None, 12])
def test_a_fixed_size_is_said(size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    file = packed_file(Path("own.fp4"), None, *to_packed.pack_model(Ramp(size), torch.zeros(1, 3, 8, 12)))
    monkeypatch.setattr(to_packed, "pack", lambda *_, **__: to_packed.PackedResult(file, None))
    line = export._packed(Path("best.safetensors"), Path("own.fp4"), None, 1, False, None, None)
    assert (", for RGB images [N, 3, H, 12] alone" in line) == (size is not None)
    assert ("alone" in line) == (size is not None)
