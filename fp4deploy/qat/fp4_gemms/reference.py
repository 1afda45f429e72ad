"""The three GEMMs of packed operands in plain torch: dequantise, then multiply.

    fprop   Y  = X W^T          both packed along the input channels
    dgrad   dX = G W            both packed along the output channels
    wgrad   dW = G^T X          both packed along the tokens or pixels, one for each column of a filter

Dequantised values are products of an E2M1 value, a block scale and a global scale: for the same codes they are the
values that the emulation multiplies, bit for bit. What differs is the order of the sum. With u = 2^-24, K the length of
the contraction and every product and sum rounded to FP32, a GEMM of these operands in any order differs from the exact
result by at most

    (K + 8) u sum |a_k| |b_k|       of it 6 u for the two scales, where a kernel applies them after the sum

so that two of them differ by at most twice that. An output in FP16 or BF16 is rounded once more.

On a CPU sums are taken in FP32 (float64 for a float64 layer). On a GPU an output in FP16 or BF16 is computed from
operands rounded to that type, as the emulation does; this is what groups and Conv1d use there, and volumes
where no kernel has their geometry.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp4deploy.qat.fp4_gemms.operands import PackedOperand
from fp4deploy.qat.operators.gemms import ConvGemms, LinearGemms

Gemms = LinearGemms | ConvGemms


def fprop(
    x: PackedOperand, weight: PackedOperand, bias: torch.Tensor | None, gemms: Gemms, dtype: torch.dtype
) -> torch.Tensor:
    """Y of `dtype`, in the layout of `gemms.forward`."""
    values = x.dequantize(_accumulate(x, dtype))
    bias = None if bias is None else bias.to(values.dtype)
    return gemms.forward(values, weight.dequantize(values.dtype), bias).to(dtype)


def dgrad(
    gradient: PackedOperand, weight: PackedOperand, gemms: Gemms, x_shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """dX of `dtype`, of `x_shape`."""
    values = gradient.dequantize(_accumulate(gradient, dtype))
    return gemms.dgrad(values, weight.dequantize(values.dtype), values.new_empty(tuple(x_shape))).to(dtype)


def wgrad(
    gradient: PackedOperand, x: PackedOperand, gemms: Gemms, weight_shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """dW of `dtype`, of `weight_shape`; the operands are what `gemms.wgrad` takes, packed."""
    values = gradient.dequantize(_accumulate(gradient, dtype))
    return gemms.wgrad(values, x.dequantize(values.dtype), values.new_empty(weight_shape)).to(dtype)


def _accumulate(operand: PackedOperand, dtype: torch.dtype) -> torch.dtype:
    on_gpu = operand.packed.codes.is_cuda
    return dtype if on_gpu or dtype == torch.float64 else torch.float32
