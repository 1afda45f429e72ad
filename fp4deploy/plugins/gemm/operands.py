"""From a caller's arguments to operands of a GEMM: activations quantised, amaxes on the device, no gradients.

    input_amax = None         activations stay float16 or bfloat16          W4A16
    input_amax = "dynamic"    packed with their own amax, found in a pass   W4A4
    input_amax = 3.5          packed with a calibrated amax                 W4A4, one pass less; beyond it they saturate

A number becomes a tensor by a fill on the device, never by a copy from the host, so that nothing synchronises.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.gemm.dispatch import DTYPES
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4

InputAmax = float | torch.Tensor | Literal["dynamic"] | None


def refuse_gradients(*operands: object) -> None:
    """Rounding has no gradient; a GEMM that silently dropped it would leave layers untrained.

    Raises:
        InputError: a tensor requires a gradient and gradients are recorded.
    """
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in operands):
        raise InputError(
            "A GEMM of packed tensors has no gradient, and an operand requires one. For inference call them under "
            "torch.no_grad() or give tensor.detach(); to train with NVFP4 use fp4deploy.qat.prepare."
        )


def pack(x: torch.Tensor, input_amax: InputAmax, axis: int = -1) -> Nvfp4Tensor:
    """`x` in blocks along `axis`, which becomes the last.

    Raises:
        InputError: no floating-point tensor, or an amax that is none.
    """
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.ndim == 0:
        kind = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise InputError(
            f"An activation is a floating-point tensor with an axis, or a packed Nvfp4Tensor; this is {kind}."
        )
    if input_amax is None or (isinstance(input_amax, str) and input_amax != "dynamic"):
        raise InputError(f"input_amax is {input_amax!r}. Valid: 'dynamic', a positive number, a float32 tensor of one.")
    amax = None if isinstance(input_amax, str) else scalar(input_amax, x.device, "input_amax")
    return quantize_nvfp4(x, amax=amax, axis=axis)


def scalar(value: float | torch.Tensor, device: torch.device, name: str) -> torch.Tensor:
    """float32 [] on `device`.

    Raises:
        InputError: a number that is not positive and finite, or a tensor of another size, type or device.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.dtype != torch.float32 or value.device != device:
            raise InputError(
                f"{name} is {value.dtype} {tuple(value.shape)} on {value.device}; one float32 on {device} fits, or "
                "a number."
            )
        return value.detach().reshape(())
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{name} is {value!r}; it must be positive and finite.")
    return torch.full((), float(value), dtype=torch.float32, device=device)


def output_dtype(x: torch.Tensor | Nvfp4Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """`dtype`, else that of `x` if it is a possible output dtype, else float16."""
    if dtype is not None:
        return dtype
    return x.dtype if isinstance(x, torch.Tensor) and x.dtype in DTYPES else torch.float16
