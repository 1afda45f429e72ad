"""Decisions by whether all values are finite are those of finite values, however they are written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fp4deploy.graph.finite import finite
from fp4deploy.graph.replacement import Rewriting

DECISIONS: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda x: torch.isfinite(x).all(),
    lambda x: ~torch.isfinite(x).all(),
    lambda x: torch.isfinite(x).all().logical_not(),
    lambda x: torch.logical_not(torch.isnan(x)).any(),
    lambda x: (~x.isfinite()).any(),
    lambda x: torch.any(torch.bitwise_not(torch.isinf(x))),
    lambda x: (~~x.isnan()).all(),
    lambda x: torch.isnan(x).any().item(),
    lambda x: x.isinf().all(),
)


@pytest.mark.parametrize("number", range(len(DECISIONS)))
def test_decisions_are_those_of_finite_values(number: int) -> None:
    decide, x = DECISIONS[number], torch.tensor([1.0, -2.0])
    with Rewriting(finite()):
        found = [bool(decide(x)), bool(decide(torch.tensor([1.0, float("inf"), float("nan")])))]
    expected = bool(decide(x))
    assert found == [expected, expected]
