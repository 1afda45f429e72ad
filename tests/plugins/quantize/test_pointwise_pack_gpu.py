"""Elementwise layers in one pass on a GPU: the bytes of torch's operators one by one."""

from __future__ import annotations

import pytest
import torch

from fp4deploy.plugins import available
from fp4deploy.plugins.quantize.norm_pack import OutputForm
from fp4deploy.plugins.quantize.pointwise_pack import ACTIVATIONS, Pointwise, apply_kernels, apply_reference
from tests.plugins.quantize.test_norm_pack_gpu import amax, feature_map, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not available(), reason="no NVIDIA GPU that kernels run on"),
]

SHAPES = [(3, 7, 9, 64), (1, 1, 1, 16), (2, 6, 4, 48), (1, 64, 80, 128), (1, 2, 3, 2048)]


def affine(items: int, channels: int, seed: int) -> torch.Tensor:
    return torch.randn(items, 2, channels, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("branch", ["none", "plain", "affine"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bytes_of_the_reference(activation: str, branch: str, dtype: torch.dtype) -> None:
    for number, shape in enumerate(SHAPES):
        x, channels = feature_map(shape, dtype), shape[-1]
        other = None if branch == "none" else feature_map(shape, dtype).flip(1).contiguous()
        second = affine(1, channels, 4) if branch == "affine" else None
        first = (None, affine(1, channels, 3), affine(shape[0], channels, 3))[number % 3]
        forms = ([OutputForm(amax(3.0))], [OutputForm(), OutputForm(amax(2.0))], [OutputForm(amax(9.0))] * 2)[
            number % 3
        ]
        work = Pointwise(first, other, second, activation, 0.1)
        got, reference = apply_kernels(x, work, forms), apply_reference(x, work, forms)
        for one, expected in zip(got, reference, strict=True):
            same(one, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 65504.0, 6e-8, -0.0])
def test_hard_values(value: float) -> None:
    x = feature_map((1, 4, 4, 32))
    x[0, 1, 2, 5] = value
    for activation in ACTIVATIONS:
        work = Pointwise(None, None, None, activation, 0.1)
        forms = [OutputForm(amax(3.0)), OutputForm()]
        for one, expected in zip(apply_kernels(x, work, forms), apply_reference(x, work, forms), strict=True):
            same(one, expected)


@pytest.mark.parametrize("activation", ["", "leaky_relu", "silu"])
@pytest.mark.parametrize("branch", ["none", "plain", "affine"])
def test_pooled_forms(activation: str, branch: str) -> None:
    """The maximum of 2 x 2 pixels, with y itself and alone; of -0 and 0 the first."""
    for number, shape in enumerate([(3, 8, 10, 64), (1, 2, 2, 16), (2, 6, 4, 48), (1, 64, 80, 128), (1, 2, 4, 2048)]):
        x, channels = feature_map(shape), shape[-1]
        x[0, :2, :2] = torch.tensor([[-0.0, 0.0], [0.0, -0.0]], device="cuda")[..., None]
        other = None if branch == "none" else feature_map(shape).flip(1).contiguous()
        second = affine(1, channels, 4) if branch == "affine" else None
        first = (None, affine(1, channels, 3), affine(shape[0], channels, 3))[number % 3]
        work, small = Pointwise(first, other, second, activation, 0.1), OutputForm(amax(2.0), pooled=True)
        forms = (
            [OutputForm(amax(3.0)), small],
            [OutputForm(pooled=True)],
            [OutputForm(), OutputForm(amax(3.0)), OutputForm(pooled=True), small, OutputForm(amax(9.0), pooled=True)],
        )
        for each in forms:
            for one, expected in zip(apply_kernels(x, work, each), apply_reference(x, work, each), strict=True):
                same(one, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 65504.0])
def test_hard_values_in_pooled_forms(value: float) -> None:
    x = feature_map((1, 4, 4, 32))
    x[0, 1, 2, 5] = value
    x[0, 2:, :2, 3] = value
    forms = [OutputForm(amax(3.0), pooled=True), OutputForm(pooled=True)]
    work = Pointwise(None, None, None, "leaky_relu", 0.1)
    for one, expected in zip(apply_kernels(x, work, forms), apply_reference(x, work, forms), strict=True):
        same(one, expected)
