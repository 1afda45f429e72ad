"""The precision of the rest: what a deployed network holds and computes with outside of its four and eight bits.

| name | torch | largest number | smallest normal number | digits |
|---|---|---|---|---|
| `fp16` | float16 | 65504 | 6.1e-5 | 11 bits |
| `bf16` | bfloat16 | 3.4e38 | 1.2e-38 | 8 bits |
| `fp32` | float32 | 3.4e38 | 1.2e-38 | 24 bits |

BF16 has the range of FP32 and an eighth of the precision of FP16: it is for networks whose activations leave FP16's
range. The model card has the choice (`ModelCard.rest`), and every file that is made of it.

A number that stands in a network's code may be none that FP16 holds: 1e-12, which keeps a quotient finite, becomes 0
and the quotient of a black image NaN; -1e9, which takes an element out of a softmax, becomes -Inf, and a row of such
elements NaN. Numbers below the smallest normal one lose digits first (1e-6 becomes 9.5e-7) and are then 0. Such numbers
and the operators that read them stay FP32 (`graph.wide` says how far); every other number is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from fp4deploy.errors import InputError

RestName = Literal["fp16", "bf16", "fp32"]
AUTO = "auto"  # FP16, with FP32 for modules whose code leaves its range; BF16 where a layer does (`qat.ranges`)
POSITIONS = 2048  # whole numbers up to here are held only if they are exact: they may be positions
ADVICE = (
    "Deploy it with --rest auto (rest='auto'), which computes what a module's own code overflows in in FP32 and takes "
    "BF16 where a layer or parameter does, or with --rest bf16."
)


@dataclass(frozen=True)
class Rest:
    """A precision of the rest: its name and torch's type.

    wide: paths of modules whose own code, outside of layers, computes in FP32 all the same.
    """

    name: RestName
    dtype: torch.dtype
    wide: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name in tables and ledgers: "FP16"."""
        return self.name.upper()

    @property
    def described(self) -> str:
        """The label, with the modules that are FP32: "FP16, FP32 in attention"."""
        return f"{self.label}, FP32 in {', '.join(self.wide)}" if self.wide else self.label

    @property
    def bytes(self) -> int:
        """Of one number."""
        return self.dtype.itemsize

    @property
    def whole(self) -> int:
        """The whole number up to which all are exact: positions of more elements stay FP32.

        >>> FP16.whole, BF16.whole
        (2048, 256)
        """
        return round(2 / torch.finfo(self.dtype).eps)

    def autocast(self, device: str, enabled: bool = True) -> torch.autocast:
        """What a network of FP32 weights computes in on a type of device: this precision on a GPU, FP32 on a CPU."""
        enabled = enabled and device == "cuda" and self.name != "fp32"
        return torch.autocast(device, dtype=self.dtype if enabled else None, enabled=enabled)

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return torch.finfo(self.dtype).max

    def holds(self, number: float) -> bool:
        """Whether a number is 0, not finite, or in the range of normal numbers, also once it is rounded.

        Of whole numbers that may be positions, whether it is exact.

        >>> FP16.holds(0.1), FP16.holds(1e-8), FP16.holds(-1e9), FP16.holds(float("-inf"))
        (True, False, False, True)
        >>> FP16.holds(257), BF16.holds(257)
        (True, False)
        """
        size = abs(float(number))
        if size == 0 or not math.isfinite(size):
            return True
        inexact = (
            self.whole < size <= POSITIONS
            and size.is_integer()
            and size % 2 ** (math.frexp(size)[1] - math.frexp(self.whole)[1] + 1)
        )
        return not inexact and torch.finfo(self.dtype).tiny <= size <= self.largest

    def holds_tensor(self, x: torch.Tensor) -> bool:
        """Whether a constant can be rounded: a single number as above, several where none becomes infinite.

        Several may be tiny: a standardised weight has elements next to 0, where a 0 is as good. Positions are exact.
        """
        if not x.is_floating_point():
            return True
        if x.numel() == 1:
            return self.holds(x.item())
        if self.whole < POSITIONS and bool((x == x.round()).all()) and bool((x.abs() <= POSITIONS).all()):
            return torch.equal(x.to(self.dtype).to(x.dtype), x)
        return bool((x.abs() <= self.largest).logical_or(~x.isfinite()).all())

    def beyond(self, largest: Mapping[str, float], advice: str = ADVICE) -> str:
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
        limit = f"{self.label}'s largest number is {self.largest:.6g}"
        advised = f" {advice}" if self.name == "fp16" else ""
        return f"{first} reaches {size:.6g}, and {limit}{counted}.{advised}"

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


FP16, BF16, FP32 = Rest("fp16", torch.float16), Rest("bf16", torch.bfloat16), Rest("fp32", torch.float32)
RESTS: dict[str, Rest] = {rest.name: rest for rest in (FP16, BF16, FP32)}


def rest_of(named: Any) -> Rest:
    """The precision of a name, of a type of torch, of what has an attribute `rest` (a model card, the graph of a packed
    network, whose attribute `wide` names modules in FP32); FP16 of None.

    Raises:
        InputError: another name.

    >>> rest_of("bf16").dtype
    torch.bfloat16
    """
    if isinstance(named, torch.dtype):
        return next(rest for rest in RESTS.values() if rest.dtype == named)
    if isinstance(named, Rest):
        return named
    name = "fp16" if named is None else named if isinstance(named, str) else named.rest
    if name not in RESTS:
        raise InputError(f"The precision of the rest is '{name}'. Valid: {', '.join(RESTS)}.")
    wide = tuple(getattr(named, "wide", ()))
    return replace(RESTS[name], wide=wide) if wide else RESTS[name]
