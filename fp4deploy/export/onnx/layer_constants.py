"""The constants that a file holds of a quantised layer: codes, block scales and the global amax of weight and input;
of a layer in W4A8 codes and block scales of the weight, in FP8 or INT8 codes and FP16 scales.

Both amaxes are those that runtimes use (`formats.deployed_amax`): an ONNX initialiser is the global scale A / 6E, a
packed file holds A itself, and both describe the same numbers. The global scale stays FP32: in FP16 it would be
subnormal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.formats import (
    EIGHT_BITS,
    NVFP4_BLOCK,
    deployed_amax,
    quantize_mxfp4,
    quantize_nvfp4,
)
from fp4deploy.qat.experts import QuantExperts, contracted
from fp4deploy.qat.layers import TRANSPOSED, QuantizedLayer
from fp4deploy.qat.plan import crossed_groups
from fp4deploy.qat.recipes import MXFP8, QuantSpec

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, kw_only=True)
class BlockConstants:
    """What the file holds of one layer whose operands have blocks; in this class W4A8, MXFP4 weights and MXFP8 inputs.

    codes: uint8 [O, K/2] with K = KH*KW*C, C whole blocks, low nibble first.
    scales: one a block [O, K/32], uint8, E8M0 bytes.
    shape: (O, KH, KW, C) of the dequantised weight, (O, C) of a linear layer.
    order: permutation from there to the operator's own order.
    channel_axis: the axis of the input that blocks run along.
    channels: the input's channels, padded to whole blocks (with groups: those of all groups).
    """

    codes: NDArray[np.uint8]
    scales: NDArray[Any]
    shape: tuple[int, ...]
    order: tuple[int, ...]
    channel_axis: int
    channels: int


@dataclass(frozen=True, kw_only=True)
class LayerConstants(BlockConstants):
    """What the file holds of one layer in NVFP4: blocks of 16, scales float8_e4m3fn [O, K/16].

    weight_amax, input_amax: the fp32 global amaxes as deployed.
    e4m3_max: largest block scale of the weight, E: 448, or 256 with 4/6. The input's is 448.
    """

    weight_amax: Any  # np.float32; of experts one each
    input_amax: np.float32
    e4m3_max: int


@dataclass(frozen=True)
class EightBitConstants:
    """What the file holds of one layer in FP8 or INT8.

    codes: float8_e4m3fn or int8 in the operator's order: [O, C, KH, KW], transposed [C, O, KH, KW], a linear layer's
        [C, O].
    scales: float16 [O], one an output channel. axis: where the output channels lie in `codes`.
    input_scale: float16, of the whole input.
    """

    codes: NDArray[Any]
    scales: NDArray[np.float16]
    axis: int
    input_scale: np.float16

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight that the operator reads."""
        return self.codes.shape


Constants = BlockConstants | EightBitConstants


def layer_constants(name: str, layer: QuantizedLayer) -> Constants:
    """Quantise the FP32 weight of one layer exactly as `formats` does: blocks tap by tap, eight bits by output channel.

    Raises:
        InputError: the layer was never calibrated, its recipe has no static engine form, or a value is not finite.
    """
    recipe = layer.recipe
    if recipe.weight is not None and recipe.weight.in_eight_bits and layer.is_static:
        return _eight_bit_constants(name, layer, recipe.weight.format)
    if recipe.weight is not None and (recipe.activation, recipe.weight.format) == (MXFP8, "mxfp4"):
        return _mixed_constants(name, layer, recipe.weight)
    if recipe.weight is None or not layer.is_static or recipe.weight.format != "nvfp4" or recipe.weight.row_scaled:
        raise InputError(
            f"{name}: recipe '{recipe.name}' does not quantise weights to NVFP4 and activations with a static global "
            "scale, and an engine needs both. Train with --recipe nvfp4_qat."
        )
    if recipe.activation is not None and recipe.activation.four_over_six:
        raise InputError(
            f"{name}: recipe '{recipe.name}' chooses 4 or 6 for activations too, which no engine does while it runs. "
            "Train with --recipe nvfp4_4o6_weight_qat."
        )
    _require_whole_groups(name, layer)
    amax, weight = _amax_and_weight(name, layer)
    quantized = quantize_nvfp4(
        _taps_first(layer, weight), block=recipe.weight.block, four_over_six=recipe.weight.four_over_six
    )
    scales = _rows_first(quantized.scales.view(torch.uint8)).view(ml_dtypes.float8_e4m3fn)
    return LayerConstants(
        scales=scales,
        weight_amax=deployed_amax(np.float32(quantized.amax.item()), quantized.e4m3_max),
        input_amax=deployed_amax(np.float32(amax)),
        e4m3_max=quantized.e4m3_max,
        **_places(layer, quantized.codes),
    )


def _mixed_constants(name: str, layer: QuantizedLayer, spec: QuantSpec) -> BlockConstants:
    """Of a layer in W4A8: MXFP4 tap by tap."""
    _require_whole_groups(name, layer)
    weight = _finite_weight(name, layer)
    quantized = quantize_mxfp4(_taps_first(layer, weight), spec.scale_rule)
    return BlockConstants(scales=_rows_first(quantized.scales), **_places(layer, quantized.codes))


def _require_whole_groups(name: str, layer: QuantizedLayer) -> None:
    if reason := crossed_groups(layer, layer.recipe):
        raise InputError(f"{name}: {reason}. Leave it unquantised: exclude=['{name}'].")


def _places(layer: QuantizedLayer, codes: torch.Tensor) -> dict[str, Any]:
    """Codes uint8 [KH, KW, O, C/2] in the file's order, and the shapes around them."""
    rows, channels = codes.shape[-2], 2 * codes.shape[-1]
    return {
        "codes": _rows_first(codes),
        "shape": (rows, *layer.weight.shape[2:], channels),
        "order": _operator_order(layer),
        "channel_axis": -1 if isinstance(layer, nn.Linear) else 1,
        "channels": channels * (layer.groups if isinstance(layer, CONVOLUTIONS) else 1),
    }


def expert_constants(name: str, experts: QuantExperts, own: str) -> LayerConstants:
    """Weights [E, N, K] of experts, `name.own`, each quantised with its own amax, as `QuantExperts` reads them.

    Returns:
        With `weight_amax` [E]; codes of E N rows. There is no input: what experts multiply is not quantised.

    Raises:
        InputError: no NVFP4, a K that is not whole blocks, or a value that is not finite.
    """
    weight, spec = cast(torch.Tensor, experts._parameters[own]).detach().float(), experts.recipe.weight
    transposed = contracted(experts) == 1
    weight = weight.mT if transposed else weight
    name = f"{name}.{own}"
    if spec is None or spec.format != "nvfp4" or spec.row_scaled or weight.shape[-1] % NVFP4_BLOCK:
        raise InputError(
            f"{name}: a file holds experts in NVFP4, each with one global scale and in whole blocks of {NVFP4_BLOCK}; "
            f"these are [E, N, {weight.shape[-1]}] in {experts.recipe.name}. Leave them in high precision: "
            "exclude=['experts']."
        )
    if not torch.isfinite(weight).all():
        raise InputError(f"{name} holds NaN or Inf. Export an earlier checkpoint.")
    packed = [quantize_nvfp4(each, block=spec.block, four_over_six=spec.four_over_six) for each in weight.cpu()]
    e4m3_max = packed[0].e4m3_max
    return LayerConstants(
        codes=torch.cat([each.codes for each in packed]).numpy(),
        scales=torch.cat([each.scales.view(torch.uint8) for each in packed]).numpy().view(ml_dtypes.float8_e4m3fn),
        weight_amax=np.array([deployed_amax(np.float32(each.amax.item()), e4m3_max) for each in packed], np.float32),
        input_amax=np.float32(0),
        e4m3_max=e4m3_max,
        shape=tuple(weight.shape),
        order=(0, 2, 1) if transposed else (0, 1, 2),
        channel_axis=-1,
        channels=weight.shape[-1],
    )


def _amax_and_weight(name: str, layer: QuantizedLayer) -> tuple[float, torch.Tensor]:
    amax = float(cast(torch.Tensor, layer.input_amax))
    if not 0 < amax < float("inf"):
        raise InputError(
            f"{name}: its activations were never calibrated (input_amax is {amax:g}). "
            "Show it data first: fp4deploy.calibrate(model, images), or fp4deploy train --models nvfp4. A layer "
            f"that is never called, as its module multiplies with the weight itself, is left out: exclude=['{name}']"
        )
    return amax, _finite_weight(name, layer)


def _finite_weight(name: str, layer: QuantizedLayer) -> torch.Tensor:
    weight = layer.weight.detach().to(torch.float32)
    if not torch.isfinite(weight).all():
        raise InputError(f"{name}: its weight holds NaN or Inf. Export an earlier checkpoint.")
    return weight


def _eight_bit_constants(name: str, layer: QuantizedLayer, form: str) -> EightBitConstants:
    amax, weight = _amax_and_weight(name, layer)
    axis = layer.gemms().weight_axes[0]
    eight = EIGHT_BITS[form]
    found = eight.quantize(weight, axis)
    codes, scales = found.codes.view(torch.uint8), found.scale.flatten().to(torch.float16)
    if isinstance(layer, nn.Linear):
        codes, axis = codes.T, 1
    scale = eight.scale(torch.tensor(amax))
    if not scale.isfinite():
        raise InputError(
            f"{name}: its input reaches {amax:.6g}, and scales of {form.upper()} are FP16. Leave it out: "
            f"exclude=['{name}']"
        )
    return EightBitConstants(
        codes=codes.contiguous().cpu().numpy().view(str(eight.dtype).removeprefix("torch.")),
        scales=scales.cpu().numpy(),
        axis=axis,
        input_scale=np.float16(scale.item()),
    )


def _taps_first(layer: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """[KH, KW, O, C], as many taps' axes as the layer has (a linear layer: [1, 1, O, C])."""
    taps = range(2, weight.ndim)
    if isinstance(layer, TRANSPOSED):
        return weight.permute(*taps, 1, 0)
    if isinstance(layer, CONVOLUTIONS):
        return weight.permute(*taps, 0, 1)
    return weight[None, None]


def _rows_first(x: torch.Tensor) -> NDArray[np.uint8]:
    """uint8 [KH, KW, O, J] -> [O, KH*KW*J]."""
    return cast("NDArray[np.uint8]", x.movedim(-2, 0).flatten(1).contiguous().numpy())


def _operator_order(layer: nn.Module) -> tuple[int, ...]:
    axes = len(getattr(layer, "kernel_size", ()))
    if isinstance(layer, TRANSPOSED):
        return (axes + 1, 0, *range(1, axes + 1))
    if isinstance(layer, CONVOLUTIONS):
        return (0, axes + 1, *range(1, axes + 1))
    return (1, 0)
