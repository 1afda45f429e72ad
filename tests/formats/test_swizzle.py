"""The 128x4 layout against its formula, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4deploy.errors import InputError
from fp4deploy.formats import quantize_nvfp4, swizzle_scales, unswizzle_scales


def index(r: int, kb: int, k: int) -> int:
    """NUMERICS section 8."""
    return (r % 32) * 16 + ((r // 32) % 4) * 4 + kb % 4 + (kb // 4) * 512 + (r // 128) * 512 * -(-k // 64)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.integers(1, 13), st.integers(0, 2**32))
def test_every_scale_stands_where_the_formula_says(rows: int, blocks: int, seed: int) -> None:
    scales = torch.randint(1, 256, (rows, blocks), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    flat = swizzle_scales(scales)
    places = torch.tensor([[index(r, kb, 16 * blocks) for kb in range(blocks)] for r in range(rows)])
    assert flat.shape == (-(-rows // 128) * 128 * -(-blocks // 4) * 4,)
    assert torch.equal(flat[places], scales)
    assert int((flat != 0).sum()) == rows * blocks, "the padding is zero"
    assert torch.equal(unswizzle_scales(flat, rows, blocks), scales)


def test_a_bijection_of_whole_tiles() -> None:
    places = {index(r, kb, 64 * 3) for r in range(256) for kb in range(12)}
    assert places == set(range(256 * 12))
    flat = torch.randint(0, 256, (256 * 12,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    assert torch.equal(swizzle_scales(unswizzle_scales(flat, 256, 12)), flat)


def test_e4m3_scales_of_a_quantised_tensor() -> None:
    q = quantize_nvfp4(torch.randn(130, 80, generator=torch.Generator().manual_seed(2)))
    flat = swizzle_scales(q.scales)
    assert flat.dtype == torch.float8_e4m3fn
    assert torch.equal(unswizzle_scales(flat, 130, 5).view(torch.uint8), q.scales.view(torch.uint8))
    assert torch.equal(swizzle_scales(q.scales.T.contiguous().T).view(torch.uint8), flat.view(torch.uint8))


@pytest.mark.parametrize("shape", [(0, 4), (5, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    flat = swizzle_scales(torch.empty(shape, dtype=torch.uint8))
    assert flat.numel() == 0
    assert unswizzle_scales(flat, *shape).shape == shape


def test_wrong_input_is_refused() -> None:
    with pytest.raises(InputError, match="one byte"):
        swizzle_scales(torch.ones(128, 4))
    with pytest.raises(InputError, match=r"\[rows, blocks\]"):
        swizzle_scales(torch.ones(2, 128, 4, dtype=torch.uint8))
    with pytest.raises(InputError, match="512 bytes; got 100"):
        unswizzle_scales(torch.ones(100, dtype=torch.uint8), 4, 4)
