"""From operands to a launch: the arguments of the GEMM kernels, their variant, and what launches them.

`gemm_call` and `weight_only_call` return descriptions (`plugins.aot.spec.Call`) for tensors on any device, which tests
pass to Triton's interpreter; `launch_*` allocate the output and launch.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from fp4deploy.architecture import Architecture
from fp4deploy.errors import InputError
from fp4deploy.formats import E2M1_MAX, NVFP4_BLOCK, Nvfp4Tensor
from fp4deploy.graph.sizes import each
from fp4deploy.plugins.aot import load as aot
from fp4deploy.plugins.aot.compile import too_old, triton_version
from fp4deploy.plugins.aot.spec import Call, Launch
from fp4deploy.plugins.gemm import gemv
from fp4deploy.plugins.gemm.triton.tiles import NATIVE_FROM, Tile, gemm_tile, k_step_constants, weight_only_tile

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
MOST_32_BIT = (1 << 31) - (
    1 << 12
)  # of the kernels' counters and offsets; a tile that starts below it ends within 31 bits
POINTERS = ("x", "x_scales", "x_amax", "x2", "x2_scales", "x2_amax", "w", "w_scales", "w_amax", "bias", "out")
ALIGNED = ("x", "x_scales", "x2", "x2_scales", "w", "w_scales")  # to 16 bytes
SIZES = ("H", "W", "CB", "CB2", "OH", "OW", "M", "outputs", "stride", "padding", "dilation")
VOLUME = ("D", "OD", "stride_z", "stride_x", "padding_z", "padding_x")
Sizes = tuple[int, ...]  # one for each spatial axis, of feature maps with the batch in front


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether kernels run on the device of `x`."""
    return x.is_cuda and aot.available(x.device)


def launch_gemm(
    sources: tuple[Nvfp4Tensor, ...],
    weight: Nvfp4Tensor,
    bias: torch.Tensor | None,
    extent: Sizes,
    pixels: Sizes,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    out_amax: torch.Tensor | None,
    capability: int | None = None,
    launch: Callable[[Call], object] | None = None,
    **geometry: Any,
) -> torch.Tensor | Nvfp4Tensor:
    """Allocate the output of `shape` and fill it; see `gemm_call`.

    capability, launch: of another GPU than the one that is present, and what takes the launch; for launch plans.

    Raises:
        InputError: sizes beyond the kernel's 32-bit counters and offsets (`require_32_bit`).
    """
    device = weight.codes.device
    require_offsets([source.codes.shape[-1] for source in sources], extent, pixels, shape, **geometry)
    out, scales = output_buffers(shape, dtype, out_amax, device)
    capability = capability or capability_of(device)
    call = gemm_call(sources, weight, bias, extent, pixels, out, scales, out_amax, dtype, capability, **geometry)
    if launch is None:
        run(call, device)
    else:
        launch(call)
    return output_of(out, scales, out_amax, shape)


def output_buffers(
    shape: tuple[int, ...], dtype: torch.dtype, amax: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a kernel writes: values of `shape`, or with an amax uint8 codes and scales of blocks along the last axis."""
    if amax is None:
        return torch.empty(shape, dtype=dtype, device=device), None
    blocks = -(-shape[-1] // NVFP4_BLOCK)
    codes = torch.empty((*shape[:-1], 8 * blocks), dtype=torch.uint8, device=device)
    return codes, torch.empty((*shape[:-1], blocks), dtype=torch.uint8, device=device)


def output_of(
    out: torch.Tensor, scales: torch.Tensor | None, amax: torch.Tensor | None, shape: tuple[int, ...]
) -> torch.Tensor | Nvfp4Tensor:
    """The tensor, plain or packed, in `output_buffers`."""
    if scales is None or amax is None:
        return out
    return Nvfp4Tensor(out, scales.view(torch.float8_e4m3fn), amax, torch.Size(shape))


def launch_weight_only(x: torch.Tensor, weight: Nvfp4Tensor, bias: torch.Tensor | None, relu: bool) -> torch.Tensor:
    """Allocate [..., N] and fill it; see `weight_only_call`.

    Raises:
        InputError: sizes beyond the kernel's 32-bit counters and offsets.
    """
    require_32_bit(
        {"rows": math.prod(x.shape[:-1]), "elements of a row": x.shape[-1], "output elements of a row": weight.shape[0]}
    )
    out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if gemv.supports(rows, weight):
        gemv.launch(rows, weight, None if bias is None else _bias(bias, weight), out, relu)
    else:
        run(weight_only_call(rows, weight, bias, out, capability_of(x.device), relu), x.device)
    return out


def require_32_bit(sizes: Mapping[str, int]) -> None:
    """Compare sizes with the counters and offsets of the kernels, which have 32 bits.

    Raises:
        InputError: one is too large; the message names it.
    """
    for name, size in sizes.items():
        if size > MOST_32_BIT:
            raise InputError(
                f"The GEMM kernels count with 32 bits: {size} {name} are too many, {MOST_32_BIT} fit. Split the batch, "
                "or take a smaller feature map, fewer channels or a smaller filter."
            )


def require_offsets(
    channel_bytes: Sequence[int],
    extent: Sizes,
    pixels: Sizes,
    shape: tuple[int, ...],
    taps: Sizes = (1, 1),
    stride: int | Sizes = 1,
    padding: int | Sizes = 0,
    dilation: int = 1,
    **_: object,
) -> None:
    """What `implicit_gemm_kernel` computes in 32 bits; the offset of a pixel and of a row of the filter have 64."""
    deepest, last_tap = max(channel_bytes), 0
    for size, count in zip(extent[1:], taps, strict=True):
        last_tap = last_tap * size + (count - 1) * dilation
    steps = zip(pixels[1:], taps, each(stride, len(taps)), each(padding, len(taps)), strict=True)
    coordinate = max(size * step + around + count * dilation for size, count, step, around in steps)
    require_32_bit(
        {
            "output pixels": math.prod(shape[:-1]),
            "output channels": shape[-1],
            "bytes of a filter": math.prod(taps) * sum(channel_bytes),
            "bytes of the feature map between the first and the last tap of a filter": (last_tap + 1) * deepest,
            "rows or columns of the padded feature map": coordinate,
        }
    )


def flat(
    extent: Sizes, pixels: Sizes, taps: Sizes, strides: Sizes, paddings: Sizes
) -> tuple[Sizes, Sizes, Sizes, Sizes, Sizes]:
    """The same convolution over height and width alone, the depth being part of the batch, where that is one."""
    if len(taps) == 3 and (taps[0], strides[0], paddings[0]) == (1, 1, 0):
        extent, pixels = ((size[0] * size[1], *size[2:]) for size in (extent, pixels))
        taps, strides, paddings = taps[1:], strides[1:], paddings[1:]
    return extent, pixels, taps, strides, paddings


def gemm_call(
    sources: tuple[Nvfp4Tensor, ...],
    weight: Nvfp4Tensor,
    bias: torch.Tensor | None,
    extent: Sizes,
    pixels: Sizes,
    out: torch.Tensor,
    out_scales: torch.Tensor | None,
    out_amax: torch.Tensor | None,
    dtype: torch.dtype,
    capability: int,
    taps: Sizes = (1, 1),
    stride: int | Sizes = 1,
    padding: int | Sizes = 0,
    dilation: int = 1,
    relu: bool = False,
    transposed: bool = False,
    tile: Tile | None = None,
    asm: bool = True,
    groups: torch.Tensor | None = None,
) -> Call:
    """The launch of `implicit_gemm_kernel`.

    extent, pixels: batch, perhaps depth, height and width of the input and of the output (of a transposed convolution:
    of the input). stride, padding: of all axes or of each. transposed: a transposed convolution, whose strides are the
    sizes of the weight's filter. capability: 90 for SM90; from 100 on the native instructions are used.
    groups: `grouped.tile_table` of `tile`, of a matrix with a weight [E, outputs, K], E amaxes and a bias [E, outputs].
    """
    x, second = sources[0], sources[-1]
    two = len(sources) == 2
    m, outputs = math.prod(pixels), weight.shape[0 if groups is None else 1]
    strides, paddings = each(stride, len(taps)), each(padding, len(taps))
    if transposed:  # each pixel by itself, wherever it lies: one tap, without padding
        scale = weight.shape[1:-1]
        taps, strides, paddings = (*taps[len(scale) :], *scale), (1,) * len(taps), (0,) * len(taps)
    else:
        extent, pixels, taps, strides, paddings = flat(extent, pixels, taps, strides, paddings)
    volume: Sizes = ()
    if not transposed and len(taps) == 3:
        volume = (extent[1], pixels[1], strides[0], strides[2], paddings[0], paddings[2])
    elif not transposed and (len({*strides}) > 1 or len({*paddings}) > 1):
        volume = (1, 1, 1, strides[1], 0, paddings[1])
    filter_taps = 1 if transposed else math.prod(taps)
    cb, cb2 = x.codes.shape[-1], second.codes.shape[-1] if two else 0
    quantize = out_scales is not None
    if tile is None:
        depth = math.gcd(cb, cb2) if two else cb
        tile = gemm_tile(m, outputs, capability, quantize, transposed, two, filter_taps, depth)
    constants: dict[str, Any] = {
        **({} if volume else dict.fromkeys(VOLUME)),
        **({"groups": None} if groups is None else {}),
        "KD": taps[0] if len(taps) == 3 else 1,
        "KH": taps[-2],
        "KW": taps[-1],
        "TWO": two,
        "UP": transposed,
        **k_step_constants(tile, filter_taps, (cb, cb2) if two else (cb,)),
        "BIAS": bias is not None,
        "RELU": relu,
        "QUANTIZE": quantize,
        "BF16": dtype == torch.bfloat16,
        **_tile_constants(tile),
        "NATIVE": capability >= NATIVE_FROM,
        "ASM": asm,
    }
    types = {name: "*fp32" if name.endswith("amax") or name == "bias" else "*u8" for name in POINTERS}
    types["out"] = "*u8" if quantize else f"*{TYPES[dtype]}"
    types |= {"out_scales": "*u8", "out_amax": "*fp32"} | dict.fromkeys(SIZES, "i32")
    types |= dict.fromkeys(("x_range", "x2_range", "w_range"), "fp32")
    types |= dict.fromkeys(VOLUME if volume else (), "i32") | ({} if groups is None else {"groups": "*i32"})
    wide = ("CB", "CB2") if cb % 16 == 0 and cb2 % 16 == 0 else ()
    launch = _launch("gemm:implicit_gemm_kernel", types, constants, (*ALIGNED, *wide), tile)
    tensors: tuple[torch.Tensor, ...] = (_codes(x), _scales(x), x.amax, _codes(second), _scales(second), second.amax)
    tensors += (_codes(weight), _scales(weight), weight.amax, _bias(bias, x), out)
    tensors += (out if out_scales is None else out_scales, x.amax if out_amax is None else out_amax)
    sizes = (*extent[-2:], cb, cb2, *pixels[-2:], m, outputs, strides[-2], paddings[-2], dilation)
    ranges = tuple(E2M1_MAX * value.e4m3_max for value in (x, second, weight))
    tables = () if groups is None else (groups,)
    rows = -(-m // tile.bm) if groups is None else len(groups)
    grid = (rows * -(-outputs // tile.bn) * (math.prod(taps) if transposed else 1), 1, 1)
    return Call(launch, (*tensors, *sizes, *ranges, *volume, *tables), grid)


def weight_only_call(
    x: torch.Tensor,
    weight: Nvfp4Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    capability: int,
    relu: bool = False,
    tile: Tile | None = None,
    asm: bool = True,
) -> Call:
    """The launch of `weight_only_kernel` on rows [M, K]."""
    (m, k), n, cb = x.shape, weight.shape[0], weight.codes.shape[-1]
    tile = tile or weight_only_tile(m, capability)
    constants: dict[str, Any] = {
        "SWAP": tile.bm < 64,
        "EVEN": cb % tile.bk == 0 and 2 * cb == k,
        "BIAS": bias is not None,
        "RELU": relu,
        "BF16": x.dtype == torch.bfloat16,
        **_tile_constants(tile),
        "ASM": asm,
    }
    plain = f"*{TYPES[x.dtype]}"
    types = {"x": plain, "w": "*u8", "w_scales": "*u8", "w_amax": "*fp32", "bias": "*fp32", "out": plain}
    types |= dict.fromkeys(("M", "N", "K", "CB"), "i32") | {"w_range": "fp32"}
    wide = k % 16 == 0 and cb % 16 == 0 and x.data_ptr() % 16 == 0
    multiples = ("w", "w_scales", *(("x", "K", "CB") if wide else ()))
    launch = _launch("weight_only:weight_only_kernel", types, constants, multiples, tile)
    values = (x, _codes(weight), _scales(weight), weight.amax, _bias(bias, weight), out, m, n, k, cb)
    grid = (-(-m // tile.bm) * -(-n // tile.bn), 1, 1)
    return Call(launch, (*values, E2M1_MAX * weight.e4m3_max), grid)


def run(call: Call, device: torch.device) -> None:
    """Launch on a GPU: by Triton where it is installed and has the instruction, else a binary compiled before."""
    with torch.cuda.device(device):
        if triton_version() is None or _too_old(device.index, bool(dict(call.launch.constants).get("NATIVE"))):
            aot.function(call.launch, device).launch(call.grid, *call.values)
        else:
            just_in_time(call)


@lru_cache
def _too_old(index: int | None, native: bool) -> bool:
    return bool(too_old(Architecture.of_device(index).triton_name, native))


def just_in_time(call: Call) -> Any:
    """Launch by Triton (on a GPU, or in its interpreter); returns what Triton compiled."""
    constants = dict(call.launch.constants)
    options = call.launch.options()
    if constants.get("SECONDARY"):
        options["launch_pdl"] = True
    values = zip((name for name, _ in call.launch.arguments), call.values, strict=True)
    return _kernel(call.launch.kernel)[call.grid](**dict(values), **constants, **options)


@lru_cache
def _kernel(name: str) -> Any:
    module, function = name.split(":")
    return getattr(importlib.import_module(f"fp4deploy.plugins.gemm.triton.{module}"), function)


def _launch(
    kernel: str, types: dict[str, str], constants: dict[str, Any], multiples: tuple[str, ...], tile: Tile
) -> Launch:
    divisible = tuple(name for name in types if name in multiples)
    return Launch(kernel, tuple(types.items()), tuple(constants.items()), divisible, tile.warps, tile.stages)


def _tile_constants(tile: Tile) -> dict[str, int]:
    return {"BM": tile.bm, "BN": tile.bn, "BK": tile.bk}


def _codes(x: Nvfp4Tensor) -> torch.Tensor:
    return aligned(x.codes.contiguous())


def _scales(x: Nvfp4Tensor) -> torch.Tensor:
    return aligned(x.scales.view(torch.uint8).contiguous())


def aligned(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor at a multiple of 16 bytes; a slice of another tensor may start anywhere."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _bias(bias: torch.Tensor | None, other: Nvfp4Tensor) -> torch.Tensor:
    return other.amax if bias is None else bias.to(torch.float32).contiguous()


@lru_cache
def capability_of(device: torch.device) -> int:
    """90 for SM90."""
    return Architecture.of_device(device.index).number
