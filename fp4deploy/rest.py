"""The precision of the rest: what a deployed network holds and computes with outside of its four and eight bits.

| name | torch | largest number | smallest normal number | digits |
|---|---|---|---|---|
| `fp16` | float16 | 65504 | 6.1e-5 | 11 bits |

A number that stands in a network's code may be none that FP16 holds: 1e-12, which keeps a quotient finite, becomes 0
and the quotient of a black image NaN; -1e9, which takes an element out of a softmax, becomes -Inf, and a row of such
elements NaN. Numbers below the smallest normal one lose digits first (1e-6 becomes 9.5e-7) and are then 0. Such numbers
and the operators that read them stay FP32 (`graph.wide` says how far); every other number is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fp4deploy.errors import InputError

ADVICE = "Train it under FP16 autocast, or scale down what is computed there."


@dataclass(frozen=True)
class Rest:
    """A precision of the rest: its name and torch's type."""

    name: str
    dtype: torch.dtype

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return torch.finfo(self.dtype).max

    def holds(self, number: float) -> bool:
        """Whether a number is 0, not finite, or in the range of normal numbers, also once it is rounded.

        >>> FP16.holds(0.1), FP16.holds(1e-8), FP16.holds(-1e9), FP16.holds(float("-inf"))
        (True, False, False, True)
        """
        size = abs(float(number))
        return size == 0 or not math.isfinite(size) or torch.finfo(self.dtype).tiny <= size <= self.largest

    def holds_tensor(self, x: torch.Tensor) -> bool:
        """Whether a constant can be rounded: a single number as above, several where none becomes infinite.

        Several may be tiny: a standardised weight has elements next to 0, where a 0 is as good.
        """
        if not x.is_floating_point():
            return True
        if x.numel() == 1:
            return self.holds(x.item())
        return bool((x.abs() <= self.largest).logical_or(~x.isfinite()).all())

    def beyond(self, largest: Mapping[str, float]) -> str:
        """What of several magnitudes, by place, does not fit: a sentence with the limit and what to do; "" if all do.

        >>> FP16.beyond({"stem": 12.5, "attention (bmm)": 131072.0, "head": 65505.0})
        "attention (bmm) reaches 131072, and FP16's largest number is 65504 (1 other place, too: head 65505). ..."
        """
        found = {place: size for place, size in largest.items() if not size <= self.largest}
        if not found:
            return ""
        (first, size), *others = found.items()
        more = ", ".join(f"{place} {each:.6g}" for place, each in others[:3])
        counted = f" ({len(others)} other place{'s' * (len(others) > 1)}, too: {more})" if others else ""
        limit = f"{self.name.upper()}'s largest number is {self.largest:g}"
        return f"{first} reaches {size:.6g}, and {limit}{counted}. {ADVICE}"

    def require(self, name: str, x: torch.Tensor) -> None:
        """Refuse a tensor that holds NaN, Inf, or a number beyond the largest one.

        Raises:
            InputError: naming it, its value, the limit and what to do.
        """
        largest = float(x.detach().abs().max()) if x.numel() else 0.0
        if math.isnan(largest) or math.isinf(largest):
            raise InputError(f"{name} holds NaN or Inf, and cannot be deployed. Take an earlier checkpoint.")
        if largest > self.largest:
            raise InputError(self.beyond({name: largest}))

    def is_wide_number(self, x: torch.Tensor) -> bool:
        """Whether a parameter or buffer is one number, finite, that stays FP32: an epsilon, say."""
        return x.ndim == 0 and bool(x.isfinite()) and not self.holds_tensor(x)

    def rounded(self, number: float) -> float:
        """The number as a file of this precision has it: rounded if it is held, else as it is.

        >>> FP16.rounded(32**-0.5), FP16.rounded(1e-12)
        (0.1767578125, 1e-12)
        """
        return float(torch.tensor(number, dtype=torch.float64).to(self.dtype)) if self.holds(number) else number


FP16 = Rest("fp16", torch.float16)
