"""A grouped GEMM with both gradients: tokens sorted by expert, one weight [N, K] an expert, all operands in FP4.

    y = grouped_linear(x, weight, ends)             Y_e = X_e W_e^T      contracts K
                                                    dX_e = G_e W_e       contracts N
                                                    dW_e = G_e^T X_e     contracts the expert's tokens

Each operand is packed as its recipe says, for the GEMM that reads it and along the axis which that contracts, as those
of `autograd.packed_gemms`: tokens with one global amax for all experts, weights with one each. What is one launch on a
GPU (`plugins.gemm.grouped`) is elsewhere, and for other formats, a GEMM an expert, on the same codes.

| GEMM | NVFP4, FP16 or BF16 | otherwise |
|---|---|---|
| forward, dgrad | `grouped_matmul`, one launch | `dispatch.fprop` of each expert |
| wgrad | `rows_gemm`, a segment of the tokens an expert; MXFP4 too | `dispatch.wgrad` of each expert |

X is kept as it came for the backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fp4deploy.errors import InputError
from fp4deploy.plugins.gemm.grouped import grouped_matmul, padded, rows_of, runs_grouped, spans, stacked
from fp4deploy.qat.fp4_gemms import dispatch
from fp4deploy.qat.fp4_gemms.autograd import output_dtype
from fp4deploy.qat.fp4_gemms.operands import PackedOperand, pack_operand, required
from fp4deploy.qat.fp4_gemms.requirements import require_packed
from fp4deploy.qat.operators.gemms import LinearGemms
from fp4deploy.qat.operators.quantizers import shared_rotation
from fp4deploy.qat.recipes import QuantSpec, Recipe, find_recipe
from fp4deploy.tracing import not_compiled

LINEAR = LinearGemms()


class _GroupedGemms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ends: torch.Tensor,
        recipe: Recipe,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        rows, matrices = pack_operand(x, required(recipe.activation), (-1,)), _packed(weight, recipe.weight, (0, 1))
        ctx.recipe, ctx.dtypes = recipe, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        if recipe.double_quantization:
            x = rows.dequantize(x.dtype)
            weight = torch.stack([each.dequantize(weight.dtype) for each in matrices])
        ctx.save_for_backward(x, weight, ends)
        with torch.autocast(x.device.type, enabled=False):
            return _product(rows, matrices, bias, ends, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,), (x, weight, ends), recipe = gradients, ctx.saved_tensors, ctx.recipe
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            rotation = shared_rotation(recipe.dgrad_gradient, gradient.device)
            g = pack_operand(gradient, required(recipe.dgrad_gradient), (-1,), rotation=rotation)
            matrices = _packed(weight, recipe.dgrad_weight, (1, 0), rotation)
            dx = _product(g, matrices, None, ends, gradient.dtype, backward=True).to(x_dtype)
        if ctx.needs_input_grad[1]:
            dw = _wgrad(gradient, x, weight.shape, ends, recipe).to(weight_dtype)
        if ctx.needs_input_grad[2]:
            owner = torch.searchsorted(ends.long(), torch.arange(len(x), device=x.device), right=True)
            sums = gradient.new_zeros(len(ends) + 1, gradient.shape[1], dtype=torch.float32)
            db = sums.index_add_(0, owner, gradient.float())[:-1].to(bias_dtype)
        return dx, dw, db, None, None, None


@not_compiled
def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None = None,
    recipe: str | Recipe = "nvfp4_train",
) -> torch.Tensor:
    """x W_e^T + bias_e of each row's expert e, all six operands of its three GEMMs in FP4.

    Args:
        x: [M, K], sorted by expert.
        weight: [E, N, K].
        ends: int32 or int64 [E] on the device of `x`, ascending: expert e has the rows from ends[e - 1] to ends[e];
            rows behind the last end are no expert's: 0 in the output, without a gradient, but part of the amax.
        bias: [E, N].
        recipe: one that trains through packed operands; static global scales are taken from the tensors.

    Returns:
        [M, N], of autocast's dtype or that of `x`.

    Raises:
        InputError: shapes do not fit, or a recipe that leaves an operand in high precision.

    >>> x, weight = torch.ones(3, 32), torch.ones(2, 16, 32, requires_grad=True)
    >>> y = grouped_linear(x, weight, torch.tensor([1, 3]))
    >>> y.sum().backward()
    >>> y[0, 0].item(), weight.grad[:, 0, 0].tolist()
    (32.0, [1.0, 2.0])
    """
    found = find_recipe(recipe) if isinstance(recipe, str) else recipe
    require_packed(found)
    _check(x, weight, ends, bias)
    return _GroupedGemms.apply(x, weight, bias, ends, found, output_dtype(x))


def _product(
    rows: PackedOperand,
    matrices: list[PackedOperand],
    bias: torch.Tensor | None,
    ends: torch.Tensor,
    dtype: torch.dtype,
    backward: bool = False,
) -> torch.Tensor:
    """[M, N] of `dtype`; backward: a dgrad, [M, K]."""
    packed: Any = [each.packed for each in matrices]
    if runs_grouped(rows.packed, packed[0], dtype):
        return grouped_matmul(rows.packed, stacked(packed), ends, bias, dtype)  # type: ignore[arg-type]

    def multiply(part: PackedOperand, matrix: PackedOperand, own: torch.Tensor | None) -> torch.Tensor:
        if backward:
            return dispatch.dgrad(part, matrix, LINEAR, (len(part.packed.codes), packed[0].shape[0]), dtype)
        return dispatch.fprop(part, matrix, own, LINEAR, dtype)

    count = len(rows.packed.codes)
    out = torch.zeros((count, packed[0].shape[0]), dtype=dtype, device=ends.device)
    for number, (start, stop) in enumerate(spans(ends, count)):
        if start < stop:
            part = replace(rows, packed=rows_of(rows.packed, start, stop))
            out[start:stop] = multiply(part, matrices[number], None if bias is None else bias[number])
    return out


def _wgrad(
    gradient: torch.Tensor, x: torch.Tensor, shape: torch.Size, ends: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """dW [E, N, K]; float32 by a kernel."""
    of_gradient, of_input = required(recipe.wgrad_gradient), required(recipe.wgrad_activation)
    rotation = shared_rotation(of_gradient, gradient.device)
    tokens, segments = padded(gradient, ends)
    g = pack_operand(tokens, of_gradient, (0,), rotation=rotation)
    operand = pack_operand(padded(x, ends)[0], of_input, (0,), rotation=rotation)
    found = dispatch.segmented_wgrad(g, operand, segments, gradient.dtype)
    if found is not None:
        return found
    out = torch.zeros(shape, dtype=gradient.dtype, device=gradient.device)
    for number, (start, stop) in enumerate(spans(segments[1:], len(tokens))):
        if start < stop:
            left, right = (replace(each, packed=_columns(each.packed, start, stop)) for each in (g, operand))
            out[number] = dispatch.wgrad(left, right, LINEAR, shape[1:], gradient.dtype)
    return out


def _columns(x: Any, start: int, stop: int) -> Any:
    """The elements from `start` to `stop` of each row, whole blocks."""
    block = 2 * x.codes.shape[-1] // x.scales.shape[-1]
    codes, scales = x.codes[:, start // 2 : stop // 2], x.scales[:, start // block : stop // block]
    return replace(x, codes=codes, scales=scales, shape=torch.Size((x.shape[0], stop - start)))


def _packed(
    weight: torch.Tensor, spec: QuantSpec | None, axes: tuple[int, int], rotation: torch.Tensor | None = None
) -> list[PackedOperand]:
    return [pack_operand(each, required(spec), axes, rotation=rotation) for each in weight.unbind()]


def _check(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None) -> None:
    fits = (x.ndim, weight.ndim, ends.dtype in (torch.int32, torch.int64)) == (2, 3, True)
    fits = fits and x.shape[1] == weight.shape[2] and ends.shape == weight.shape[:1]
    if not fits or (bias is not None and bias.shape != weight.shape[:2]):
        given = {"x": x, "weight": weight, "ends": ends} | ({} if bias is None else {"bias": bias})
        shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in given.items())
        raise InputError(f"{shapes} do not fit: x [M, K], weight [E, N, K], ends int64 [E], bias [E, N].")
