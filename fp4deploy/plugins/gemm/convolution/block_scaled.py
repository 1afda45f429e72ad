"""Convolutions of packed operands by block-scaled mma.sync: inference on SM120 and SM121, beside Triton's kernel.

    y = conv2d((x,), packed, bias, padding=(1, 1), relu=True)

`cuda/block_scaled_conv.cu` is warp-specialised and copies a tile of pixels with its border once for all taps. It
computes what `triton.gemm` does, from the same operands, but for the order of the sum. Nobody has timed it:
`dispatch.conv2d` measures both on the first call (`fastest.convolve_packed`) and keeps the faster one.

Where nvcc is missing it comes from the kernel store (`plugins.aot`), in which `launches` says what a layer can take.

`supports` says for which convolutions: two spatial axes of equal strides, any channels, any filter that `dispatch`
takes. `Variant` says what a block keeps in shared memory.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from fp4deploy.architecture import Architecture
from fp4deploy.formats import E2M1_MAX, Nvfp4Tensor
from fp4deploy.plugins.aot import load as aot
from fp4deploy.plugins.aot.compile import compiled_before
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.gemm.arguments import aligned, output_buffers, output_of
from fp4deploy.plugins.gemm.reference import Output, output_sizes
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.launch import kernel, num_sms
from fp4deploy.plugins.runtime.pdl import launch_secondary
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES

Pair = tuple[int, int]

SOURCE = "block_scaled_conv.cu"
ARCHITECTURES = (120, 121)
CHUNK, CHUNK_BYTES = 64, 36  # channels of a step; bytes of a pixel or an output in it, codes and scales
SHARED, RESERVED = 102_400, 1024  # bytes of a multiprocessor, and of it for each block
BUFFERS, FEWEST_STAGES, MAX_STAGES = 2, 4, 8
NAME, SIGNATURE = "block_scaled_conv", "PPPPPPPPPPPPPiiiiiiiiiiiifff"
TYPES = {"P": "*u8", "i": "i32", "f": "fp32"}  # of a description
fallback = Fallback("NVFP4 convolutions on SM120", "Triton's")


@dataclass(frozen=True)
class Tile:
    """Height and width in pixels, outputs; producer warps; blocks that a multiprocessor runs at a time.

    Registers of two blocks of four consumer warps are reallocated from four producer warps each.
    """

    height: int
    width: int
    outputs: int
    producers: int
    resident: int

    @property
    def pixels(self) -> int:
        """Of a block."""
        return self.height * self.width

    @property
    def threads(self) -> int:
        """Of a block: a consumer warp for each 64 pixels and 64 outputs, and producers."""
        return 32 * (self.pixels * self.outputs // 64**2 + self.producers)


WIDE, TALL, SMALL = Tile(8, 16, 128, 4, 2), Tile(16, 16, 64, 4, 2), Tile(8, 8, 64, 1, 4)


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for, but for the dtype and the form of the output.

    halo: a tile of pixels lies in shared memory with its border, for all taps, which is for stride 1; else a stage has
    the pixels of its tap;
    whole: sources have whole chunks of channels; sources: how many; stages: of weights.
    """

    tile: Tile
    taps: Pair
    stride: int
    dilation: int
    halo: bool
    whole: bool
    sources: int
    stages: int

    @property
    def buffer_bytes(self) -> int:
        """Of the pixels of a chunk."""
        border = [(taps - 1) * self.dilation if self.halo else 0 for taps in self.taps]
        pixels = (self.tile.height + border[0]) * (self.tile.width + border[1])
        return -(-pixels * CHUNK_BYTES // 128) * 128

    @property
    def stage_bytes(self) -> int:
        """Of the weights of a step, and of its pixels without `halo`."""
        return self.tile.outputs * CHUNK_BYTES + (0 if self.halo else self.buffer_bytes)

    @property
    def fixed_bytes(self) -> int:
        """Of shared memory besides stages: buffers and their mbarriers."""
        return BUFFERS * ((self.buffer_bytes if self.halo else 0) + 16)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.stages * (self.stage_bytes + 16) + self.fixed_bytes

    def macros(self, dtype: torch.dtype, packed: bool, outputs: int) -> dict[str, str | int]:
        """Of `block_scaled_conv.cu`."""
        numbers = {"KH": self.taps[0], "KW": self.taps[1], "STRIDE": self.stride, "DILATION": self.dilation}
        numbers |= {"TH": self.tile.height, "TW": self.tile.width, "OUTPUTS": self.tile.outputs}
        numbers |= {"PRODUCERS": self.tile.producers, "RESIDENT": self.tile.resident, "SOURCES": self.sources}
        numbers |= {"HALO": int(self.halo), "WHOLE": int(self.whole), "PACKED": int(packed)}
        numbers["EIGHTS"] = int(packed or outputs % 8 == 0)
        return {"DTYPE": CUDA_TYPES[dtype], **numbers, "STAGES": self.stages, "BUFFERS": BUFFERS}

    def launch(self, dtype: torch.dtype, packed: bool, outputs: int) -> Launch:
        """The description that the kernel store knows it by."""
        arguments = tuple((f"{letter}{place}", TYPES[letter]) for place, letter in enumerate(SIGNATURE))
        macros, warps = self.macros(dtype, packed, outputs), self.tile.threads // 32
        constants = tuple(macros.items())
        return Launch(f"{SOURCE}:{NAME}", arguments, constants, (), warps, self.stages, shared=self.shared_bytes)


def supports(taps: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the kernel computes a convolution with such a filter."""
    return len(taps) == 2 and len({*strides}) == 1


def is_available(device: torch.device) -> bool:
    """Whether a device has the instruction, did not refuse the kernel, and has nvcc or variants that are compiled."""
    if device.type != "cuda" or fallback.refused(device) or not _has_instruction(device.index):
        return False
    return fallback.runs(device) or aot.any_compiled(device, NAME)


def _compiled(chosen: Variant, form: tuple[torch.dtype, bool, int], index: int) -> bytes:
    return compiled_before(chosen.launch(*form), Architecture.of_device(index).triton_name).cubin


@lru_cache
def _has_instruction(index: int | None) -> bool:
    return Architecture.of_device(index).number in ARCHITECTURES


def variant(
    channels: tuple[int, ...],
    outputs: int,
    taps: Pair,
    stride: int,
    dilation: int,
    pixels: tuple[int, int, int],
    num_sms: int,
) -> Variant:
    """The variant for a convolution.

    channels: of each source, in whole blocks; pixels: N, height and width of the output.
    """
    tile = WIDE if outputs > 64 else TALL
    n, oh, ow = pixels
    if n * -(-oh // tile.height) * -(-ow // tile.width) * -(-outputs // tile.outputs) < num_sms:
        tile = SMALL
    if taps == (1, 1):  # feature maps are one row: `conv2d`
        tile = Tile(1, tile.pixels, tile.outputs, tile.producers, tile.resident) if oh == 1 else tile
    whole = all(count % CHUNK == 0 for count in channels)
    dilation = 1 if taps == (1, 1) else dilation
    room = SHARED // tile.resident - RESERVED
    for halo in (True, False) if math.prod(taps) > 1 and stride == 1 else (False,):
        form = Variant(tile, taps, stride, dilation, halo, whole, len(channels), 0)
        stages = min(MAX_STAGES, (room - form.fixed_bytes) // (form.stage_bytes + 16))
        if stages >= FEWEST_STAGES or not halo:
            break
    return Variant(tile, taps, stride, dilation, halo, whole, len(channels), stages)


def launches(
    channels: tuple[int, ...],
    outputs: int,
    taps: Pair,
    stride: int,
    padding: Pair,
    dilation: int,
    dtype: torch.dtype,
    packed: bool,
) -> list[Launch]:
    """What `conv2d` launches for a layer, for few pixels and for many; channels: as of `variant`."""
    heights = (2,) if taps != (1, 1) else (1,) if (stride, padding) == (1, (0, 0)) else (1, 2)
    cases = itertools.product(heights, (0, 1 << 30))
    found = (variant(channels, outputs, taps, stride, dilation, (1, height, 2), num_sms) for height, num_sms in cases)
    return list(dict.fromkeys(each.launch(dtype, packed, outputs) for each in found))


def conv2d(
    sources: tuple[Nvfp4Tensor, ...],
    weight: Nvfp4Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: Pair = (0, 0),
    dilation: int = 1,
    relu: bool = False,
    dtype: torch.dtype = torch.float16,
    out_amax: torch.Tensor | None = None,
    chosen: Variant | None = None,
) -> Output:
    """relu(conv2d(concatenation of the sources, weight) + bias) on a GPU; arguments as of `dispatch.conv2d`.

    chosen: instead of what `variant` chooses.

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    x, second, device = sources[0], sources[-1], sources[0].codes.device
    (n, h, w), (outputs, kh, kw) = x.shape[:3], weight.shape[:3]
    oh, ow = output_sizes((h, w), (kh, kw), stride, padding, dilation)
    shape = (n, oh, ow, outputs)
    if (kh, kw, stride, padding) == (1, 1, 1, (0, 0)):  # pixels of all items are one row
        n, h, w, oh, ow = 1, 1, n * h * w, 1, n * h * w
    bytes_of = tuple(source.codes.shape[-1] for source in sources)
    if chosen is None:
        channels = tuple(2 * count for count in bytes_of)
        chosen = variant(channels, outputs, (kh, kw), stride, dilation, (n, oh, ow), num_sms(device))
    tile = chosen.tile
    down, across = -(-oh // tile.height), -(-ow // tile.width)
    out, scales = output_buffers(shape, dtype, out_amax, device)
    added = None if bias is None else bias.to(torch.float32).contiguous()
    operands = [
        (aligned(codes), aligned(bytes_), amax)
        for codes, bytes_, amax in (x.as_bytes, second.as_bytes, weight.as_bytes)
    ]
    form = (dtype, scales is not None, outputs)
    run = kernel(SOURCE, NAME, SIGNATURE, chosen.macros(*form), device, partial(_compiled, chosen, form))
    launch_secondary(
        run,
        n * down * across * -(-outputs // tile.outputs),
        tile.threads,
        *(part for operand in operands for part in operand),
        *(added, out, scales, out_amax),
        *(h, w, bytes_of[0], bytes_of[1] if len(sources) == 2 else 0, oh, ow, outputs, *padding, int(relu)),
        *(down, across),
        *(E2M1_MAX * each.e4m3_max for each in (x, second, weight)),
        shared=chosen.shared_bytes,
    )
    return output_of(out, scales, out_amax, shape)
