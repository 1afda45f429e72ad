"""Running sums of a tensor and of its quantisation, on the tensor's device and without synchronising with the host.

A snapshot of a training step covers some seventy tensors, and each `.item()` would make the host wait for the GPU. So a
`Row` holds sums, float64 on the device; `collect` joins the rows of a step and fetches them in one copy, and
`Row.finish` turns the sums into statistics. On a GPU a snapshot costs what launching its kernels costs, so there are
few of them and the host does the rest.

    mean, std        over the finite elements; std divides by n
    kurtosis         Pearson's: mean((x - mean)^4) / std^4; a normal distribution has 3, a uniform one 1.8; NaN where
                     every element is the same
    saturation       share of elements beyond the largest value of their block, |x * e| > 6: they are clipped. With a
                     dynamic global scale that happens where a block's scale was rounded down, by 6 % at most
    underflow        share of nonzero blocks whose scale is below E4M3's normal range, 2^-6: subnormal, with fewer
                     bits, or zero (MXFP4: the scale is E8M0's smallest, 2^-127)
    lost             share of nonzero blocks that decode to zeros, because their scale is 0
    zero             share of blocks of zeros, which lose nothing (after a ReLU there are many)
    sqnr_db          10 log10(sum x^2 / sum (x - x')^2); infinite where x' = x
    correlation      Pearson's, between x and x'
    flips            share of the elements whose code differs from that of the last snapshot
    entropy_bits     of the 16 codes, 4 at most; coded_*: moments of the E2M1 values, before scales multiply them

Moments are taken in two passes in float64: exact enough for float32 data of any scale, whatever their mean. Blocks are
cut as `quantizers` cuts them; a 16 x 16 tile counts as its sixteen rows. What compares x with x' leaves out blocks that
hold a NaN or an Inf, which decode to NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from fp4deploy.formats import (
    E2M1_VALUES,
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    decode_e8m0,
    pad_to_blocks,
    quantize_ms_eden,
    random_hadamard,
    rotate,
    unpack_codes,
)
from fp4deploy.formats.scales import FLT_MAX, block_step, encoding_scale
from fp4deploy.plugins.quantize.dispatch import finite_amax, quantize_mxfp4, quantize_nvfp4
from fp4deploy.qat.operators.quantizers import split_groups
from fp4deploy.qat.recipes import QuantSpec

RAW = ("count", "nan", "inf", "mean", "std", "kurtosis", "min", "max")
DEQUANTIZED = ("dequantized_mean", "dequantized_std", "dequantized_kurtosis", "sqnr_db", "correlation")
SHARES = ("saturation", "underflow", "lost", "zero", "flips")
CODED = ("coded_mean", "coded_std", "coded_kurtosis", "entropy_bits")
CODES = 16
VALUES = (*E2M1_VALUES, *(-value for value in E2M1_VALUES))  # what the codes 0 .. 15 stand for
SMALLEST_NORMAL_E4M3 = 2.0**-6
ROUNDING = 1e-26  # a variance below this share of mean^2 is that of a constant whose mean was rounded
RAW_SUMS, SUMS = 7, 21


@dataclass(frozen=True)
class Coded:
    """A quantised tensor, its contraction axis moved last; [..., K] elements in [..., blocks].

    source: what was quantised (after a Hadamard transform, where the recipe has one); original: before it.
    packed: uint8 [..., ceil(K) / 2], two codes a byte.
    values: float32 [..., K], dequantised.
    beyond: bool [..., blocks, elements of a block], what saturated.
    scales, block_amax: float32 [..., blocks]; the amax is NaN or Inf where the block holds one.
    smallest: a scale below this lost bits.
    """

    source: torch.Tensor
    original: torch.Tensor
    packed: torch.Tensor
    codes: torch.Tensor
    values: torch.Tensor
    beyond: torch.Tensor
    scales: torch.Tensor
    block_amax: torch.Tensor
    smallest: float


@dataclass(frozen=True)
class Row:
    """Sums over one tensor, float64 on its device, and what the host knows without reading the device."""

    sums: torch.Tensor
    size: int
    blocks: int = 0
    is_coded: bool = False
    compared: bool = False

    def finish(self, numbers: Sequence[float]) -> tuple[dict[str, float], list[int]]:
        """(statistic -> value, NaN where it is undefined; elements of each code, [] where nothing is quantised).

        Args:
            numbers: `sums` on the host.
        """
        count, nan, mean, second, fourth, low, high = numbers[:RAW_SUMS]
        moments = (high, 0.0, math.nan) if low == high else _moments(count, mean, second, fourth)
        found = dict(zip(RAW, (count, nan, self.size - count - nan, *moments, low, high), strict=True))
        if not self.is_coded:
            return found, []
        counts = [int(number) for number in numbers[SUMS:]]
        return found | self._compared(numbers[RAW_SUMS:SUMS]) | code_moments(counts), counts

    def _compared(self, numbers: Sequence[float]) -> dict[str, float]:
        """What compares x with x'; the sums over x are of its distance d from `mean`."""
        count, own_mean, own_second, own_fourth, mean, first, second, cross, error, *parts = numbers
        moments = _moments(count, own_mean, own_second, own_fourth)
        sqnr = correlation = math.nan
        if count:
            signal = second + 2 * mean * first + count * mean * mean
            if signal > 0:
                sqnr = 10 * math.log10(signal / error) if error > 0 else math.inf
            variance = second - first * first / count
            if variance > ROUNDING * count * mean * mean and moments[1] > 0:
                correlation = cross / math.sqrt(variance * own_second)
        wholes = (self.size, self.blocks, self.blocks, self.blocks, self.size if self.compared else 0)
        shares = [part / whole if whole else math.nan for part, whole in zip(parts, wholes, strict=True)]
        return dict(zip((*DEQUANTIZED, *SHARES), (*moments, sqnr, correlation, *shares), strict=True))


@torch.no_grad()
def raw_row(x: torch.Tensor) -> Row:
    """Sums of `x`: any floating dtype and layout, may be empty."""
    return Row(_sums(x)[0], x.numel())


@torch.no_grad()
def coded_row(coded: Coded, previous: torch.Tensor | None = None) -> Row:
    """Sums of a tensor and of its quantisation.

    Args:
        previous: `packed` of the last snapshot, for the flips (NaN without it).
    """
    size, blocks = coded.source.numel(), coded.scales.numel()
    if not size:
        raw = _sums(coded.original)[0]
        return Row(torch.cat((raw, raw.new_zeros(SUMS - RAW_SUMS + CODES))), 0, 0, True)
    raw, mean, distance = _sums(coded.original)
    if coded.source is not coded.original:
        _, mean, distance = _sums(coded.source)
    value = coded.values.to(torch.float64)
    own, _, own_distance = _sums(value, extremes=False)
    finite = value.abs() < math.inf
    distance = torch.where(finite, distance, 0.0)
    error = torch.where(finite, value - coded.source, 0.0)
    amax, holds = coded.block_amax, coded.block_amax > 0
    if previous is None:
        flips = own.new_zeros(())
    else:
        differing = previous ^ coded.packed
        flips = _total((differing & 15) != 0) + _total(differing > 15)
    sums = (
        own[0],
        *own[2:5],
        mean,
        distance.sum(),
        distance.square().sum(),
        (distance * own_distance).sum(),
        error.square().sum(),
        _total(coded.beyond),
        _total(holds & (coded.scales < coded.smallest)),
        _total(holds & (coded.scales == 0)),
        _total(amax == 0),
        flips,
    )
    return Row(torch.cat((raw, torch.stack(sums), count_codes(coded.codes))), size, blocks, True, previous is not None)


@torch.no_grad()
def encode(
    x: torch.Tensor,
    spec: QuantSpec,
    axes: tuple[int, ...],
    groups: tuple[int, ...] = (1,),
    amax: torch.Tensor | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Coded:
    """Quantise `x` as `quantizers.quantize_operand` does, and keep codes and scales.

    Args:
        amax: static global amax, float32 []; None takes that of the whole of `x`, whatever is sampled of it.
        limit: sample about so many elements.
        seed: of stochastic rounding and of a rotation, so that nothing is drawn from the generator of the training.
    """
    x, axes, _ = split_groups(x.detach(), spec, axes, groups)
    last = tuple(range(-len(axes), 0))
    original = sample(x, axes, limit).movedim(axes, last).contiguous()
    source = original
    if spec.rounding == "ms_eden":
        x = rotate(x.movedim(axes, last), seed)
        source = rotate(original, seed)
    elif spec.hadamard:
        x = random_hadamard(x, axes[-1])
        source = sample(x, axes, limit).movedim(axes, last).contiguous()
    if spec.format == "mxfp4":
        return _encode_mxfp4(source, original, spec, seed)
    if amax is None and not spec.row_scaled:
        amax = finite_amax(x)
    if spec.rounding == "ms_eden":
        q = quantize_ms_eden(original, seed, seed, amax=amax)
    else:
        q = quantize_nvfp4(source, spec.block, amax, spec.row_scaled, spec.four_over_six, spec.rounding, seed)
    scales = q.scales.to(torch.float32)
    whole = q.amax.unsqueeze(-1) if q.amax.ndim else q.amax
    encoding = (1 / (scales * (1 / encoding_scale(whole, q.e4m3_max)))).clamp(max=FLT_MAX)
    magnitude = _magnitude(source, scales, NVFP4_BLOCK)
    beyond = magnitude * torch.where(scales > 0, encoding, 0.0).unsqueeze(-1) > VALUES[7]
    codes, values = _decode(q.codes, block_step(q.scales, whole, q.e4m3_max), source.shape[-1], NVFP4_BLOCK)
    return Coded(source, original, q.codes, codes, values, beyond, scales, magnitude.amax(-1), SMALLEST_NORMAL_E4M3)


def codes_in_place(
    coded: Coded, x: torch.Tensor, spec: QuantSpec, axes: tuple[int, ...], groups: tuple[int, ...] = (1,)
) -> torch.Tensor:
    """The codes of an `encode` of the whole of `x` where its elements lie: uint8, the shape of `x`."""
    _, moved, split = split_groups(x, spec, axes, groups)
    codes = coded.codes.movedim(tuple(range(-len(moved), 0)), moved)
    for axis in split:
        codes = codes.flatten(axis, axis + 1)
    return codes[tuple(slice(size) for size in x.shape)]


def _encode_mxfp4(source: torch.Tensor, original: torch.Tensor, spec: QuantSpec, seed: int) -> Coded:
    m = quantize_mxfp4(source, spec.scale_rule, spec.rounding, seed)
    scales = decode_e8m0(m.scales)
    magnitude = _magnitude(source, scales, MXFP4_BLOCK)
    beyond = magnitude > VALUES[7] * scales.unsqueeze(-1)
    codes, values = _decode(m.codes, scales, source.shape[-1], MXFP4_BLOCK)
    return Coded(source, original, m.codes, codes, values, beyond, scales, magnitude.amax(-1), 2.0**-126)


def sample(x: torch.Tensor, axes: Sequence[int], limit: int | None) -> torch.Tensor:
    """A regular grid of about `limit` elements of `x`; `axes`, along which blocks lie, stay whole.

    Strides are odd: those of poolings and transposed convolutions are even, and a grid in step with them would see one
    tap only.
    """
    kept = {axis % x.ndim for axis in axes if x.ndim}
    steps = {axis: 1 for axis in range(x.ndim) if axis not in kept}
    rest = math.prod(x.shape[axis] for axis in kept)
    while limit is not None and steps:
        left = {axis: -(-x.shape[axis] // step) for axis, step in steps.items()}
        longest = max(left, key=lambda axis: left[axis])
        if math.prod(left.values()) * rest <= limit or left[longest] <= 1:
            break
        steps[longest] += 2
    return x[tuple(slice(None, None, steps.get(axis, 1)) for axis in range(x.ndim))] if x.ndim else x


def count_codes(codes: torch.Tensor) -> torch.Tensor:
    """How often each code 0 .. 15 occurs in a uint8 tensor: float64 [16] on its device."""
    if codes.device.type == "cpu":
        return torch.bincount(codes.flatten(), minlength=CODES).double()
    return compare_codes(codes)  # bincount would ask the device how many bins it needs


def compare_codes(codes: torch.Tensor) -> torch.Tensor:
    """`count_codes` by sixteen comparisons."""
    every = torch.arange(CODES, dtype=torch.uint8, device=codes.device)
    return (codes.flatten() == every.unsqueeze(-1)).sum(1, dtype=torch.float64)


def code_moments(counts: Sequence[float]) -> dict[str, float]:
    """The statistics `CODED` from the counts of the 16 codes: exact, and free on the device."""
    total = sum(counts)
    if not total:
        return dict.fromkeys(CODED, math.nan)
    shares = [count / total for count in counts]
    mean = sum(share * value for share, value in zip(shares, VALUES, strict=True))
    second, fourth = (
        sum(share * (value - mean) ** power for share, value in zip(shares, VALUES, strict=True)) for power in (2, 4)
    )
    varies = len({value for share, value in zip(shares, VALUES, strict=True) if share}) > 1
    entropy = -sum(share * math.log2(share) for share in shares if share) + 0.0
    moments = (mean, math.sqrt(second), fourth / second**2) if varies else (mean, 0.0, math.nan)
    return dict(zip(CODED, (*moments, entropy), strict=True))


def _sums(x: torch.Tensor, extremes: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """((finite, NaN, mean, sum d^2, sum d^4, min, max), mean, d): float64; d = x - mean, 0 where x is not finite."""
    wide = x.detach().to(torch.float64)
    finite = wide.abs() < math.inf
    count = _total(finite)
    mean = torch.nan_to_num(wide, nan=0.0, posinf=0.0, neginf=0.0).sum() / count
    filled = torch.where(finite, wide, mean)
    distance = filled - mean
    squares = distance.square()
    sums = [count, _total(wide != wide), mean, squares.sum(), squares.square().sum()]
    if not extremes:
        return torch.stack(sums), mean, distance
    low, high = torch.aminmax(filled) if x.numel() else (mean, mean)
    return torch.stack((*sums, low, high)), mean, distance


def _moments(count: float, mean: float, second: float, fourth: float) -> tuple[float, float, float]:
    """(mean, std, kurtosis) from the sums of squared and fourth powers of the distances from the mean."""
    if not count:
        return math.nan, math.nan, math.nan
    if second <= ROUNDING * count * mean * mean:
        return mean, 0.0, math.nan
    return mean, math.sqrt(second / count), fourth / second / second * count


def _total(mask: torch.Tensor) -> torch.Tensor:
    return mask.sum(dtype=torch.float64)


def _magnitude(x: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    """|x| as float32 [..., blocks, size]; `scales` has one a block."""
    return pad_to_blocks(x.to(torch.float32), (x.ndim - 1,), size).abs().unflatten(-1, (scales.shape[-1], size))


def _decode(packed: torch.Tensor, step: torch.Tensor, size: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, dequantised values), [..., size]; `step` has one a block."""
    codes = unpack_codes(packed)
    values = _table(packed.device)[codes.to(torch.int32)].unflatten(-1, (step.shape[-1], block)) * step.unsqueeze(-1)
    return codes[..., :size], values.flatten(-2)[..., :size]


@lru_cache
def _table(device: torch.device) -> torch.Tensor:
    """The E2M1 values of the codes, float32 [16], made on the device: a copy from the host would wait for it."""
    codes = torch.arange(CODES, device=device)
    magnitude = (codes % 8).to(torch.float32)
    value = torch.where(magnitude < 5, magnitude / 2, torch.where(magnitude < 7, magnitude - 2, 6.0))
    return torch.where(codes < 8, value, -value)
