"""Products that read their weight before the kernel in front has ended see all that was written before them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins import available, fp4_linear, fp4_quantize
from fp4deploy.plugins.aot import load as aot
from fp4deploy.plugins.gemm import dispatch, gemv
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4
from fp4deploy.plugins.runtime import pdl
from tests.plugins.gemm.gpu_cases import DEVICE, poison, randn
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
SIZE, LONG = 4096, 20_000_000  # cycles: about 10 ms, in which a kernel that does not wait has long read
ROWS = [1, 8, 16]


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Streams of the launches that went behind; all tensors of the test are of the stream on which they are made."""
    found: list[int] = []
    submit = pdl._submit

    def noted(kernel: Any, config: Any, buffer: bytes) -> None:
        if config.count:
            found.append(config.stream or 0)
        submit(kernel, config, buffer)

    monkeypatch.setattr(pdl, "_submit", noted)
    yield found
    torch.cuda.synchronize()


@pytest.fixture(params=["default stream", "side stream"])
def stream(request: pytest.FixtureRequest) -> Iterator[torch.cuda.Stream]:
    chosen = torch.cuda.Stream() if request.param == "side stream" else torch.cuda.default_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(chosen):
        yield chosen
    torch.cuda.synchronize()


def weight_of(seed: int, n: int = SIZE, k: int = SIZE) -> Nvfp4Tensor:
    return quantize_nvfp4(randn(n, k, seed=seed) / k**0.5)  # so that chains of products keep their size


def product(x: torch.Tensor, weight: Nvfp4Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    assert gemv.takes(x, weight)
    found = dispatch.matmul(x, weight, bias)
    assert isinstance(found, torch.Tensor)
    return found


def in_order(x: torch.Tensor, weight: Nvfp4Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same bytes, with the GPU idle before and after."""
    torch.cuda.synchronize()
    pdl.enabled = False
    try:
        return product(x, weight, bias)
    finally:
        pdl.enabled = True
        torch.cuda.synchronize()


def chain(x: torch.Tensor, weights: list[Nvfp4Tensor], count: int = 12) -> list[torch.Tensor]:
    """Each product is the next one's input."""
    found = []
    for i in range(count):
        x = product(x, weights[i % len(weights)])
        found.append(x)
    return found


@pytest.mark.parametrize("rows", ROWS)
def test_a_chain(rows: int, stream: torch.cuda.Stream, early: list[int]) -> None:
    weights, x = [weight_of(seed) for seed in range(4)], randn(rows, SIZE)
    expected, last = [], x
    for i in range(12):
        last = in_order(last, weights[i % 4])
        expected.append(last)
    assert early == []
    for each in range(3):
        poison()
        found = chain(x, weights)
        assert len(early) == (8 if each == 0 else 12)  # the first four have weights that are new to the stream
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert set(early) == {stream.cuda_stream}
        early.clear()


@pytest.mark.parametrize("rows", ROWS)
def test_what_stands_right_in_front(rows: int, stream: torch.cuda.Stream, early: list[int]) -> None:
    """Activations, amax and bias written by a kernel, a copy from the host, another stream, a graph."""
    weight, bias, x = weight_of(1), randn(SIZE, seed=2).float(), randn(rows, SIZE)
    pinned = randn(rows, SIZE, seed=3, device="cpu").pin_memory()
    other, last = pinned.to(DEVICE), torch.empty_like(x)
    expected = [in_order(each, weight, bias) for each in (x + 1, other)]
    product(x, weight, bias)
    torch.cuda._sleep(LONG)
    torch.add(x, 1, out=last)
    found = [product(last, weight, bias)]
    assert len(early) == 1
    torch.cuda._sleep(LONG)
    last.copy_(pinned, non_blocking=True)
    found.append(product(last, weight, bias))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        torch.add(x, 1, out=last)
    torch.cuda.current_stream().wait_stream(side)
    found.append(product(last, weight, bias))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(LONG)
        last.copy_(other)
    graph.replay()
    found.append(product(last, weight, bias))
    assert len(early) == 4
    for each, right in zip(found, expected * 2, strict=True):
        assert torch.equal(each, right)
    amax, doubled = weight.amax.clone(), weight.amax * 2
    results = []
    for value in (doubled, amax):
        torch.cuda._sleep(LONG)
        weight.amax.copy_(value)
        bias.mul_(2 if value is doubled else 0.5)
        results.append(product(last, weight, bias))
    assert len(early) == 6
    torch.testing.assert_close(results[0], 2 * expected[1])
    assert torch.equal(results[1], expected[1])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("part", ["codes", "scales"])
def test_a_weight_that_is_overwritten(part: str, rows: int, stream: torch.cuda.Stream, early: list[int]) -> None:
    first, second, x = weight_of(1), weight_of(2), randn(rows, SIZE)
    mixed = {"codes": first.codes, "scales": first.scales, part: getattr(second, part)}
    mixture = Nvfp4Tensor(mixed["codes"], mixed["scales"], first.amax, first.shape, first.e4m3_max)
    expected = [in_order(x, first), in_order(x, mixture)]
    changed = Nvfp4Tensor(first.codes.clone(), first.scales.clone(), first.amax, first.shape, first.e4m3_max)
    kept, found = getattr(changed, part).clone(), []
    for _ in range(3):
        found += [product(x, changed), product(x, changed)]
        torch.cuda._sleep(LONG)
        getattr(changed, part).copy_(getattr(second, part))
        found += [product(x, changed), product(x, changed)]
        torch.cuda._sleep(LONG)
        getattr(changed, part).copy_(kept)
    assert len(early) == 6
    for at, each in enumerate(found):
        assert torch.equal(each, expected[at // 2 % 2]), at


def test_a_weight_that_is_packed_right_in_front(stream: torch.cuda.Stream, early: list[int]) -> None:
    """Each in the memory that the one before it has left."""
    plain, x = [randn(SIZE, SIZE, seed=seed) / 64 for seed in range(3)], randn(8, SIZE)
    expected = [in_order(x, quantize_nvfp4(each)) for each in plain]
    places = set()
    for _ in range(5):
        for each, right in zip(plain, expected, strict=True):
            torch.cuda._sleep(LONG // 10)
            weight = quantize_nvfp4(each)
            places.add(weight.codes.data_ptr())
            found = [product(x, weight) for _ in range(2)]
            assert torch.equal(fp4_linear(x, each), right)  # type: ignore[arg-type]
            assert all(torch.equal(one, right) for one in found)
            del weight
    assert len(places) < 15
    assert len(early) == 15


def test_two_streams(early: list[int]) -> None:
    """A stream that has not used the weight yet waits for what made it."""
    plain, x = randn(SIZE, SIZE) / 64, randn(16, SIZE)
    expected = in_order(x, quantize_nvfp4(plain))
    torch.cuda.synchronize()
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(4):
        with torch.cuda.stream(one):
            torch.cuda._sleep(LONG)
            weight = quantize_nvfp4(plain)
            found = [product(x, weight) for _ in range(3)]
        two.wait_stream(one)
        with torch.cuda.stream(two):
            found += [product(x, weight) for _ in range(3)]
        one.wait_stream(two)
        torch.cuda.synchronize()
        assert all(torch.equal(each, expected) for each in found)
    assert len(early) == 4 * 4
    assert set(early) == {one.cuda_stream, two.cuda_stream}


def test_inference_mode(stream: torch.cuda.Stream, early: list[int]) -> None:
    plain, x = randn(SIZE, SIZE) / 64, randn(4, SIZE)
    outside = fp4_quantize(plain)
    expected = in_order(x, outside.weight)
    with torch.inference_mode():
        inside = fp4_quantize(plain)
        torch.cuda._sleep(LONG)
        found = [fp4_linear(x, plain) for _ in range(3)] + [inside.forward(x) for _ in range(3)]
        assert early == []
        found += [outside.forward(x) for _ in range(3)]
        assert len(early) == 2
    assert all(torch.equal(each, expected) for each in found)  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [True, False], ids=["a stream each", "one stream"])
def test_threads(own: bool, early: list[int]) -> None:
    weights = [weight_of(seed) for seed in range(3)]
    inputs = [randn(rows, SIZE, seed=rows) for rows in (1, 5, 8, 16)]
    expected = []
    for x in inputs:
        for i in range(12):
            x = in_order(x, weights[i % 3])
        expected.append(x)
    found: list[list[torch.Tensor]] = [[] for _ in inputs]

    def work(at: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream() if own else torch.cuda.default_stream()):
            for _ in range(10):
                found[at].append(chain(inputs[at], weights)[-1])
            torch.cuda.current_stream().synchronize()

    together(len(inputs), work)
    for each, right in zip(found, expected, strict=True):
        assert len(each) == 10
        assert all(torch.equal(one, right) for one in each)
    assert early


def test_a_graph_of_a_chain(early: list[int]) -> None:
    weights, x, other = [weight_of(seed) for seed in range(4)], randn(8, SIZE), randn(8, SIZE, seed=9)
    expected = [chain(each, weights)[-1] for each in (x, other)]
    assert len(early) == 20
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x, weights)[-1]
    assert len(early) == 20
    for each, right in zip((x.clone(), other), expected, strict=True):
        x.copy_(each)
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, right)


def test_a_weight_that_a_graph_writes(stream: torch.cuda.Stream, early: list[int]) -> None:
    first, second, x = weight_of(1), weight_of(2), randn(16, SIZE)
    expected = [in_order(x, first), in_order(x, second)]
    weight = Nvfp4Tensor(first.codes.clone(), first.scales.clone(), first.amax.clone(), first.shape, first.e4m3_max)
    torch.cuda.synchronize()
    graphs = []
    for source in (first, second):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.cuda._sleep(LONG // 10)
            for name in ("codes", "scales", "amax"):
                getattr(weight, name).copy_(getattr(source, name))
        graphs.append(graph)
    for _ in range(3):
        for graph, right in zip(graphs, expected, strict=True):
            graph.replay()
            pdl.forget(weight)
            assert all(torch.equal(product(x, weight), right) for _ in range(2))
    assert len(early) == 6
