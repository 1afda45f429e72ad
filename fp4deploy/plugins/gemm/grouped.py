"""Grouped GEMM of a mixture of experts: rows sorted by expert, one packed weight an expert, ragged numbers of rows.

    order = expert_of_token.argsort(stable=True)
    ends = expert_of_token.bincount(minlength=E).cumsum(0)          [E], the end of each expert's rows
    y = fp4_grouped_linear(x[order], caches, ends)                  y[ends[e - 1] : ends[e]] = x W_e^T + bias_e

| form | what runs | memory | host |
|---|---|---|---|
| "packed" | `fp4_cached_linear`, expert by expert: the definition | weights stay packed | reads `ends` |
| "decoded" | weights decoded, then one `torch.nn.functional.grouped_mm` | E N K elements more | reads nothing |

Both multiply the same numbers and differ in the order of sums alone: the decoded values of operands packed to NVFP4 are
rounded to the type that is multiplied in, which "packed" on a CPU does not do (its reference sums in FP32). Activations
are packed once, with one amax for all rows. No kernel walks all groups of packed operands: which form is faster on a
GPU, and from how many rows on, has not been measured. Nothing here has a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, cast

import torch
import torch.nn.functional as F

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.gemm.operands import InputAmax, output_dtype, pack, refuse_gradients
from fp4deploy.plugins.gemm.weight_cache import FP4WeightCache

FORMS = ("packed", "decoded")


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
    device = caches[0].device
    out = torch.zeros((x.shape[0], caches[0].weight.shape[0]), dtype=dtype, device=device)
    stops = [int(stop) for stop in ends.tolist()]
    starts = [0, *stops[:-1]]
    if any(start > stop for start, stop in zip(starts, stops, strict=True)) or stops[-1] > x.shape[0]:
        raise InputError(f"ends is {stops}: it has to ascend, up to {x.shape[0]} rows at most.")
    for cache, start, stop in zip(caches, starts, stops, strict=True):
        if start < stop:
            out[start:stop] = cast(torch.Tensor, cache.forward(_rows(x, start, stop), dtype=dtype))
    return out


def _rows(x: torch.Tensor | Nvfp4Tensor, start: int, stop: int) -> torch.Tensor | Nvfp4Tensor:
    if isinstance(x, torch.Tensor):
        return x[start:stop]
    shape = torch.Size((stop - start, x.shape[1]))
    return replace(x, codes=x.codes[start:stop], scales=x.scales[start:stop], shape=shape)


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
