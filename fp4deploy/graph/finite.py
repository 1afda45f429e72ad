"""Decisions by whether all values are finite, as a network of FP16 guards against its overflow.

    if x.dtype == torch.float16 and not torch.isfinite(x).all():          the encoders of BART, M2M100, Conditional DETR
        x = torch.clamp(x, min=-clamp_value, max=clamp_value)

Such a network is no one graph, which a decision by values never is. While it is traced with `Finite`, all values are:
what a file would compute beyond the range of its numbers is refused before it is written (`qat.ranges`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CHECKS = {torch.isfinite: True, torch.isinf: False, torch.isnan: False}
_CHECKS |= {getattr(torch.Tensor, func.__name__): answer for func, answer in _CHECKS.items()}
_OVER_ALL = (torch.all, torch.any, torch.Tensor.all, torch.Tensor.any, torch.logical_not, torch.Tensor.logical_not)


class Finite(TorchFunctionMode):
    """While it is entered, the truth of `isfinite(x).all()`, `isinf(x).any()` and their like is that of finite values.

    >>> with Finite():
    ...     bool(torch.isinf(torch.tensor([1.0, float("inf")])).any())
    False
    """

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[int, tuple[bool, torch.Tensor]] = {}  # kept, so that an id is of this tensor alone

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call, or answer."""
        answer = self.answers.get(id(args[0])) if args else None
        if answer and func is torch.Tensor.__bool__:
            return answer[0]
        result = func(*args, **(kwargs or {}))
        if func in _CHECKS:
            self.answers[id(result)] = _CHECKS[func], result
        elif answer and func in _OVER_ALL:
            self.answers[id(result)] = answer[0] != ("logical_not" in func.__name__), result
        return result
