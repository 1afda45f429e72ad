"""The fastest kernel of a convolution: of a training step, of its gradients, of packed operands; measured, not assumed.

    y = convolve(x, weight, bias, place, lambda: F.conv2d(x, weight, bias, ...))
    dx = convolve_transposed(g, weight, place, lambda: F.conv_transpose2d(g, weight, ...))
    dw = wgrad(g, x, weight, place, lambda: convolution_backward(...))
    y = convolve_packed((x,), weight, bias, ..., lambda: launch_gemm((x,), weight, bias, ...))

cuDNN's kernels are made for many channels. For few it has several in FP16 alone, and the others take up to three times
as long (measured fact: H200, torch 2.11, 2026-11-30, `training_convolutions.py`: 3 to 16 channels, 16 x 352 x 480: 125
us in FP16, 330 in BF16, 51 by `small_k` in both). Which kernel is faster is measured on the first call with shapes,
strides, a dtype, `cudnn.benchmark` and a GPU, and kept for later processes (`runtime.choices`). While a CUDA graph is
captured nothing is measured: what is not known by then is torch's, or Triton's.

| product | kernel of this package | instead of |
|---|---|---|
| forward | `small_k` | cuDNN's |
| input gradient, stride 1 | `small_k` on the gradient of the output, with the filter turned | cuDNN's |
| weight gradient | `narrow_wgrad` | cuDNN's |
| forward of packed operands, SM120 and SM121 | `block_scaled` | Triton's |

Nothing here is differentiable: functions of autograd call it (`qat.operators`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.aot.compile import versions
from fp4deploy.plugins.gemm.convolution import block_scaled, narrow_wgrad, small_k
from fp4deploy.plugins.gemm.reference import Output
from fp4deploy.plugins.runtime.cache import key
from fp4deploy.plugins.runtime.choices import fastest, milliseconds, remember, remembered
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.nvcc import SOURCES, find_nvcc, nvcc_version
from fp4deploy.plugins.runtime.pdl import is_capturing

Pair = tuple[int, int]
Run = Callable[[], torch.Tensor]
Result = TypeVar("Result", torch.Tensor, Output)
TORCH, OWN = "torch", "own"  # and Triton's, of packed operands
NARROW = (torch.float16, torch.bfloat16)
DEEPEST = 288  # elements of K up to which `small_k` is tried: 3 x 3 taps of 32 channels
MEMORY = 8e9  # bytes a millisecond, of a B200, which has most: no kernel takes less time for its operands
# Milliseconds that there must be to save: a kernel is compiled for each shape of a filter, which takes a second.
WORTH = 0.02
# Of packed operands: layers of one form share a kernel, and most take some microseconds.
PACKED_WORTH = 0.002

_choices: dict[tuple[Any, ...], str] = {}


class Place(NamedTuple):
    """How a filter lies on a feature map of two axes; of an input gradient, how it lay in the forward."""

    stride: Pair
    padding: Pair
    dilation: Pair = (1, 1)
    groups: int = 1


def may_have_kernel(x: torch.Tensor, weight: torch.Tensor, place: Place) -> bool:
    """Whether a kernel of this package computes one of the products of a convolution; operands may have no data."""
    outputs, channels, *taps = weight.shape
    if x.dtype not in NARROW or x.dtype != weight.dtype or not small_k.fallback.runs(x.device):
        return False
    size = taps[0], taps[1]
    forward = small_k.supports(channels, outputs, size, *place, deepest=DEEPEST)
    backward = place.stride == (1, 1) and small_k.supports(outputs, channels, size, deepest=DEEPEST)
    return forward or backward or narrow_wgrad.supports(channels, outputs, size, place.stride)


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, place: Place, by_torch: Run
) -> torch.Tensor:
    """Y [N, O, OH, OW] of X [N, C, H, W], W [O, C, KH, KW] and a bias [O]; `by_torch` computes the same."""
    filters = weight.permute(0, 2, 3, 1)
    if not _takes_small_k(x, filters, place):
        return by_torch()

    def own() -> torch.Tensor:
        added = None if bias is None else bias.float()
        y, _ = small_k.conv2d(x.permute(0, 2, 3, 1), filters, added, place.stride, place.padding)
        return y.permute(0, 3, 1, 2)

    name = ("forward", x.shape, weight.shape, place, x.dtype, bias is not None)
    return _faster(name, by_torch, own, small_k.fallback, x, weight)


def convolve_transposed(g: torch.Tensor, weight: torch.Tensor, place: Place, by_torch: Run) -> torch.Tensor:
    """dX [N, C, H, W] of G [N, O, OH, OW] and W [O, C, KH, KW], without rows that no tap reads.

    Of stride 1 it is a convolution of G, with the filter turned by 180 degrees, padded by what the padding left of it.
    """
    left = weight.shape[2] - 1 - place.padding[0], weight.shape[3] - 1 - place.padding[1]
    if place.stride != (1, 1) or min(left) < 0:
        return by_torch()
    turned = place._replace(padding=left)
    if not _takes_small_k(g, weight.permute(1, 2, 3, 0), turned):
        return by_torch()

    def own() -> torch.Tensor:
        filters = weight.flip(2, 3).permute(1, 2, 3, 0)
        return small_k.conv2d(g.permute(0, 2, 3, 1), filters, padding=left)[0].permute(0, 3, 1, 2)

    return _faster(("dgrad", g.shape, weight.shape, place, g.dtype), by_torch, own, small_k.fallback, g, weight)


def wgrad(g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, place: Place, by_torch: Run) -> torch.Tensor:
    """dW [O, C, KH, KW] of G [N, O, OH, OW] and X [N, C, H, W], of their dtype; of `weight` the shape is read."""
    taps = weight.shape[2], weight.shape[3]
    plain = place.dilation == (1, 1) and place.groups == 1 and g.dtype == x.dtype and x.dtype in NARROW
    if not plain or not narrow_wgrad.fallback.runs(x.device):
        return by_torch()
    if not narrow_wgrad.supports(x.shape[1], g.shape[1], taps, place.stride) or not narrow_wgrad.is_aligned(g, x):
        return by_torch()

    def own() -> torch.Tensor:
        nhwc = g.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1)
        return narrow_wgrad.wgrad(*nhwc, taps, place.stride, place.padding).permute(0, 3, 1, 2)

    name = ("wgrad", g.shape, x.shape, weight.shape, place, x.dtype)
    return _faster(name, by_torch, own, narrow_wgrad.fallback, g, x)


def convolve_packed(
    sources: tuple[Nvfp4Tensor, ...],
    weight: Nvfp4Tensor,
    bias: torch.Tensor | None,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: int,
    relu: bool,
    dtype: torch.dtype,
    out_amax: torch.Tensor | None,
    by_triton: Callable[[], Output],
) -> Output:
    """The convolution of packed operands that `by_triton` computes; arguments as of `block_scaled.conv2d`."""
    device, taps = weight.codes.device, weight.shape[1:-1]
    if not block_scaled.supports(tuple(taps), tuple(strides)) or not block_scaled.is_available(device):
        return by_triton()
    around = padding[0], padding[1]

    def own() -> Output:
        place = (strides[0], around, dilation, relu, dtype, out_amax)
        return block_scaled.conv2d(sources, weight, bias, *place)

    shapes = (*(x.shape for x in sources), weight.shape)
    name = ("packed", shapes, strides[0], around, dilation, dtype, bias is None, relu, out_amax is None)
    codes = [each.codes for each in (*sources, weight)]
    return _faster(name, by_triton, own, block_scaled.fallback, *codes, worth=PACKED_WORTH)


def _takes_small_k(x: torch.Tensor, filters: torch.Tensor, place: Place) -> bool:
    """x: [N, C, H, W]; filters: [O, KH, KW, C]."""
    outputs, kh, kw, channels = filters.shape
    if x.dtype not in NARROW or x.dtype != filters.dtype or not small_k.fallback.runs(x.device):
        return False
    return small_k.supports(channels, outputs, (kh, kw), *place, deepest=DEEPEST) and small_k.is_aligned(
        x.permute(0, 2, 3, 1), filters, place.stride, place.padding
    )


def _faster(
    name: tuple[Any, ...],
    by_torch: Callable[[], Result],
    own: Callable[[], Result],
    fallback: Fallback,
    *operands: torch.Tensor,
    worth: float = WORTH,
) -> Result:
    """The result of the faster one; of torch's where the other does not run after all."""
    device = operands[0].device
    timed: tuple[Any, ...] = (*name, *(each.stride() for each in operands), torch.backends.cudnn.benchmark)
    known = (*timed, device.index)
    choice = _choices.get(known)
    if choice is None:
        choice = _settled(known, device, _choice(timed, by_torch, own, operands, fallback, worth))
    if choice == OWN:
        with fallback.guard(device):
            return own()
        _settled(known, device, None)
    return by_torch()


def _settled(known: tuple[Any, ...], device: torch.device, choice: str | None) -> str | None:
    """Remember a choice in this process: torch's of a kernel that missed, which is not measured again in each call."""
    if choice is None and not is_capturing(device.index):
        choice = TORCH
    if choice is not None:
        _choices[known] = choice
    return choice


def _choice(
    timed: tuple[Any, ...],
    by_torch: Callable[[], Output],
    own: Callable[[], Output],
    operands: Sequence[torch.Tensor],
    fallback: Fallback,
    worth: float,
) -> str | None:
    """What was kept for this GPU, or is measured now; None while a CUDA graph is captured, or where `own` missed."""
    device = operands[0].device
    kept = key(["convolution 2", str(timed), torch.cuda.get_device_name(device), versions(), _source()])
    choice = remembered(kept, (TORCH, OWN))
    if choice is not None or is_capturing(device.index):
        return choice
    y = by_torch()  # and cuDNN has chosen
    written = y.codes if isinstance(y, Nvfp4Tensor) else y
    with torch.cuda.device(device):
        floor = sum(each.nbytes for each in (written, *operands)) / MEMORY
        if milliseconds(by_torch) < floor + worth:
            remember(kept, TORCH)
            return TORCH
    with fallback.guard(device):
        own()  # compiled
        return fastest(kept, {TORCH: by_torch, OWN: own}, device)
    return None


@lru_cache
def _source() -> str:
    """Of the kernels, of what chooses their variants, and of what compiles them."""
    nvcc, folder = find_nvcc(), Path(__file__).parents[1] / "cuda"
    files = [folder / name for name in ("small_k_conv.cu", "narrow_wgrad.cu", block_scaled.SOURCE)]
    files += [header for each in SOURCES for header in sorted(each.glob("*.cuh"))]
    files += [Path(str(module.__file__)) for module in (small_k, narrow_wgrad, block_scaled)]
    return key([nvcc_version(nvcc) if nvcc else "", *(file.read_bytes() for file in files)])
