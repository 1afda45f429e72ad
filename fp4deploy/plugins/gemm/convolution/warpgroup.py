"""Convolutions of packed activations by wgmma, whose weights were decoded to float16: inference on SM90.

    y, moments = conv2d((x,), decode_weight(packed, (64,)), padding=(1, 1), moments=True)

`cuda/warpgroup_conv.cu` decodes a tile of the input, with its border, once for all taps and multiplies from shared
memory, while the next chunk of channels is decoded. The order of the sum is its own, so that results differ from those
of `decoded` in the last bits; it depends on the number of splits and on nothing else of a variant.

`supports` says for which convolutions: stride 1, sources of whole chunks of 64 channels, a multiple of 64 outputs; over
volumes multiples of 32, of which two slices are taken at a time (`decoded_weight.pairs_of_slices`).
`variant` chooses tile and splits by an estimate of the cycles that a program takes (`cycles`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from fp4deploy.architecture import Architecture
from fp4deploy.formats import E2M1_MAX, Nvfp4Tensor
from fp4deploy.plugins.gemm.arguments import output_buffers
from fp4deploy.plugins.gemm.convolution.decoded_weight import PAD, DecodedWeight
from fp4deploy.plugins.quantize.statistics import Moments
from fp4deploy.plugins.runtime.context import library
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.launch import kernel, num_sms
from fp4deploy.plugins.runtime.pdl import launch_secondary
from fp4deploy.plugins.runtime.tma import kernel_tensor_map
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES

Pair = tuple[int, int]
Size3 = tuple[int, int, int]

SOURCE = "warpgroup_conv.cu"
SM = 90  # wgmma exists on this architecture alone
CHUNK = 64  # channels that are decoded at a time
WIDTH = 8  # pixels across the tile of a consumer
HEIGHTS = (4, 8, 12, 16, 20, 24)  # of a tile
THREADS, DECODERS, CONSUMERS = 512, 192, 2  # of a block; threads that decode; warpgroups that multiply
SHARED = 232_448  # bytes that a thread block can have
SCRATCH = 8 * 1024  # bytes
MAX_STAGES, FEWEST_STAGES = 20, 3
MAX_SPLITS = 8
MAX_TAPS = 7  # in each direction
BEGIN, SUM = 11500, 14600  # cycles of `cycles` that no shape changes: of the kernel, and of adding splits up
fallback = Fallback("Convolutions by wgmma", "implicit GEMM")
SIGNATURE = "128sPPPPPPPPPPPPiiiiiiiiiiiiiiifff"


@dataclass(frozen=True)
class Slices:
    """How slices of a volume are read and written.

    depth: slices, or pairs of them, that a filter spans; inputs, outputs: in pairs, of 32 channels and 32 outputs each;
    doubled: a transposed convolution of kernel and stride 2 along the depth, too.
    """

    depth: int = 1
    inputs: bool = False
    outputs: bool = False
    doubled: bool = False

    @property
    def macros(self) -> dict[str, int]:
        """Of `warpgroup_conv.cu`; none for feature maps."""
        if self == Slices():
            return {}
        named = {"VOLUME": not self.doubled, "IN_PAIRS": self.inputs, "OUT_PAIRS": self.outputs}
        return {"KD": self.depth, **{name: int(flag) for name, flag in named.items()}}


@dataclass(frozen=True)
class Shape:
    """A convolution.

    pixels: N, height and width of the output, of a transposed convolution of the input; of volumes N is the number of
    all slices, or pairs of them; chunks: of 64 channels, of each source, once for each slice; taps: height and width of
    the filter; transposed: of kernel and stride 2; packed: whether the output is.
    """

    pixels: Size3
    chunks: tuple[int, ...]
    outputs: int
    taps: Pair
    dilation: int = 1
    transposed: bool = False
    packed: bool = False
    slices: Slices = Slices()

    @property
    def rows(self) -> int:
        """Of the weight."""
        return self.outputs * (2 if self.slices.outputs else 1)

    @property
    def steps(self) -> int:
        """Taps of all chunks."""
        return sum(self.chunks) * math.prod(self.taps)


@dataclass(frozen=True)
class Variant:
    """How a convolution is computed.

    joint: both consumers have one tile and 128 outputs, else two tiles and 64 outputs; height: of a tile; splits: of
    the chunks; stages: of weights, each of a step; buffers: of decoded pixels; resident: the stages keep all weights of
    a program.
    """

    taps: Pair
    dilation: int
    transposed: bool
    joint: bool
    height: int
    splits: int
    stages: int
    buffers: int
    resident: bool
    slices: Slices = Slices()

    @property
    def outputs(self) -> int:
        """Of a program."""
        return 128 if self.joint else 64

    @property
    def pixels(self) -> int:
        """That a program decodes for one chunk."""
        (kh, kw), width = self.taps, WIDTH * (1 if self.joint else CONSUMERS)
        return (self.height + (kh - 1) * self.dilation) * (width + (kw - 1) * self.dilation)

    @property
    def rings(self) -> int:
        """Of weights: joint consumers have one each."""
        return CONSUMERS if self.joint else 1

    @property
    def stage_bytes(self) -> int:
        """Weights of one tap and chunk, of all consumers."""
        return 2 * CHUNK * self.outputs

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        barriers = 16 * (self.stages * self.rings + self.buffers) + 8
        return self.stages * self.stage_bytes + self.buffers * 2 * CHUNK * self.pixels + SCRATCH + barriers

    def tiles(self, oh: int, ow: int) -> Pair:
        """How many tiles an output of this size has, down and across."""
        return -(-oh // self.height), -(-ow // WIDTH)

    @property
    def places(self) -> int:
        """Of an output pixel, relative to the pixel that a transposed convolution reads."""
        return 8 if self.slices.doubled and not self.slices.outputs else 4 if self.transposed else 1

    def columns(self, shape: Shape) -> int:
        """Units of work that have the same pixels: blocks of outputs, places, splits."""
        return shape.rows // self.outputs * self.places * self.splits

    def works(self, shape: Shape) -> int:
        """Units of work."""
        n, oh, ow = shape.pixels
        down, across = self.tiles(oh, ow)
        return n * down * (across if self.joint else -(-across // CONSUMERS)) * self.columns(shape)

    def programs(self, shape: Shape, num_sms: int) -> int:
        """Thread blocks: one for each multiprocessor. With resident weights a program keeps its block of outputs."""
        works, columns = self.works(shape), self.columns(shape)
        programs = min(works, num_sms)
        return programs // columns * columns if self.resident else programs

    def macros(self, dtype: torch.dtype, moments: bool, packed: bool = False) -> dict[str, str | int]:
        """Of `warpgroup_conv.cu`."""
        flags = {"JOINT": self.joint, "RESIDENT": self.resident, "SPLIT": self.splits > 1}
        flags["PACKED"] = packed and self.splits == 1
        numbers = {"HEIGHT": self.height, "KH": self.taps[0], "KW": self.taps[1], "DILATION": self.dilation}
        numbers |= {"STAGES": self.stages, "BUFFERS": self.buffers, "MOMENTS": int(moments and self.splits == 1)}
        numbers |= {"UP": 2 if self.slices.doubled else int(self.transposed), **self.slices.macros}
        return {"DTYPE": CUDA_TYPES[dtype], **numbers, **{name: int(flag) for name, flag in flags.items()}}


def supports(
    channels: tuple[int, ...],
    outputs: int,
    taps: tuple[int, ...],
    stride: int = 1,
    dilation: int = 1,
    transposed: bool = False,
) -> bool:
    """Whether the kernel computes a convolution; arguments as of `direct.supports`, taps perhaps of a volume."""
    deep = len(taps) == 3 and taps[0] > 1
    whole = all(count and count % (CHUNK // 2 if deep and not transposed else CHUNK) == 0 for count in channels)
    whole = whole and outputs > 0 and outputs % (CHUNK // 2 if deep else CHUNK) == 0 and len(channels) <= 2
    if transposed:
        return whole
    return whole and max(taps) <= MAX_TAPS and stride == 1 and dilation >= 1 and (dilation == 1 or not deep)


def pairs(
    channels: tuple[int, ...], outputs: int, taps: tuple[int, ...], transposed: bool = False
) -> tuple[bool, bool]:
    """Whether channels and outputs of a convolution over volumes are those of two slices; neither without a kernel."""
    deep = len(taps) == 3 and taps[0] > 1 and supports(channels, outputs, taps, transposed=transposed)
    return deep and not transposed and any(count % CHUNK for count in channels), deep and outputs % CHUNK > 0


def is_available(device: torch.device) -> bool:
    """Whether a device has wgmma and a driver that encodes tensor maps, and did not refuse the kernel."""
    return fallback.runs(device) and _is_sm90(device.index)


@lru_cache
def _is_sm90(index: int | None) -> bool:
    return Architecture.of_device(index).number == SM and library() is not None


def shape_of(
    sources: tuple[Nvfp4Tensor, ...],
    weight: DecodedWeight,
    padding: tuple[int, ...],
    dilation: int,
    transposed: bool,
    packed: bool,
) -> Shape:
    """The convolution of these operands."""
    n, *sizes = sources[0].shape[:-1]
    outputs, *filters = weight.shape[:-1]
    taps = [1] * len(filters) if transposed else filters
    oh, ow = (
        size if transposed else size + 2 * pad - (each - 1) * dilation
        for size, pad, each in zip(sizes[-2:], padding[-2:], taps[-2:], strict=True)
    )
    chunks, slices = tuple(source.scales.shape[-1] // 4 for source in sources), Slices()
    if len(filters) == 3:
        inputs, both = pairs(weight.channels, outputs, tuple(filters), transposed)
        if transposed:
            slices, n = Slices(outputs=both, doubled=True), n * sizes[0]
        else:
            depth, whole = sizes[0] + 2 * padding[0] - taps[0] + 1, taps[0] + both
            slices = Slices(-(-whole // 2) if inputs else whole, inputs, both)
            n *= -(-depth // 2) if both else depth
        size = CHUNK // 2 if inputs else CHUNK
        chunks = tuple(slices.depth * count // size for count in weight.channels)
    return Shape((n, oh, ow), chunks, outputs, (taps[-2], taps[-1]), dilation, transposed, packed, slices)


@lru_cache(4096)
def variant(shape: Shape, num_sms: int) -> Variant | None:
    """The variant with the fewest `cycles`; None where no tile fits into shared memory."""
    return min(variants(shape, num_sms), key=lambda each: cycles(each, shape, num_sms), default=None)


def variants(shape: Shape, num_sms: int) -> Iterator[Variant]:
    """All that a convolution can be computed with."""
    chunks = sum(shape.chunks)
    most = 1 if shape.transposed or shape.slices.outputs else min(MAX_SPLITS, chunks)
    for joint in (True, False) if shape.rows % 128 == 0 else (False,):
        for height in HEIGHTS:
            for splits in range(1, most + 1):
                each = fitted(shape, joint, height, splits, num_sms)
                if each is not None:
                    yield each


def fitted(shape: Shape, joint: bool, height: int, splits: int, num_sms: int) -> Variant | None:
    """The variant of a tile with as many stages as shared memory has room for; None if those are too few."""
    taps = math.prod(shape.taps)
    buffers = 4 if taps == 1 else 2
    form = (shape.taps, shape.dilation, shape.transposed, joint, height, splits)
    empty = Variant(*form, 0, buffers, False, shape.slices)
    room = (SHARED - empty.shared_bytes) // (empty.stage_bytes + 16 * empty.rings)
    columns = empty.columns(shape)
    resident = splits == 1 and shape.steps <= min(room, MAX_STAGES) and columns <= num_sms
    if resident and empty.works(shape) >= columns:
        stages = shape.steps
    else:
        resident, stages = False, min(room, MAX_STAGES)
        if stages < FEWEST_STAGES:
            return None
    return Variant(*form, stages, buffers, resident, shape.slices)


def cycles(each: Variant, shape: Shape, num_sms: int) -> float:
    """An estimate of the time in cycles.

    Measured fact: H200, 2026-11-28, `python benchmarks/warpgroup_conv.py` (its file in benchmarks/results):
    at 1.485 cycles a nanosecond nine in ten of the 75 layers are estimated to +-8 %, all to -13 and +19 %. The numbers
    were fitted together, on an H100, by `--variants`; of each alone no source is recorded.

    A step multiplies one tap of one chunk: at the rate of tensor cores, of reading its weights from L2, or of its
    barriers. A chunk takes no less than decoding it. A unit of work adds an epilogue, which costs more in a tall tile
    where outputs are not packed; joint consumers with several taps are out of phase (LAG in the kernel), so that one
    multiplies while the other writes.
    """
    works, programs = each.works(shape), each.programs(shape, num_sms)
    rounds, taps = -(-works // programs), math.prod(each.taps)
    step = max(4 * WIDTH * each.height / 1.03, 407)
    if not (each.resident and rounds > 1):
        step = max(step, each.stage_bytes / 32)
    chunks = -(-sum(shape.chunks) // each.splits)
    chunk = max(taps * step, 350 + 330 * -(-2 * each.pixels // DECODERS))
    packs = shape.packed and each.splits == 1
    written = CONSUMERS * CHUNK * WIDTH * each.height * (0.23 if packs else 0.1 * (0.52 + 0.03 * each.height))
    if each.joint and taps > 1 and each.splits == 1:
        written *= 0.6
    total = BEGIN + rounds * (chunks * chunk + written + 1150)
    if each.splits > 1:
        n, oh, ow = shape.pixels
        total += SUM + 3.25e-3 * each.splits * n * oh * ow * shape.rows * 132 / num_sms
    return total


def conv2d(
    sources: tuple[Nvfp4Tensor, ...],
    weight: DecodedWeight,
    bias: torch.Tensor | None = None,
    padding: tuple[int, ...] = (0, 0),
    dilation: int = 1,
    relu: bool = False,
    dtype: torch.dtype = torch.float16,
    out_amax: torch.Tensor | None = None,
    moments: bool = False,
    transposed: bool = False,
    chosen: Variant | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, Moments | None]:
    """relu(conv2d(concatenation of the sources, weight) + bias) on a GPU, and the moments of the output if asked for.

    Args:
        sources: packed [N, H, W, C] each, or volumes [N, D, H, W, C] with a filter of two or more slices.
        weight: decoded for these sources, in pairs of slices where `pairs` says so.
        bias: float32 [O].
        out_amax: float32 [], the global amax of a packed output; None gives `dtype`.
        moments: of the rounded output, for a GroupNorm; not with `transposed`.
        chosen: instead of what `variant` chooses.

    Returns:
        [N, OH, OW, O] or [N, OD, OH, OW, O], or codes uint8 with O / 2; scales uint8 of these, with O / 16; moments.
        With splits instead of the output float32 [splits, N, OH, OW, O], whose sum, bias, ReLU, rounding and moments
        are left to the caller.

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    x, second, device = sources[0], sources[-1], sources[0].codes.device
    shape = shape_of(sources, weight, padding, dilation, transposed, out_amax is not None)
    sms = num_sms(device)
    chosen = chosen or variant(shape, sms)
    assert chosen is not None, "`variant` was asked before"
    (n, *sizes), (_, oh, ow), outputs = x.shape[:-1], shape.pixels, shape.outputs
    (h, w), tiles, factor = sizes[-2:], chosen.tiles(oh, ow), 2 if transposed else 1
    od = sizes[0] if transposed else sizes[0] + 2 * padding[0] - weight.shape[1] + 1
    depth = [factor * od] if len(sizes) == 3 else []
    size = (n, *depth, factor * oh, factor * ow, outputs)
    scales, found = None, None
    if chosen.splits > 1:
        out = torch.empty((chosen.splits, *size), dtype=torch.float32, device=device)
        out_amax = bias = None
    else:
        out, scales = output_buffers(size, dtype, out_amax, device)
    if moments and not transposed and chosen.splits == 1:
        per_item = math.prod((*depth, *tiles))
        parts = torch.empty(n * per_item, 2, 2, outputs, dtype=torch.float32, device=device)
        found = Moments(parts, chosen.height * WIDTH, per_item, (chosen.height, WIDTH), oh if depth else 0)
    macros = chosen.macros(dtype, found is not None, scales is not None)
    volume = (sizes[0], od, padding[0], shape.pixels[0] // n) if macros.get("VOLUME") else ()
    run = kernel(SOURCE, "warpgroup_conv", SIGNATURE + "i" * len(volume), macros, device)
    two = len(sources) == 2
    first_width = -(-math.prod(shape.taps) * CHUNK // 2 * shape.chunks[0] // PAD) * PAD
    launch_secondary(
        run,
        chosen.programs(shape, sms),
        THREADS,
        kernel_tensor_map(run, *weight_boxes(weight, chosen)),
        *(*x.as_bytes, *second.as_bytes),
        *(weight.amax, bias, out, scales, out_amax, None if found is None else found.parts),
        *(h, w, oh, ow, outputs, *padding[-2:], int(relu and chosen.splits == 1), *tiles),
        *(shape.chunks[0], shape.chunks[1] if two else 0, first_width, chosen.splits, chosen.works(shape)),
        *(E2M1_MAX * each.e4m3_max for each in (x, second, weight)),
        *volume,
        shared=chosen.shared_bytes,
    )
    return out, scales, found


def weight_boxes(
    weight: DecodedWeight, chosen: Variant
) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """Arguments of `kernel_tensor_map`: bytes [rows of both planes, places, a row], the innermost axis first."""
    planes = weight.planes if weight.pairs is None else weight.pairs
    rows, k = planes.shape[1:]
    places = chosen.places
    sizes, strides = (2 * k, places, 2 * rows // places), (2 * k, 2 * k * places)
    return planes, sizes, strides, (CHUNK, 1, CHUNK), CHUNK
