"""Depthwise convolutions without a GPU: which the kernel takes, how they are divided, and what a failure leaves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fp4deploy.errors import UnavailableError
from fp4deploy.plugins.gemm.convolution import depthwise, operators
from fp4deploy.plugins.runtime.fallback import Fallback

ONE = (1, 1)


def weight(channels: int, *taps: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(channels, 1, *taps, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(
    ("filters", "places", "groups", "takes"),
    [
        (weight(96, 7, 7), (ONE, (3, 3), ONE), 96, True),
        (weight(2, 1, 9, dtype=torch.bfloat16), ((2, 1), (0, 4), (1, 3)), 2, True),
        (weight(32, 3, 3), (ONE, (12, 12), (12, 12)), 32, True),
        (weight(7, 3, 3), (ONE, ONE, ONE), 7, False),  # pairs of channels
        (weight(1, 3, 3), (ONE, ONE, ONE), 1, False),
        (weight(32, 3, 3, dtype=torch.float32), (ONE, ONE, ONE), 32, False),
        (weight(32, 3, 3), (ONE, (24, 24), (24, 24)), 32, False),  # more pixels of a row than a thread keeps
        (weight(32, 11, 11), (ONE, (5, 5), ONE), 32, False),
        (torch.zeros(64, 2, 3, 3).half(), (ONE, ONE, ONE), 32, False),
        (torch.zeros(32, 1, 3, 3, 3).half(), (ONE, ONE, ONE), 32, False),
    ],
)
def test_takes(filters: torch.Tensor, places: tuple, groups: int, takes: bool) -> None:
    assert depthwise.supports(filters, *places, groups) == takes


def test_few_pixels_are_divided_among_more_threads() -> None:
    def piece(*shape: int, dilation: int = 1, stride: int = 1) -> tuple[int, int]:
        return depthwise._piece(shape, 7, (stride, stride), (dilation, dilation), 132)

    assert piece(8, 128, 128, 96) == depthwise.PIECES[0]
    assert piece(1, 8, 8, 32) == depthwise.PIECES[-1]
    assert piece(8, 128, 128, 96, dilation=3)[0] == 1
    rows, columns = piece(8, 128, 128, 96, stride=4)
    assert depthwise._span(columns, 7, 4, 1) <= depthwise.MAX_SPAN
    assert rows >= 1


def test_neighbouring_threads_divide_the_channels() -> None:
    assert [depthwise._lanes(pairs) for pairs in (1, 3, 48, 96, 192, 67, 120)] == [1, 3, 48, 48, 64, 32, 60]


def test_a_weight_in_order_is_the_same_weight() -> None:
    filters = weight(6, 3, 5)
    kept = depthwise.in_order(filters)
    assert torch.equal(kept, filters)
    assert kept.permute(2, 3, 0, 1).is_contiguous()
    assert depthwise.in_order(kept).data_ptr() == kept.data_ptr()


def test_the_reference_is_torch() -> None:
    x, filters = torch.randn(2, 9, 8, 6), weight(6, 3, 3).float()
    y = depthwise.conv2d_reference(x, filters, torch.ones(6), (2, 1), (1, 0), (1, 2), True)
    wanted = F.conv2d(x.movedim(-1, 1), filters, torch.ones(6), (2, 1), (1, 0), (1, 2), 6).relu().movedim(1, -1)
    torch.testing.assert_close(y, wanted)


def test_a_failure_is_torch_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator asks the kernel once, warns, and computes the same by torch."""
    asked: list[str] = []

    def fails(*_: object) -> torch.Tensor:
        asked.append("kernel")
        raise UnavailableError("no compiler")

    monkeypatch.setattr(depthwise, "fallback", Fallback("Depthwise convolutions", "torch"))
    monkeypatch.setattr(depthwise.fallback, "runs", lambda device: not depthwise.fallback.refused(device))
    monkeypatch.setattr(depthwise, "conv2d", fails)
    x, filters = torch.randn(1, 9, 9, 6).half(), weight(6, 5, 5)
    places = ((1, 1), (2, 2), (1, 1))
    with pytest.warns(UserWarning, match="Depthwise convolutions"):
        assert operators._by_own_kernel(x, filters, None, places, 6, False) is None
    assert operators._by_own_kernel(x, filters, None, places, 6, False) is None
    assert asked == ["kernel"]
