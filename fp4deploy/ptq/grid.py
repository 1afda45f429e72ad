"""Block scales chosen freely, in weights that every later step quantises to exactly these codes.

A checkpoint keeps weights, not codes; training, export and packing quantise them by the recipe. A method that chooses
scales and codes itself therefore writes weights that *are* values of the format, fixed points of its quantiser.
The recipe is 4/6 (`formats.four_over_six`): of the block scales that map the block's amax to 6 and to 4 it takes the
one with the smaller error. So a block is a fixed point, with error 0, where its largest code is 6 or 4, and the
tensor's amax A where the block that holds it keeps 6 * 256 or 4 * 384:

    step = d8 A / (6 * 256)     codes = E2M1(w / step)     max |code| in {6, 4}     max |code| d8 <= 6 * 256

That leaves scales from a little below a / 6 (the largest elements are clipped) to about a / 3.5, a dozen of E4M3's.

Source of trying every block scale for the smallest squared or weighted error: Lin and Wan, "ScaleSweep: Accurate NVFP4
Post-Training Quantization of LLMs via Block Scale Initialization", 2026; the condition of a fixed point is this
project's, and the weights here are the diagonal blocks of the layer's Hessian (`matrix`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4deploy.formats import E2M1_MAX, E2M1_VALUES
from fp4deploy.formats.constants import E4M3_MAX_FOUR_OVER_SIX, nvfp4_range
from fp4deploy.formats.e2m1 import round_e2m1
from fp4deploy.ptq.matrix import blocks

RANGE = nvfp4_range(E4M3_MAX_FOUR_OVER_SIX)  # 6 * 256
BELOW, ABOVE = 3, 7  # E4M3 values tried below and above a / 6
AT_ONCE = 2**18  # weights times scales; small matrices, as in GPTQ, try all scales in a few launches


def e4m3_values(device: torch.device) -> Tensor:
    """All finite non-negative E4M3 values, ascending [127]."""
    codes = torch.arange(127, dtype=torch.uint8, device=device)
    return codes.view(torch.float8_e4m3fn).float()


def signed_values(device: torch.device) -> tuple[Tensor, Tensor]:
    """The 15 values of E2M1, ascending, and the 14 borders half way between them."""
    values = torch.tensor(sorted({sign * value for value in E2M1_VALUES for sign in (-1, 1)}), device=device)
    return values, (values[1:] + values[:-1]) / 2


def encode(values: Tensor, step: Tensor) -> Tensor:
    """Nearest E2M1 values of `values / step`; 0 where the step is 0."""
    ratio = torch.where(step > 0, values / step.clamp(min=1e-38), 0.0)
    return round_e2m1(ratio.clamp(-E2M1_MAX, E2M1_MAX))


def steps(scales: Tensor, amax: Tensor) -> Tensor:
    """What one unit of E2M1 stands for: d8 A / 1536."""
    return scales * (amax / RANGE)


def choose_scales(rows: Tensor, amax: Tensor, hessian: Tensor | None = None) -> Tensor:
    """The block scales d8 [R, B] with the smallest error among those that make a fixed point.

    Args:
        rows: matrix [R, K].
        amax: that of the whole tensor, [].
        hessian: [B, 16, 16], the diagonal blocks of H: the error of a block is e H e^T; None for the sum of squares.
    """
    cut = blocks(rows)
    largest = cut.abs().amax(-1)  # [R, B]
    table = e4m3_values(rows.device)
    ideal = largest / E2M1_MAX * (RANGE / amax)
    middle = torch.searchsorted(table, ideal.contiguous()).clamp(max=len(table) - 1)
    best = torch.full_like(largest, float("inf"))
    chosen = torch.zeros_like(largest)
    offsets = torch.arange(-BELOW, ABOVE + 1, device=rows.device).view(-1, 1, 1)
    for part in offsets.split(max(1, AT_ONCE // rows.numel())):
        scales = table[(middle + part).clamp(0, len(table) - 1)]  # [offsets, R, B]
        step = steps(scales, amax).unsqueeze(-1)
        codes = encode(cut, step)
        errors = block_error(cut - codes * step, hessian)
        errors = torch.where(is_fixed_point(codes, scales, largest, amax), errors, float("inf"))
        for error, scale in zip(errors, scales, strict=True):
            better = error < best
            best, chosen = torch.where(better, error, best), torch.where(better, scale, chosen)
    return chosen


def is_fixed_point(codes: Tensor, scale: Tensor, largest: Tensor, amax: Tensor) -> Tensor:
    """bool [..., R, B]: the recipe quantises the block to these codes and this scale again."""
    top = codes.abs().amax(-1)
    product = top * scale
    holds = largest >= amax * (1 - 1e-6)  # the amax of the tensor
    return ((top == 6) | (top == 4)) & torch.where(holds, product == RANGE, product <= RANGE) & (scale > 0)


def block_error(difference: Tensor, hessian: Tensor | None) -> Tensor:
    """Error [..., R, B] of differences [..., R, B, 16]."""
    if hessian is None:
        return difference.square().sum(-1)
    weighted = torch.matmul(difference.transpose(-3, -2), hessian).transpose(-3, -2)
    return (weighted * difference).sum(-1)


def diagonal_blocks(hessian: Tensor) -> Tensor:
    """[K, K] -> [B, 16, 16]."""
    count = hessian.shape[0] // 16
    cut = hessian.view(count, 16, count, 16)
    place = torch.arange(count, device=hessian.device)
    return cut[place, :, place]


def hold_amax(found: Tensor, rows: Tensor, amax: Tensor) -> Tensor:
    """`found` with the block of the tensor's largest weight rounded to nearest, so that the amax stays what it was."""
    place = int(rows.abs().argmax())
    row, block = place // rows.shape[1], place % rows.shape[1] // 16
    part = slice(16 * block, 16 * block + 16)
    if float(found[row, part].abs().max()) < float(amax) * (1 - 1e-6):
        kept = rows[row : row + 1, part]
        found[row, part] = (encode(kept, amax / E2M1_MAX) * (amax / E2M1_MAX))[0]
    return found
