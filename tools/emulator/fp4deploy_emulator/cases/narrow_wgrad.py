"""Cases of weight gradients of few channels: `narrow_wgrad.cu`.

Operands are small multiples of powers of two, so that every partial sum is exact, whatever its order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp4deploy.graph.sizes import output_size
from fp4deploy.plugins.gemm.convolution import narrow_wgrad
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, multiples
from fp4deploy_emulator.cases.cuda import emulated

Pair = tuple[int, int]
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Gradient:
    """image: N, H, W, C."""

    image: tuple[int, int, int, int]
    outputs: int
    taps: Pair
    stride: int = 1
    padding: Pair = (0, 0)
    dtype: torch.dtype = torch.float16

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        n, h, w, channels = self.image
        axes = zip((h, w), self.taps, (self.stride,) * 2, self.padding, (1, 1), strict=True)
        x = multiples(setting, *self.image, most=4, seed=3).to(self.dtype)
        g = multiples(setting, n, *(output_size(*axis) for axis in axes), self.outputs, most=4, seed=1).to(self.dtype)
        how = (g, x, self.taps, (self.stride, self.stride), self.padding)
        assert narrow_wgrad.supports(channels, self.outputs, *how[2:4])
        assert narrow_wgrad.is_aligned(*(each.permute(0, 3, 1, 2) for each in (g, x)))
        with emulated(setting, outcome):
            dw = narrow_wgrad.wgrad(*how)
        outcome.compare(dw, narrow_wgrad.wgrad_reference(*how))


CASES = tuple(
    Case(f"wgrad, {name}", "weight gradients of few channels", run)
    for name, run in (
        ("3 to 16 channels", Gradient((2, 11, 35, 3), 16, (3, 3), padding=(1, 1))),
        ("16 to 16 channels, BF16", Gradient((1, 9, 33, 16), 16, (3, 3), padding=(1, 1), dtype=BF16)),
        ("64 to 12 channels, 1x1, BF16", Gradient((2, 3, 40, 64), 12, (1, 1), dtype=BF16)),
        ("3 to 64 channels, 7x7, stride 2", Gradient((1, 13, 21, 3), 64, (7, 7), 2, (3, 3))),
        ("32 to 24 channels, 2x2, stride 2", Gradient((1, 10, 12, 32), 24, (2, 2), 2)),
        ("24 to 40 channels, 3x1", Gradient((1, 5, 7, 24), 40, (3, 1), padding=(0, 1), dtype=BF16)),
    )
)
