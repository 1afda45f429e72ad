"""An end to formulas of sizes that grow from layer to layer.

With free sizes torch.export knows the size of every tensor as a formula of the input's. Halving gives short ones,
(x - 1) // 4 + 1. A padding or a window that is computed from the size itself repeats the formula several times, so that
it grows threefold a layer, and deciding whether two of them are equal takes minutes, then hours. `BoundedSizes` raises
once a size has more operators than any file could hold; the number does not depend on the machine, as seconds would.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fp4deploy.errors import InputError

MAX_OPERATORS = 48  # UNets and SegFormer: at most 11. A packed file holds formulas of 64 numbers and operators.


class UnsettledSizes(InputError):
    """The sizes of a network's tensors follow from the input's by formulas that nobody decides on; `cause`: why."""

    def __init__(self, cause: str, advice: str) -> None:
        super().__init__(f"{cause} {advice}")
        self.cause = cause


class _TooLong(Exception):
    """A formula has more than `MAX_OPERATORS`."""


class BoundedSizes(TorchFunctionMode):
    """Ends a tracing where a size becomes too long a formula; the rest is as without. `error`: what ended it."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[object] = set()
        self.error: Exception | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Call, and look at the sizes of what comes back."""
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor):
                self._check(each.shape)
        return result

    def _check(self, shape: Sequence[object]) -> None:
        for size in shape:
            if not isinstance(size, torch.SymInt):
                continue
            expression = size.node.expr
            if expression not in self.known:
                if expression.count_ops() > MAX_OPERATORS:
                    error = _TooLong()
                    self.error = self.error or error  # the exporter's next attempt has no line of the network's code
                    raise error
                self.known.add(expression)


def undecided(error: BaseException | None) -> BaseException | None:
    """What ended a tracing where sympy could not solve a condition on sizes, such as h // 2 = 2 (h // 4)."""
    found = None
    while error is not None:
        if re.search(r"inequality.*cannot be\s+solved", str(error)):
            found = error  # the innermost one, whose traceback has the network's code
        error = error.__cause__ or error.__context__
    return found


def unsettled(kind: str, place: str, advice: str, long: bool = True) -> UnsettledSizes:
    """The error for a network of this class; place: " (net.py, line 12)", or ""; advice: a sentence.

    long: formulas are too long; otherwise a condition on sizes is `undecided`.
    """
    if not long:
        cause = (
            f"{kind} joins tensors{place} whose sizes are rounded down in different ways, such as by a convolution and "
            "a pooling of stride 2; whether they fit for every image size is not decided."
        )
        return UnsettledSizes(cause, advice)
    cause = (
        f"{kind} computes sizes{place} that follow from the image size by formulas of more than {MAX_OPERATORS} "
        "operators, such as a padding that is computed in every layer."
    )
    return UnsettledSizes(cause, advice)
