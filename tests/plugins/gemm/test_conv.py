"""fp4_conv2d against torch's convolution of the decoded operands, in every layout, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fp4deploy.errors import InputError
from fp4deploy.formats import FourOverSix, Nvfp4Tensor, quantize_nvfp4
from fp4deploy.plugins import fp4_conv2d, fp4_quantize

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NCHW": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "holes": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every other": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
    "turned": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "from a row": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def decoded(x: torch.Tensor, amax: float | None = None, **options: Any) -> torch.Tensor:
    """Quantised along the channels and decoded, NCHW in float64."""
    packed = quantize_nvfp4(x.permute(0, 2, 3, 1), amax=amax, **options)
    return packed.dequantize(torch.float64).permute(0, 3, 1, 2)


def close(found: Any, expected: torch.Tensor, limit: float = 1e-3) -> None:
    assert isinstance(found, torch.Tensor)
    assert found.shape == expected.shape
    assert float((found.double() - expected).norm()) <= limit * float(expected.norm())


@pytest.mark.parametrize("size", [1, 3, 5, 7])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2}, {"padding": 3}, {"dilation": 2, "padding": 4, "stride": 3}], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_convolution_of_the_decoded_operands(layout: str, options: dict[str, int], size: int) -> None:
    x = LAYOUTS[layout](randn(2, 20, 13, 15, dtype=torch.float16))
    weight, bias = randn(6, 20, size, size, seed=1), randn(6, seed=2)
    expected = F.conv2d(decoded(x), decoded(weight), bias.double(), **options)
    y = fp4_conv2d(x, weight, bias, **options)
    close(y, expected)
    assert isinstance(y, torch.Tensor)
    assert y.dtype == torch.float16
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(fp4_conv2d(x, fp4_quantize(weight, bias), relu=True, **options), y.relu())  # type: ignore[arg-type]


@pytest.mark.parametrize(("channels", "outputs"), [(1, 1), (3, 17), (16, 16), (33, 4), (64, 40)])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_channels_and_batches(channels: int, outputs: int, batch: int) -> None:
    x, weight = randn(batch, channels, 5, 6), randn(outputs, channels, 3, 3, seed=1)
    expected = F.conv2d(decoded(x), decoded(weight), padding=1)
    close(fp4_conv2d(x, weight, padding=1), expected)
    close(fp4_conv2d(x, weight, padding=1, dtype=torch.bfloat16), expected, 4e-3)


def test_weights_in_every_form_and_amaxes() -> None:
    x, weight, bias = randn(2, 20, 6, 7), randn(8, 20, 3, 3, seed=1), randn(8, seed=2)
    better = FourOverSix()
    expected = fp4_conv2d(x, weight, bias, padding=1, four_over_six=better)
    cache = fp4_quantize(weight, bias, better)
    image = quantize_nvfp4(x.permute(0, 2, 3, 1))
    for y in (
        fp4_conv2d(x, cache, padding=1),
        fp4_conv2d(x, cache.weight, bias, padding=1),
        fp4_conv2d(image, cache, padding=(1, 1), stride=[1, 1]),
        fp4_conv2d(image, weight, bias, padding=1, four_over_six=better),
    ):
        assert torch.equal(y, expected)  # type: ignore[arg-type]
    static = F.conv2d(decoded(x, 1.25), decoded(weight, four_over_six=better), bias.double(), padding=1)
    for amax in (1.25, torch.tensor(1.25)):
        close(fp4_conv2d(x, cache, padding=1, input_amax=amax), static)


def test_packed_in_and_packed_out() -> None:
    x, first, second = randn(2, 20, 6, 7), randn(24, 20, 3, 3, seed=1), randn(5, 24, 1, 1, seed=2)
    plain = fp4_conv2d(x, first, padding=1, relu=True)
    packed = fp4_conv2d(x, first, padding=1, relu=True, out_amax=2.0)
    assert isinstance(plain, torch.Tensor)
    assert isinstance(packed, Nvfp4Tensor)
    expected = quantize_nvfp4(plain.permute(0, 2, 3, 1), amax=2.0)
    assert packed.shape == (2, 6, 7, 24)
    assert torch.equal(packed.codes, expected.codes)
    assert torch.equal(packed.scales.view(torch.uint8), expected.scales.view(torch.uint8))
    assert torch.equal(fp4_conv2d(packed, second), fp4_conv2d(plain, second, input_amax=2.0))  # type: ignore[arg-type]


def test_a_nan_breaks_its_window() -> None:
    x = randn(1, 16, 6, 6)
    x[0, 3, 2, 4] = float("nan")
    broken = fp4_conv2d(x, randn(4, 16, 3, 3), padding=1).isnan()  # type: ignore[union-attr]
    expected = torch.zeros(6, 6, dtype=torch.bool)
    expected[1:4, 3:6] = True
    assert torch.equal(broken, expected.expand(1, 4, 6, 6))


X, W, B = randn(1, 16, 6, 6), randn(4, 16, 3, 3), randn(4)
CACHE, PACKED = fp4_quantize(W, B), quantize_nvfp4(X.permute(0, 2, 3, 1))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fp4_conv2d(X[0], W), ["x is (16, 6, 6)", "[N, 16, H, W]"]),
        (lambda: fp4_conv2d(X[:, :8], W), ["(1, 8, 6, 6)", "[N, 16, H, W]", "Grouped"]),
        (lambda: fp4_conv2d(X.int(), W), ["torch.int32"]),
        (lambda: fp4_conv2d(None, W), ["x is NoneType"]),  # type: ignore[arg-type]
        (lambda: fp4_conv2d(X, W[0]), ["(16, 3, 3)", "[O, I, KH, KW]"]),
        (lambda: fp4_conv2d(X, "filter"), ["str", "cache"]),  # type: ignore[arg-type]
        (lambda: fp4_conv2d(X, W.int()), ["torch.int32"]),
        (lambda: fp4_conv2d(X, fp4_quantize(torch.zeros(4, 16))), ["matrix (4, 16)", "[O, I, KH, KW]"]),
        (lambda: fp4_conv2d(X, CACHE, B), ["own bias"]),
        (lambda: fp4_conv2d(X, W, B[:3]), ["(3,)", "[4]"]),
        (lambda: fp4_conv2d(X, CACHE, four_over_six=FourOverSix()), ["packed already"]),
        (lambda: fp4_conv2d(PACKED, W, input_amax=1.0), ["packed already", "leave input_amax out"]),
        (lambda: fp4_conv2d(X, W, input_amax=None), ["input_amax is None", "'dynamic'"]),
        (lambda: fp4_conv2d(X, W, stride=(1, 2)), ["stride is (1, 2)", "equal"]),
        (lambda: fp4_conv2d(X, W, padding="same"), ["padding is 'same'"]),  # type: ignore[arg-type]
        (lambda: fp4_conv2d(X, W, dilation=1.0), ["dilation is 1.0", "whole number"]),  # type: ignore[arg-type]
        (lambda: fp4_conv2d(X, W, stride=True), ["stride is True"]),
        (lambda: fp4_conv2d(X, W, stride=0), ["Stride 0"]),
        (lambda: fp4_conv2d(X, W, dilation=4), ["6x6", "3x3"]),
        (lambda: fp4_conv2d(X, torch.zeros(4, 16, 8, 7), padding=9), ["8x7", "49"]),
        (lambda: fp4_conv2d(X, W, dtype=torch.float64), ["torch.float64"]),
        (lambda: fp4_conv2d(X, W, out_amax=-1.0), ["out_amax is -1.0"]),
        (lambda: fp4_conv2d(X, CACHE.to("meta")), ["different devices: cpu, meta"]),
        (lambda: fp4_conv2d(X.clone().requires_grad_(), CACHE), ["no gradient"]),
        (lambda: fp4_conv2d(X, torch.nn.Conv2d(16, 4, 3).weight), ["no gradient"]),
    ],
)
def test_refusals(call: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
