"""Which recipes train through FP4 GEMMs, and why the others do not.

All six operands must be quantised, each along the axis that its GEMM contracts: an operand that a backward GEMM reuses
from the forward has blocks along another axis, and one in high precision is no FP4 operand. Both operands of a GEMM
have one format, as a tensor-core instruction takes it.
"""

from __future__ import annotations

from fp4deploy.errors import InputError
from fp4deploy.qat.recipes import RECIPES, Recipe

PRODUCTS = ("emulated", "fp4")
GEMMS = {
    "forward": ("activation", "weight"),
    "dgrad": ("dgrad_gradient", "dgrad_weight"),
    "wgrad": ("wgrad_gradient", "wgrad_activation"),
}


def require_packed(recipe: Recipe) -> None:
    """Refuse a recipe whose GEMMs do not have two packed operands each.

    Raises:
        InputError: every reason, and the recipes of this project that have none.

    >>> require_packed(RECIPES["nvfp4_train"])
    """
    wrong = _reasons(recipe)
    if wrong:
        valid = ", ".join(name for name, known in RECIPES.items() if not _reasons(known))
        raise InputError(
            f"Recipe '{recipe.name}' cannot train with train.products=fp4: {'; '.join(wrong)}. "
            f"Train it with train.products=emulated, or choose one of: {valid}."
        )


def _reasons(recipe: Recipe) -> list[str]:
    if recipe.straight_through:
        return ["its gradients pass straight through, so that dgrad and wgrad have no FP4 operands"]
    operands = recipe.operands()
    wrong = [
        f"{name} is {'not quantised' if spec is None else spec.named}"
        for name, spec in operands.items()
        if spec is None or not spec.in_four_bits
    ]
    wrong += [
        f"{name} rounds 2-D blocks stochastically, which no packing kernel does"
        for name, spec in operands.items()
        if spec and spec.block == "2d" and spec.rounding == "stochastic"
    ]
    for gemm, pair in GEMMS.items():
        formats = {spec.format for name in pair if (spec := operands[name])}
        if len(formats) > 1:
            wrong.append(f"the operands of the {gemm} GEMM have two formats, {' and '.join(sorted(formats))}")
    return wrong
