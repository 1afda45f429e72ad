"""Recipes: which operands of a layer's forward product are quantised, and how.

`nvfp4_qat` quantises what an inference engine quantises: the weights (with their own amax, recomputed each step) and
the activations (with a static global scale, tracked in training). Gradients stay in high precision and pass straight
through.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp4deploy.errors import InputError, suggest


@dataclass(frozen=True)
class QuantSpec:
    """How one operand is quantised.

    block: "1d" (16 along the contraction axis) or "2d" (16 x 16 over output and input channels; weights only).
    scale: "dynamic" (global scale from the tensor itself) or "static" (from the tracked amax).
    """

    block: str = "1d"
    scale: str = "dynamic"


@dataclass(frozen=True)
class Recipe:
    """Quantisers of the forward product Y = Q(X) Q(W^T); None leaves an operand in high precision.

    amax_decay: the tracked activation amax after a step is max(amax of the batch, amax_decay * previous).
    """

    name: str
    activation: QuantSpec | None
    weight: QuantSpec | None
    amax_decay: float = 0.99


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("nvfp4_qat", activation=QuantSpec(scale="static"), weight=QuantSpec()),
        Recipe("nvfp4_qat_2d", activation=QuantSpec(scale="static"), weight=QuantSpec(block="2d")),
    )
}


def find_recipe(recipe: str | Recipe) -> Recipe:
    """Look a recipe up by name; a `Recipe` is returned as it is.

    Raises:
        InputError: there is no recipe of that name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise InputError(f"Unknown recipe '{recipe}'.{suggest(recipe, RECIPES)} Valid recipes: {', '.join(RECIPES)}.")
    return RECIPES[recipe]
