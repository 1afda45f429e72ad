"""The torch operator of convolutions: values, layouts and what a compiler is told of its result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4deploy.plugins.gemm.convolution import operators  # noqa: F401 - registers it

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
OPERATOR = torch.ops.fp4deploy.convolution.default
WIDE = torch.ops.fp4deploy.wide_convolution.default
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


POINTS = ((1, 12, 5), (4, 12, 1), ([1], [0], [1], [0], 1, False, False))  # a linear layer of five rows


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(("shape", "weight", "places"), [*CASES, POINTS])
def test_wide_sums_are_exact(shape: tuple[int, ...], weight: tuple[int, ...], places: Any, device: str) -> None:
    """Codes of eight bits: in every order, and beyond what FP16 and BF16 hold."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-128, 128, each, generator=generator).double() for each in (shape, weight))
    stride, padding, dilation, beyond, groups, transposed, _ = places
    expected = torch.convolution(x, w, None, stride, padding, dilation, transposed, beyond, groups)
    pixels, filters = (each.to(device, torch.bfloat16) for each in (x.movedim(1, -1), w))
    y = WIDE(pixels, filters, *places[:-1])
    assert torch.equal(y.movedim(-1, 1).double().cpu(), expected)
    told = WIDE(pixels.to("meta"), filters.to("meta"), *places[:-1])
    assert (told.shape, told.stride(), told.dtype) == (y.shape, y.stride(), torch.float32)


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
