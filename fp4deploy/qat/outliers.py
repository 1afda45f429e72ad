"""Input channels with large activations in MXFP8: the outlier control of TetraJet-v2.

With I the input channels that were chosen, R the others, Q4 the FP4 quantisers of the recipe and Q8 MXFP8:

    Y    = Q4(X_R) Q4(W_R)^T + Q8(X_I) Q8(W_I)^T
    dX   = Q4(G) Q4(W')                              W' what the forward multiplied, as without outliers
    dW_R = Q4(G^T) Q4(X'_R)                          X' what the forward multiplied
    dW_I = Q8(G^T) Q8(X'_I)

Each part is quantised as a tensor of its own: the channels of R lie side by side in the blocks of the forward, and a
global scale is that of R. Blocks of a backward GEMM run along output channels, tokens or pixels, where no channel meets
another. Q8 rounds to nearest and rotates nothing.

In the emulation both parts lie in one tensor with the shape of the operand, so that one GEMM sums both products.

Source: Chen et al., "TetraJet-v2", arXiv 2510.27527, and the authors' code, thu-ml/TetraJet-v2-NVFP4Training on GitHub,
olmo/quantization_real/linear_mix.py; k as in the paper, the nearest integer to the share of the channels, where that
code rounds up to 128. Convolutions are ours: their input channels, with all taps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fp4deploy.formats.mxfp8 import fake_quantize_mxfp8

Quantize = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class OutlierChannels:
    """Indices of input channels, int64: `chosen` [k] in MXFP8, the `others` [C - k] in FP4."""

    chosen: torch.Tensor
    others: torch.Tensor


def quantize_split(x: torch.Tensor, axis: int, outliers: OutlierChannels, quantize: Quantize) -> torch.Tensor:
    """X' of both parts, shaped like `x`: the chosen channels of `axis` in MXFP8 along it, the others by `quantize`."""
    values = torch.empty_like(x)
    values.index_copy_(axis, outliers.others, quantize(x.index_select(axis, outliers.others)))
    return values.index_copy_(axis, outliers.chosen, fake_quantize_mxfp8(x.index_select(axis, outliers.chosen), axis))


def part_of(wide: torch.Tensor, channels: int, chosen: torch.Tensor) -> torch.Tensor:
    """Those of the channels [N, columns * channels, ...] of `ConvGemms.widen` that are of the chosen ones."""
    return wide.unflatten(1, (-1, channels)).index_select(2, chosen).flatten(1, 2)


def spread(part: torch.Tensor, channels: int, chosen: torch.Tensor) -> torch.Tensor:
    """`part_of`, [N, columns * k, ...], among zeros, [N, columns * channels, ...]."""
    part = part.unflatten(1, (-1, chosen.numel()))
    values = part.new_zeros((*part.shape[:2], channels, *part.shape[3:]))
    return values.index_copy_(2, chosen, part).flatten(1, 2)
