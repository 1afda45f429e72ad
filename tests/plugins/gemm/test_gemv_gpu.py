"""Weight-only small-M GEMM (GEMV) on a GPU: `gemv_tma.cu`, and the Triton kernel that runs where it does not."""

from __future__ import annotations

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
        not torch.cuda.is_available()
        or not aot.available()
        or not available()
        or torch.cuda.get_device_capability() < (9, 0),
        reason="no NVIDIA GPU of SM90 or newer that kernels run on",
    ),
]
HALF, BFLOAT = torch.float16, torch.bfloat16
LIMITS = {HALF: 1e-3, BFLOAT: 4e-3}
ROWS = (1, 2, 8, 9, 13, 16)
# Tails of N; K that ends inside a K tile, K of less than one.
SHAPES = ((1, 256), (72, 8192 + 768), (1000, 1536 + 256), (4096, 4096), (8200, 1280), (200, 1280), (8200, 8192 + 768))
LONG = 50_000_000  # cycles: about 30 ms


def weight_of(n: int, k: int) -> Nvfp4Tensor:
    return quantize_nvfp4(randn(n, k, seed=n + k))


def gemv_of(x: torch.Tensor, weight: Nvfp4Tensor, bias: Any = None, relu: bool = False) -> torch.Tensor:
    assert gemv.supports(x, weight)
    found = dispatch.matmul(x, weight, bias, relu)
    assert isinstance(found, torch.Tensor)
    return found


def right(x: torch.Tensor, weight: Nvfp4Tensor, bias: Any = None, relu: bool = False) -> Any:
    return matmul_reference(x, weight, bias, relu, torch.float64, accumulate=torch.float64)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=["half", "bfloat"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_near_float64_and_the_same_bytes_twice(n: int, k: int, dtype: torch.dtype) -> None:
    weight, bias, every = weight_of(n, k), randn(n, seed=2), randn(16, k, dtype=dtype)
    for rows in ROWS:
        x = every[:rows]
        for options in ((None, False), (bias, True)):
            poison()
            y = gemv_of(x, weight, *options)
            close(y, right(x, weight, *options), LIMITS[dtype])
            assert y.dtype == dtype
            poison()
            assert torch.equal(gemv_of(x, weight, *options), y)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=["half", "bfloat"])
@pytest.mark.parametrize(("n", "k"), SHAPES[1:-1])
def test_rows_are_independent(n: int, k: int, dtype: torch.dtype) -> None:
    """A NaN in a scale reaches one output of each row, one in the activations all outputs of one row."""
    weight, every = weight_of(n, k), randn(16, k, seed=3, dtype=dtype)
    clean = gemv_of(every, weight)
    scales = weight.scales.clone()
    scales.view(torch.uint8)[n // 3, 5] = 0x7F
    poisoned = Nvfp4Tensor(weight.codes, scales, weight.amax, weight.shape, weight.e4m3_max)
    for rows in ROWS:
        y = gemv_of(every[:rows], poisoned)
        expected = torch.zeros(rows, n, dtype=torch.bool, device=DEVICE)
        expected[:, n // 3] = True
        assert torch.equal(y.isnan(), expected)
    for rows in (8, 16):
        x = every[:rows].clone()
        x[rows // 2, k - 1] = float("nan")
        y = gemv_of(x, weight)
        assert y[rows // 2].isnan().all()
        others = [row for row in range(rows) if row != rows // 2]
        assert torch.isfinite(y[others]).all()
        if rows == 16:
            assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_side_stream(rows: int) -> None:
    weight, x = weight_of(200, 1280), randn(rows, 1280)
    expected = gemv_of(2 * x, weight)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        poison()
        torch.cuda._sleep(LONG)
        y = gemv_of(2 * x, weight) + 1
        torch.cuda.current_stream().synchronize()
    assert torch.equal(y, expected + 1)


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_graph(rows: int) -> None:
    weight, bias = weight_of(8200, 1280), randn(8200, seed=4)
    x, other = randn(rows, 1280), randn(rows, 1280, seed=5)
    expected = [gemv_of(each, weight, bias, True) for each in (x, other)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gemv_of(x, weight, bias, True)
    for each, result in zip((x.clone(), other), expected, strict=True):
        x.copy_(each)
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, result)


def test_a_thread_that_has_done_nothing_on_a_gpu() -> None:
    """It has no CUDA context, and the tensor maps of this weight are not encoded yet."""
    weight, x = weight_of(264, 1024), randn(16, 1024)
    found: list[torch.Tensor] = []
    together(1, lambda _: found.append(gemv_of(x, weight)))
    close(found[0], right(x, weight))


@pytest.mark.parametrize("rows", ROWS)
def test_the_triton_kernel_agrees(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPUs before SM90 run: the same result up to the order of the sum."""
    weight, bias, x = weight_of(1000, 1792), randn(1000, seed=2), randn(rows, 1792)
    expected = gemv_of(x, weight, bias, True)
    monkeypatch.setattr(gemv, "supports", lambda *_: False)
    found = dispatch.matmul(x, weight, bias, True)
    close(found, expected.double())


@pytest.mark.parametrize("k", [128, 1152])
def test_k_that_is_no_multiple_of_256(k: int) -> None:
    weight, x = weight_of(200, k), randn(16, k)
    assert not gemv.supports(x, weight)
    close(dispatch.matmul(x, weight), right(x, weight))
