"""Convolutions in 16 bits as one torch operator, for graphs that a compiler generates code for.

    y = torch.ops.fp4deploy.convolution(x, weight, bias, stride, padding, dilation, beyond, groups, transposed, relu)

Feature maps are [N, *S, C] contiguous, as kernels read them: a compiler may copy a view in channels_last of what it
has written in another shape. On a GPU `small_k` and `depthwise` compute what they support, cuDNN the rest.

`wide_convolution` gives the sum in FP32, of operands in BF16: by cuDNN in TF32, in which they are exact, or by cuBLAS
where every filter is one pixel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

import torch

from fp4deploy.graph.sizes import output_size, transposed_size
from fp4deploy.plugins.gemm.convolution import depthwise, small_k
from fp4deploy.plugins.runtime.torch_library import operator

# Bytes and operations a second, as of a Hopper GPU; seconds, of which the launch is a large part.
MEMORY, COMPUTE, LAUNCH = 4.0e12, 6.0e14, 10e-6


def _fake_convolution(x, weight, bias, stride, padding, dilation, output_padding, groups, transposed, relu):  # type: ignore[no-untyped-def]
    outputs, axes = weight.shape[0], zip(x.shape[1:-1], weight.shape[2:], stride, padding, dilation, strict=True)
    if transposed:
        outputs = weight.shape[1] * groups
        sizes = [transposed_size(*axis, more) for axis, more in zip(axes, output_padding, strict=True)]
    else:
        sizes = [output_size(*axis) for axis in axes]
    return torch.empty((x.shape[0], *sizes, outputs), dtype=x.dtype, device=x.device)


@operator(
    "convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
    "int[] output_padding, int groups, bool transposed, bool relu) -> Tensor",
    _fake_convolution,
    "CompositeExplicitAutograd",
    # It would copy an operand that has other strides than were traced, where it could have written these.
    torch.Tag.flexible_layout,
)
def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    output_padding: list[int],
    groups: int,
    transposed: bool,
    relu: bool,
) -> torch.Tensor:
    """relu(convolution + bias) over one to three axes.

    Args:
        x: [N, *S, C] of any strides; contiguous it is not copied.
        weight: with torch's axes, [O, C / groups, *K], or [C, O / groups, *K] transposed.
        bias: float32 [O].

    Returns:
        [N, *S', O] contiguous, of the dtype of `x`.
    """
    if x.is_cuda and x.ndim == 4 and not transposed:
        y = _by_own_kernel(x, weight, bias, (stride, padding, dilation), groups, relu)
        if y is not None:
            return y
    # An axis of one element may have any stride, by which torch does not see channels_last and copies to NCHW (66 of
    # 914 us of a SegFormer, one image, one H200, torch 2.11, 2026-11-28).
    x = x.contiguous()
    x = x.as_strided(x.shape, [math.prod(x.shape[axis + 1 :]) for axis in range(x.ndim)]).movedim(-1, 1)
    added = None if bias is None else bias.to(x.dtype)
    measured = _is_large(x, weight, 1 if transposed else math.prod(stride))
    # For this call alone: torch.backends.cudnn is of the whole process.
    flags = {"benchmark": measured, "deterministic": False, "cudnn_enabled": True, "allow_tf32": False}
    y = torch._convolution(x, weight, added, stride, padding, dilation, transposed, output_padding, groups, **flags)
    return (y.relu_() if relu else y).movedim(1, -1).contiguous()


def _fake_wide(x, weight, stride, padding, dilation, output_padding, groups, transposed):  # type: ignore[no-untyped-def]
    places = (stride, padding, dilation, output_padding, groups, transposed, False)
    return _fake_convolution(x, weight, None, *places).to(torch.float32)


@operator(
    "wide_convolution(Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation, int[] output_padding, "
    "int groups, bool transposed) -> Tensor",
    _fake_wide,
    "CompositeExplicitAutograd",
    torch.Tag.flexible_layout,
)
def wide_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    output_padding: list[int],
    groups: int,
    transposed: bool,
) -> torch.Tensor:
    """`convolution` of bfloat16, float32 [N, *S', O]: sums are FP32 and not rounded."""
    points = {*weight.shape[2:], *stride, groups} == {1} and not any((*padding, *output_padding, transposed))
    if points and x.is_cuda:
        rows, filters = x.flatten(0, -2), weight.flatten(1)
        y = torch.mm(rows, filters.t(), out_dtype=torch.float32)
        return y.view(*x.shape[:-1], len(weight))
    x, weight = x.float().contiguous().movedim(-1, 1), weight.float()
    flags = {"benchmark": False, "deterministic": False, "cudnn_enabled": True, "allow_tf32": True}
    y = torch._convolution(x, weight, None, stride, padding, dilation, transposed, output_padding, groups, **flags)
    return y.movedim(1, -1).contiguous()


def _is_large(x: torch.Tensor, weight: torch.Tensor, strides: int) -> bool:
    """Whether cuDNN's kernels are chosen by measurement, not by its own rule.

    Each is timed once, with its launch. Of convolutions of 7 us that makes the choice luck: of two processes with the
    13 equal ones of a PSPNet(resnet34) one chose 96 us, which is also the rule's, the other 104. Of large ones it is
    worth it: those of a DeepLabV3(resnet50) took 616 us by the rule, 519 measured (one image, one H200, torch 2.11,
    2026-11-29).
    """
    pixels = x.numel() // max(1, x.shape[1]) / strides
    moved, work = 2 * (x.numel() + pixels * weight.shape[0]), 2 * pixels * weight.numel()
    return moved / MEMORY + work / COMPUTE > LAUNCH


def _by_own_kernel(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    places: tuple[list[int], list[int], list[int]],
    groups: int,
    relu: bool,
) -> torch.Tensor | None:
    """By the kernel of this package that takes the layer, if there is one and it runs."""
    stride, padding, dilation = ((a, b) for a, b in places)
    module = own_kernel(x.device, weight, stride, padding, dilation, groups)
    if module is None:
        return None
    filters = weight.permute(0, 2, 3, 1)
    with module.fallback.guard(x.device):
        if module is depthwise and depthwise.is_aligned(x, weight, padding):
            return depthwise.conv2d(x, weight, bias, stride, padding, dilation, relu)
        if module is small_k and small_k.is_aligned(x, filters, stride, padding):
            return small_k.conv2d(x, filters, bias, stride, padding, relu)[0]
    return None


def own_kernel(
    device: torch.device,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> ModuleType | None:
    """`small_k` or `depthwise`, where one computes a convolution with this weight; it does bias and ReLU as well."""
    if weight.ndim != 4:
        return None
    outputs, channels, kh, kw = weight.shape
    by, around, apart = ((each[0], each[1]) for each in (stride, padding, dilation))
    if depthwise.supports(weight, by, around, apart, groups):
        return depthwise if depthwise.fallback.runs(device) else None
    narrow = weight.dtype in (torch.float16, torch.bfloat16)
    fits = narrow and small_k.supports(channels, outputs, (kh, kw), by, around, apart, groups)
    return small_k if fits and small_k.fallback.runs(device) else None
