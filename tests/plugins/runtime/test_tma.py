"""The arguments of `cuTensorMapEncodeTiled`, and what is made of its answer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fp4deploy.plugins import KernelError
from fp4deploy.plugins.gemm.gemv import BOX, SCALE_BOX, WIDE
from fp4deploy.plugins.runtime import tma


class Library:
    """Stands for libcuda: records the arguments, and answers with a tensor map that contains its number."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.result = self.contexts = 0
        self.gpu: Any = mock.Mock()
        self.gpu.context.push = lambda: self.move(1)
        self.gpu.driver.Context.pop = lambda: self.move(-1)

    def move(self, by: int) -> None:
        self.contexts += by

    def cuTensorMapEncodeTiled(self, place: Any, kind: int, rank: int, address: Any, *more: Any) -> int:
        sizes, pitches, box, steps, *enumerations = more
        assert self.contexts == 1
        assert place.value % 64 == 0
        assert list(steps) == [1] * rank
        self.told.append((kind, rank, address.value, list(sizes), list(pitches), list(box), enumerations))
        ctypes.memset(place.value, len(self.told), tma.SIZE)
        return self.result


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    found = Library()
    monkeypatch.setattr(tma, "library", lambda: found)
    tma._encoded.cache_clear()
    yield found
    assert found.contexts == 0
    tma._encoded.cache_clear()


def test_what_the_driver_is_told(library: Library) -> None:
    codes, scales = torch.zeros(72, 384, dtype=torch.uint8), torch.zeros(72, 48).to(torch.float8_e4m3fn)
    assert tma.tensor_map(library.gpu, codes, 64, BOX, WIDE // BOX) == bytes([1]) * 128
    assert tma.tensor_map(library.gpu, scales, 64, SCALE_BOX) == bytes([2]) * 128
    assert library.told == [
        (0, 3, codes.data_ptr(), [128, 72, 3], [384, 128], [128, 64, 2], [0, 3, 0, 0]),
        (0, 2, scales.data_ptr(), [48, 72], [48], [32, 64], [0, 1, 0, 0]),
    ]


def test_a_matrix_is_described_once(library: Library) -> None:
    matrix = torch.zeros(40, 256, dtype=torch.uint8)
    first = tma.tensor_map(library.gpu, matrix, 16, 128, 2)
    assert tma.tensor_map(library.gpu, matrix, 16, 128, 2) == first
    assert len(library.told) == 1
    assert tma.tensor_map(library.gpu, matrix, 32, 128, 2) != first
    assert tma.tensor_map(library.gpu, matrix[8:], 16, 128, 2) != first
    assert len(library.told) == 3


def test_a_refusal(library: Library) -> None:
    library.result = 1
    with pytest.raises(KernelError, match=r"encodes no tensor map of \[8, 32\] in boxes of \[16, 32\]: CUDA error 1"):
        tma.tensor_map(library.gpu, torch.zeros(8, 32, dtype=torch.uint8), 16, 32)
