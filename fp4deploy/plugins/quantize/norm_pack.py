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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch

from fp4deploy import formats
from fp4deploy.formats import NVFP4_BLOCK, Nvfp4Tensor
from fp4deploy.plugins.quantize.channels_last import BLOCKS, VECTOR, channels_fit
from fp4deploy.plugins.quantize.norm_float32 import maximum_of_pixels, norm_relu
from fp4deploy.plugins.quantize.statistics import Moments, chunk_moments, combine
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.launch import kernel
from fp4deploy.plugins.runtime.pdl import launch_secondary
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES, THREADS, operator

FeatureMap = torch.Tensor | Nvfp4Tensor

PIECE = 1 << 16  # elements: temporaries that stay in a core's cache

fallback = Fallback("GroupNorm layers of packed networks", "torch")


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
    if x.device.type == "cpu" and x.dtype == torch.float32:
        written = norm_relu(x, bias, weight, beta, groups, eps, [form.pooled for form in forms])
        return [form_of(y, form.amax) for y, form in zip(written, forms, strict=True)]
    if weight.numel() <= groups * THREADS and supports(x) and fallback.runs(x.device):
        with fallback.guard(x.device):
            ab = combine(moments or chunk_moments(x), x.shape, bias, weight, beta, groups, eps)
            return apply_kernels(x, ab, forms)
    return apply_reference(x, affine(x, bias, weight, beta, groups, eps), forms)


@operator(
    "norm_coefficients(Tensor x, Tensor? bias, Tensor weight, Tensor beta, int groups, float eps) -> Tensor",
    lambda x, *_: torch.empty((x.shape[0], 2, x.shape[-1]), dtype=torch.float32, device=x.device),
    "CompositeExplicitAutograd",
    torch.Tag.needs_fixed_stride_order,
)
def coefficients(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    beta: torch.Tensor,
    groups: int,
    eps: float,
    moments: Moments | None = None,
) -> torch.Tensor:
    """`affine` by kernels where they run; moments: of x, as of `norm_relu_pack`."""
    x = x.contiguous()
    if weight.numel() <= groups * THREADS and supports(x) and fallback.runs(x.device):
        with fallback.guard(x.device):
            return combine(moments or chunk_moments(x), x.shape, bias, weight, beta, groups, eps)
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
    mean, variance = group_moments(x.flatten(1, 2), shift, groups)
    shift, weight, beta = (each.view(groups, -1) for each in (shift, weight, beta))
    a = weight * (variance + eps).rsqrt_()
    return torch.stack([a, a * (shift - mean) + beta], dim=1).flatten(2)


def group_moments(x: torch.Tensor, shift: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of each group, float32 [N, G, 1], of x + shift, x [N, pixels, C].

    Both are sums of one channel, then of a group's channels: torch adds along an outer axis several times as fast as
    `torch.var_mean` reduces two axes.
    """
    pixels, shift = x.shape[1], shift.view(groups, -1)
    count = max(1, pixels) * shift.shape[1]
    pieces = _pieces(x)
    sums = _added(piece.sum(1, dtype=shift.dtype) for piece in pieces).view(-1, *shift.shape)
    mean = (sums + pixels * shift).sum(-1, keepdim=True) / count
    offset = (mean - shift).flatten(1)[:, None]
    squares = _added((piece - offset).square_().sum(1) for piece in pieces).view(-1, *shift.shape)
    return mean, squares.sum(-1, keepdim=True) / count


def _added(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return reduce(torch.Tensor.add_, parts)


def _pieces(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x [N, pixels, C] in pieces of so many pixels that temporaries stay in a core's cache; on a GPU as a whole."""
    pixels = max(1, PIECE // max(1, x.shape[0] * x.shape[2])) if x.device.type == "cpu" else x.shape[1]
    return x.split(max(1, pixels), 1)


def apply_reference(x: torch.Tensor, ab: torch.Tensor, forms: Sequence[OutputForm]) -> list[FeatureMap]:
    """y and p of `x` for given a and b; a x + b is rounded once, as a fused multiply-add does."""
    a, b = ab[:, :, None].double().unbind(1)
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for part, out in zip(_pieces(x.flatten(1, 2)), _pieces(y.flatten(1, 2)), strict=True):
        torch.addcmul(b, a, part, out=out).relu_()  # in float64 the product is exact: only the sum is rounded
    y = y.to(x.dtype)
    pooled = maximum_of_pixels(y) if any(form.pooled for form in forms) else y
    return [form_of(pooled if each.pooled else y, each.amax) for each in forms]


def form_of(y: torch.Tensor, amax: torch.Tensor | None) -> FeatureMap:
    """A feature map as it is, or packed with an amax."""
    return y if amax is None else formats.quantize_nvfp4(y, amax=amax)


def supports(x: torch.Tensor) -> bool:
    """Whether the kernels take a feature map [N, H, W, C]."""
    return x.dtype in (torch.float16, torch.bfloat16) and channels_fit(x.shape[-1]) and x.numel() > 0


def apply_kernels(x: torch.Tensor, ab: torch.Tensor, forms: Sequence[OutputForm]) -> list[FeatureMap]:
    """`apply_reference` by kernels.

    Raises:
        UnavailableError: the kernels do not compile or launch here.
    """
    return in_launches(x, forms, partial(_launch, x, ab))


def in_launches(
    x: torch.Tensor, forms: Sequence[OutputForm], launch: Callable[[dict[tuple[bool, bool], FeatureMap]], None]
) -> list[FeatureMap]:
    """The forms of a result for `x`; a launch serves one packed and one plain form of y and of p."""
    results: list[FeatureMap] = [empty(x, each) for each in forms]
    waiting = list(range(len(forms)))
    while waiting:
        served: dict[tuple[bool, bool], int] = {}
        for at in waiting:
            served.setdefault((forms[at].pooled, forms[at].amax is None), at)
        launch({kind: results[at] for kind, at in served.items()})
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
        launch_secondary(norm, (count, n), THREADS, x, ab, *pointers(results, False), pixels, c, per_chunk)
        return
    both = kernel("norm_pack.cu", "norm_pool_pack", "PPPPPPPPPPiqiq", macros, x.device)
    targets = (*pointers(results, False), *pointers(results, True))
    launch_secondary(both, (count, n), THREADS, x, ab, *targets, w // 2, pixels, c, per_chunk)


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
