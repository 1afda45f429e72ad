"""What an engine makes of a quantised torch layer, before there is a file to lower.

The rules are those of `lower`, on the layer's own settings instead of ONNX nodes; a test compares the two. An ONNX file
needs no forecast: `lower` gives its plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fp4deploy.export.lowering.decode import NO_GEMM, SINGLE_BLOCK
from fp4deploy.export.lowering.fp8 import why_not_fp8
from fp4deploy.formats import EIGHT_BITS, NVFP4_BLOCK
from fp4deploy.plugins.gemm.dispatch import TAPS
from fp4deploy.qat.layers import TRANSPOSED, QuantizedLayer, zeros_around
from fp4deploy.qat.placement import is_pointwise, is_upsampling
from fp4deploy.qat.plan import LayerPlan
from fp4deploy.rest import FP16, Rest

NO_MX = "TensorRT builds no block scales that are powers of two; packed networks hold them"
BLOCKED = "TensorRT has no FP4 convolution: FP4 weights are decoded for it"


@dataclass(frozen=True)
class Forecast:
    """Precision that the layer multiplies in, precision of its stored weights, and why."""

    compute: str
    weights: str
    reason: str


def forecast(layer: nn.Module, conv: str, rest: Rest = FP16) -> Forecast:
    """The forecast of one quantised layer under a `--conv` mode (`lowering.lower`), in a model with this rest.

    >>> forecast(nn.Conv2d(16, 16, 3, padding=1), "auto").compute
    'FP8'
    >>> forecast(nn.Conv2d(16, 16, 3, padding=1), "qdq").compute
    'FP16'
    >>> forecast(nn.Conv2d(16, 16, 3, padding=1), "gemm").compute
    'FP4'
    """
    if isinstance(layer, QuantizedLayer) and layer.recipe.precision != "FP4":
        return forecast_other(layer, layer.recipe.precision, rest)
    plain, half = rest.label, rest.name == "fp16"
    if conv == "plugin" and half and _is_plugin(layer):
        return Forecast("FP4", "FP4", "plugin: TensorRT has no FP4 convolution")
    if _is_single_block(layer):
        return Forecast(plain, plain, SINGLE_BLOCK)
    if isinstance(layer, nn.Linear):
        return Forecast("FP4", "FP4", "linear layer as an FP4 GEMM")
    if is_upsampling(layer):
        if conv == "qdq":
            return Forecast(plain, "FP4", f"{BLOCKED}; --conv auto makes it an FP4 GEMM")
        return Forecast("FP4", "FP4", "ConvTranspose 2x2 stride 2 as an FP4 GEMM and DepthToSpace")
    assert isinstance(layer.weight, torch.Tensor)
    if not _is_one_gemm(layer) and {*layer.weight.shape[2:]} == {1}:
        return Forecast(plain, plain, NO_GEMM)
    spatial = isinstance(layer, nn.Conv2d) and not is_pointwise(layer) and not why_not_fp8(layer.kernel_size, False)
    if spatial and half and (conv == "fp8" or (conv == "auto" and _is_one_gemm(layer))):
        return Forecast("FP8", "FP8", "no FP4 convolution in TensorRT: an FP8 convolution")
    if _has_phases(layer):
        if conv == "gemm":
            return Forecast("FP4", "FP4", "transposed convolution as im2col, an FP4 GEMM and DepthToSpace")
        return Forecast(plain, "FP4", f"{BLOCKED}; --conv gemm makes it FP4 im2col")
    if not _is_one_gemm(layer):
        return Forecast(plain, "FP4", "TensorRT has no FP4 convolution, and this form is not a single GEMM")
    assert isinstance(layer, nn.Conv2d)
    if is_pointwise(layer):
        return Forecast("FP4", "FP4", "1x1 convolution as an FP4 GEMM")
    if conv == "gemm":
        return Forecast("FP4", "FP4", "convolution as im2col and an FP4 GEMM")
    return Forecast(plain, "FP4", f"{BLOCKED}; --conv gemm makes it FP4 im2col")


def in_fp8(model: nn.Module, plans: Iterable[LayerPlan], conv: str, rest: Rest = FP16) -> tuple[str, ...]:
    """Names of the layers that a plan has in FP4 and an engine of this form multiplies in FP8.

    Trained in FP8 (`prepare(..., fp8=names)`), they are in the engine what they are in training. A layer in FP4 that an
    engine decodes to FP16 keeps its numbers there, and stays as it is.
    """
    fp4 = (plan.name for plan in plans if plan.precision == "FP4")
    return tuple(name for name in fp4 if forecast(model.get_submodule(name), conv, rest).compute == "FP8")


def forecast_other(layer: nn.Module, form: str, rest: Rest = FP16) -> Forecast:
    """The forecast of a layer that is FP8, INT8 or W4A8 in the model, under any `--conv` mode."""
    assert isinstance(layer.weight, torch.Tensor)
    if form.lower() not in EIGHT_BITS:
        return Forecast(rest.label, rest.label, NO_MX)
    if problem := why_not_fp8(layer.weight.shape[2:], isinstance(layer, TRANSPOSED), form):
        return Forecast(rest.label, form, problem)
    return Forecast(form, form, f"{form} as the model has it")


def _is_one_gemm(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv2d) and layer.groups == 1


def _has_phases(layer: nn.Module) -> bool:
    """As `transposed.phases`."""
    return (
        isinstance(layer, nn.ConvTranspose2d)
        and layer.groups == 1
        and tuple(layer.dilation) == (1, 1)
        and len(set(layer.stride)) == 1
        and layer.stride[0] > 1
    )


def _is_single_block(layer: nn.Module) -> bool:
    """As `decode.is_single_block`: one output, one tap, channels that fill one block at most."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    channels, outputs = weight.shape[:2] if isinstance(layer, TRANSPOSED) else weight.shape[1::-1]
    return outputs == 1 and channels <= NVFP4_BLOCK and math.prod(weight.shape[2:]) == 1


def _is_plugin(layer: nn.Module) -> bool:
    """As `plugin_match.read_source`: one group, the same along both axes, as many taps as it takes."""
    if is_upsampling(layer):
        return True
    if not isinstance(layer, nn.Conv2d) or not _is_one_gemm(layer):
        return False
    numbers = (layer.stride, layer.dilation, sum(zeros_around(layer), ()))
    return math.prod(layer.kernel_size) <= TAPS and all(len(set(each)) == 1 for each in numbers)
