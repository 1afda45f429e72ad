"""The reference of every GEMM kernel: decode packed NVFP4 operands, then multiply in torch.

    x [N, H, W, C] and w [O, KH, KW, C] in blocks along C:   y = relu(conv(x', w') + b), x' and w' the decoded values

Volumes are [N, D, H, W, C], their filters [O, KD, KH, KW, C], and sequences have one axis.

The decoded values are exact in FP32 up to the rounding of (d8 * A) / 6E. Sums are taken in `accumulate`: float32 in
use, float64 in tests of kernels. A fused quantisation reads the output rounded to `dtype`, so fusing changes no byte.

This is also what runs without a GPU, and where kernels are switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from fp4deploy.formats import Nvfp4Tensor, quantize_nvfp4
from fp4deploy.graph.sizes import each, output_size

Output = torch.Tensor | Nvfp4Tensor
Sizes = int | Sequence[int]  # of all spatial axes, or of each
CONVOLUTIONS: dict[int, Callable[..., torch.Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED: dict[int, Callable[..., torch.Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


def output_sizes(
    sizes: Sequence[int], taps: Sequence[int], stride: Sizes, padding: Sizes, dilation: Sizes
) -> tuple[int, ...]:
    """Pixels of a convolution along each axis."""
    steps = (each(size, len(taps)) for size in (stride, padding, dilation))
    return tuple(map(output_size, sizes, taps, *steps))


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
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    relu: bool = False,
    dtype: torch.dtype = torch.float16,
    out_amax: torch.Tensor | None = None,
    accumulate: torch.dtype = torch.float32,
) -> Output:
    """Feature maps [N, H, W, C_i], concatenated along C; filter [O, KH, KW, sum C_i] -> [N, OH, OW, O]; or volumes."""
    decoded = [_decode(source, accumulate) for source in sources]
    x = (torch.cat(decoded, dim=-1) if len(decoded) > 1 else decoded[0]).movedim(-1, 1)
    filters = _decode(weight, accumulate).movedim(-1, 1)
    if 0 in (*x.shape, *filters.shape):  # an empty sum is 0; torch refuses some of these
        sizes = output_sizes(x.shape[2:], filters.shape[2:], stride, padding, dilation)
        out = x.new_zeros(x.shape[0], filters.shape[0], *sizes)
    else:
        out = CONVOLUTIONS[x.ndim - 2](x, filters, None, stride, padding, dilation)
    return _finish(out.movedim(1, -1), bias, relu, dtype, out_amax)


def conv_transpose2d_reference(
    source: Nvfp4Tensor | torch.Tensor,
    weight: Nvfp4Tensor | torch.Tensor,
    bias: torch.Tensor | None = None,
    relu: bool = False,
    dtype: torch.dtype = torch.float16,
    out_amax: torch.Tensor | None = None,
    accumulate: torch.dtype = torch.float32,
) -> Output:
    """Feature map [N, H, W, C], filter [O, KH, KW, C], the strides KH and KW -> [N, KH H, KW W, O]; or a volume."""
    x = _decode(source, accumulate).movedim(-1, 1)
    filters = _decode(weight, accumulate).movedim(-1, 0)
    steps = tuple(filters.shape[2:])
    if 0 in (*x.shape, *filters.shape):
        sizes = (size * step for size, step in zip(x.shape[2:], steps, strict=True))
        out = x.new_zeros(x.shape[0], filters.shape[1], *sizes)
    else:
        out = TRANSPOSED[len(steps)](x, filters, None, steps)
    return _finish(out.movedim(1, -1), bias, relu, dtype, out_amax)


def _decode(x: Nvfp4Tensor | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.dequantize(dtype) if isinstance(x, Nvfp4Tensor) else x.to(dtype)


def _finish(
    out: torch.Tensor, bias: torch.Tensor | None, relu: bool, dtype: torch.dtype, out_amax: torch.Tensor | None
) -> Output:
    if bias is not None:
        out = out.add_(bias.to(out.dtype))  # `out` is a fresh result of torch
    out = (out.relu_() if relu else out).to(dtype).contiguous()
    return out if out_amax is None else quantize_nvfp4(out, amax=out_amax)
