"""The packed NVFP4 tensor on awkward input: ragged, not finite, never calibrated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import FourOverSix, fake_quantize_nvfp4, quantize_nvfp4, unpack_codes
from fp4deploy.plugins.quantize import dispatch
from tests.formats.hard_cases import generator

CHOICES = [None, FourOverSix(), FourOverSix("mse", 448, True)]


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("block", ["1d", "2d"])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_ragged_axis_is_padded_with_zeros(columns: int, block: str, choice: FourOverSix | None) -> None:
    x = torch.randn(19, columns, generator=generator(columns))
    q = quantize_nvfp4(x, block=block, four_over_six=choice)
    blocks = -(-columns // 16)
    assert q.codes.shape == (19, 8 * blocks)
    assert q.scales.shape == (19, blocks)
    padded = torch.zeros(32, 16 * blocks)
    padded[:19, :columns] = x
    whole = quantize_nvfp4(padded, block=block, four_over_six=choice)
    assert torch.equal(whole.codes[:19], q.codes)
    assert torch.equal(whole.dequantize()[:19, :columns], q.dequantize())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("row_scaled", [False, True])
def test_a_non_finite_block_decodes_to_nan_and_harms_no_other(
    poison: float, choice: FourOverSix | None, row_scaled: bool
) -> None:
    x = torch.randn(4, 32, generator=generator(5))
    dirty, zeroed = x.clone(), x.clone()
    dirty[1, 3], zeroed[1, 3] = poison, 0
    q = quantize_nvfp4(dirty, row_scaled=row_scaled, four_over_six=choice)
    assert q.scales.view(torch.uint8)[1, 0] == 0x7F
    assert unpack_codes(q.codes)[1, :16].sum() == 0
    assert q.dequantize()[1, :16].isnan().all()
    clean = quantize_nvfp4(zeroed, row_scaled=row_scaled, four_over_six=choice)
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[1, :16] = False
    assert torch.equal(q.amax, clean.amax)
    assert torch.equal(q.dequantize()[mask], clean.dequantize()[mask])
    fake, inside = fake_quantize_nvfp4(dirty, row_scaled=row_scaled, four_over_six=choice)
    assert torch.equal(fake.nan_to_num(9), q.dequantize().nan_to_num(9))
    assert not inside[1, :16].any()


def test_a_non_finite_tile_is_nan_as_a_whole() -> None:
    x = torch.randn(32, 32, generator=generator(6))
    x[20, 3] = torch.inf
    q = quantize_nvfp4(x, "2d")
    expected = torch.zeros(32, 32, dtype=torch.bool)
    expected[16:, :16] = True
    assert torch.equal(q.dequantize().isnan(), expected)
    assert (q.scales.view(torch.uint8)[16:, 0] == 0x7F).all()


def test_nothing_finite_and_nothing_but_zeros_beside_it() -> None:
    x = torch.full((2, 32), torch.nan)
    x[1, :16] = 0
    q = quantize_nvfp4(x)
    assert q.amax == 0
    assert q.scales.view(torch.uint8).tolist() == [[0x7F, 0x7F], [0, 0x7F]]
    assert q.dequantize()[1, :16].tolist() == [0.0] * 16


def test_float64_beyond_float32_is_not_finite() -> None:
    x = torch.ones(2, 16, dtype=torch.float64)
    x[0, 0] = 1e300
    q = quantize_nvfp4(x)
    assert q.amax == 1
    assert q.dequantize()[0].isnan().all()
    assert q.dequantize()[1].tolist() == [1.0] * 16


def test_a_static_amax_of_zero_gives_zeros_and_a_learned_one_of_nan_gives_nan() -> None:
    q = quantize_nvfp4(torch.ones(2, 16), amax=0.0)
    assert q.codes.sum() == 0
    assert q.scales.view(torch.uint8).sum() == 0
    assert fake_quantize_nvfp4(torch.ones(2, 16), amax=0.0)[0].abs().sum() == 0
    assert fake_quantize_nvfp4(torch.ones(2, 16), amax=torch.tensor(float("nan")))[0].isnan().all()


def test_a_static_amax_of_the_tensor_itself_changes_nothing() -> None:
    x = torch.randn(8, 48, generator=generator(7))
    for choice in CHOICES:
        dynamic = quantize_nvfp4(x, four_over_six=choice)
        static = quantize_nvfp4(x, amax=dynamic.amax, four_over_six=choice)
        assert torch.equal(dynamic.codes, static.codes)
        assert torch.equal(dynamic.dequantize(), static.dequantize())


def test_what_exceeds_a_static_amax_saturates_at_it() -> None:
    x = torch.tensor([[0.5] * 15 + [100.0], [-1e30] * 16])
    fake, inside = fake_quantize_nvfp4(x, amax=2.0)
    torch.testing.assert_close(fake[:, -1], torch.tensor([2.0, -2.0]), rtol=1e-6, atol=0)
    assert inside.tolist() == [[True] * 15 + [False], [False] * 16]


def test_requiring_a_gradient_does_not_matter() -> None:
    x = torch.randn(4, 16, generator=generator(8), requires_grad=True)
    fake, _ = fake_quantize_nvfp4(x)
    assert not fake.requires_grad
    assert torch.equal(fake, quantize_nvfp4(x).dequantize())


def test_wrong_arguments_name_the_valid_values() -> None:
    with pytest.raises(InputError, match="1d, 2d"):
        quantize_nvfp4(torch.ones(16, 16), block="3d")
    with pytest.raises(InputError, match="floating"):
        quantize_nvfp4(torch.ones(16, dtype=torch.int32))
    with pytest.raises(InputError, match="axes"):
        quantize_nvfp4(torch.ones(16), block="2d")


UNQUANTIZABLE = {
    "None": (None, "not NoneType"),
    "list": ([1.0] * 16, "not list"),
    "numpy": (np.ones(16, np.float32), "not ndarray"),
    "FP8": (torch.ones(16).to(torch.float8_e4m3fn), "not torch.float8_e4m3fn"),
    "complex": (torch.ones(16, dtype=torch.complex64), "not torch.complex64"),
    "bool": (torch.ones(16, dtype=torch.bool), "not torch.bool"),
    "sparse": (torch.eye(16).to_sparse(), "not sparse_coo ones"),
    "rows": (torch.eye(16).to_sparse_csr(), "not sparse_csr ones"),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("case", UNQUANTIZABLE)
@pytest.mark.parametrize("function", [quantize_nvfp4, dispatch.quantize_nvfp4, dispatch.quantize_mxfp4])
def test_what_is_no_dense_tensor_of_numbers_is_refused(case: str, function: Any) -> None:
    x, cause = UNQUANTIZABLE[case]
    with pytest.raises(InputError, match=rf"FP4 quantises .*tensors.*{cause}"):
        function(x)


@pytest.mark.parametrize("function", [quantize_nvfp4, dispatch.quantize_nvfp4])
def test_an_amax_is_a_finite_number_from_zero_on(function: Any) -> None:
    x = torch.randn(4, 16)
    for number in (-1.0, float("nan"), float("inf"), -float("inf")):
        for amax in (number, np.float32(number), torch.tensor(number), torch.tensor([number])):
            with pytest.raises(InputError, match=rf"finite number from 0 on, and this one is {number:g}"):
                function(x, amax=amax)
    with pytest.raises(InputError, match="this one is -3"):
        function(x, amax=torch.tensor([1.0, -3.0, 2.0, 0.0]), row_scaled=True)
    for amax in ("6", {"amax": 6}, object()):
        with pytest.raises(
            InputError, match=r"A global amax is a number or a tensor of numbers, not (str|dict|object)"
        ):
            function(x, amax=amax)
    assert not function(x, amax=0.0).dequantize().any()
