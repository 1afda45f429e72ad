"""Cases of the CUDA kernels: quantisers, weights, GEMV; `channels_last` has the others.

The host code runs as on a GPU: operators compute macros, grids and arguments, and where they would launch, the emulator
executes the PTX that nvcc makes of the same source with the same macros.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fp4deploy import formats
from fp4deploy.architecture import Architecture
from fp4deploy.plugins.gemm import gemv
from fp4deploy.plugins.gemm.reference import matmul_reference
from fp4deploy.plugins.quantize import operators, weights
from fp4deploy.plugins.runtime.launch import substituted
from fp4deploy.plugins.runtime.nvcc import Macros, compile_ptx
from fp4deploy.plugins.runtime.tma import tiling
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, multiples, normal, packed
from fp4deploy_emulator.instructions.tensor_maps import encode
from fp4deploy_emulator.launch import parsed, run

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
AMAX = 2.5
SMALL_SHARED, LARGE_SHARED = 101_376, 232_448  # bytes that a block can have, from SM120 on and before
SEED, OFFSET = 1234567890123, 3
PLAIN, MX_FLOOR, MX_CEIL = [0, 448, 0, 0, 0, 0], [2, 448, 0, 0, 0, 0], [3, 448, 0, 0, 0, 0]
STRICT = formats.FourOverSix(metric="mae", e4m3_max=256)
FAST = formats.FourOverSix(metric="mse", e4m3_max=448, fast=True)


class EmulatedKernel:
    """In the place of `runtime.launch.Kernel`."""

    def __init__(
        self, setting: Setting, outcome: Outcome, source: Path, name: str, signature: str, macros: Macros | None
    ) -> None:
        self.setting, self.outcome, self.name, self.signature = setting, outcome, name, signature
        architecture = Architecture.parse(setting.arch)
        ptx = compile_ptx(source, architecture.nvcc_target, macros)
        self.entry = parsed(setting.edit(ptx) if setting.edit else ptx, name)
        self.reachable: Collection[torch.Tensor] = ()
        self.outputs: Collection[torch.Tensor] = ()
        self.unwritten = False

    def launch(self, grid: int | tuple[int, ...], block: int | tuple[int, ...], *args: Any, shared: int = 0) -> None:
        """Execute it."""
        self.execute(grid, block, args, shared)

    def tensor_map(
        self, address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], width: int
    ) -> bytes:
        """In the place of `tma.kernel_tensor_map`."""
        return encode(address, sizes, strides, box, width)

    def execute(self, grid: int | tuple[int, ...], block: int | tuple[int, ...], args: Any, shared: int) -> None:
        """As `launch`, with the arguments as a tuple."""
        blocks, threads = (_three(size) for size in (grid, block))
        values = [float(v) if letter == "f" else v for letter, v in zip(_letters(self.signature), args, strict=True)]
        blocks = self.setting.grid or blocks
        model, capability = self.setting.model, self.setting.capability
        statistics = run(
            *(self.entry, blocks, threads, shared, values, self.outputs, capability, model, self.reachable),
            *(self.unwritten, self.setting.gpu),
        )
        self.outcome.add(statistics)


def _three(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z, *_ = (*(size if isinstance(size, tuple) else (size,)), 1, 1)
    return x, y, z


def _letters(signature: str) -> list[str]:
    letters, digits = [], ""
    for letter in signature:
        if letter.isdigit():
            digits += letter
        else:
            letters.append(letter)
            digits = ""
    return letters


@contextmanager
def emulated(setting: Setting, outcome: Outcome, reachable: Collection[torch.Tensor] = ()) -> Iterator[None]:
    """Launches go to the emulator; `reachable`: tensors whose addresses kernels find in memory."""

    def factory(source: Path, name: str, signature: str, macros: Macros | None) -> EmulatedKernel:
        kernel = EmulatedKernel(setting, outcome, source, name, signature, macros)
        kernel.reachable = reachable
        return kernel

    with substituted(factory):
        yield


def _values(setting: Setting, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Normal values with heavy tails, zeros, ties, an empty block, and rows of different scale."""
    x = normal(setting, *shape, seed=5)
    x = x * torch.exp(1.5 * normal(setting, *shape[:1], *[1] * (len(shape) - 1), seed=6))
    flat = x.view(-1)
    flat[::37] = 0
    flat[5::53] = torch.tensor([AMAX, -AMAX, 0.25 * AMAX, 2 * AMAX]).repeat(flat[5::53].numel() // 4 + 1)[
        : flat[5::53].numel()
    ]
    flat[16:32] = 0
    return x.to(dtype)


def _bits(random: bool) -> torch.Tensor | None:
    return torch.tensor([SEED, OFFSET], dtype=torch.int64) if random else None


def _options(random: bool) -> dict[str, Any]:
    return {"rounding": "stochastic", "seed": SEED, "offset": OFFSET} if random else {}


def _variant(choice: formats.FourOverSix | None) -> list[int]:
    return PLAIN if choice is None else [1, choice.e4m3_max, int(choice.metric == "mse"), int(choice.fast), 0, 0]


def pack(
    shape: tuple[int, ...],
    axis: int,
    dtype: torch.dtype,
    choice: formats.FourOverSix | None = None,
    random: bool = False,
    swizzled: bool = False,
    blocks: int | None = None,
) -> Callable[[Setting, Outcome], None]:
    """Codes and scales along an axis; by so many thread blocks, where not by one for each of their threads' groups."""

    def case(setting: Setting, outcome: Outcome) -> None:
        x, amax = _values(setting, shape, dtype), torch.tensor(AMAX)
        expected = formats.quantize_nvfp4(x.movedim(axis, -1), amax=amax, four_over_six=choice, **_options(random))
        with emulated(replace(setting, grid=(blocks, 1, 1)) if blocks else setting, outcome):
            codes, scales = operators._pack_along(x, axis, amax, _bits(random), _variant(choice), swizzled)
        outcome.compare(codes, expected.codes)
        wanted = expected.scales.view(torch.uint8)
        outcome.compare(scales, formats.swizzle_scales(wanted).view(-1) if swizzled else wanted)

    return case


def fake_quantize(
    shape: tuple[int, ...],
    axis: int,
    dtype: torch.dtype,
    choice: formats.FourOverSix | None = None,
    random: bool = False,
    measure: bool = False,
) -> Callable[[Setting, Outcome], None]:
    """Values rounded to NVFP4, the in-range mask (applied to a gradient), and the tensor's own amax."""

    def case(setting: Setting, outcome: Outcome) -> None:
        x, amax = _values(setting, shape, dtype), torch.tensor(AMAX)
        expected, inside = formats.fake_quantize_nvfp4(x, (axis,), amax, False, choice, **_options(random))
        gradient = normal(setting, *shape, seed=9).to(dtype)
        with emulated(setting, outcome):
            if measure:
                values, bits, own = operators._quantize_and_amax(x, axis, amax, _bits(random), _variant(choice))
                outcome.compare(own, formats.finite_amax(x))
            else:
                values, bits = operators._quantize_along(x, axis, amax, _bits(random), _variant(choice), True)
            masked = operators._mask_gradient(gradient, bits, axis)
        outcome.compare(values, expected.to(dtype))
        outcome.compare(masked, torch.where(inside, gradient, 0))

    return case


def row_scaled(
    shape: tuple[int, int],
    dtype: torch.dtype,
    choice: formats.FourOverSix | None = None,
    random: bool = False,
    hadamard: bool = False,
) -> Callable[[Setting, Outcome], None]:
    """Codes, scales and amaxes of rows, one of zeros, one with values that are not finite; values and mask."""

    def case(setting: Setting, outcome: Outcome) -> None:
        x = _values(setting, shape, dtype)
        x[1:2] = 0
        x[2:3, ::48], x[2:3, 16::48] = float("nan"), float("-inf")
        source = formats.random_hadamard(x, 1) if hadamard else x
        options = _options(random) | {"row_scaled": True, "four_over_six": choice}
        variant = [*_variant(choice)[:4], int(hadamard), 1]
        with emulated(setting, outcome):
            codes, scales, amax = operators._pack_row_scaled(x, 1, _bits(random), variant)
            values, bits = operators._quantize_along(x, 1, None, _bits(random), variant, not hadamard)
        packed = formats.quantize_nvfp4(source, **options)
        outcome.compare(codes, packed.codes)
        outcome.compare(scales, packed.scales.view(torch.uint8))
        outcome.compare(amax.squeeze(1), packed.amax)
        expected, inside = formats.fake_quantize_nvfp4(source, (1,), **options)
        outcome.compare(values.nan_to_num(), expected.to(dtype).nan_to_num())
        outcome.compare(values.isnan(), expected.isnan())
        if not hadamard:
            gradient = normal(setting, *shape, seed=9).to(dtype)
            with emulated(setting, outcome):
                masked = operators._mask_gradient(gradient, bits, 1)
            outcome.compare(masked, torch.where(inside, gradient, 0))

    return case


def fake_quantize_mx(
    shape: tuple[int, ...], axis: int, dtype: torch.dtype, rule: str, random: bool = False
) -> Callable[[Setting, Outcome], None]:
    """Values rounded to MXFP4."""

    def case(setting: Setting, outcome: Outcome) -> None:
        x = _values(setting, shape, dtype)
        expected = formats.fake_quantize_mxfp4(x, axis, rule, **_options(random)).to(dtype)
        with emulated(setting, outcome):
            variant = MX_FLOOR if rule == "floor" else MX_CEIL
            values, _ = operators._quantize_along(x, axis, None, _bits(random), variant, False)
        outcome.compare(values, expected)

    return case


def hadamard(setting: Setting, outcome: Outcome) -> None:
    """The amax after the random Hadamard transform, and the transformed values in NVFP4."""
    x = _values(setting, (16, 64), FLOAT)
    rotated = formats.random_hadamard(x, 1)
    with emulated(setting, outcome):
        amax = operators._hadamard_amax(x, 1)
        values, _ = operators._quantize_along(x, 1, amax, None, [0, 448, 0, 0, 1, 0], False)
    outcome.compare(amax, formats.finite_amax(rotated))
    outcome.compare(values, formats.fake_quantize_nvfp4(rotated, (1,), amax)[0])


@dataclass(frozen=True)
class Tiles:
    """Blocks of 16 x 16 over the first two axes: values with their mask, and codes of a matrix, one value not finite.

    transposed: adjacent along the first axis; ahead: elements before the tensor in its memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = HALF
    choice: formats.FourOverSix | None = None
    stochastic: bool = False
    transposed: bool = False
    channels_last: bool = False
    ahead: int = 0

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        x, amax = _values(setting, self.shape, self.dtype) / 16, torch.tensor(AMAX)  # not every scale is the largest
        x = torch.cat((x.new_zeros(self.ahead), x.flatten()))[self.ahead :].view(self.shape)
        if self.transposed:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        if self.channels_last:
            x = x.to(memory_format=torch.channels_last)
        random, variant = _bits(self.stochastic), _variant(self.choice)
        options = _options(self.stochastic) | {"four_over_six": self.choice}
        with emulated(setting, outcome):
            values, mask = operators._quantize_tiles(x, 0, 1, amax, random, variant, True)
        expected, inside = formats.fake_quantize_nvfp4(x, (0, 1), amax, **options)
        outcome.compare(values, expected)
        outcome.compare(mask, inside)
        if x.ndim > 2 or self.transposed:
            return
        x[3, 7], x[16:, 16:32] = float("inf"), 0
        with emulated(setting, outcome):
            codes, scales = operators._pack_tiles(x, amax, random, variant)
        packed = formats.quantize_nvfp4(x, "2d", amax, **options)
        outcome.compare(codes, packed.codes)
        outcome.compare(scales, packed.scales.view(torch.uint8))


def amaxes(setting: Setting, outcome: Outcome) -> None:
    """The finite amax of a tensor, one value not finite, and of its rows; a tracked one, unless it is of zeros."""
    x = _values(setting, (24, 40), BFLOAT)
    x[3, 7] = float("inf")
    with emulated(setting, outcome):
        outcome.compare(operators._finite_amax(x), formats.finite_amax(x))
        outcome.compare(operators._row_amax(x, 1), formats.finite_amax(x, 1))
        for tracked in (0.0, formats.ZEROS_AMAX, 0.5):
            expected = torch.tensor(0.5) if tracked == 0.5 else formats.finite_amax(x)
            outcome.compare(operators._finite_amax(x, torch.tensor(tracked)), expected)


def all_weights(setting: Setting, outcome: Outcome) -> None:
    """Every weight of a model in two launches, found through a table of addresses."""
    shapes, axes = [(24, 40), (20, 17, 3, 3)], [1, 1]
    layers = [_values(setting, shape, FLOAT) for shape in shapes]
    with emulated(setting, outcome, layers):
        flat = weights._fake_quantize_weights(layers, axes, HALF)
    starts, _ = weights._starts(tuple(layer.numel() for layer in layers))
    for layer, axis, start in zip(layers, axes, starts, strict=True):
        expected = formats.fake_quantize_nvfp4(layer, (axis,), formats.finite_amax(layer))[0].to(HALF)
        outcome.compare(flat.as_strided(layer.shape, layer.stride(), start), expected)


def gemv_case(
    rows: int, k: int, outputs: int, dtype: torch.dtype, num_sms: int = 1
) -> Callable[[Setting, Outcome], None]:
    """The small-M GEMM with TMA, mbarriers and, on architectures with multicast, clusters of two blocks."""

    def case(setting: Setting, outcome: Outcome) -> None:
        x = multiples(setting, rows, k, most=8, seed=3).to(dtype)
        weight, bias = packed(setting, outputs, k, seed=1, weight=True), multiples(setting, outputs, seed=7)
        out = torch.empty(rows, outputs, dtype=dtype)
        shared = SMALL_SHARED if setting.capability >= 120 else LARGE_SHARED
        chosen = gemv.variant(rows, outputs, k, num_sms, shared, setting.capability)
        maps = tuple(_encoded(*box) for box in gemv.boxes(weight, chosen))
        values = gemv.arguments(maps, x, weight, bias, out, True)
        macros: Macros = {"DTYPE": CUDA_TYPES[dtype], **chosen.macros}
        kernel = EmulatedKernel(setting, outcome, Path(gemv.SOURCE), gemv.NAME, gemv.SIGNATURE, macros)
        kernel.reachable = (weight.codes, weight.scales)
        kernel.outputs = (out,)
        kernel.unwritten = rows not in (1, 8, 16)  # rows of x that there are not are multiplied too, and dropped
        kernel.execute(chosen.grid(outputs), chosen.threads, values, chosen.shared)
        expected = matmul_reference(x, weight, bias, True, dtype, accumulate=torch.float64)
        assert isinstance(expected, torch.Tensor)
        outcome.compare(out, expected)

    return case


def has_tma(capability: int) -> bool:
    """Whether an architecture has the Tensor Memory Accelerator."""
    return capability >= gemv.TMA_FROM


def _encoded(matrix: torch.Tensor, rows: int, width: int, adjacent: int) -> bytes:
    n, w = matrix.shape
    return encode(matrix.data_ptr(), *tiling(n, w, rows, width, adjacent), width)


QUANTIZERS = "quantisers"
CASES = (
    Case("pack rows", QUANTIZERS, pack((24, 64), 1, HALF)),
    Case("pack rows, 4/6", QUANTIZERS, pack((16, 64), 1, BFLOAT, STRICT)),
    Case("pack rows, stochastic", QUANTIZERS, pack((33, 128), 1, BFLOAT, random=True)),
    Case(
        "pack rows, stochastic, swizzled scales",
        QUANTIZERS,
        pack((130, 80), 1, HALF, random=True, swizzled=True, blocks=2),
    ),
    Case("pack, swizzled scales, 4/6 fast", QUANTIZERS, pack((20, 64), 1, FLOAT, FAST, swizzled=True)),
    Case("pack channels of NCHW", QUANTIZERS, pack((2, 24, 3, 4), 1, HALF)),
    Case("pack, stochastic rounding", QUANTIZERS, pack((9, 40), 1, FLOAT, random=True)),
    Case("fake quantisation of rows, with amax", QUANTIZERS, fake_quantize((24, 64), 1, BFLOAT, measure=True)),
    Case("fake quantisation of NCHW", QUANTIZERS, fake_quantize((2, 32, 4, 6), 1, HALF)),
    Case("fake quantisation, odd rows, stochastic", QUANTIZERS, fake_quantize((8, 17), 1, HALF, random=True)),
    Case("fake quantisation, 4/6", QUANTIZERS, fake_quantize((2, 32, 3, 3), 1, FLOAT, STRICT)),
    Case("fake quantisation, MXFP4 ceil", QUANTIZERS, fake_quantize_mx((16, 64), 1, FLOAT, "ceil")),
    Case("fake quantisation, MXFP4 floor", QUANTIZERS, fake_quantize_mx((2, 32, 4, 6), 1, BFLOAT, "floor", True)),
    Case("random Hadamard transform", QUANTIZERS, hadamard),
    Case("blocks of 16 x 16", QUANTIZERS, Tiles((40, 288))),
    Case("blocks of 16 x 16, packed", QUANTIZERS, Tiles((37, 80), BFLOAT)),
    Case("blocks of 16 x 16, planes, FP32", QUANTIZERS, Tiles((24, 40, 3, 3), FLOAT)),
    Case("blocks of 16 x 16, short rows", QUANTIZERS, Tiles((33, 64))),
    Case("blocks of 16 x 16, planes in channels_last", QUANTIZERS, Tiles((17, 256, 2, 1), channels_last=True)),
    Case("blocks of 16 x 16, 4/6, FP32", QUANTIZERS, Tiles((33, 272), FLOAT, STRICT)),
    Case("blocks of 16 x 16, 4/6, transposed", QUANTIZERS, Tiles((40, 33), HALF, STRICT, transposed=True)),
    Case("blocks of 16 x 16, stochastic", QUANTIZERS, Tiles((17, 256), BFLOAT, stochastic=True)),
    Case("blocks of 16 x 16, stochastic, ragged, FP32", QUANTIZERS, Tiles((5, 35), FLOAT, stochastic=True)),
    Case("blocks of 16 x 16, which begin between words", QUANTIZERS, Tiles((32, 256), HALF, ahead=3)),
    Case("row-scaled, a block a row", QUANTIZERS, row_scaled((3, 8224), HALF)),
    Case("row-scaled, a warp a row", QUANTIZERS, row_scaled((5, 1040), BFLOAT)),
    Case("row-scaled, lanes a row", QUANTIZERS, row_scaled((35, 80), FLOAT)),
    Case("row-scaled, one row of 16, stochastic", QUANTIZERS, row_scaled((1, 16), BFLOAT, random=True)),
    Case("row-scaled, 4/6, FP32", QUANTIZERS, row_scaled((3, 2064), FLOAT, STRICT)),
    Case("row-scaled, RHT", QUANTIZERS, row_scaled((3, 2048), HALF, hadamard=True)),
    Case("row-scaled, ragged", QUANTIZERS, row_scaled((9, 40), HALF)),
    Case("amax", QUANTIZERS, amaxes),
    Case("all weights", "weights", all_weights),
    Case("GEMV, 1 row", "GEMV", gemv_case(1, 512, 24, HALF), has_tma),
    Case("GEMV, 1 row, K = 1280", "GEMV", gemv_case(1, 1280, 72, HALF), has_tma),
    Case("GEMV, 5 rows, bfloat16", "GEMV", gemv_case(5, 512, 40, BFLOAT), has_tma),
    Case("GEMV, 16 rows, K = 4352", "GEMV", gemv_case(16, 4352, 20, HALF), has_tma),
)
