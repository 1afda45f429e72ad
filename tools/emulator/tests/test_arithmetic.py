"""Results of single instructions against exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from fp4deploy_emulator.instructions.arithmetic import _DIRECTED, dot_of
from fp4deploy_emulator.instructions.conversion import _function


@pytest.mark.parametrize("rounding", ["rm", "rp", "rz"])
def test_directed_rounding_of_fma(rounding: str) -> None:
    """The result is the last float32 on its side of the exact sum."""
    generator = np.random.default_rng(0)
    a, b, c = (
        (generator.standard_normal(500) * 10.0 ** generator.integers(-8, 8, 500)).astype(np.float32) for _ in range(3)
    )
    for x, y, z, found in zip(a, b, c, _DIRECTED[rounding](a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        down = rounding == "rm" or (rounding == "rz" and exact > 0)
        beyond = np.nextafter(np.float32(found), np.float32(math.inf if down else -math.inf))
        if down:
            assert Fraction(float(found)) <= exact < Fraction(float(beyond))
        else:
            assert Fraction(float(beyond)) < exact <= Fraction(float(found))


def test_the_nan_of_a_conversion_has_the_bits_of_hardware() -> None:
    """Those that an H200 gave: all bits but the sign."""
    halves = np.array([0x7E00, 0xFE00, 0x7FFF, 0x3C00], np.uint16).view(np.float16)
    wide = _function("f32", "f16", set())(halves)
    assert wide.view(np.uint32).tolist() == [0x7FFFFFFF] * 3 + [0x3F800000]
    assert _function("f16", "f32", {"rn"})(wide).view(np.uint16).tolist() == [0x7FFF] * 3 + [0x3C00]


@pytest.mark.parametrize("first", ["u32", "s32"])
@pytest.mark.parametrize("second", ["u32", "s32"])
@pytest.mark.parametrize("name", ["dp2a.lo", "dp2a.hi", "dp4a"])
def test_products_of_packed_integers(name: str, first: str, second: str) -> None:
    """Of halves or bytes in memory order, modulo 2^32."""
    a, b, c = np.random.default_rng(0).integers(0, 1 << 32, (3, 200), np.uint32)
    wide = np.uint16 if first == "u32" else np.int16
    narrow = [np.uint8 if kind == "u32" else np.int8 for kind in (first, second)]
    x = a.view(narrow[0] if name == "dp4a" else wide).reshape(200, -1).astype(np.int64)
    y = b.view(narrow[1]).reshape(200, 4)[:, 2 * (name == "dp2a.hi") :][:, : x.shape[1]].astype(np.int64)
    expected = ((x * y).sum(1) + c) % (1 << 32)
    assert dot_of((*name.split("."), first, second))(a, b, c).tolist() == expected.tolist()
