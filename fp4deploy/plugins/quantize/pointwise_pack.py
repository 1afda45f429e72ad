"""What lies between two convolutions and works on each element alone, in one pass, output packed or plain.

    v = round(a x + b)             an affine map of each channel: a BatchNorm, or a norm with its statistics
    v = round(v + r)               a residual branch, r = other or round(c other + d)
    y = round(f(v))                an activation function

Each line may be missing. Layer by layer each of them reads and writes a feature map in FP16, and packing reads it
again; here x is read once and y is written at 4.5 bits an element. Every line is rounded to the dtype of x, so that the
bytes are those of the layers one by one.

`pointwise_pack` uses `cuda/pointwise_pack.cu` where it runs and the reference elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fp4deploy import formats
from fp4deploy.errors import UnavailableError
from fp4deploy.plugins.quantize.channels_last import channels_fit
from fp4deploy.plugins.quantize.norm_pack import FeatureMap, OutputForm, chunks, empty, pointers
from fp4deploy.plugins.runtime.availability import available
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.launch import kernel
from fp4deploy.plugins.runtime.pdl import launch_secondary
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES, THREADS

ACTIVATIONS = ("", "relu", "leaky_relu", "silu", "hardswish", "gelu", "relu6")  # by their number in the kernel
SOURCE, NAME, SIGNATURE = "pointwise_pack.cu", "pointwise_pack", "PPqPPqfPPPPqiq"

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
        forms: none of them pooled. Packed ones give `Nvfp4Tensor` [N, H, W, C], plain ones tensors.
    """
    if not runs(x):
        return apply_reference(x, work, forms)
    try:
        return apply_kernels(x, work, forms)
    except UnavailableError as error:
        fallback.refuse(x.device, error)
        return apply_reference(x, work, forms)


def runs(x: torch.Tensor) -> bool:
    """The kernel takes this feature map, on its device."""
    fits = x.dtype in (torch.float16, torch.bfloat16) and channels_fit(x.shape[-1]) and x.numel() > 0
    return x.is_cuda and fits and not fallback.refused(x.device) and available(x.device)


def apply_reference(x: torch.Tensor, work: Pointwise, forms: Sequence[OutputForm]) -> list[FeatureMap]:
    """The same in torch."""
    v = x if work.ab is None else _affine(x, work.ab)
    if work.other is not None:
        v = v + (work.other if work.other_ab is None else _affine(work.other, work.other_ab))
    if work.activation == "leaky_relu":
        v = F.leaky_relu(v, work.slope)
    elif work.activation:
        v = getattr(F, work.activation)(v)
    return [v if form.amax is None else formats.quantize_nvfp4(v, amax=form.amax) for form in forms]


def _affine(x: torch.Tensor, ab: torch.Tensor) -> torch.Tensor:
    a, b = ab[:, :, None, None].unbind(1)
    return (x.float() * a + b).to(x.dtype)


def apply_kernels(x: torch.Tensor, work: Pointwise, forms: Sequence[OutputForm]) -> list[FeatureMap]:
    """`apply_reference` by the kernel; a launch serves one packed and one plain form.

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    results: list[FeatureMap] = [empty(x, form) for form in forms]
    waiting = list(range(len(forms)))
    while waiting:
        served: dict[bool, int] = {}
        for at in waiting:
            served.setdefault(forms[at].amax is None, at)
        _launch(x, work, {(False, plain): results[at] for plain, at in served.items()})
        waiting = [at for at in waiting if at not in served.values()]
    return results


def _launch(x: torch.Tensor, work: Pointwise, results: dict[tuple[bool, bool], FeatureMap]) -> None:
    n, h, w, c = x.shape
    count, per_chunk = chunks(h * w, c, n)
    second = 0 if work.other is None else 1 if work.other_ab is None else 2
    macros: dict[str, str | int] = {
        "DTYPE": CUDA_TYPES[x.dtype],
        "FIRST": int(work.ab is not None),
        "SECOND": second,
        "ACTIVATION": ACTIVATIONS.index(work.activation),
    }
    affine = (work.ab, _item(work.ab), work.other, work.other_ab, _item(work.other_ab))
    targets = pointers(results, False)
    run = kernel(SOURCE, NAME, SIGNATURE, macros, x.device)
    launch_secondary(run, (count, n), THREADS, x, *affine, work.slope, *targets, h * w, c, per_chunk)


def _item(ab: torch.Tensor | None) -> int:
    """Floats between two items of a batch."""
    return 0 if ab is None or len(ab) == 1 else ab[0].numel()
