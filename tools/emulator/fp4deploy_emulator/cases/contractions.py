"""Cases of `contraction_kernel`: GEMMs and convolutions of any axes, of networks that the C library plays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fp4deploy.native import contraction
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, multiples
from fp4deploy_emulator.launch import emulate_triton

ONE, NONE = [1, 1, 1], [0, 0, 0]


@dataclass(frozen=True)
class Contraction:
    """Groups, items, slices, rows, columns and channels of `x`; `w` has outputs and taps in the place of the middle."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    about: dict[str, Any] = field(default_factory=dict)
    bias: bool = False
    dtype: torch.dtype = torch.float16

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        x = multiples(setting, *self.x, seed=1).to(self.dtype)
        w = multiples(setting, *self.w, seed=2).to(self.dtype)
        bias = multiples(setting, *self.w[:2], seed=3) if self.bias else None
        about = {"stride": ONE, "padding": NONE, "dilation": ONE, "extent": list(self.x[2:5]), "alpha": 0.5}
        about |= {"relu": False, "transposed": False, "apart": False, "wide": False} | self.about
        expected = torch.ops.fp4deploy.contract(x, w, bias, *about.values())
        out = torch.empty_like(expected)
        call = contraction.call((x, w, bias, *about.values()), out)
        outcome.add(emulate_triton(call, setting.arch, [out], setting.model, setting.edit, setting.grid, setting.gpu))
        outcome.compare(out, expected)


FAMILY = "contractions"


def by_warps(capability: int) -> bool:
    """In 16 bits SM90 multiplies transposed operands by `wgmma`, SM100 by `tcgen05.mma`, not in the emulator."""
    return capability >= 120


STRIDED = {"stride": [2, 1, 2], "padding": [1, 1, 0], "dilation": [1, 2, 1], "extent": [2, 6, 3], "relu": True}
UP = {"stride": [1, 2, 2], "padding": [0, 1, 0], "extent": [2, 5, 6], "transposed": True}
CASES = (
    Case(
        "products, FP32",
        FAMILY,
        Contraction((3, 1, 1, 1, 70, 20), (3, 40, 1, 1, 1, 20), {"apart": True}, dtype=torch.float32),
    ),
    Case(
        "convolution of volumes, ReLU",
        FAMILY,
        Contraction((1, 2, 3, 8, 7, 24), (1, 20, 2, 3, 2, 24), STRIDED, True),
        by_warps,
    ),
    Case(
        "transposed, two groups, BF16",
        FAMILY,
        Contraction((2, 1, 2, 3, 3, 8), (2, 5, 1, 2, 2, 8), UP, True, torch.bfloat16),
        by_warps,
    ),
)
