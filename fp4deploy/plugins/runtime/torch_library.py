"""The namespace `torch.ops.fp4deploy` that this package registers its operators in, and their dtypes in CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

LIBRARY = torch.library.Library("fp4deploy", "FRAGMENT")
CUDA_TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
Function = TypeVar("Function", bound=Callable[..., Any])
THREADS = 256
ANY_DEVICE = "CompositeExplicitAutograd"  # of an operator: the emulator runs kernels on tensors of the CPU
SMALL = 2**31 - 2**10  # threads that 32-bit indices can count


def like_first(x: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
    """A result of the shape, type and layout of the first argument."""
    return torch.empty_like(x)


def scalar(x: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
    """A result float32 []."""
    return torch.empty((), dtype=torch.float32, device=x.device)


def operator(
    schema: str, fake: Callable[..., object], dispatch: str = "CUDA", tag: torch.Tag | None = None
) -> Callable[[Function], Function]:
    """Register a function as the operator `torch.ops.fp4deploy.NAME`, with what it gives of tensors without data.

    tag: what a compiler is told, such as `needs_fixed_stride_order` (of its arguments).
    """
    name = schema.partition("(")[0]

    def register(function: Function) -> Function:
        LIBRARY.define(schema, tags=() if tag is None else (tag,))
        LIBRARY.impl(name, function, dispatch)
        torch.library.register_fake(f"fp4deploy::{name}", fake, lib=LIBRARY)
        return function

    return register
