"""Quantisation-aware training: recipes, straight-through functions, layers, and `prepare`."""

from fp4deploy.qat.calibration import calibrate_percentile
from fp4deploy.qat.fp4_gemms.grouped import grouped_linear
from fp4deploy.qat.layers import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
    QuantizedLayer,
    QuantLinear,
)
from fp4deploy.qat.load import deployed, load_model, prepare_as, round_to_deployed
from fp4deploy.qat.plan import LayerPlan, layer_plan
from fp4deploy.qat.prepare import calibrate, prepare, quantized_layers, restore, set_products, unquantized
from fp4deploy.qat.recipes import RECIPES, QuantSpec, Recipe, find_recipe

__all__ = [
    "RECIPES",
    "LayerPlan",
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
    "QuantLinear",
    "QuantSpec",
    "QuantizedLayer",
    "Recipe",
    "calibrate",
    "calibrate_percentile",
    "deployed",
    "find_recipe",
    "grouped_linear",
    "layer_plan",
    "load_model",
    "prepare",
    "prepare_as",
    "quantized_layers",
    "restore",
    "round_to_deployed",
    "set_products",
    "unquantized",
]
