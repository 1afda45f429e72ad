"""What is computed piece by piece is what it is in one piece, wherever the pieces end."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fp4deploy.data import Sample, cache, palette
from fp4deploy.data.palette import colours
from fp4deploy.data.volumes import resample
from fp4deploy.detection import decode
from fp4deploy.formats import round_trip
from fp4deploy.ptq import gptq, grid


class Numbered:
    """27 images of different sizes that are their number."""

    class_names, background, layout = ("a", "b"), False, ()

    def __len__(self) -> int:
        return 27

    def load(self, index: int) -> Sample:
        pixels = np.full((2 + index, 3, 3), index, np.uint8)
        return Sample(pixels, np.full(pixels.shape[:2], index % 2, np.uint8), str(index))


def cached() -> Any:
    found = cache.cache_dataset(Numbered())  # type: ignore[arg-type]
    assert isinstance(found, cache.CachedDataset)
    return [found.load(index).image for index in range(len(found))]


def rounded() -> Any:
    x = torch.randn(7, 160, generator=torch.Generator().manual_seed(0))
    return [round_trip.round_trip_nvfp4(each, each.amax()) for each in (x, x.relu())]


def tinted() -> Any:
    random = np.random.default_rng(0)
    image, mask = random.integers(0, 256, (11, 5, 3), np.uint8), random.integers(0, 4, (11, 5), np.uint8)
    return [palette.tinted(image, mask, colours("abcd", True))]


def resampled() -> Any:
    x = torch.randn(2, 5, 6, 7, generator=torch.Generator().manual_seed(0))
    settings = [((9, 8, 4), (1, 1, 1)), ((3, 6, 7), (3, 3, 3)), ((5, 9, 7), (0, 1, 1)), ((8, 6, 9), (0, 3, 3))]
    found = [torch.cat([*resample.resampled_bands(x, *each, clip)], 1) for each in settings for clip in (False, True)]
    assert [tuple(each.shape[1:]) for each in found[::2]] == [size for size, _ in settings]
    return found


def suppressed() -> Any:
    random = np.random.default_rng(0)
    corners = random.uniform(0, 40, (90, 2))
    boxes = np.concatenate([corners, corners + random.uniform(5, 20, (90, 2))], 1).astype(np.float32)
    return [decode.suppress(boxes, random.integers(0, 2, 90), nms, most) for nms in (0.3, 0.6) for most in (7, 200)]


def matrix() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows, inputs = torch.randn(6, 96, generator=generator), torch.randn(200, 96, generator=generator)
    return rows, rows.abs().amax(), inputs.T @ inputs


def solved() -> Any:
    return [gptq.gptq(*matrix())]


def scaled() -> Any:
    rows, amax, hessian = matrix()
    blocks = torch.stack([hessian[at : at + 16, at : at + 16] for at in range(0, 96, 16)])
    return [grid.choose_scales(rows, amax, each) for each in (None, blocks)]


PIECES: dict[str, tuple[ModuleType, str, tuple[int, ...], Callable[[], Any]]] = {
    "samples in memory": (cache, "_PROBE", (1, 5, 26, 27), cached),
    "blocks that are rounded": (round_trip, "PIECE", (1, 3, 69, 70), rounded),
    "rows of blocks": (round_trip, "ROWS", (1, 3, 69, 70), rounded),
    "rows that are tinted": (palette, "BAND", (1, 12, 50, 55), tinted),
    "slices that are resampled": (resample, "BAND", (1, 100, 500), resampled),
    "boxes that are compared": (decode, "CHUNK", (1, 7, 89, 90), suppressed),
    "columns of GPTQ": (gptq, "GROUP", (16, 32, 80, 96), solved),
    "scales that are tried": (grid, "AT_ONCE", (1, 3 * 6 * 96, 10**9), scaled),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces_of_any_size_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, constant, sizes, call = PIECES[name]
    monkeypatch.setattr(module, constant, 10**12)
    whole = call()
    for size in sizes:
        monkeypatch.setattr(module, constant, size)
        for expected, found in zip(whole, call(), strict=True):
            np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5, atol=1e-5)
