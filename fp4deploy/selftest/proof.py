"""What a check hands back, and comparing bytes so that a difference names its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fp4deploy.errors import GateError


@dataclass(frozen=True)
class Proof:
    """What was shown, in a sentence, with its figures."""

    sentence: str
    figures: Mapping[str, float | int | str] = field(default_factory=dict)


def require_same_bytes(found: torch.Tensor, expected: torch.Tensor, what: str) -> int:
    """The number of elements, if all are equal; two NaN are, and zeros of either sign.

    Raises:
        GateError: one differs; names the first, by its index.
    """
    found, expected = found.cpu(), expected.cpu()
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise GateError(f"{what}: {found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}")
    differing = (found != expected) & ~((found != found) & (expected != expected))
    if differing.any():
        at = tuple(differing.nonzero()[0].tolist())
        raise GateError(
            f"{what}: {int(differing.sum())} of {found.numel()} elements differ, the first at {list(at)}: "
            f"{found[at].item()} instead of {expected[at].item()}"
        )
    return found.numel()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected|| in float64."""
    exact = expected.double().cpu()
    return float((found.double().cpu() - exact).norm() / exact.norm().clamp_min(1e-300))
