"""Which launches are secondary kernels (programmatic dependent launch), with stand-ins for pycuda and the driver."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp4deploy.formats import Nvfp4Tensor, quantize_nvfp4
from fp4deploy.plugins import FP4WeightCache, KernelError, fp4_quantize
from fp4deploy.plugins.runtime import launch as cuda_launch
from fp4deploy.plugins.runtime import pdl
from tests.plugins.cuda_stand_in import Pycuda, Tensor

MAP = bytes(range(128))


class Library:
    """Stands for libcuda: records launches, and fails on request."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.loaded: list[bytes] = []
        self.attributes: list[tuple[int, int]] = []
        self.result = 0

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        self.loaded.append(code)
        return self.result

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = 77
        return 0 if name == b"add" else 500

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.attributes.append((attribute, value))
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        given = config._obj
        attributes = [(given.attributes[i].id, given.attributes[i].value) for i in range(given.count)]
        values = [ctypes.string_at(place, size) for place, size in zip(parameters, (128, 8, 4), strict=True)]
        self.launched.append((*given.grid, *given.block, given.shared, given.stream or 0, attributes, values))
        allowed = max((value for attribute, value in self.attributes if attribute == 8), default=0)
        return 1 if given.block[0] == 2048 or given.shared > allowed else self.result

    def cuGetErrorString(self, result: int, text: Any) -> int:
        text._obj.value = b"said the driver"
        return 0


@pytest.fixture
def library(pycuda: Pycuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    found = Library()
    monkeypatch.setattr(pdl, "library", lambda: found)
    monkeypatch.setattr(pdl, "_functions", {})
    monkeypatch.setattr(pdl, "_dynamic", {})
    monkeypatch.setattr(pdl, "_records", {})
    return found


def frozen() -> Nvfp4Tensor:
    found = quantize_nvfp4(torch.randn(4, 32))
    pdl.freeze(found)
    return found


@pytest.fixture
def weight(library: Library) -> Nvfp4Tensor:
    return frozen()


class Launches:
    """`go` launches, "in order" or as "secondary" kernel."""

    def __init__(self, library: Library, pycuda: Pycuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self.library, self.pycuda, self.monkeypatch = library, pycuda, monkeypatch
        self.kernel = cuda_launch.kernel("gemv_tma.cu", "add", "128sPi", device="cuda:1")

    def go(self, weight: Nvfp4Tensor, stream: int = 0, block: int = 416, shared: int = 50_000) -> str:
        self.monkeypatch.setattr(pdl, "raw_stream", lambda _: stream)
        before = len(self.library.launched)
        pdl.launch(self.kernel, lambda: b"code", weight, 6, block, (MAP, Tensor(8, 1), 3), shared)
        assert not getattr(self.pycuda.stack, "devices", [])
        assert len(self.library.launched) == before + 1
        return "secondary" if self.library.launched[-1][-2] else "in order"


@pytest.fixture
def launches(library: Library, pycuda: Pycuda, monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(library, pycuda, monkeypatch)


def test_a_weight_that_is_not_frozen_is_launched_in_order(launches: Launches) -> None:
    weight = quantize_nvfp4(torch.randn(4, 32))
    assert [launches.go(weight) for _ in range(3)] == ["in order"] * 3
    pdl.freeze(weight)
    assert [launches.go(weight) for _ in range(3)] == ["in order", "secondary", "secondary"]


def test_the_first_launch_on_a_stream_is_in_order(launches: Launches, weight: Nvfp4Tensor) -> None:
    """What packed the weight may still run."""
    assert [launches.go(weight) for _ in range(3)] == ["in order", "secondary", "secondary"]
    assert [launches.go(weight, 5) for _ in range(2)] == ["in order", "secondary"]
    pdl.freeze(weight)  # again
    assert launches.go(weight) == "secondary"
    assert [launches.go(frozen()) for _ in range(2)] == ["in order", "in order"]


def test_launches_of_one_kernel_differ_in_shared_memory(launches: Launches, weight: Nvfp4Tensor) -> None:
    for shared in (16_128, 16_384, 16_128, 90_000):
        launches.go(weight, shared=shared)
    asked = [value for attribute, value in launches.library.attributes if attribute == 8]
    assert asked == [16_128, 16_384, 90_000]
    assert launches.library.loaded == [b"code"]


def test_what_the_driver_gets(launches: Launches, weight: Nvfp4Tensor) -> None:
    launches.go(weight, 9)
    assert launches.library.loaded == [b"code"]  # before anything can be in front
    assert launches.library.attributes == [(9, 100), (8, 50_000)]
    launches.go(weight, 9)
    values = [MAP, (8).to_bytes(8, "little"), (3).to_bytes(4, "little")]
    assert launches.library.launched == [
        (6, 1, 1, 416, 1, 1, 50_000, 9, attributes, values) for attributes in ([], [(6, 1)])
    ]
    assert launches.library.loaded == [b"code"]
    assert (ctypes.sizeof(pdl._Attribute), ctypes.sizeof(pdl._Config)) == (72, 56)


@pytest.mark.parametrize("part", ["codes", "scales"])
def test_a_weight_that_torch_changed_is_no_longer_frozen(part: str, launches: Launches, weight: Nvfp4Tensor) -> None:
    for stream in (0, 0, 5):
        launches.go(weight, stream)
    changed = getattr(weight, part)
    changed.copy_(changed.clone())
    assert [launches.go(weight) for _ in range(2)] == ["in order", "in order"]
    pdl.freeze(weight)
    assert [launches.go(weight) for _ in range(2)] == ["in order", "secondary"]
    assert launches.go(weight, 5) == "in order"
    changed.data = changed.clone()
    assert [launches.go(weight) for _ in range(2)] == ["in order", "in order"]


def test_amax_may_change(launches: Launches, weight: Nvfp4Tensor) -> None:
    """The kernel reads it after its wait."""
    launches.go(weight)
    weight.amax.fill_(3.0)
    assert launches.go(weight) == "secondary"


def test_a_freed_weight_is_forgotten(launches: Launches) -> None:
    gc.collect()
    gc.freeze()  # else every collection below goes through all that other tests left
    for _ in range(20):
        another = frozen()
        assert launches.go(another) == "in order"
        del another
        gc.collect()
    assert pdl._records == {}


def test_inference_tensors_are_frozen_by_the_callers_word(launches: Launches) -> None:
    """torch does not count their changes."""
    with torch.inference_mode():
        plain, weight = quantize_nvfp4(torch.randn(4, 32)), frozen()
        assert [launches.go(plain) for _ in range(2)] == ["in order", "in order"]
        assert [launches.go(weight) for _ in range(2)] == ["in order", "secondary"]
    assert launches.go(weight) == "secondary"


@pytest.mark.parametrize("how", ["quantize", "method", "constructor"])
def test_a_cache_freezes_its_weight(how: str, launches: Launches) -> None:
    values = torch.randn(4, 32)
    cache = fp4_quantize(values, frozen=how == "quantize")
    if how == "method":
        assert not cache.frozen
        assert cache.freeze() is cache
    elif how == "constructor":
        cache = FP4WeightCache(cache.weight, None, frozen=True)
    assert cache.frozen
    assert [launches.go(cache.weight) for _ in range(2)] == ["in order", "secondary"]
    assert [launches.go(fp4_quantize(values).weight) for _ in range(2)] == ["in order", "in order"]


def test_a_frozen_cache_stays_frozen_on_another_device(library: Library) -> None:
    moved = fp4_quantize(torch.randn(4, 32), frozen=True).to("meta")
    assert moved.frozen
    assert pdl._record(moved.weight) is not None


def test_a_capture_runs_nothing(launches: Launches, weight: Nvfp4Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(KernelError, match="was not loaded when the capture of a CUDA graph began"):
        launches.go(weight)
    assert launches.library.loaded == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    launches.go(frozen())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert [launches.go(weight) for _ in range(2)] == ["in order", "in order"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert [launches.go(weight) for _ in range(2)] == ["in order", "secondary"]


def test_switched_off(launches: Launches, weight: Nvfp4Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    launches.go(weight)
    monkeypatch.setattr(pdl, "enabled", False)
    assert launches.go(weight) == "in order"
    monkeypatch.setattr(pdl, "enabled", True)
    assert launches.go(weight) == "secondary"


def test_failures(launches: Launches, weight: Nvfp4Tensor) -> None:
    launches.go(weight)
    launches.library.result = 700
    with pytest.raises(KernelError, match=r"add of gemv_tma.cu .* was not launched on cuda:1: CUDA error 700, said"):
        launches.go(weight)
    with pytest.raises(TypeError, match=r"argument 1 is on cuda:0"):
        pdl.launch(launches.kernel, lambda: b"", weight, 6, 416, (MAP, Tensor(8, 0), 3), 0)
    pdl._functions.clear()
    with pytest.raises(KernelError, match="was not loaded on cuda:1: CUDA error 700"):
        launches.go(weight)
    assert not getattr(launches.pycuda.stack, "devices", [])


def test_a_launch_that_failed_counts_for_nothing(launches: Launches, weight: Nvfp4Tensor) -> None:
    with pytest.raises(KernelError):
        launches.go(weight, block=2048)  # which the stand-in refuses
    assert launches.go(weight) == "in order"
