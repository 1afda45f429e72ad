"""The reference of every GEMM kernel: decode packed NVFP4 operands, then multiply in torch.

    x [N, H, W, C] and w [O, KH, KW, C] in blocks along C:   y = relu(conv(x', w') + b), x' and w' the decoded values

The decoded values are exact in FP32 up to the rounding of (d8 * A) / 6E. Sums are taken in `accumulate`: float32 in
use, float64 in tests of kernels. A fused quantisation reads the output rounded to `dtype`, so fusing changes no byte.

This is also what runs without a GPU, and where kernels are switched off.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fp4deploy.formats import Nvfp4Tensor, quantize_nvfp4
from fp4deploy.graph.sizes import output_size

Output = torch.Tensor | Nvfp4Tensor


def matmul_reference(
    a: Nvfp4Tensor | torch.Tensor,
    b: Nvfp4Tensor | torch.Tensor,
    bias: torch.Tensor | None = None,
    relu: bool = False,
    dtype: torch.dtype = torch.float16,
    out_amax: torch.Tensor | None = None,
    accumulate: torch.dtype = torch.float32,
) -> Output:
    """a [..., K] and b [N, K], packed or plain -> [..., N]."""
    out = _decode(a, accumulate) @ _decode(b, accumulate).mT
    return _finish(out, bias, relu, dtype, out_amax)


def conv2d_reference(
    sources: tuple[Nvfp4Tensor | torch.Tensor, ...],
    weight: Nvfp4Tensor | torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    relu: bool = False,
    dtype: torch.dtype = torch.float16,
    out_amax: torch.Tensor | None = None,
    accumulate: torch.dtype = torch.float32,
) -> Output:
    """Feature maps [N, H, W, C_i], concatenated along C; filter [O, KH, KW, sum C_i] -> [N, OH, OW, O]."""
    decoded = [_decode(source, accumulate) for source in sources]
    x = (torch.cat(decoded, dim=-1) if len(decoded) > 1 else decoded[0]).permute(0, 3, 1, 2)
    filters = _decode(weight, accumulate).permute(0, 3, 1, 2)
    if 0 in (*x.shape, *filters.shape):  # an empty sum is 0; torch refuses some of these
        sizes = zip(x.shape[2:], filters.shape[2:], strict=True)
        height, width = (output_size(size, taps, stride, padding, dilation) for size, taps in sizes)
        out = x.new_zeros(x.shape[0], filters.shape[0], height, width)
    else:
        out = F.conv2d(x, filters, None, stride, padding, dilation)
    return _finish(out.permute(0, 2, 3, 1), bias, relu, dtype, out_amax)


def conv_transpose2d_reference(
    source: Nvfp4Tensor | torch.Tensor,
    weight: Nvfp4Tensor | torch.Tensor,
    bias: torch.Tensor | None = None,
    relu: bool = False,
    dtype: torch.dtype = torch.float16,
    out_amax: torch.Tensor | None = None,
    accumulate: torch.dtype = torch.float32,
) -> Output:
    """Feature map [N, H, W, C], filter [O, 2, 2, C], stride 2 -> [N, 2H, 2W, O]."""
    x = _decode(source, accumulate).permute(0, 3, 1, 2)
    filters = _decode(weight, accumulate).permute(3, 0, 1, 2)
    if 0 in (*x.shape, *filters.shape):
        out = x.new_zeros(x.shape[0], filters.shape[1], 2 * x.shape[2], 2 * x.shape[3])
    else:
        out = F.conv_transpose2d(x, filters, None, stride=2)
    return _finish(out.permute(0, 2, 3, 1), bias, relu, dtype, out_amax)


def _decode(x: Nvfp4Tensor | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.dequantize(dtype) if isinstance(x, Nvfp4Tensor) else x.to(dtype)


def _finish(
    out: torch.Tensor, bias: torch.Tensor | None, relu: bool, dtype: torch.dtype, out_amax: torch.Tensor | None
) -> Output:
    if bias is not None:
        out = out.add_(bias.to(out.dtype))  # `out` is a fresh result of torch
    out = (out.relu_() if relu else out).to(dtype).contiguous()
    return out if out_amax is None else quantize_nvfp4(out, amax=out_amax)
