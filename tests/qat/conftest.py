"""Stochastic rounding without chance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4deploy.formats import philox


@pytest.fixture
def one_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stochastic rounding with the byte 77 everywhere: far from nearest, and the same in any numbering of elements."""

    def constant(shape: torch.Size, axis: int, seed: Any, offset: Any = 0, block: int = 16, device: Any = None) -> Any:
        padded = [-(-size // block) * block if at == axis % len(shape) else size for at, size in enumerate(shape)]
        return torch.full(padded, 77, dtype=torch.uint8, device=device)

    monkeypatch.setattr(philox, "random_bytes", constant)
