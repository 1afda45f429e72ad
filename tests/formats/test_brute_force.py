"""Everything there is of small things: every E4M3 scale with every code, every midpoint, every exponent of E8M0."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4deploy.formats import (
    E2M1_VALUES,
    decode_e8m0,
    e8m0_scales,
    quantize_mxfp4,
    quantize_nvfp4,
    round_e2m1,
    unpack_codes,
)
from tests.formats.hard_cases import UNIT_AMAX, as_numpy, neighbours
from tests.formats.scalar_contract import E2M1, E4M3, E4M3_MIDPOINTS, mxfp4, nvfp4

SCALES = torch.tensor(E4M3[1:], dtype=torch.float32)
CODES = torch.tensor(E2M1)


@pytest.mark.parametrize("amax", [UNIT_AMAX, 1.0, 0.1, 7e35, 1e-30, 12345.678])
def test_every_scale_with_every_code_is_found_again(amax: float) -> None:
    unit = (SCALES * torch.tensor(amax)) * torch.tensor(1 / UNIT_AMAX)
    q = quantize_nvfp4(unit.unsqueeze(1) * CODES, amax=amax)
    assert q.scales.view(torch.uint8).flatten().tolist() == list(range(1, 127))
    expected = [code if code != 8 else 0 for code in range(16)]
    assert unpack_codes(q.codes).tolist() == [expected] * 126
    assert torch.equal(q.dequantize(), unit.unsqueeze(1) * CODES)


def test_every_scale_with_every_boundary_between_codes() -> None:
    boundaries = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    around = neighbours(boundaries * SCALES.unsqueeze(1), 2).permute(1, 0, 2).reshape(126, 35)
    blocks = torch.nn.functional.pad(around.repeat_interleave(2, 1), (0, 5)).reshape(126, 5, 15)
    blocks[..., 1::2] *= -1
    x = torch.cat([blocks, (6 * SCALES).view(126, 1, 1).expand(126, 5, 1)], -1).reshape(126, 80)
    q, expected = quantize_nvfp4(x, amax=UNIT_AMAX), nvfp4(as_numpy(x), amax=UNIT_AMAX)
    assert q.scales.view(torch.uint8).tolist() == expected.scales.tolist()
    assert unpack_codes(q.codes).tolist() == expected.codes.tolist()
    assert (q.scales.view(torch.uint8) == torch.arange(1, 127, dtype=torch.uint8).unsqueeze(1)).all()


def test_every_value_goes_to_the_nearest_of_the_grid_of_its_block() -> None:
    for byte in range(1, 127):
        unit = float(E4M3[byte])
        x = torch.linspace(-6 * unit, 6 * unit, 480).view(-1, 16)
        x[:, 0] = 6 * unit
        q = quantize_nvfp4(x, amax=UNIT_AMAX)
        grid = torch.tensor(sorted({sign * value * unit for value in E2M1_VALUES for sign in (1, -1)}))
        nearest = (x.unsqueeze(-1) - grid).abs().amin(-1)
        assert (q.scales.view(torch.uint8) == byte).all()
        # The grid is ((d8 * A) * fp32(1 / 2688)) * q: d8 * q to within two roundings.
        torch.testing.assert_close((q.dequantize() - x).abs(), nearest, rtol=0, atol=unit * 3e-6)


def test_every_e4m3_midpoint_rounds_to_the_even_byte_and_its_neighbours_away_from_it() -> None:
    tested = 0
    for low, midpoint in enumerate(E4M3_MIDPOINTS):
        around = neighbours(torch.tensor(6 * midpoint), 4)
        blocks = torch.zeros(len(around), 16)
        blocks[:, 5] = around
        found = quantize_nvfp4(blocks, amax=UNIT_AMAX).scales.view(torch.uint8).flatten()
        unrounded = around * torch.tensor(1 / 6)
        even = low if low % 2 == 0 else low + 1
        expected = [low if u < midpoint else low + 1 if u > midpoint else even for u in unrounded.tolist()]
        assert found.tolist() == expected
        tested += int((unrounded == midpoint).any())
    assert tested > 100


def test_every_bfloat16_value_rounds_like_the_intervals_say() -> None:
    u = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    u = u[u.isfinite()]
    m = u.abs().numpy()
    index = sum((m > 0.25, m >= 0.75, m > 1.25, m >= 1.75, m > 2.5, m >= 3.5, m > 5), np.zeros(m.shape, int))
    assert round_e2m1(u).abs().tolist() == [E2M1_VALUES[i] for i in index]


def test_every_exponent_of_mxfp4_one_ulp_around() -> None:
    exponents = torch.arange(-149, 128, dtype=torch.float64)
    amaxes = torch.cat([neighbours((m * 2**exponents).float(), 1).flatten() for m in (1.0, 1.5)])
    amaxes = amaxes[(amaxes > 0) & amaxes.isfinite()]
    blocks = torch.zeros(len(amaxes), 32)
    blocks[:, 3] = amaxes
    for rule in ("floor", "ceil"):
        expected = mxfp4(as_numpy(blocks), rule)
        found = quantize_mxfp4(blocks, rule)
        assert found.scales.tolist() == expected.scales.tolist()
        assert unpack_codes(found.codes).tolist() == expected.codes.tolist()
        assert e8m0_scales(amaxes, rule).tolist() == expected.scales.flatten().tolist()


def test_every_e8m0_byte_decodes_to_its_power() -> None:
    values = decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert values[:255].double().log2().tolist() == list(range(-127, 128))
    assert values[255].isnan()
