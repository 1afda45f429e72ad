"""The GEMMs of a training step in Triton's interpreter (`tests.plugins.interpreter`), each case against float64.

Outputs lie between guards and are poisoned (`interpreted_gemms.Guarded`). References are torch's convolutions and their
autograd, of dequantised operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fp4deploy.formats import (
    EightBitTensor,
    Mxfp4Tensor,
    Nvfp4Tensor,
    quantize_fp8,
    quantize_mxfp4,
    quantize_nvfp4,
)
from fp4deploy.plugins.gemm import arguments, training
from fp4deploy.plugins.gemm import dispatch as inference
from fp4deploy.plugins.gemm.arguments import gemm_call, just_in_time
from fp4deploy.plugins.gemm.training import Window, gather_call, rows_call, split_count, whole_blocks
from fp4deploy.plugins.gemm.triton.tiles import Tile
from fp4deploy.qat import RECIPES, grouped_linear, prepare, set_products
from fp4deploy.qat.fp4_gemms import dispatch
from tests.plugins.gemm.interpreted_gemms import SM90, Guarded
from tests.qat.layer_cases import make
from tests.qat.reference_gemms import one_step

TINY, DEEP = Tile(32, 32, 32, 4, 1), Tile(32, 32, 64, 4, 1)
# name: (N, H, W), channels in and out, window
CONVOLUTIONS: dict[str, tuple[tuple[int, int, int], tuple[int, int], Window]] = {
    "3x3": ((2, 3, 4), (20, 33), Window((3, 3), (1, 1), (1, 1), (1, 1))),
    "stride 2": ((1, 7, 6), (40, 17), Window((3, 3), (2, 2), (1, 1), (1, 1))),
    "uneven": ((1, 9, 7), (16, 8), Window((2, 3), (2, 1), (1, 2), (3, 1))),
    "stride 3, dilation 2": ((1, 8, 9), (33, 5), Window((2, 2), (3, 3), (0, 1), (2, 2))),
    "1x1, one pixel": ((3, 1, 1), (1, 1), Window((1, 1), (1, 1), (0, 0), (1, 1))),
}
# name: images, rows, columns, pixels
ROWS = {
    "rows 1 x 1 x 1": (1, 1, 1, 1),
    "rows 33 x 40 x 35": (2, 33, 40, 35),
    "rows 5 x 70 x 64": (3, 5, 70, 64),
    "rows 40 x 9 x 700": (1, 40, 9, 700),
}
FORMATS = ("nvfp4", "mxfp4")
NV, MX = "nvfp4_train", "tetrajet"
# Every layer with one format; the other differs in the decoding of a tile, which every case above has with both.
STEPS = {
    "linear ragged, 3-D": (NV, MX),
    "conv": (NV,),
    "conv stride 2, dilation 2": (MX,),
    "transposed": (MX,),
    "transposed output padding": (NV,),
}
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


def names() -> list[str]:
    gathers = [
        f"{kind}, {name}, {form}, {dtype}"
        for kind in ("forward", "inverse")
        for name in CONVOLUTIONS
        for form, dtype in zip(FORMATS, DTYPES, strict=True)
    ]
    steps = [f"step, {name}, {recipe}, fp32" for name, recipes in STEPS.items() for recipe in recipes]
    steps += [f"experts, {recipe}, fp16" for recipe in (NV, MX)]
    gathers += ["forward, stride 3, dilation 2, fp8, fp32", "inverse, stride 2, fp8, fp16"]
    return [*steps, *gathers, "forward, 3x3, mxfp4, fp16", *(f"{name}, {form}" for name in ROWS for form in FORMATS)]


def packed(form: str, *shape: int, axis: int | None = None) -> Nvfp4Tensor | Mxfp4Tensor | EightBitTensor:
    """axis: of FP8 with one scale for each of its slices."""
    x = torch.randn(*shape) * 10.0 ** torch.linspace(-3, 0, shape[0]).view(-1, *[1] * (len(shape) - 1))
    if form == "fp8":
        return quantize_fp8(x, axis)
    return quantize_nvfp4(x) if form == "nvfp4" else quantize_mxfp4(x)


def gather(kind: str, name: str, form: str, dtype: str) -> dict[str, Any]:
    torch.manual_seed(0)
    (batch, height, width), (channels, outputs), window = CONVOLUTIONS[name]
    filters = packed(form, outputs, *window.kernel, channels, axis=0)
    weight = filters.dequantize(torch.float64).permute(0, 3, 1, 2)
    steps = (window.stride, window.padding, window.dilation)
    bias = torch.randn(outputs) if kind == "forward" else None
    if kind == "forward":
        source = packed(form, batch, height, width, channels)
        x = source.dequantize(torch.float64).permute(0, 3, 1, 2)
        assert bias is not None
        expected = F.conv2d(x, weight, bias.double(), *steps)
    else:  # the filter's rows are what the input gradient has as channels
        image = torch.zeros(batch, outputs, height, width, dtype=torch.float64, requires_grad=True)
        y = F.conv2d(image, weight.transpose(0, 1), None, *steps)
        source = packed(form, batch, *y.shape[2:], channels)
        (expected,) = torch.autograd.grad(y, image, source.dequantize(torch.float64).permute(0, 3, 1, 2))
    expected = expected.permute(0, 2, 3, 1)
    out = Guarded(tuple(expected.shape), DTYPES[dtype])
    source, filters = (whole_blocks(each) if isinstance(each, EightBitTensor) else each for each in (source, filters))
    just_in_time(gather_call(source, filters, window, out.inner, bias, kind == "inverse", SM90, TINY, asm=False))
    return found(out, expected)


def rows(name: str, form: str) -> dict[str, Any]:
    torch.manual_seed(0)
    batch, m, n, pixels = ROWS[name]
    a, b = packed(form, batch, m, pixels), packed(form, batch, n, pixels)
    expected = torch.einsum("bmp,bnp->mn", a.dequantize(torch.float64), b.dequantize(torch.float64))
    splits = max(split_count(a, b, DEEP), 2 if pixels > 600 else 1)
    out = Guarded((splits, m, n), torch.float32)
    just_in_time(rows_call(a, b, out.inner, SM90, DEEP, asm=False))
    return found(out, expected, splits)


def step(name: str, recipe: str) -> dict[str, Any]:
    """A layer's forward and backward through `qat.fp4_gemms.dispatch`, by kernels and by the reference."""
    results = []
    calls: list[int] = []
    for kernels in (False, True):
        dispatch.runs_kernels = lambda _, on=kernels: on
        training.run = lambda call, _: (calls.append(1), just_in_time(call))  # type: ignore[assignment]
        layer, x = make(name)
        torch.manual_seed(6)
        model = set_products(prepare(torch.nn.Sequential(layer), recipe, include=["0"]), "fp4")
        results.append(one_step(model, x)[0])
    reference, kernel = results
    parts = [(getattr(kernel, part), getattr(reference, part)) for part in ("y", "dx", "dw", "db")]
    errors = [((a.double() - b).norm() / b.double().norm()).item() for a, b in parts if a is not None]
    return {"error": max(errors), "intact": len(calls) == 3}


def experts(recipe: str) -> dict[str, Any]:
    """A grouped linear layer by kernels (MXFP4: an expert after the other) and by the reference."""
    results = []
    calls: list[int] = []
    run = lambda call, _: (calls.append(1), just_in_time(call))  # noqa: E731
    training.run = arguments.run = run  # type: ignore[assignment]
    for kernels in (False, True):
        for module in (dispatch, inference, arguments):
            module.runs_kernels = lambda _, on=kernels: on  # type: ignore[attr-defined]
        torch.manual_seed(6)
        x = torch.randn(70, 40).half().requires_grad_()
        weight, bias = torch.randn(3, 33, 40).requires_grad_(), torch.randn(3, 33).requires_grad_()
        y = grouped_linear(x, weight, torch.tensor([40, 40, 66]), bias, RECIPES[recipe])
        y.backward(torch.randn(y.shape).half())
        results.append([each.double() for each in (y, x.grad, weight.grad, bias.grad)])
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(*reversed(results), strict=True)]
    return {"error": max(errors), "intact": len(calls) == (3 if recipe == NV else 5)}


def small(call: Callable[..., Any], tile: Tile) -> Callable[..., Any]:
    """A description of a launch for the interpreter."""
    return partial(call, tile=tile, asm=False)


def found(out: Guarded, expected: torch.Tensor, splits: int = 0) -> dict[str, Any]:
    values = out.inner.double().sum(0) if splits else out.inner.double()
    error = float((values - expected).norm() / expected.norm())
    return {"error": error if values.isfinite().all() else math.inf, "intact": out.intact()}


def results() -> dict[str, dict[str, Any]]:
    """What was found in every case."""
    training.gather_call, training.rows_call = small(gather_call, TINY), small(rows_call, DEEP)
    arguments.gemm_call = small(gemm_call, TINY)
    training.capability_of = arguments.capability_of = lambda _: SM90  # type: ignore[assignment]
    results = {}
    for case in names():
        kind, *rest = case.split(", ")
        if kind == "experts":
            results[case] = experts(rest[0])
        elif kind == "step":
            results[case] = step(", ".join(rest[:-2]), rest[-2])
        elif kind in ROWS:
            results[case] = rows(kind, *rest)
        else:
            results[case] = gather(kind, ", ".join(rest[:-2]), rest[-2], rest[-1])
    return results
