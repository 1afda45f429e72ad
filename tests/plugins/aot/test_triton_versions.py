"""What a Triton that is too old for an architecture's FP4 GEMM leads to. No GPU, no compiler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from fp4deploy.architecture import Architecture
from fp4deploy.plugins.aot import compile as aot_compile
from fp4deploy.plugins.aot.spec import Call
from fp4deploy.plugins.gemm import arguments
from tests.plugins.aot.aot_cases import SCALE, product

GPU = torch.device("cuda", 0)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which way each call of `arguments.run` took, on a pretended sm_121."""
    ways: list[str] = []
    loaded = SimpleNamespace(launch=lambda *values: ways.append("ahead of time"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(Architecture, "of_device", lambda index=None: Architecture(12, 1))
    monkeypatch.setattr(arguments.aot, "function", lambda launch, device: loaded)
    monkeypatch.setattr(arguments, "just_in_time", lambda call: ways.append("Triton"))
    arguments._too_old.cache_clear()
    yield ways
    arguments._too_old.cache_clear()


def version(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    for module in (aot_compile, arguments):
        monkeypatch.setattr(module, "triton_version", lambda: text)


@pytest.mark.parametrize(
    ("text", "arch", "lacks"),
    [
        ("3.7.1", "sm_107", True),
        ("3.8.0", "sm_107", True),
        ("3.9.0", "sm_107", False),
        ("3.7.1", "sm_110", False),
        ("3.6.0", "sm_121", True),
        ("3.7.1", "sm_121", True),
        ("3.7.1+git1234", "sm_121", True),
        ("3.8.0", "sm_121", False),
        ("3.10.0", "sm_121", False),
        ("4.0.0", "sm_121", False),
        ("3.6.0", "sm_120", False),
        ("3.6.0", "sm_100", False),
        (None, "sm_121", False),
    ],
)
def test_which_versions_lack_which_gemm(
    monkeypatch: pytest.MonkeyPatch, text: str | None, arch: str, lacks: bool
) -> None:
    version(monkeypatch, text)
    assert bool(aot_compile.too_old(arch, native=True)) is lacks
    assert bool(aot_compile.too_old(arch, native=False)) is (lacks and arch == "sm_107")


def test_the_message_names_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    version(monkeypatch, "3.7.1")
    why = aot_compile.too_old("sm_121", native=True)
    assert "Triton 3.7.1 has no FP4 GEMM" in why
    assert "3.8 and later" in why
    assert "2.14" in why
    assert "fp4deploy kernels --arch sm121" in why
    rubin = aot_compile.too_old("sm_107", native=False)
    assert "Triton 3.7.1 does not compile for it, 3.9 and later do. Install a torch that requires one (2.15 or" in rubin
    assert "\n" not in why  # the first line alone becomes the reason of a failed build


@pytest.mark.parametrize(
    ("text", "fp4", "way"),
    [
        ("3.7.1", True, "ahead of time"),
        ("3.7.1", False, "Triton"),
        ("3.9.0", True, "Triton"),
        (None, False, "ahead of time"),
    ],
)
def test_an_old_triton_takes_fp4_gemms_from_a_folder(
    monkeypatch: pytest.MonkeyPatch, launched: list[str], text: str | None, fp4: bool, way: str
) -> None:
    version(monkeypatch, text)
    arguments.run(Call(product(fp4), (), (1, 1, 1)), GPU)
    assert launched == [way]


def test_a_kernel_without_a_gemm_is_left_to_triton(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    version(monkeypatch, "3.7.1")
    arguments.run(Call(SCALE, (), (1, 1, 1)), GPU)
    assert launched == ["Triton"]
