"""The formats without blocks by name: what everything asks that quantises, stores or checks layers in FP8 or INT8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fp4deploy.formats.constants import E4M3_MAX
from fp4deploy.formats.fp8 import EightBitTensor, fake_quantize_fp8, quantize_fp8, scale_of
from fp4deploy.formats.int8 import INT8_MAX, fake_quantize_int8, quantize_int8


@dataclass(frozen=True)
class EightBits:
    """quantize, fake_quantize: with the arguments of `quantize_fp8`; dtype: of codes; largest: what an amax becomes."""

    quantize: Callable[..., EightBitTensor]
    fake_quantize: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    dtype: torch.dtype
    largest: float

    def scale(self, amax: torch.Tensor) -> torch.Tensor:
        """Of a tensor with this amax."""
        return scale_of(amax, self.largest)


EIGHT_BITS = {
    "fp8": EightBits(quantize_fp8, fake_quantize_fp8, torch.float8_e4m3fn, E4M3_MAX),
    "int8": EightBits(quantize_int8, fake_quantize_int8, torch.int8, INT8_MAX),
}
