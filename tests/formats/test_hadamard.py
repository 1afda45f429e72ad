"""The random Hadamard transform against its matrix, and what it is for: cancelling in a product."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4deploy.errors import InputError
from fp4deploy.formats import random_hadamard
from fp4deploy.formats.hadamard import SIGN_MASK, SIGNS
from tests.formats.hard_cases import generator

SIGNS_OF_THE_CONTRACT = "+ + + - + - - - - - - + - + - -"
OF_0_TO_15 = [-14.5, -7.5, 6.5, -0.5, 6.5, -0.5, -14.5, 8.5, 7.5, 14.5, 0.5, 1.5, 0.5, -2.5, 9.5, -15.5]


def matrix() -> torch.Tensor:
    """diag(s) H16 / 4, Sylvester's H16 entry by entry: (-1) to the number of common bits."""
    h = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)], dtype=torch.float64)
    signs = torch.tensor([1.0 if s == "+" else -1.0 for s in SIGNS_OF_THE_CONTRACT.split()], dtype=torch.float64)
    return signs.diag() @ h / 4


def test_the_mask_spells_the_signs() -> None:
    assert SIGN_MASK == 0xD7E8
    assert ["+" if s > 0 else "-" for s in SIGNS] == SIGNS_OF_THE_CONTRACT.split()


def test_zero_to_fifteen() -> None:
    assert random_hadamard(torch.arange(16.0)).tolist() == OF_0_TO_15


def test_equals_the_product_with_the_matrix() -> None:
    x = torch.randn(7, 48, generator=generator())
    expected = (x.double().view(7, 3, 16) @ matrix()).view(7, 48)
    torch.testing.assert_close(random_hadamard(x).double(), expected, rtol=0, atol=1e-6)
    whole = torch.randint(-1000, 1000, (7, 48), generator=generator()).float()
    assert torch.equal(random_hadamard(whole).double(), (whole.double().view(7, 3, 16) @ matrix()).view(7, 48))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-(2**15), 2**15), min_size=16, max_size=64).filter(lambda v: len(v) % 16 == 0))
def test_orthogonal_the_inverse_gives_back_and_lengths_stay(values: list[int]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    y = random_hadamard(x)
    assert torch.equal(random_hadamard(y, inverse=True), x)
    assert torch.equal(y.double().square().sum(), x.double().square().sum())


@pytest.mark.parametrize("k", [16, 40, 50])
def test_cancels_in_a_product_along_the_transformed_axis(k: int) -> None:
    a, b = torch.randn(5, k, generator=generator(1)), torch.randn(6, k, generator=generator(2))
    product = random_hadamard(a) @ random_hadamard(b).T
    torch.testing.assert_close(product, a @ b.T, rtol=1e-5, atol=1e-5)


def test_an_outlier_is_spread_over_its_group_only() -> None:
    x = torch.zeros(32)
    x[3] = 16.0
    y = random_hadamard(x)
    assert y[:16].abs().tolist() == [4.0] * 16
    assert y[16:].abs().sum() == 0


@pytest.mark.parametrize("axis", [0, 1, -2, 3])
def test_any_axis_padded_to_whole_groups(axis: int) -> None:
    x = torch.randn(17, 3, 20, 5, generator=generator(3))
    y = random_hadamard(x, axis)
    padded = -(-x.shape[axis] // 16) * 16
    assert y.shape[axis] == padded
    assert torch.equal(y.movedim(axis, -1), random_hadamard(x.movedim(axis, -1).contiguous()))


def test_a_non_finite_element_harms_its_group_only() -> None:
    x = torch.ones(3, 32)
    x[1, 20] = torch.nan
    assert random_hadamard(x).isnan().view(-1, 16).any(1).tolist() == [False, False, False, True, False, False]


@pytest.mark.parametrize("shape", [(0, 16), (3, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    assert random_hadamard(torch.empty(shape)).shape == shape


def test_computes_in_float32_whatever_comes_in() -> None:
    x = torch.randn(4, 16, generator=generator(4)).bfloat16()
    assert torch.equal(random_hadamard(x), random_hadamard(x.float()))
    with pytest.raises(InputError, match="floating-point"):
        random_hadamard(torch.ones(16, dtype=torch.int32))
    with pytest.raises(InputError, match="axis"):
        random_hadamard(torch.tensor(1.0))
