"""GEMMs launched as secondary kernels see everything that was written before them; without `freeze` none is one."""

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
    """Streams of the launches as secondary kernels; all tensors of a test belong to the stream that made them."""
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


def packed(values: torch.Tensor, frozen: bool = True) -> Nvfp4Tensor:
    weight = quantize_nvfp4(values)
    if frozen:
        pdl.freeze(weight)
    return weight


def weight_of(seed: int, frozen: bool = True) -> Nvfp4Tensor:
    return packed(randn(SIZE, SIZE, seed=seed) / SIZE**0.5, frozen)  # so that values keep their size in a chain


def gemv_of(x: torch.Tensor, weight: Nvfp4Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    assert gemv.supports(x, weight)
    found = dispatch.matmul(x, weight, bias)
    assert isinstance(found, torch.Tensor)
    return found


def in_order(x: torch.Tensor, weight: Nvfp4Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same bytes, with the GPU idle before and after."""
    torch.cuda.synchronize()
    pdl.enabled = False
    try:
        return gemv_of(x, weight, bias)
    finally:
        pdl.enabled = True
        torch.cuda.synchronize()


def chain(x: torch.Tensor, weights: list[Nvfp4Tensor], count: int = 12) -> list[torch.Tensor]:
    """Each output is the next input."""
    found = []
    for i in range(count):
        x = gemv_of(x, weights[i % len(weights)])
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
def test_what_is_written_just_before(rows: int, stream: torch.cuda.Stream, early: list[int]) -> None:
    """Activations, amax and bias written by a kernel, a copy from the host, another stream, a graph."""
    weight, bias, x = weight_of(1), randn(SIZE, seed=2).float(), randn(rows, SIZE)
    pinned = randn(rows, SIZE, seed=3, device="cpu").pin_memory()
    other, last = pinned.to(DEVICE), torch.empty_like(x)
    expected = [in_order(each, weight, bias) for each in (x + 1, other)]
    gemv_of(x, weight, bias)
    torch.cuda._sleep(LONG)
    torch.add(x, 1, out=last)
    found = [gemv_of(last, weight, bias)]
    assert len(early) == 1
    torch.cuda._sleep(LONG)
    last.copy_(pinned, non_blocking=True)
    found.append(gemv_of(last, weight, bias))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        torch.add(x, 1, out=last)
    torch.cuda.current_stream().wait_stream(side)
    found.append(gemv_of(last, weight, bias))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(LONG)
        last.copy_(other)
    graph.replay()
    found.append(gemv_of(last, weight, bias))
    assert len(early) == 4
    for each, right in zip(found, expected * 2, strict=True):
        assert torch.equal(each, right)
    amax, doubled = weight.amax.clone(), weight.amax * 2
    results = []
    for value in (doubled, amax):
        torch.cuda._sleep(LONG)
        weight.amax.copy_(value)
        bias.mul_(2 if value is doubled else 0.5)
        results.append(gemv_of(last, weight, bias))
    assert len(early) == 6
    torch.testing.assert_close(results[0], 2 * expected[1])
    assert torch.equal(results[1], expected[1])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("write", ["copy_", "data", "graph"])
def test_a_weight_that_is_not_frozen_may_be_written_in_any_way(
    write: str, rows: int, stream: torch.cuda.Stream, early: list[int]
) -> None:
    """Also in ways that torch does not count: every launch is in stream order."""
    first, second, x = weight_of(1, frozen=False), weight_of(2, frozen=False), randn(rows, SIZE)
    expected = [in_order(x, first), in_order(x, second)]
    weight = Nvfp4Tensor(first.codes.clone(), first.scales.clone(), first.amax.clone(), first.shape, first.e4m3_max)

    def overwrite(source: Nvfp4Tensor) -> None:
        torch.cuda._sleep(LONG // 10)
        for name in ("codes", "scales", "amax"):
            target = getattr(weight, name)
            (target.data if write == "data" else target).copy_(getattr(source, name))

    graphs = []
    torch.cuda.synchronize()
    for source in (first, second) if write == "graph" else ():
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            overwrite(source)
    found = []
    for _ in range(3):
        for at, source in enumerate((first, second)):
            if graphs:
                graphs[at].replay()
            else:
                overwrite(source)
            found += [gemv_of(x, weight), gemv_of(x, weight)]
    assert early == []
    for at, each in enumerate(found):
        assert torch.equal(each, expected[at // 2 % 2]), at


def test_a_frozen_weight_that_torch_changes_is_launched_in_order(stream: torch.cuda.Stream, early: list[int]) -> None:
    weight, other, x = weight_of(1), weight_of(2), randn(8, SIZE)
    expected = [in_order(x, weight), in_order(x, other)]
    changed = packed(randn(SIZE, SIZE, seed=1) / SIZE**0.5)
    found = [gemv_of(x, changed) for _ in range(3)]
    torch.cuda._sleep(LONG)
    for name in ("codes", "scales", "amax"):
        getattr(changed, name).copy_(getattr(other, name))
    found += [gemv_of(x, changed) for _ in range(3)]
    assert len(early) == 2
    for at, each in enumerate(found):
        assert torch.equal(each, expected[at // 3]), at


def test_a_weight_that_is_packed_just_before(stream: torch.cuda.Stream, early: list[int]) -> None:
    """Each in the memory of the one before."""
    plain, x = [randn(SIZE, SIZE, seed=seed) / 64 for seed in range(3)], randn(8, SIZE)
    expected = [in_order(x, quantize_nvfp4(each)) for each in plain]
    places = set()
    for _ in range(5):
        for each, right in zip(plain, expected, strict=True):
            torch.cuda._sleep(LONG // 10)
            weight = packed(each)
            places.add(weight.codes.data_ptr())
            found = [gemv_of(x, weight) for _ in range(2)]
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
            weight = packed(plain)
            found = [gemv_of(x, weight) for _ in range(3)]
        two.wait_stream(one)
        with torch.cuda.stream(two):
            found += [gemv_of(x, weight) for _ in range(3)]
        one.wait_stream(two)
        torch.cuda.synchronize()
        assert all(torch.equal(each, expected) for each in found)
    assert len(early) == 4 * 4
    assert set(early) == {one.cuda_stream, two.cuda_stream}


def test_inference_mode(stream: torch.cuda.Stream, early: list[int]) -> None:
    plain, x = randn(SIZE, SIZE) / 64, randn(4, SIZE)
    expected = in_order(x, quantize_nvfp4(plain))
    with torch.inference_mode():
        unfrozen, frozen = fp4_quantize(plain), fp4_quantize(plain, frozen=True)
        torch.cuda._sleep(LONG)
        found = [fp4_linear(x, plain) for _ in range(3)] + [unfrozen.forward(x) for _ in range(3)]
        assert early == []
        found += [frozen.forward(x) for _ in range(3)]
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
