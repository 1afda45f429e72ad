"""Between a global amax and the global scale that files store: every mantissa, in torch and in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import deployed_amax, global_amax, global_scale, quantize_nvfp4
from fp4deploy.formats.nvfp4 import require_amax


@pytest.mark.parametrize("e4m3_max", [448, 256])
def test_the_deployed_amax_is_a_fixed_point(e4m3_max: int) -> None:
    amax = (torch.arange(2**23, dtype=torch.int32) | 0x3F800000).view(torch.float32)  # [1, 2); other binades alike
    once = deployed_amax(amax, e4m3_max)
    assert (once.view(torch.int32) - amax.view(torch.int32)).abs().max() == 1
    assert torch.equal(global_scale(once, e4m3_max), global_scale(amax, e4m3_max))
    assert torch.equal(deployed_amax(once, e4m3_max), once)


@pytest.mark.parametrize("e4m3_max", [448, 256])
def test_torch_and_numpy_agree_in_every_binade(e4m3_max: int) -> None:
    bits = np.random.default_rng(0).integers(1, 0x7F800000, 2000, dtype=np.uint32)
    for amax in bits.view(np.float32):
        with np.errstate(over="ignore"):
            scale = global_scale(amax, e4m3_max)
            back = global_amax(scale, e4m3_max)
        assert isinstance(scale, np.float32)
        assert isinstance(back, np.float32)
        assert scale == global_scale(torch.tensor(amax), e4m3_max).item() == np.float32(amax / np.float32(6 * e4m3_max))
        assert back == global_amax(torch.tensor(scale), e4m3_max).item()


@pytest.mark.parametrize("amax", [1e39, torch.tensor(1e39, dtype=torch.float64), torch.tensor([1.0, -1.0])])
def test_an_amax_that_float32_cannot_hold_is_refused(amax: object) -> None:
    with pytest.raises(InputError, match=r"a finite number from 0 on, and this one is (inf|-1)\."):
        require_amax(amax)


def test_an_amax_of_any_type_is_float32() -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for amax in (1 / 3, torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(1 / 3, dtype=torch.float32)):
        found = quantize_nvfp4(x, amax=amax)
        assert found.amax.dtype == torch.float32
        assert found.amax == torch.tensor(1 / 3, dtype=torch.float32)
