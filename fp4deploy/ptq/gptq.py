"""GPTQ for NVFP4: every column is rounded, and the columns after it make up for its error.

With H = X^T X / n of the layer's inputs and U the upper Cholesky factor of H^-1, column by column

    q_j = nearest code of w_j        e = (w_j - q_j) / U_jj        w_k <- w_k - e U_jk      for all k > j

which minimises the error of the layer's output, given what is rounded already. The columns of a convolution are its
taps' channels (`matrix`), so the columns of a block of 16 stand together; its scale is chosen when its first column is
reached, from the weights as they have become (`grid.choose_scales` with the block's own part of H).

A block whose codes all end below 4 would be no fixed point of quantisation (`grid`); such a block, which is rare, is
rounded to nearest as it was when it was reached.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2023; the
choice of block scales inside it is this project's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.ptq.grid import choose_scales, diagonal_blocks, encode, is_fixed_point, signed_values, steps

DAMPING = 0.01  # of the mean of H's diagonal
GROUP = 256  # columns whose updates of the rest are applied together


@torch.no_grad()
def gptq(rows: Tensor, amax: Tensor, hessian: Tensor, damping: float = DAMPING) -> Tensor:
    """Quantised matrix [R, K], values of the grid.

    Args:
        rows: matrix [R, K], float32.
        amax: that of the whole tensor, [].
        hessian: [K, K].
    """
    left = rows.clone()
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    diagonal[dead] = 1.0
    left[:, dead] = 0.0
    local = diagonal_blocks(hessian).clone()
    diagonal += damping * diagonal[~dead].mean() if (~dead).any() else 0.0
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    found = torch.zeros_like(left)
    for start in range(0, left.shape[1], GROUP):
        end = min(start + GROUP, left.shape[1])
        errors = torch.zeros(len(left), end - start, device=left.device)
        for first in range(start, end, NVFP4_BLOCK):
            _round_block(left, found, errors, upper, amax, local, start, first, end)
        left[:, end:] -= errors @ upper[start:end, end:]
    return found


def _round_block(
    left: Tensor,
    found: Tensor,
    errors: Tensor,
    upper: Tensor,
    amax: Tensor,
    local: Tensor,
    start: int,
    first: int,
    end: int,
) -> None:
    """Round the 16 columns from `first`; update those up to `end`, the rest is left to the caller."""
    place, last = first // NVFP4_BLOCK, first + NVFP4_BLOCK
    before = left[:, first:last].clamp(-amax, amax)  # compensation must not move the tensor's amax
    scale = choose_scales(before, amax, local[place : place + 1])
    step = steps(scale, amax)
    inner = left[:, first:last].clone()
    codes = torch.zeros_like(inner)
    deltas = torch.zeros_like(inner)
    values, borders = signed_values(left.device)
    per_step = torch.where(step > 0, 1 / step.clamp(min=1e-38), 0.0)[:, 0]
    factor = upper[first:last, first:last]
    inverse = 1 / factor.diagonal()
    for column in range(NVFP4_BLOCK):
        left_over = inner[:, column]
        codes[:, column] = values[torch.bucketize(left_over * per_step, borders)]
        deltas[:, column] = (left_over - codes[:, column] * step[:, 0]) * inverse[column]
        inner[:, column + 1 :] -= deltas[:, column : column + 1] * factor[column, column + 1 :]
    largest = before.abs().amax(-1, keepdim=True)
    kept = is_fixed_point(codes.unsqueeze(1), scale, largest, amax)
    codes = torch.where(kept, codes, encode(before, step))
    nearest = ~kept.squeeze(-1)
    if nearest.any():
        deltas[nearest] = _errors_of(left[nearest, first:last], (codes * step)[nearest], upper[first:last, first:last])
    found[:, first:last] = codes * step
    errors[:, first - start : last - start] = deltas
    left[:, last:end] -= deltas @ upper[first:last, last:end]


def _errors_of(weights: Tensor, quantized: Tensor, upper: Tensor) -> Tensor:
    """The scaled errors e of columns whose codes are given: w_j is what the columns before it made of it."""
    inner, deltas = weights.clone(), torch.zeros_like(weights)
    for column in range(weights.shape[1]):
        deltas[:, column] = (inner[:, column] - quantized[:, column]) / upper[column, column]
        inner[:, column + 1 :] -= deltas[:, column : column + 1] * upper[column, column + 1 :]
    return deltas
