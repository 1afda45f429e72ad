"""GroupNorm + ReLU (+ pooling 2x2), output in the forms that the next layers read: packed NVFP4 or plain.

    y = round(relu(a x + b)),   a = gamma rstd,   b = a (bias - mean) + beta       of each batch item and channel
    p = maximum of y over 2 x 2 pixels

`bias` is that of the convolution before, added here. Statistics are taken in FP32 over a group's channels and all
pixels; y is rounded to the dtype of x, and the rounded values are packed along the channels as
`formats.quantize_nvfp4` packs them. An encoder level of a UNet requests y with the scale of the decoder's convolution
and p with that of the next level: 4.5 bits an element each, and no FP16 feature map.

`norm_relu_pack` uses the kernels of `cuda/norm_statistics.cu` (`statistics`) and `cuda/norm_pack.cu` where they run,
and the reference elsewhere. For the same a and b both give the same bytes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fp4deploy import formats
from fp4deploy.errors import UnavailableError
from fp4deploy.formats import NVFP4_BLOCK, Nvfp4Tensor
from fp4deploy.plugins.quantize.channels_last import BLOCKS, VECTOR, channels_fit
from fp4deploy.plugins.quantize.statistics import Moments, chunk_moments, combine
from fp4deploy.plugins.runtime.availability import available
from fp4deploy.plugins.runtime.launch import kernel
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES, THREADS

FeatureMap = torch.Tensor | Nvfp4Tensor

PIECE = 1 << 16  # elements: temporaries that stay in a core's cache
FEW = 1 << 15  # elements that torch.var_mean is as fast for

_refused: set[torch.device] = set()


@dataclass(frozen=True)
class OutputForm:
    """One requested form of the output.

    amax: float32 [], the global amax to pack with; None keeps the values in the dtype of the input.
    pooled: the maximum of 2 x 2 pixels instead of every pixel.
    """

    amax: torch.Tensor | None = None
    pooled: bool = False


def norm_relu_pack(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    beta: torch.Tensor,
    groups: int,
    eps: float,
    forms: Sequence[OutputForm],
    moments: Moments | None = None,
) -> list[FeatureMap]:
    """The normalised and rectified feature map in each of the requested forms.

    Args:
        x: [N, H, W, C], contiguous, the output of a convolution without its bias.
        bias, weight, beta: float32 [C]; of the convolution (or None) and of the GroupNorm.
        forms: packed ones give `Nvfp4Tensor` [N, H, W, C], plain ones tensors; pooled ones [N, H/2, W/2, C], for
            which H and W must be even.
        moments: of x, where the convolution that wrote it gave them.
    """
    if not _runs(x) or weight.numel() > groups * THREADS:
        return apply_reference(x, affine(x, bias, weight, beta, groups, eps), forms)
    try:
        ab = combine(moments or chunk_moments(x), x.shape, bias, weight, beta, groups, eps)
        return apply_kernels(x, ab, forms)
    except UnavailableError as error:
        _refuse(x.device, error)
        return apply_reference(x, affine(x, bias, weight, beta, groups, eps), forms)


def coefficients(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    beta: torch.Tensor,
    groups: int,
    eps: float,
) -> torch.Tensor:
    """`affine` by kernels where they run."""
    if _runs(x) and weight.numel() <= groups * THREADS:
        try:
            return combine(chunk_moments(x), x.shape, bias, weight, beta, groups, eps)
        except UnavailableError as error:
            _refuse(x.device, error)
    return affine(x, bias, weight, beta, groups, eps)


def affine(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    beta: torch.Tensor,
    groups: int,
    eps: float,
) -> torch.Tensor:
    """a and b, float32 [N, 2, C], of feature maps [N, H, W, C]: the reference of the statistics."""
    shift = torch.zeros_like(weight) if bias is None else bias
    variance, mean = group_moments(x.flatten(1, 2), shift, groups)
    width = weight.numel() // groups
    rstd, mean = (each[..., None].expand(-1, -1, width).flatten(1) for each in ((variance + eps).rsqrt(), mean))
    a = weight * rstd
    return torch.stack([a, a * (shift - mean) + beta], dim=1)


def group_moments(x: torch.Tensor, shift: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance and mean of each group, [N, G], of x + shift, x [N, pixels, C]: those of `torch.var_mean`.

    On the CPU that adds in float64, with a division for every element, and rounds to float32. Sums in float64 of what
    is left beside an estimate of the mean take a sixth of its time and, but for float64's last bits, give the same.
    Where those could decide how a moment is rounded, and where a moment is not finite, `torch.var_mean` decides; and of
    few elements, whose sum is often halfway between two numbers.
    """
    if x.device.type == "cpu" and x.dtype == shift.dtype == torch.float32 and x.numel() > FEW:
        found = _sums(x, shift, groups)
        if found is not None:
            return found
    return torch.var_mean((x.to(shift.dtype) + shift).unflatten(-1, (groups, -1)), dim=(1, 3), correction=0)


def _sums(x: torch.Tensor, shift: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`group_moments` by sums in float64; None where they leave open how a moment is rounded."""
    pixels, width = x.shape[1], x.shape[2] // groups
    origin = (x[:, :1] + shift).double()
    sums, squares = torch.zeros_like(origin[:, 0]), torch.zeros_like(origin[:, 0])
    for part in _pieces(x):
        centred = (part + shift).double().sub_(origin)
        sums += centred.sum(1)
        squares += centred.square_().sum(1)
    first, second, base = (each.view(len(x), groups, width).numpy() for each in (sums, squares, origin))
    with np.errstate(all="ignore"):
        offsets = first / pixels
        means = base + offsets
        mean = means.mean(-1)
        spread = second / pixels - offsets**2 + (means - mean[..., None]) ** 2
        variance = spread.mean(-1)
        size, largest, last = abs(mean), (second / pixels).mean(-1) + variance, 64 * np.finfo(np.float64).eps
        drift = last * math.sqrt(pixels * width)  # what the roundings of a running mean add up to
        margins = drift * size + last * np.sqrt(largest), drift * (largest + size * np.sqrt(largest) + drift * size**2)
        if not (_rounds_alike(mean, margins[0]) and _rounds_alike(variance, margins[1])):
            return None
        return torch.from_numpy(variance.astype(np.float32)), torch.from_numpy(mean.astype(np.float32))


def _pieces(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x [N, pixels, C] in pieces of so many pixels that temporaries stay in a core's cache; on a GPU as a whole."""
    pixels = max(1, PIECE // max(1, x.shape[0] * x.shape[2])) if x.device.type == "cpu" else x.shape[1]
    return x.split(max(1, pixels), 1)


def _rounds_alike(x: NDArray[np.float64], margin: NDArray[np.float64]) -> bool:
    """Whether all numbers within a margin of `x` are rounded to the same float32."""
    return bool(((x - margin).astype(np.float32) == (x + margin).astype(np.float32)).all())


def apply_reference(x: torch.Tensor, ab: torch.Tensor, forms: Sequence[OutputForm]) -> list[FeatureMap]:
    """y and p of `x` for given a and b; a x + b is rounded once, as a fused multiply-add does."""
    a, b = ab[:, :, None].double().unbind(1)
    # a product of two float32 is exact in float64: only the sum is rounded
    exact = (torch.addcmul(b, a, part.double()) for part in _pieces(x.flatten(1, 2)))
    written = [each.float().relu_().to(x.dtype) for each in exact]
    y = (torch.cat(written, 1) if len(written) > 1 else written[0]).view(x.shape)
    pooled = y
    if any(form.pooled for form in forms):
        rows = torch.maximum(y[:, ::2], y[:, 1::2])
        pooled = torch.maximum(rows[:, :, ::2], rows[:, :, 1::2])
    return [_form(pooled if each.pooled else y, each.amax) for each in forms]


def _form(y: torch.Tensor, amax: torch.Tensor | None) -> FeatureMap:
    return y if amax is None else formats.quantize_nvfp4(y, amax=amax)


def _refuse(device: torch.device, error: UnavailableError) -> None:
    _refused.add(device)
    warnings.warn(f"GroupNorm falls back from its CUDA kernel to torch on {device}: {error}", stacklevel=3)


def _runs(x: torch.Tensor) -> bool:
    fits = x.dtype in (torch.float16, torch.bfloat16) and channels_fit(x.shape[-1]) and x.numel() > 0
    return x.is_cuda and fits and x.device not in _refused and available(x.device)


def apply_kernels(x: torch.Tensor, ab: torch.Tensor, forms: Sequence[OutputForm]) -> list[FeatureMap]:
    """`apply_reference` by kernels; a launch serves one packed and one plain form of y and of p.

    Raises:
        UnavailableError: the kernels do not compile or launch here.
    """
    results: list[FeatureMap] = [empty(x, each) for each in forms]
    waiting = list(range(len(forms)))
    while waiting:
        served: dict[tuple[bool, bool], int] = {}
        for at in waiting:
            served.setdefault((forms[at].pooled, forms[at].amax is None), at)
        _launch(x, ab, {kind: results[at] for kind, at in served.items()})
        waiting = [at for at in waiting if at not in served.values()]
    return results


def empty(x: torch.Tensor, form: OutputForm) -> FeatureMap:
    """Memory for a form of the result for `x`."""
    n, h, w, c = x.shape
    shape = (n, h // 2, w // 2) if form.pooled else (n, h, w)
    if form.amax is None:
        return torch.empty((*shape, c), dtype=x.dtype, device=x.device)
    codes = torch.empty((*shape, c // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty((*shape, c // NVFP4_BLOCK), dtype=torch.uint8, device=x.device)
    return Nvfp4Tensor(codes, scales.view(torch.float8_e4m3fn), form.amax, torch.Size([*shape, c]))


def _launch(x: torch.Tensor, ab: torch.Tensor, results: dict[tuple[bool, bool], FeatureMap]) -> None:
    n, h, w, c = x.shape
    pooling = any(pooled for pooled, _ in results)
    pixels = h * w // 4 if pooling else h * w
    count, per_chunk = chunks(pixels, c, n)
    macros: dict[str, str | int] = {"DTYPE": CUDA_TYPES[x.dtype]}
    if not pooling:
        norm = kernel("norm_pack.cu", "norm_pack", "PPPPPPqiq", macros, x.device)
        norm.launch((count, n), THREADS, x, ab, *pointers(results, False), pixels, c, per_chunk)
        return
    both = kernel("norm_pack.cu", "norm_pool_pack", "PPPPPPPPPPiqiq", macros, x.device)
    targets = (*pointers(results, False), *pointers(results, True))
    both.launch((count, n), THREADS, x, ab, *targets, w // 2, pixels, c, per_chunk)


def chunks(pixels: int, channels: int, batch: int) -> tuple[int, int]:
    """How many chunks a feature map is cut into, and the pixels of a chunk: one trip a thread for small ones."""
    count = max(1, min(-(-pixels // (THREADS // (channels // VECTOR))), -(-BLOCKS // batch)))
    per_chunk = -(-pixels // count)
    return -(-pixels // per_chunk), per_chunk


def pointers(results: dict[tuple[bool, bool], FeatureMap], pooled: bool) -> tuple[torch.Tensor | None, ...]:
    """amax, codes, scales, values."""
    packed, plain = results.get((pooled, False)), results.get((pooled, True))
    values = plain if isinstance(plain, torch.Tensor) else None
    if not isinstance(packed, Nvfp4Tensor):
        return None, None, None, values
    return packed.amax, packed.codes, packed.scales, values
