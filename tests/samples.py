"""Long lists of cases: `make test` runs a sample of them, `make emulate` all (marker `variants`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def sample(*lists: Iterable[Any], every: int) -> list[ParameterSet]:
    """All combinations of the values of some lists; of these every so many-th diagonal is in the sample.

    With `every` no larger than the shortest list, each value of each list is in the sample.

    >>> [case.values for case in sample("ab", [1, 2], every=2) if not case.marks]
    [('a', 1), ('b', 2)]
    """
    cases = []
    for case in itertools.product(*(list(enumerate(each)) for each in lists)):
        diagonal = sum(number * (-1) ** at for at, (number, _) in enumerate(case))
        marks = () if diagonal % every == 0 else (pytest.mark.variants,)
        cases.append(pytest.param(*(value for _, value in case), marks=marks))
    return cases
