"""The mistakes that public emulators make (numerics contract, section 7), each shown on what it gets wrong.

Two more stand with the layers: a converted layer that drops its bias, and blocks along another axis than the product's.
"""

from __future__ import annotations

import pytest
import torch

from fp4deploy.formats import (
    FourOverSix,
    fake_quantize_mxfp4,
    fake_quantize_nvfp4,
    quantize_mxfp4,
    quantize_nvfp4,
    round_e2m1,
)
from tests.formats.hard_cases import UNIT_AMAX, generator, neighbours


def in_a_block_of_scale_one(values: torch.Tensor) -> list[torch.Tensor]:
    """The values next to a 6, quantised by every rule under which the block's scale is exactly 1."""
    blocks = torch.zeros(len(values), 32)
    blocks[:, 1], blocks[:, 0] = values, 6.0
    tiles = blocks.repeat_interleave(16, 0)
    return [
        round_e2m1(values),
        quantize_nvfp4(blocks, amax=UNIT_AMAX).dequantize()[:, 1],
        quantize_nvfp4(tiles, "2d", amax=UNIT_AMAX).dequantize()[::16, 1],
        fake_quantize_mxfp4(blocks, scale_rule="floor")[:, 1],
        fake_quantize_mxfp4(blocks, scale_rule="ceil")[:, 1],
    ]


def test_the_carry_into_the_next_exponent_is_not_blocked() -> None:
    for low, high, value in ((1.75, 2.0, 2.0), (3.5, 4.0, 4.0)):
        for found in in_a_block_of_scale_one(torch.linspace(low, high, 33)):
            torch.testing.assert_close(found, torch.full((33,), value), rtol=1e-6, atol=0)


def test_ties_go_to_even_and_not_toward_zero_nor_away() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    for found in in_a_block_of_scale_one(ties):
        torch.testing.assert_close(found, torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", range(20))
def test_dither_does_not_move_what_is_exactly_representable(seed: int) -> None:
    grid = torch.tensor([6, 0, 0.5, 1, 1.5, 2, 3, 4, -0.5, -1, -1.5, -2, -3, -4, -6, 6]).repeat(2)
    for amax in (UNIT_AMAX, 2 * UNIT_AMAX):
        found, _ = fake_quantize_nvfp4(grid, amax=amax, rounding="stochastic", seed=seed)
        torch.testing.assert_close(found, grid, rtol=1e-6, atol=0)
    for rule in ("floor", "ceil"):
        assert torch.equal(fake_quantize_mxfp4(grid, scale_rule=rule, rounding="stochastic", seed=seed), grid)


@pytest.mark.parametrize("magnitude", [1e-3, 1e-6, 1e-12, 1e-30])
def test_small_gradients_do_not_vanish(magnitude: float) -> None:
    """6 * 2^-9 is where a block scale without a global scale ends."""
    g = torch.randn(64, 64, generator=generator()) * magnitude
    for options in ({}, {"rounding": "stochastic", "seed": 1}, {"row_scaled": True}, {"four_over_six": FourOverSix()}):
        found, _ = fake_quantize_nvfp4(g, **options)
        error = (found.double() - g).square().sum() / g.double().square().sum()
        assert error < 0.03, options
    assert (fake_quantize_mxfp4(g).double() - g).square().sum() / g.double().square().sum() < 0.03


def test_subnormal_block_scales_are_kept_and_rounded() -> None:
    smallest = 2.0**-9
    amax = 6 * smallest * torch.tensor([1, 2, 3, 4, 5, 6, 7, 0.75, 0.4, 1.4, 1.6, 6.6, 7.4, 7.6])
    x = torch.zeros(len(amax), 16)
    x[:, 2] = amax
    q = quantize_nvfp4(x, amax=UNIT_AMAX)
    assert q.scales.view(torch.uint8).flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 0, 1, 2, 7, 7, 8]
    torch.testing.assert_close(q.dequantize()[:7, 2], amax[:7], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "choice", [None, FourOverSix(), FourOverSix("mse", 448), FourOverSix("mae", 448, True)], ids=str
)
def test_a_finite_block_never_gets_the_nan_scale(choice: FourOverSix | None) -> None:
    amaxes = torch.cat([torch.linspace(1200, 2688, 200), torch.tensor([1536.0, 2785, 2786, 3000, 1e6, 1e30, 3.4e38])])
    x = torch.rand(len(amaxes), 16, generator=generator(1)) * amaxes.unsqueeze(1)
    x[:, 0] = amaxes
    for amax in (None, UNIT_AMAX, 1.0):
        bytes_ = quantize_nvfp4(x, amax=amax, four_over_six=choice).scales.view(torch.uint8)
        assert (bytes_ <= 0x7E).all()
        if amax == UNIT_AMAX:
            assert (bytes_[amaxes >= 1536] >= 0x78).all() or choice is not None
    assert quantize_nvfp4(x[-1:], four_over_six=choice).dequantize().isnan().sum() == 0


def test_exponents_come_out_of_the_bits_and_not_out_of_a_logarithm() -> None:
    for k in range(-100, 101):
        below, exact, above = neighbours(torch.tensor([2.0**k, 1.5 * 2.0**k]), 1)
        x = torch.zeros(6, 32)
        x[:, 7] = torch.stack([below, exact, above]).flatten()
        floor, ceil = (quantize_mxfp4(x, rule).scales.flatten().int() - 125 - k for rule in ("floor", "ceil"))
        assert floor.tolist() == [-1, 0, 0, 0, 0, 0]
        assert ceil.tolist() == [0, 0, 0, 0, 0, 1]


def test_blocks_of_zeros_have_scale_zero_and_code_zero() -> None:
    x = torch.zeros(2, 64)
    x[0, 40] = 3.0
    x[1] = -0.0
    q, mx = quantize_nvfp4(x), quantize_mxfp4(x)
    assert (q.scales.view(torch.uint8) > 0).int().tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert (mx.scales > 0).int().tolist() == [[0, 1], [0, 0]]
    assert q.codes[1].sum() == mx.codes[1].sum() == 0


def test_the_known_errors_of_normal_data() -> None:
    x = torch.randn(2048, 512, generator=generator(2))
    known = {
        0.009090: {},
        0.007839: {"four_over_six": FourOverSix("mae")},
        0.007609: {"four_over_six": FourOverSix("mse")},
        0.012422: {"block": "2d"},
        0.0124: {"block": "2d", "four_over_six": FourOverSix("mse")},
    }
    for expected, options in known.items():
        error = (quantize_nvfp4(x, **options).dequantize() - x).square().mean() / x.square().mean()
        assert error.item() == pytest.approx(expected, rel=0.01), options


def test_fast_and_strict_agree_on_almost_all_blocks_and_not_on_all() -> None:
    x = torch.randn(8192, 512, generator=generator(3))
    strict, fast = (
        quantize_nvfp4(x, four_over_six=FourOverSix(fast=fast)).scales.view(torch.uint8) for fast in (False, True)
    )
    assert 0 < (strict != fast).sum() < 0.001 * strict.numel()


def test_beyond_what_a_product_of_scale_and_amax_holds_values_overflow() -> None:
    """(d8 * A) first, as the contract orders it: an amax above FLT_MAX / 448 decodes to Inf in its largest blocks."""
    limit = torch.finfo(torch.float32).max / 448
    for amax, overflows in ((limit * 0.999, False), (limit * 1.001, True)):
        assert quantize_nvfp4(torch.full((16,), amax)).dequantize().isinf().all() == overflows
