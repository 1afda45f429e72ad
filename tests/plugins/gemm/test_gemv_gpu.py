"""Weight-only products of a few rows on a GPU, by the kernel of this GPU and by the one for older ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins import available
from fp4deploy.plugins.aot import load as aot
from fp4deploy.plugins.gemm import dispatch, gemv
from fp4deploy.plugins.gemm.reference import matmul_reference
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4
from tests.plugins.gemm.gpu_cases import DEVICE, close, poison, randn
from tests.plugins.gemm.threads import together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not aot.available() or not available(),
        reason="no NVIDIA GPU that kernels run on",
    ),
]
HALF, BFLOAT = torch.float16, torch.bfloat16
LIMITS = {HALF: 1e-3, BFLOAT: 4e-3}
ROWS = (1, 2, 8, 9, 13, 16)
# Tails of N; K that ends inside a stage, K of less than one, K that is a multiple of 128 only.
SHAPES = ((1, 256), (72, 8192 + 768), (1000, 1536 + 256), (4096, 4096), (8200, 1280), (200, 1152), (8200, 8192 + 768))
LONG = 50_000_000  # cycles: about 30 ms
KERNELS = ("of this GPU", "of older ones")


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernel that products of a few rows run."""
    processors, shared, capability = gemv._resources(0)
    chosen = capability if request.param == KERNELS[0] else 80
    monkeypatch.setattr(gemv, "_resources", lambda _: (processors, shared, chosen))
    gemv._chosen.cache_clear()
    yield gemv._chosen(16, 128, 256, 0).name
    gemv._chosen.cache_clear()


def weight_of(n: int, k: int) -> Nvfp4Tensor:
    return quantize_nvfp4(randn(n, k, seed=n + k))


def product(x: torch.Tensor, weight: Nvfp4Tensor, bias: Any = None, relu: bool = False) -> torch.Tensor:
    assert gemv.takes(x, weight)
    found = dispatch.matmul(x, weight, bias, relu)
    assert isinstance(found, torch.Tensor)
    return found


def right(x: torch.Tensor, weight: Nvfp4Tensor, bias: Any = None, relu: bool = False) -> Any:
    return matmul_reference(x, weight, bias, relu, torch.float64, accumulate=torch.float64)


def test_which_kernel_runs(kernel: str, request: pytest.FixtureRequest) -> None:
    newer = gemv._resources(0)[2] >= gemv.STREAMS
    assert kernel == ("gemv_tma" if newer else "weight_only")
    if KERNELS[1] in request.node.name:
        assert kernel == "weight_only"


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=["half", "bfloat"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_near_float64_and_the_same_bytes_twice(n: int, k: int, dtype: torch.dtype, kernel: str) -> None:
    weight, bias, every = weight_of(n, k), randn(n, seed=2), randn(16, k, dtype=dtype)
    for rows in ROWS:
        x = every[:rows]
        for options in ((None, False), (bias, True)):
            poison()
            y = product(x, weight, *options)
            close(y, right(x, weight, *options), LIMITS[dtype])
            assert y.dtype == dtype
            poison()
            assert torch.equal(product(x, weight, *options), y)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=["half", "bfloat"])
@pytest.mark.parametrize(("n", "k"), SHAPES[1:-1])
def test_rows_do_not_meet(n: int, k: int, dtype: torch.dtype, kernel: str) -> None:
    """A NaN in a scale reaches one output of each row, one in the activations all outputs of one row."""
    weight, every = weight_of(n, k), randn(16, k, seed=3, dtype=dtype)
    clean = product(every, weight)
    scales = weight.scales.clone()
    scales.view(torch.uint8)[n // 3, 5] = 0x7F
    poisoned = Nvfp4Tensor(weight.codes, scales, weight.amax, weight.shape, weight.e4m3_max)
    for rows in ROWS:
        y = product(every[:rows], poisoned)
        expected = torch.zeros(rows, n, dtype=torch.bool, device=DEVICE)
        expected[:, n // 3] = True
        assert torch.equal(y.isnan(), expected)
    for rows in (8, 16):
        x = every[:rows].clone()
        x[rows // 2, k - 1] = float("nan")
        y = product(x, weight)
        assert y[rows // 2].isnan().all()
        others = [row for row in range(rows) if row != rows // 2]
        assert torch.isfinite(y[others]).all()
        if rows == 16:
            assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_side_stream(rows: int, kernel: str) -> None:
    weight, x = weight_of(200, 1280), randn(rows, 1280)
    expected = product(2 * x, weight)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        poison()
        torch.cuda._sleep(LONG)
        y = product(2 * x, weight) + 1
        torch.cuda.current_stream().synchronize()
    assert torch.equal(y, expected + 1)


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_graph(rows: int, kernel: str) -> None:
    weight, bias = weight_of(8200, 1280), randn(8200, seed=4)
    x, other = randn(rows, 1280), randn(rows, 1280, seed=5)
    expected = [product(each, weight, bias, True) for each in (x, other)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = product(x, weight, bias, True)
    for each, result in zip((x.clone(), other), expected, strict=True):
        x.copy_(each)
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, result)


def test_a_thread_that_has_done_nothing_on_a_gpu() -> None:
    """It has no context, and what the driver is told of this weight is not known yet."""
    weight, x = weight_of(264, 1024), randn(16, 1024)
    found: list[torch.Tensor] = []
    together(1, lambda _: found.append(product(x, weight)))
    close(found[0], right(x, weight))


def test_both_kernels_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the order of a sum."""
    weight, x = weight_of(1000, 1792), randn(16, 1792)
    processors, shared, capability = gemv._resources(0)
    found = []
    for each in (capability, 80):
        monkeypatch.setattr(gemv, "_resources", lambda _, each=each: (processors, shared, each))
        gemv._chosen.cache_clear()
        found.append(product(x, weight))
    gemv._chosen.cache_clear()
    close(found[0], found[1].double())
