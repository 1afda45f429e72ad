"""Which kernels, macros and signatures the operators launch, found by running them on CPU tensors without a launch.

A list of macros kept by hand would go stale with the launching code. Here every operator runs with a recorder in the
place of `runtime.launch.kernel`: nothing reaches a GPU, and what would have been compiled is written down. `BESIDES`
has more combinations of macros, without what is launched from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from fp4deploy.formats import quantize_nvfp4
from fp4deploy.plugins.frames.class_map import class_map_kernel
from fp4deploy.plugins.frames.prepare import prepare_and_pack_kernel, prepare_kernel
from fp4deploy.plugins.gemm import gemv
from fp4deploy.plugins.gemm.convolution import block_scaled, depthwise, direct, narrow_wgrad, plain, small_k, warpgroup
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight
from fp4deploy.plugins.losses import segmentation
from fp4deploy.plugins.quantize import (
    channels_last,
    layer_norm,
    learned,
    maps,
    ms_eden,
    norm_pack,
    operators,
    pointwise_pack,
    statistics,
    weights,
    window,
)
from fp4deploy.plugins.quantize.input_encoding import encode_and_pack
from fp4deploy.plugins.runtime import pdl
from fp4deploy.plugins.runtime.launch import substituted

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Variant:
    """One compilation: a source and its macros; `entries` are (kernel, signature) launched from it."""

    source: str
    macros: tuple[tuple[str, Any], ...]
    entries: frozenset[tuple[str, str]]

    def __str__(self) -> str:
        return " ".join([self.source, *(f"{name}={value}" for name, value in self.macros if value != 0)])

    def runs_on(self, arch: str) -> bool:
        """Whether it is launched on an architecture such as "sm_90a"."""
        if self.source == warpgroup.SOURCE:
            return capability(arch) == warpgroup.SM
        if self.source == block_scaled.SOURCE:
            return capability(arch) in block_scaled.ARCHITECTURES
        if self.source != gemv.SOURCE:
            return True
        multicast = dict(self.macros).get("CLUSTER") == 2
        return capability(arch) in (gemv.MULTICAST if multicast else range(gemv.TMA_FROM, 1000))


def capability(arch: str) -> int:
    """90 of "sm_90a"."""
    return int(arch.removeprefix("sm_").rstrip("a"))


class Recorder:
    def __init__(self) -> None:
        self.found: dict[tuple[str, tuple[tuple[str, Any], ...]], set[tuple[str, str]]] = {}

    def kernel(
        self, source: str, name: str, signature: str, macros: dict[str, Any] | None, device: object = None
    ) -> mock.Mock:
        def launch(grid: object, block: object, *arguments: object, shared: int = 0) -> None:
            assert len(arguments) == len(re.findall(r"\d*.", signature)), (source, name, signature)

        self.found.setdefault((source, tuple(sorted((macros or {}).items()))), set()).add((name, signature))
        return mock.Mock(launch=launch, signature=signature)

    def pdl(
        self, kernel: mock.Mock, code: object, weight: object, grid: int, block: int, args: tuple, shared: int
    ) -> None:
        assert len(args) == len(re.findall(r"\d*.", kernel.signature))


def launched() -> list[Variant]:
    """Every variant of `EXERCISES`, each compilation once."""
    recorder = Recorder()
    with (
        substituted(recorder.kernel, num_sms=132),
        mock.patch.object(pdl, "launch", recorder.pdl),
        mock.patch.object(gemv, "tensor_map", return_value=bytes(128)),
    ):
        for exercise in EXERCISES:
            exercise()
    return [Variant(source, macros, frozenset(entries)) for (source, macros), entries in recorder.found.items()]


def _amax(rows: int = 0) -> torch.Tensor:
    return torch.ones(rows) if rows else torch.ones(())


def _along(
    shape: tuple[int, ...],
    axis: int,
    dtype: torch.dtype,
    variant: list[int],
    random: bool = False,
    inside: bool = False,
) -> Callable[[], object]:
    bits = torch.zeros(2, dtype=torch.int64) if random else None
    return lambda: operators._quantize_along(torch.zeros(shape, dtype=dtype), axis, _amax(), bits, variant, inside)


def _packed(
    shape: tuple[int, ...],
    axis: int,
    dtype: torch.dtype,
    variant: list[int],
    random: bool = False,
    swizzle: bool = False,
) -> Callable[[], object]:
    bits = torch.zeros(2, dtype=torch.int64) if random else None
    return lambda: operators._pack_along(torch.zeros(shape, dtype=dtype), axis, _amax(), bits, variant, swizzle)


def _row_scaled(
    shape: tuple[int, ...], dtype: torch.dtype, variant: list[int], random: bool = False
) -> Callable[[], object]:
    bits = torch.zeros(2, dtype=torch.int64) if random else None
    return lambda: operators._pack_row_scaled(torch.zeros(shape, dtype=dtype), 1, bits, variant)


def _big(exercise: Callable[[], object]) -> Callable[[], object]:
    """As a tensor with 2^31 threads."""
    return mock.patch.object(operators, "SMALL", 0)(exercise)


def _measured(shape: Shape, dtype: torch.dtype) -> Callable[[], object]:
    return lambda: operators._quantize_and_amax(torch.zeros(shape, dtype=dtype), 1, _amax(), None, PLAIN)


def _images(quantize: bool) -> None:
    x = torch.zeros(2, 32, 4, 4, dtype=HALF).to(memory_format=torch.channels_last)
    c, amax = torch.zeros(32), torch.ones(1)
    channels_last._group_norm_relu(x, c, c, c, 4, 1e-5, amax, None, 0.9, quantize)
    statistics = torch.zeros(2, 2, 32), torch.zeros(2, 4, 2), torch.zeros(2, 32)
    channels_last._group_norm_relu_backward(x, x, *statistics, c, c, amax, quantize)
    channels_last._group_norm_relu_backward_clipped(x, x, *statistics, c, c, torch.zeros(128, dtype=torch.uint8))
    channels_last._group_norm_relu_backward_in_place(x, x, *statistics, c, c, amax, quantize, quantize)
    channels_last._pool(x, amax if quantize else None)
    for ab in (None, statistics[0]):
        channels_last._pool_backward(x, x, x[:, :, :2, :2], amax if quantize else None, ab)
        for bias in (None, c):
            channels_last._concat(x, x, amax if quantize else None, bias=bias, ab=ab)
    out, inside = channels_last._concat(x, x, amax if quantize else None, amax, amax, 0.9)
    for bias in (None, c):
        channels_last._separate(out, inside if quantize else None, 32, bias is not None)
        channels_last._track_amax(x, None, amax, 0.9, True, bias=bias)
        channels_last._previous_amax(x, amax, amax, bias)


def _learned_amax() -> None:
    x = torch.zeros(2, 32, 4, 4, dtype=HALF).to(memory_format=torch.channels_last)
    learned._group_norm_relu_damax(x, x, torch.zeros(2, 2, 32), _amax(), None)
    learned._pool_damax(x, x[:, :, :2, :2], _amax(), None)
    for bias in (None, torch.zeros(32)):
        learned._concat_damax(x, x, torch.cat([x, x], 1), _amax(), None, bias)


def _segmentation(classes: int, dtype: torch.dtype, layout: torch.memory_format) -> Callable[[], object]:
    def exercise() -> None:
        logits, target = (
            torch.zeros(2, classes, 3, 4, dtype=dtype).to(memory_format=layout),
            torch.zeros(2, 3, 4).long(),
        )
        segmentation._sums(logits, target, None, 0.0, 255)
        segmentation._gradient(logits, target, None, torch.zeros(2 + 3 * classes), 0.0, 255)

    return exercise


def _packed_norms() -> None:
    x, ab, form = torch.zeros(2, 4, 4, 32, dtype=HALF), torch.zeros(2, 2, 32), norm_pack.OutputForm
    norm_pack.apply_kernels(x, ab, [form(_amax()), form(None)])
    norm_pack.apply_kernels(x, ab, [form(_amax()), form(_amax(), pooled=True), form(_amax())])
    for moments in (statistics.chunk_moments(x), statistics.Moments(torch.zeros(8, 2, 2, 32), 4, 4, (2, 2), 2)):
        statistics.combine(moments, x.shape, None, torch.ones(32), torch.zeros(32), 8, 1e-5)


def _row_norms() -> None:
    for width, dtype in ((48, HALF), (384, BFLOAT), (layer_norm.MAX_WIDTH, HALF)):
        x, weight = torch.zeros(5, width, dtype=dtype), torch.zeros(width)
        layer_norm.layer_norm(x, x, weight, weight, _amax(), 1e-5, 0.0, True)


def _elementwise_layers() -> None:
    x, ab, form = torch.zeros(2, 4, 4, 32, dtype=HALF), torch.zeros(1, 2, 32), norm_pack.OutputForm
    for activation in pointwise_pack.ACTIVATIONS:
        work = pointwise_pack.Pointwise(ab, None, None, activation)
        pointwise_pack.apply_kernels(x, work, [form(_amax()), form(None)])
    for first, second in ((None, None), (None, ab), (ab, None), (ab, ab)):
        work = pointwise_pack.Pointwise(first, x, second, "relu")
        pointwise_pack.apply_kernels(x, work, [form(_amax())])


def _windows() -> None:
    x, packed = torch.zeros(1, 32, 4, 4, dtype=HALF), quantize_nvfp4(torch.zeros(1, 4, 4, 32))
    for dtype in (HALF, BFLOAT):
        own = x.to(dtype, memory_format=torch.channels_last)
        window.max_pool_kernel(own, (3, 3), (2, 2), (1, 1), (1, 1), False)
    window.resize_kernel(packed, None, [2.0, 2.0], False)


def _map(dtype: torch.dtype, *blocks: Any, columns: int = 1) -> Callable[[], object]:
    x = torch.zeros(2, 64, 6, 38, dtype=dtype).contiguous(memory_format=torch.channels_last)
    places = maps.Columns(columns, 1, columns // 2, 1, 38)
    return lambda: maps.fake_quantize_map(x, *blocks, places, dtype)


def _ms_eden(x: torch.Tensor, axis: int, at: list[int] | None = None) -> None:
    random = torch.zeros(2, dtype=torch.int64)
    ms_eden._ms_eden_amax(x, random, axis, at or [])
    for packed in (False, True):
        ms_eden._ms_eden(x, _amax(), random, random, axis, packed, at or [])


def _gemv(rows: int, outputs: int, dtype: torch.dtype, *gpu: int) -> Callable[[], object]:
    x, out = torch.zeros(rows, 256, dtype=dtype), torch.zeros(rows, outputs, dtype=dtype)

    def launch() -> None:
        chosen = gemv.variant(rows, outputs, 256, *gpu)
        with mock.patch.object(gemv, "_chosen", return_value=chosen):
            gemv.launch(x, quantize_nvfp4(torch.zeros(outputs, 256)), None, out, True)

    return launch


# FORMAT, E, SQUARED, FAST, HADAMARD, ROWS
PLAIN, MX_FLOOR, MX_CEIL = [0, 448, 0, 0, 0, 0], [2, 448, 0, 0, 0, 0], [3, 448, 0, 0, 0, 0]
STRICT, FAST, ROWS_FAST = [1, 256, 0, 0, 0, 0], [1, 448, 1, 1, 0, 0], [1, 256, 0, 1, 0, 1]
STRICT_SQUARED, ROWS = [1, 256, 1, 0, 0, 0], [0, 448, 0, 0, 0, 1]
HADAMARD, ROWS_HADAMARD, MX_HADAMARD = [0, 448, 0, 0, 1, 0], [0, 448, 0, 0, 1, 1], [3, 448, 0, 0, 1, 0]
# Multiprocessors, shared memory of a block, capability.
H200, SM120 = (132, 232_448, 90), (188, 101_376, 120)
MATRIX, ODD, IMAGE = (32, 64), (8, 17), (2, 32, 4, 6)


# One of each kind; the products of all options are for the GPU tests.
def _convolution() -> object:
    return plain.conv2d(torch.zeros(1, 4, 4, 3).half(), torch.zeros(5, 3, 3, 3).half(), None, padding=(1, 1))


def _copies(dtype: torch.dtype) -> None:
    x, y = torch.zeros(1, 3, 4, 4, dtype=dtype), torch.zeros(1, 4, 4, 3).half()
    plain.read_image(x)
    plain.read_image(x, encoded=True)
    plain.write_planes(y, dtype)
    plain.concat([y, y])
    plain.class_map(y)


def _encoded(dtype: torch.dtype) -> Callable[[], object]:
    return lambda: encode_and_pack(torch.zeros(1, 3, 4, 5, dtype=dtype), torch.tensor(6.0))


def _class_map(classes: int, dtype: torch.dtype, layout: torch.memory_format, side: int) -> Callable[[], object]:
    logits = torch.zeros(1, classes, 4, 5, dtype=dtype).to(memory_format=layout)
    mask = torch.uint8 if classes < 256 else torch.uint16
    return lambda: class_map_kernel(logits, (4, 5) if side == 4 else (side, side), mask)


def _prepared() -> None:
    frames, three = torch.zeros(2, 4, 5, 3, dtype=torch.uint8), torch.zeros(3)
    given = (frames, (3, 7), (3, 2), (1, 2, 3), three, three)
    prepare_kernel(*given)
    prepare_and_pack_kernel(*given, _amax())


def _direct(channels: tuple[int, ...], outputs: int, packed: bool = False) -> Callable[[], object]:
    def exercise() -> None:
        sources = tuple(quantize_nvfp4(torch.zeros(1, 4, 4, each)) for each in channels)
        weight = quantize_nvfp4(torch.zeros(outputs, 3, 3, sum(channels)))
        decoded = decode_weight(weight, channels)
        direct.conv2d(sources, decoded, None, (1, 1), out_amax=_amax() if packed else None, moments=not packed)

    return exercise


def _block_scaled(
    channels: tuple[int, ...],
    outputs: int,
    size: int = 3,
    stride: int = 1,
    packed: bool = False,
    dtype: torch.dtype = HALF,
    num_sms: int = 1,
) -> Callable[[], object]:
    def exercise() -> None:
        sources = tuple(quantize_nvfp4(torch.zeros(1, 5, 5, each)) for each in channels)
        weight = quantize_nvfp4(torch.zeros(outputs, size, size, sum(channels)))
        pixels = (1, 5, 5) if size > 1 else (1, 1, 25)
        chosen = block_scaled.variant(channels, outputs, (size, size), stride, 1, pixels, num_sms)
        place = (stride, (size // 2, size // 2), 1, False, dtype, _amax() if packed else None)
        block_scaled.conv2d(sources, weight, None, *place, chosen=chosen)

    return exercise


def _depthwise(
    piece: tuple[int, int], channels: int = 96, taps: int = 7, stride: int = 1, dtype: torch.dtype = HALF
) -> Callable[[], Any]:
    x, weight = torch.zeros(1, 9, 9, channels, dtype=dtype), torch.zeros(channels, 1, taps, taps, dtype=dtype)
    return lambda: depthwise.conv2d(x, weight, None, (stride, stride), (1, 1), piece=piece)


def _small_k(
    image: Shape,
    filters: Shape,
    stride: int = 1,
    padding: int = 0,
    dtype: torch.dtype = HALF,
    moments: bool = False,
    half: torch.dtype = HALF,
) -> Callable[[], object]:
    x, weight = torch.zeros(image, dtype=dtype), torch.zeros(*filters, image[-1], dtype=half)
    return lambda: small_k.conv2d(x, weight, None, (stride, stride), (padding, padding), moments=moments)


def _narrow_wgrad(
    image: Shape, outputs: int, taps: tuple[int, int], stride: int = 1, dtype: torch.dtype = HALF
) -> Callable[[], object]:
    size = [(each - tap) // stride + 1 for each, tap in zip(image[1:3], taps, strict=True)]
    x, g = torch.zeros(image, dtype=dtype), torch.zeros(image[0], *size, outputs, dtype=dtype)
    return lambda: narrow_wgrad.wgrad(g, x, taps, (stride, stride))


def _warpgroup(
    joint: bool,
    height: int,
    chunks: int = 1,
    size: int = 3,
    splits: int = 1,
    packed: bool = False,
    transposed: bool = False,
    volume: bool = False,
    pairs: bool = False,
    dtype: torch.dtype = HALF,
) -> Callable[[], object]:
    def exercise() -> None:
        outputs, channels = (32, (32,)) if pairs else (128 if joint else 64, (64 * chunks,))
        axes = 3 if volume else 2
        taps = (2 if transposed else size,) * axes
        sources = (quantize_nvfp4(torch.zeros(1, *(4,) * axes, *channels)),)
        filters, two = quantize_nvfp4(torch.zeros(outputs, *taps, *channels)), warpgroup.pairs(channels, outputs, taps)
        weight = decode_weight(filters, channels, transposed, two)
        place, amax = (0 if transposed else size // 2,) * axes, _amax() if packed else None
        shape = warpgroup.shape_of(sources, weight, place, 1, transposed, packed)
        chosen = warpgroup.fitted(shape, joint, height, splits, 132)
        found = {"out_amax": amax, "moments": not packed, "transposed": transposed, "chosen": chosen}
        warpgroup.conv2d(sources, weight, None, place, dtype=dtype, **found)

    return exercise


EXERCISES: list[Callable[[], object]] = [
    _along(MATRIX, 1, BFLOAT, PLAIN, inside=True),
    _along(MATRIX, 1, FLOAT, MX_CEIL),
    _along(ODD, 1, HALF, PLAIN, random=True),
    _along(IMAGE, 1, HALF, PLAIN, inside=True),
    _along((2, 32, 3, 3), 1, FLOAT, STRICT, inside=True),
    _along(IMAGE, 1, BFLOAT, MX_CEIL, random=True),
    _along(IMAGE, 1, HALF, MX_HADAMARD, random=True),
    _along(IMAGE, 1, FLOAT, STRICT_SQUARED, inside=True),
    _measured(MATRIX, BFLOAT),
    _measured(IMAGE, HALF),
    _measured(ODD, FLOAT),
    _packed(MATRIX, 1, BFLOAT, STRICT),
    _packed(MATRIX, 1, HALF, PLAIN),
    _packed(MATRIX, 1, BFLOAT, PLAIN, random=True, swizzle=True),
    _packed(MATRIX, 1, FLOAT, FAST, swizzle=True),
    _packed(MATRIX, 1, BFLOAT, ROWS_HADAMARD, random=True),
    _packed(IMAGE, 1, HALF, FAST),
    _packed(MATRIX, 1, FLOAT, PLAIN),
    _packed(MATRIX, 1, BFLOAT, STRICT_SQUARED),
    _packed(MATRIX, 1, BFLOAT, ROWS_FAST),
    _packed(IMAGE, 1, BFLOAT, MX_FLOOR, swizzle=True),
    _big(_packed(MATRIX, 1, BFLOAT, HADAMARD, random=True, swizzle=True)),
    _row_scaled(MATRIX, HALF, ROWS),
    _row_scaled(MATRIX, BFLOAT, ROWS_FAST),
    _row_scaled(MATRIX, FLOAT, ROWS_HADAMARD, random=True),
    lambda: operators._quantize_along(torch.zeros(MATRIX, dtype=BFLOAT), 1, None, None, ROWS, True),
    lambda: operators._quantize_tiles(torch.zeros(48, 48, 3, 3), 0, 1, _amax(), None, STRICT, True),
    lambda: operators._pack_tiles(torch.zeros(MATRIX, dtype=HALF), _amax(), None, PLAIN),
    lambda: operators._pack_tiles(torch.zeros(MATRIX, dtype=HALF), _amax(), torch.zeros(2, dtype=torch.int64), PLAIN),
    lambda: operators._finite_amax(torch.zeros(MATRIX, dtype=BFLOAT)),
    lambda: operators._row_amax(torch.zeros(MATRIX, dtype=BFLOAT), 1),
    lambda: operators._hadamard_amax(torch.zeros(MATRIX, dtype=BFLOAT), 1),
    lambda: operators._mask_gradient(torch.zeros(MATRIX, dtype=HALF), torch.zeros(128, dtype=torch.int16), 1),
    lambda: weights._fake_quantize_weights([torch.zeros(MATRIX)], [1], HALF),
    lambda: _images(True),
    _learned_amax,
    _segmentation(12, HALF, torch.channels_last),
    _segmentation(12, FLOAT, torch.contiguous_format),
    _segmentation(81, BFLOAT, torch.channels_last),
    _segmentation(300, HALF, torch.contiguous_format),
    _encoded(FLOAT),
    _encoded(HALF),
    _class_map(20, HALF, torch.channels_last, 7),
    _class_map(20, HALF, torch.channels_last, 4),
    _class_map(19, BFLOAT, torch.channels_last, 3),
    _class_map(12, FLOAT, torch.contiguous_format, 9),
    _class_map(300, HALF, torch.channels_last, 8),
    _prepared,
    _packed_norms,
    _row_norms,
    _elementwise_layers,
    _windows,
    _map(HALF, maps.Blocks(rounding="stochastic"), maps.Blocks(None, "stochastic", hadamard=True)),
    _map(BFLOAT, None, maps.Blocks("ceil", "stochastic"), columns=3),
    _map(FLOAT, maps.Blocks(), None),
    lambda: _ms_eden(torch.zeros(MATRIX, dtype=HALF), 1),
    lambda: _ms_eden(torch.zeros(MATRIX, dtype=BFLOAT), 0),
    lambda: _ms_eden(
        torch.zeros(1, 32, 3, 40, dtype=HALF).to(memory_format=torch.channels_last), 3, [3, 1, 1, 1, 40, 2]
    ),
    _direct((16,), 16),
    _direct((32, 32), 32),
    _direct((32,), 16, packed=True),
    _block_scaled((128,), 128),
    _block_scaled((64, 64), 64, packed=True),
    _block_scaled((32, 80), 72, dtype=BFLOAT),
    _block_scaled((48,), 20, size=5),
    _block_scaled((192,), 100, size=1),
    _block_scaled((96,), 12, size=1, num_sms=1 << 20, packed=True),
    _block_scaled((64,), 128, stride=2),
    _block_scaled((64,), 32, stride=2, num_sms=1 << 20),
    *(_depthwise(piece) for piece in depthwise.PIECES),
    _depthwise((2, 4), 6, 5, 2, BFLOAT),
    _small_k((1, 4, 4, 3), (64, 3, 3), 1, 1, FLOAT, moments=True),
    _small_k((1, 9, 9, 3), (64, 7, 7), 2, 3),
    _small_k((1, 4, 4, 3), (64, 3, 3), 1, 1, FLOAT, moments=True, half=BFLOAT),
    _small_k((1, 4, 4, 16), (21, 3, 3), 1, 1, moments=True),
    _small_k((1, 4, 4, 64), (12, 1, 1)),
    _small_k((1, 4, 4, 16), (70, 1, 1), moments=True),
    _narrow_wgrad((1, 4, 4, 3), 16, (3, 3)),
    _narrow_wgrad((1, 9, 9, 3), 64, (7, 7), 2),
    _narrow_wgrad((1, 4, 4, 64), 12, (1, 1), dtype=BFLOAT),
    _warpgroup(True, 24),
    _warpgroup(True, 24, dtype=BFLOAT),
    _warpgroup(False, 24),
    _warpgroup(True, 20, 2, size=1, packed=True),
    _warpgroup(False, 16, splits=2, chunks=4),
    _warpgroup(True, 24, 2, transposed=True, packed=True),
    _warpgroup(False, 16, volume=True),
    _warpgroup(False, 16, volume=True, pairs=True),
    _warpgroup(True, 8, transposed=True, packed=True, volume=True),
    _gemv(1, 8192, HALF, *H200),
    _gemv(8, 4096, BFLOAT, *H200),
    _gemv(9, 40, HALF, *H200),
    _gemv(16, 8192, HALF, *H200),
    _gemv(16, 8192, BFLOAT, *SM120),
    _convolution,
    *(partial(_copies, dtype) for dtype in (FLOAT, HALF)),
]

_QUANTIZE = (
    "FORMAT",
    "SQUARED",
    "FAST",
    "HADAMARD",
    "ROWS",
    "STOCHASTIC",
    "PACKED",
    "IN_RANGE",
    "INNER",
    "LINEAR",
    "BIG",
)
_TILES = ("FORMAT", "SQUARED", "FAST", "STOCHASTIC", "PACKED", "IN_RANGE")


def _besides(source: str, zeros: tuple[str, ...] = (), **macros: str | int) -> Variant:
    return Variant(source, tuple(sorted({**dict.fromkeys(zeros, 0), **macros}.items())), frozenset())


BESIDES = [
    _besides("quantize.cu", _QUANTIZE, DTYPE="float", E=448, FORMAT=2, LINEAR=1, VECTORS=4),
    _besides("pack_rows.cu", DTYPE="__half", E=256, STOCHASTIC=0, SWIZZLED=1),
    _besides("quantize_tile.cu", _TILES, DTYPE="__nv_bfloat16", ALONG=1, E=256, FORMAT=1, IN_RANGE=1),
    _besides("quantize_tile.cu", _TILES, DTYPE="float", ALONG=0, E=256, STOCHASTIC=1, PACKED=1),
    _besides("gemv_tma.cu", DTYPE="__nv_bfloat16", ROWS=8, CLUSTER=2),
    _besides("gemv_tma.cu", DTYPE="__half", ROWS=16, CLUSTER=2),
    _besides("gemv_tma.cu", DTYPE="__nv_bfloat16", ROWS=16, CLUSTER=2),
    _besides("gemv_tma.cu", DTYPE="__half", ROWS=16, OUTPUTS=32, CONSUMERS=1, STAGES=3),
]
