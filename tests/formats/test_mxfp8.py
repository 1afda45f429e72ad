"""MXFP8: every element and tie of a block, both rules of its scale, packed and fake-quantised alike."""

from __future__ import annotations

import math

import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import decode_e8m0, fake_quantize_mxfp8, quantize_mxfp8


def test_every_element_of_a_block_and_every_tie_between_two() -> None:
    """Values 0 to 448 of E4M3 are fixed points under the scale 1; halfway between two the even code wins."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (values[1:] + values[:-1]) / 2
    even = values[((torch.arange(len(ties)) + 1) // 2) * 2]
    for sign in (1.0, -1.0):
        for x, expected in ((values, values), (ties, even)):
            rows = torch.cat([sign * x[:, None], torch.full((len(x), 1), 448.0)], 1)  # its own block, scale 1
            assert torch.equal(fake_quantize_mxfp8(rows)[:, 0], sign * expected)


@pytest.mark.parametrize(
    ("amax", "floor", "ceil"),
    [
        (448.0, 127, 127),
        (math.nextafter(448.0, 512.0), 127, 128),
        (511.0, 127, 128),
        (512.0, 128, 128),
        (256.0, 127, 127),
        (255.0, 126, 127),
        (2.0**-130, 0, 0),
        (3e38, 246, 247),
    ],
)
def test_scales_of_both_rules(amax: float, floor: int, ceil: int) -> None:
    x = torch.tensor([amax], dtype=torch.float64).float()
    x = torch.nextafter(x, torch.tensor(512.0)) if 448 < amax < 449 else x
    assert [quantize_mxfp8(x, rule).scales.item() for rule in ("floor", "ceil")] == [floor, ceil]


@pytest.mark.parametrize("rule", ["floor", "ceil"])
@pytest.mark.parametrize("axis", [1, -1])
def test_packed_values_are_the_fake_quantised_ones(rule: str, axis: int) -> None:
    x = torch.randn(3, 70, 4, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 40)
    x[0, 3], x[1, 40, 0, 0], x[2, 0, 1, 1] = 0.0, math.nan, math.inf
    packed = quantize_mxfp8(x.movedim(axis, -1), rule)
    found = fake_quantize_mxfp8(x, axis, rule)
    assert torch.equal(packed.dequantize().movedim(-1, axis).nan_to_num(7), found.nan_to_num(7))
    assert packed.dequantize().isnan().sum() > 30
    largest = packed.codes.float().abs().nan_to_num(0).max()
    assert largest <= 448
    assert packed.scales.shape[-1] == -(-x.shape[axis] // 32)
    half = x.half().nan_to_num(0, 0, 0)
    wide = fake_quantize_mxfp8(half.float(), axis, rule)
    assert torch.equal(fake_quantize_mxfp8(half, axis, rule), wide.clamp(-65504, 65504).half())  # 65536 is no FP16
    assert decode_e8m0(packed.scales[packed.scales != 0xFF]).gt(0).all()


def test_what_it_does_not_take() -> None:
    with pytest.raises(InputError, match="Valid scale rules: floor, ceil"):
        quantize_mxfp8(torch.ones(32), "round")
    with pytest.raises(InputError, match="MXFP8 quantises floating-point tensors"):
        fake_quantize_mxfp8(torch.ones(32, dtype=torch.int32))
    with pytest.raises(InputError, match="MXFP8 blocks need an axis"):
        quantize_mxfp8(torch.tensor(1.0))
