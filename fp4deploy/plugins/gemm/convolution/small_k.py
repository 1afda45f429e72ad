"""Convolutions in 16 bits whose sum has few elements, on tensor cores: first and last layers of a packed network.

    y, moments = conv2d(image.permute(0, 2, 3, 1), weight, bias, padding=(1, 1), moments=True)

A first layer of 3 channels multiplies 27 elements for an output, a head of 1 x 1 some 64. Both are bound by memory, and
cuDNN's kernels, made for long sums, take several times as long as memory would. `cuda/small_k_conv.cu` reads x and
writes the output once; bias, ReLU and the moments for a GroupNorm need no pass of their own, and neither does an image
in NCHW, FP16 or FP32: x has any strides.

`supports` says for which convolutions: one group, dilation 1, stride 1 or 2, up to `DEEPEST` elements of K and
`MAX_OUTPUTS` outputs. The order of the sum is the kernel's own (`conv2d_reference` computes in float64): results
differ in the last bits from those of cuDNN, and from those of `plain`, which adds element by element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F

from fp4deploy.graph.sizes import output_size
from fp4deploy.plugins.gemm.arguments import aligned
from fp4deploy.plugins.quantize.statistics import Moments
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.launch import kernel, num_sms
from fp4deploy.plugins.runtime.pdl import launch_secondary
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES

Pair = tuple[int, int]

DEEPEST = 208  # elements of K, channels padded: 7 x 7 taps of 3 channels
MAX_OUTPUTS = 128
WARPS, WIDTH, STRIP = 8, 32, 16  # of a block; pixels across its tile; pixels of an mma
HELD = 16  # mma of a strip whose weights fit registers
SHARED = 96 * 1024  # bytes of a block, which every GPU from SM80 on allows
COUNTED = 2**31 - 2**16  # elements that 32-bit indices can count
SIGNATURE = "PPPPPq" + 14 * "i"

fallback = Fallback("Convolutions of small K", "torch")


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for, but for the types.

    taps: height and width of the filter; columns: outputs that a block computes; rows: of the tile, a warp; store:
    outputs of a store, 0: through shared memory; point: filters of 1 x 1 that read x without shared memory; resident:
    blocks of a multiprocessor.
    """

    channels: int
    taps: Pair
    stride: int
    columns: int
    rows: int
    store: int
    point: bool
    resident: int

    @property
    def tile(self) -> Pair:
        """Height and width in pixels; with `point` a run of pixels."""
        parts = WARPS // max(1, self.columns // 32)
        return (1, parts * self.rows * 2 * STRIP) if self.point else (parts * self.rows, WIDTH)

    def tiles(self, oh: int, ow: int) -> Pair:
        """How many tiles an output of this size has, down and across."""
        height, width = self.tile
        return -(-oh // height), -(-ow // width)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: weights that registers do not hold, then two tiles with their border."""
        (kh, kw), (height, width) = self.taps, self.tile
        wide, padded = min(self.columns, 32), padded_channels(self.channels)
        steps = -(-kh * kw * padded // 16)
        weights = 0 if steps * wide // 8 <= HELD else steps * self.columns // 8 * 32 * 8
        if self.point:
            return weights
        pitch = padded + 16 if padded % 16 == 0 and padded % 32 != 16 else padded
        return weights + 2 * ((height - 1) * self.stride + kh) * ((width - 1) * self.stride + kw) * pitch * 2

    @property
    def static_bytes(self) -> int:
        """Other shared memory: bias, moments of warps, rows of outputs."""
        wide = min(self.columns, 32)
        moments = 2 * WARPS * wide * 8
        return 4 * self.columns + moments + WARPS * 2 * (8 if self.store else STRIP * wide + 8)

    def macros(self, value: torch.dtype, moments: bool, half: torch.dtype = torch.float16) -> dict[str, str | int]:
        """Of `small_k_conv.cu`; value: of x, half: of the weight and the output."""
        numbers = {"C": self.channels, "KH": self.taps[0], "KW": self.taps[1], "STRIDE": self.stride}
        numbers |= {"COLUMNS": self.columns, "ROWS": self.rows, "STORE": self.store, "POINT": int(self.point)}
        types = {"VALUE": CUDA_TYPES[value]} | ({"HALF": CUDA_TYPES[half]} if half != torch.float16 else {})
        return {**types, **numbers, "MOMENTS": int(moments), "RESIDENT": self.resident}


def padded_channels(channels: int) -> int:
    """Channels of a pixel in shared memory."""
    return -(-channels // 4) * 4


@lru_cache
def supports(
    channels: int,
    outputs: int,
    taps: Pair,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
    deepest: int = DEEPEST,
) -> bool:
    """Whether the kernel computes a convolution.

    deepest: elements of K, channels padded; above `DEEPEST` it is faster than cuDNN for some shapes alone.
    """
    if groups != 1 or dilation != (1, 1) or stride not in ((1, 1), (2, 2)) or not 0 < outputs <= MAX_OUTPUTS:
        return False
    if min(*taps, channels) < 1 or math.prod(taps) * padded_channels(channels) > deepest:
        return False
    chosen = variant(channels, outputs, taps, stride[0], padding)
    return chosen.shared_bytes + chosen.static_bytes <= SHARED


@lru_cache
def variant(channels: int, outputs: int, taps: Pair, stride: int = 1, padding: Pair = (0, 0)) -> Variant:
    """The variant for a convolution that the kernel `supports`."""
    point = taps == (1, 1) and stride == 1 and padding == (0, 0) and channels % 16 == 0
    columns = 16 if outputs <= 16 else 32 if outputs <= 32 else 64
    rows = (4 if columns == 64 else 2) // stride
    if channels > 4 and channels % 8:
        rows = max(1, rows // 2)  # the next tile is read into registers
    store = next(each for each in (8, 4, 2, 1) if outputs % each == 0 and each <= columns // 4)
    if store < 4 and columns <= 32:
        store = 0
    three = Variant(channels, taps, stride, columns, rows, store, point, 3)
    if three.shared_bytes + three.static_bytes > SHARED:
        three = replace(three, rows=1)
    # As many blocks as have registers and, on an H100, shared memory.
    return three if columns == 16 and three.shared_bytes <= SHARED * 2 // 3 else replace(three, resident=2)


def is_aligned(x: torch.Tensor, weight: torch.Tensor, stride: Pair = (1, 1), padding: Pair = (0, 0)) -> bool:
    """Whether sizes are within the kernel's counters, and there is an output at all.

    x: [N, H, W, C] of any strides; weight: [O, KH, KW, C].
    """
    n, h, w, c = x.shape
    outputs, kh, kw, _ = weight.shape
    oh, ow = output_size(h, kh, stride[0], padding[0], 1), output_size(w, kw, stride[1], padding[1], 1)
    if min(n, c, oh, ow, outputs) < 1:
        return False
    reached = sum((size - 1) * step for size, step in zip(x.shape[1:], x.stride()[1:], strict=True))
    largest = max(reached, h * w * c, n * oh * ow, (h + 2 * padding[0]) * (w + 2 * padding[1]))
    return largest < COUNTED


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    relu: bool = False,
    moments: bool = False,
    chosen: Variant | None = None,
) -> tuple[torch.Tensor, Moments | None]:
    """relu(conv2d(x, weight) + bias) on a GPU, and the moments of the output if asked for.

    Operands are those that the kernel `supports` and `is_aligned`.

    Args:
        x: float32 or of the weight's dtype, [N, H, W, C] of any strides, such as an image [N, C, H, W] permuted; it is
            rounded to the weight's dtype, and copied if its channels are a multiple of 8 and it is not contiguous.
        weight: float16 or bfloat16 [O, KH, KW, C].
        bias: float32 [O].
        moments: of the rounded output, for a GroupNorm.
        chosen: instead of what `variant` chooses.

    Returns:
        [N, OH, OW, O] of the weight's dtype, and the moments.

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    outputs, kh, kw, channels = weight.shape
    chosen = chosen or variant(channels, outputs, (kh, kw), stride[0], padding)
    weight = aligned(weight.contiguous())
    if channels % 8 == 0:
        x = aligned(x.to(weight.dtype).contiguous())
    elif x.dtype != torch.float32:
        x = x.to(weight.dtype)
    n, h, w = x.shape[:3]
    oh, ow = output_size(h, kh, stride[0], padding[0], 1), output_size(w, kw, stride[1], padding[1], 1)
    out = torch.empty((n, oh, ow, outputs), dtype=weight.dtype, device=x.device)
    items, height, width = n, oh, ow
    if chosen.point:
        items, height, width = (n, 1, oh * ow) if moments else (1, 1, n * oh * ow)
    down, across = chosen.tiles(height, width)
    tiles, found = items * down * across, None
    if moments:
        parts = torch.empty(tiles, 2, 2, outputs, dtype=torch.float32, device=x.device)
        found = Moments(parts, math.prod(chosen.tile), down * across, (0, 0) if chosen.point else chosen.tile)
    slices = -(-outputs // chosen.columns)
    programs = min(tiles, max(1, chosen.resident * num_sms(x.device) // slices))
    item, row, column, plane = x.stride()
    run = kernel("small_k_conv.cu", "small_k_conv", SIGNATURE, chosen.macros(x.dtype, moments, weight.dtype), x.device)
    launch_secondary(
        run,
        (programs, slices),
        32 * WARPS,
        *(x, weight, bias, out, None if found is None else found.parts),
        *(h * w * channels if chosen.point and moments else item, row, column, plane),
        *(h, w, height, width, outputs, *padding, int(relu), across, down * across, tiles),
        shared=chosen.shared_bytes,
    )
    return out, found


def conv2d_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    relu: bool = False,
) -> torch.Tensor:
    """`conv2d` in float64, rounded once: the same bytes where FP32 sums are exact."""
    wide, filters = x.to(weight.dtype).double().permute(0, 3, 1, 2), weight.double().permute(0, 3, 1, 2)
    y = F.conv2d(wide, filters, None if bias is None else bias.double(), stride, padding)
    return (y.relu() if relu else y).to(weight.dtype).permute(0, 2, 3, 1).contiguous()
