"""Turn layers into quantised ones in place, and back; set static scales. `plan` chooses the layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fp4deploy.errors import InputError
from fp4deploy.graph.modes import evaluating
from fp4deploy.qat.attention import close_attention, opened
from fp4deploy.qat.batches import applied, arguments_of, batches_of
from fp4deploy.qat.computed import plain_class, quantized_class
from fp4deploy.qat.ends import Inputs
from fp4deploy.qat.experts import PRECISION as EXPERTS
from fp4deploy.qat.experts import attach, detach, experts_of
from fp4deploy.qat.fp4_gemms.requirements import PRODUCTS, require_packed
from fp4deploy.qat.layers import QUANTIZED, QuantizedLayer
from fp4deploy.qat.plan import LayerPlan, formats_of, is_gemm, is_quantized, planned, recipe_of
from fp4deploy.qat.ranges import Ranges
from fp4deploy.qat.recipes import Recipe, find_recipe
from fp4deploy.qat.selection import Selection
from fp4deploy.rest import rest_of


def prepare(
    model: nn.Module,
    recipe: str | Recipe = "nvfp4_qat",
    include: Selection = None,
    exclude: Selection = None,
    *,
    example_inputs: Inputs | None = None,
    **formats: Selection,
) -> nn.Module:
    """Fake-quantise the layers that `layer_plan` chooses, in place; parameters, names, biases and hooks stay.

    A prepared model can be prepared again: with another recipe for the same layers, or for others by `include` or
    `exclude`; `fp8`, `int8` and `w4a8` choose those in these `formats`, and `example_inputs` is as of `layer_plan`.
    Static scales that were calibrated stay. `restore` undoes it.

    Raises:
        InputError: unknown recipe, a pattern that matches nothing, or a model with no layer to quantise.

    >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    >>> [type(layer).__name__ for layer in prepare(model, "nvfp4_qat")]
    ['Linear', 'ReLU', 'QuantLinear', 'ReLU', 'Linear']
    >>> print(str(prepare(nn.Linear(64, 32))).partition("nvfp4_qat: ")[2])
    X NVFP4 RN static along C, W^T NVFP4 RN along C, G -, W -, G^T -, X (dW) -, straight-through)
    """
    chosen = find_recipe(recipe)
    with opened(model, is_quantized):
        plans = {plan.name: plan for plan in planned(model, chosen, include, exclude, formats, example_inputs)}
        names = [name for name, plan in plans.items() if plan.precision != "FP16"]
        own = formats_of(formats, plans)
        if not names:
            raise InputError(_nothing_to_quantize(model, plans))
        calibrated = {name: layer.input_amax for name, layer in quantized_layers(model).items()}
        unquantized(model)
        for name in names:
            layer = model.get_submodule(name)
            if plans[name].precision == EXPERTS:
                attach(layer, chosen)
                continue
            layer.__class__ = quantized_class(layer)
            layer.attach(recipe_of(chosen, name, layer, own), calibrated.get(name), name)  # type: ignore[operator]
        return model


def _nothing_to_quantize(model: nn.Module, plans: Mapping[str, LayerPlan]) -> str:
    """Why `prepare` has nothing to do, layer by layer, and what would change that."""
    possible = [plans[name] for name, layer in model.named_modules() if name in plans and is_gemm(layer)]
    if not possible:
        kinds = ", ".join(kind.__name__ for kind in QUANTIZED)
        return f"This model has no layer that FP4 could compute: it needs one of {kinds}."
    listed = "; ".join(f"{plan.name}: {plan.reason}" for plan in possible[:4])
    more = f"; and {len(possible) - 4} more" if len(possible) > 4 else ""
    return (
        f"Every layer of this model stays in FP16 ({listed}{more}). Name those to quantise: include=[NAME, ...], or "
        "--set quant.include=[NAME]."
    )


def set_products(model: nn.Module, products: str) -> nn.Module:
    """Choose, in place, how the layers of a prepared model multiply: "emulated" or "fp4" (`fp4_gemms`).

    Raises:
        InputError: another name, or a recipe that cannot train through FP4 GEMMs, with the reasons.

    >>> model = prepare(nn.Sequential(nn.Linear(64, 32)), "nvfp4_train", include="0")
    >>> set_products(model, "fp4")[0].products
    'fp4'
    """
    if products not in PRODUCTS:
        raise InputError(f"Unknown products '{products}'. Valid: {', '.join(PRODUCTS)}.")
    layers = quantized_layers(model).values()
    if products == "fp4":
        for recipe in {layer.recipe for layer in layers}:
            require_packed(recipe)
    for layer in layers:
        layer.products = products
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `prepare`, in place: every layer is the torch class it was, with its parameters as they are now.

    >>> model = prepare(nn.Sequential(nn.Linear(64, 32)), include="0")
    >>> restore(model)[0]
    Linear(in_features=64, out_features=32, bias=True)
    """
    unquantized(model)
    close_attention(model)
    return model


def unquantized(model: nn.Module) -> nn.Module:
    """`restore`, in place, but the projections of attention stay layers: every name of a layer is still one."""
    for layer in quantized_layers(model).values():
        layer.detach()
        layer.__class__ = plain_class(layer)  # type: ignore[assignment]
    for experts in experts_of(model).values():
        detach(experts)
    return model


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """The quantised layers of a prepared model by name, in the model's order."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}


@torch.no_grad()
def calibrate(model: nn.Module, batches: torch.Tensor | Iterable[object], rest: str = "fp16") -> None:
    """Set every `input_amax` to the largest magnitude its layer sees over `batches`, quantisers switched off.

    Warns of what is on the way too large for FP16, or what else the rest will be deployed in (`ranges`).

    Args:
        batches: one batch as a tensor, such as [N, 3, H, W], or a dict of arguments, or an iterable of batches, on the
            model's device. Of a batch that is a tuple or a list, such as (images, labels) of a DataLoader, the first
            elements are the inputs: as many as the forward needs (`batches.arguments_of`).
        rest: "fp16", "bf16" or "fp32" (`fp4deploy.rest`).

    Raises:
        InputError: a batch has fewer elements than the forward needs, or holds NaN or Inf.

    >>> model = prepare(nn.Sequential(nn.Linear(64, 32)), "nvfp4_qat", include="0")
    >>> calibrate(model, [torch.ones(8, 64), torch.full((8, 64), 3.0)])
    >>> model[0].input_amax
    tensor(3.)
    >>> calibrate(model, torch.full((8, 64), 4.0))
    >>> model[0].input_amax
    tensor(4.)
    """
    layers = quantized_layers(model).values()
    ranges = Ranges(model, rest_of(rest))
    try:
        for layer in layers:
            layer.observing = True
        for experts in experts_of(model).values():
            experts.quantizing = False
        with evaluating(model), ranges if not _is_compiled(model) else nullcontext():
            for number, batch in enumerate(batches_of(batches), start=1):
                given = arguments_of(model, batch)
                _require_numbers(given, number)
                applied(model, given)
    finally:
        for layer in layers:
            layer.observing = False
        for experts in experts_of(model).values():
            experts.quantizing = True
    if beyond := ranges.beyond():
        warnings.warn(beyond, stacklevel=3)


def _require_numbers(given: object, number: int) -> None:
    """Refuse NaN and Inf, which calibration would leave out; a mask, which is never the only tensor, may hold -Inf."""
    tensors = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
    numbers = (x for x in tensors if x.is_floating_point())
    if not all(bool(((x < torch.inf) if len(tensors) > 1 else x.isfinite()).all()) for x in numbers):
        raise InputError(
            f"Batch {number} of the calibration holds NaN or Inf, of which no scale could be made. Look for images "
            "that were divided by a standard deviation of 0, or leave them out."
        )


def _is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile runs a part of the model, of which no operator is seen."""
    return any(hasattr(module, "_orig_mod") for module in model.modules())
