"""Engines: what a machine that cannot run one says, and the binding of one that can, against a stand-in library."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fp4deploy.bench.runtimes.tensorrt import TensorRtRuntime, _layer_times, open_plan, wait_for
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.export.ledger.ledger import ledger_path
from fp4deploy.models import ModelCard


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Test GPU")


@pytest.mark.rtx
def test_no_gpu_is_one_sentence_of_what_is_needed(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, None)
    with pytest.raises(UnavailableError, match=r"built by TensorRT-RTX .* for SM120; this machine has no CUDA GPU"):
        open_plan(plan)


@pytest.mark.rtx
def test_another_gpu_is_named(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    with pytest.raises(UnavailableError, match=r"for SM120; this machine has Test GPU \(sm90\)"):
        open_plan(plan)


@pytest.mark.rtx
def test_a_missing_library_names_the_package(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (12, 0))
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(UnavailableError, match="pip install tensorrt-rtx"):
        open_plan(plan)


@pytest.mark.rtx
def test_a_plan_that_the_library_refuses(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (12, 0))
    runtime = SimpleNamespace(deserialize_cuda_engine=lambda content: None)
    library = SimpleNamespace(__version__="9.9", Runtime=lambda logger: runtime, Logger=Logger)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", library)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match=r"TensorRT-RTX 9.9 refused it on Test GPU"):
        open_plan(plan)


@pytest.mark.rtx
def test_without_ledger_the_first_bytes_tell_the_library(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, None)
    shutil.copy(plan, tmp_path / "alone.plan")
    with pytest.raises(UnavailableError, match="an engine of TensorRT-RTX; this machine has no CUDA GPU"):
        open_plan(tmp_path / "alone.plan")


@pytest.mark.rtx
def test_the_ledger_of_another_plan_is_refused(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "unet.plan").write_bytes(plan.read_bytes() + b"\0")
    shutil.copy(ledger_path(plan), tmp_path / "unet.ledger.json")
    with pytest.raises(InputError, match="not the plan that unet.ledger.json was written for"):
        open_plan(tmp_path / "unet.plan")


@pytest.mark.rtx
def test_a_broken_ledger_is_an_input_error(plan: Path, tmp_path: Path) -> None:
    shutil.copy(plan, tmp_path / "unet.plan")
    (tmp_path / "unet.ledger.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(InputError, match="unet.ledger.json: backend is missing"):
        open_plan(tmp_path / "unet.plan")


@pytest.mark.rtx
def test_a_profiler_of_the_library_adds_up() -> None:
    times = _layer_times(pytest.importorskip("tensorrt_rtx"))
    for name, ms in (("conv", 0.5), ("head", 1.0), ("conv", 0.25)):
        times.report_layer_time(name, ms)
    assert times.milliseconds == {"conv": 0.75, "head": 1.0}


@pytest.mark.rtx
def test_the_library_has_every_call_the_runtime_makes() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    used = {
        trt.Runtime: ("deserialize_cuda_engine",),
        trt.ICudaEngine: (
            "create_execution_context",
            "num_io_tensors",
            "get_tensor_name",
            "get_tensor_mode",
            "get_tensor_dtype",
            "get_tensor_shape",
            "get_tensor_profile_shape",
        ),
        trt.IExecutionContext: (
            "set_input_shape",
            "get_tensor_shape",
            "set_tensor_address",
            "execute_async_v3",
            "profiler",
        ),
        trt.IProfiler: ("report_layer_time",),
        trt.TensorIOMode: ("INPUT", "OUTPUT"),
        trt.DataType: ("HALF", "FLOAT"),
        trt.Logger: ("ERROR",),
    }
    assert [
        f"{owner.__name__}.{name}" for owner, names in used.items() for name in names if not hasattr(owner, name)
    ] == []


class Logger:
    """Stand-in for trt.Logger."""

    ERROR = 1

    def __init__(self, level: int) -> None:
        self.level = level


class Memory:
    """CUDA memory by address, for torch to look at."""

    def __init__(self, address: int, shape: tuple[int, ...], kind: str) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": shape, "typestr": kind, "version": 3, "strides": None
        }  # fmt: skip


class StandInContext:
    """Writes (mean, max) over the channels of the input to the output, by address and on the stream it is given."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.addresses: dict[str, int] = {}
        self.batches: list[int] = []

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shape = shape
        return name == "image" and shape[0] <= 2

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (self.shape[0], 2, *self.shape[2:])

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            image = torch.as_tensor(Memory(self.addresses["image"], self.shape, "<f2"), device="cuda")
            logits = torch.as_tensor(
                Memory(self.addresses["logits"], self.get_tensor_shape("logits"), "<f2"), device="cuda"
            )
            logits.copy_(torch.stack([image.mean(1), image.amax(1)], dim=1))
        self.batches.append(self.shape[0])
        return True


def stand_in() -> tuple[Any, Any, StandInContext]:
    """(library, engine, context) with the calls of TensorRT's Python bindings."""
    library = SimpleNamespace(
        __version__="0",
        TensorIOMode=SimpleNamespace(INPUT=0, OUTPUT=1),
        DataType=SimpleNamespace(HALF="half", FLOAT="float"),
    )
    context = StandInContext()
    names = ["image", "logits"]
    engine = SimpleNamespace(
        num_io_tensors=2,
        get_tensor_name=lambda index: names[index],
        get_tensor_mode=names.index,
        get_tensor_dtype=lambda name: "half",
        get_tensor_shape=lambda name: (-1, 3, 8, 16),
        get_tensor_profile_shape=lambda name, profile: ((1, 3, 8, 16), (1, 3, 8, 16), (2, 3, 8, 16)),
        create_execution_context=lambda: context,
    )
    return library, engine, context


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_binding_runs_in_turns_of_the_largest_batch() -> None:
    library, engine, context = stand_in()
    runtime = TensorRtRuntime(Path("unet.plan"), "tensorrt", None, library, engine)
    images = np.random.default_rng(0).standard_normal((5, 3, 8, 16)).astype(np.float32)
    logits = runtime.infer(images)
    half = images.astype(np.float16).astype(np.float32)
    assert context.batches == [2, 2, 1]
    assert logits.shape == (5, 2, 8, 16)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits[:, 0], half.mean(1), atol=2e-3)
    np.testing.assert_array_equal(logits[:, 1], half.max(1))
    assert (runtime.card.height, runtime.card.width, runtime.card.class_names) == (8, 16, ())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_time_with_cuda_events() -> None:
    library, engine, context = stand_in()
    runtime = TensorRtRuntime(Path("unet.plan"), "tensorrt", None, library, engine)
    times = runtime.time(np.zeros((2, 3, 8, 16), np.float32), warmup=2, iterations=7, max_seconds=60)
    assert len(times) == 7
    assert min(times) > 0
    assert len(context.batches) == 1 + 2 + 1 + 7  # one that has to end, warm-up, one run to plan by, the timed ones


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_batch_that_the_engine_does_not_take() -> None:
    library, engine, _ = stand_in()
    runtime = TensorRtRuntime(Path("unet.plan"), "tensorrt", None, library, engine)
    with pytest.raises(InputError, match=r"does not take images of shape \[3, 3, 8, 16\]"):
        runtime.time(np.zeros((3, 3, 8, 16), np.float32), warmup=1, iterations=1, max_seconds=1)


@pytest.mark.parametrize("images", [1, 4, 5, 7, 8])
def test_more_images_than_the_largest_batch_all_run(images: int) -> None:
    runtime = object.__new__(TensorRtRuntime)
    runtime._input, runtime._path = "image", Path("unet.plan")
    runtime.card = ModelCard("unknown", 0.0, (), 2, 2, (0.5,) * 3, (0.5,) * 3, background=False)
    runtime._engine = SimpleNamespace(get_tensor_profile_shape=lambda name, index: ((1,), (1,), (4, 3, 2, 2)))
    sizes: list[int] = []

    def run(batch: np.ndarray) -> np.ndarray:
        sizes.append(len(batch))
        return batch[:, :1] * 2

    runtime._run = run  # type: ignore[method-assign]
    given = np.arange(images * 12, dtype=np.float32).reshape(images, 3, 2, 2)
    np.testing.assert_array_equal(runtime.infer(given), given[:, :1] * 2)
    assert max(sizes) <= 4


def test_an_inference_that_does_not_end_is_given_up() -> None:
    answers = iter([False, False, True])
    wait_for(lambda: next(answers), 60, Path("unet.plan"))
    with pytest.raises(InputError, match=r"unet\.plan did not finish an inference within 0\.01 seconds.*--timeout"):
        wait_for(lambda: False, 0.01, Path("unet.plan"))
