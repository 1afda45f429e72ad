"""Memory layouts as kernels see them: outer, K, inner along the contraction axis."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fp4deploy.plugins.quantize.layout import CHANNELS_LAST, View, dense, place, view_along
from fp4deploy.plugins.quantize.maps import Columns, reads_all
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


def test_a_model_of_images_and_volumes_is_placed() -> None:
    """`Module.to` refuses parameters of another number of axes than the layout's."""
    model = nn.Sequential(nn.Conv3d(16, 16, 3), nn.Conv2d(16, 16, 3))
    place(model, torch.device("cpu"), torch.channels_last_3d)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert model[1].weight.is_contiguous()
    place(model, torch.device("cpu"), torch.contiguous_format)
    assert model[0].weight.is_contiguous()


def test_which_positions_the_columns_of_a_filter_read() -> None:
    """By counting, of every small geometry."""
    for count, stride, padding, dilation, width, size in itertools.product(
        (1, 2, 3), (1, 2), (0, 1, 2), (1, 2, 4), (1, 2, 5), (1, 2, 5, 7)
    ):
        columns = Columns(count, stride, padding, dilation, width)
        read = {at * stride - padding + tap * dilation for at in range(width) for tap in range(count)}
        assert reads_all(columns, size) == (read >= set(range(size))), (columns, size)


@pytest.mark.parametrize("hadamard", [0, 1])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last, torch.channels_last_3d])
def test_results_have_the_layout_of_what_is_quantised(layout: torch.memory_format, hadamard: int) -> None:
    """Of maps and of volumes; with the transform, which pads the axis, too. No kernel runs."""
    shape = (2, 24, 4, 5) if layout == torch.channels_last else (2, 24, 4, 5, 6)
    with FakeTensorMode():
        x = torch.empty(shape, device="cuda").to(memory_format=layout)
        amax = torch.empty((), device="cuda")
        values, _ = torch.ops.fp4deploy.quantize_along(x, 1, amax, None, [0, 448, 0, 0, hadamard, 0], False)
    assert values.shape == (2, 32 if hadamard else 24, *shape[2:])
    assert values.is_contiguous(memory_format=layout)
