"""Cases of the CUDA kernels: quantisers, weights, channels_last operations, GroupNorm with packing.

The host code runs as on a GPU: operators compute macros, grids and arguments, and where they would launch, the emulator
executes the PTX that nvcc makes of the same source with the same macros.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fp4deploy import formats
from fp4deploy.architecture import Architecture
from fp4deploy.emulator.cases.case import Case, Outcome, Setting, multiples, normal, packed
from fp4deploy.emulator.faults import Fault
from fp4deploy.emulator.instructions.bulk import encode
from fp4deploy.emulator.launch import parsed, run
from fp4deploy.plugins.gemm import gemv
from fp4deploy.plugins.gemm.reference import matmul_reference
from fp4deploy.plugins.quantize import channels_last, norm_pack, operators, statistics, weights
from fp4deploy.plugins.runtime.launch import substituted
from fp4deploy.plugins.runtime.nvcc import Macros, compile_ptx
from fp4deploy.plugins.runtime.tma import tiling
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES

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
) -> Callable[[Setting, Outcome], None]:
    """Codes and scales along an axis."""

    def case(setting: Setting, outcome: Outcome) -> None:
        x, amax = _values(setting, shape, dtype), torch.tensor(AMAX)
        expected = formats.quantize_nvfp4(x.movedim(axis, -1), amax=amax, four_over_six=choice, **_options(random))
        with emulated(setting, outcome):
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


def tiles(setting: Setting, outcome: Outcome) -> None:
    """Blocks of 16 x 16: values with their mask, and codes."""
    x, amax = _values(setting, (24, 40, 3, 3), FLOAT), torch.tensor(AMAX)
    matrix = _values(setting, (32, 48), HALF)
    with emulated(setting, outcome):
        values, mask = operators._quantize_tiles(x, 0, 1, amax, None, PLAIN, True)
        codes, scales = operators._pack_tiles(matrix, amax, None, PLAIN)
    expected, inside = formats.fake_quantize_nvfp4(x, (0, 1), amax)
    outcome.compare(values, expected)
    outcome.compare(mask, inside)
    packed = formats.quantize_nvfp4(matrix, "2d", amax)
    outcome.compare(codes, packed.codes)
    outcome.compare(scales, packed.scales.view(torch.uint8))


def amaxes(setting: Setting, outcome: Outcome) -> None:
    """The finite amax of a tensor, and of its rows; one value is not finite."""
    x = _values(setting, (24, 40), BFLOAT)
    x[3, 7] = float("inf")
    with emulated(setting, outcome):
        outcome.compare(operators._finite_amax(x), formats.finite_amax(x))
        outcome.compare(operators._row_amax(x, 1), formats.finite_amax(x, 1))


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


def _image(setting: Setting, *shape: int, seed: int = 0) -> torch.Tensor:
    return (normal(setting, *shape, seed=seed) * 2 + 0.5).to(HALF).to(memory_format=torch.channels_last)


def group_norm(setting: Setting, outcome: Outcome) -> None:
    """GroupNorm, ReLU and fake quantisation; a and b of y = relu(a x + b) are near those of float64.

    Statistics are sums in an order of the kernel's own, so that a and b have no bits that they must have. Everything
    after them has: the output is compared with the reference on the kernel's a and b.
    """
    x, weight, beta = _image(setting, 2, 32, 5, 4), normal(setting, 32, seed=3), normal(setting, 32, seed=4)
    tracked = torch.tensor(0.5)
    with emulated(setting, outcome):
        y, ab, _, _, largest = channels_last._group_norm_relu(x, None, weight, beta, 8, 1e-5, None, tracked, 0.9, True)
    exact = norm_pack.affine(x.permute(0, 2, 3, 1).double(), None, weight.double(), beta.double(), 8, 1e-5)
    if not torch.allclose(ab.double(), exact, rtol=2e-6, atol=2e-6):
        raise Fault(f"a and b differ from float64 by {float((ab - exact).abs().max())}.")
    rounded = _relu(x, ab)
    outcome.compare(largest[0], torch.maximum(rounded.max(), torch.tensor(0.5) * torch.tensor(0.9)))
    outcome.compare(y, formats.fake_quantize_nvfp4(rounded, (1,), largest[0])[0].to(HALF))


def _relu(x: torch.Tensor, ab: torch.Tensor) -> torch.Tensor:
    """relu(a x + b) of NCHW in float32, rounded once."""
    a, b = ab.double()[..., None, None].unbind(1)
    return torch.relu(a * x.double() + b).float()


def pooling(setting: Setting, outcome: Outcome) -> None:
    """2 x 2 maximum with fake quantisation."""
    x, amax = _image(setting, 1, 32, 6, 4), torch.tensor([AMAX])
    with emulated(setting, outcome):
        pooled = channels_last._pool(x, amax)
        plain = channels_last._pool(x, None)
    expected = torch.nn.functional.max_pool2d(x.float(), 2)
    outcome.compare(plain, expected.to(HALF))
    outcome.compare(pooled, formats.fake_quantize_nvfp4(expected, (1,), amax[0])[0].to(HALF))


def concatenation(setting: Setting, outcome: Outcome) -> None:
    """Concatenation with fake quantisation, and its gradient."""
    a, b, amax = _image(setting, 1, 32, 3, 5), _image(setting, 1, 48, 3, 5, seed=1), torch.tensor([AMAX])
    gradient = _image(setting, 1, 80, 3, 5, seed=2)
    with emulated(setting, outcome):
        out, bits = channels_last._concat(a, b, amax)
        da, db = channels_last._separate(gradient, bits, 32)
    expected, inside = formats.fake_quantize_nvfp4(torch.cat([a, b], 1).float(), (1,), amax[0])
    outcome.compare(out, expected.to(HALF))
    masked = torch.where(inside, gradient, 0)
    outcome.compare(da, masked[:, :32])
    outcome.compare(db, masked[:, 32:])


def tracking(setting: Setting, outcome: Outcome) -> None:
    """The running amax of a tensor."""
    x = _image(setting, 2, 16, 5, 3)
    tracked = torch.tensor(0.5)
    with emulated(setting, outcome):
        amax = channels_last._track_amax(x, None, tracked, 0.9, True)
    outcome.compare(amax[0], formats.finite_amax(x))


def norm_statistics(*shape: int, groups: int = 8) -> Callable[[Setting, Outcome], None]:
    """a and b of a GroupNorm for inference are near those of float64, from chunks and from tiles of two batch items."""

    def case(setting: Setting, outcome: Outcome) -> None:
        x, channels = _image(setting, *shape).permute(0, 2, 3, 1).contiguous(), shape[1]
        bias, weight, beta = (normal(setting, channels, seed=seed) for seed in (3, 4, 5))
        exact = norm_pack.affine(x.double(), bias.double(), weight.double(), beta.double(), groups, 1e-5)
        for rows in (0, 16, 32):
            tiles = _tile_moments(x, rows) if rows else None
            with emulated(setting, outcome):
                moments = tiles or statistics.chunk_moments(x)
                ab = statistics.combine(moments, x.shape, bias, weight, beta, groups, 1e-5)
            near = torch.isclose(ab.double(), exact, rtol=2e-6, atol=2e-6).byte()
            outcome.compare(near, torch.ones_like(near))

    return case


def _tile_moments(x: torch.Tensor, rows: int) -> statistics.Moments:
    """Moments of runs of `rows` pixels of the whole batch, as a convolution's tiles have them."""
    n, h, w, c = x.shape
    flat, item = x.double().reshape(-1, c), torch.arange(n * h * w) // (h * w)
    parts = torch.full((-(-len(flat) // rows), 2, 2, c), float("nan"))
    for tile, first in enumerate(range(0, len(flat), rows)):
        part, items = flat[first : first + rows], item[first : first + rows]
        for index, one in enumerate(items.unique()):
            pixels = part[items == one]
            parts[tile, index] = torch.stack([pixels.mean(0), (pixels - pixels.mean(0)).square().sum(0)])
    return statistics.Moments(parts, rows)


def norm_packing(setting: Setting, outcome: Outcome) -> None:
    """relu(a x + b) packed, plain and pooled, in one pass."""
    x = _image(setting, 2, 32, 4, 6).permute(0, 2, 3, 1).contiguous()
    ab = normal(setting, 2, 2, 32, seed=3)
    form, amax = norm_pack.OutputForm, torch.tensor(AMAX)
    for forms in ([form(amax), form(None)], [form(amax), form(torch.tensor(4.0), pooled=True)]):
        with emulated(setting, outcome):
            got = norm_pack.apply_kernels(x, ab, forms)
        for mine, expected in zip(got, norm_pack.apply_reference(x, ab, forms), strict=True):
            if isinstance(mine, formats.Nvfp4Tensor) and isinstance(expected, formats.Nvfp4Tensor):
                outcome.compare_packed(mine, expected)
            else:
                assert isinstance(mine, torch.Tensor)
                assert isinstance(expected, torch.Tensor)
                outcome.compare(mine, expected)


def gemv_case(
    rows: int, k: int, outputs: int, dtype: torch.dtype, processors: int = 1
) -> Callable[[Setting, Outcome], None]:
    """The small-M GEMM with TMA, mbarriers and, on architectures with multicast, clusters of two blocks."""

    def case(setting: Setting, outcome: Outcome) -> None:
        x = multiples(setting, rows, k, most=8, seed=3).to(dtype)
        weight, bias = packed(setting, outputs, k, seed=1, weight=True), multiples(setting, outputs, seed=7)
        out = torch.empty(rows, outputs, dtype=dtype)
        shared = SMALL_SHARED if setting.capability >= 120 else LARGE_SHARED
        chosen = gemv.variant(rows, outputs, k, processors, shared, setting.capability)
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


QUANTIZERS, MAPS = "quantisers", "channels_last"
CASES = (
    Case("pack rows", QUANTIZERS, pack((24, 64), 1, HALF)),
    Case("pack rows, 4/6", QUANTIZERS, pack((16, 64), 1, BFLOAT, STRICT)),
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
    Case("blocks of 16 x 16", QUANTIZERS, tiles),
    Case("amax", QUANTIZERS, amaxes),
    Case("all weights", "weights", all_weights),
    Case("GroupNorm, ReLU, fake quantisation", MAPS, group_norm),
    Case("pool", MAPS, pooling),
    Case("concatenate and separate", MAPS, concatenation),
    Case("running amax", MAPS, tracking),
    Case("GroupNorm and pack", "norm and pack", norm_packing),
    Case("statistics of GroupNorm", "statistics", norm_statistics(3, 32, 5, 7)),
    Case("statistics of GroupNorm, 6 channels a group", "statistics", norm_statistics(1, 48, 9, 13)),
    Case("GEMV, 1 row", "GEMV", gemv_case(1, 512, 24, HALF), has_tma),
    Case("GEMV, 1 row, K = 1280", "GEMV", gemv_case(1, 1280, 72, HALF), has_tma),
    Case("GEMV, 5 rows, bfloat16", "GEMV", gemv_case(5, 512, 40, BFLOAT), has_tma),
    Case("GEMV, 16 rows, K = 4352", "GEMV", gemv_case(16, 4352, 20, HALF), has_tma),
)
