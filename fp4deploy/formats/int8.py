"""INT8: integers with one FP16 scale for a whole tensor, or one for each slice along an axis, and no zero point.

    s = max(fp16(A / 127), 2^-14)        q = clamp(round(x / s), -128, 127)        x' = q s

The scales are those of `formats.fp8` with another divisor, the codes those of ONNX's QuantizeLinear: rounded to nearest
even, saturated at both ends. The comparison that users know: no block and no exponent, so that one outlier takes the
resolution of all others, and the only format in eight bits of GPUs before SM89.

Source: symmetric quantisation as in TensorRT's explicit quantisation; Jacob et al., "Quantization and Training of
Neural Networks for Efficient Integer-Arithmetic-Only Inference", 2018.
"""

from __future__ import annotations

import torch

from fp4deploy.formats.fp8 import EightBitTensor, scale_of, slice_amax
from fp4deploy.formats.scales import finite_amax

INT8_MAX = 127.0


def quantize_int8(x: torch.Tensor, axis: int | None = None, amax: torch.Tensor | None = None) -> EightBitTensor:
    """Quantise to int8, arguments as of `quantize_fp8`; int8 has no NaN, which becomes 0.

    >>> quantize_int8(torch.tensor([127.0, 17.5, -0.3, -400.0]), amax=torch.tensor(127.0)).codes.tolist()
    [127, 18, 0, -128]
    """
    codes, scale = _rounded(x, axis, amax)
    return EightBitTensor(codes.nan_to_num(0.0).to(torch.int8), scale)


def fake_quantize_int8(
    x: torch.Tensor, axis: int | None = None, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(x' in the dtype of `x`, in-range mask of what a static amax did not clip; None where there is no static one).

    NaN stays NaN here, so that a training that diverges shows it.
    """
    codes, scale = _rounded(x, axis, amax)
    error = (x.to(torch.float32) / scale - codes).abs()
    return (codes * scale).to(x.dtype), None if amax is None else error <= 0.5


def _rounded(x: torch.Tensor, axis: int | None, amax: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if amax is None:
        amax = finite_amax(x) if axis is None else slice_amax(x, axis)
    scale = scale_of(amax, INT8_MAX)
    return (x.to(torch.float32) / scale).round().clamp(-INT8_MAX - 1, INT8_MAX), scale
