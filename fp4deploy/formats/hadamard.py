"""The random Hadamard transform, 16 wide: spreads an outlier over its group before the group is quantised.

    y = x diag(s) H16 / 4        H16 Sylvester's matrix, s the fixed signs of `SIGNS`

The matrix is orthogonal: applied to both operands of a GEMM along their contraction axis it cancels, because
(A R)(B R)^T = A B^T. fp32, the butterflies of stride 1, 2, 4, 8 in that order, the division by 4 (exact) last.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025 (the transform on the wgrad GEMM).
"""

from __future__ import annotations

import torch

from fp4deploy.errors import InputError
from fp4deploy.formats.blocks import pad_to_blocks

WIDTH = 16
SIGN_MASK = 0xD7E8
SIGNS = tuple(-1.0 if SIGN_MASK >> i & 1 else 1.0 for i in range(WIDTH))


def random_hadamard(x: torch.Tensor, axis: int = -1, inverse: bool = False) -> torch.Tensor:
    """Transform each group of 16 along `axis`.

    Args:
        x: any float dtype, shape [..., K, ...]; K is padded with zeros to a multiple of 16.
        inverse: undo the transform instead.

    Returns:
        float32, the shape of `x` with K rounded up to a multiple of 16.

    Raises:
        InputError: `x` is not floating point or has no axes.
    """
    if not x.is_floating_point() or x.ndim == 0:
        raise InputError(f"The Hadamard transform takes floating-point tensors with an axis, not {x.dtype} {x.shape}.")
    moved = pad_to_blocks(x.to(torch.float32), (axis % x.ndim,)).movedim(axis, -1)
    groups = moved.unflatten(-1, (moved.shape[-1] // WIDTH, WIDTH))
    signs = torch.tensor(SIGNS, device=x.device)
    y = groups if inverse else groups * signs
    stride = 1
    while stride < WIDTH:
        pairs = y.unflatten(-1, (WIDTH // (2 * stride), 2, stride))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        stride *= 2
    y = y * 0.25
    return (y * signs if inverse else y).flatten(-2).movedim(-1, axis)
