"""The torch operator of convolutions: values, layouts and what a compiler is told of its result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4deploy.plugins.gemm.convolution import operators  # noqa: F401 - registers it

OPERATOR = torch.ops.fp4deploy.convolution.default
CASES: list[tuple[tuple[int, ...], tuple[int, ...], Any]] = [  # x, weight, stride ... transposed, relu
    ((2, 6, 9, 7), (4, 6, 3, 3), ([1, 1], [1, 1], [1, 1], [0, 0], 1, False, False)),
    ((1, 6, 9, 7), (4, 3, 3, 1), ([2, 1], [1, 0], [1, 1], [0, 0], 2, False, True)),
    ((1, 8, 5, 5), (8, 1, 3, 3), ([1, 1], [2, 2], [2, 2], [0, 0], 8, False, False)),
    ((2, 6, 4, 5), (6, 3, 2, 2), ([2, 2], [0, 0], [1, 1], [1, 0], 1, True, True)),
    ((2, 4, 12), (3, 4, 5), ([2], [2], [1], [0], 1, False, False)),
    ((1, 4, 5, 6, 7), (3, 4, 3, 3, 3), ([1, 1, 2], [1, 1, 1], [1, 1, 1], [0, 0, 0], 1, False, False)),
]


@pytest.mark.parametrize(("shape", "weight", "places"), CASES)
def test_values_and_layout(shape: tuple[int, ...], weight: tuple[int, ...], places: Any) -> None:
    x, w = torch.randn(shape), torch.randn(weight)
    stride, padding, dilation, beyond, groups, transposed, relu = places
    bias = torch.randn(weight[1] * groups if transposed else weight[0])
    expected = torch.convolution(x, w, bias, stride, padding, dilation, transposed, beyond, groups)
    pixels = x.movedim(1, -1)
    y = OPERATOR(pixels, w, bias, *places)
    torch.testing.assert_close(y.movedim(-1, 1), expected.relu() if relu else expected)
    told = OPERATOR(pixels.to("meta"), w.to("meta"), bias.to("meta"), *places)
    assert (told.shape, told.stride(), told.dtype) == (y.shape, y.stride(), y.dtype)
    assert y.is_contiguous()


@pytest.mark.parametrize(("shape", "weight", "places"), CASES)
def test_what_torch_checks_of_an_operator(shape: tuple[int, ...], weight: tuple[int, ...], places: Any) -> None:
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        OPERATOR, (torch.randn(shape).movedim(1, -1), torch.randn(weight), None, *places), test_utils=tests
    )


def test_one_image_with_any_stride_of_its_batch_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, ...]] = []
    convolution = torch._convolution
    monkeypatch.setattr(
        torch, "_convolution", lambda x, *a, **b: read.append((x.data_ptr(), *x.stride())) or convolution(x, *a, **b)
    )
    pixels = torch.randn(6 * 5 * 4)
    x = pixels.as_strided((1, 6, 5, 4), (7, 20, 4, 1))
    OPERATOR(x, torch.randn(3, 4, 3, 3), None, *CASES[0][2])
    assert read == [(x.data_ptr(), 120, 1, 20, 4)]
