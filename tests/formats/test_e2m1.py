"""E2M1 rounding, coding and packing, every tie listed."""

from __future__ import annotations

import pytest
import torch

from fp4deploy.formats import E2M1_VALUES, decode_e2m1, encode_e2m1, pack_codes, round_e2m1, unpack_codes

TIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}


@pytest.mark.parametrize(("tie", "value"), TIES.items())
def test_ties_go_to_the_even_code(tie: float, value: float) -> None:
    u = torch.tensor([tie, -tie])
    assert round_e2m1(u).abs().tolist() == [value, value]
    below = torch.nextafter(u, torch.zeros(2))
    above = torch.nextafter(u, u.sign() * 100)
    assert round_e2m1(below).abs().tolist() == [max(v for v in E2M1_VALUES if v < tie)] * 2
    assert round_e2m1(above).abs().tolist() == [min(v for v in E2M1_VALUES if v > tie)] * 2


def test_rounding_is_to_the_nearest_value_everywhere() -> None:
    u = torch.linspace(-7, 7, 140_001)
    values = torch.tensor(sorted({s * v for v in E2M1_VALUES for s in (1, -1)}))
    distance = (u.clamp(-6, 6).unsqueeze(1) - values).abs().min(dim=1).values
    assert torch.equal((round_e2m1(u) - u.clamp(-6, 6)).abs(), distance)


def test_codes_and_signs_of_zero() -> None:
    u = torch.tensor([0.0, -0.0, -1e-30, -0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 1e30, -6])
    assert encode_e2m1(u).tolist() == [0, 0, 8, 8, 1, 2, 3, 4, 5, 6, 7, 7, 15]


def test_decode_inverts_encode() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = decode_e2m1(codes)
    assert values.tolist() == [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
    again = encode_e2m1(values)
    assert again[codes != 8].tolist() == codes[codes != 8].tolist()


@pytest.mark.parametrize("shape", [(2,), (3, 16), (0, 16), (5, 0), (2, 3, 34)])
def test_packing_is_a_bijection_with_the_even_element_low(shape: tuple[int, ...]) -> None:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    assert torch.equal(unpack_codes(pack_codes(codes)), codes)
    assert pack_codes(torch.tensor([1, 2], dtype=torch.uint8)).item() == 0x21
