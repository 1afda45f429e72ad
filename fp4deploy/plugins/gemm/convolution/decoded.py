"""Convolutions of packed activations with weights that were decoded to float16 once: inference before Blackwell.

    weight = decode_weight(packed, (64, 64))                 of `decoded_weight`: two planes of float16
    y, moments = conv2d(sources, weight, padding=1, moments=True)

Where tensor cores take no FP4, decoding a weight in every program that reads it costs arithmetic and buys memory: 4.5
bits an element instead of 16. `triton/decoded.py` reads a weight that was decoded at load and decodes activations only,
which stay packed in memory. Elements are the same numbers in both kernels.

Convolutions of few channels go to `direct`, those of whole chunks of 64 channels, over volumes of 32, on SM90 to
`warpgroup`: both decode a pixel once for all taps.

**Volumes** have one axis more, of which strides and paddings may differ between the axes. A depth that no tap and no
stride crosses is part of the batch, and the convolution one of feature maps; moments are of whole volumes in any case.

**Plan.** The tile and the number of splits of K come from a table of measured shapes for the GPU (`plans.json`, written
by `benchmarks/conv_plans.py`; FP4DEPLOY_PLANS names another), else from `plan`, which knows the shape and the number of
multiprocessors alone. Nothing is timed at run time: the same file gives the same bits on the same kind of GPU, in every
process. Only BK and the number of splits enter the order of the sum.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from fp4deploy.architecture import Architecture
from fp4deploy.formats import E2M1_MAX, Nvfp4Tensor
from fp4deploy.graph.sizes import each
from fp4deploy.plugins.aot import load as aot
from fp4deploy.plugins.aot.compile import triton_version
from fp4deploy.plugins.aot.spec import Call, Launch
from fp4deploy.plugins.gemm.arguments import TYPES, VOLUME, Sizes, flat, output_buffers, output_of, require_offsets, run
from fp4deploy.plugins.gemm.convolution import direct, warpgroup
from fp4deploy.plugins.gemm.convolution.decoded_weight import DecodedWeight
from fp4deploy.plugins.gemm.reference import Sizes as Strides
from fp4deploy.plugins.gemm.reference import output_sizes
from fp4deploy.plugins.gemm.triton.tiles import NATIVE_FROM, Tile
from fp4deploy.plugins.quantize.statistics import Moments
from fp4deploy.plugins.runtime.launch import num_sms
from fp4deploy.plugins.runtime.pdl import secondary_kernels
from fp4deploy.system.schema import Int, read_json, validated

LARGE, SMALL = Tile(256, 128, 64, 8, 3), Tile(128, 64, 32, 4, 4)
# Measured fact: H200, 2026-11-23, `python benchmarks/conv_plans.py` (its file in benchmarks/results): `plan` takes the
# fastest of the timed plans for half of the 85 shapes of our UNet, for nine in ten one that is at most 11 % slower, and
# 35 % at worst. The three numbers below were fitted; of each alone no source is recorded.
BUSY = 0.63  # share of the waves of multiprocessors from which on large tiles are faster
MAX_SPLITS, FEWEST_STEPS = 8, 5
SUM_TILE = Tile(32, 64, 0, 4, 1)
POINTERS = (
    *("x", "x_scales", "x_amax", "x2", "x2_scales", "x2_amax", "w", "w_amax", "bias", "out", "out_scales"),
    *("out_amax", "moments"),
)  # of the kernel, in order
BYTES = ("x", "x_scales", "x2", "x2_scales", "out_scales")
ALIGNED = ("x", "x_scales", "x2", "x2_scales", "w", "out", "K")  # to 16
SIZES = ("H", "W", "CB", "CB2", "OH", "OW", "M", "outputs", "K", "stride", "padding", "dilation", "splits")
Row = Annotated[list[Annotated[Int, Field(ge=1, le=512)]], Field(min_length=6, max_length=6)]


@dataclass(frozen=True)
class Plan:
    """How one convolution is computed."""

    tile: Tile
    splits: int = 1


def available(device: torch.device) -> bool:
    """Whether these kernels run and are the better choice on a device: a GPU before Blackwell, with Triton."""
    if device.type != "cuda" or triton_version() is None or not aot.available(device):
        return False
    return Architecture.of_device(device.index).number < NATIVE_FROM


def chosen_plan(
    rows: int, columns: int, depths: tuple[int, ...], taps: int, transposed: bool, device: torch.device
) -> Plan:
    """`plan_for` the GPU that is present."""
    return plan_for(*_device(device.index), rows, columns, depths, taps, transposed)


def plan_for(
    name: str, num_sms: int, rows: int, columns: int, depths: tuple[int, ...], taps: int, transposed: bool
) -> Plan:
    """The plan of a shape that was measured on a GPU of this name, else what `plan` says for its multiprocessors."""
    table = measured_plans(os.environ.get("FP4DEPLOY_PLANS", "")).get(name, {})
    found = table.get(key(rows, columns, depths, taps, transposed))
    if found is not None:
        return Plan(Tile(*found[:5]), found[5])
    return plan(rows, columns, depths, taps, transposed, num_sms)


def key(rows: int, columns: int, depths: tuple[int, ...], taps: int, transposed: bool) -> str:
    """The name of a shape in a table of plans."""
    return f"{rows} x {columns}, {' + '.join(map(str, depths))} bytes, {taps} taps{', up' if transposed else ''}"


@lru_cache
def measured_plans(path: str = "") -> dict[str, dict[str, list[int]]]:
    """GPU -> shape -> bm, bn, bk, warps, stages, splits; of this package's table, or of another.

    Raises:
        InputError: another table that cannot be read.
    """
    where = Path(path) if path else Path(__file__).with_name("plans.json")
    advice = "Write a table of plans with benchmarks/conv_plans.py --plans."
    return validated(dict[str, dict[str, Row]], read_json(where, advice), where, advice)


def plan(rows: int, columns: int, depths: tuple[int, ...], taps: int, transposed: bool, num_sms: int) -> Plan:
    """The tile and the number of splits of one convolution, by what was measured (`benchmarks/conv_plans.py`).

    Large tiles read and decode least for each multiply-accumulate, where they keep the multiprocessors busy, if need be
    by dividing K. Elsewhere several programs of a small tile share a multiprocessor.

    rows, columns: M and N; depths: bytes of a pixel in each source.
    """
    if columns <= 32:
        return Plan(Tile(128, 32 if columns > 16 else 16, 32, 4, 3))
    positions = 4 if transposed else 1
    if columns > 64 and all(depth % 64 == 0 for depth in depths):
        splits = 1 if transposed else _splits(rows, columns, LARGE, depths, taps, num_sms)
        programs = _programs(rows, columns, LARGE) * splits * positions
        if programs / (-(-programs // num_sms) * num_sms) >= BUSY:
            return Plan(LARGE, splits)
    return Plan(SMALL, 1 if transposed else _splits(rows, columns, SMALL, depths, taps, num_sms))


def _splits(rows: int, columns: int, tile: Tile, depths: tuple[int, ...], taps: int, num_sms: int) -> int:
    """As many as there are idle multiprocessors for, each of some steps at least."""
    steps = sum(-(-taps * depth // tile.bk) for depth in depths)
    return max(1, min(MAX_SPLITS, num_sms // _programs(rows, columns, tile), steps // FEWEST_STEPS))


def _programs(rows: int, columns: int, tile: Tile) -> int:
    return -(-rows // tile.bm) * -(-columns // tile.bn)


def conv2d(
    sources: tuple[Nvfp4Tensor, ...],
    weight: DecodedWeight,
    bias: torch.Tensor | None = None,
    stride: Strides = 1,
    padding: Strides = 0,
    dilation: int = 1,
    relu: bool = False,
    dtype: torch.dtype = torch.float16,
    out_amax: torch.Tensor | None = None,
    moments: bool = False,
    transposed: bool = False,
    chosen: Plan | None = None,
    launch: Callable[[Call], object] | None = None,
    asm: bool = True,
    tensor_maps: bool = True,
) -> tuple[torch.Tensor | Nvfp4Tensor, Moments | None]:
    """`dispatch.conv2d` (with `transposed`, `dispatch.conv_transpose2d`) on a GPU, and its output's moments.

    Operands are those of a network that was checked.

    Args:
        moments: of the rounded output.
        chosen: instead of `direct`, `warpgroup`, or of what `plan` chooses.
        launch, asm: what launches, and whether inline PTX is used: for Triton's interpreter.
        tensor_maps: whether kernels may be used whose arguments a launch plan cannot record (`fp4deploy.native`).

    Returns:
        [N, OH, OW, O] or [N, OD, OH, OW, O], or packed; None instead of moments with `transposed`, where a tile would
        span more than two batch items, and of slices of a volume whose K is split.

    Raises:
        InputError: sizes beyond the kernel's 32-bit counters and offsets.
    """
    extent, (outputs, *filters), device = tuple(sources[0].shape[:-1]), weight.shape[:-1], sources[0].codes.device
    taps = (1,) * len(filters) if transposed else tuple(filters)
    strides, paddings = each(stride, len(taps)), each(padding, len(taps))
    pixels = (extent[0], *output_sizes(extent[1:], taps, strides, paddings, dilation))
    grown = tuple(filters) if transposed else taps[:0]
    shape = (extent[0], *(size * by for size, by in zip(pixels[1:], grown or (1,) * len(taps), strict=True)), outputs)
    depths = tuple(x.codes.shape[-1] for x in sources)
    require_offsets(depths, extent, pixels, shape, taps, strides, paddings, dilation)
    work = Convolution(sources, weight, bias, strides, paddings, dilation, relu, dtype, out_amax, moments, transposed)
    if chosen is None:
        done = work.of_tiles(tensor_maps)
        if done is not None:
            return done
    items, per_item = extent[0], math.prod(pixels[1:])
    if not transposed or filters[0] == 1:
        extent, pixels, taps, strides, paddings = flat(extent, pixels, taps, strides, paddings)
    rows = math.prod(pixels)
    chosen = chosen or chosen_plan(rows, outputs, depths, math.prod(taps), transposed, device)
    out, scales = output_buffers(shape, dtype, out_amax, device)
    tall = chosen.tile.bm if chosen.splits == 1 else SUM_TILE.bm
    found, touched = None, 0
    if moments and not transposed:
        found, touched = _moments_of_rows(items, per_item, outputs, tall, device)
    target = out
    if chosen.splits > 1:
        target = torch.empty(chosen.splits, math.prod(shape), dtype=torch.float32, device=device)
    secondary = launch is None and secondary_kernels(device.index)
    call = conv_call(
        sources, weight, bias, extent, pixels, target, scales, out_amax, found, touched, per_item, dtype, taps,
        strides, paddings, dilation, relu, transposed, chosen, asm, secondary,
    )  # fmt: skip
    execute = launch or partial(run, device=device)
    execute(call)
    if chosen.splits > 1:
        execute(sum_call(target, bias, out, scales, out_amax, found, touched, dtype, relu, shape, asm))
    return output_of(out, scales, out_amax, shape), found


Result = tuple[torch.Tensor | Nvfp4Tensor, Moments | None]


@dataclass(frozen=True)
class Convolution:
    """A convolution for the kernels that decode a pixel once for all taps; arguments as of `conv2d`."""

    sources: tuple[Nvfp4Tensor, ...]
    weight: DecodedWeight
    bias: torch.Tensor | None
    strides: Sizes
    paddings: Sizes
    dilation: int
    relu: bool
    dtype: torch.dtype
    out_amax: torch.Tensor | None
    moments: bool
    transposed: bool

    def of_tiles(self, tensor_maps: bool) -> Result | None:
        """The result of `direct` or `warpgroup`; None where neither takes the convolution."""
        taps, device = self.weight.shape[1:-1], self.sources[0].codes.device
        single = taps[0] == 1 if self.transposed else (taps[0], self.strides[0], self.paddings[0]) == (1, 1, 0)
        if len(taps) == 3 and single:
            return self._of_slices(tensor_maps)
        if len({*self.strides}) > 1 or (self.transposed and {*taps} != {2}):
            return None
        if len(taps) == 2 and not self.transposed and self._directly() and direct.is_available(device):
            with direct.fallback.guard(device):
                return direct.conv2d(
                    *(self.sources, self.weight, self.bias, (self.paddings[0], self.paddings[1]), self.relu),
                    *(self.dtype, self.out_amax, self.moments),
                )
        if tensor_maps and warpgroup.is_available(device):
            with warpgroup.fallback.guard(device):
                return self._by_warpgroups()
        return None

    def _of_slices(self, tensor_maps: bool) -> Result | None:
        """Of volumes whose slices are feature maps, each by itself."""
        n, d = self.sources[0].shape[:2]
        flattened = tuple(_reshaped(x, (n * d, *x.shape[2:])) for x in self.sources)
        filters = replace(self.weight, shape=(self.weight.shape[0], *self.weight.shape[2:]))
        strides, paddings = self.strides[1:], self.paddings[1:]
        done = replace(self, sources=flattened, weight=filters, strides=strides, paddings=paddings).of_tiles(
            tensor_maps
        )
        if done is None:
            return None
        y, found = done
        if found is not None:  # runs of pixels are of any number of slices
            found = replace(found, per_item=d * found.per_item, height=y.shape[1]) if found.per_item else None
        shape = (n, d, *y.shape[1:])
        return y.view(shape) if isinstance(y, torch.Tensor) else _reshaped(y, shape), found

    def _directly(self) -> bool:
        n, *sizes = self.sources[0].shape[:-1]
        pixels = output_sizes(sizes, self.weight.shape[1:-1], self.strides, self.paddings, self.dilation)
        place = (n, pixels[0], pixels[1])
        return directly(self.weight, place, self.strides[0], self.dilation, self.sources[0].codes.device)

    def _by_warpgroups(self) -> Result | None:
        """By `warpgroup`; None where it does not take the convolution."""
        outputs, *taps = self.weight.shape[:-1]
        geometry = (self.strides[0], self.dilation, self.transposed)
        if not warpgroup.supports(self.weight.channels, outputs, tuple(taps), *geometry):
            return None
        if self.weight.pairs is None and any(
            warpgroup.pairs(self.weight.channels, outputs, tuple(taps), self.transposed)
        ):
            return None
        device, packed = self.sources[0].codes.device, self.out_amax is not None
        place = (self.sources, self.weight, self.paddings, self.dilation, self.transposed, packed)
        chosen = warpgroup.variant(warpgroup.shape_of(*place), num_sms(device))
        if chosen is None:
            return None
        out, scales, found = warpgroup.conv2d(
            *(self.sources, self.weight, self.bias, self.paddings, self.dilation, self.relu, self.dtype),
            *(self.out_amax, self.moments, self.transposed, chosen),
        )
        if chosen.splits > 1:
            parts, size = out, tuple(out.shape[1:])
            out, scales = output_buffers(size, self.dtype, self.out_amax, device)
            found, items = None, 0
            if self.moments:
                found, items = _moments_of_rows(size[0], math.prod(size[1:-1]), outputs, SUM_TILE.bm, device)
            rest = (scales, self.out_amax, found, items, self.dtype, self.relu, size)
            run(sum_call(parts, self.bias, out, *rest), device)
        if scales is None or self.out_amax is None:
            return out, found
        size = (*out.shape[:-1], outputs)
        return Nvfp4Tensor(out, scales.view(torch.float8_e4m3fn), self.out_amax, torch.Size(size)), found


def _reshaped(x: Nvfp4Tensor, shape: Sequence[int]) -> Nvfp4Tensor:
    """Other axes in front of the channels."""
    codes, scales = (part.reshape(*shape[:-1], -1) for part in (x.codes, x.scales.view(torch.uint8)))
    return replace(x, codes=codes, scales=scales.view(torch.float8_e4m3fn), shape=torch.Size(shape))


def directly(
    weight: DecodedWeight, pixels: tuple[int, int, int], stride: int, dilation: int, device: torch.device
) -> bool:
    """Whether a convolution of feature maps goes to `direct`; pixels: N, height and width of the output."""
    outputs, kh, kw, _ = weight.shape
    if not direct.supports(weight.channels, outputs, (kh, kw), stride, dilation):
        return False
    return direct.fills_gpu(direct.variant(weight.channels, outputs, (kh, kw)), pixels, num_sms(device))


def leaves_out_rows(tile: Tile, taps: Sizes, width: int, dilation: int) -> bool:
    """Whether many tiles of an output of this width have rows of taps that read padding alone."""
    return len(taps) == 2 and taps[0] > 1 and dilation > 1 and dilation * width > tile.bm


def _moments_of_rows(
    items: int, per_item: int, channels: int, tall: int, device: torch.device
) -> tuple[Moments | None, int]:
    """Where moments of runs of `tall` pixels go, and how many batch items a run may touch; None for more than two."""
    if per_item < tall:
        return None, 0
    parts = torch.empty(-(-items * per_item // tall), 2, 2, channels, dtype=torch.float32, device=device)
    return Moments(parts, tall), 1 if items == 1 or per_item % tall == 0 else 2


def conv_call(
    sources: tuple[Nvfp4Tensor, ...],
    weight: DecodedWeight,
    bias: torch.Tensor | None,
    extent: Sizes,
    pixels: Sizes,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    out_amax: torch.Tensor | None,
    moments: Moments | None,
    items: int,
    per_item: int,
    dtype: torch.dtype,
    taps: Sizes,
    strides: Sizes,
    paddings: Sizes,
    dilation: int,
    relu: bool,
    transposed: bool,
    chosen: Plan,
    asm: bool = True,
    secondary: bool = False,
) -> Call:
    """The launch of `decoded_conv_kernel`.

    extent, pixels: batch, perhaps depth, height and width of the input and of the output (of a transposed convolution:
    of the input). items: that a part of the moments may touch; per_item: pixels of one.
    """
    x, second, tile = sources[0], sources[-1], chosen.tile
    two, split = len(sources) == 2, chosen.splits > 1
    cb, cb2 = x.codes.shape[-1], second.codes.shape[-1] if two else 0
    outputs, m = weight.shape[0], math.prod(pixels)
    volume: tuple[int, ...] = ()
    if not transposed and len(taps) == 3:
        volume = (extent[1], pixels[1], strides[0], strides[2], paddings[0], paddings[2])
    elif not transposed and (len({*strides}) > 1 or len({*paddings}) > 1):
        volume = (1, 1, 1, strides[1], 0, paddings[1])
    places = math.prod(weight.shape[1:-1]) if transposed else 1
    of_slice = moments is None or per_item == pixels[-2] * pixels[-1]
    constants: dict[str, Any] = {
        **({} if volume else dict.fromkeys(VOLUME)),
        **({"per_item": None} if of_slice else {}),
        "KD": places // 4 if transposed else taps[0] if len(taps) == 3 else 1,
        "KH": taps[-2],
        "KW": taps[-1],
        "TWO": two,
        "UP": transposed,
        "TAPS": 1 if cb % tile.bk == 0 else tile.bk // cb,
        "BIAS": bias is not None and not split,
        "RELU": relu and not split,
        "QUANTIZE": scales is not None and not split,
        "MOMENTS": 0 if split else items,
        "SPLIT": split,
        "ROWS": not transposed
        and not volume
        and cb % tile.bk == 0
        and leaves_out_rows(tile, taps, pixels[-1], dilation),
        "FULL": outputs % tile.bn == 0,
        "BF16": dtype == torch.bfloat16,
        "BM": tile.bm,
        "BN": tile.bn,
        "BK": tile.bk,
        "ASM": asm,
        "SECONDARY": secondary,
    }
    types = dict.fromkeys(POINTERS, "*fp32") | dict.fromkeys(BYTES, "*u8") | {"w": "*fp16"}
    types["out"] = "*fp32" if split else "*u8" if scales is not None else f"*{TYPES[dtype]}"
    types |= dict.fromkeys(SIZES, "i32") | dict.fromkeys(("x_range", "x2_range", "w_range"), "fp32")
    types |= dict.fromkeys((*(VOLUME if volume else ()), *(() if of_slice else ("per_item",))), "i32")
    multiples = {*ALIGNED, *(("CB", "CB2") if cb % 16 == 0 and cb2 % 16 == 0 else ())}
    launch = Launch(
        "decoded:decoded_conv_kernel",
        tuple(types.items()),
        tuple(constants.items()),
        tuple(name for name in types if name in multiples or (name == "outputs" and outputs % 16 == 0)),
        tile.warps,
        tile.stages,
    )
    values = (
        *(*x.as_bytes, *second.as_bytes),
        *(weight.planes, weight.amax),
        *(x.amax if bias is None else bias, out, out if scales is None else scales),
        *(x.amax if out_amax is None else out_amax, x.amax if moments is None else moments.parts),
        *(extent[-2], extent[-1], cb, cb2, pixels[-2], pixels[-1], m, outputs, weight.planes.shape[2]),
        *(strides[-2], paddings[-2], dilation, chosen.splits),
        *(E2M1_MAX * value.e4m3_max for value in (x, second, weight)),
        *volume,
        *(() if of_slice else (per_item,)),
    )
    grid = -(-m // tile.bm) * -(-outputs // tile.bn) * places * chosen.splits
    return Call(launch, values, (grid, 1, 1))


def sum_call(
    parts: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    out_amax: torch.Tensor | None,
    moments: Moments | None,
    items: int,
    dtype: torch.dtype,
    relu: bool,
    shape: tuple[int, ...],
    asm: bool = True,
) -> Call:
    """The launch of `split_sum_kernel`; parts: [splits, ...]; shape: of the output, [N, H, W, O] or [N, D, H, W, O].

    In stream order: a secondary kernel would begin on the few multiprocessors that a division of K leaves idle, and
    most of its programs would share them (1024 to 1024 channels of 22 x 30 on an H200: 41 us instead of 35).
    """
    tile, splits = SUM_TILE, parts.shape[0]
    whole = (math.prod(shape[:-1]), math.prod(shape[1:-1]), shape[-1])
    constants: dict[str, Any] = {
        "BIAS": bias is not None,
        "RELU": relu,
        "QUANTIZE": scales is not None,
        "MOMENTS": items,
        "SPLITS": splits,
        "BF16": dtype == torch.bfloat16,
        "BM": tile.bm,
        "BN": tile.bn,
        "ASM": asm,
    }
    types = dict.fromkeys(("parts", "bias", "out", "out_scales", "out_amax", "moments"), "*fp32")
    types |= {"out": "*u8" if scales is not None else f"*{TYPES[dtype]}", "out_scales": "*u8"}
    types |= dict.fromkeys(("M", "pixels", "outputs"), "i32")
    divisible = ("parts", "out", *(("outputs",) if whole[2] % 16 == 0 else ()))
    launch = Launch(
        "decoded:split_sum_kernel", tuple(types.items()), tuple(constants.items()), divisible, tile.warps, 1
    )
    amax = parts if out_amax is None else out_amax
    values = (
        *(parts, parts if bias is None else bias, out, out if scales is None else scales, amax),
        *(parts if moments is None else moments.parts, *whole),
    )
    return Call(launch, values, (-(-whole[0] // tile.bm) * -(-whole[2] // tile.bn), 1, 1))


@lru_cache
def _device(index: int | None) -> tuple[str, int]:
    """Name and number of multiprocessors of a GPU."""
    properties = torch.cuda.get_device_properties(index)
    return properties.name, properties.multi_processor_count
