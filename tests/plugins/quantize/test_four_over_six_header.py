"""What packs 4/6 without a division (`four_over_six.cuh`), on the host: right wherever it decides."""

from __future__ import annotations

import pytest
import torch

from fp4deploy import formats
from fp4deploy.formats import FourOverSix
from tests.plugins.quantize.device_cases import INPUTS, Header, generator
from tests.samples import sample

UNITS = {torch.bfloat16: 1 << 16, torch.float16: 1 << 13}  # what float32 bits of the type are multiples of
THIRDS = [27 / 16, 5.0625, 5.25, 5.5, 81 / 64, 255 / 64]  # times elements of 8 bits they make ties


def choose(
    header: Header, x: torch.Tensor, amax: float, metric: str, largest: int, fast: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [groups, 8], scale bytes, and who decided: 0 `choose`, 1 the contract's sums, 2 nobody here."""
    groups = x.numel() // 16
    codes = torch.empty(groups, 8, dtype=torch.uint8)
    scales, path = torch.empty(groups, dtype=torch.uint8), torch.empty(groups, dtype=torch.uint8)
    sizes = (groups, torch.tensor(amax), largest, (metric == "mse") + 2 * fast, UNITS[x.dtype])
    header("choose_rows", x.float().contiguous(), *sizes, codes, scales, path)
    return codes, scales, path


def check(header: Header, x: torch.Tensor, amax: float, metric: str, largest: int) -> torch.Tensor:
    """Compare the groups that are decided, in both domains; returns how they were."""
    for fast in (True, False):
        codes, scales, path = choose(header, x, amax, metric, largest, fast)
        q = formats.quantize_nvfp4(x, amax=amax, four_over_six=FourOverSix(metric, largest, fast))
        wrong = (codes != q.codes.view(-1, 8)).any(1) | (scales != q.scales.view(torch.uint8).flatten())
        assert not (wrong & (path < 2)).any(), (amax, fast, int((wrong & (path < 2)).nonzero()[0]))
    return path


@pytest.mark.parametrize(("metric", "largest", "dtype"), sample(["mae", "mse"], [256, 448], UNITS, every=2), ids=str)
def test_right_where_it_decides(header: Header, metric: str, largest: int, dtype: torch.dtype) -> None:
    for x in INPUTS.values():
        y = x.to(dtype)
        finite = torch.where(y.isfinite(), y, 0).abs().max().item()
        for amax in (finite, 0.41 * finite):
            check(header, y, amax, metric, largest)
        for amax in (6.0, 1536.0, 0.0):
            check(header, y[::3], amax, metric, largest)


@pytest.mark.parametrize("amax", THIRDS)
def test_ties_of_every_scale(header: Header, amax: float) -> None:
    """Every positive bfloat16 near a middle of every scale, beside the element that gives its group that scale."""
    d8 = torch.arange(24, 120, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = (d8[:, None] * middles * (amax / 1536)).bfloat16().view(torch.int16)
    for move in (-1, 0, 1):
        x = torch.zeros(len(d8), 16, dtype=torch.bfloat16)
        x[:, 1:8] = (near + move).view(torch.bfloat16)
        x[:, 8:15] = -x[:, 1:8]
        for largest in (4.0, 6.0):
            x[:, 0] = (largest * d8 * (amax / 1536)).bfloat16()
            for metric in ("mae", "mse"):
                check(header, x, amax, metric, 256)


def test_few_normal_groups_need_the_sums(header: Header) -> None:
    x = torch.randn(1 << 20, generator=generator(11)).bfloat16()
    for amax in (5.03125, 5.0625, 5.21):
        for metric, most in (("mae", 0.002), ("mse", 0.0008)):
            path = check(header, x.clamp(-amax, amax), amax, metric, 256)
            assert (path != 0).float().mean() < most, (amax, metric)
            assert (path < 2).all()


@pytest.mark.parametrize("dtype", UNITS, ids=str)
def test_zeros_are_decided_and_what_is_broken_is_not(header: Header, dtype: torch.dtype) -> None:
    x = torch.zeros(6, 16, dtype=dtype)
    x[1] = -0.0
    x[2, 3], x[3, 5], x[4, 7], x[5, 9] = torch.nan, -torch.inf, 30.0, 1.0
    x[5, 1:5] = -0.8
    codes, scales, path = choose(header, x, 8.0, "mae", 256)
    assert path.tolist() == [0, 0, 2, 2, 2, 0]
    assert codes[:2].eq(0).all()
    assert scales[:2].eq(0).all()


def test_scales_are_ties_apart(header: Header) -> None:
    """Neighbours of a scale's middles in float32: the group's own scale, not the next one."""
    middles = torch.tensor([6 * 1.0625, 6 * 1.1875]).view(torch.int32)
    edges = (
        (middles + torch.arange(-(1 << 16), 1 << 16, 1 << 12, dtype=torch.int32)[:, None]).view(torch.float32).flatten()
    )
    x = torch.zeros(len(edges), 16)
    x[:, 0] = edges
    for dtype in UNITS:
        check(header, x.to(dtype), 1536.0, "mae", 256)


def test_every_amax_of_bfloat16(header: Header) -> None:
    """One binade of global scales, with the elements that lie nearest to middles."""
    d8 = torch.arange(60, 68, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    for mantissa in range(128, 256):
        amax = mantissa / 32
        near = (d8[:, None] * middles * (amax / 1536)).bfloat16().view(torch.int16)
        x = torch.zeros(3 * len(d8), 16, dtype=torch.bfloat16)
        x[:, 1:8] = torch.cat([near - 1, near, near + 1]).view(torch.bfloat16)
        x[:, 8:15] = -x[:, 1:8]
        x[:, 0] = (6.0 * d8 * (amax / 1536)).bfloat16().repeat(3)
        path = check(header, x, amax, "mae", 256)
        assert (path < 2).all(), amax  # bfloat16 with E = 256 never has to be looked at one by one
