"""Which of this package's kernels compute a layer on a GPU, and what each does, as `plugins.gemm` chooses them.

| family | kernel | a step of its main loop |
|---|---|---|
| `implicit` | `gemm.implicit_gemm_kernel`, on Blackwell by block-scaled MMA | machine code |
| `decoded` | `decoded.decoded_conv_kernel`, before Blackwell | machine code |
| `implicit` | `training.gather_gemm_kernel` of FP8 and W4A8, on Blackwell | machine code |
| `moves` | that adds the parts of a divided K, and all that multiplies nothing | none |
| `warpgroup` | `warpgroup_conv.cu`, SM90 | `warpgroup.cycles` |
| `direct` | `direct_conv.cu`, before Blackwell, few channels | operations and decoded elements |

Kernels of one job have the factors of one family, however their loops were compiled: that is what lets a factor that
was fitted to machine code of SM90 say something about machine code of SM120.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fp4deploy.architecture import HARDWARE
from fp4deploy.errors import InputError
from fp4deploy.graph.sizes import output_size
from fp4deploy.peaks import Gpu
from fp4deploy.plugins.gemm import training
from fp4deploy.plugins.gemm.convolution import decoded, direct, warpgroup
from fp4deploy.plugins.gemm.convolution.decoded_weight import supports
from fp4deploy.plugins.gemm.triton.tiles import NATIVE_FROM, Tile, gemm_tile, k_step_constants
from fp4deploy.plugins.runtime.cubin import Loop
from fp4deploy.precisions import ELEMENT_BYTES, LAYER_FORMATS
from fp4deploy.timing.model import Work

PACKED, FP16 = 0.5 + 1 / 16, 2  # bytes of an element
REGISTERS, THREADS, RESERVED, SCHEDULERS = 65536, 2048, 1024, 4  # of a multiprocessor; bytes that each block takes more
LOOPS = Path(__file__).with_name("loops.json")


@dataclass(frozen=True)
class Shape:
    """A layer of packed activations.

    sizes: of the input; channels: of each source; taps: of the filter, none of a linear layer, whose rows are `batch`;
    packed: whether the output is.
    """

    batch: int
    sizes: tuple[int, ...]
    channels: tuple[int, ...]
    outputs: int
    taps: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    paddings: tuple[int, ...] = ()
    dilation: int = 1
    transposed: bool = False
    packed: bool = False

    @property
    def pixels(self) -> tuple[int, ...]:
        """Of the GEMM: of the output, of a transposed convolution of the input."""
        if self.transposed:
            return self.sizes
        places = zip(self.sizes, self.taps, self.strides, self.paddings, strict=True)
        return tuple(output_size(*each, self.dilation) for each in places)

    @property
    def rows(self) -> int:
        """M of the GEMM."""
        return self.batch * math.prod(self.pixels)

    @property
    def places(self) -> int:
        """Output pixels of a row: of a transposed convolution all that its filter covers."""
        return math.prod(self.taps) if self.transposed else 1

    @property
    def summed(self) -> int:
        """Taps that an output sums."""
        return 1 if self.transposed else math.prod(self.taps)

    @property
    def moved(self) -> tuple[float, float]:
        """Bytes of activations read and written, and elements of the weight."""
        read = PACKED * self.batch * math.prod(self.sizes) * sum(self.channels)
        written = (PACKED if self.packed else FP16) * self.rows * self.places * self.outputs
        return read + written, float(math.prod(self.taps) * sum(self.channels) * self.outputs)


@dataclass(frozen=True)
class Code:
    """A compiled kernel: a step of its main loop, registers of a thread, bytes of shared memory."""

    loop: Loop
    registers: int
    shared: int

    def resident(self, warps: int, gpu: Gpu) -> int:
        """Thread blocks that a multiprocessor runs at a time."""
        registers = REGISTERS // (-(-self.registers // 8) * 8 * 32 * warps)
        shared = 1024 * (HARDWARE[gpu.arch].shared_kib + 1) // (self.shared + RESERVED)
        return max(1, min(registers, shared, THREADS // (32 * warps)))


def works(shape: Shape, gpu: Gpu) -> list[Work]:
    """What the kernels of a layer do.

    Raises:
        InputError: there is no machine code of this GPU's kernels in `loops.json`.
    """
    shape = _of_slices(shape)
    if gpu.arch.number >= NATIVE_FROM or not shape.taps or not _is_decoded(shape):
        return [implicit(shape, gpu)]
    equal = len({*shape.strides}) <= 1 and len(shape.taps) == 2
    stride = shape.strides[0] if shape.strides and not shape.transposed else 1
    (geometry, taps) = (stride, shape.dilation, shape.transposed), shape.taps
    few = equal and not shape.transposed
    if few and direct.supports(shape.channels, shape.outputs, (taps[0], taps[-1]), *geometry[:2]):
        chosen = direct.variant(shape.channels, shape.outputs, (taps[0], taps[-1]))
        if direct.fills_gpu(chosen, (shape.batch, shape.pixels[0], shape.pixels[1]), gpu.num_sms):
            return [_direct(shape, chosen, gpu)]
    if equal and gpu.arch.number == warpgroup.SM and warpgroup.supports(shape.channels, shape.outputs, taps, *geometry):
        form = warpgroup.Shape(
            (shape.batch, shape.pixels[0], shape.pixels[1]),
            tuple(count // warpgroup.CHUNK for count in shape.channels),
            shape.outputs,
            (1, 1) if shape.transposed else (taps[0], taps[1]),
            *(shape.dilation, shape.transposed, shape.packed),
        )
        variant = warpgroup.variant(form, gpu.num_sms)
        if variant is not None:
            return _warpgroup(shape, form, variant, gpu)
    return _decoded(shape, gpu)


def _of_slices(shape: Shape) -> Shape:
    """A layer over volumes whose filter has depth 1 as one of images, as `plugins.gemm` launches it."""
    steps = () if shape.transposed else (shape.strides[:1], shape.paddings[:1])
    if len(shape.taps) < 3 or (shape.taps[:1], *steps) not in (((1,),), ((1,), (1,), (0,))):
        return shape
    rest = {name: getattr(shape, name)[1:] for name in ("sizes", "taps", "strides", "paddings")}
    return replace(shape, batch=shape.batch * shape.sizes[0], **rest)


def _is_decoded(shape: Shape) -> bool:
    return len(shape.taps) > 1 and supports(shape.channels, shape.summed)


def implicit(shape: Shape, gpu: Gpu) -> Work:
    """The implicit GEMM of packed weights."""
    depths = tuple(-(-count // 16) * 8 for count in shape.channels)
    depth = math.gcd(*depths)
    tile = gemm_tile(
        *(shape.rows, shape.outputs, gpu.arch.number, shape.packed, shape.transposed, len(depths) == 2),
        *(shape.summed, depth),
    )
    constants = k_step_constants(tile, shape.summed, depths)
    per_step = tile.bk * PACKED * 2
    return _gemm("implicit", shape, tile, constants["TAPS"], 1, per_step * tile.bm, per_step * tile.bn, gpu)


def eight_bits(form: str, shape: Shape, moved: float, gpu: Gpu) -> Work:
    """The block-scaled GEMM of E4M3 activations, `form` "FP8" or "W4A8".

    shape: with one row for each output pixel and all taps for each, of a transposed convolution as well. moved: bytes.
    """
    tile, operands = training.WIDE, LAYER_FORMATS[form.lower()]
    x, weight = (ELEMENT_BYTES[each["format"]] for each in (operands.activation, operands.weight))
    read = 2 * tile.bk * tile.bm * x, 2 * tile.bk * tile.bn * weight
    work = _gemm("implicit", shape, tile, 1, 1, *read, gpu, form)
    return replace(work, moved=moved, outside=f"the {form} kernel was not timed")


def _decoded(shape: Shape, gpu: Gpu) -> list[Work]:
    """The implicit GEMM of weights decoded before."""
    depths = tuple(-(-count // 16) * 8 for count in shape.channels)
    asked = (shape.rows, shape.outputs, depths, shape.summed, shape.transposed)
    plan = decoded.plan_for(f"NVIDIA {gpu.name}", gpu.num_sms, *asked)
    tile, taps = plan.tile, 1 if depths[0] % plan.tile.bk == 0 else plan.tile.bk // depths[0]
    first, second = 2 * tile.bk * PACKED * tile.bm, 2 * tile.bk * FP16 * tile.bn
    found = [_gemm("decoded", shape, tile, taps, plan.splits, first, second, gpu)]
    elements = shape.rows * shape.places * shape.outputs
    parts = [moving(elements * (4.0 * plan.splits + FP16), elements * shape.packed, gpu)] if plan.splits > 1 else []
    return found + parts


def _gemm(
    family: str,
    shape: Shape,
    tile: Tile,
    taps: int,
    splits: int,
    first: float,
    second: float,
    gpu: Gpu,
    eight_bits: str = "",
) -> Work:
    """first, second: bytes of each operand in a step of a program. eight_bits: "FP8" or "W4A8"."""
    code = code_of(str(gpu.arch), eight_bits or family, tile, taps)
    steps = 0
    for count in shape.channels:
        bytes_of_tap = -(-count // 16) * 8
        steps += -(-shape.summed // taps) if taps > 1 else shape.summed * -(-bytes_of_tap // tile.bk)
    programs = -(-shape.rows // tile.bm) * -(-shape.outputs // tile.bn) * shape.places * splits
    busiest, resident = -(-programs // gpu.num_sms), code.resident(tile.warps, gpu)
    rounds, each = -(-busiest // resident), steps / splits
    precision = "MXFP8" if eight_bits else "FP4" if gpu.arch.number >= NATIVE_FROM else "FP16"
    tensor = tile.bm * tile.bn * 2 * tile.bk / gpu.macs_per_cycle(precision)
    activations, weight = shape.moved
    cycles = {
        "tensor": busiest * each * tensor,
        "issue": busiest * each * code.loop.issued * tile.warps / SCHEDULERS,
        "stall": rounds * each * code.loop.stall,
        "steps": rounds * each,
        "blocks": rounds,
        "epilogue": busiest * tile.bm * tile.bn / (32 * SCHEDULERS),
        "packing": busiest * tile.bm * tile.bn / (32 * SCHEDULERS) * shape.packed,
    }
    outputs = 4.0 * splits * shape.rows * shape.places * shape.outputs if splits > 1 else 0.0
    moved = activations + weight * (FP16 if family == "decoded" else PACKED) + outputs
    outside = "" if len(shape.taps) in (0, 2) else "volumes and sequences were not timed"
    return Work(family, cycles, moved, programs * each * (first + second) + outputs, outside)


def moving(moved: float, packed: float, gpu: Gpu, norm: bool = False) -> Work:
    """A kernel that multiplies nothing: bytes, elements that it packs, and whether it is a normalisation."""
    cycles = {"packing": packed / (gpu.num_sms * 32 * SCHEDULERS)}
    return Work("norms" if norm else "moves", cycles, moved, moved)


def _warpgroup(shape: Shape, form: warpgroup.Shape, chosen: warpgroup.Variant, gpu: Gpu) -> list[Work]:
    activations, weight = shape.moved
    works, stages = chosen.works(form), form.steps / chosen.splits
    read = 0.0 if chosen.resident else works * stages * chosen.stage_bytes
    decoded_pixels = works * sum(form.chunks) / chosen.splits * chosen.pixels * warpgroup.CHUNK * PACKED
    begin = warpgroup.BEGIN + (warpgroup.SUM if chosen.splits > 1 else 0)
    written = shape.rows * shape.places * shape.outputs / (gpu.num_sms * 32 * SCHEDULERS)
    cycles = {"cycles": warpgroup.cycles(chosen, form, gpu.num_sms) - begin, "packing": written * shape.packed}
    cycles |= {"blocks": 1.0, "sums": float(chosen.splits > 1)}
    return [Work("warpgroup", cycles, activations + FP16 * weight, read + decoded_pixels + activations)]


def _direct(shape: Shape, chosen: direct.Variant, gpu: Gpu) -> Work:
    height, width = chosen.tile
    down, across = chosen.tiles(shape.pixels[0], shape.pixels[1])
    slices = shape.outputs // chosen.columns
    busiest = -(-shape.batch * down * across * slices // gpu.num_sms)
    depth = sum(shape.channels)
    pixels = (height + chosen.taps[0] - 1) * (width + chosen.taps[1] - 1)
    cycles = {
        "tensor": busiest * height * width * chosen.columns * depth * shape.summed / gpu.macs_per_cycle("FP16"),
        "decode": busiest * pixels * depth / (32 * SCHEDULERS),
        "epilogue": busiest * height * width * chosen.columns / (32 * SCHEDULERS),
        "blocks": busiest,
    }
    activations, weight = shape.moved
    cached = shape.batch * down * across * slices * pixels * depth * PACKED
    return Work("direct", cycles, activations + FP16 * weight, cached + activations)


def code_of(arch: str, family: str, tile: Tile, taps: int) -> Code:
    """Machine code of a kernel with this tile, of so many taps a step or, where that is unrolled, of another number.

    Raises:
        InputError: nobody has compiled it for `loops.json`.
    """
    found = loops()["kernels"].get(arch, {}).get(family, {})
    size = " x ".join(map(str, (tile.bm, tile.bn, tile.bk)))
    row = found.get(f"{size}, {taps} taps") or found.get(f"{size}, 1 taps")
    if row is None:
        known = ", ".join(sorted(loops()["kernels"]))
        raise InputError(
            f"loops.json has no machine code of the {family} kernel of {size} for {arch}. It has kernels for: {known}. "
            "Add it with: python benchmarks/time_model.py --loops"
        )
    return Code(Loop(*row[:3]), *row[3:])


@lru_cache
def loops() -> dict[str, Any]:
    """Architecture -> family -> tile and taps -> what `cubin.main_loop` and `cubin.resources` say of it."""
    found: dict[str, Any] = json.loads(LOOPS.read_text(encoding="utf-8"))  # noqa: TID251  of this package
    return found
