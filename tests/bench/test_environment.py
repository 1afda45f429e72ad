"""What `doctor` says about this machine's libraries and kernels."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import fp4deploy.plugins
from fp4deploy.bench import environment
from fp4deploy.errors import UnavailableError
from fp4deploy.plugins.aot import load as aot
from fp4deploy.plugins.runtime import nvcc as compiler
from fp4deploy.requirements import LIBRARIES, Fault, Library


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
    assert environment.nvcc_version() == Fault("does not run", "does not run")
    monkeypatch.setattr(compiler, "find_nvcc", lambda: None)
    assert environment.nvcc_version() == Fault()
    nvcc = environment.tools()[-1]
    assert (nvcc.name, nvcc.version, nvcc.fault) == ("nvcc", None, Fault("missing"))
    assert "pip install nvidia-cuda-nvcc" in nvcc.install


def test_a_library_that_does_not_load_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bindings import without the shared library that they bind: the module that loads it decides."""
    assert LIBRARIES["pycuda"].module == "pycuda.driver"
    package = tmp_path / "half_installed"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '1.2'")
    monkeypatch.syspath_prepend(tmp_path)
    half = Library("half_installed", "", "pip install it", "half_installed.driver")
    assert half.version() == Fault("missing")
    assert half.why_missing() == "half_installed is missing: pip install it"
    driver = "print('imported')\nraise OSError('libdriver.so: cannot open')"
    (package / "driver.py").write_text(driver)
    importlib.invalidate_caches()
    assert half.version() == Fault("does not load", "libdriver.so: cannot open")
    assert capsys.readouterr().out == "imported\n"
    assert half.why_missing() == "half_installed does not load (libdriver.so: cannot open): pip install it"
    whole = Library("half_installed", "", "pip install it")
    assert (whole.version(), whole.why_missing()) == ("1.2", None)


def test_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "why_unavailable", lambda: "no NVIDIA GPU that torch can use")
    assert row("run Triton kernels") == (False, "no NVIDIA GPU that torch can use")
    monkeypatch.setattr(aot, "why_unavailable", lambda: None)
    assert row("run Triton kernels")[0]
    monkeypatch.setattr(Library, "find", lambda library: Fault())
    assert row("compile Triton kernels") == (False, "triton is missing: pip install triton")
