"""Convolutions in FP16 as one torch operator, for graphs that a compiler generates code for.

    y = torch.ops.fp4deploy.convolution(x, weight, bias, stride, padding, dilation, output_padding, groups, False, relu)

On a GPU `small_k` computes what it takes, cuDNN the rest, always in channels_last. A compiler may give an axis of one
element any stride, by which torch then does not see that a feature map is in channels_last, and copies it to NCHW (66
of 914 us of a SegFormer, one image, one H200, torch 2.11, 2026-11-28): strides are put right before the call.
"""

from __future__ import annotations

import torch

from fp4deploy.errors import UnavailableError
from fp4deploy.graph.sizes import output_size, transposed_size
from fp4deploy.plugins.gemm.convolution import small_k
from fp4deploy.plugins.runtime.torch_library import operator

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _fake_convolution(x, weight, bias, stride, padding, dilation, output_padding, groups, transposed, relu):  # type: ignore[no-untyped-def]
    outputs, axes = weight.shape[0], zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    if transposed:
        outputs = weight.shape[1] * groups
        sizes = [transposed_size(*axis, more) for axis, more in zip(axes, output_padding, strict=True)]
    else:
        sizes = [output_size(*axis) for axis in axes]
    layout = FORMATS.get(x.ndim, torch.contiguous_format)
    return torch.empty((x.shape[0], outputs, *sizes), dtype=x.dtype, device=x.device, memory_format=layout)


@operator(
    "convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
    "int[] output_padding, int groups, bool transposed, bool relu) -> Tensor",
    _fake_convolution,
    "CompositeExplicitAutograd",
    fixed_strides=True,
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
    """relu(convolution + bias) over one to three axes; weight with torch's axes, bias float32 [O].

    Returns:
        like `x`, of four or five axes in channels_last.
    """
    if x.is_cuda and x.ndim == 4 and not transposed:
        y = _small_k(x, weight, bias, (stride, padding, dilation), groups, relu)
        if y is not None:
            return y
    x, weight = _channels_last(x), _channels_last(weight)
    added = None if bias is None else bias.to(x.dtype)
    # With cuDNN's choice by measurement, for this call alone: torch.backends.cudnn is of the whole process.
    flags = {"benchmark": True, "deterministic": False, "cudnn_enabled": True, "allow_tf32": False}
    y = torch._convolution(x, weight, added, stride, padding, dilation, transposed, output_padding, groups, **flags)
    return _channels_last(y.relu_() if relu else y)


def _small_k(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    places: tuple[list[int], list[int], list[int]],
    groups: int,
    relu: bool,
) -> torch.Tensor | None:
    """By the kernel for sums of few elements, where it takes the layer and runs."""
    if weight.dtype != torch.float16 or not small_k.is_available(x.device):
        return None
    outputs, channels, kh, kw = weight.shape
    stride, padding, dilation = ((a, b) for a, b in places)
    pixels, filters = x.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1)
    if not small_k.supports(channels, outputs, (kh, kw), stride, padding, dilation, groups):
        return None
    if not small_k.is_aligned(pixels, filters, stride, padding):
        return None
    try:
        return small_k.conv2d(pixels, filters, bias, stride, padding, relu)[0].permute(0, 3, 1, 2)
    except UnavailableError as error:
        small_k.fallback.refuse(x.device, error)
        return None


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    """`x` in channels_last, with that format's strides along axes of one element too."""
    layout = FORMATS.get(x.ndim)
    if layout is None:
        return x.contiguous()
    x = x.contiguous(memory_format=layout)
    wanted = _strides(x.shape)
    return x if x.stride() == wanted else x.as_strided(x.shape, wanted)


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Of a tensor [N, C, *S] in channels_last."""
    found, step = [0] * len(shape), 1
    for axis in (1, *range(len(shape) - 1, 1, -1), 0):
        found[axis], step = step, step * shape[axis]
    return tuple(found)
