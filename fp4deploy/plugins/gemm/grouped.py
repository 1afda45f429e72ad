"""Grouped GEMM of a mixture of experts: rows sorted by expert, one packed weight an expert, ragged numbers of rows.

    order = expert_of_token.argsort(stable=True)
    ends = expert_of_token.bincount(minlength=E).cumsum(0)          [E], the end of each expert's rows
    y = fp4_grouped_linear(x[order], caches, ends)                  y[ends[e - 1] : ends[e]] = x W_e^T + bias_e

| form | what runs | weights | host |
|---|---|---|---|
| "packed", `x` packed too | on a GPU with Triton one launch; else the next line | packed | reads nothing |
| "packed" | a GEMM an expert: the definition | packed | reads `ends` |
| "decoded" | one `torch.nn.functional.grouped_mm` | decoded: E N K elements more | reads nothing |

All multiply the same numbers and differ in the order of sums alone: the decoded values of operands packed to NVFP4 are
rounded to the type that is multiplied in, which "packed" on a CPU does not do (its reference sums in FP32). Activations
are packed once, with one amax for all rows.

**One launch.** `matmul`'s kernel takes a table, int32 [tiles, 3], of the rows of each tile and whose matrix they are
multiplied with (`tile_table`). It is computed on the device: with tiles of BM rows there are at most M / BM + E, and
spare ones have no rows. Weights are [E, N, K], their amaxes [E, 1].

**Weight gradients** contract the rows of each expert. `padded` moves these to multiples of 128, with zeros between, so
that no block, no Hadamard transform and no rotation of MS-EDEN mixes two experts; then both operands are packed along
all rows, with one amax, and `rows_gemm` sums each expert's segment.

`fp4_grouped_linear` has no gradient; `qat.grouped_linear` has. No latency has been measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.aot.compile import triton_version
from fp4deploy.plugins.aot.spec import Call
from fp4deploy.plugins.gemm import arguments, dispatch
from fp4deploy.plugins.gemm.operands import InputAmax, output_dtype, pack, refuse_gradients
from fp4deploy.plugins.gemm.triton.tiles import gemm_tile
from fp4deploy.plugins.gemm.weight_cache import FP4WeightCache

FORMS = ("packed", "decoded")
SEGMENT = 128  # rows of an expert are padded to multiples of it for weight gradients


def fp4_grouped_linear(
    x: torch.Tensor,
    caches: Sequence[FP4WeightCache],
    ends: torch.Tensor,
    input_amax: InputAmax = None,
    dtype: torch.dtype | None = None,
    form: Literal["packed", "decoded"] = "packed",
) -> torch.Tensor:
    """x W_e^T + bias_e of each row's expert e.

    Args:
        x: [M, K], sorted by expert; float16 or bfloat16, or any float dtype with `input_amax`.
        caches: of each expert, weights [N, K] of one shape (`fp4_quantize`), all with a bias or none.
        ends: int32 or int64 [E] on the device of `x`, ascending: expert e has the rows from ends[e - 1] to ends[e];
            rows behind the last end are no expert's, and 0 in the output.
        input_amax: as of `fp4_cached_linear`.
        dtype: of the output, by default that of `x`.
        form: one GEMM of packed operands an expert, or weights decoded for one grouped GEMM.

    Returns:
        [M, N].

    Raises:
        InputError: shapes, types, devices or ends do not fit; an operand requires a gradient.
        UnavailableError: "decoded", and torch has no grouped_mm (before 2.10).

    >>> from fp4deploy.plugins import fp4_quantize
    >>> caches = [fp4_quantize(scale * torch.eye(32)) for scale in (1.0, 2.0)]
    >>> fp4_grouped_linear(torch.ones(3, 32).half(), caches, torch.tensor([1, 3]))[:, 0]
    tensor([1., 2., 2.], dtype=torch.float16)
    """
    refuse_gradients(x)
    _check(x, caches, ends, form)
    if input_amax is None and dtype not in (None, x.dtype):
        raise InputError(f"A weight-only GEMM of {x.dtype} gives {x.dtype}, not {dtype}; with input_amax it can.")
    found = output_dtype(x, dtype)
    rows = x if input_amax is None else pack(x, input_amax)
    return (_packed if form == "packed" else _decoded)(rows, caches, ends, found)


def _packed(
    x: torch.Tensor | Nvfp4Tensor, caches: Sequence[FP4WeightCache], ends: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    weights = [cache.weight for cache in caches]
    if isinstance(x, Nvfp4Tensor) and runs_grouped(x, weights[0], dtype):
        biases = [cache.bias for cache in caches if cache.bias is not None]
        return grouped_matmul(x, stacked(weights), ends, torch.stack(biases) if biases else None, dtype)
    out = torch.zeros((x.shape[0], weights[0].shape[0]), dtype=dtype, device=caches[0].device)
    for cache, (start, stop) in zip(caches, spans(ends, x.shape[0]), strict=True):
        if start < stop:
            out[start:stop] = cast(torch.Tensor, cache.forward(rows_of(x, start, stop), dtype=dtype))
    return out


def runs_grouped(a: Any, b: Any, dtype: torch.dtype) -> bool:
    """Whether `grouped_matmul` takes packed rows and a packed weight, [N, K] or [E, N, K], on their device."""
    nvfp4 = isinstance(a, Nvfp4Tensor) and isinstance(b, Nvfp4Tensor) and a.amax.numel() == 1
    filled = 0 not in (a.codes.numel(), b.codes.numel())
    return (
        nvfp4
        and filled
        and dtype in dispatch.DTYPES
        and triton_version() is not None
        and arguments.runs_kernels(a.codes)
    )


def grouped_matmul(
    a: Nvfp4Tensor, b: Nvfp4Tensor, ends: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """a b_e^T + bias_e of each row's expert, in one launch (`runs_grouped`).

    Args:
        a: packed [M, K], sorted by expert.
        b: packed [E, N, K], amax [E, 1].
        ends: as of `fp4_grouped_linear`.
        bias: [E, N].
        dtype: of the output, float16 or bfloat16.

    Returns:
        [M, N]; rows behind the last end are 0.

    Raises:
        InputError: sizes beyond the kernel's 32-bit counters.
    """
    device = a.codes.device
    out = torch.zeros((a.shape[0], b.shape[1]), dtype=dtype, device=device)
    arguments.run(grouped_call(a, b, ends, bias, out, arguments.capability_of(device)), device)
    return out


def grouped_call(
    a: Nvfp4Tensor, b: Nvfp4Tensor, ends: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, capability: int
) -> Call:
    """The launch of `grouped_matmul` into `out`, which is 0."""
    (rows, columns), depth = out.shape, a.codes.shape[-1]
    extent = (1, 1, rows)
    arguments.require_offsets([depth], extent, extent, (rows, b.shape[0] * columns))
    tile = gemm_tile(rows, columns, capability, taps=1, depth=depth)
    table = tile_table(ends, rows, tile.bm)
    operands = ((a,), b, bias, extent, extent, out, None, None, out.dtype, capability)
    return arguments.gemm_call(*operands, tile=tile, groups=table)


def tile_table(ends: torch.Tensor, rows: int, bm: int) -> torch.Tensor:
    """Of each tile of `bm` rows at most: the expert, the first row, and the row behind the last; int32 [tiles, 3].

    Spare tiles have the rows 0 to 0.

    >>> tile_table(torch.tensor([5, 5, 7]), 8, 4).tolist()
    [[0, 0, 4], [0, 4, 5], [2, 5, 7], [0, 0, 0], [0, 0, 0]]
    """
    ends = ends.long().clamp(max=rows)
    starts = F.pad(ends[:-1], (1, 0))
    last = ((ends - starts + bm - 1) // bm).cumsum(0)  # tile behind the last one of each expert
    tile = torch.arange(-(-rows // bm) + len(ends), device=ends.device)
    expert = torch.searchsorted(last, tile, right=True)
    real = expert < len(ends)
    expert = expert.where(real, 0)
    begin = starts[expert] + bm * (tile - F.pad(last[:-1], (1, 0))[expert])
    table = torch.stack([expert, begin, torch.minimum(begin + bm, ends[expert])], 1)
    return table.where(real[:, None], 0).int()


def padded(x: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows [P, ...] with zeros between experts, int32 [E + 1]: where each expert's begin, multiples of 128, and end).

    P depends on the shapes alone. Rows behind the last end stay, behind the last segment.

    >>> rows, segments = padded(torch.ones(5, 1), torch.tensor([2, 2, 5]))
    >>> segments.tolist(), rows.nonzero()[:, 0].tolist()
    ([0, 128, 128, 256], [0, 1, 128, 129, 130])
    """
    ends = ends.long().clamp(max=len(x))
    starts = F.pad(ends[:-1], (1, 0))
    segments = F.pad((-(-(ends - starts) // SEGMENT) * SEGMENT).cumsum(0), (1, 0))
    row = torch.arange(len(x), device=x.device)
    expert = torch.searchsorted(ends, row, right=True)
    at = row + (segments - F.pad(ends, (1, 0)))[expert]  # of nobody's rows: behind the last segment
    out = x.new_zeros((-(-len(x) // SEGMENT) * SEGMENT + len(ends) * SEGMENT, *x.shape[1:]))
    return out.index_copy_(0, at, x), segments.int()


def stacked(weights: Sequence[Nvfp4Tensor]) -> Nvfp4Tensor:
    """[E, N, K] of E packed [N, K], amax [E, 1]."""
    codes = torch.stack([each.codes for each in weights])
    scales = torch.stack([each.scales.view(torch.uint8) for each in weights]).view(torch.float8_e4m3fn)
    amax = torch.stack([each.amax.reshape(1) for each in weights])
    return Nvfp4Tensor(codes, scales, amax, torch.Size((len(weights), *weights[0].shape)), weights[0].e4m3_max)


def spans(ends: torch.Tensor, rows: int) -> list[tuple[int, int]]:
    """First row, and row behind the last, of each expert, on the host.

    Raises:
        InputError: they do not ascend, or there are fewer rows.
    """
    stops = [int(stop) for stop in ends.tolist()]
    found = list(zip([0, *stops[:-1]], stops, strict=True))
    if any(start > stop for start, stop in found) or stops[-1] > rows:
        raise InputError(f"ends is {stops}: it has to ascend, up to {rows} rows at most.")
    return found


def rows_of(x: Any, start: int, stop: int) -> Any:
    """Rows of a matrix, packed or not."""
    if isinstance(x, torch.Tensor):
        return x[start:stop]
    amax = {"amax": x.amax[start:stop]} if isinstance(x, Nvfp4Tensor) and x.amax.ndim else {}
    shape = torch.Size((stop - start, x.shape[1]))
    return replace(x, codes=x.codes[start:stop], scales=x.scales[start:stop], shape=shape, **amax)


def _decoded(
    x: torch.Tensor | Nvfp4Tensor, caches: Sequence[FP4WeightCache], ends: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    if not hasattr(F, "grouped_mm"):
        raise UnavailableError(
            "form='decoded' needs torch.nn.functional.grouped_mm, of torch 2.10. Take form='packed'."
        )
    rows = x if isinstance(x, torch.Tensor) else x.dequantize(dtype)
    weights = torch.stack([cache.weight.dequantize(dtype) for cache in caches])  # [E, N, K]
    offsets = ends.to(torch.int32)
    out: torch.Tensor = F.grouped_mm(rows, weights.mT, offs=offsets)
    numbers = torch.arange(len(rows), device=rows.device)
    expert = torch.searchsorted(offsets, numbers, right=True)
    if caches[0].bias is not None:
        biases = torch.stack([cast(torch.Tensor, cache.bias) for cache in caches])
        out = (out.float() + biases[expert.clamp(max=len(caches) - 1)]).to(dtype)
    return out.masked_fill((expert == len(caches))[:, None], 0)


def _check(x: torch.Tensor, caches: Sequence[FP4WeightCache], ends: torch.Tensor, form: str) -> None:
    if form not in FORMS:
        raise InputError(f"Unknown form {form!r}. Valid: {', '.join(FORMS)}.")
    shapes = {
        tuple(cache.weight.shape) if isinstance(cache, FP4WeightCache) else type(cache).__name__ for cache in caches
    }
    shape = next(iter(shapes), None)
    if len(shapes) != 1 or not isinstance(shape, tuple) or len(shape) != 2:
        listed = ", ".join(map(str, shapes)) or "none"
        raise InputError(f"The caches are of weights {listed}; give one fp4_quantize(weight [N, K]) an expert, alike.")
    if len({cache.bias is None for cache in caches}) > 1:
        raise InputError("Some experts have a bias and others none. Give zeros to those without.")
    if not isinstance(x, torch.Tensor) or x.ndim != 2 or x.shape[1] != shape[1]:
        given = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise InputError(f"x is {given}; rows [M, {shape[1]}] sorted by expert fit weights {shape}.")
    whole = isinstance(ends, torch.Tensor) and ends.dtype in (torch.int32, torch.int64)
    if not whole or ends.shape != (len(caches),) or ends.device != x.device:
        tensor = isinstance(ends, torch.Tensor)
        kind = f"{ends.dtype} {tuple(ends.shape)} on {ends.device}" if tensor else type(ends).__name__
        raise InputError(f"ends is {kind}; int64 ({len(caches)},) on {x.device} fits, the end of each expert's rows.")
