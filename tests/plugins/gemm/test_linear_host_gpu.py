"""NVFP4 layers on a GPU, seen from the host: no synchronisation, no extra allocations.

Warm calls synchronise nothing, allocate outputs and what they pack into, and run on whatever stream is current, in
several threads and in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp4deploy import formats
from fp4deploy.plugins import available, fp4_conv2d, fp4_linear, fp4_matmul, fp4_quantize
from fp4deploy.plugins.aot import load as aot
from tests.plugins.gemm.gpu_cases import AMAXES, DEVICE, equal, poison, randn
from tests.plugins.gemm.threads import together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not aot.available() or not available(),
        reason="no NVIDIA GPU that kernels run on",
    ),
]
LONG = 200_000_000  # cycles: about 100 ms


def calls() -> dict[str, Callable[[], Any]]:
    """Warm calls of every kind; inputs and caches made before."""
    x, few, weight, bias = randn(64, 256), randn(4, 256), randn(128, 256), randn(128)
    cache, amax = fp4_quantize(weight, bias), torch.tensor(2.5, device=DEVICE)
    packed = formats.quantize_nvfp4(x)
    image, filters = randn(2, 32, 12, 12).to(memory_format=torch.channels_last), fp4_quantize(randn(48, 32, 3, 3))
    found: dict[str, Callable[[], Any]] = {
        "weight-only": lambda: cache.forward(x),
        "GEMV": lambda: cache.forward(few),
        "dynamic": lambda: cache.forward(x, "dynamic", backend="kernels"),
        "a number": lambda: cache.forward(x, 2.5, backend="kernels"),
        "a tensor": lambda: cache.forward(x, amax, backend="kernels"),
        "packed": lambda: cache.forward(packed, backend="kernels"),
        "packed to packed": lambda: cache.forward(packed, out_amax=amax),
        "fp4_linear": lambda: fp4_linear(x, weight, bias),
        "fp4_matmul": lambda: fp4_matmul(x, weight, bias.float(), backend="kernels"),
        "fp4_conv2d": lambda: fp4_conv2d(image, filters, padding=1),
        "fp4_conv2d, packed": lambda: fp4_conv2d(image, filters, padding=1, input_amax=2.5, out_amax=3.0),
    }
    for call in found.values():
        call()
    torch.cuda.synchronize()
    return found


NAMES = [
    *("weight-only", "GEMV", "dynamic", "a number", "a tensor", "packed", "packed to packed"),
    *("fp4_linear", "fp4_matmul", "fp4_conv2d", "fp4_conv2d, packed"),
]


@pytest.mark.parametrize("name", NAMES)
def test_the_host_does_not_wait(name: str) -> None:
    call = calls()[name]
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(LONG)
        call()
        done = torch.cuda.Event()
        done.record()
        assert not done.query(), "the call came back after the GPU was done"
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("weight-only", 1),
        ("GEMV", 1),
        ("a tensor", 3),  # codes and scales of the activation
        ("a number", 4),  # and the number
        ("dynamic", 4),  # and the amax
        ("packed", 1),
        ("packed to packed", 2),  # codes and scales
        ("fp4_conv2d", 4),
    ],
)
def test_nothing_else_is_allocated(name: str, count: int) -> None:
    call = calls()[name]
    for _ in range(3):
        call()
    before = torch.cuda.memory_stats()
    for _ in range(50):
        call()
    after = torch.cuda.memory_stats()
    assert after["allocation.all.allocated"] - before["allocation.all.allocated"] == 50 * count
    assert after["segment.all.allocated"] == before["segment.all.allocated"], "memory was asked of the driver"
    assert after["allocation.all.current"] == before["allocation.all.current"]


@pytest.mark.parametrize("name", NAMES)
def test_a_side_stream(name: str) -> None:
    call = calls()[name]
    expected = call()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
        poison()
        torch.cuda._sleep(LONG)
        found = call()
        done = torch.cuda.Event()
        done.record()
        assert not done.query(), "the call came back after the GPU was done"
        torch.cuda.current_stream().synchronize()
    equal(found, expected)


def test_what_a_stream_computes_before_is_seen() -> None:
    cache, x = fp4_quantize(randn(128, 256), randn(128)), randn(64, 256)
    expected = [cache.forward(2 * x, amax) for amax in AMAXES]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG // 10)
        y = x * 2
        found = [cache.forward(y, amax) + 1 for amax in AMAXES]  # type: ignore[operator]
        torch.cuda.current_stream().synchronize()
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two + 1)  # type: ignore[operator]


def test_threads_with_streams_share_a_cache() -> None:
    cache = fp4_quantize(randn(128, 256), randn(128))
    inputs = [randn(33, 256, seed=seed) for seed in range(4)]
    expected = [[cache.forward(x, amax) for amax in AMAXES] for x in inputs]
    torch.cuda.synchronize()
    found: list[list[Any]] = [[] for _ in inputs]

    def work(at: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found[at].append([cache.forward(inputs[at], amax) for amax in AMAXES])
            torch.cuda.current_stream().synchronize()

    together(len(inputs), work)
    for each, right in zip(found, expected, strict=True):
        assert len(each) == 20
        assert all(torch.equal(a, b) for pair in each for a, b in zip(pair, right, strict=True))


@pytest.mark.parametrize("amax", AMAXES, ids=str)
@pytest.mark.parametrize("rows", [4, 64])
def test_a_graph(rows: int, amax: Any) -> None:
    cache, x, other = fp4_quantize(randn(128, 256), randn(128)), randn(rows, 256), randn(rows, 256, seed=5)
    expected = [cache.forward(each, amax) for each in (x, other)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cache.forward(x, amax)
    assert isinstance(y, torch.Tensor)
    for each, right in zip((x.clone(), other), expected, strict=True):
        x.copy_(each)
        y.fill_(float("nan"))
        graph.replay()
        equal(y, right)


def test_a_graph_of_packed_convolutions() -> None:
    first, second = fp4_quantize(randn(48, 32, 3, 3), randn(48)), fp4_quantize(randn(16, 48, 1, 1))
    x, other = (randn(2, 32, 12, 12, seed=seed).to(memory_format=torch.channels_last) for seed in (0, 1))

    def network(image: torch.Tensor) -> Any:
        return fp4_conv2d(fp4_conv2d(image, first, padding=1, relu=True, out_amax=9.0), second)

    expected = [network(each) for each in (x, other)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = network(x)
    for each, right in zip((x.clone(), other), expected, strict=True):
        x.copy_(each)
        y.fill_(float("nan"))
        graph.replay()
        equal(y, right)
