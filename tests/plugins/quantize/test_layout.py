"""Memory layouts as kernels see them: outer, K, inner along the contraction axis."""

from __future__ import annotations

import pytest
import torch

from fp4deploy.plugins.quantize.layout import CHANNELS_LAST, View, dense, view_along
from fp4deploy.plugins.quantize.weights import weight_fits


@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [
        ((2, 16, 3, 5), 1, View(30, 16, 1, True)),
        ((2, 16, 3, 5), 0, View(1, 2, 240, False)),
        ((2, 16, 3, 5, 7), 1, View(210, 16, 1, True)),
        ((2, 16, 3, 5, 7), 2, View(2, 3, 560, False)),
    ],
)
def test_channels_last_of_images_and_volumes(shape: tuple[int, ...], axis: int, expected: View) -> None:
    x = torch.randn(shape).contiguous(memory_format=CHANNELS_LAST[len(shape)])
    assert view_along(x, axis) == expected
    assert dense(x, axis, in_order=False)[0] is x, "nothing is copied"
    assert weight_fits(x)
