"""Direct convolutions of packed activations with few channels: inference before Blackwell.

    y, moments = conv2d((x,), decode_weight(packed, (16,)), padding=(1, 1), moments=True)

`decoded` multiplies an implicit GEMM: every program reads and decodes a pixel again for each tap. Where a pixel has few
channels, that takes several times as long as memory or tensor cores would. `cuda/direct_conv.cu` decodes a tile of the
input once into shared memory and multiplies all taps from there. The order of the sum is its own, so that results
differ from those of `decoded` in the last bits.

`supports` says for which convolutions: stride and dilation 1, at most 3 x 3 taps, sources of equal channels; transposed
ones took as long or longer than by `decoded` (135 us against 134, one image 18.2 against 13.5; one H200, 2026-11-26,
`benchmarks/results/direct_conv_h200.json`). With fewer tiles than programs that a GPU runs at a time, decoding and
multiplying do not overlap, and `decoded` was as fast or faster: `fills_gpu` says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fp4deploy.formats import E2M1_MAX, Nvfp4Tensor
from fp4deploy.plugins.gemm.arguments import output_buffers, output_of
from fp4deploy.plugins.gemm.convolution.decoded_weight import DecodedWeight
from fp4deploy.plugins.quantize.statistics import Moments
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.launch import kernel, num_sms
from fp4deploy.plugins.runtime.pdl import launch_secondary
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES

Pair = tuple[int, int]
Result = tuple[torch.Tensor | Nvfp4Tensor, Moments | None]

CHANNELS = (16, 32)  # of a source
COLUMNS = (32, 16)  # outputs that a block computes, the first that divides them all
WARPS, WIDTH = 8, 32  # of a block; pixels across its tile
RESIDENT = 2  # blocks that a multiprocessor runs at a time
SIGNATURE = "PPPPPPPPPPPPPiiiiiiiiiiiifff"

fallback = Fallback("Convolutions of few channels", "implicit GEMM")


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for, but for the dtype.

    channels: of a source; taps: height and width of the filter; columns: outputs of a block; rows: of the tile, a
    warp.
    """

    channels: int
    sources: int
    taps: Pair
    columns: int
    rows: int

    @property
    def tile(self) -> Pair:
        """Height and width in pixels."""
        return WARPS * self.rows, WIDTH

    def tiles(self, oh: int, ow: int) -> Pair:
        """How many tiles an output of this size has, down and across."""
        height, width = self.tile
        return -(-oh // height), -(-ow // width)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: weights, then a decoded tile with its border."""
        (kh, kw), (height, width) = self.taps, self.tile
        weights = self.sources * kh * kw * self.channels * self.columns * 2
        return weights + (height + kh - 1) * (width + kw - 1) * self.channels * 2

    def macros(self, dtype: torch.dtype, moments: bool) -> dict[str, str | int]:
        """Of `direct_conv.cu`."""
        numbers = {"C": self.channels, "SOURCES": self.sources, "KH": self.taps[0], "KW": self.taps[1]}
        numbers |= {"OUTPUTS": self.columns, "ROWS": self.rows, "MOMENTS": int(moments)}
        return {"DTYPE": CUDA_TYPES[dtype], **numbers}


def supports(channels: tuple[int, ...], outputs: int, taps: Pair, stride: int = 1, dilation: int = 1) -> bool:
    """Whether the kernel computes a convolution.

    channels: of each source; taps: height and width of the filter.
    """
    same = len({*channels}) == 1 and channels[0] in CHANNELS
    small = max(taps) <= 3 and stride == dilation == 1
    return same and len(channels) <= 2 and small and outputs % 16 == 0


def fills_gpu(chosen: Variant, pixels: tuple[int, int, int], num_sms: int) -> bool:
    """Whether there are as many tiles as programs that run at a time.

    pixels: N, height and width of the output.
    """
    n, oh, ow = pixels
    return n * math.prod(chosen.tiles(oh, ow)) >= RESIDENT * num_sms


def is_available(device: torch.device) -> bool:
    """Whether it was not refused on a device, and CUDA kernels run there."""
    return device.type != "cuda" or fallback.runs(device)


def variant(channels: tuple[int, ...], outputs: int, taps: Pair) -> Variant:
    """The variant for a convolution that the kernel `supports`."""
    columns = next(each for each in COLUMNS if outputs % each == 0)
    rows = 2 if channels[0] * columns <= 16 * 16 else 1  # as many as accumulators have registers for
    return Variant(channels[0], len(channels), taps, columns, rows)


def conv2d(
    sources: tuple[Nvfp4Tensor, ...],
    weight: DecodedWeight,
    bias: torch.Tensor | None = None,
    padding: Pair = (0, 0),
    relu: bool = False,
    dtype: torch.dtype = torch.float16,
    out_amax: torch.Tensor | None = None,
    moments: bool = False,
    chosen: Variant | None = None,
) -> Result:
    """relu(conv2d(concatenation of the sources, weight) + bias) on a GPU, and the moments of the output if asked for.

    Args:
        sources: packed [N, H, W, C] each.
        weight: decoded for these sources.
        bias: float32 [O].
        out_amax: float32 [], the global amax of a packed output; None gives `dtype`.
        moments: of the rounded output, for a GroupNorm.
        chosen: instead of what `variant` chooses.

    Returns:
        [N, OH, OW, O] or packed, and the moments.

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    x, second = sources[0], sources[-1]
    n, h, w = x.shape[:3]
    outputs, kh, kw, _ = weight.shape
    chosen = chosen or variant(tuple(16 * source.scales.shape[-1] for source in sources), outputs, (kh, kw))
    oh, ow = h + 2 * padding[0] - kh + 1, w + 2 * padding[1] - kw + 1
    device, (tiles_y, tiles_x) = x.codes.device, chosen.tiles(oh, ow)
    shape = (n, oh, ow, outputs)
    (out, scales), found = output_buffers(shape, dtype, out_amax, device), None
    if moments:
        parts = torch.empty(n * tiles_y * tiles_x, 2, 2, outputs, dtype=torch.float32, device=device)
        found = Moments(parts, math.prod(chosen.tile), tiles_y * tiles_x, chosen.tile)
    slices = outputs // chosen.columns
    tiles = n * tiles_y * tiles_x
    programs = min(tiles, max(1, RESIDENT * num_sms(device) // slices))
    run = kernel("direct_conv.cu", "direct_conv", SIGNATURE, chosen.macros(dtype, found is not None), device)
    launch_secondary(
        run,
        (programs, slices),
        32 * WARPS,
        *(*x.as_bytes, *second.as_bytes),
        *(weight.planes, weight.amax, bias, out, scales, out_amax, None if found is None else found.parts),
        *(h, w, oh, ow, outputs, weight.planes.shape[2], *padding, int(relu), tiles_y, tiles_x, tiles),
        *(E2M1_MAX * each.e4m3_max for each in (x, second, weight)),
        shared=chosen.shared_bytes,
    )
    return output_of(out, scales, out_amax, shape), found
