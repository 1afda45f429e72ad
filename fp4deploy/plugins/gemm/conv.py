"""Convolutions in NVFP4: the public function. torch's shapes outside, packed NHWC inside.

    cache = fp4_quantize(conv.weight, conv.bias)
    y = fp4_conv2d(x, cache, padding=1)                        NCHW to NCHW in channels_last
    q = fp4_conv2d(x, cache, padding=1, relu=True, out_amax=6.0)      packed [N, OH, OW, O] for the next
    y = fp4_conv2d(q, other)

The implicit GEMM contracts channels, so blocks of 16 run along them. Packing reads contiguous and channels_last tensors
without a copy; any other tensor is copied first. The result is a view of the kernel's output, [N, OH, OW, O]. Both
operands are packed (W4A4): there is no weight-only convolution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import FourOverSix, Nvfp4Tensor
from fp4deploy.plugins.gemm.dispatch import conv2d
from fp4deploy.plugins.gemm.operands import InputAmax, output_dtype, pack, refuse_gradients, scalar
from fp4deploy.plugins.gemm.reference import Output
from fp4deploy.plugins.gemm.weight_cache import FP4WeightCache, fp4_quantize


def fp4_conv2d(
    x: torch.Tensor | Nvfp4Tensor,
    weight: torch.Tensor | Nvfp4Tensor | FP4WeightCache,
    bias: torch.Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    input_amax: InputAmax = "dynamic",
    relu: bool = False,
    dtype: torch.dtype | None = None,
    out_amax: float | torch.Tensor | None = None,
    four_over_six: FourOverSix | None = None,
) -> Output:
    """relu(conv2d(x, weight) + bias), groups = 1, zero padding.

    Args:
        x: [N, I, H, W] in any float dtype and memory format, or packed [N, H, W, I].
        weight: [O, I, KH, KW], packed [O, KH, KW, I], or the cache of one; at most 49 taps.
        bias: [O]; a cache has its own.
        stride: one number for both directions, or two that are equal.
        padding: likewise.
        dilation: likewise.
        input_amax: "dynamic", a number or a float32 []: what a tensor `x` is packed with.
        dtype: of the output, float16 or bfloat16; by default that of `x`, float16 where it has none of these.
        out_amax: pack the output with this amax.
        four_over_six: how a tensor `weight` is packed.

    Returns:
        [N, O, OH, OW] in channels_last, or packed [N, OH, OW, O].

    Raises:
        InputError: shapes, dtypes, devices or options do not fit; an operand requires a gradient.

    >>> y = fp4_conv2d(torch.ones(1, 16, 8, 8), torch.ones(32, 16, 3, 3), padding=1)
    >>> y.shape, y[0, 0, 4, 4].item()
    (torch.Size([1, 32, 8, 8]), 144.0)
    """
    refuse_gradients(x, weight, bias)
    filters, bias = _filters(weight, bias, four_over_six)
    sizes = _one(stride, "stride"), _one(padding, "padding"), _one(dilation, "dilation")
    source = _source(x, filters, input_amax)
    amax = None if out_amax is None else scalar(out_amax, filters.codes.device, "out_amax")
    out = conv2d((source,), filters, bias, *sizes, relu, output_dtype(x, dtype), amax)
    return out if isinstance(out, Nvfp4Tensor) else out.permute(0, 3, 1, 2)


def _filters(
    weight: torch.Tensor | Nvfp4Tensor | FP4WeightCache, bias: torch.Tensor | None, four_over_six: FourOverSix | None
) -> tuple[Nvfp4Tensor, torch.Tensor | None]:
    if not isinstance(weight, torch.Tensor) and four_over_six is not None:
        raise InputError("The weight is packed already; four_over_six is for fp4_quantize.")
    if isinstance(weight, FP4WeightCache):
        if bias is not None:
            raise InputError("A cache has its own bias: give it to fp4_quantize, not to fp4_conv2d.")
        packed, bias = weight.weight, weight.bias
    elif isinstance(weight, torch.Tensor) and weight.ndim == 4:
        packed = fp4_quantize(weight, None, four_over_six).weight
    elif isinstance(weight, Nvfp4Tensor):
        packed = weight
    else:
        shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise InputError(f"The weight is {shape}; fp4_conv2d takes [O, I, KH, KW], packed [O, KH, KW, I], or a cache.")
    if len(packed.shape) != 4:
        raise InputError(f"The weight is a matrix {tuple(packed.shape)}; a convolution has a filter [O, I, KH, KW].")
    return packed, bias


def _source(x: torch.Tensor | Nvfp4Tensor, filters: Nvfp4Tensor, input_amax: InputAmax) -> Nvfp4Tensor:
    outputs, kh, kw, channels = filters.shape
    if isinstance(x, Nvfp4Tensor):
        if isinstance(input_amax, torch.Tensor) or input_amax != "dynamic":
            raise InputError("x is packed already, with its own amax: leave input_amax out.")
        return x
    if not isinstance(x, torch.Tensor) or x.ndim != 4 or x.shape[1] != channels:
        shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise InputError(
            f"x is {shape} and the filter [O, I, KH, KW] {(outputs, channels, kh, kw)}: x is [N, {channels}, H, W]. "
            "Grouped convolutions have no packed form."
        )
    return pack(x, input_amax, axis=1)


def _one(value: int | Sequence[int], name: str) -> int:
    """The number of both directions."""
    both = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(both) != 2 or both[0] != both[1] or not isinstance(both[0], int) or isinstance(both[0], bool):
        raise InputError(f"{name} is {value!r}; one whole number for both directions fits, or two that are equal.")
    return both[0]
