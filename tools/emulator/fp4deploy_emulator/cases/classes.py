"""Cases of the classes of frames: `class_map.cu`, every byte that of the reference.

A map has a NaN, an infinity, and equal logits of two classes; its mask has every byte set before.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch

from fp4deploy.plugins.classes import class_map
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, normal
from fp4deploy_emulator.cases.cuda import BFLOAT, FLOAT, HALF, emulated

FAMILY = "classes of frames"
LAST, FIRST = torch.channels_last, torch.contiguous_format
Size = tuple[int, int]


def logits(setting: Setting, shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format) -> torch.Tensor:
    """Normal ones, rounded so that many are equal."""
    x = (2 * normal(setting, *shape)).round().div(2).to(dtype)
    x[0, shape[1] // 2, 0, -1] = float("nan")
    x[-1, 0, -1, 0] = float("inf")
    x[-1, -1, -1, -1] = float("-inf")
    return x.to(memory_format=layout)


@dataclass(frozen=True)
class Frames:
    """shape: N, C, h, w of the logits; size: of the frames; shared: bytes that a block may have to stage rows in."""

    shape: tuple[int, int, int, int]
    size: Size
    dtype: torch.dtype = HALF
    layout: torch.memory_format = LAST
    mask: torch.dtype = torch.uint8
    block: Size = (32, 4)
    shared: int = class_map.SHARED

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        x = logits(setting, self.shape, self.dtype, self.layout)
        with emulated(setting, outcome), mock.patch.multiple(class_map, SHARED=self.shared, LINE=0):
            found = class_map.class_map_kernel(x, self.size, self.mask, self.block)
        outcome.compare(found, class_map.class_map_reference(x, self.size, self.mask))


CASES = (
    Case("classes of frames", FAMILY, Frames((2, 20, 9, 13), (13, 35))),
    Case("classes of frames, 19, rows of any address", FAMILY, Frames((1, 19, 7, 11), (10, 37))),
    Case("classes of frames, NCHW", FAMILY, Frames((2, 20, 5, 11), (7, 17), BFLOAT, FIRST)),
    Case("classes of frames, smaller", FAMILY, Frames((1, 2, 17, 70), (5, 33), FLOAT)),
    Case("classes of frames, 150, not staged", FAMILY, Frames((1, 150, 5, 6), (7, 9), shared=0)),
    Case("classes of frames, 300, the same size", FAMILY, Frames((2, 300, 3, 5), (3, 5), HALF, LAST, torch.uint16)),
    Case("classes of frames, one class", FAMILY, Frames((2, 1, 3, 5), (4, 6), HALF, LAST)),
)
