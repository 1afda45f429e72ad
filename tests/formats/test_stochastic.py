"""Philox against its published vectors and in Python's integers; stochastic rounding over all 256 bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import (
    E2M1_VALUES,
    FourOverSix,
    decode_e2m1,
    encode_e2m1,
    fake_quantize_mxfp4,
    fake_quantize_nvfp4,
    philox4x32,
    quantize_mxfp4,
    quantize_nvfp4,
    random_bytes,
    round_e2m1,
)
from tests.formats.hard_cases import generator
from tests.formats.scalar_contract import E2M1, e2m1_stochastic
from tests.formats.scalar_contract import philox as scalar_philox
from tests.formats.scalar_contract import random_bytes as scalar_bytes

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
PUBLISHED = {
    "zeros": ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "digits of pi": (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
}


def over_all_bytes(x: float) -> torch.Tensor:
    return round_e2m1(torch.full((256,), x), ALL_BYTES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_philox_gives_the_published_words(name: str) -> None:
    counter, key, words = PUBLISHED[name]
    found = philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert " ".join(f"{word.item():08x}" for word in found) == words
    assert scalar_philox(tuple(counter), tuple(key)) == [word.item() for word in found]


@pytest.mark.parametrize("seed", [0, 1, 0x0123456789ABCDEF, 2**63, 2**64 - 1, -1])
@pytest.mark.parametrize("offset", [0, 5, 2**40 + 3, 2**64 - 1])
def test_bytes_follow_row_and_group(seed: int, offset: int) -> None:
    for rows, columns, block in ((3, 16, 16), (5, 40, 16), (2, 40, 32), (1, 1, 32)):
        found = random_bytes(torch.Size((rows, columns)), -1, seed, offset, block)
        np.testing.assert_array_equal(found.numpy(), scalar_bytes(rows, columns, seed, offset, block))


def test_bytes_depend_on_coordinates_and_not_on_the_layout() -> None:
    shape = torch.Size((2, 24, 3, 5))
    moved = random_bytes(torch.Size((2, 3, 5, 24)), -1, 9)
    assert torch.equal(random_bytes(shape, 1, 9), moved.movedim(-1, 1))
    assert random_bytes(shape, 1, 9).shape == (2, 32, 3, 5)


def test_a_seed_in_a_tensor_is_that_seed() -> None:
    shape = torch.Size((4, 16))
    seed, offset = torch.tensor(-12345), torch.tensor(77)
    assert torch.equal(random_bytes(shape, -1, seed, offset), random_bytes(shape, -1, -12345, 77))
    assert torch.equal(random_bytes(shape, -1, -1), random_bytes(shape, -1, 2**64 - 1))


def test_bytes_are_uniform() -> None:
    counts = torch.bincount(random_bytes(torch.Size((4096, 64)), -1, 3).flatten().long(), minlength=256)
    assert (counts.double() - 1024).square().div(1024).sum().item() < 350  # chi squared, 255 degrees of freedom


@pytest.mark.parametrize(
    ("x", "value", "times"), [(0.01, 0.5, 5), (1.9, 2.0, 204), (3.9, 4.0, 230), (5.9, 6.0, 243), (6.0, 6.0, 256)]
)
def test_the_counts_of_the_contract(x: float, value: float, times: int) -> None:
    assert (over_all_bytes(x) == value).sum() == times
    assert (over_all_bytes(-x) == -value).sum() == times


@pytest.mark.parametrize("value", E2M1_VALUES)
def test_a_representable_value_never_moves(value: float) -> None:
    assert (over_all_bytes(value) == value).all()
    assert (over_all_bytes(-value) == -value).all()


def test_the_mean_over_all_bytes_is_the_value_within_1_256_of_a_step() -> None:
    x = torch.cat([torch.linspace(-6, 6, 2001), torch.nextafter(torch.tensor(E2M1_VALUES[1:]), torch.zeros(7))])
    mean = round_e2m1(x.repeat(256, 1), ALL_BYTES.unsqueeze(1).expand(256, len(x))).double().mean(0)
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    assert ((mean - x.double()).abs() <= step / 256 * (1 + 1e-6)).all()
    below = mean.abs() - x.double().abs()
    assert (below <= 1e-7).all(), "dither below a step rounds down, never up, of the mean"


def test_only_the_two_neighbours_are_reached() -> None:
    for x in torch.linspace(0, 6, 301).tolist():
        reached = set(over_all_bytes(x).tolist())
        assert reached <= {max(v for v in E2M1_VALUES if v <= x), min(v for v in E2M1_VALUES if v >= x)}


def test_every_byte_at_every_awkward_value_against_integers() -> None:
    grid = torch.tensor([0.125, 0.25, 0.75, 1.0, 1.9, 2.0, 2.5, 3.9, 4.0, 5.0, 5.999, 6.0, 7.0, 1e-30, 0.49999997])
    x = torch.cat([grid, torch.nextafter(grid, torch.zeros(15)), torch.rand(100, generator=generator()) * 6])
    x = torch.cat([x, -x])
    codes = encode_e2m1(x.repeat(256, 1), ALL_BYTES.unsqueeze(1).expand(256, len(x)))
    for r in range(256):
        assert codes[r].tolist() == [e2m1_stochastic(value, r) for value in x.tolist()], f"byte {r}"


def test_signs_of_zero() -> None:
    x = torch.tensor([-0.0, 0.0, -1e-30, -0.1])
    assert encode_e2m1(x, torch.zeros(4, dtype=torch.uint8)).tolist() == [0, 0, 8, 8]
    assert encode_e2m1(x, torch.full((4,), 255, dtype=torch.uint8)).tolist() == [0, 0, 8, 9]
    assert decode_e2m1(torch.arange(16, dtype=torch.uint8)).tolist() == E2M1.tolist()


def test_a_tensor_is_reached_on_average() -> None:
    x = torch.randn(8, 64, generator=generator(2))
    mean = torch.stack([fake_quantize_nvfp4(x, rounding="stochastic", seed=seed)[0] for seed in range(400)]).mean(0)
    nearest, inside = fake_quantize_nvfp4(x)
    error, single = (mean - x)[inside].square().mean().sqrt(), (nearest - x)[inside].square().mean().sqrt()
    assert error < single / 8


def test_equal_seeds_give_equal_tensors_and_others_do_not() -> None:
    x = torch.randn(8, 64, generator=generator(3))
    for quantize in (quantize_nvfp4, quantize_mxfp4):
        a, b, c, d = (
            quantize(x, rounding="stochastic", seed=seed, offset=offset).codes
            for seed, offset in ((1, 0), (1, 0), (2, 0), (1, 1))
        )
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert not torch.equal(a, d)


def test_without_a_seed_torch_decides() -> None:
    x = torch.randn(8, 64, generator=generator(4))
    for quantize in (fake_quantize_mxfp4, lambda x, rounding: fake_quantize_nvfp4(x, rounding=rounding)[0]):
        torch.manual_seed(5)
        a, b = quantize(x, rounding="stochastic"), quantize(x, rounding="stochastic")
        torch.manual_seed(5)
        assert torch.equal(a, quantize(x, rounding="stochastic"))
        assert not torch.equal(a, b)


def test_a_non_finite_block_stays_nan() -> None:
    x = torch.ones(2, 32)
    x[0, 3], x[1, 20] = torch.nan, -torch.inf
    assert fake_quantize_nvfp4(x, rounding="stochastic", seed=1)[0].isnan().view(-1, 16).all(1).tolist() == [1, 0, 0, 1]
    assert fake_quantize_mxfp4(x, rounding="stochastic", seed=1).isnan().all()


def test_wrong_options_name_the_valid_ones() -> None:
    x = torch.ones(16)
    with pytest.raises(InputError, match="nearest, stochastic"):
        quantize_nvfp4(x, rounding="up")
    with pytest.raises(InputError, match="nearest, stochastic"):
        quantize_mxfp4(x, rounding="up")
    with pytest.raises(InputError, match="does not go with stochastic"):
        quantize_nvfp4(x, four_over_six=FourOverSix(), rounding="stochastic")
