"""The loss by its kernels against torch in float64."""

from __future__ import annotations

import pytest
import torch

from fp4deploy.plugins import available
from fp4deploy.plugins.losses import segmentation
from fp4deploy.train import SegmentationLoss
from fp4deploy.train.losses.segmentation import class_sums, cross_entropy, dice_loss
from tests.plugins.losses.test_segmentation import pieces

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not available(), reason="no NVIDIA GPU that kernels run on"),
]

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
LAST, FIRST = torch.channels_last, torch.contiguous_format
SHAPES = [(2, 12, 37, 53), (1, 1, 1, 1), (3, 2, 1, 7), (1, 33, 64, 64), (1, 81, 19, 23), (2, 171, 9, 11)]
SHAPES += [(1, 255, 5, 7), (1, 256, 5, 7), (1, 300, 5, 7), (1, 1024, 3, 3), (4, 12, 352, 480)]
ROUNDING = {FLOAT: 5e-5, HALF: 2**-10, BFLOAT: 2**-7}


def sample(
    shape: tuple[int, ...], dtype: torch.dtype = HALF, layout: torch.memory_format = LAST, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = 4 * torch.randn(shape, device="cuda", generator=generator)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]), device="cuda", generator=generator)
    target[torch.rand(target.shape, device="cuda", generator=generator) < 0.2] = 255
    return logits.to(dtype).to(memory_format=layout).requires_grad_(), target


def poison() -> None:
    torch.full((1 << 22,), float("nan"), device="cuda")


def near(got: torch.Tensor, exact: torch.Tensor, share: float, floor: float = 1e-7) -> None:
    """Within a share of the largest gradient; floor: what a difference of nearly equal numbers may leave."""
    assert float((got.double() - exact).abs().max()) <= share * float(exact.abs().max()) + floor


@pytest.mark.parametrize("layout", [LAST, FIRST], ids=["NHWC", "NCHW"])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT])
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradient(shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format) -> None:
    logits, target = sample(shape, dtype, layout)
    generator = torch.Generator("cuda").manual_seed(1)
    weights, balance = (torch.rand(shape[1], device="cuda", generator=generator) + 0.1 for _ in range(2))
    for smoothing in (0.0, 0.1):
        loss = SegmentationLoss(0.7, 1.3, weights, smoothing, balance)
        poison()
        assert segmentation.supports(logits, target)
        got = loss(logits, target)
        logits.grad = None
        (got * 1024).backward()
        assert logits.grad is not None
        assert logits.grad.stride() == logits.stride()
        exact = logits.detach().double().requires_grad_()
        expected = loss(exact, target)
        (expected * 1024).backward()
        assert exact.grad is not None
        assert got.item() == pytest.approx(expected.item(), rel=2e-5, abs=1e-6)
        near(logits.grad, exact.grad, ROUNDING[dtype], 1e-4 / max(1, int((target != 255).sum())))


def test_the_sums_are_those_of_the_reference_and_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = sample((4, 12, 352, 480))
    with torch.no_grad():
        found = class_sums(logits, target)
        for _ in range(3):
            poison()
            assert torch.equal(class_sums(logits, target), found)
        monkeypatch.setenv("FP4DEPLOY_KERNELS", "off")
        assert not segmentation.supports(logits, target)
        expected = class_sums(logits.double(), target)
    assert torch.equal(found[26:].double(), expected[26:])  # counts
    assert torch.allclose(found.double(), expected, rtol=1e-5)


def test_parts_of_the_loss_alone() -> None:
    logits, target = sample((2, 5, 9, 13))
    for part in (cross_entropy, dice_loss):
        assert part(logits, target).item() == pytest.approx(part(logits.double(), target).item(), rel=1e-5)


def test_a_slice_is_read_as_it_lies_in_memory() -> None:
    logits, target = sample((2, 6, 20, 30), FLOAT, FIRST)
    part, labels = logits[:, 1:5, ::2, 3:20], target[:, ::2, 3:20].clamp(max=3)
    SegmentationLoss()(part, labels).backward()
    assert logits.grad is not None
    exact = logits.detach().double().requires_grad_()
    SegmentationLoss()(exact[:, 1:5, ::2, 3:20], labels).backward()
    assert exact.grad is not None
    near(logits.grad, exact.grad, 1e-5)


def test_nothing_labelled() -> None:
    logits, target = sample((2, 12, 5, 7))
    poison()
    loss = SegmentationLoss()(logits, torch.full_like(target, 255))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize("wrong", [12, 200, -1])
def test_a_class_that_does_not_exist_shows(wrong: int) -> None:
    """In the loss and in the gradient, so that a loss scaler leaves out the step."""
    logits, target = sample((1, 12, 5, 7))
    target[0, 2, 3] = wrong
    loss = SegmentationLoss()(logits, target)
    loss.backward()
    assert loss.isnan()
    assert logits.grad is not None
    assert logits.grad.isnan().any()


def test_numbers_that_are_not_finite() -> None:
    logits, target = sample((1, 4, 6, 6), FLOAT)
    target[0, 0, :3] = torch.tensor([0, 255, 1], device="cuda")
    with torch.no_grad():
        logits[0, 1, 0, 0] = -torch.inf  # has the probability 0
        logits[0, 2, 0, 1] = torch.nan  # of a pixel that is ignored
    loss = SegmentationLoss()(logits, target)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    with torch.no_grad():
        logits[0, 2, 0, 2] = torch.nan
    assert SegmentationLoss()(logits, target).isnan()


@pytest.mark.parametrize("name", ["NHWC", "channels of NHWC", "a part of an NHWC image", "channels of NCHW", "turned"])
def test_compiled(name: str) -> None:
    """A compiler is told the strides of the gradient, whatever those of the logits."""
    torch.compiler.reset()
    logits = pieces()[name].cuda().requires_grad_()
    target = torch.randint(0, logits.shape[1], (2, *logits.shape[2:]), device="cuda")
    expected = torch.autograd.grad(SegmentationLoss()(logits, target), logits)[0]
    found = torch.autograd.grad(torch.compile(SegmentationLoss().of)(logits, target), logits)[0]
    torch.testing.assert_close(found, expected)


def test_replayed_from_a_graph() -> None:
    logits, target = sample((2, 12, 33, 40))
    loss = SegmentationLoss()
    for _ in range(2):
        loss(logits, target).backward()
    graph = torch.cuda.CUDAGraph()
    logits.grad = None
    with torch.cuda.graph(graph):
        value = loss(logits, target)
        value.backward()
    again, labels = sample((2, 12, 33, 40), seed=3)
    with torch.no_grad():
        logits.copy_(again)
        target.copy_(labels)
    graph.replay()
    expected = loss(again, labels)
    expected.backward()
    assert torch.equal(value, expected)
    assert torch.equal(logits.grad, again.grad)


def test_more_pixels_than_a_32_bit_index() -> None:
    logits = torch.zeros(1, 2, 33000, 33000, dtype=HALF, device="cuda").to(memory_format=LAST)
    target = torch.zeros(1, 33000, 33000, dtype=torch.int64, device="cuda")
    logits[0, 0, -1, -1] = 20.0
    with torch.no_grad():
        sums = class_sums(logits, target)
    assert float(sums[2]) == pytest.approx(33000**2 / 2, rel=1e-5)
    upstream = torch.ones(8, device="cuda")
    gradient = torch.ops.fp4deploy.segmentation_gradient(logits, target, None, upstream, 0.0, 255)
    assert float(gradient[0, 0, 0, 0]) == -0.25
    assert float(gradient[0, 0, -1, -1].abs()) < 1e-3
