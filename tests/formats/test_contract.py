"""Every option of NVFP4 and MXFP4 against the scalar transcription of the contract, where near misses show."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4deploy.formats import (
    FourOverSix,
    Mxfp4Tensor,
    Nvfp4Tensor,
    fake_quantize_mxfp4,
    fake_quantize_nvfp4,
    quantize_mxfp4,
    quantize_nvfp4,
    random_hadamard,
    unpack_codes,
)
from tests.formats.hard_cases import as_numpy, e4m3_ties, generator, hard_cases, near_ties, with_amax
from tests.formats.scalar_contract import CHOICES, Choice, Quantized, hadamard, mxfp4, nvfp4, random_bytes
from tests.samples import sample

CASES = list(hard_cases())
SEED, OFFSET = 0x0123456789ABCDEF, 77


def four_over_six(choice: Choice | None) -> FourOverSix | None:
    return None if choice is None else FourOverSix(choice.metric, choice.e4m3_max, choice.fast)


def check(found: Nvfp4Tensor | Mxfp4Tensor, expected: Quantized) -> None:
    """Bytes and values; the first row that differs is named."""
    scales = found.scales.view(torch.uint8).numpy()
    for row in range(len(scales)):
        assert scales[row].tolist() == expected.scales[row].tolist(), f"scales of row {row}"
        assert unpack_codes(found.codes)[row].tolist() == expected.codes[row].tolist(), f"codes of row {row}"
    columns = found.shape[-1]
    np.testing.assert_array_equal(found.dequantize().numpy(), expected.values[:, :columns])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", ["tensor", "row", "static"])
def test_blocks(name: str, rows: str) -> None:
    x = hard_cases()[name]
    amax = 3.0 if rows == "static" else None
    expected = nvfp4(as_numpy(x), 1, amax, rows == "row")
    check(quantize_nvfp4(x, amax=amax, row_scaled=rows == "row"), expected)


@pytest.mark.parametrize("name", CASES)
def test_tiles(name: str) -> None:
    x = hard_cases()[name]
    check(quantize_nvfp4(x, "2d"), nvfp4(as_numpy(x), 16))
    check(quantize_nvfp4(x[:, :19].T, "2d"), nvfp4(as_numpy(x[:, :19].T), 16))


@pytest.mark.parametrize("choice", sample(CHOICES, every=3), ids=str)
def test_four_over_six(choice: Choice) -> None:
    for name, x in hard_cases().items():
        x = x[:16] if name in ("powers of two", "1.5 powers of two", "e4m3 ties") else x[:32]
        for rows in ("tensor", "row"):
            found = quantize_nvfp4(x, row_scaled=rows == "row", four_over_six=four_over_six(choice))
            check(found, nvfp4(as_numpy(x), 1, None, rows == "row", choice))
        check(quantize_nvfp4(x, "2d", four_over_six=four_over_six(choice)), nvfp4(as_numpy(x), 16, choice=choice))


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_four_over_six_where_the_candidates_nearly_tie(choice: Choice) -> None:
    chosen = FourOverSix(choice.metric, choice.e4m3_max, choice.fast)
    blocks = near_ties(chosen)
    check(quantize_nvfp4(blocks, amax=8.0, four_over_six=chosen), nvfp4(as_numpy(blocks), 1, 8.0, choice=choice))
    tiles = near_ties(chosen, "2d", 4).view(-1, 16)
    check(quantize_nvfp4(tiles, "2d", 8.0, four_over_six=chosen), nvfp4(as_numpy(tiles), 16, 8.0, choice=choice))


@pytest.mark.parametrize("amax", [1e-38, 1e-30, 1.0, 6.0, 1536.0, 2688.0, 1e30, 3e38, 1e-44])
def test_a_static_amax_far_from_the_data(amax: float) -> None:
    x = torch.cat([hard_cases()[name][:16] for name in ("normal", "1e-30", "1e30", "subnormal", "heavy tails")])
    check(quantize_nvfp4(x, amax=amax), nvfp4(as_numpy(x), 1, amax))
    for choice in CHOICES[::3]:
        check(
            quantize_nvfp4(x, amax=amax, four_over_six=four_over_six(choice)),
            nvfp4(as_numpy(x), 1, amax, False, choice),
        )


def test_e4m3_ties_go_to_the_even_byte() -> None:
    x = with_amax(e4m3_ties())
    q = quantize_nvfp4(x, amax=2688.0)
    check(q, nvfp4(as_numpy(x), 1, 2688.0))
    ties = q.scales.view(torch.uint8)[len(e4m3_ties()) // 3 : 2 * len(e4m3_ties()) // 3, 0]
    assert (ties % 2 == 0).all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rule", ["floor", "ceil"])
def test_mxfp4(name: str, rule: str) -> None:
    x = hard_cases()[name]
    expected = mxfp4(as_numpy(x), rule)
    check(quantize_mxfp4(x, rule), expected)
    np.testing.assert_array_equal(fake_quantize_mxfp4(x.T, 0, rule).T.numpy(), expected.values)


@pytest.mark.parametrize("columns", [32, 17, 50])
@pytest.mark.parametrize("amax", [None, 1.25])
def test_stochastic_rounding(columns: int, amax: float | None) -> None:
    x = torch.randn(19, columns, generator=generator(columns))
    bits = random_bytes(19, columns, SEED, OFFSET)
    found = quantize_nvfp4(x, amax=amax, rounding="stochastic", seed=SEED, offset=OFFSET)
    check(found, nvfp4(as_numpy(x), 1, amax, random=bits))
    found = quantize_nvfp4(x, "2d", amax, rounding="stochastic", seed=SEED, offset=OFFSET)
    check(found, nvfp4(as_numpy(x), 16, amax, random=bits))
    for rule in ("floor", "ceil"):
        bits = random_bytes(19, columns, SEED, OFFSET, 32)
        check(quantize_mxfp4(x, rule, "stochastic", SEED, OFFSET), mxfp4(as_numpy(x), rule, bits))


@pytest.mark.parametrize("name", CASES)
def test_the_hadamard_transform(name: str) -> None:
    x = hard_cases()[name]
    with np.errstate(invalid="ignore", over="ignore"):
        expected = hadamard(as_numpy(x).reshape(len(x), 2, 16)).reshape(len(x), 32)
    found = random_hadamard(x)
    np.testing.assert_array_equal(found.numpy(), expected)
    check(quantize_nvfp4(found), nvfp4(expected))


@pytest.mark.parametrize("name", CASES)
def test_fake_quantise_gives_the_values_of_the_contract(name: str) -> None:
    x = hard_cases()[name]
    values, inside = fake_quantize_nvfp4(x.T, (0,))
    np.testing.assert_array_equal(values.T.numpy(), nvfp4(as_numpy(x)).values)
    finite = x.isfinite().view(-1, 2, 16).all(-1).repeat_interleave(16).view(x.shape)
    assert torch.equal(inside.T & ~finite, torch.zeros_like(finite))


def test_thousands_of_random_blocks_in_random_configurations() -> None:
    rng = np.random.default_rng(5)
    for _ in range(250):
        rows, columns = int(rng.integers(1, 20)), int(rng.integers(1, 70))
        x = torch.tensor(rng.standard_t(rng.choice([1.0, 3.0, 30.0]), (rows, columns)) * 10.0 ** rng.integers(-36, 36))
        x = x.clamp(-3e38, 3e38).to(rng.choice([torch.float32, torch.bfloat16, torch.float16]))
        choice = rng.choice([None, *CHOICES])
        block, scaled = rng.choice(["1d", "2d", "rows"]), float(x.float().abs().nan_to_num(0, 0).max())
        amax = scaled * float(rng.choice([0.3, 0.999, 1.001, 7.0])) if block != "rows" and rng.random() < 0.4 else None
        found = quantize_nvfp4(x, "2d" if block == "2d" else "1d", amax, block == "rows", four_over_six(choice))
        check(found, nvfp4(as_numpy(x), 16 if block == "2d" else 1, amax, block == "rows", choice))
        rule = str(rng.choice(["floor", "ceil"]))
        check(quantize_mxfp4(x, rule), mxfp4(as_numpy(x), rule))
