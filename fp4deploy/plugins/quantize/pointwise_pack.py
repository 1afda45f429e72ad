"""What lies between two convolutions and works on each element alone, in one pass, output packed or plain.

    v = round(a x + b)             an affine map of each channel: a BatchNorm, or a norm with its statistics
    v = round(v + r)               a residual branch, r = other or round(c other + d)
    y = round(f(v))                an activation function
    p                              the maximum of y over 2 x 2 pixels

Each line may be missing. Layer by layer each of them reads and writes a feature map in FP16, and packing reads it
again; here x is read once and y is written at 4.5 bits an element. Every line is rounded to the dtype of x, so that the
bytes are those of the layers one by one.

`pointwise_pack` uses `cuda/pointwise_pack.cu` where it runs and the reference elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from fp4deploy.plugins.quantize.norm_pack import (
    FeatureMap,
    OutputForm,
    chunks,
    form_of,
    in_launches,
    pointers,
    supports,
)
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.launch import kernel
from fp4deploy.plugins.runtime.pdl import launch_secondary
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES, THREADS

ACTIVATIONS = ("", "relu", "leaky_relu", "silu", "hardswish", "gelu", "relu6")  # by their number in the kernel
SOURCE = "pointwise_pack.cu"
KERNEL, POOLING = ("pointwise_pack", "PPqPPqfPPPPqiq"), ("pointwise_pool_pack", "PPqPPqfPPPPPPPPiqiq")

fallback = Fallback("Elementwise layers of packed networks", "torch")


@dataclass(frozen=True, eq=False)
class Pointwise:
    """What is computed.

    ab: float32 [1 or N, 2, C], a and b; None: v = x.
    other: [N, H, W, C], the residual branch, contiguous; other_ab: c and d of it.
    activation: one of `ACTIVATIONS`; slope: of a leaky ReLU below zero.
    """

    ab: torch.Tensor | None = None
    other: torch.Tensor | None = None
    other_ab: torch.Tensor | None = None
    activation: str = ""
    slope: float = 0.0


def pointwise_pack(x: torch.Tensor, work: Pointwise, forms: Sequence[OutputForm]) -> list[FeatureMap]:
    """The result for a feature map in each of the requested forms.

    Args:
        x: [N, H, W, C], contiguous.
        forms: packed ones give `Nvfp4Tensor` [N, H, W, C], plain ones tensors; pooled ones [N, H/2, W/2, C], for which
            H and W must be even.
    """
    if supports(x) and fallback.runs(x.device):
        with fallback.guard(x.device):
            return apply_kernels(x, work, forms)
    return apply_reference(x, work, forms)


def apply_reference(x: torch.Tensor, work: Pointwise, forms: Sequence[OutputForm]) -> list[FeatureMap]:
    """The same in torch."""
    v = x if work.ab is None else _affine(x, work.ab)
    if work.other is not None:
        v = v + (work.other if work.other_ab is None else _affine(work.other, work.other_ab))
    if work.activation == "leaky_relu":
        v = F.leaky_relu(v, work.slope)
    elif work.activation:
        v = getattr(F, work.activation)(v)
    pooled = F.max_pool2d(v.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1) if any(each.pooled for each in forms) else v
    return [form_of(pooled.contiguous() if each.pooled else v, each.amax) for each in forms]


def _affine(x: torch.Tensor, ab: torch.Tensor) -> torch.Tensor:
    a, b = ab[:, :, None, None].unbind(1)
    return (x.float() * a + b).to(x.dtype)


def apply_kernels(x: torch.Tensor, work: Pointwise, forms: Sequence[OutputForm]) -> list[FeatureMap]:
    """`apply_reference` by kernels.

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    return in_launches(x, forms, partial(_launch, x, work))


def _launch(x: torch.Tensor, work: Pointwise, results: dict[tuple[bool, bool], FeatureMap]) -> None:
    n, h, w, c = x.shape
    pooling = any(pooled for pooled, _ in results)
    pixels = h * w // 4 if pooling else h * w
    count, per_chunk = chunks(pixels, c, n)
    second = 0 if work.other is None else 1 if work.other_ab is None else 2
    macros: dict[str, str | int] = {
        "DTYPE": CUDA_TYPES[x.dtype],
        "FIRST": int(work.ab is not None),
        "SECOND": second,
        "ACTIVATION": ACTIVATIONS.index(work.activation),
    }
    affine = (work.ab, _item(work.ab), work.other, work.other_ab, _item(work.other_ab))
    targets: tuple[object, ...] = pointers(results, False)
    if pooling:
        targets = (*targets, *pointers(results, True), w // 2)
    run = kernel(SOURCE, *(POOLING if pooling else KERNEL), macros, x.device)
    launch_secondary(run, (count, n), THREADS, x, *affine, work.slope, *targets, pixels, c, per_chunk)


def _item(ab: torch.Tensor | None) -> int:
    """Floats between two items of a batch."""
    return 0 if ab is None or len(ab) == 1 else ab[0].numel()
