"""Fixtures of the kernels' tests: the header on the host, compiled once a session, and a GPU that is not there."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from fp4deploy.plugins.runtime.nvcc import include_options
from tests.plugins.cuda_stand_in import fresh, pycuda
from tests.plugins.quantize.device_cases import Header

__all__ = ["fresh", "pycuda"]  # fixtures


@pytest.fixture(scope="session")
def header(tmp_path_factory: pytest.TempPathFactory) -> Header:
    """Call a function of `host_kernels.cpp`: tensors go as pointers, integers as 64 bits."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler here (CXX, c++, g++, clang++)")
    out = tmp_path_factory.mktemp("header") / "host_kernels.so"
    source = Path(__file__).parent / "quantize" / "host_kernels.cpp"
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-shared", "-fPIC", *include_options()]
    done = subprocess.run([compiler, *options, str(source), "-o", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(out))

    def call(name: str, *arguments: torch.Tensor | float | None) -> None:
        converted: list[Any] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                assert argument.is_contiguous()
                converted.append(ctypes.c_void_p(argument.data_ptr()))
            elif isinstance(argument, float):
                converted.append(ctypes.c_float(argument))
            else:
                converted.append(None if argument is None else ctypes.c_int64(argument & (1 << 64) - 1))
        getattr(library, name)(*converted)

    return call
