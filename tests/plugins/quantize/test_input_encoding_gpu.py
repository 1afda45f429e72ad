"""The kernel of images as FP4 terms against encoding and packing on the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from fp4deploy import formats
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.models.input_encoding import encode_input
from fp4deploy.plugins import available
from fp4deploy.plugins.quantize import input_encoding
from fp4deploy.plugins.quantize.input_encoding import encode_and_pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not available(), reason="no NVIDIA GPU that kernels run on"),
]


def image(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normalised colours, some beyond what a term reaches, some not finite."""
    x = 1.3 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    x[0, 0, 0, 0], x[-1, 1, 0, -1], x[-1, 2, -1, 0], x[0, 1, -1, -1] = float("nan"), float("inf"), 1e6, -5.0
    return x.to(dtype)


def expected(x: torch.Tensor, amax: torch.Tensor) -> Nvfp4Tensor:
    return formats.quantize_nvfp4(encode_input(x).permute(0, 2, 3, 1), amax=amax)


def assert_equal(found: Nvfp4Tensor, wanted: Nvfp4Tensor) -> None:
    assert found.shape == wanted.shape
    assert torch.equal(found.codes.cpu(), wanted.codes)
    assert torch.equal(found.scales.cpu().view(torch.uint8), wanted.scales.view(torch.uint8))


@pytest.mark.parametrize("shape", [(1, 3, 1, 1), (2, 3, 7, 5), (1, 3, 256, 1), (3, 3, 35, 47), (2, 3, 352, 480)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("amax", [6.0, 5.3, 40.0, 0.0])
def test_every_byte(shape: tuple[int, ...], dtype: torch.dtype, amax: float) -> None:
    x, largest = image(*shape, dtype=dtype), torch.tensor(amax)
    torch.full((1 << 22,), 255, dtype=torch.uint8, device="cuda")  # memory that comes next has every bit set
    for given in (x.cuda(), x.cuda().to(memory_format=torch.channels_last), x.cuda().mT.contiguous().mT):
        assert_equal(encode_and_pack(given, largest.cuda()), expected(x, largest))
    assert not input_encoding.fallback.missed(given.device)
    assert not input_encoding.fallback.refused(given.device)


def test_in_a_cuda_graph() -> None:
    x, amax = torch.zeros(2, 3, 9, 13, device="cuda"), torch.tensor(6.0, device="cuda")
    encode_and_pack(x, amax)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = encode_and_pack(x, amax)
    wanted = image(2, 3, 9, 13)
    x.copy_(wanted)
    graph.replay()
    assert_equal(found, expected(wanted, torch.tensor(6.0)))


def test_nothing_is_no_launch() -> None:
    assert not input_encoding.supports(torch.zeros(0, 3, 4, 5, device="cuda"))
