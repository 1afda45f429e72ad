"""The reference gives the same bytes on a CUDA tensor as on a CPU tensor."""

from __future__ import annotations

import pytest
import torch

from fp4deploy.formats import fake_quantize_nvfp4, quantize_nvfp4

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


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
