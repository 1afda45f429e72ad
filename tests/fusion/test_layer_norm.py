"""LayerNorm and quantisation as one operator: against the operators one by one, and what a compiler is told."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fp4deploy.formats import quantize_nvfp4
from fp4deploy.fusion.layer_norm import layer_norm_values
from fp4deploy.fusion.values import scale_of, values
from fp4deploy.plugins.quantize import layer_norm

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPU])]
SHAPES = [(1, 16), (3, 5, 48), (7, 96), (2, 33, 384), (1, 9, 768), (5, 2048)]
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def given(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Given:
    torch.manual_seed(shape[-1])
    x, other = (torch.randn(shape).to(device, dtype) * 3 for _ in range(2))
    return x, other, torch.randn(shape[-1]).to(device), torch.randn(shape[-1]).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exponent", [-12, None])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_of_the_norm_that_it_gives(
    shape: tuple[int, ...], exponent: int | None, dtype: torch.dtype, device: str
) -> None:
    """Sums are those of torch; the norm is near float64; values are, bit for bit, those of the norm."""
    x, other, weight, bias = given(shape, dtype, device)
    scale = scale_of(torch.tensor(4.0, device=device), exponent)
    total, y, q = layer_norm_values(x, other, weight, bias, scale, 1e-5, True)
    assert torch.equal(total, x + other)
    exact = F.layer_norm(total.double(), shape[-1:], weight.double(), bias.double(), 1e-5)
    assert (y.double() - exact).abs().max() <= 2.0 * torch.finfo(dtype).eps * exact.abs().max()
    assert torch.equal(q, values(y, scale, -1, dtype))
    if exponent is None:
        assert torch.equal(q, quantize_nvfp4(y, amax=scale.amax).dequantize(dtype))
    alone = layer_norm_values(total, None, weight, bias, scale, 1e-5, False)
    assert alone[0].numel() == alone[1].numel() == 0
    assert torch.equal(alone[2], q)


@pytest.mark.parametrize("device", DEVICES)
def test_awkward_numbers(device: str) -> None:
    """NaN and Inf make their row NaN; an amax of 0 gives 0; without weight and bias; no rows."""
    x, _, _, _ = given((4, 48), torch.float16, device)
    x[1, 3], x[2, 40] = float("nan"), float("inf")
    scale = scale_of(torch.tensor(2.0, device=device), -12)
    _, y, q = layer_norm_values(x, None, None, None, scale, 1e-5, True)
    assert y.isnan().any(-1).tolist() == q.isnan().any(-1).tolist() == [False, True, True, False]
    nothing = scale_of(torch.tensor(0.0, device=device), -12)
    assert not layer_norm_values(x[:1], None, None, None, nothing, 1e-5, False)[2].any()
    assert layer_norm_values(x[:0], None, None, None, scale, 1e-5, True)[2].shape == (0, 48)


def test_what_torch_checks_of_an_operator() -> None:
    x, other, weight, bias = given((2, 5, 48), torch.float16, "cpu")
    scale = scale_of(torch.tensor(4.0), -12)
    operator = torch.ops.fp4deploy.layer_norm_values.default
    for second, plain in ((other, True), (None, False)):
        arguments = (x, second, weight, bias, scale.sixth, scale.encode, scale.amax, 1e-5, -12, plain)
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_rows_are_divided_among_threads() -> None:
    for width in range(16, layer_norm.MAX_WIDTH + 1, 16):
        lanes, steps = layer_norm._division(width)
        assert 2 <= lanes <= 32
        assert (lanes * steps - lanes) * 8 < width <= lanes * steps * 8
        assert lanes == 2 or lanes // 2 * 8 < width  # half of them would not do
