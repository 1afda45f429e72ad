"""Pooling windows and nearest resizing of packed maps on a GPU: the bits of torch's operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fp4deploy.formats import quantize_nvfp4
from fp4deploy.plugins import available
from fp4deploy.plugins.quantize.window import max_pool_kernel, resize_kernel
from tests.plugins.quantize.test_norm_pack_gpu import feature_map

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not available(), reason="no NVIDIA GPU that kernels run on"),
]

WINDOWS = (
    ((3, 3), (2, 2), (1, 1), (1, 1), False),
    ((2, 2), (2, 2), (0, 0), (1, 1), True),
    ((5, 1), (1, 3), (2, 0), (1, 1), False),
    ((2, 3), (1, 2), (1, 1), (3, 2), True),
)


@pytest.mark.parametrize("how", WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_maximum_over_windows(how: Any, dtype: torch.dtype) -> None:
    for shape in ((3, 7, 9, 64), (1, 5, 5, 8), (2, 16, 4, 48), (1, 64, 80, 128)):
        x = feature_map(shape, dtype).permute(0, 3, 1, 2)
        x[0, :4, :2, :3], x[0, 1, 2, 3], x[-1, 2, :2, :2] = 0.0, float("nan"), float("-inf")
        x[0, :4, 0, 1] = -0.0
        torch.full((1 << 22,), float("nan"), device="cuda")
        found, expected = max_pool_kernel(x, *how), F.max_pool2d(x, *how)
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(
            *(
                each.nan_to_num(nan=3.0).view(torch.int16)
                for each in (found, expected.contiguous(memory_format=torch.channels_last))
            )
        )


@pytest.mark.parametrize(
    ("size", "scale"), [(None, [2.0, 2.0]), (None, [1.7, 0.6]), ([7, 133], None), ([1, 1], None), (None, [3.0, 2.5])]
)
@pytest.mark.parametrize("exact", [False, True])
def test_nearest_resizing(size: Any, scale: Any, exact: bool) -> None:
    for shape in ((3, 7, 9, 64), (1, 5, 5, 16), (2, 44, 60, 48)):
        x = quantize_nvfp4(feature_map(shape, torch.float16))
        torch.full((1 << 22,), float("nan"), device="cuda")
        found = resize_kernel(x, size, scale, exact)
        parts = [part.permute(0, 3, 1, 2) for part in (x.codes, x.scales.view(torch.uint8))]
        for one, part in zip((found.codes, found.scales.view(torch.uint8)), parts, strict=True):
            wanted = F.interpolate(part, size, scale, "nearest-exact" if exact else "nearest").permute(0, 2, 3, 1)
            assert torch.equal(one, wanted)
        assert found.shape == (*found.codes.shape[:-1], shape[-1])
