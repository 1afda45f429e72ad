"""Activations that the backward computes again instead of keeping them.

The weight gradient of a convolution reads its input x' = Q(relu(a v + b)), where v is the output of the convolution
before. The gradient of the norm keeps v, a and b anyway. So x' need not be kept: one kernel computes it again, right
before the weight gradient reads it, from the same numbers by the same operations, and so with the same bits.

    kept by two convolutions with norm, bytes a value      x' kept      codes and scales kept      x' computed again
    v and x'                                               2 + 2        2 + 0.56                   2

Computing it again reads v and writes x', as keeping codes would read codes, write x', and have written the codes in
the forward as well: it keeps less and moves about as much. What it needs is a norm (or pooling, concatenation) whose
own gradient keeps its input.

Where a norm has one reader, a convolution, the two are one function (`qat.fused_unet`): its backward computes dX'
first, and the pass that turns it into dv writes x' over v and dv over dX'. That reads nothing more than the gradient of
the norm does. A concatenation and the gradient of a pooling read v where they would read relu(a v + b).

`recomputing` tells autograd, by its hooks for saved tensors, which tensors can be computed again; the functions that
save them do not know. `convolve` computes the weight gradient before the input's, so that x' is gone before dX, as
large, is allocated. The gradient of the input of a convolution is a transposed convolution of dY with the same weight,
which does not read x'.

Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016 (dropping what is cheap to
compute again).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from fp4deploy.graph.sizes import transposed_size
from fp4deploy.qat.operators.gemms import ConvGemms


@dataclass(frozen=True)
class Call:
    """How a tensor is computed again; arguments may be calls themselves."""

    function: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]

    def __call__(self) -> torch.Tensor:
        with torch.no_grad():
            return self.function(*map(unpack, self.arguments))


class Recomputed:
    """The tensors of one forward that can be computed again."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[weakref.ref[torch.Tensor], Call]] = {}

    def add(self, x: torch.Tensor, call: Call) -> None:
        """`call` gives the bits, shape and strides of `x`."""
        self._calls[x.data_ptr()] = weakref.ref(x), call

    def clear(self) -> None:
        """Forget them, so that each lives as long as what autograd keeps; the hooks of every saved tensor hold this."""
        self._calls.clear()

    def pack(self, x: torch.Tensor) -> torch.Tensor | Call:
        """The call that computes `x` again, or `x` itself; hooks see an alias of what is saved."""
        reference, call = self._calls.get(x.data_ptr(), (None, None))
        known = reference() if reference is not None else None  # what is gone may have left its address to another
        if call is None or known is None or (known.shape, known.stride()) != (x.shape, x.stride()):
            return x
        return call


_running: ContextVar[Recomputed | None] = ContextVar("recomputed", default=None)


@contextmanager
def recomputing() -> Iterator[None]:
    """Inside, autograd saves no tensor that was named by `computed_by`."""
    token = _running.set(recomputed := Recomputed())
    try:
        with torch.autograd.graph.saved_tensors_hooks(recomputed.pack, unpack):
            yield
    finally:
        _running.reset(token)
        recomputed.clear()


def computed_by(x: torch.Tensor, function: Callable[..., torch.Tensor], *arguments: Any) -> None:
    """Name `x` within `recomputing`: function(*arguments) gives its bits, shape and strides again.

    Arguments that can be computed again are not kept either. None of them may change before the backward.
    """
    recomputed = _running.get()
    if recomputed is not None:
        packed = (recomputed.pack(each.detach()) if isinstance(each, torch.Tensor) else each for each in arguments)
        recomputed.add(x, Call(function, tuple(packed)))


def is_recomputing() -> bool:
    """Whether this is within `recomputing`."""
    return _running.get() is not None


def unpack(saved: Any) -> Any:
    """The tensor of a call; anything else as it is."""
    return saved() if isinstance(saved, Call) else saved


def convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gemms: ConvGemms) -> torch.Tensor:
    """Y [N, O, H', W'] of a convolution, it and its gradients by the fastest kernels."""
    y: torch.Tensor = _Convolution.apply(x, weight, bias, gemms)
    return y


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gemms: ConvGemms
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gemms = gemms
        return gemms.multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,), gemms = gradients, ctx.gemms
        x, weight = ctx.saved_tensors
        _, dw, db = gemms.backward(gradient, x, weight, (False, *ctx.needs_input_grad[1:3]))
        back = transposed(gemms, x.shape[2:], gradient.shape[2:])
        del x
        dx = back.multiply(gradient, weight, None) if ctx.needs_input_grad[0] else None
        return dx, dw, db, None


def transposed(gemms: ConvGemms, size: torch.Size, gradient_size: torch.Size) -> ConvGemms:
    """The convolution of dY with the same weight that gives dX of height and width `size`."""
    axes = zip(gradient_size, gemms.kernel, gemms.stride, gemms.padding, gemms.dilation, strict=True)
    extra = tuple(extent - transposed_size(*axis) for extent, axis in zip(size, axes, strict=True))
    return replace(
        gemms, transposed=not gemms.transposed, output_padding=(0,) * len(extra) if gemms.transposed else extra
    )
