"""Classes of frames: the reference against the definition pixel by pixel, and what the kernel is launched with."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fp4deploy.plugins.frames import class_map as module
from fp4deploy.plugins.frames.class_map import class_map, class_map_kernel, class_map_reference, supports
from fp4deploy.plugins.runtime.launch import substituted

ONE, HALF = np.float32(1), np.float32(0.5)
SIZES = [(1, 1), (9, 13), (7, 5), (30, 31), (5, 40), (40, 5)]


def sample(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Many equal logits, NaN and infinities."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(2).round().div(2).to(dtype)
    x.view(-1)[::41] = math.inf
    x.view(-1)[5::53] = math.nan
    return x


def defined(logits: torch.Tensor, size: tuple[int, int]) -> list[list[int]]:
    """The class of each pixel of one image, number by number in float32."""
    x, (h, w) = logits.float().numpy(), logits.shape[1:]

    def place(at: int, source: int, target: int) -> tuple[int, int, np.float32]:
        middle = np.float32(at + HALF) * np.float32(source / target) - HALF
        middle = min(max(middle, np.float32(0)), np.float32(source - 1))
        return int(middle), min(int(middle) + 1, source - 1), np.float32(middle - np.float32(int(middle)))

    def best(values: list[np.float32]) -> int:
        nan = [number for number, value in enumerate(values) if math.isnan(value)]
        return nan[0] if nan else values.index(max(values))

    rows: list[list[int]] = []
    for y in range(size[0]):
        top, bottom, down = place(y, h, size[0])
        rows.append([])
        for column in range(size[1]):
            left, right, across = place(column, w, size[1])
            if (h, w) == size:
                rows[-1].append(best(list(x[:, y, column])))
                continue
            lines = [x[:, row, left] * (ONE - across) + x[:, row, right] * across for row in (top, bottom)]
            rows[-1].append(best(list(lines[0] * (ONE - down) + lines[1] * down)))
    return rows


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("band", [1, 300, 1 << 24])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("classes", [1, 2, 19])
def test_the_reference_is_the_definition(
    classes: int, size: tuple[int, int], band: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BAND", band)
    logits = sample(2, classes, 9, 13)
    found = class_map_reference(logits, size, torch.uint8)
    assert found.tolist() == [defined(each, size) for each in logits]


@pytest.mark.parametrize("size", SIZES)
def test_classes_are_those_of_torch(size: tuple[int, int]) -> None:
    """But where two are nearly equal."""
    logits = torch.randn(2, 5, 9, 13, generator=torch.Generator().manual_seed(1))
    enlarged = F.interpolate(logits, size, mode="bilinear", align_corners=False)
    best = enlarged.topk(2, 1).values
    clear = best[:, 0] - best[:, 1] > 1e-5
    assert (class_map(logits, size, torch.uint8) == enlarged.argmax(1))[clear].all()
    assert clear.float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_16_bits_are_widened_first(dtype: torch.dtype) -> None:
    logits = sample(1, 4, 5, 6, dtype=dtype)
    assert torch.equal(class_map(logits, (8, 11), torch.uint8), class_map(logits.float(), (8, 11), torch.uint8))


def launched(logits: torch.Tensor, size: tuple[int, int], dtype: torch.dtype = torch.uint8) -> dict[str, Any]:
    """Macros, and what one launch of the kernel has."""
    found: dict[str, Any] = {}

    def factory(source: str, name: str, signature: str, macros: dict[str, Any]) -> mock.Mock:
        def launch(grid: object, block: object, *arguments: object, shared: int) -> None:
            found.update(macros, grid=grid, block=block, arguments=arguments, shared=shared)

        return mock.Mock(launch=launch)

    with substituted(factory):
        class_map_kernel(logits, size, dtype)
    return found


def test_where_rows_are_staged() -> None:
    last = torch.zeros(2, 150, 88, 120, dtype=torch.float16).to(memory_format=torch.channels_last)
    usual = launched(last, (120, 160))
    assert (usual["STAGED"], usual["LAST"], usual["SAME"], usual["grid"]) == (1, 1, 0, (5, 60, 2))
    assert 0 < usual["shared"] <= module.SHARED
    few = last[:, :64].contiguous(memory_format=torch.channels_last)
    for logits, size in ((last, (88, 120)), (last.contiguous(), (120, 160)), (last, (12, 16)), (few, (120, 160))):
        other = launched(logits, size)
        assert (other["STAGED"], other["shared"]) == (0, 0)


def test_logits_that_begin_anywhere() -> None:
    """Vectors are loaded from addresses that are multiples of their size."""
    flat = torch.zeros(1 + 2 * 20 * 8 * 8, dtype=torch.float16)
    logits = flat[1:].view(2, 8, 8, 20).movedim(-1, 1)
    given = launched(logits, (9, 9))["arguments"][0]
    assert given.data_ptr() % 16 == 0
    assert given.is_contiguous(memory_format=torch.channels_last)


def test_frames_that_are_higher_than_a_grid() -> None:
    assert launched(torch.zeros(1, 2, 3, 1), (65536 * 16, 1))["grid"][1] <= 65535


def test_what_the_kernel_takes() -> None:
    x = torch.empty(1, 2, 3, 4, device="meta")
    assert supports(x, (5, 6))
    assert not supports(x.double(), (5, 6))
    assert not supports(x[:0], (5, 6))
    assert not supports(x, (5, 0))
    assert not supports(torch.empty(1, 1 << 10, 1 << 10, 1 << 10, device="meta"), (5, 6))
