"""Kernels that are refused: for good where they do not compile, for once where they were not loaded or launched."""

from __future__ import annotations

import gc
import sys
import warnings
from pathlib import Path

import pytest
import torch

from fp4deploy.errors import UnavailableError
from fp4deploy.plugins import KernelError, kernel
from fp4deploy.plugins.runtime import fallback as module
from fp4deploy.plugins.runtime.fallback import Fallback, in_torch
from fp4deploy.plugins.runtime.nvcc import LaunchError
from tests.plugins.cuda_stand_in import Pycuda

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("error", [KernelError("nvcc says no"), UnavailableError("no GPU")])
def test_refused_for_good(error: UnavailableError, monkeypatch: pytest.MonkeyPatch) -> None:
    fallback = Fallback("Norms", "torch")
    monkeypatch.setattr(module, "available", lambda _: True)
    assert fallback.runs(GPU)
    assert not fallback.runs(torch.device("cpu"))
    with pytest.warns(UserWarning, match="Norms fall back to torch on cuda:0: ") as caught, fallback.guard(GPU):
        raise error
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fallback.refuse(GPU, error)
    assert fallback.refused(GPU)
    assert not fallback.runs(GPU)
    assert fallback.runs(torch.device("cuda", 1))
    assert fallback.missed(GPU) == 0


def test_missed_once_and_tried_again() -> None:
    fallback = Fallback("Norms", "torch")
    with pytest.warns(UserWarning, match="Norms fell back to torch on cuda:0 and are tried again: no memory"):
        fallback.refuse(GPU, LaunchError("no memory"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fallback.refuse(GPU, LaunchError("no memory"))
    assert not fallback.refused(GPU)
    assert fallback.missed(GPU) == 2
    with pytest.warns(UserWarning, match="fall back to torch on cuda:0: nvcc says no"):
        fallback.refuse(GPU, KernelError("nvcc says no"))
    assert fallback.refused(GPU)


@pytest.mark.filterwarnings("ignore:.*back to")
def test_what_torch_computes_instead() -> None:
    gc.collect()
    before = in_torch(GPU)
    torch_instead, kernel_instead = Fallback("Norms", "torch"), Fallback("Convolutions", "implicit GEMM")
    kernel_instead.refuse(GPU, KernelError("no"))
    kernel_instead.refuse(GPU, LaunchError("no"))
    assert in_torch(GPU) == before
    torch_instead.refuse(GPU, LaunchError("no"))
    torch_instead.refuse(GPU, KernelError("no"))
    assert in_torch(GPU) == (before.refused + 1, before.missed + 1)


def test_which_errors_pass(pycuda: Pycuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "add.cu"
    source.write_text("")
    with monkeypatch.context() as patch, pytest.raises(LaunchError, match="Run the step once"):
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        kernel(source, "add", "P", None, 0)
    add = kernel(source, "add", "P", None, 0)
    with pytest.raises(LaunchError, match="was not launched"):
        add.launch(1, 2048, None)
    add.launch(1, 1, None)
    with pytest.raises(KernelError, match="symbol not found") as error:
        kernel(source, "missing", "P", None, 0)
    assert not isinstance(error.value, LaunchError)

    def full(_: bytes) -> None:
        raise sys.modules["pycuda.driver"].MemoryError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(LaunchError, match="out of memory"):
        patch.setattr(pycuda, "module_from_buffer", full)
        kernel(source, "add", "P", {"N": 2}, 0)
    assert kernel(source, "add", "P", {"N": 2}, 0)
