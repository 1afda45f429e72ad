"""What a tensor core adds up: two models of the accumulator, and a third implementation to compare with.

    d = c + sum over k of a[k] b[k] (times block scales)

| model | sum | rounding |
|---|---|---|
| `hardware` | terms aligned to the largest exponent, cut off after F fraction bits, added exactly | toward zero |
| `exact` | exact | to nearest, ties to even, once for each instruction |
| `mmasim` | as `hardware`, computed by the package of that name | toward zero |

**FP4 with block scales** (K = 64). The products of 16 elements, multiples of 1/4, are added exactly. Four such sums,
each times the significands of its two scales and with their exponents added, and c are aligned and cut off at F = 35
bits. NVFP4 has a scale for 16 elements (UE4M3), MXFP4 one for 32 (UE8M0), which two of these sums share.

**FP8 with block scales** (MXFP8, K = 32). Each product is a term of its own, times the two powers of two of its row and
column, F = 25.

**FP16 and BF16** (K = 16). Each product is a term of its own, F = 25 (24 before SM90, which also take 8 products a
step instead of 16).

A term that is zero has an exponent of its own (`zero`), below that of every other number. The exponent of a term is
that of its factors: a product of significands can be 2 or more and is not normalised first, and the sum of 16 products
can be much larger.

The model is published and was fitted to hardware by its authors: P. Xie, Y. Wang, F. Yang, M. Yang, "MMA-Sim:
Bit-Accurate Reference Model of Tensor Cores and Matrix Cores", https://arxiv.org/abs/2511.10909. The implementation
here is this project's own; the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
MODELS = ("hardware", "exact", "mmasim")
GROUP = 16  # products of FP4 elements that are added exactly
BLOCKS = {"ue4m3": 16, "ue8m0": 32}  # elements of a block scale, by its type
DEPTH = 64  # elements of one FP4 instruction
FRACTION = 35
ZERO = -139
EIGHT_BITS_DEPTH = 32  # elements of one FP8 instruction with block scales, which share a scale
EIGHT_BITS_FRACTION, EIGHT_BITS_ZERO = 25, -133
NAN = np.uint32(0x7FFFFFFF).view(np.float32)
# Twice the value of each E2M1 code.
DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


@dataclass(frozen=True)
class HalfPrecision:
    """The accumulator for FP16 and BF16: fraction bits, products of a step, exponent of a zero."""

    fraction: int
    step: int
    zero: int


def half_precision(capability: int) -> HalfPrecision:
    """That of an architecture, such as 90."""
    return HalfPrecision(25, 16, -133) if capability >= 90 else HalfPrecision(24, 8, -132)


def block_scaled(
    a: Array, b: Array, a_scales: Array, b_scales: Array, c: Array, model: str = "hardware", scale_type: str = "ue4m3"
) -> Array:
    """c + a b^T, elements E2M1 with block scales.

    Args:
        a, b: codes, uint8 [..., M, K] and [..., N, K], one a byte; K a multiple of 64.
        a_scales, b_scales: bytes, uint8 [..., M, K / block] and [..., N, K / block].
        c: float32 [..., M, N].
        model: one of `MODELS`.
        scale_type: "ue4m3", blocks of 16, or "ue8m0", blocks of 32.

    Returns:
        float32 [..., M, N]; K / 64 instructions, one after the other.
    """
    step = {"hardware": _block_hardware, "exact": _block_exact, "mmasim": _block_mmasim}[model]
    block = BLOCKS[scale_type]
    for k in range(0, a.shape[-1], DEPTH):
        scales = slice(k // block, (k + DEPTH) // block)
        part = slice(k, k + DEPTH)
        c = step(a[..., part], b[..., part], a_scales[..., scales], b_scales[..., scales], c, scale_type)
    return c


def block_scaled_fp8(a: Array, b: Array, a_scales: Array, b_scales: Array, c: Array, model: str = "hardware") -> Array:
    """c + a b^T of E4M3 codes with one UE8M0 scale for 32 elements: one instruction.

    Args:
        a, b: codes, uint8 [..., M, 32] and [..., N, 32].
        a_scales, b_scales: bytes, uint8 [..., M] and [..., N].
        c: float32 [..., M, N].

    Returns:
        float32 [..., M, N].
    """
    if model == "mmasim":
        return _fp8_mmasim(a, b, a_scales, b_scales, c)
    x, y = _e4m3_values(a), _e4m3_values(b)
    (scale_a, power_a), (scale_b, power_b) = _unsigned_e8m0(a_scales), _unsigned_e8m0(b_scales)
    scale = scale_a[..., :, None] * scale_b[..., None, :]  # 1 or NaN
    power = power_a[..., :, None] + power_b[..., None, :]
    if model == "exact":  # multiples of 2^-18 below 2^23
        dot = x.astype(np.float64) @ np.swapaxes(y, -1, -2).astype(np.float64)
        dot = np.ldexp(dot * scale, power)
        return _nearest(dot, np.zeros_like(dot), c)
    (sa, ea), (sb, eb) = _split(x, -6), _split(y, -6)
    significand = sa[..., :, None, :] * sb[..., None, :, :]
    exponent = ea[..., :, None, :] + eb[..., None, :, :] + power[..., None]
    exponent = np.where(significand == 0, EIGHT_BITS_ZERO, exponent)
    return _aligned_sum(significand * scale[..., None], exponent, c, EIGHT_BITS_FRACTION, EIGHT_BITS_ZERO, axis=-1)


def plain(a: Array, b: Array, c: Array, numbers: HalfPrecision, smallest: int = -14, model: str = "hardware") -> Array:
    """c + a b^T of FP16 or BF16 values.

    Args:
        a, b: float32 [..., M, K] and [..., N, K].
        c: float32 [..., M, N].
        numbers: the accumulator.
        smallest: exponent of the smallest normal number, -14 for FP16, -126 for BF16.
    """
    if model == "exact":
        dot = a.astype(np.float64) @ np.swapaxes(b, -1, -2).astype(np.float64)
        return _nearest(dot, np.zeros_like(dot), c)
    step = _plain_mmasim if model == "mmasim" else _plain_hardware
    for k in range(0, a.shape[-1], numbers.step):
        part = slice(k, k + numbers.step)
        c = step(a[..., part], b[..., part], c, numbers, smallest)
    return c


def _block_hardware(a: Array, b: Array, a_scales: Array, b_scales: Array, c: Array, scale_type: str) -> Array:
    sums, some = _group_sums(a, b)
    significand, exponent = _scale_products(a_scales, b_scales, scale_type)
    exponent = np.where(some & (significand != 0), exponent, ZERO)
    return _aligned_sum(sums * significand, exponent, c, FRACTION, ZERO, axis=-3)


def _scale_products(a: Array, b: Array, scale_type: str) -> tuple[Array, Array]:
    """Significands and exponents, each [..., groups of 16, M, N], of what each sum of 16 products is multiplied by."""
    (sa, ea), (sb, eb) = (_unsigned_e4m3(x) if scale_type == "ue4m3" else _unsigned_e8m0(x) for x in (a, b))
    rows, columns = (lambda x: np.swapaxes(x, -1, -2)[..., :, None]), (lambda x: np.swapaxes(x, -1, -2)[..., None, :])
    significand, exponent = rows(sa) * columns(sb), rows(ea) + columns(eb)
    groups = BLOCKS[scale_type] // GROUP
    return (significand, exponent) if groups == 1 else (significand.repeat(groups, -3), exponent.repeat(groups, -3))


def _group_sums(a: Array, b: Array) -> tuple[Array, Array]:
    """Exact sums of 16 products, float64 [..., groups, M, N], and where any product is not zero."""
    x, y = (np.swapaxes(DOUBLED[codes].reshape(*codes.shape[:-1], -1, GROUP), -2, -3) for codes in (a, b))
    sums = x @ np.swapaxes(y, -1, -2)
    some = np.abs(x) @ np.swapaxes(np.abs(y), -1, -2) != 0
    return sums.astype(np.float64) / 4, some


def _unsigned_e4m3(scales: Array) -> tuple[Array, Array]:
    """Significand (1 to 2, below 1 for subnormal ones) and exponent; the sign is ignored, 0x7F is NaN."""
    code = scales & 0x7F
    field, mantissa = (code >> 3).astype(np.int32), (code & 7) / 8
    significand = np.where(field > 0, 1 + mantissa, mantissa)
    return np.where(code == 0x7F, np.nan, significand), np.maximum(field, 1) - 7


def _e4m3_values(codes: Array) -> Array:
    """float32 of E4M3 bytes."""
    significand, exponent = _unsigned_e4m3(codes)
    return np.where(codes >= 0x80, -1, 1).astype(np.float32) * np.ldexp(significand, exponent).astype(np.float32)


def _unsigned_e8m0(scales: Array) -> tuple[Array, Array]:
    """1 and the exponent; 0xFF is NaN."""
    return np.where(scales == 0xFF, np.nan, 1.0), scales.astype(np.int32) - 127


def _plain_hardware(a: Array, b: Array, c: Array, numbers: HalfPrecision, smallest: int) -> Array:
    (sa, ea), (sb, eb) = _split(a, smallest), _split(b, smallest)
    with np.errstate(invalid="ignore"):  # Inf times 0 is NaN
        significand = sa[..., :, None, :] * sb[..., None, :, :]
    exponent = np.where(significand == 0, numbers.zero, ea[..., :, None, :] + eb[..., None, :, :])
    return _aligned_sum(significand, exponent, c, numbers.fraction, numbers.zero, axis=-1)


def _split(x: Array, smallest: int) -> tuple[Array, Array]:
    """Significand and exponent of values; below 1 for subnormal ones."""
    fraction, exponent = np.frexp(x.astype(np.float64))
    raised = np.maximum(exponent - 1, smallest)
    return np.ldexp(fraction, exponent - raised), raised


def _aligned_sum(terms: Array, exponents: Array, c: Array, fraction: int, zero: int, axis: int) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        own, own_exponent = _split(c, -126)
        own_exponent = np.where(own == 0, zero, own_exponent)
        largest = np.maximum(exponents.max(axis), own_exponent)
        shift = exponents - np.expand_dims(largest, axis) + fraction
        total = np.trunc(np.ldexp(terms, shift)).sum(axis) + np.trunc(np.ldexp(own, own_exponent - largest + fraction))
        return _toward_zero(np.ldexp(total, largest - fraction))


def _toward_zero(x: Array) -> Array:
    """float64 -> float32, cut off; a NaN has all bits set but the sign, and no zero is negative."""
    rounded = x.astype(np.float32)
    too_large = np.abs(rounded.astype(np.float64)) > np.abs(x)
    rounded = np.where(too_large & (np.abs(x) < 2.0**128), np.nextafter(rounded, np.float32(0)), rounded)
    return np.where(np.isnan(rounded), NAN, rounded + np.float32(0))


def _block_exact(a: Array, b: Array, a_scales: Array, b_scales: Array, c: Array, scale_type: str) -> Array:
    sums, _ = _group_sums(a, b)
    significand, exponent = _scale_products(a_scales, b_scales, scale_type)
    terms = np.ldexp(sums * significand, exponent)
    # The terms of two groups are exact in float64: one scale, or multiples of 2^-20 below 2^31.
    return _nearest(*two_sum(terms[..., :2, :, :].sum(-3), terms[..., 2:, :, :].sum(-3)), c)


def _nearest(dot: Array, rest: Array, c: Array) -> Array:
    """float32(dot + rest + c) with one rounding; `rest` is at most half a unit in the last place of `dot`.

    The float64 sum is rounded to odd, so that the second rounding sees on which side of a tie the exact sum lies.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        total, error = two_sum(dot, c.astype(np.float64))
        rounded = odd_sum(total, np.where(np.isfinite(total), odd_sum(error, rest), 0)).astype(np.float32)
        return np.where(np.isnan(rounded), NAN, rounded + np.float32(0))


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """float64: the rounded sum, and what the rounding left out."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def odd_sum(a: Array, b: Array) -> Array:
    """float64 sum, rounded to odd: where it is inexact its last bit is set.

    Rounded again to float32, in any direction, it is what one rounding of the exact sum gives. Source: S. Boldo,
    G. Melquiond, "Emulation of a FMA and Correctly Rounded Sums: Proved Algorithms Using Rounding to Odd".
    """
    total, error = two_sum(a, b)
    even = np.ascontiguousarray(total).view(np.uint64).reshape(np.shape(total)) & np.uint64(1) == 0
    away = np.where((error > 0) == (total > 0), np.copysign(np.inf, total), 0.0)
    return np.where((error != 0) & np.isfinite(total) & even, np.nextafter(total, away), total)


def _mmasim() -> Any:
    from mmasim.arithmetic import fdpa  # its other modules compile C++ when they are imported

    return fdpa


def _block_mmasim(a: Array, b: Array, a_scales: Array, b_scales: Array, c: Array, scale_type: str) -> Array:
    import torch

    model = _mmasim().MMA_GST_FDPA(G=GROUP, F=FRACTION, rho="RZ-FP32", L_max=DEPTH, e_zero=ZERO)

    kind = torch.float8_e4m3fn if scale_type == "ue4m3" else torch.float8_e8m0fnu

    def scales(x: Array) -> Any:
        return torch.from_numpy(np.ascontiguousarray(x)).view(kind)

    def values(x: Array) -> Any:
        return torch.from_numpy((DOUBLED[x] / 2).astype(np.float16))

    return _called(model, (values(a), values(b)), c, (scales(a_scales), scales(b_scales)))


def _fp8_mmasim(a: Array, b: Array, a_scales: Array, b_scales: Array, c: Array) -> Array:
    import torch

    numbers = EIGHT_BITS_FRACTION, "RZ-FP32", EIGHT_BITS_DEPTH, EIGHT_BITS_ZERO
    model = _mmasim().MMA_ST_FDPA(*numbers, "e4m3", "e4m3")

    def typed(x: Array, kind: torch.dtype) -> Any:
        return torch.from_numpy(np.ascontiguousarray(x)).view(kind)

    elements = (typed(x, torch.float8_e4m3fn) for x in (a, b))
    scales = (typed(x[..., None], torch.float8_e8m0fnu) for x in (a_scales, b_scales))
    return _called(model, (next(elements), next(elements)), c, tuple(scales))


def _plain_mmasim(a: Array, b: Array, c: Array, numbers: HalfPrecision, smallest: int) -> Array:
    import torch

    kind, name = (torch.float16, "f16") if smallest == -14 else (torch.bfloat16, "bf16")
    model = _mmasim().MMA_T_FDPA(numbers.fraction, "RZ-FP32", numbers.step, numbers.zero, name, name)
    x, y = (torch.from_numpy(np.ascontiguousarray(each)).to(kind) for each in (a, b))
    return _called(model, (x, y), c, ())


def _called(model: Any, operands: tuple[Any, Any], c: Array, scales: tuple[Any, ...]) -> Array:
    """Rows of a against rows of b, all at once: what the model takes are vectors."""
    import torch

    def pair(x: Any, y: Any) -> tuple[Any, Any]:
        shape = (*x.shape[:-1], y.shape[-2], x.shape[-1])
        return x.unsqueeze(-2).expand(shape).clone(), y.unsqueeze(-3).expand(shape).clone()

    dpa: Callable[..., Any] = model.dpa
    more = pair(*scales) if scales else ()
    return np.asarray(dpa(*pair(*operands), torch.from_numpy(np.ascontiguousarray(c)), *more).numpy())
