"""MS-EDEN: NVFP4 whose mean is unbiased, with the randomness in the scales instead of the elements.

    y  = x diag(s) H / sqrt(G)                groups of G rotated; H Sylvester's matrix, s = +-1 drawn anew each time
    d8 = E4M3(a / (A / (256 r)) / r)          block scale of a block of 16 with the amax a; r = 1.0625 * 0.93
    q  = E2M1(y * (1 / (d8 A r / (6 * 256)))) to nearest; values beyond 6 saturate, because r makes the scale smaller
    c  = sum y^2 / sum y q'                   of each group of G, q' what q stands for; sums in the order of elements,
                                              of a block and then of the blocks
    d8 <- SR(c d8)                            to one of the two neighbouring E4M3 values, with mean c d8

Rounding to nearest shrinks a vector; c scales the group back so that its projection on y is y itself, and with a random
rotation that makes the mean of the whole unbiased (EDEN). A factor in FP32 for each group would be no NVFP4, so that it
is folded into the block scales, whose stochastic rounding keeps the mean. With A of the rotated tensor and E = 256,
below E4M3's 448, c d8 stays representable. The squared error is half of that of stochastic rounding.

G is 128, or where the axis has fewer elements the next power of two, at least 16 (`group_of`): channels of convolutions
and rows of small maps are fewer, and every element that pads them is multiplied.

Both operands of a GEMM are rotated with the same signs, so that the rotation cancels. The signs are bits of Philox.

Sources: Panferov, Schultheis, Tabesh, Alistarh, "Quartet II: Accurate LLM Pre-Training in NVFP4 by Improved Unbiased
Gradient Estimation", arXiv 2601.22813, 2026; Vargaftik et al., "EDEN: Communication-Efficient and Robust Distributed
Mean Estimation", 2022. The order of operations is this project's own.
"""

from __future__ import annotations

from functools import reduce

import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import philox
from fp4deploy.formats.blocks import pad_to_blocks, require_quantizable
from fp4deploy.formats.constants import E4M3_MAX_FOUR_OVER_SIX, NVFP4_BLOCK
from fp4deploy.formats.e2m1 import encode_e2m1, pack_codes, round_e2m1
from fp4deploy.formats.nvfp4 import Nvfp4Tensor
from fp4deploy.formats.scales import FLT_MAX, block_step, constant, finite_amax

ROTATION = 128  # elements that are rotated together at most, and have one correction
SHRINK = 1.0625 * 0.93  # r: 17/16 lets the largest scale be rounded up, 0.93 is the clipping with the smallest error
SIGN_STREAM = 1  # offset of the signs in the random stream of their seed


def group_of(size: int) -> int:
    """G of an axis: elements that are rotated together.

    >>> [group_of(size) for size in (1, 16, 48, 64, 65, 4096)]
    [16, 16, 64, 64, 128, 128]
    """
    return min(ROTATION, max(NVFP4_BLOCK, 1 << (max(size, 1) - 1).bit_length()))


def rotate(x: torch.Tensor, rotation: int | torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate groups along the last axis by the signs of the seed `rotation`.

    Args:
        x: any float dtype, [..., K]; K is padded with zeros to a multiple of `group_of` it.

    Returns:
        float32 [..., K padded].
    """
    size = group_of(x.shape[-1])
    groups = pad_to_blocks(x.to(torch.float32), (x.ndim - 1,), size).unflatten(-1, (-1, size))
    random = philox.random_bytes(torch.Size((size,)), 0, rotation, SIGN_STREAM, device=x.device)
    signs = 1.0 - 2.0 * (random & 1).float()
    y = groups if inverse else groups * signs
    stride = 1
    while stride < size:
        pairs = y.unflatten(-1, (size // (2 * stride), 2, stride))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        stride *= 2
    y = y * size**-0.5
    return (y * signs if inverse else y).flatten(-2)


def quantize_ms_eden(
    x: torch.Tensor,
    rotation: int | torch.Tensor,
    seed: int | torch.Tensor,
    axis: int = -1,
    amax: torch.Tensor | None = None,
) -> Nvfp4Tensor:
    """Rotate and quantise along `axis`, which becomes the last.

    Args:
        x: any float dtype, [..., K, ...].
        rotation: seed of the signs, the same for both operands of a GEMM.
        seed: of the stochastic rounding of the scales.
        amax: float32 [], of the rotated tensor that `x` is a part of; None takes that of `x`, rotated.

    Returns:
        Packed, of shape [..., K padded to `group_of` it]; dequantised it is the rotated tensor, and
        `rotate(..., inverse=True)` of that is unbiased over both seeds.

    Raises:
        InputError: `x` is not floating point or has no axes.

    >>> x = torch.randn(4, 128)
    >>> q = quantize_ms_eden(x, rotation=1, seed=2)
    >>> q.codes.shape, q.scales.shape, q.e4m3_max
    (torch.Size([4, 64]), torch.Size([4, 8]), 256)
    """
    require_quantizable(x, "MS-EDEN")
    if x.ndim == 0:
        raise InputError("MS-EDEN quantises floating-point tensors with an axis, not a single number.")
    y = rotate(x.detach().movedim(axis, -1), rotation)
    blocks = y.unflatten(-1, (-1, NVFP4_BLOCK))
    amax = (
        finite_amax(y) if amax is None else amax
    ) * SHRINK  # the A of a tensor whose largest block has the scale 256
    block_amax = blocks.abs().amax(-1)
    scale = torch.where(amax > 0, (constant(float(E4M3_MAX_FOUR_OVER_SIX), amax) / amax).clamp(max=FLT_MAX), 0.0)
    d8 = _nearest(block_amax * SHRINK * scale)
    step = block_step(d8, amax, E4M3_MAX_FOUR_OVER_SIX).unsqueeze(-1)
    scaled = torch.where(step > 0, blocks * (1 / step).clamp(max=FLT_MAX), 0.0)
    q = round_e2m1(scaled)
    group = (-1, group_of(x.shape[axis]) // NVFP4_BLOCK)
    squares, projection = (
        _in_order(_in_order(each).unflatten(-1, group)).unsqueeze(-1) for each in (blocks * blocks, blocks * q * step)
    )
    correction = torch.where(projection > 0, squares / projection, 1.0)
    corrected = (d8.unflatten(-1, group) * correction).flatten(-2)
    rounded = _stochastic(corrected, philox.random_bytes(y.shape, -1, seed, device=x.device)[..., ::NVFP4_BLOCK])
    broken = block_amax.isfinite().logical_not()
    codes = encode_e2m1(scaled).masked_fill_(broken.unsqueeze(-1) | scaled.isnan(), 0)
    scales = torch.where(broken, float("nan"), rounded).to(torch.float8_e4m3fn)
    return Nvfp4Tensor(pack_codes(codes.flatten(-2)), scales, amax, y.shape, E4M3_MAX_FOUR_OVER_SIX)


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last axis, one element after the other."""
    return reduce(torch.add, x.unbind(-1), x.new_zeros(()))


def _nearest(d: torch.Tensor) -> torch.Tensor:
    return d.clamp(max=448.0).to(torch.float8_e4m3fn).to(torch.float32)


def _stochastic(d: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """One of the two E4M3 neighbours of float32 `d` in [0, 448], with the mean `d` to 1/256 of their distance."""
    nearest = _nearest(d)
    byte = nearest.to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int16)
    low = (byte - (nearest > d).to(torch.int16)).clamp_(min=0)
    high = (low + 1).clamp_(max=0x7E)
    below, above = (each.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32) for each in (low, high))
    distance = torch.where(above > below, (d - below) / (above - below), 0.0)
    up = random.to(torch.float32) * (1 / 256) < distance
    return torch.where(up, above, below)
