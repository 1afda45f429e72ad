"""Direct convolutions on a GPU: against the reference and the moments of their output, on awkward shapes."""

from __future__ import annotations

import pytest
import torch

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.gemm.convolution import direct
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight
from fp4deploy.plugins.gemm.reference import conv2d_reference
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4
from fp4deploy.plugins.quantize.norm_pack import affine
from fp4deploy.plugins.quantize.statistics import combine
from tests.plugins.gemm.test_decoded_gpu import operands

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]
SHAPES = [
    (1, 1, 1, (16,), 16, 3),
    (3, 17, 33, (16,), 16, 3),
    (2, 40, 31, (16, 16), 48, 3),
    (1, 200, 160, (32,), 32, 3),
    (2, 65, 64, (32, 32), 64, 3),
    (5, 9, 70, (32,), 16, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolutions(shape: tuple) -> None:
    n, _, _, channels, outputs, k = shape
    assert direct.supports(channels, outputs, (k, k))
    sources, weight = operands(*shape)
    bias = torch.randn(outputs, device="cuda")
    expected = conv2d_reference(tuple(sources), weight, bias, 1, k // 2, 1, True, torch.float32)
    decoded = decode_weight(weight, channels)
    torch.full((1 << 24,), float("nan"), device="cuda")  # poison
    results = [
        direct.conv2d(tuple(sources), decoded, bias, (k // 2, k // 2), relu=True, moments=True) for _ in range(3)
    ]
    y, moments = results[0]
    assert isinstance(y, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert all(torch.equal(y, again) for again, _ in results)  # type: ignore[arg-type]
    assert float((y.float() - expected).norm() / expected.norm()) < 6e-4
    assert moments is not None
    gamma, beta, groups = torch.randn(outputs, device="cuda"), torch.randn(outputs, device="cuda"), 8
    ab = combine(moments, y.shape, None, gamma, beta, groups, 1e-5)
    exact = affine(y.double(), None, gamma.double(), beta.double(), groups, 1e-5)
    assert float((ab.double() - exact).norm() / exact.norm()) < 1e-5
    assert ab.shape == (n, 2, outputs)


@pytest.mark.parametrize("channels", [16, 32])
@pytest.mark.parametrize("outputs", [16, 48])
def test_packed_output(channels: int, outputs: int) -> None:
    sources, weight = operands(2, 13, 37, (channels,), outputs, 3)
    bias, amax = torch.randn(outputs, device="cuda"), torch.tensor(9.0, device="cuda")
    decoded = decode_weight(weight, (channels,))
    plain, _ = direct.conv2d(tuple(sources), decoded, bias, (1, 1))
    assert isinstance(plain, torch.Tensor)
    got, _ = direct.conv2d(tuple(sources), decoded, bias, (1, 1), out_amax=amax)
    wanted = quantize_nvfp4(plain, amax=amax)
    assert isinstance(got, Nvfp4Tensor)
    assert torch.equal(got.codes, wanted.codes)
    assert torch.equal(got.scales.view(torch.uint8), wanted.scales.view(torch.uint8))


def test_nan_and_zero_sources() -> None:
    """A NaN reaches the outputs whose filter reads it and no other; a source of zeros adds nothing."""
    sources, weight = operands(1, 20, 40, (16, 16), 16, 3)
    x = torch.zeros(1, 20, 40, 16, device="cuda").half()
    empty = quantize_nvfp4(x)
    decoded = decode_weight(weight, (16, 16))
    y, _ = direct.conv2d((sources[0], empty), decoded, padding=(1, 1))
    expected = conv2d_reference((sources[0], empty), weight, None, 1, 1, 1, False, torch.float32)
    assert isinstance(y, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert float((y.float() - expected).norm() / expected.norm()) < 6e-4
    x[0, 7, 9, 3] = float("nan")
    broken = quantize_nvfp4(x, amax=torch.tensor(1.0, device="cuda"))
    y, _ = direct.conv2d((sources[0], broken), decoded, padding=(1, 1))
    assert isinstance(y, torch.Tensor)
    is_nan = y.isnan().any(-1)[0]
    assert is_nan[6:9, 8:11].all()
    assert int(is_nan.sum()) == 9
