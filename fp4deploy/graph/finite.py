"""Decisions by whether all values are finite, as a network of FP16 guards against its overflow.

    if x.dtype == torch.float16 and not torch.isfinite(x).all():          the encoders of BART, M2M100, Conditional DETR
        x = torch.clamp(x, min=-clamp_value, max=clamp_value)

Such a network is no one graph, which a decision by values never is. While it is traced with `finite`, all values are:
what a file would compute beyond the range of its numbers is refused before it is written (`qat.ranges`).
"""

from __future__ import annotations

from functools import partial

import torch

from fp4deploy.graph.replacement import Function, Table

_CHECKS = {torch.isfinite: True, torch.isinf: False, torch.isnan: False}
_CHECKS |= {getattr(torch.Tensor, func.__name__): answer for func, answer in _CHECKS.items()}
_OVER_ALL = (torch.all, torch.any, torch.Tensor.all, torch.Tensor.any)
_NEGATED = (
    torch.logical_not, torch.bitwise_not, torch.Tensor.logical_not, torch.Tensor.bitwise_not, torch.Tensor.__invert__,
)  # fmt: skip


def finite() -> Table:
    """By this table `Rewriting` takes `isfinite(x).all()`, `isinf(x).any()` and their like for those of finite values.

    >>> from fp4deploy.graph.replacement import Rewriting
    >>> with Rewriting(finite()):
    ...     bool(torch.isinf(torch.tensor([1.0, float("inf")])).any())
    False
    """
    answers: dict[int, tuple[bool, torch.Tensor]] = {}  # kept, so that an id is of this tensor alone

    def truth(call: Function, x: torch.Tensor) -> object:
        return answers[id(x)][0] if id(x) in answers else call(x)

    def check(answer: bool, call: Function, *args: object, **kwargs: object) -> object:
        result = call(*args, **kwargs)
        answers[id(result)] = answer, result
        return result

    def over_all(negated: bool, call: Function, *args: object, **kwargs: object) -> object:
        result, answer = call(*args, **kwargs), answers.get(id(args[0])) if args else None
        if answer:
            answers[id(result)] = answer[0] != negated, result
        return result

    checks = {function: partial(check, answer) for function, answer in _CHECKS.items()}
    rest = {function: partial(over_all, function in _NEGATED) for function in (*_OVER_ALL, *_NEGATED)}
    return {torch.Tensor.__bool__: truth, torch.Tensor.item: truth, **checks, **rest}
