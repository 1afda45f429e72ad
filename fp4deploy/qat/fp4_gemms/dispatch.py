"""The three GEMMs of packed operands: kernels where these run, `reference` elsewhere.

| GEMM | NVFP4, FP16 or BF16 output | otherwise |
|---|---|---|
| forward; dgrad of Linear and ConvTranspose2d | inference kernels (`plugins.gemm.dispatch`) | `gather_gemm` |
| dgrad of a stride-1 convolution | the same: a convolution of G with the flipped filter | `gather_gemm` |
| dgrad with a stride; a transposed forward other than 2 x 2, stride 2 | `gather_gemm` | `gather_gemm` |
| wgrad | `rows_gemm`, split-K, on codes that lie once for each row of the filter, a few images at a time | the same |

MXFP4, FP32 outputs and steps that differ between the axes are in the last column. Over volumes the inference kernels
take what the first two rows say, with steps of each axis, and ConvTranspose3d whose strides are its sizes, 1 or 2.
Other GEMMs of volumes, groups, Conv1d and
row-scaled operands run by the reference, on a GPU too, and so does everything without Triton, which compiles these
kernels when they are first used. The kernels' filters are [rows, KH, KW, K], their feature maps [N, H, W, K]: the
layout that packing along the contraction axis leaves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.graph.sizes import output_size, transposed_size
from fp4deploy.plugins.aot.compile import triton_version
from fp4deploy.plugins.gemm import dispatch as inference
from fp4deploy.plugins.gemm.arguments import runs_kernels
from fp4deploy.plugins.gemm.training import POINTWISE, TYPES, Packed, Window, gather_gemm, rows_gemm
from fp4deploy.qat.fp4_gemms import reference
from fp4deploy.qat.fp4_gemms.operands import PackedOperand
from fp4deploy.qat.fp4_gemms.reference import Gemms
from fp4deploy.qat.operators.gemms import ConvGemms, LinearGemms, tap_window

BYTES = 1 << 28  # of the codes of a wgrad's shifted operand that are written at a time


def fprop(
    x: PackedOperand, weight: PackedOperand, bias: torch.Tensor | None, gemms: Gemms, dtype: torch.dtype
) -> torch.Tensor:
    """`reference.fprop`."""
    if not _runs(x, weight, gemms, dtype):
        return reference.fprop(x, weight, bias, gemms, dtype)
    if isinstance(gemms, LinearGemms):
        return _matmul(x.packed, weight.packed, bias, dtype)
    steps = zip(x.packed.shape[1:-1], gemms.kernel, gemms.stride, gemms.padding, gemms.dilation, strict=True)
    if gemms.transposed:
        axes = zip(steps, gemms.output_padding, strict=True)
        pixels = tuple(transposed_size(*axis, more) for axis, more in axes)
    else:
        pixels = tuple(output_size(*axis) for axis in steps)
    y = _convolve(x.packed, _filters(weight), gemms, pixels, dtype, bias, inverse=gemms.transposed)
    return reference.fprop(x, weight, bias, gemms, dtype) if y is None else y


def dgrad(
    gradient: PackedOperand, weight: PackedOperand, gemms: Gemms, x_shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """`reference.dgrad`."""
    if not _runs(gradient, weight, gemms, dtype):
        return reference.dgrad(gradient, weight, gemms, x_shape, dtype)
    if isinstance(gemms, LinearGemms):
        return _matmul(gradient.packed, weight.packed, None, dtype)
    pixels = tuple(x_shape[2:])
    found = _convolve(gradient.packed, _filters(weight), gemms, pixels, dtype, None, inverse=not gemms.transposed)
    return reference.dgrad(gradient, weight, gemms, x_shape, dtype) if found is None else found


def wgrad(
    gradient: PackedOperand, x: PackedOperand, gemms: Gemms, weight_shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """`reference.wgrad`; by a kernel float32."""
    if not _runs(gradient, x, gemms, dtype):
        return reference.wgrad(gradient, x, gemms, weight_shape, dtype)
    if isinstance(gemms, LinearGemms):
        return rows_gemm(_reshaped(gradient.packed, (1, -1)), _reshaped(x.packed, (1, -1)))
    narrow, wide = (part.packed for part in ((x, gradient) if gemms.transposed else (gradient, x)))
    if gemms.pixelwise:
        return rows_gemm(narrow, wide).view(weight_shape)
    gemms = gemms.first(len(wide.shape) - 2)
    taps, columns = math.prod(gemms.kernel[:-1]), gemms.kernel[-1]
    images = max(1, BYTES * wide.shape[0] // (wide.codes.nbytes * taps))
    total: torch.Tensor | None = None
    for first in range(0, wide.shape[0], images):
        part = slice(first, first + images)
        rows = _images(narrow, part)
        product = rows_gemm(_flat(rows, 2), _by_rows_of_taps(_images(wide, part), gemms, rows.shape[2:-1]))
        total = product if total is None else total + product
    assert total is not None
    shape = (weight_shape[0], columns, weight_shape[1], taps)
    return total.view(shape).movedim(1, -1).reshape(weight_shape)


def _by_rows_of_taps(wide: Packed, gemms: ConvGemms, grid: Sequence[int]) -> Packed:
    """[N, channels * taps, pixels] of what `ConvGemms.widen` gave, a tap for each row of the filter.

    A row of the map is whole blocks, so that codes and scales are moved as they are.
    """
    edges = [edge for size in reversed(gemms.padding[:-1]) for edge in (size, size)]
    steps = list(zip(gemms.stride, gemms.dilation, grid, strict=False))
    taps = list(itertools.product(*map(range, gemms.kernel[:-1])))

    def shifted(t: torch.Tensor) -> torch.Tensor:
        padded = F.pad(t, (0, 0, *edges))
        cuts: list[Any] = [
            (..., *(tap_window(at, *step) for at, step in zip(tap, steps, strict=True)), slice(None)) for tap in taps
        ]
        return torch.stack([padded[cut] for cut in cuts], 2).flatten(1, 2)

    changed = _parts(wide, shifted, wide.shape)
    return _flat(replace(changed, shape=torch.Size((*changed.codes.shape[:-1], wide.shape[-1]))), 2)


def _flat(x: Packed, first: int) -> Packed:
    """The axes from `first` on, the last of them whole blocks, as one."""
    count = x.codes[0, 0].numel() * 2
    return _parts(x, lambda t: t.flatten(first), (*x.shape[:first], count))


def segmented_wgrad(
    gradient: PackedOperand, x: PackedOperand, segments: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """dW [E, O, C], float32, of each segment of a linear layer's tokens (`rows_gemm`); None where no kernel runs."""
    if not _runs(gradient, x, LinearGemms(), dtype):
        return None
    return rows_gemm(_reshaped(gradient.packed, (1, -1)), _reshaped(x.packed, (1, -1)), segments)


def _runs(a: PackedOperand, b: PackedOperand, gemms: Gemms, dtype: torch.dtype) -> bool:
    spatial = isinstance(gemms, LinearGemms) or (len(gemms.kernel) in (2, 3) and gemms.groups == 1)
    single = all(not isinstance(x.packed, Nvfp4Tensor) or x.packed.amax.numel() == 1 for x in (a, b))
    filled = a.packed.codes.numel() > 0 and b.packed.codes.numel() > 0
    fits = spatial and single and filled and not (a.split or b.split) and dtype in TYPES
    return fits and type(a.packed) is type(b.packed) and _has_kernels(a.packed.codes)


def _has_kernels(x: torch.Tensor) -> bool:
    return triton_version() is not None and runs_kernels(x)


def _matmul(a: Packed, b: Packed, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """a [..., K] b [rows, K]^T."""
    if _for_inference(a, b, dtype):
        out = inference.matmul(a, b, bias, dtype=dtype)  # type: ignore[arg-type]
        assert isinstance(out, torch.Tensor)
        return out
    flat = _reshaped(a, (1, 1, -1))
    pixels = (flat.shape[1], flat.shape[2])
    product = gather_gemm(flat, _reshaped(b, (-1, 1, 1)), POINTWISE, pixels, dtype, bias)
    return product.view(*a.shape[:-1], b.shape[0])


def _convolve(
    x: Packed,
    filters: Packed,
    gemms: ConvGemms,
    pixels: Any,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    inverse: bool,
) -> torch.Tensor | None:
    """[N, rows, OH, OW] in channels_last; `inverse`: the adjoint of the convolution with the window of `gemms`.

    Of volumes None where no kernel has the geometry.
    """
    known = _by_inference(x, filters, gemms, pixels, dtype, bias, inverse)
    if known is None and len(pixels) == 2:
        window = Window(*(tuple(sizes) for sizes in (gemms.kernel, gemms.stride, gemms.padding, gemms.dilation)))  # type: ignore[arg-type]
        known = gather_gemm(x, filters, window, pixels, dtype, bias, inverse)
    return None if known is None else known.movedim(-1, 1)


def _by_inference(
    x: Packed,
    filters: Packed,
    gemms: ConvGemms,
    pixels: tuple[int, ...],
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    inverse: bool,
) -> torch.Tensor | None:
    """[N, OH, OW, rows] by a kernel of the inference path, or None where none has this geometry."""
    taps, stride, padding, dilations = gemms.kernel, gemms.stride, gemms.padding, gemms.dilation
    square = len(pixels) == 3 or all(len({*sizes}) == 1 for sizes in (taps, stride, padding, dilations))
    fits = square and len({*dilations}) == 1 and math.prod(taps) <= inference.TAPS
    if not fits or not _for_inference(x, filters, dtype):
        return None
    dilation, found = dilations[0], None
    around = [dilation * (count - 1) - pad for count, pad in zip(taps, padding, strict=True)]
    grown = tuple(size * step for size, step in zip(x.shape[1:-1], stride, strict=True))
    alone = tuple(taps) == tuple(stride) and not any(padding) and dilation == 1 and {*taps} <= {1, 2}
    if not inverse:
        found = inference.conv2d((x,), filters, bias, stride, padding, dilation, dtype=dtype)  # type: ignore[arg-type]
    elif {*stride} == {1} and min(around) >= 0:
        found = inference.conv2d((x,), _flipped(filters), bias, 1, around, dilation, dtype=dtype)  # type: ignore[arg-type]
    elif alone and grown == tuple(pixels):
        found = inference.conv_transpose2d(x, filters, bias, dtype=dtype)  # type: ignore[arg-type]
    if not isinstance(found, torch.Tensor) or tuple(found.shape[1:-1]) != tuple(pixels):
        return None
    return found


def _for_inference(a: Packed, b: Packed, dtype: torch.dtype) -> bool:
    return isinstance(a, Nvfp4Tensor) and isinstance(b, Nvfp4Tensor) and dtype in inference.DTYPES


def _filters(weight: PackedOperand) -> Packed:
    """[rows, KH, KW, K]; 2-D blocks lie as [KH, KW, rows, K]. Of volumes with KD."""
    rows = len(weight.packed.shape) - 2
    return _moved(weight.packed, (rows, *range(rows), rows + 1)) if len(weight.axes) == 2 else weight.packed


def _parts(x: Packed, change: Any, shape: Sequence[int]) -> Packed:
    codes, scales = change(x.codes), change(x.scales.view(torch.uint8)).view(x.scales.dtype)
    changed: Packed = replace(x, codes=codes, scales=scales, shape=torch.Size(shape))
    return changed


def _moved(x: Packed, order: tuple[int, ...]) -> Packed:
    return _parts(x, lambda t: t.permute(order).contiguous(), [x.shape[at] for at in order])


def _flipped(x: Packed) -> Packed:
    return _parts(x, lambda t: t.flip(tuple(range(1, len(x.shape) - 1))), x.shape)


def _reshaped(x: Packed, leading: tuple[int, ...]) -> Packed:
    """The axes before the last as `leading`, one of which may be -1."""
    shape = (*x.codes.reshape(*leading, x.codes.shape[-1]).shape[:-1], x.shape[-1])
    return _parts(x, lambda t: t.reshape(*leading, t.shape[-1]), shape)


def _images(x: Packed, images: slice) -> Packed:
    part = x.codes[images]
    return _parts(x, lambda t: t[images], (part.shape[0], *x.shape[1:]))
