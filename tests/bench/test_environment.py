"""What `doctor` says about this machine's CUDA kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp4deploy.plugins
from fp4deploy.bench import environment
from fp4deploy.errors import UnavailableError
from fp4deploy.plugins.runtime import nvcc as compiler


def row(task: str) -> tuple[bool, str]:
    return next((able, how) for name, able, how in environment.abilities(environment.tools(), []) if name == task)


def test_what_the_kernels_lack_and_that_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp4deploy.plugins, "why_unavailable", lambda: "pycuda is missing: pip install pycuda")
    able, how = row("run CUDA kernels")
    assert not able
    assert how == "pycuda is missing: pip install pycuda; the torch reference does the same work, slower"


def test_kernels_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp4deploy.plugins, "why_unavailable", lambda: None)
    assert row("run CUDA kernels") == (True, "compiled by nvcc once, launched by pycuda")


def test_kernels_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4DEPLOY_KERNELS", "off")
    able, how = row("run CUDA kernels")
    assert not able
    assert how.startswith("switched off by FP4DEPLOY_KERNELS=off")


def test_the_release_of_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "find_nvcc", lambda: Path("nvcc"))
    monkeypatch.setattr(compiler, "nvcc_version", lambda _: "release 13.0, V13.0.88 Build cuda_13.0.r13.0/compiler.1")
    assert environment.nvcc_version() == "13.0"

    def refuse(_: Path) -> str:
        raise UnavailableError("does not run")

    monkeypatch.setattr(compiler, "nvcc_version", refuse)
    assert environment.nvcc_version() is None
    monkeypatch.setattr(compiler, "find_nvcc", lambda: None)
    assert environment.nvcc_version() is None
    nvcc = environment.tools()[-1]
    assert (nvcc.name, nvcc.version) == ("nvcc", None)
    assert "pip install nvidia-cuda-nvcc" in nvcc.install


def test_a_binding_counts_only_with_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(environment, "working_version", lambda name: asked.append(name))
    environment.tools()
    assert "pycuda.driver" in asked
    assert environment.package_version("pycuda.driver") is None
