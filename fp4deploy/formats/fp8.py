"""FP8: E4M3 elements with one FP16 scale for a whole tensor, or one for each slice along an axis (a channel).

    s = max(fp16(A / 448), 2^-14)        q = E4M3(clamp(x / s, -448, 448))        x' = q s

A is the amax of the tensor or slice. Scales are FP16, as ONNX's QuantizeLinear of an FP16 tensor and TensorRT take
them; below FP16's smallest normal number they would lose bits, so that is the smallest one. All else is FP32, rounded
to nearest even, in the order written. An element has four significant bits and a range of 2^18, so outliers cost far
less than in FP4 and no blocks are needed; a weight takes one byte instead of 0.56.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; per-channel weights and per-tensor activations as in
TensorRT's explicit quantisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp4deploy.formats.constants import E4M3_MAX
from fp4deploy.formats.scales import finite_amax

HALFWAY = 464.0  # between 448 and the 480 that would follow it
SMALLEST_SCALE = 2.0**-14  # FP16's smallest normal number


@dataclass(frozen=True)
class EightBitTensor:
    """codes: float8_e4m3fn (of `formats.int8` int8), shaped like what was quantised; scale: float32 with FP16 values,
    broadcastable to it.
    """

    codes: torch.Tensor
    scale: torch.Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """q s, rounded to `dtype`."""
        return (self.codes.to(torch.float32) * self.scale).to(dtype)


def scale_of(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The FP16 scale that maps an amax to the largest code, float32 like `amax`; NaN stays NaN."""
    scale = (amax.to(torch.float32) / largest).to(torch.float16).to(torch.float32)
    return torch.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)


def fp8_scale(amax: torch.Tensor) -> torch.Tensor:
    """The scale of an amax, float32 like `amax`; NaN stays NaN.

    >>> fp8_scale(torch.tensor([448.0, 1.0, 0.0])).tolist()
    [1.0, 0.002231597900390625, 6.103515625e-05]
    """
    return scale_of(amax, E4M3_MAX)


def quantize_fp8(x: torch.Tensor, axis: int | None = None, amax: torch.Tensor | None = None) -> EightBitTensor:
    """Quantise to E4M3.

    Args:
        x: floating point, any shape.
        axis: one scale for each index of this axis; None for one scale.
        amax: static, float32 []; by default that of `x` or of each slice.

    >>> quantize_fp8(torch.tensor([448.0, 17.0, -0.3])).dequantize().tolist()
    [448.0, 16.0, -0.3125]
    """
    if amax is None:
        amax = finite_amax(x) if axis is None else slice_amax(x, axis)
    return quantize_fp8_by(x, fp8_scale(amax))


def quantize_fp8_by(x: torch.Tensor, scale: torch.Tensor) -> EightBitTensor:
    """Quantise to E4M3 by a scale that is known, `fp8_scale` of an amax.

    >>> quantize_fp8_by(torch.tensor([3.0, 900.0]), torch.tensor(1.0)).dequantize().tolist()
    [3.0, 448.0]
    """
    codes = (x.to(torch.float32) / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return EightBitTensor(codes, scale)


def fake_quantize_fp8(
    x: torch.Tensor, axis: int | None = None, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(x' in the dtype of `x`, in-range mask of what a static amax did not clip; None where there is no static one).

    In range is what rounds to a value within 448 by itself, up to 464: an FP16 scale may lie a little below A / 448.
    """
    found = quantize_fp8(x, axis, amax)
    in_range = None if amax is None else x.abs().to(torch.float32) <= HALFWAY * found.scale
    return found.dequantize(x.dtype), in_range


def slice_amax(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Largest finite magnitude of each slice, shaped to broadcast."""
    magnitude = x.abs().to(torch.float32)
    magnitude = torch.where(torch.isfinite(magnitude), magnitude, 0.0)
    others = [at for at in range(x.ndim) if at != axis % x.ndim]
    return magnitude.amax(others, keepdim=True) if others else magnitude
