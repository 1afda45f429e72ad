"""The choice of layers as an integer linear programme, solved exactly (scipy's HiGHS).

x_l = 1 puts layer l in FP4. Errors of different layers are close to independent, so their powers add: the error of a
placement is estimated as sum_l e_l x_l, with e_l the squared error of the logits that layer l alone causes over their
power. Either

    least_cost    min  sum_l (cost of l in FP4 or FP16)    with  sum_l e_l x_l <= error
    least_error   min  sum_l e_l x_l                       with  sum_l (cost of l in FP4 or FP16) <= cost

Estimates choose, measurements decide: the search measures the mIoU of what the solver proposes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


def least_cost(errors: Mapping[str, float], saved: Mapping[str, float], error: float) -> frozenset[str]:
    """Layers in FP4 that save most within an error; `saved`: cost in FP16 minus cost in FP4."""
    names = list(errors)
    chosen = _solve(-_array(saved, names), _array(errors, names), error)
    return frozenset(name for name, taken in zip(names, chosen, strict=True) if taken)


def least_error(errors: Mapping[str, float], saved: Mapping[str, float], at_least: float) -> frozenset[str] | None:
    """Layers in FP4 with the least error that save at least so much; None where all of them save less."""
    names = list(errors)
    savings = _array(saved, names)
    if savings[savings > 0].sum() < at_least:
        return None
    chosen = _solve(_array(errors, names), -savings, -at_least)
    return frozenset(name for name, taken in zip(names, chosen, strict=True) if taken)


def _array(values: Mapping[str, float], names: list[str]) -> NDArray[np.float64]:
    return np.array([values[name] for name in names], np.float64)


def _solve(cost: NDArray[np.float64], row: NDArray[np.float64], most: float) -> NDArray[np.bool_]:
    """min cost x with row x <= most, x in {0, 1}; scaled, because the solver's tolerances are absolute."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    scale, size = np.abs(row).max(initial=0.0) or 1.0, np.abs(cost).max(initial=0.0) or 1.0
    found = milp(
        cost / size,
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint((row / scale)[None], ub=most / scale),
    )
    if found.x is None:
        raise RuntimeError(f"the solver found no placement: {found.message}")
    return found.x > 0.5
