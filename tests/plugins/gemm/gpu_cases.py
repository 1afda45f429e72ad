"""What the tests of NVFP4 layers on a GPU share: inputs, poisoned memory, and how results are compared."""

from __future__ import annotations

from typing import Any

import torch

from fp4deploy.formats import Nvfp4Tensor

DEVICE = "cuda"
AMAXES: list[Any] = [None, "dynamic", 2.5]  # weight-only; both packed, with the own amax and with a given one


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16, device: str = DEVICE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def poison() -> None:
    """Fill what the allocator will hand out next with NaN."""
    blocks = [torch.full((1 << n,), float("nan"), device=DEVICE) for n in range(8, 24)]
    del blocks


def same_bytes(found: Any, expected: Nvfp4Tensor) -> None:
    assert isinstance(found, Nvfp4Tensor)
    assert found.shape == expected.shape
    assert torch.equal(found.codes.cpu(), expected.codes.cpu())
    assert torch.equal(found.scales.view(torch.uint8).cpu(), expected.scales.view(torch.uint8).cpu())
    assert torch.equal(found.amax.cpu(), expected.amax.cpu())


def equal(found: Any, expected: Any) -> None:
    if isinstance(expected, Nvfp4Tensor):
        same_bytes(found, expected)
    else:
        assert torch.equal(found, expected)


def close(found: Any, expected: Any, limit: float = 1e-3) -> None:
    assert isinstance(found, torch.Tensor)
    assert found.shape == expected.shape
    assert float((found.double() - expected).norm()) <= limit * float(expected.norm())
