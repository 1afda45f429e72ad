"""Depthwise convolutions of feature maps in channels_last: `cuda/depthwise_conv.cu`.

    y = conv2d(x, weight, bias, stride=(1, 1), padding=(3, 3), dilation=(1, 1))

A result is a sum over the taps of one channel, nothing for a tensor core, and cuDNN's kernels take several times as
long as the multiplications would: the 7 x 7 of a ConvNeXt are a quarter of its time. The kernel loads an element once
for the results of a row that read it. Bias and ReLU are part of it.

`supports` says for which convolutions. The order of a sum is that of the taps, in FP32 (`conv2d_reference` computes in
float64).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fp4deploy.graph.sizes import output_size
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.launch import kernel, num_sms
from fp4deploy.plugins.runtime.pdl import launch_secondary
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES

Pair = tuple[int, int]

COUNTED = 2**31 - 2**16  # pixels that 32-bit indices can count
MAX_TAPS = 81  # whose filters fit the shared memory of a block
MAX_SPAN = 32  # pixels of a row that a thread keeps
PAIRS = 64  # pairs of channels of a block
THREADS = 128  # of a block at most: more blocks fit the registers of a multiprocessor
WARPS = 8  # of a multiprocessor, below which a thread gets fewer pixels
PIECES = (
    (4, 8),
    (2, 8),
    (2, 4),
    (1, 4),
)  # rows and columns of pixels of a thread, from the fewest loads to most threads

fallback = Fallback("Depthwise convolutions", "torch")


def supports(weight: torch.Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> bool:
    """Whether the kernel computes a convolution with this weight, [C, 1, KH, KW]."""
    if weight.ndim != 4 or weight.dtype not in (torch.float16, torch.bfloat16):
        return False
    channels, within, *taps = weight.shape
    if groups != channels or within != 1 or channels < 2 or channels % 2 or math.prod(taps) > MAX_TAPS:
        return False
    return min(*stride, *dilation) > 0 and _span(PIECES[-1][1], taps[1], stride[1], dilation[1]) <= MAX_SPAN


def in_order(weight: torch.Tensor) -> torch.Tensor:
    """A weight [C, 1, KH, KW] whose memory is [KH, KW, C], as the kernel reads it."""
    return weight.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)


def is_aligned(x: torch.Tensor, weight: torch.Tensor, padding: Pair) -> bool:
    """Whether a feature map [N, H, W, C] has the weight's dtype, and its pixels are within the kernel's counters."""
    n, h, w, _ = x.shape
    return x.dtype == weight.dtype and n * (h + 2 * padding[0]) * (w + 2 * padding[1]) < COUNTED


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    relu: bool = False,
    piece: Pair | None = None,
) -> torch.Tensor:
    """relu(depthwise convolution + bias) on a GPU, of what the kernel `supports`.

    Args:
        x: float16 or bfloat16 [N, H, W, C]; copied if it is not contiguous.
        weight: [C, 1, KH, KW], of the dtype of `x`; copied if channels are no neighbours in memory (`in_order`).
        bias: float32 [C].
        piece: rows and columns of the pixels of a thread, instead of what `_piece` chooses.

    Returns:
        [N, OH, OW, C], contiguous, of the dtype of `x`.

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    (n, h, w, channels), (kh, kw) = x.shape, weight.shape[2:]
    oh, ow = (output_size(*axis) for axis in zip((h, w), (kh, kw), stride, padding, dilation, strict=True))
    out = torch.empty((n, oh, ow, channels), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    rows, columns = piece or _piece((n, oh, ow, channels), kw, stride, dilation, num_sms(x.device))
    down, across = -(-oh // rows), -(-ow // columns)
    macros: dict[str, str | int] = {"DTYPE": CUDA_TYPES[x.dtype], "KH": kh, "KW": kw, "SH": stride[0], "SW": stride[1]}
    lanes = _lanes(channels // 2)
    macros |= {"DH": dilation[0], "DW": dilation[1], "ROWS": rows, "COLUMNS": columns, "C": channels, "LANES": lanes}
    strips, pieces = THREADS // lanes, n * down * across
    run = kernel("depthwise_conv.cu", "depthwise_conv", "PPPP" + 10 * "i", macros, x.device)
    grid = -(-pieces // strips), -(-(channels // 2) // lanes)
    tensors = _aligned(x), _aligned(in_order(weight).permute(2, 3, 0, 1)), bias, out
    sizes = (h, w, oh, ow, *padding, int(relu), down, across, pieces)
    launch_secondary(run, grid, lanes * strips, *tensors, *sizes)
    return out


def conv2d_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    relu: bool = False,
) -> torch.Tensor:
    """`conv2d` in float64, rounded once: the same bytes where FP32 sums are exact."""
    shift = None if bias is None else bias.double()
    y = F.conv2d(x.double().movedim(-1, 1), weight.double(), shift, stride, padding, dilation, len(weight))
    return (y.relu() if relu else y).to(x.dtype).movedim(1, -1).contiguous()


def _piece(shape: tuple[int, int, int, int], taps: int, stride: Pair, dilation: Pair, sms: int) -> Pair:
    """Of the pixels [N, OH, OW, C] of a thread: the most that leave the GPU enough threads, and that fit registers."""
    n, oh, ow, channels = shape
    valid = [
        (rows, columns)
        for rows, columns in PIECES
        if (rows == 1 or dilation[0] == 1) and _span(columns, taps, stride[1], dilation[1]) <= MAX_SPAN
    ]
    for rows, columns in valid:
        if n * -(-oh // rows) * -(-ow // columns) * (channels // 2) >= 32 * WARPS * sms:
            return rows, columns
    return valid[-1]


def _span(columns: int, taps: int, stride: int, dilation: int) -> int:
    """Pixels of a row that so many neighbouring results read."""
    return (columns - 1) * stride + (taps - 1) * dilation + 1


def _lanes(pairs: int) -> int:
    """Neighbouring threads for the pairs of channels: a number that divides them, if there is one that fills a load."""
    whole = [lanes for lanes in range(16, PAIRS + 1) if pairs % lanes == 0]
    return max(whole) if whole else min(pairs, 32)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % 4 == 0 else x.clone()
