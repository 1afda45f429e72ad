"""The sums that cross-entropy and Dice of a segmentation are made of, read from the logits once, and their gradient.

In torch's operators the loss of a UNet is some forty passes over maps of [N, C, H, W] float32. Everything that depends
on pixels is in 2 + 3 C sums over them (`train.losses.segmentation`); what follows is arithmetic of C numbers. So one
kernel reads logits and targets and writes the sums, another reads both again and writes the gradient of the logits.

| | reads | writes |
|---|---|---|
| `segmentation_sums` | logits, targets | 2 + 3 C numbers |
| `segmentation_gradient` | logits, targets, 2 + 3 C numbers | gradient, in the dtype and layout of the logits |

The arithmetic is float32, sums are added in a fixed order: two runs give the same bits. The kernels are in
`cuda/segmentation.cu`; they are torch operators with fake implementations, for `torch.compile` and CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch

from fp4deploy.plugins.runtime.availability import available
from fp4deploy.plugins.runtime.launch import kernel
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES, LIBRARY, THREADS, operator

SOURCE = "segmentation.cu"
BLOCKS = 132 * 4  # at most what a large GPU runs at once
PIXELS = 256  # of a block at a time, fewer where there are many classes
MAX_CLASSES = 1024


def supports(logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> bool:
    """Whether the kernels take these, as `segmentation_sums` describes them."""
    return (
        logits.dtype in CUDA_TYPES
        and logits.ndim == 4
        and 0 < logits.shape[1] <= MAX_CLASSES
        and logits.numel() > 0
        and target.shape == (logits.shape[0], *logits.shape[2:])
        and (target.dtype, target.device) == (torch.int64, logits.device)
        and (weight is None or (weight.shape, weight.device) == (logits.shape[1:2], logits.device))
        and available(logits.device)
    )


def segmentation_sums(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, smoothing: float, ignored: int
) -> torch.Tensor:
    """float32 [2 + 3 C]: sums over the pixels whose target is not `ignored`, with a gradient for the logits.

    Args:
        logits: float16, bfloat16 or float32 [N, C, H, W] on a GPU, C at most 1024.
        target: int64 [N, H, W]; a class that does not exist makes the sums NaN.
        weight: float32 [C] of the classes in the first two sums; 1 by default.
        smoothing: share of the target that all classes have in equal parts.

    Returns:
        -w log p of the smoothed target, w; then for each class c: p_c where c is the target, p_c, and the number of
        pixels whose target it is.

    Raises:
        RuntimeError: in the backward of a backward; their gradient has none.
    """
    if weight is not None:
        weight = weight.detach().float().contiguous()
    found: torch.Tensor = torch.ops.fp4deploy.segmentation_sums(logits, target, weight, smoothing, ignored)
    return found


def _arguments(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, str | int]]:
    """Both as the kernels read them, and the macros."""
    last = logits.stride(1) == 1  # also of a slice
    macros: dict[str, str | int] = {
        "DTYPE": CUDA_TYPES[logits.dtype],
        "CLASSES": logits.shape[1],
        "CHANNELS_LAST": int(last),
    }
    layout = torch.channels_last if last else torch.contiguous_format
    return logits.contiguous(memory_format=layout), target.contiguous(), macros


def _grid(pixels: int) -> int:
    return max(1, min(BLOCKS, -(-pixels // PIXELS)))


@operator(
    "segmentation_sums(Tensor logits, Tensor target, Tensor? weight, float smoothing, int ignored) -> Tensor",
    lambda logits, target, weight, smoothing, ignored: torch.empty(
        2 + 3 * logits.shape[1], dtype=torch.float32, device=logits.device
    ),
)
def _sums(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, smoothing: float, ignored: int
) -> torch.Tensor:
    logits, target, macros = _arguments(logits, target)
    pixels, image, blocks = target.numel(), target[0].numel(), _grid(target.numel())
    partial = torch.empty((blocks, 2 + 3 * logits.shape[1]), dtype=torch.float32, device=logits.device)
    launch = kernel(SOURCE, "segmentation_sums", "PPPPfqqq", macros, logits.device).launch
    launch(blocks, THREADS, logits, target, weight, partial, smoothing, ignored, image, pixels)
    return partial.sum(0)


@operator(
    "segmentation_gradient(Tensor logits, Tensor target, Tensor? weight, Tensor upstream, float smoothing, "
    "int ignored) -> Tensor",
    lambda logits, target, weight, upstream, smoothing, ignored: torch.empty_like(_arguments(logits, target)[0]),
)
def _gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    upstream: torch.Tensor,
    smoothing: float,
    ignored: int,
) -> torch.Tensor:
    logits, target, macros = _arguments(logits, target)
    pixels, image, gradient = target.numel(), target[0].numel(), torch.empty_like(logits)
    launch = kernel(SOURCE, "segmentation_gradient", "PPPPPfqqq", macros, logits.device).launch
    arguments = (logits, target, weight, upstream.contiguous(), gradient)
    launch(_grid(pixels), THREADS, *arguments, smoothing, ignored, image, pixels)
    return gradient


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    logits, target, weight, ctx.smoothing, ctx.ignored = inputs
    ctx.save_for_backward(logits, target, weight)


def _backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gradient = torch.ops.fp4deploy.segmentation_gradient(*ctx.saved_tensors, upstream, ctx.smoothing, ctx.ignored)
    return gradient, None, None, None, None


def _no_backward(ctx: object, gradient: torch.Tensor) -> tuple[None, ...]:
    raise RuntimeError("The loss by its kernels has no second derivatives. FP4DEPLOY_KERNELS=off computes it by torch.")


torch.library.register_autograd("fp4deploy::segmentation_sums", _backward, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("fp4deploy::segmentation_gradient", _no_backward, lib=LIBRARY)
