"""The reference gives the same bytes on a CUDA tensor as on a CPU tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4deploy.formats import (
    FourOverSix,
    fake_quantize_nvfp4,
    quantize_mxfp4,
    quantize_nvfp4,
    random_bytes,
    random_hadamard,
    swizzle_scales,
)
from tests.formats.hard_cases import hard_cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

OPTIONS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "static": {"amax": 1.5},
    "rows": {"row_scaled": True},
    "stochastic": {"rounding": "stochastic", "seed": 2**63 + 5, "offset": 9},
    **{
        str(choice): {"four_over_six": choice}
        for choice in (FourOverSix(m, e, f) for m in ("mae", "mse") for e in (256, 448) for f in (False, True))
    },
}


@pytest.mark.parametrize("magnitude", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("block", ["1d", "2d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_same_bytes_on_both_devices(magnitude: float, block: str, dtype: torch.dtype) -> None:
    x = (torch.randn(257, 1025, generator=torch.Generator().manual_seed(0)) * magnitude).to(dtype)
    here, there = quantize_nvfp4(x, block=block), quantize_nvfp4(x.cuda(), block=block)
    assert torch.equal(here.codes, there.codes.cpu())
    assert torch.equal(here.scales.view(torch.uint8), there.scales.view(torch.uint8).cpu())
    assert torch.equal(here.dequantize(dtype).nan_to_num(), there.dequantize(dtype).cpu().nan_to_num())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("amax", [None, 1.5])
def test_same_fake_quantised_activations(layout: torch.memory_format, amax: float | None) -> None:
    x = torch.randn(3, 40, 9, 11, generator=torch.Generator().manual_seed(1)).to(memory_format=layout)
    here, inside = fake_quantize_nvfp4(x, (1,), amax)
    there, inside_there = fake_quantize_nvfp4(x.cuda(), (1,), amax)
    assert torch.equal(here, there.cpu())
    assert torch.equal(inside, inside_there.cpu())


@pytest.mark.parametrize("options", OPTIONS)
def test_same_bytes_of_hard_cases(options: str) -> None:
    for name, x in hard_cases().items():
        for block in ("1d",) if options == "rows" else ("1d", "2d"):
            here = quantize_nvfp4(x, block, **OPTIONS[options])
            there = quantize_nvfp4(x.cuda(), block, **OPTIONS[options])
            assert torch.equal(here.codes, there.codes.cpu()), name
            assert torch.equal(here.scales.view(torch.uint8), there.scales.view(torch.uint8).cpu()), name
            assert torch.equal(here.dequantize().nan_to_num(1), there.dequantize().cpu().nan_to_num(1)), name


def test_same_bytes_of_the_rest() -> None:
    for name, x in hard_cases().items():
        for rule in ("floor", "ceil"):
            for options in ({}, {"rounding": "stochastic", "seed": 3}):
                here, there = (quantize_mxfp4(t, rule, **options) for t in (x, x.cuda()))
                assert torch.equal(here.codes, there.codes.cpu()), name
                assert torch.equal(here.scales, there.scales.cpu()), name
        here, there = random_hadamard(x), random_hadamard(x.cuda()).cpu()
        assert torch.equal(here.nan_to_num(1), there.nan_to_num(1)), name
    shape = torch.Size((5, 40))
    assert torch.equal(random_bytes(shape, -1, 7, 8), random_bytes(shape, -1, 7, 8, device="cuda").cpu())
    scales = torch.arange(300 * 5).remainder(256).to(torch.uint8).view(300, 5)
    assert torch.equal(swizzle_scales(scales), swizzle_scales(scales.cuda()).cpu())
