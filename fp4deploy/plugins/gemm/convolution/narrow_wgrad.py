"""Weight gradients of convolutions of few channels, FP16 or BF16, on tensor cores: `cuda/narrow_wgrad.cu`.

    dw = wgrad(g, x, taps=(3, 3), padding=(1, 1))        [N, OH, OW, O] and [N, H, W, C] -> [O, KH, KW, C]

The GEMM contracts all pixels, and its result has outputs x taps x channels elements. Where these are few, both operands
are read once from memory and little is multiplied; cuDNN's kernels, made for many channels, take several times as long.
Thread blocks have a sum each over their tiles, in FP32, which are added in order: the same operands give the same bits.

`supports` says for which convolutions: one group, dilation 1, stride 1 or 2, and sums that fit the registers of a
thread block. An Inf or NaN of x also reaches taps by which only outputs beyond the map would read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from fp4deploy.plugins.gemm.arguments import aligned
from fp4deploy.plugins.gemm.convolution.small_k import COUNTED
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.launch import kernel, num_sms
from fp4deploy.plugins.runtime.pdl import launch_secondary
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES

Pair = tuple[int, int]

WARPS, WIDTH = 8, 32  # of a block; pixels across its tile
HELD, MOST_HELD = 24, 28  # mma of a warp whose sums fit 128 registers, and 255
ROWS = (8, 4, 2, 1)  # of a tile
# Bytes of shared memory of a block: that leave room for a third on SM90, and that every GPU from SM80 on allows.
THREE_BLOCKS, SHARED = 64 * 1024, 99 * 1024

fallback = Fallback("Weight gradients of few channels", "torch")


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for, but for the type.

    rows: of a tile; across, shares: warps that outputs, and taps and channels, are divided among; resident: blocks of a
    multiprocessor.
    """

    channels: int
    outputs: int
    taps: Pair
    stride: int
    rows: int
    across: int
    shares: int
    resident: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: two buffers of tiles, later the sums."""
        units_x, units_g = -(-self.channels // 8), -(-self.outputs // 16) * 2
        (kh, kw), stride = self.taps, self.stride
        pixels = ((self.rows - 1) * stride + kh) * ((WIDTH - 1) * stride + kw)
        tiles = pixels * (units_x | 1) + self.rows * WIDTH * (units_g | 1)
        return max(2 * tiles * 16, 4 * 8 * units_g * 8 * kh * kw * units_x)

    def macros(self, dtype: torch.dtype) -> dict[str, str | int]:
        """Of `narrow_wgrad.cu`."""
        numbers = {"C": self.channels, "O": self.outputs, "KH": self.taps[0], "KW": self.taps[1], "STRIDE": self.stride}
        numbers |= {"ROWS": self.rows, "ACROSS": self.across, "SHARES": self.shares, "RESIDENT": self.resident}
        return {"HALF": CUDA_TYPES[dtype], **numbers}


def supports(channels: int, outputs: int, taps: Pair, stride: Pair = (1, 1)) -> bool:
    """Whether the kernel computes the weight gradient of a convolution of one group and dilation 1."""
    return (
        stride in ((1, 1), (2, 2))
        and min(channels, outputs, *taps) > 0
        and _variant(channels, outputs, taps, stride[0]) is not None
    )


def is_aligned(g: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether there is something to add, within the kernel's counters of one image; both [N, channels, H, W]."""
    return g.numel() > 0 and x.numel() > 0 and max(g[0].numel(), x[0].numel(), g.numel() // g.shape[1]) < COUNTED


@lru_cache
def _variant(channels: int, outputs: int, taps: Pair, stride: int) -> Variant | None:
    """The variant for a convolution; None where sums or tiles do not fit."""
    tiles, blocks = -(-outputs // 16), math.prod(taps) * -(-channels // 8)
    choices = []
    for across in (each for each in (1, 2, 4, 8) if tiles % each == 0):
        for shares in (each for each in (1, 2, 4, 8) if across * each <= WARPS):
            pairs, own = (-(-blocks // shares) + 1) // 2, tiles // across
            if 2 * pairs * own <= MOST_HELD:  # what counts is how often fragments are loaded
                choices.append((2 * pairs * own > HELD, across * shares * (own + pairs), across, shares))
    for large, _, across, shares in sorted(choices):
        for most in (THREE_BLOCKS, SHARED):
            for rows in ROWS:
                found = Variant(channels, outputs, taps, stride, rows, across, shares, 1 if large else 2)
                if found.shared_bytes <= most:
                    return found
    return None


def wgrad(g: torch.Tensor, x: torch.Tensor, taps: Pair, stride: Pair = (1, 1), padding: Pair = (0, 0)) -> torch.Tensor:
    """The weight gradient on a GPU, of operands that the kernel `supports` and `is_aligned`.

    Args:
        g: float16 or bfloat16 [N, OH, OW, O], the gradient of the output; copied if it is not contiguous.
        x: [N, H, W, C], the input, of the dtype of `g`; copied as well.

    Returns:
        [O, KH, KW, C] of that dtype, summed in float32.

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    g, x = aligned(g.contiguous()), aligned(x.contiguous())
    (n, oh, ow, outputs), (_, h, w, channels) = g.shape, x.shape
    chosen = _variant(channels, outputs, taps, stride[0])
    assert chosen is not None, "supports"
    down, across = -(-oh // chosen.rows), -(-ow // WIDTH)
    tiles = n * down * across
    programs = min(tiles, chosen.resident * num_sms(x.device))
    parts = torch.empty(programs, outputs, *taps, channels, dtype=torch.float32, device=x.device)
    run = kernel("narrow_wgrad.cu", "narrow_wgrad", "PPPiiiiiiiii", chosen.macros(x.dtype), x.device)
    sizes = (h, w, oh, ow, *padding, across, down * across, tiles)
    launch_secondary(run, programs, 32 * WARPS, g, x, parts, *sizes, shared=chosen.shared_bytes)
    return parts.sum(0).to(x.dtype)


def wgrad_reference(
    g: torch.Tensor, x: torch.Tensor, taps: Pair, stride: Pair = (1, 1), padding: Pair = (0, 0)
) -> torch.Tensor:
    """`wgrad` in float64, rounded once: the same bytes where FP32 sums are exact."""
    like = x.new_empty((g.shape[-1], x.shape[-1], *taps), dtype=torch.float64)
    wide = [each.double().permute(0, 3, 1, 2) for each in (g, x)]
    options = (list(stride), list(padding), [1, 1], False, [0, 0], 1, (False, True, False))
    dw: torch.Tensor = torch.ops.aten.convolution_backward(*wide, like, None, *options)[1]
    return dw.permute(0, 2, 3, 1).to(x.dtype)
