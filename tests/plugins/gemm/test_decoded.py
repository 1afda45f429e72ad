"""Convolutions with decoded weights without a GPU: planes and plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import quantize_nvfp4
from fp4deploy.plugins.gemm.convolution import decoded
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight, supports
from fp4deploy.plugins.quantize.statistics import Moments


@pytest.mark.parametrize(("channels", "transposed"), [((32,), False), ((48, 16), False), ((64,), True)])
def test_planes_hold_every_element(channels: tuple[int, ...], transposed: bool) -> None:
    """In some order, with zeros behind each source, and times 2^-7 without the global scale."""
    size = 2 if transposed else 3
    weight = quantize_nvfp4(torch.randn(8, size, size, sum(channels)))
    found = decode_weight(weight, channels, transposed)
    assert found.planes.dtype == torch.float16
    assert found.planes.shape[:2] == (2, 32 if transposed else 8)
    values = weight.dequantize(torch.float64) * (2688.0 / float(weight.amax) / 128)
    rows = values.flatten(0, 2) if transposed else values.flatten(1)
    for row, planes in zip(rows, found.planes.permute(1, 0, 2).flatten(1), strict=True):
        kept = planes[planes != 0].double().sort().values
        torch.testing.assert_close(kept, row[row != 0].sort().values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("depths", [(8,), (16, 16), (32,), (64,), (256, 256)])
def test_plans_fit_their_shapes(depths: tuple[int, ...], transposed: bool) -> None:
    for rows in (60, 660, 10560, 168960, 2703360):
        for columns in (12, 16, 32, 64, 256, 1024):
            plan = decoded.plan(rows, columns, depths, 1 if transposed else 9, transposed, 132)
            assert all(depth % plan.tile.bk == 0 for depth in depths) or plan.tile.bk % depths[0] == 0
            assert 1 <= plan.splits <= sum(-(-9 * depth // plan.tile.bk) for depth in depths)
            assert plan.splits == 1 or not transposed


def test_a_table_of_plans(tmp_path: Path) -> None:
    """The package's own has plans that fit; another is read by its path, and refused where it is none."""
    for rows in decoded.measured_plans().values():
        for shape, (bm, bn, bk, warps, stages, splits) in rows.items():
            assert bm * bn <= 256 * 128, shape
            assert bk in (32, 64), shape
            assert warps in (4, 8), shape
            assert stages <= 4, shape
            assert splits <= 8, shape
    path = tmp_path / "plans.json"
    path.write_text(json.dumps({"GPU": {decoded.key(660, 1024, (256,), 9, False): [256, 128, 64, 8, 3, 5]}}))
    assert decoded.measured_plans(str(path))["GPU"] == {"660 x 1024, 256 bytes, 9 taps": [256, 128, 64, 8, 3, 5]}
    path.write_text('{"GPU": {"shape": [1, 2]}}')
    decoded.measured_plans.cache_clear()
    with pytest.raises(InputError, match="Write a table of plans"):
        decoded.measured_plans(str(path))


def test_which_channels_have_a_kernel() -> None:
    assert supports((64,), 9)
    assert supports((64, 128), 9)
    assert supports((16,), 9)
    assert supports((32, 32), 9)
    assert not supports((16, 32), 9)
    assert not supports((48,), 9)
    assert supports((16,), 1)
    assert supports((32,), 1)
    assert supports((32, 32), 27)
    assert not supports((16,), 49)


def test_slices_are_multiplied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the moments are of runs of pixels, which no volume's norm takes, the output is kept without them."""
    sources = (quantize_nvfp4(torch.randn(1, 2, 4, 5, 64)),)
    weight = decode_weight(quantize_nvfp4(torch.randn(64, 1, 3, 3, 64)), (64,))
    y = torch.randn(2, 4, 5, 64, dtype=torch.float16)
    made = y, Moments(torch.empty(1, 2, 2, 64), 64)
    monkeypatch.setattr(decoded.warpgroup, "is_available", lambda device: True)
    monkeypatch.setattr(decoded.Convolution, "_directly", lambda work: False)
    monkeypatch.setattr(decoded.Convolution, "_by_warpgroups", lambda work: made)
    found, moments = decoded.conv2d(sources, weight, padding=(0, 1, 1), moments=True)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, y.view(1, 2, 4, 5, 64))
    assert moments is None
