"""Sizes as expressions."""

from __future__ import annotations

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from fp4deploy.graph.sizes import LIMIT, Size, SizeError, axes_of, evaluate, size_of, text


@pytest.mark.parametrize(
    ("size", "value"),
    [
        (7, 7),
        (("x.2",), 33),
        ((2, "x.2", 2, "//", "*"), 32),
        (("x.2", 5, "%"), 3),
        (("x.2", 1, "-"), 32),
        ((3, 9, "max"), 9),
        ((3, 9, "min"), 3),
    ],
)
def test_values(size: Size, value: int) -> None:
    assert evaluate(size, {"x.2": 33}) == value


@pytest.mark.parametrize(
    ("size", "cause"),
    [
        ((), "is no expression"),
        ((1, 2), "is no expression"),
        (("+",), "no two operands"),
        ((1, 0, "//"), "division by zero"),
        (("y.1",), "no input has an axis 'y.1'"),
        ((LIMIT, 2, "*"), "beyond 2"),
    ],
)
def test_what_has_no_value(size: Size, cause: str) -> None:
    with pytest.raises(SizeError, match=cause):
        evaluate(size, {"x.2": 33})


def test_axes_and_text() -> None:
    assert axes_of([3, ("x.2", 2, "//"), ("y.0",)]) == {"x.2", "y.0"}
    assert text(("x.2", 2, "//")) == "x.2 2 //"


@pytest.mark.parametrize("n", [2, 7, 33])
def test_expressions_of_torch_have_the_values_that_they_have_there(n: int) -> None:
    x = sympy.Symbol("s0", integer=True, positive=True)
    expressions = (
        *(x**power for power in range(1, 6)),
        3 * x**2 + 2 * x - 5,
        FloorDiv(x + 3, 2) * x,
        PythonMod(-x, 4) + Mod(x, 3),
        sympy.Max(2 * x, 40) - sympy.Min(x, 9),
        FloorDiv(x - 1, 2) ** 2 + 1,
    )
    for expression in expressions:
        assert evaluate(size_of(expression, {x: ("x.2",)}), {"x.2": n}) == int(expression.subs(x, n)), expression
