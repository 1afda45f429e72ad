"""The choice of precisions as an integer linear programme, solved exactly (scipy's HiGHS).

x_lp = 1 puts layer l into precision p, FP4, W4A8, FP8 or INT8, at most one of them; a layer without one is FP16. Errors
of different layers are close to independent, so their powers add: the error of a placement is estimated as sum e_lp
x_lp, with e_lp the squared error of the logits that layer l alone causes in precision p, over their power. Either

    least_cost    max  sum (saved_lp) x_lp    with  sum e_lp x_lp <= error         sum_p x_lp <= 1
    least_error   min  sum e_lp x_lp          with  sum (saved_lp) x_lp >= saving  sum_p x_lp <= 1

with saved_lp the cost of l in FP16 minus that in p. Estimates choose, measurements decide: the search measures the mIoU
of what the solver proposes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Option = tuple[str, str]  # layer, precision
Placement = frozenset[Option]


def least_cost(errors: Mapping[Option, float], saved: Mapping[Option, float], error: float) -> Placement:
    """The placement that saves most within an error; `saved`: cost in FP16 minus cost in the option's precision."""
    options = list(errors)
    chosen = _solve(options, -_array(saved, options), _array(errors, options), error)
    return frozenset(option for option, taken in zip(options, chosen, strict=True) if taken)


def least_error(errors: Mapping[Option, float], saved: Mapping[Option, float], at_least: float) -> Placement | None:
    """The placement with the least error that saves at least so much; None where none does."""
    options = list(errors)
    most: dict[str, float] = {}
    for layer, precision in options:
        most[layer] = max(most.get(layer, 0.0), saved[layer, precision])
    if sum(most.values()) < at_least:
        return None
    chosen = _solve(options, _array(errors, options), -_array(saved, options), -at_least)
    return frozenset(option for option, taken in zip(options, chosen, strict=True) if taken)


def _array(values: Mapping[Option, float], options: list[Option]) -> NDArray[np.float64]:
    return np.array([values[option] for option in options], np.float64)


def _solve(
    options: list[Option], cost: NDArray[np.float64], row: NDArray[np.float64], most: float
) -> NDArray[np.bool_]:
    """min cost x with row x <= most, one precision a layer, x in {0, 1}; scaled: the tolerances are absolute."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    layers = list(dict.fromkeys(layer for layer, _ in options))
    once = np.array([[layer == own for own, _ in options] for layer in layers], np.float64)
    scale, size = np.abs(row).max(initial=0.0) or 1.0, np.abs(cost).max(initial=0.0) or 1.0
    found = milp(
        cost / size,
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint((row / scale)[None], ub=most / scale), LinearConstraint(once, ub=1)],
    )
    if found.x is None:
        raise RuntimeError(f"the solver found no placement: {found.message}")
    return found.x > 0.5
