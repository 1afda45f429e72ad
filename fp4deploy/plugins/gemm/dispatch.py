"""GEMM and implicit-GEMM convolution of packed NVFP4 tensors: kernels where they run, the reference elsewhere.

    y = matmul(a, b)                                          [M, K] x [N, K] -> [M, N], both packed (W4A4)
    y = matmul(x, b)                                          x FP16 or BF16 (W4A16, weight-only)
    y = conv2d((skip, up), filters, bias, padding=1)          two feature maps, concatenated without a copy
    q = conv2d((x,), filters, relu=True, out_amax=a)          output packed for the next layer

Feature maps are NHWC and filters OHWI, blocks along channels: `formats.Nvfp4Tensor` of shape [N, H, W, C] and
[O, KH, KW, C]; volumes have a depth in front of the height, [N, D, H, W, C].

Triton kernels (`plugins.gemm.triton.gemm`, `weight_only`) are launched by Triton where it is installed,
else by pycuda from binaries compiled ahead of time (`plugins.aot.load`); `plugins.gemm.gemv` has the CUDA kernel for
small M, `convolution.block_scaled` one for convolutions on SM120, taken where it was measured to be faster. They need
no workspace: only outputs are allocated (and a copy of an operand that is not contiguous). They keep no state and
synchronise nowhere, but where a first call measures; so streams, threads and CUDA graphs may share them. Before a CUDA
graph is captured, each kernel must have been launched once.

Each computes what `plugins.gemm.reference` computes, up to the order of the sum. A fused quantisation gives the bytes
of quantising the kernel's own unfused output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import NVFP4_BLOCK, Nvfp4Tensor
from fp4deploy.graph.sizes import each
from fp4deploy.plugins.gemm.arguments import launch_gemm, launch_weight_only, runs_kernels
from fp4deploy.plugins.gemm.convolution.fastest import convolve_packed
from fp4deploy.plugins.gemm.reference import (
    Output,
    Sizes,
    conv2d_reference,
    conv_transpose2d_reference,
    matmul_reference,
    output_sizes,
)

DTYPES = (torch.float16, torch.bfloat16)
PACKED = (torch.uint8, torch.float8_e4m3fn, torch.float32)
TAPS = 49  # 7 x 7
FILTERS = (3, 4, 5)  # axes of a filter: outputs, one to three spatial ones, channels


def matmul(
    a: Nvfp4Tensor | torch.Tensor,
    b: Nvfp4Tensor,
    bias: torch.Tensor | None = None,
    relu: bool = False,
    dtype: torch.dtype = torch.float16,
    out_amax: torch.Tensor | None = None,
) -> Output:
    """relu(a b^T + bias).

    Args:
        a: packed [..., K], or float16 or bfloat16 (then also the dtype of the output) of any strides.
        b: packed [N, K].
        bias: [N].
        dtype: of the output, float16 or bfloat16; on a CPU float32 too.
        out_amax: float32 [] of the packed output; None gives a tensor. Not for a weight-only GEMM.

    Returns:
        [..., N] of `dtype`, or packed in blocks along N.

    Raises:
        InputError: shapes, dtypes or devices do not fit.
    """
    _check_weight(b, (2,), "b")
    _check_common(b, bias, dtype, out_amax)
    k, n = b.shape[-1], b.shape[0]
    if a.shape[-1:] != (k,):
        raise InputError(f"a has rows of {tuple(a.shape[-1:])} and b of {k} elements: they must have the same length.")
    if isinstance(a, torch.Tensor):
        return _weight_only(a, b, bias, relu, out_amax)
    check_packed(a, "a")
    _check_devices(b, a, bias, out_amax)
    if not runs_kernels(a.codes) or 0 in (a.codes.numel(), n):
        return matmul_reference(a, b, bias, relu, dtype, out_amax)
    rows = a.codes.numel() // a.codes.shape[-1]
    extent = (1, 1, rows)
    return launch_gemm((a,), b, bias, extent, extent, (*a.shape[:-1], n), dtype, out_amax, relu=relu)


def conv2d(
    sources: tuple[Nvfp4Tensor, ...],
    weight: Nvfp4Tensor,
    bias: torch.Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: int = 1,
    relu: bool = False,
    dtype: torch.dtype = torch.float16,
    out_amax: torch.Tensor | None = None,
    measured: bool = True,
) -> Output:
    """relu(conv2d(concatenated sources, weight) + bias), groups = 1, over two spatial axes, or one or three.

    Args:
        sources: one or two packed feature maps [N, H, W, C_i], or volumes [N, D, H, W, C_i]; of two, the first must
            have whole blocks of channels.
        weight: packed [O, KH, KW, C] or [O, KD, KH, KW, C], C the sum of the sources', at most 49 taps.
        bias: [O].
        stride, padding: of all axes, or of each.
        dilation: of all axes.
        dtype, out_amax: as `matmul`; blocks of a packed output run along O.
        measured: by the kernel that was measured to be faster (`convolution.fastest`); else by Triton's, whose order of
            the sum does not depend on times.

    Returns:
        [N, OH, OW, O] or [N, OD, OH, OW, O], channels last in memory and in shape, or packed.

    Raises:
        InputError: shapes, dtypes or devices do not fit.
    """
    _check_weight(weight, FILTERS, "weight")
    _check_common(weight, bias, dtype, out_amax)
    _check_sources(sources, weight)
    _check_devices(weight, *sources, bias, out_amax)
    (n, *sizes, _), (outputs, *taps, _) = sources[0].shape, weight.shape
    steps, around = each(stride, len(taps)), each(padding, len(taps))
    if not len(steps) == len(around) == len(taps):
        raise InputError(f"Stride {stride} and padding {padding} are of all {len(taps)} spatial axes, or of each.")
    if min(*steps, dilation) < 1 or min(around) < 0 or math.prod(taps) > TAPS:
        raise InputError(
            f"Stride {stride}, dilation {dilation}, padding {padding} and a filter of {_times(taps)} are not possible: "
            f"stride and dilation are at least 1, padding at least 0, and a filter has at most {TAPS} taps."
        )
    pixels = output_sizes(sizes, taps, stride, padding, dilation)
    if min(pixels) < 1:
        raise InputError(
            f"A feature map of {_times(sizes)} with padding {padding} is smaller than the filter of {_times(taps)}."
        )
    if not runs_kernels(sources[0].codes) or any(0 in x.shape for x in (*sources, weight)):
        return conv2d_reference(sources, weight, bias, stride, padding, dilation, relu, dtype, out_amax)
    lead = (1,) * (2 - len(taps))  # a sequence is a feature map of one row
    geometry: dict[str, Any] = {
        "taps": (*lead, *taps),
        "stride": (*steps[: len(lead)], *steps),
        "padding": (*(0 for _ in lead), *around),
        "dilation": dilation,
        "relu": relu,
    }
    extent, places = (n, *lead, *sizes), (n, *lead, *pixels)
    whole = (n, *pixels, outputs)
    by_triton = partial(launch_gemm, sources, weight, bias, extent, places, whole, dtype, out_amax, **geometry)
    if not measured:
        return by_triton()
    return convolve_packed(sources, weight, bias, steps, around, dilation, relu, dtype, out_amax, by_triton)


def conv_transpose2d(
    source: Nvfp4Tensor,
    weight: Nvfp4Tensor,
    bias: torch.Tensor | None = None,
    relu: bool = False,
    dtype: torch.dtype = torch.float16,
    out_amax: torch.Tensor | None = None,
) -> Output:
    """relu(conv_transpose2d(source, weight) + bias), the strides being the filter's sizes, 1 or 2; also over volumes.

    Args:
        source: packed [N, H, W, C], or [N, D, H, W, C].
        weight: packed [O, 2, 2, C], or [O, KD, KH, KW, C].
        bias, dtype, out_amax: as `conv2d`.

    Returns:
        [N, 2 H, 2 W, O], or [N, KD D, KH H, KW W, O], or packed.

    Raises:
        InputError: shapes, dtypes or devices do not fit.
    """
    _check_weight(weight, FILTERS, "weight")
    _check_common(weight, bias, dtype, out_amax)
    _check_sources((source,), weight)
    _check_devices(weight, source, bias, out_amax)
    (n, *sizes, _), (outputs, *taps, _) = source.shape, weight.shape
    if not {*taps} <= {1, 2}:
        raise InputError(
            f"A transposed convolution has a filter of 1 or 2 along each axis, such as 2x2, not {_times(taps)}."
        )
    if not runs_kernels(source.codes) or 0 in (*source.shape, outputs):
        return conv_transpose2d_reference(source, weight, bias, relu, dtype, out_amax)
    shape = (n, *(size * step for size, step in zip(sizes, taps, strict=True)), outputs)
    extent = (n, *(1,) * (2 - len(taps)), *sizes)
    geometry: dict[str, Any] = {"taps": (1,) * (len(extent) - 1), "relu": relu, "transposed": True}
    return launch_gemm((source,), weight, bias, extent, extent, shape, dtype, out_amax, **geometry)


def _times(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _weight_only(
    x: torch.Tensor, b: Nvfp4Tensor, bias: torch.Tensor | None, relu: bool, out_amax: torch.Tensor | None
) -> Output:
    if x.dtype not in DTYPES or out_amax is not None:
        raise InputError(
            f"A weight-only GEMM takes float16 or bfloat16 and gives the same, not packed; this is {x.dtype}"
            f"{' with out_amax' if out_amax is not None else ''}. Convert it (x.half()), or pack it as well: "
            "input_amax='dynamic' takes any float type."
        )
    _check_devices(b, x, bias)
    if not runs_kernels(x) or 0 in (x.numel(), b.shape[0]):
        return matmul_reference(x, b, bias, relu, x.dtype)
    return launch_weight_only(x, b, bias, relu)


def _check_weight(weight: object, axes: tuple[int, ...], name: str) -> None:
    if not isinstance(weight, Nvfp4Tensor) or len(weight.shape) not in axes:
        shape = tuple(weight.shape) if hasattr(weight, "shape") else type(weight).__name__
        layout = "[N, K]" if 2 in axes else "[O, K, C], [O, KH, KW, C] or [O, KD, KH, KW, C]"
        raise InputError(f"{name} must be packed (formats.quantize_nvfp4) of shape {layout}; this is {shape}.")
    check_packed(weight, name)


def check_packed(x: Nvfp4Tensor, name: str) -> None:
    """Refuse a packed tensor whose parts do not fit each other.

    Raises:
        InputError: row-scaled; dtypes or shapes of codes, scales or amax differ from the format's.
    """
    if x.amax.numel() != 1:
        raise InputError(f"{name} is row-scaled; GEMMs take one global scale a tensor.")
    types = (x.codes.dtype, x.scales.dtype, x.amax.dtype)
    if types != PACKED:
        raise InputError(f"{name} has codes, scales and amax of {', '.join(map(str, types))}; they are {PACKED}.")
    blocks = -(-x.shape[-1] // NVFP4_BLOCK)
    if x.codes.shape != (*x.shape[:-1], 8 * blocks) or x.scales.shape != (*x.shape[:-1], blocks):
        raise InputError(
            f"{name} of shape {tuple(x.shape)} needs codes {(*x.shape[:-1], 8 * blocks)} and scales "
            f"{(*x.shape[:-1], blocks)}, not {tuple(x.codes.shape)} and {tuple(x.scales.shape)}."
        )


def _check_sources(sources: tuple[Nvfp4Tensor, ...], weight: Nvfp4Tensor) -> None:
    axes = len(weight.shape) - 2
    if len(sources) not in (1, 2) or any(not isinstance(x, Nvfp4Tensor) or len(x.shape) != axes + 2 for x in sources):
        shape = ", ".join(("N", *("D", "H", "W")[3 - axes :], "C"))
        raise InputError(f"A convolution takes one or two packed feature maps of shape [{shape}].")
    for x in sources:
        check_packed(x, "a feature map")
    if len({tuple(x.shape[:-1]) for x in sources}) != 1:
        raise InputError(f"The feature maps differ in size: {', '.join(str(tuple(x.shape)) for x in sources)}.")
    channels = sum(x.shape[-1] for x in sources)
    if channels != weight.shape[-1]:
        raise InputError(f"The filter has {weight.shape[-1]} input channels and the feature maps {channels} together.")
    if len(sources) == 2 and sources[0].shape[-1] % NVFP4_BLOCK:
        raise InputError(
            f"The first of two feature maps has {sources[0].shape[-1]} channels: a block of {NVFP4_BLOCK} would span "
            "both. Concatenate them before they are quantised."
        )


def _check_common(
    weight: Nvfp4Tensor, bias: torch.Tensor | None, dtype: torch.dtype, out_amax: torch.Tensor | None
) -> None:
    if dtype not in DTYPES and (dtype != torch.float32 or weight.codes.is_cuda):
        raise InputError(f"The output can be {' or '.join(map(str, DTYPES))} (on a CPU torch.float32), not {dtype}.")
    check_bias(bias, weight.shape[0])
    if out_amax is not None and (out_amax.numel() != 1 or out_amax.dtype != torch.float32):
        raise InputError(f"out_amax must be one float32, not {out_amax.dtype} {tuple(out_amax.shape)}.")


def check_bias(bias: object, outputs: int) -> None:
    """Refuse anything but a bias of `outputs` channels.

    Raises:
        InputError: another shape or type.
    """
    if bias is None:
        return
    if not isinstance(bias, torch.Tensor) or bias.shape != (outputs,) or not bias.is_floating_point():
        kind = f"{tuple(bias.shape)} {bias.dtype}" if isinstance(bias, torch.Tensor) else type(bias).__name__
        raise InputError(f"The bias is {kind}; a floating-point [{outputs}] fits.")


def _check_devices(first: Nvfp4Tensor, *others: Nvfp4Tensor | torch.Tensor | None) -> None:
    devices = {str(first.codes.device)}
    for other in (first, *others):
        if isinstance(other, Nvfp4Tensor):
            devices |= {str(part.device) for part in (other.codes, other.scales, other.amax)}
        elif other is not None:
            devices.add(str(other.device))
    if len(devices) > 1:
        raise InputError(f"Operands lie on different devices: {', '.join(sorted(devices))}.")
