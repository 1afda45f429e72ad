"""Cases of the FP16 and BF16 layers and copies of a packed network without torch: `plain_conv.cu`, `layout.cu`.

The convolution adds in one order, in which the reference adds too: every byte is the same, whatever the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from fp4deploy.models.input_encoding import encode_input
from fp4deploy.plugins.gemm.convolution import plain
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, normal
from fp4deploy_emulator.cases.cuda import emulated

Pair = tuple[int, int]
FAMILY = "FP16 layers"


@dataclass(frozen=True)
class Convolution:
    """image: N, H, W, C; filters: O, KH, KW; bias: of as many outputs, or none."""

    image: tuple[int, int, int, int]
    filters: tuple[int, int, int]
    bias: bool = True
    stride: Pair = (1, 1)
    padding: Pair = (1, 1)
    dilation: Pair = (1, 1)
    relu: bool = True
    dtype: torch.dtype = torch.float16

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        x = normal(setting, *self.image).to(self.dtype)
        weight = normal(setting, *self.filters, self.image[3], seed=1).to(self.dtype)
        bias = normal(setting, self.filters[0], seed=2) if self.bias else None
        how = (x, weight, bias, self.stride, self.padding, self.dilation, self.relu)
        with emulated(setting, outcome):
            y = plain.conv2d(*how)
        outcome.compare(y, plain.conv2d_reference(*how))


def copies(setting: Setting, outcome: Outcome, dtype: torch.dtype = torch.float16) -> None:
    """An image to channels-last, with and without multi-term FP4 encoding; concatenation; planes; classes.

    A NaN stays a NaN, of any bits.
    """
    x = normal(setting, 2, 3, 3, 5)
    x[0, :, 0, 0] = torch.tensor([5.0, -5.0, 0.0])
    x[0, 1, 0, 1] = float("nan")
    logits = torch.tensor([[1.0, 3.0, 3.0], [float("nan"), 1.0, 2.0], [-2.0, -1.0, -3.0]]).to(dtype).view(1, 1, 3, 3)
    with emulated(setting, outcome):
        images = [plain.read_image(each, False, dtype) for each in (x, x.half())]
        terms = [plain.read_image(each, True, dtype) for each in (x, x.half())]
        joined = plain.concat(images)
        planes = [plain.write_planes(images[0], each) for each in (torch.float16, torch.float32)]
        classes = plain.class_map(logits)
    given = [each.to(dtype).permute(0, 2, 3, 1).contiguous() for each in (x, x.half())]
    encoded = encode_input(x.half()).to(dtype).permute(0, 2, 3, 1).contiguous()
    pairs = [*zip(images, given, strict=True), *((each, encoded) for each in terms)]
    pairs += [(joined, torch.cat(given, -1)), *((each, x.to(dtype).to(each.dtype)) for each in planes)]
    for got, wanted in pairs:
        outcome.compare(got.nan_to_num(9), wanted.nan_to_num(9))
    outcome.compare(classes.flatten(), torch.tensor([1, 0, 1], dtype=classes.dtype))


CASES = (
    Case("FP16 convolution, 3 channels", FAMILY, Convolution((1, 5, 7, 3), (18, 3, 3), bias=False, relu=False)),
    Case(
        "FP16 convolution, 3x2, stride 1x2", FAMILY, Convolution((2, 5, 4, 2), (3, 3, 2), True, (1, 2), (1, 0), (2, 1))
    ),
    Case("FP16 convolution, 16 channels", FAMILY, Convolution((1, 3, 5, 16), (17, 3, 3), relu=False)),
    Case("images, planes and classes", FAMILY, copies),
    Case("BF16 convolution, 16 channels", FAMILY, Convolution((1, 3, 5, 16), (17, 3, 3), dtype=torch.bfloat16)),
    Case("BF16 convolution, 3 channels", FAMILY, Convolution((1, 4, 3, 3), (5, 3, 3), dtype=torch.bfloat16)),
    Case("images, planes and classes in BF16", FAMILY, partial(copies, dtype=torch.bfloat16)),
)
