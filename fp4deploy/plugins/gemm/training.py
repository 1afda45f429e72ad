"""Launching the GEMMs of a training step (`triton.training`): operands packed in NVFP4 or MXFP4, outputs plain; of
W4A8 the forward, MXFP8 by MXFP4, and of FP8, E4M3 by E4M3.

    gather_gemm   [N, H, W, C] x [outputs, KH, KW, C] -> [N, OH, OW, outputs]     forward and dgrad
    rows_gemm     [N, rows, P] x [N, columns, P] -> [rows, columns]               wgrad

On SM90 codes are decoded in registers; from SM100 on block-scaled instructions take them. The caller checks that
kernels run (`arguments.runs_kernels`). Nothing synchronises. `*_call` describe a launch for tensors on any device,
which tests pass to Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fp4deploy.formats import E2M1_MAX, NVFP4_BLOCK, EightBitTensor, Mxfp4Tensor, Mxfp8Tensor, Nvfp4Tensor
from fp4deploy.plugins.aot.spec import Call, Launch
from fp4deploy.plugins.gemm.arguments import aligned, capability_of, require_32_bit, run
from fp4deploy.plugins.gemm.triton.tiles import FILL, NATIVE_FROM, NATIVE_NARROW, NATIVE_WIDE, Tile

Packed = Nvfp4Tensor | Mxfp4Tensor
Filter = Packed | EightBitTensor
Source = Filter | Mxfp8Tensor
Pair = tuple[int, int]
TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
NARROW, WIDE = Tile(64, 64, 32, 4, 3), Tile(128, 128, 32, 8, 3)
ROWS_NARROW, ROWS_WIDE = Tile(64, 128, 64, 4, 3), Tile(128, 128, 64, 8, 3)
ROWS_MX = Tile(64, 128, 32, 4, 3)  # decoding to BF16 takes more registers: larger tiles spill
WAVES = 2  # of programs that split-K fills a GPU with
GATHER_SIZES = ("H", "W", "CB", "OH", "OW", "M", "outputs")
GATHER_STEPS = ("stride_y", "stride_x", "padding_y", "padding_x", "dilation_y", "dilation_x")


@dataclass(frozen=True)
class Window:
    """How the taps of a filter lie on a feature map, (vertical, horizontal) each."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair


POINTWISE = Window((1, 1), (1, 1), (0, 0), (1, 1))


def gather_gemm(
    x: Source,
    weight: Filter,
    window: Window,
    pixels: Pair,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    inverse: bool = False,
) -> torch.Tensor:
    """An implicit GEMM of a feature map and a filter, blocks of both along their last axis.

    Args:
        x: packed [N, H, W, C].
        weight: packed [outputs, KH, KW, C], of the format of `x`; MXFP4 where that is MXFP8. FP8 has as many channels
            as `whole_blocks` makes of C, `x` one scale and the weight [outputs].
        window: of the convolution.
        pixels: height and width of the output.
        dtype: of the output, float16, bfloat16 or float32.
        bias: [outputs].
        inverse: the adjoint of the convolution: an input gradient, or a transposed convolution.

    Returns:
        [N, OH, OW, outputs].

    Raises:
        InputError: sizes beyond the kernel's 32-bit counters.
    """
    device = x.codes.device
    outputs, filters = weight.codes.shape[0], weight.codes.numel()
    out = torch.empty((x.codes.shape[0], *pixels, outputs), dtype=dtype, device=device)
    sizes = {"output pixels": out.numel() // max(1, outputs), "output channels": outputs}
    require_32_bit(sizes | {"bytes of a filter": filters // max(1, outputs)})
    run(gather_call(x, weight, window, out, bias, inverse, capability_of(device)), device)
    return out


def whole_blocks(x: EightBitTensor) -> EightBitTensor:
    """FP8 as `gather_gemm` reads it: zeros after the last channel, up to a multiple of 16.

    >>> x = EightBitTensor(torch.ones(2, 3).to(torch.float8_e4m3fn), torch.ones(()))
    >>> whole_blocks(x).codes.shape
    torch.Size([2, 16])
    """
    if x.codes.shape[-1] % NVFP4_BLOCK == 0:
        return x
    codes = F.pad(x.codes.view(torch.uint8), (0, -x.codes.shape[-1] % NVFP4_BLOCK))
    return EightBitTensor(codes.view(torch.float8_e4m3fn), x.scale)


def rows_gemm(a: Packed, b: Packed, segments: torch.Tensor | None = None) -> torch.Tensor:
    """a b^T over the last axis, summed over the first.

    Args:
        a: packed [N, rows, P].
        b: packed [N, columns, P], of the format of `a`.
        segments: int32 [E + 1], where along P the segments begin that have a sum each, multiples of 128; N is 1.

    Returns:
        float32 [rows, columns], or [E, rows, columns].

    Raises:
        InputError: sizes beyond the kernel's 32-bit counters.
    """
    device = a.codes.device
    require_32_bit({"bytes of a row": a.codes.shape[-1], "rows": a.shape[1], "columns": b.shape[1]})
    capability = capability_of(device)
    splits = split_count(a, b, rows_tile(a, capability)) if segments is None else len(segments) - 1
    out = torch.empty((splits, a.shape[1], b.shape[1]), dtype=torch.float32, device=device)
    run(rows_call(a, b, out, capability, segments=segments), device)
    if segments is not None:
        return out
    return out.sum(0) if splits > 1 else out[0]


def gather_call(
    x: Source,
    weight: Filter,
    window: Window,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    inverse: bool,
    capability: int,
    tile: Tile | None = None,
    asm: bool = True,
) -> Call:
    """The launch of `gather_gemm_kernel` into `out` [N, OH, OW, outputs]."""
    batch, oh, ow, outputs = out.shape
    x8, w8 = isinstance(x, Mxfp8Tensor | EightBitTensor), isinstance(weight, EightBitTensor)
    m, cb = batch * oh * ow, weight.codes.shape[-1] // (2 if w8 else 1)
    tile = tile or (WIDE if x8 else gather_tile(m, outputs, capability))  # larger ones spill on SM120
    constants = {
        "KH": window.kernel[0],
        "KW": window.kernel[1],
        "INVERSE": inverse,
        "MX": isinstance(weight, Mxfp4Tensor),
        "BIAS": bias is not None,
        "OUT": TYPES[out.dtype],
        **_constants(tile, capability, asm),
        "X8": x8,
        "W8": w8,
    }
    types = _operand_types("x") | _operand_types("w") | {"bias": "*fp32", "out": f"*{TYPES[out.dtype]}"}
    types |= dict.fromkeys((*GATHER_SIZES, *GATHER_STEPS), "i32") | {"x_range": "fp32", "w_range": "fp32"}
    values = (*_operand(x), *_operand(weight), x.codes if bias is None else bias.float().contiguous(), out)
    sizes = (*x.codes.shape[1:3], cb, oh, ow, m, outputs)
    steps = (*window.stride, *window.padding, *window.dilation)
    launch = _launch("gather_gemm_kernel", types, constants, ("CB",) if cb % 16 == 0 else (), tile)
    grid = (-(-m // tile.bm) * -(-outputs // tile.bn), 1, 1)
    return Call(launch, (*values, *sizes, *steps, _range(x), _range(weight)), grid)


def gather_tile(rows: int, outputs: int, capability: int) -> Tile:
    """The tile of `gather_gemm`; block-scaled MMA of SM100 needs 128 rows, below that Triton multiplies in FP16."""
    if capability >= NATIVE_FROM:
        return NATIVE_NARROW if outputs <= 64 else NATIVE_WIDE
    return NARROW if outputs <= 64 or rows <= 64 * FILL else WIDE


def rows_tile(a: Packed, capability: int) -> Tile:
    """The tile of `rows_gemm`; SM100 as for `gather_tile`."""
    if capability >= NATIVE_FROM:
        return ROWS_WIDE
    if isinstance(a, Mxfp4Tensor):
        return ROWS_MX
    return ROWS_WIDE if a.shape[1] > 64 else ROWS_NARROW


def split_count(a: Packed, b: Packed, tile: Tile) -> int:
    """How often K is split: as many programs as fill a GPU, each with eight steps at least."""
    tiles = -(-a.shape[1] // tile.bm) * -(-b.shape[1] // tile.bn)
    steps = a.shape[0] * -(-a.codes.shape[-1] // tile.bk)
    return max(1, min(WAVES * FILL // tiles, steps // 8))


def rows_call(
    a: Packed,
    b: Packed,
    out: torch.Tensor,
    capability: int,
    tile: Tile | None = None,
    asm: bool = True,
    segments: torch.Tensor | None = None,
) -> Call:
    """The launch of `rows_gemm_kernel` into `out`, float32 [splits, rows, columns], or a segment each."""
    tile = tile or rows_tile(a, capability)
    splits, rows, columns = out.shape
    batch, kb = a.shape[0], a.codes.shape[-1]
    split_steps = -(-(batch * -(-kb // tile.bk)) // splits)
    constants: dict[str, Any] = {} if segments is not None else {"segments": None}
    constants |= {"MX": isinstance(a, Mxfp4Tensor), **_constants(tile, capability, asm)}
    types = _operand_types("a") | _operand_types("b") | {"out": "*fp32"}
    types |= dict.fromkeys(("rows", "columns", "KB", "batch", "split_steps"), "i32")
    types |= {"a_range": "fp32", "b_range": "fp32"} | ({} if segments is None else {"segments": "*i32"})
    launch = _launch("rows_gemm_kernel", types, constants, ("KB",) if kb % 16 == 0 else (), tile)
    values: tuple[Any, ...] = (
        *_operand(a),
        *_operand(b),
        out,
        rows,
        columns,
        kb,
        batch,
        split_steps,
        _range(a),
        _range(b),
    )
    values += () if segments is None else (segments,)
    return Call(launch, values, (-(-rows // tile.bm) * -(-columns // tile.bn), splits, 1))


def _constants(tile: Tile, capability: int, asm: bool) -> dict[str, object]:
    return {"BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "NATIVE": capability >= NATIVE_FROM, "ASM": asm}


def _operand_types(name: str) -> dict[str, str]:
    return {name: "*u8", f"{name}_scales": "*u8", f"{name}_amax": "*fp32"}


def _operand(x: Source) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, block scales, and the amax of all or of FP8 the scales; codes in place of what is not read."""
    codes = x.codes.view(torch.uint8).contiguous()
    if isinstance(x, EightBitTensor):
        return aligned(codes), codes, x.scale.contiguous()
    scales = aligned(x.scales.view(torch.uint8).contiguous())
    return aligned(codes), scales, x.amax if isinstance(x, Nvfp4Tensor) else codes


def _range(x: Source) -> float:
    return E2M1_MAX * x.e4m3_max if isinstance(x, Nvfp4Tensor) else 1.0


def _launch(
    kernel: str, types: dict[str, str], constants: dict[str, Any], multiples: tuple[str, ...], tile: Tile
) -> Launch:
    divisible = tuple(name for name, kind in types.items() if kind == "*u8" or name in multiples)
    if constants["MX"]:  # not read
        types = {name: "*u8" if name.endswith("amax") else kind for name, kind in types.items()}
    if constants.get("BIAS") is False:
        types = types | {"bias": "*u8"}
    return Launch(
        f"training:{kernel}", tuple(types.items()), tuple(constants.items()), divisible, tile.warps, tile.stages
    )
