"""What surrounds the kernels of the loss, with stand-ins for them on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp4deploy.plugins.losses import segmentation
from fp4deploy.plugins.runtime.launch import substituted
from fp4deploy.train import SegmentationLoss
from fp4deploy.train.losses import segmentation as losses
from tests.plugins.runtime.launch_variants import Recorder

supports = segmentation.supports


def sums(logits: Any, target: Any, weight: Any, smoothing: float, ignored: int) -> torch.Tensor:
    return losses.class_sums(logits.double(), target, weight, smoothing).float()


def gradient(logits: Any, target: Any, weight: Any, upstream: Any, smoothing: float, ignored: int) -> torch.Tensor:
    """By the formula in segmentation.cu."""
    classes, labelled = logits.shape[1], (target != ignored).unsqueeze(1)
    p, y = logits.double().softmax(1), target.where(target != ignored, 0)
    truth = torch.nn.functional.one_hot(y, classes).movedim(-1, 1)
    overlap, mass = (upstream[2 + k * classes :][:classes].view(-1, 1, 1) for k in range(2))
    g = mass + overlap * truth
    w = upstream[0] * (1 if weight is None else weight[y].unsqueeze(1))
    found = p * (g - (g * p).sum(1, keepdim=True)) + w * (p - (1 - smoothing) * truth - smoothing / classes)
    return segmentation._arguments(logits, target)[0].detach().clone().copy_(found * labelled)


@pytest.fixture
def _kernels_in_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`class_sums` of anything but float64 is that of the kernels."""
    library = torch.library.Library("fp4deploy", "IMPL")
    library.impl("segmentation_sums", sums, "CPU")
    library.impl("segmentation_gradient", gradient, "CPU")
    monkeypatch.setattr(losses, "supports", lambda logits, *_: logits.dtype != torch.float64)
    yield
    library._destroy()


def sample(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]))
    target[0, 0, :2] = 255
    return torch.randn(shape, requires_grad=True), target


@pytest.mark.usefixtures("_kernels_in_torch")
def test_the_gradient_reaches_the_logits() -> None:
    logits, target = sample(2, 5, 6, 7)
    loss = SegmentationLoss(0.7, 1.3, torch.rand(5), 0.1, torch.rand(5))
    value = loss(logits, target)
    value.backward()
    double = logits.detach().double().requires_grad_()
    expected = loss(double, target)
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(logits.grad.double(), double.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("_kernels_in_torch")
def test_second_derivatives_are_refused() -> None:
    logits, target = sample(1, 3, 4, 4)
    (found,) = torch.autograd.grad(SegmentationLoss()(logits, target), logits, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivatives. FP4DEPLOY_KERNELS=off"):
        found.sum().backward()


def pieces() -> dict[str, torch.Tensor]:
    x = torch.randn(2, 6, 8, 10)
    last = x.to(memory_format=torch.channels_last)
    return {
        "NCHW": x,
        "NHWC": last,
        "channels of NHWC": last[:, 1:4],
        "a part of an NHWC image": last[:, :, 1:6, 2:9],
        "channels of NCHW": x[:, 2:5],
        "turned": x.transpose(2, 3),
        "one class": x[:, :1],
    }


@pytest.mark.parametrize("name", pieces())
def test_compilers_are_told_the_strides_of_the_gradient(name: str) -> None:
    logits = pieces()[name]
    target, upstream = torch.zeros(2, *logits.shape[2:], dtype=torch.int64), torch.zeros(2 + 3 * logits.shape[1])
    recorder = Recorder()
    with substituted(recorder.kernel):
        real = segmentation._gradient(logits, target, None, upstream, 0.0, 255)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(each) for each in (logits, target, upstream)]
        fake = torch.ops.fp4deploy.segmentation_gradient(given[0], given[1], None, given[2], 0.0, 255)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    ((_, macros),) = recorder.found
    assert dict(macros)["CHANNELS_LAST"] == (logits.stride(1) == 1)


def test_what_the_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmentation, "available", lambda device: True)
    logits, target = torch.zeros(2, 4, 6, 6), torch.zeros(2, 6, 6, dtype=torch.int64)
    assert supports(logits, target)
    assert supports(logits.half(), target, torch.ones(4))
    for shape in ((2, 3, 3), (2, 12, 12), (2, 1, 6, 6), (1, 6, 12), (2, 6)):
        assert not supports(logits, torch.zeros(shape, dtype=torch.int64))
    assert not supports(logits, target, torch.ones(3))
    assert not supports(logits, target, torch.ones(4, 1))
    assert not supports(logits.double(), target)
    assert not supports(logits, target.int())
    assert not supports(logits[:, :, :0], target[:, :0])
    assert not supports(torch.zeros(1, 1025, 1, 1), target[:1, :1, :1])


@pytest.mark.parametrize("shape", [(2, 3, 3), (2, 12, 12), (2, 1, 6, 6)])
def test_targets_of_another_size_are_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        SegmentationLoss()(torch.zeros(2, 4, 6, 6), torch.zeros(shape, dtype=torch.int64))


def test_targets_of_volumes_have_no_axis_of_channels() -> None:
    logits, target = torch.randn(2, 4, 3, 6, 6), torch.randint(0, 4, (2, 3, 6, 6))
    flat = SegmentationLoss()(logits.flatten(2, 3), target.flatten(1, 2))
    torch.testing.assert_close(SegmentationLoss()(logits, target), flat)
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        SegmentationLoss()(logits, target[:, None])
