"""Convolutions of a training step by the faster kernel: values of every form, what is measured, what a refusal leaves.

The kernels' references stand in for them; `test_narrow_wgrad_gpu.py` has the kernels.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from fp4deploy.errors import UnavailableError
from fp4deploy.plugins.gemm.convolution import fastest, narrow_wgrad, small_k
from fp4deploy.plugins.gemm.convolution.fastest import OWN, TORCH
from fp4deploy.plugins.runtime import choices
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.nvcc import LaunchError
from fp4deploy.qat.operators.gemms import ConvGemms
from fp4deploy.qat.operators.recompute import convolve

GEMMS = {
    "3x3": (ConvGemms((3, 3), (1, 1), (1, 1), (1, 1), 1), 16, 12),
    "2x3, padded unevenly": (ConvGemms((2, 3), (1, 1), (1, 0), (1, 1), 1), 5, 8),
    "1x1": (ConvGemms((1, 1), (1, 1), (0, 0), (1, 1), 1), 16, 12),
    "7x7, stride 2": (ConvGemms((7, 7), (2, 2), (3, 3), (1, 1), 1), 3, 16),
    "transposed": (ConvGemms((2, 2), (2, 2), (0, 0), (1, 1), 1, transposed=True), 32, 16),
    "two groups": (ConvGemms((3, 3), (1, 1), (1, 1), (1, 1), 2), 8, 8),
    "transposed, output padding": (
        ConvGemms((3, 3), (2, 2), (1, 1), (1, 1), 1, transposed=True, output_padding=(1, 1)),
        *(8, 8),
    ),
}
EXPECTED = {  # what is left to kernels of this package: forward, dgrad, wgrad
    "3x3": "fdw", "2x3, padded unevenly": "fdw", "1x1": "fdw", "7x7, stride 2": "fw", "transposed": "dw",
    "two groups": "", "transposed, output padding": "dw",
}  # fmt: skip


class Kernels:
    """The references in the place of kernels, and which were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, choice: str | None) -> None:
        self.calls: list[str] = []
        for module in (small_k, narrow_wgrad):
            monkeypatch.setattr(module, "fallback", Fallback("Test kernels", "torch"))
            monkeypatch.setattr(module.fallback, "runs", lambda _: True)
        monkeypatch.setattr(fastest, "_choices", {})
        monkeypatch.setattr(small_k, "conv2d", self.conv2d)
        monkeypatch.setattr(narrow_wgrad, "wgrad", self.wgrad)
        if choice:
            monkeypatch.setattr(fastest, "_choice", lambda *_: choice)

    def conv2d(self, *operands: Any, **options: Any) -> Any:
        self.calls.append("conv2d")
        return small_k.conv2d_reference(*operands, **options), None

    def wgrad(self, *operands: Any) -> Any:
        self.calls.append("wgrad")
        return narrow_wgrad.wgrad_reference(*operands)


def step(gemms: ConvGemms, channels: int, outputs: int, bias: bool = True) -> list[torch.Tensor]:
    """y, dx, dw and db of a layer in BF16."""
    torch.manual_seed(0)
    shape = (
        (channels, outputs, *gemms.kernel) if gemms.transposed else (outputs, channels // gemms.groups, *gemms.kernel)
    )
    x = torch.randn(2, channels, 9, 8).bfloat16().contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = (torch.randn(shape) / 8).bfloat16().requires_grad_()
    added = torch.randn(outputs).bfloat16().requires_grad_() if bias else None
    y = convolve(x, weight, added, gemms)
    y.backward(torch.randn(y.shape).bfloat16())
    return [each for each in (y, x.grad, weight.grad, added.grad if added is not None else None) if each is not None]


@pytest.mark.parametrize("name", GEMMS)
def test_every_form_has_the_values_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step(*GEMMS[name])
    kernels = Kernels(monkeypatch, OWN)
    for own, torchs in zip(step(*GEMMS[name]), expected, strict=True):
        assert own.shape == torchs.shape
        assert own.dtype == torchs.dtype
        assert (own.float() - torchs.float()).norm() <= 6e-3 * torchs.float().norm()  # BF16 has 8 bits
    called = [{"conv2d": "c", "wgrad": "w"}[each] for each in kernels.calls]
    assert sorted(called) == sorted(EXPECTED[name].replace("f", "c").replace("d", "c"))


def test_what_is_slower_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step(*GEMMS["3x3"])
    kernels = Kernels(monkeypatch, TORCH)
    assert all(torch.equal(*pair) for pair in zip(step(*GEMMS["3x3"]), expected, strict=True))
    assert not kernels.calls


def test_both_are_measured_once_and_kept_for_later_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    measured: list[str] = []

    def measure(name: str, runs: dict[str, Any], device: torch.device) -> str:
        measured.append(name)
        choices.remember(name, OWN)
        return OWN

    monkeypatch.setattr(fastest, "fastest", measure)
    monkeypatch.setattr(fastest, "milliseconds", lambda _: 1.0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    Kernels(monkeypatch, None)
    for _ in range(2):  # steps, then a process that reads the choice
        for _ in range(2):
            step(*GEMMS["3x3"])
        assert len(measured) == len(set(measured)) == 3
        fastest._choices.clear()


def test_no_kernel_is_compiled_where_little_can_be_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(fastest, "milliseconds", lambda _: 0.9 * fastest.WORTH)
    kernels = Kernels(monkeypatch, None)
    step(*GEMMS["3x3"])
    assert not kernels.calls
    assert set(fastest._choices.values()) == {TORCH}


def test_nothing_is_measured_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernels = Kernels(monkeypatch, None)
    step(*GEMMS["3x3"])
    assert not kernels.calls
    assert not fastest._choices  # it is measured when nothing is captured


@pytest.mark.parametrize(("error", "text"), [(UnavailableError, "fall back to"), (LaunchError, "fell back to")])
def test_a_kernel_that_does_not_run_is_torchs_from_then_on(
    error: type[UnavailableError], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = step(*GEMMS["3x3"])
    kernels, refused = Kernels(monkeypatch, OWN), []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def refuse(*_: Any, **__: Any) -> None:
        refused.append(1)
        raise error("not here")

    monkeypatch.setattr(narrow_wgrad, "wgrad", refuse)
    with pytest.warns(UserWarning, match=text):
        steps = [step(*GEMMS["3x3"]) for _ in range(3)]
    assert all(torch.equal(each[2], expected[2]) for each in steps)  # dw
    assert kernels.calls == 3 * ["conv2d", "conv2d"]
    assert len(refused) == 1


def test_a_kernel_that_misses_is_not_measured_in_every_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried: list[int] = []
    Kernels(monkeypatch, None)
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(fastest, "milliseconds", lambda _: 1.0)

    def miss(*_: Any, **__: Any) -> None:
        tried.append(1)
        raise LaunchError("no memory")

    monkeypatch.setattr(small_k, "conv2d", miss)
    monkeypatch.setattr(narrow_wgrad, "wgrad", miss)
    with pytest.warns(UserWarning, match="fell back to"):
        _ = [step(*GEMMS["3x3"]) for _ in range(3)]
    assert len(tried) == 3  # y, dx and dw, once each


def test_choices_are_of_strides_and_of_how_cudnn_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    Kernels(monkeypatch, TORCH)
    x, weight = torch.randn(2, 16, 9, 8).half(), torch.randn(12, 16, 3, 3).half()
    gemms = GEMMS["3x3"][0]
    for benchmark in (False, True):
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
        for layout in (torch.contiguous_format, torch.channels_last):
            gemms.multiply(x.contiguous(memory_format=layout), weight, None)
    assert len(fastest._choices) == 4
