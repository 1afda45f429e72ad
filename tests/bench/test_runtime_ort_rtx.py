"""ONNX Runtime's TensorRT-RTX provider: what is said where it is missing, does not load, or has no device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import onnxruntime as ort
import pytest
import torch

from fp4deploy.bench.artifact import bench_or_explain
from fp4deploy.bench.runtimes import ort_rtx
from fp4deploy.bench.runtimes.open import open_runtime
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.requirements import ORT_RTX
from fp4deploy.runs import Run

PROVIDER = "tensorrt-rtx"


@pytest.fixture(autouse=True)
def fresh() -> Any:
    """A library is registered once a process; each test asks again."""
    ort_rtx._registered.cache_clear()
    yield
    ort_rtx._registered.cache_clear()


def package(monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    """The provider's package, with another library."""
    found: Any = ModuleType(ORT_RTX.name)
    found.__version__ = "0.5.0"
    found.get_ep_name = lambda: "TestExecutionProvider"
    found.get_library_path = lambda: str(library)
    monkeypatch.setitem(sys.modules, ORT_RTX.name, found)


def test_a_missing_package_is_named(untrained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, ORT_RTX.name, None)
    with pytest.raises(UnavailableError) as error:
        open_runtime(untrained.export_dir / "unet.nvfp4.onnx", provider=PROVIDER)
    assert str(error.value).startswith("ONNX Runtime's TensorRT-RTX provider needs onnxruntime_ep_nv_tensorrt_rtx")
    assert str(error.value).endswith("pip install onnxruntime-ep-nv-tensorrt-rtx")


@pytest.mark.skipif(not hasattr(ort, "register_execution_provider_library"), reason="this ONNX Runtime has no plugins")
def test_a_library_that_does_not_load(untrained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libprovider.so").write_bytes(b"no library")
    package(monkeypatch, tmp_path / "libprovider.so")
    with pytest.raises(UnavailableError, match="does not load here: .*Failed to load library .*libprovider.so"):
        open_runtime(untrained.export_dir / "unet.nvfp4.onnx", provider=PROVIDER)


def test_no_device(untrained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch, tmp_path / "libprovider.so")
    monkeypatch.setattr(ort_rtx, "_registered", lambda name, library: "")
    with pytest.raises(UnavailableError, match=r"offers no device here; it needs an NVIDIA RTX GPU"):
        open_runtime(untrained.export_dir / "unet.nvfp4.onnx", provider=PROVIDER)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_the_real_package_without_a_gpu(untrained: Run) -> None:
    """Without the driver the library does not load; with it, it offers no device."""
    pytest.importorskip(ORT_RTX.name)
    with pytest.raises(UnavailableError, match="libcuda|offers no device") as error:
        open_runtime(untrained.export_dir / "unet.nvfp4.onnx", provider=PROVIDER)
    assert str(Path(ort.__file__).parents[1]) not in str(error.value)


def test_the_decomposed_graph_is_not_for_it(untrained: Run) -> None:
    with pytest.raises(InputError, match="is the decomposed graph, for CPUs"):
        open_runtime(untrained.export_dir / "unet.nvfp4.portable.onnx", provider=PROVIDER)


def test_a_graph_that_it_does_not_take(untrained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime itself refuses: FP4 types on the CPU, and no fallback is allowed."""
    cpu = [device for device in ort.get_ep_devices() if device.ep_name == "CPUExecutionProvider"]
    monkeypatch.setattr(ort_rtx, "devices", lambda: cpu)
    with pytest.raises(UnavailableError, match="does not take the graph. It says: "):
        open_runtime(untrained.export_dir / "unet.nvfp4.onnx", provider=PROVIDER)


def test_providers_are_checked(untrained: Run) -> None:
    with pytest.raises(InputError, match="The provider 'cuda' is unknown. Valid: cpu, tensorrt-rtx"):
        open_runtime(untrained.export_dir / "unet.nvfp4.onnx", provider="cuda")


def test_the_row_of_a_provider_that_is_missing(untrained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, ORT_RTX.name, None)
    entry = bench_or_explain(untrained.export_dir / "unet.nvfp4.onnx", None, provider=PROVIDER).model_dump(mode="json")
    assert (entry["status"], entry["backend"]) == ("unavailable", "ONNX Runtime (tensorrt-rtx)")
    assert (entry["miou"], entry["latency_ms"]) == (None, None)
    assert "pip install" in entry["reason"]
    json.dumps(entry, allow_nan=False)
