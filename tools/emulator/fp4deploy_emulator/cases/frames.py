"""Cases of frames: `prepare.cu` and `encode_input.cu` before a network, `class_map.cu` after it, every byte that of the
reference.

A map has a NaN, an infinity, and equal logits of two classes; its mask has every byte set before.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch

from fp4deploy import formats
from fp4deploy.data.augmentation.transforms import scale_and_offset
from fp4deploy.models.input_encoding import encode_input
from fp4deploy.plugins.frames import class_map, prepare
from fp4deploy.plugins.quantize import input_encoding
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, normal
from fp4deploy_emulator.cases.cuda import BFLOAT, FLOAT, HALF, emulated

FAMILY, BEFORE = "classes of frames", "preparation of frames"
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


@dataclass(frozen=True)
class Prepared:
    """shape: N, H, W of the frames; size: of the input; part: of that the frames take, all by default.

    planes: red, green and blue of a frame are apart in memory; two: each is 0 or 255. amax: that the frames' terms are
    packed with, where an operand is written.
    """

    shape: tuple[int, int, int]
    size: Size
    part: Size | None = None
    planes: bool = False
    two: bool = False
    amax: float | None = None

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        frames = normal(setting, *self.shape, 3).mul(1e6 if self.two else 70).add(128).clamp(0, 255).byte()
        if self.planes:
            frames = frames.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
        normalisation = scale_and_offset(torch.device("cpu"), (0.48, 0.45, 0.4), (0.23, 0.22, 0.21))
        given = (frames, self.size, self.part or self.size, (124, 116, 104), *normalisation)
        expected = prepare.prepare_reference(*given)
        if self.amax is None:
            with emulated(setting, outcome):
                found = prepare.prepare_kernel(*given)
            outcome.compare(found, expected)
            return
        amax = torch.tensor(self.amax)
        with emulated(setting, outcome):
            operand = prepare.prepare_and_pack_kernel(*given, amax)
        outcome.compare_packed(operand, formats.quantize_nvfp4(encode_input(expected).permute(0, 2, 3, 1), amax=amax))


@dataclass(frozen=True)
class Encoded:
    """shape: N, H, W of an image of a dtype; amax: that its terms are packed with, 6 where it was calibrated."""

    shape: tuple[int, int, int]
    dtype: torch.dtype = FLOAT
    amax: float = 6.0

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        x = normal(setting, self.shape[0], 3, *self.shape[1:]).mul(1.3)
        x[0, :, 0, 0] = torch.tensor([5.0, -5.0, 0.0])
        x[-1, 0, -1, -1], x[-1, 1, 0, -1], x[-1, 2, -1, 0] = float("nan"), float("inf"), 1e6  # infinite in FP16
        x, amax = x.to(self.dtype), torch.tensor(self.amax)
        with emulated(setting, outcome):
            found = input_encoding.encode_and_pack(x, amax)
        outcome.compare_packed(found, formats.quantize_nvfp4(encode_input(x).permute(0, 2, 3, 1), amax=amax))


CASES = (
    Case("image as FP4 terms", BEFORE, Encoded((2, 9, 17))),
    Case("image as FP4 terms, FP16, another amax", BEFORE, Encoded((1, 7, 300), HALF, 5.3)),
    Case("image as FP4 terms, one pixel", BEFORE, Encoded((1, 1, 1), FLOAT, 40.0)),
    Case("preparation of frames", BEFORE, Prepared((2, 23, 31), (11, 37))),
    Case("preparation of frames, the height first", BEFORE, Prepared((1, 40, 9), (9, 7))),
    Case("preparation of frames, letterboxed", BEFORE, Prepared((2, 30, 20), (12, 35), (12, 8))),
    Case("preparation of frames, by planes", BEFORE, Prepared((2, 9, 14), (7, 20), planes=True)),
    Case("preparation of frames, one pixel", BEFORE, Prepared((1, 1, 1), (3, 5))),
    Case("preparation of frames, the same size", BEFORE, Prepared((1, 9, 33), (9, 33))),
    Case("frames as FP4 terms", BEFORE, Prepared((2, 23, 31), (11, 37), amax=6.0)),
    Case("frames as FP4 terms, the height first", BEFORE, Prepared((1, 40, 9), (9, 7), amax=6.0)),
    Case("frames as FP4 terms, letterboxed, another amax", BEFORE, Prepared((2, 30, 20), (12, 35), (12, 8), amax=20.0)),
    Case("frames as FP4 terms, black or white", BEFORE, Prepared((1, 9, 33), (9, 33), two=True, amax=6.0)),
    Case("frames as FP4 terms, one pixel", BEFORE, Prepared((1, 1, 1), (3, 5), amax=40.0)),
    Case("classes of frames", FAMILY, Frames((2, 20, 9, 13), (13, 35))),
    Case("classes of frames, 19, rows of any address", FAMILY, Frames((1, 19, 7, 11), (10, 37))),
    Case("classes of frames, NCHW", FAMILY, Frames((2, 20, 5, 11), (7, 17), BFLOAT, FIRST)),
    Case("classes of frames, smaller", FAMILY, Frames((1, 2, 17, 70), (5, 33), FLOAT)),
    Case("classes of frames, 150, not staged", FAMILY, Frames((1, 150, 5, 6), (7, 9), shared=0)),
    Case("classes of frames, 300, the same size", FAMILY, Frames((2, 300, 3, 5), (3, 5), HALF, LAST, torch.uint16)),
    Case("classes of frames, one class", FAMILY, Frames((2, 1, 3, 5), (4, 6), HALF, LAST)),
)
