"""The two accumulator models, and the second implementation of the hardware's against mmasim's."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from fp4deploy_emulator.accumulate import DOUBLED, Array, block_scaled, block_scaled_fp8, half_precision, plain

RANDOM = np.random.default_rng
NAN_SCALE = 0x7F


def _operands(kind: str, seed: int = 0, m: int = 16, n: int = 8) -> tuple[Array, Array, Array, Array, Array]:
    """Codes [m, 64], [n, 64], scales [m, 4], [n, 4], and c [m, n] that are hard to add."""
    random = RANDOM(seed)
    a, b = (random.integers(0, 16, (rows, 64), dtype=np.uint8) for rows in (m, n))
    sa, sb = (random.integers(0, 0x7F, (rows, 4), dtype=np.uint8) for rows in (m, n))
    c = (random.standard_normal((m, n)) * 2.0 ** random.integers(-20, 20, (m, n))).astype(np.float32)
    if kind == "cancellation":
        b[:, 32:] = b[:, :32]
        a[:, 32:] = a[:, :32] ^ 8
        sa[:, 2:], sb[:, 2:] = sa[:, :2], sb[:, :2]
        a[:, 5] = 1
    elif kind == "opposite c":
        exact = block_scaled(a, b, sa, sb, np.zeros_like(c), "exact")
        c = np.nextafter(-exact, np.float32(np.inf))
    elif kind == "subnormal":
        sa, sb = (random.integers(0, 8, s.shape, dtype=np.uint8) for s in (sa, sb))
        c = (
            (random.integers(0, 1 << 23, c.shape) | random.integers(0, 2, c.shape) << 31)
            .astype(np.uint32)
            .view(np.float32)
        )
    elif kind == "subnormal c":
        c = random.integers(0, 1 << 23, c.shape).astype(np.uint32).view(np.float32)
        a[::2] = 0
    elif kind == "overflow":
        sa[:], sb[:] = 0x7E, 0x7E
        c = np.where(random.random(c.shape) < 0.5, np.finfo(np.float32).max, -np.finfo(np.float32).max).astype(
            np.float32
        )
    elif kind == "not finite":
        c = random.choice(np.array([np.inf, -np.inf, np.nan, 1], np.float32), c.shape)
    elif kind == "NaN scales":
        sa[::3, 1] = NAN_SCALE
        sb[::4, 2] = NAN_SCALE
    elif kind == "zeros":
        a[:, ::2] = 0
        b[:, 1::2] = 8
        c[::2] = -0.0
    elif kind == "zero scales":
        sa[::2] = 0
        sb[1::2, :2] = 0
    elif kind == "sign of scales":
        sa |= 0x80
    elif kind == "far apart":
        sa[:, 0], sa[:, 1:] = 0x7E, 1
        sb[:, 0], sb[:, 1:] = 0x7E, 1
    return a, b, sa, sb, c


def _operands_mx(kind: str, seed: int = 0, m: int = 16, n: int = 8) -> tuple[Array, Array, Array, Array, Array]:
    """As `_operands`, with UE8M0 scales [m, 2], [n, 2] of 32 elements."""
    a, b, _, _, c = _operands(kind, seed, m, n)
    random = RANDOM(100 + seed)
    low, high = {"subnormal": (40, 60), "overflow": (185, 200), "far apart": (0, 255)}.get(kind, (117, 137))
    sa, sb = (random.integers(low, high, (rows, 2), dtype=np.uint8) for rows in (m, n))
    if kind == "cancellation":
        sa[:, 1], sb[:, 1] = sa[:, 0], sb[:, 0]
    elif kind == "NaN scales":
        sa[::3, 1] = sb[::4, 0] = 0xFF
    elif kind == "smallest scales":
        sa[::2] = sb[1::2] = 0
    elif kind == "opposite c":
        c = np.nextafter(-block_scaled(a, b, sa, sb, np.zeros_like(c), "exact", "ue8m0"), np.float32(np.inf))
    return a, b, sa, sb, c


KINDS = [
    *("random", "cancellation", "opposite c", "subnormal", "subnormal c", "overflow", "not finite", "NaN scales"),
    *("zeros", "zero scales", "sign of scales", "far apart"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_block_scaled_equals_mmasim(kind: str) -> None:
    for seed in range(4):
        operands = _operands(kind, seed)
        ours, theirs = (block_scaled(*operands, model).view(np.uint32) for model in ("hardware", "mmasim"))
        assert (ours == theirs).all(), (kind, seed, int((ours != theirs).sum()))


MX_KINDS = [kind for kind in KINDS if "scales" not in kind] + ["NaN scales", "smallest scales"]


@pytest.mark.parametrize("kind", MX_KINDS)
def test_block_scaled_mxfp4_equals_mmasim(kind: str) -> None:
    for seed in range(4):
        operands = _operands_mx(kind, seed)
        ours, theirs = (block_scaled(*operands, model, "ue8m0").view(np.uint32) for model in ("hardware", "mmasim"))
        assert (ours == theirs).all(), (kind, seed, int((ours != theirs).sum()))


@pytest.mark.parametrize("kind", ["random", "cancellation", "zeros", "not finite", "far apart", "NaN scales"])
def test_block_scaled_fp8_equals_mmasim(kind: str) -> None:
    random = RANDOM(5)
    a, b = (random.integers(0, 256, (rows, 32), dtype=np.uint8) & 0xFE for rows in (16, 8))  # no NaN
    sa, sb = (random.integers(110, 140, rows, dtype=np.uint8) for rows in (16, 8))
    c = (random.standard_normal((16, 8)) * 2.0 ** random.integers(-20, 20, (16, 8))).astype(np.float32)
    if kind == "cancellation":
        a[:, 16:], b[:, 16:] = a[:, :16] ^ 0x80, b[:, :16]
    elif kind == "zeros":
        a[:, ::2], b[:, 1::2], c[::2] = 0, 0x80, -0.0
    elif kind == "not finite":
        c = random.choice(np.array([np.inf, -np.inf, np.nan, 1], np.float32), c.shape)
        a[0, 0] = 0x7F
    elif kind == "far apart":
        sa, sb = (random.integers(0, 255, rows, dtype=np.uint8) for rows in (16, 8))
    elif kind == "NaN scales":
        sa[3] = sb[2] = 0xFF
    ours, theirs = (block_scaled_fp8(a, b, sa, sb, c, model).view(np.uint32) for model in ("hardware", "mmasim"))
    assert (ours == theirs).all(), int((ours != theirs).sum())


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("bfloat", [False, True])
def test_half_precision_equals_mmasim(capability: int, bfloat: bool) -> None:
    random = RANDOM(3)
    for spread in (0, 5, 14):
        a, b = (random.standard_normal((r, 16)) * 2.0 ** random.integers(-spread, spread + 1, (r, 16)) for r in (16, 8))
        a[:, 3], b[:, 3] = 0, -0.0
        a[0, 8:], b[:, 8:] = -a[0, :8], b[:, :8]
        x, y = (_rounded(each, bfloat) for each in (a, b))
        c = (random.standard_normal((16, 8)) * 2.0 ** random.integers(-30, 12, (16, 8))).astype(np.float32)
        c[0, :] = 0
        numbers, smallest = half_precision(capability), -126 if bfloat else -14
        ours, theirs = (plain(x, y, c, numbers, smallest, model).view(np.uint32) for model in ("hardware", "mmasim"))
        assert (ours == theirs).all(), (spread, int((ours != theirs).sum()))


def _rounded(x: Array, bfloat: bool) -> Array:
    if bfloat:
        return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return x.astype(np.float16).astype(np.float32)


def _scale(byte: int) -> Fraction:
    field, mantissa = byte >> 3 & 15, byte & 7
    return (Fraction(8 + mantissa, 8) if field else Fraction(mantissa, 8)) * Fraction(2) ** (max(field, 1) - 7)


EXACT = ["random", "cancellation", "opposite c", "subnormal", "far apart"]


@pytest.mark.parametrize(
    ("kind", "scale_type"), [(kind, scale_type) for kind in EXACT for scale_type in ("ue4m3", "ue8m0")]
)
def test_exact_is_the_nearest_float(kind: str, scale_type: str) -> None:
    mx = scale_type == "ue8m0"
    a, b, sa, sb, c = (_operands_mx if mx else _operands)(kind, 1, 4, 3)
    with np.errstate(over="ignore"):
        got = block_scaled(a, b, sa, sb, c, "exact", scale_type)
    of = (lambda byte: Fraction(2) ** (byte - 127)) if mx else _scale
    block = 32 if mx else 16
    for i in range(4):
        for j in range(3):
            total = Fraction(float(c[i, j]))
            for k in range(64):
                product = Fraction(int(DOUBLED[a[i, k]]) * int(DOUBLED[b[j, k]]), 4)
                total += product * of(int(sa[i, k // block])) * of(int(sb[j, k // block]))
            if not np.isfinite(got[i, j]):
                assert abs(total) >= Fraction(2) ** 128 - Fraction(2) ** 103
                continue
            distance = abs(Fraction(float(got[i, j])) - total)
            for other in (np.nextafter(got[i, j], np.float32(s * np.inf)) for s in (1, -1)):
                assert not np.isfinite(other) or distance <= abs(Fraction(float(other)) - total), (i, j)


def test_the_models_differ_where_bits_are_cut_off() -> None:
    operands = _operands("random", 5)
    hardware, exact = (block_scaled(*operands, model) for model in ("hardware", "exact"))
    different = hardware != exact
    assert different.any()
    assert (np.abs(hardware) <= np.abs(exact))[different].mean() > 0.9  # toward zero


def test_long_sums_are_instructions_one_after_the_other() -> None:
    a, b, sa, sb, c = _operands("random", 6)
    first, second = _operands("random", 7), block_scaled(a, b, sa, sb, c)
    joined = [np.concatenate([x, y], -1) for x, y in zip((a, b, sa, sb), first[:4], strict=True)]
    assert np.array_equal(block_scaled(*joined, c), block_scaled(*first[:4], second))
