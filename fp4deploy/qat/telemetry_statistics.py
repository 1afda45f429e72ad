"""Statistics of a tensor and of its quantisation, made on the tensor's device and never asking the host.

A training step that is looked at has some seventy tensors, and each `.item()` would make the host wait for the GPU. So
every function here gives rows of float64 on the device; `telemetry` joins them and fetches the whole table in one copy.

    mean, std        over the finite elements; std divides by n
    kurtosis         Pearson's: mean((x - mean)^4) / std^4; a normal distribution has 3, a uniform one 1.8; undefined (NaN)
                     where every element is the same
    saturation       share of elements beyond the largest value of their block, |x * e| > 6: they are clipped. With a
                     dynamic global scale that happens where a block's scale was rounded down, by 6 % at most
    underflow        share of blocks that hold something and whose scale fell out of E4M3's normal range, below 2^-6: it
                     has lost bits, or all of them (MXFP4: the scale is E8M0's smallest, 2^-127)
    lost             share of blocks that hold something and have the scale 0: they decode to zeros
    zero             share of blocks that hold nothing but zeros, which is no loss (after a ReLU there are many)
    sqnr_db          10 log10(sum x^2 / sum (x - x')^2); infinite where x' = x
    correlation      Pearson's, between x and x'
    flips            share of the elements whose code differs from what it was at the last look
    occupancy        elements of each of the 16 codes; `code_moments` makes their entropy in bits (at most 4) and the
                     moments of the coded values of it

Moments are taken in two passes in float64: exact enough for float32 data of any scale, whatever their mean. Blocks are
cut as `quantizers` cuts them; the 2-D statistics count a 16 x 16 tile as its sixteen rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp4deploy.formats import E2M1_VALUES, decode_e8m0, pad_to_blocks, random_hadamard, unpack_codes
from fp4deploy.formats.scales import FLT_MAX, block_step, encoding_scale
from fp4deploy.plugins.quantize import finite_amax, quantize_mxfp4, quantize_nvfp4
from fp4deploy.qat.quantizers import split_groups
from fp4deploy.qat.recipes import QuantSpec

RAW = ("count", "nan", "inf", "mean", "std", "kurtosis", "min", "max")
CODED = (
    "dequantized_mean",
    "dequantized_std",
    "dequantized_kurtosis",
    "saturation",
    "underflow",
    "lost",
    "zero",
    "sqnr_db",
    "correlation",
    "flips",
)
CODES = 16
SMALLEST_NORMAL_E4M3 = 2.0**-6
VALUES = (*E2M1_VALUES, *(-value for value in E2M1_VALUES))  # what the codes 0 .. 15 stand for


@dataclass(frozen=True)
class Coded:
    """A quantised tensor, its contraction axis moved last.

    source: what was quantised (after a Hadamard transform, where the recipe has one), its own dtype, [..., K].
    packed: uint8 [..., ceil(K) / 2], two codes a byte.
    values: float32 [..., K], dequantised.
    saturated: bool [..., K].
    scales: float32 [..., blocks], the decoded block scales; block_amax: likewise, NaN where the block holds one.
    smallest: a scale below this lost bits.
    """

    source: torch.Tensor
    packed: torch.Tensor
    values: torch.Tensor
    saturated: torch.Tensor
    scales: torch.Tensor
    block_amax: torch.Tensor
    smallest: float

    @property
    def codes(self) -> torch.Tensor:
        """uint8 [..., K], 0 to 15."""
        return unpack_codes(self.packed)[..., : self.source.shape[-1]]


def sample(x: torch.Tensor, axes: Sequence[int], limit: int | None) -> torch.Tensor:
    """A regular grid of about `limit` elements of `x`; `axes`, along which blocks lie, stay whole.

    Strides are odd: those of poolings and transposed convolutions are even, and a grid in step with them would see one
    tap only.
    """
    kept = {axis % x.ndim for axis in axes} if x.ndim else set()
    free = {axis: 1 for axis in range(x.ndim) if axis not in kept}
    while limit is not None and free:
        left = {axis: -(-x.shape[axis] // step) for axis, step in free.items()}
        rest = math.prod(x.shape[axis] for axis in kept)
        longest = max(left, key=lambda axis: left[axis])
        if math.prod(left.values()) * rest <= limit or left[longest] <= 1:
            break
        free[longest] += 2
    return x[tuple(slice(None, None, free.get(axis, 1)) for axis in range(x.ndim))] if x.ndim else x


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
        limit: look at a sample of about so many elements.
        seed: of stochastic rounding, so that looking draws nothing from the generator that training draws from.
    """
    x, axes, _ = split_groups(x.detach(), spec, axes, groups)
    if spec.hadamard:
        x = random_hadamard(x, axes[-1])
    if amax is None and spec.format == "nvfp4" and not spec.row_scaled:
        amax = finite_amax(x)
    x = sample(x, axes, limit).movedim(axes, tuple(range(-len(axes), 0))).contiguous()
    if spec.format == "mxfp4":
        return _encode_mxfp4(x, spec, seed)
    q = quantize_nvfp4(x, spec.block, amax, spec.row_scaled, spec.four_over_six, spec.rounding, seed)
    scales = q.scales.to(torch.float32)
    whole = q.amax.unsqueeze(-1) if q.amax.ndim else q.amax
    encoding = (1 / (scales * (1 / encoding_scale(whole, q.e4m3_max)))).clamp(max=FLT_MAX)
    blocks = _blocks(x, scales)
    beyond = blocks.abs() * torch.where(scales > 0, encoding, 0.0).unsqueeze(-1) > VALUES[7]
    step = block_step(q.scales, whole, q.e4m3_max)
    return _coded(x, q.codes, step, beyond, scales, blocks, SMALLEST_NORMAL_E4M3)


def _encode_mxfp4(x: torch.Tensor, spec: QuantSpec, seed: int) -> Coded:
    m = quantize_mxfp4(x, spec.scale_rule, spec.rounding, seed)
    scales = decode_e8m0(m.scales)
    blocks = _blocks(x, scales)
    beyond = blocks.abs() > VALUES[7] * scales.unsqueeze(-1)
    return _coded(x, m.codes, scales, beyond, scales, blocks, 2.0**-126)


def _blocks(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [..., blocks, elements of a block]; `scales` has one a block."""
    count = scales.shape[-1]
    size = 16 if count * 16 >= x.shape[-1] and (count - 1) * 16 < x.shape[-1] else 32
    padded = pad_to_blocks(x.to(torch.float32), (x.ndim - 1,), size)
    return padded.unflatten(-1, (count, size))


def _coded(
    x: torch.Tensor,
    packed: torch.Tensor,
    step: torch.Tensor,
    beyond: torch.Tensor,
    scales: torch.Tensor,
    blocks: torch.Tensor,
    smallest: float,
) -> Coded:
    size = x.shape[-1]
    values = code_values(unpack_codes(packed)).unflatten(-1, blocks.shape[-2:]) * step.unsqueeze(-1)
    block_amax = blocks.abs().amax(-1)
    saturated = (beyond & block_amax.isfinite().unsqueeze(-1)).flatten(-2)[..., :size]
    return Coded(x, packed, values.flatten(-2)[..., :size], saturated, scales, block_amax, smallest)


def code_values(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 values, float32, of codes 0 .. 15: `formats.decode_e2m1` without the table, which lies on the host."""
    magnitude = (codes & 7).to(torch.float32)
    value = torch.where(magnitude < 4.5, magnitude / 2, torch.where(magnitude > 6.5, 6.0, magnitude - 2))
    return torch.where(codes > 7, -value, value)


@torch.no_grad()
def raw_row(x: torch.Tensor) -> torch.Tensor:
    """The statistics `RAW` of `x` (any floating dtype and layout, may be empty): float64 [len(RAW)] on its device."""
    wide = x.detach().to(torch.float64)
    finite = torch.isfinite(wide)
    count, moments, _ = _moments(wide, finite)
    if wide.numel():
        low = torch.where(finite, wide, math.inf).amin()
        high = torch.where(finite, wide, -math.inf).amax()
    else:
        low, high = torch.full_like(count, math.inf), torch.full_like(count, -math.inf)
    varies = high > low  # a mean that was rounded would leave a constant tensor with moments
    nan, some = torch.isnan(wide).sum(), count > 0
    mean = torch.where(some & varies.logical_not(), high, moments[0])
    std = torch.where(some & varies.logical_not(), 0.0, moments[1])
    kurtosis = torch.where(varies, moments[2], math.nan)
    low, high = (torch.where(some, value, math.nan) for value in (low, high))
    return torch.stack((count, nan.double(), wide.numel() - count - nan, mean, std, kurtosis, low, high))


@torch.no_grad()
def quantized_row(coded: Coded, previous: torch.Tensor | None = None) -> torch.Tensor:
    """The statistics `CODED`, then the counts of the 16 codes: float64 [len(CODED) + 16] on the device.

    Args:
        previous: `packed` of the last look, for the flips (NaN without it).
    """
    x, value = coded.source.to(torch.float64), coded.values.to(torch.float64)
    finite = torch.isfinite(x) & torch.isfinite(value)
    _, _, from_mean = _moments(x, finite)
    _, moments, value_from_mean = _moments(value, finite)
    error = torch.where(finite, x - value, 0.0).square().sum()
    signal = torch.where(finite, x, 0.0).square().sum()
    norms = from_mean.square().sum().sqrt() * value_from_mean.square().sum().sqrt()
    nothing = signal.new_full((), math.nan)
    amax, scales = coded.block_amax, coded.scales
    holds = amax > 0
    if previous is None or not x.numel():
        flips = nothing
    else:
        differing = previous ^ coded.packed
        flips = ((differing & 15 != 0).sum() + (differing >> 4 != 0).sum()) / x.numel()
    shares = torch.stack(
        (
            _share(coded.saturated, nothing),
            _share(holds & (scales < coded.smallest), nothing),
            _share(holds & (scales == 0), nothing),
            _share(amax == 0, nothing),
            10 * torch.log10(signal / error),
            (from_mean * value_from_mean).sum() / norms,
            flips.double(),
        )
    )
    return torch.cat((torch.stack(moments), shares, count_codes(coded.codes)))


def count_codes(codes: torch.Tensor) -> torch.Tensor:
    """How often each code 0 .. 15 occurs in a uint8 tensor: float64 [16] on its device."""
    if codes.device.type == "cpu":
        return torch.bincount(codes.flatten(), minlength=CODES).double()
    return compare_codes(codes)  # bincount would ask the device how many bins it needs


def compare_codes(codes: torch.Tensor) -> torch.Tensor:
    """`count_codes` by sixteen comparisons."""
    every = torch.arange(CODES, dtype=torch.uint8, device=codes.device)
    return (codes.flatten() == every.unsqueeze(-1)).sum(1).double()


def code_moments(counts: Sequence[float]) -> dict[str, float]:
    """Mean, std and kurtosis of the coded values (E2M1, before scaling) and the entropy in bits, from the counts."""
    total = sum(counts)
    if not total:
        return dict.fromkeys(("coded_mean", "coded_std", "coded_kurtosis", "entropy_bits"), math.nan)
    shares = [count / total for count in counts]
    mean = sum(share * value for share, value in zip(shares, VALUES, strict=True))
    second, fourth = (
        sum(share * (value - mean) ** power for share, value in zip(shares, VALUES, strict=True)) for power in (2, 4)
    )
    varies = len({value for share, value in zip(shares, VALUES, strict=True) if share}) > 1
    return {
        "coded_mean": mean,
        "coded_std": math.sqrt(second) if varies else 0.0,
        "coded_kurtosis": fourth / second**2 if varies else math.nan,
        "entropy_bits": -sum(share * math.log2(share) for share in shares if share) + 0.0,
    }


def _moments(
    x: torch.Tensor, finite: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """(finite elements, (mean, std, kurtosis), x - mean or 0 where not finite), all float64."""
    count = finite.sum().double()
    mean = torch.where(finite, x, 0.0).sum() / count
    from_mean = torch.where(finite, x - mean, 0.0)
    squares = from_mean.square()
    variance = squares.sum() / count
    kurtosis = squares.square().sum() / count / variance.square()
    return count, (mean, variance.sqrt(), kurtosis), from_mean


def _share(mask: torch.Tensor, nothing: torch.Tensor) -> torch.Tensor:
    return mask.sum() / mask.numel() if mask.numel() else nothing
