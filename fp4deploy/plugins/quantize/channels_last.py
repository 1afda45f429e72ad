"""Fused operations on channels_last feature maps: the layers between two convolutions of a UNet, in few passes.

| operation | forward | backward |
|---|---|---|
| `group_norm_relu` | bias of the convolution + GroupNorm + ReLU + fake quantisation | all of it in two passes |
| `group_norm_relu_again` | the same output from the coefficients of the first time | - |
| `group_norm_relu_backward_` | - | the output again in place of x, and the gradient in place of dy |
| `group_norm_relu_backward_clipped` | - | the same passes where another kernel quantised, with its in-range mask |
| `concat_again`, `pool_backward_again` | as `concat`, `pool_backward`, from what a GroupNorm read; no mask | - |
| `pool` | 2x2 maximum + fake quantisation | added to the gradient of the skip connection |
| `concat` | bias of the second input + concatenation + fake quantisation | `separate` |
| `separate` | - | split, zero where an element was clipped, and the gradient of the bias |
| `track_amax` | amax of a tensor + bias, and the running amax of a static scale | - |
| `previous_amax` | the running amax of earlier steps; at the very first step the tensor's own | - |

A bias is float32 [C], optional, and added as a convolution adds its own: rounded to the dtype of the feature map, the
sum in float32 and rounded again.

The input of the next convolution is fake-quantised to NVFP4 in blocks of 16 channels with a static global scale, as by
`formats.fake_quantize_nvfp4`. The kernels are in `cuda/group_norm.cu`, `pool.cu`, `concat.cu` and
`track_amax.cu`. They are torch operators (`torch.ops.fp4deploy.*`) with fake implementations, so that `torch.compile`
and CUDA graphs take them; nothing synchronises, and nothing but outputs and small scratch is allocated.

Feature maps are float16 or bfloat16 [N, C, H, W], contiguous in channels_last; C a multiple of 16, at most 2048.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.plugins.runtime.launch import kernel
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES, THREADS, like_first, operator

VECTOR = 8
BLOCKS = 132 * 8  # two waves on a large GPU


def channels_fit(channels: int) -> bool:
    """Whether these kernels take feature maps of so many channels."""
    return channels % NVFP4_BLOCK == 0 and 0 < channels <= VECTOR * THREADS


def _macros(x: torch.Tensor, quantize: bool) -> dict[str, str | int]:
    return {"DTYPE": CUDA_TYPES[x.dtype], "QUANTIZE": int(quantize)}


def chunks_of(pixels: int, channels: int, batch: int) -> tuple[int, int]:
    """How many chunks a feature map of `pixels` is cut into, and the pixels of a chunk."""
    rows = THREADS // (channels // VECTOR)
    count = max(1, min(-(-pixels // (4 * rows)), -(-BLOCKS // batch)))
    per_chunk = -(-pixels // count)
    return -(-pixels // per_chunk), per_chunk


def _scratch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cells = torch.zeros(2, dtype=torch.int32, device=x.device)
    return cells[0], cells[1]


def _float(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def group_statistics(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    beta: torch.Tensor,
    groups: int,
    eps: float,
    tracked: torch.Tensor | None = None,
    decay: float = 0.0,
    quantize: bool = False,
    delayed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The statistics pass of a GroupNorm: the coefficients of y = relu(a x + b).

    Returns:
        ab [N, 2, C]; mean and 1/std of each group [N, groups, 2]; mean of each channel [N, C]; the amax of y [1], with
        `tracked` the running amax after this step, or `delayed` the one before it.
    """
    n, c, h, w = x.shape
    pixels, device = h * w, x.device
    macros, (chunks, per_chunk) = _macros(x, quantize), chunks_of(pixels, c, n)
    rows = THREADS // (c // VECTOR)
    partial, ab = _float(x, n, chunks, 4, c), _float(x, n, 2, c)
    mean_rstd, channel_mean, largest = _float(x, n, groups, 2), _float(x, n, c), _float(x, 1)
    cell, counter = _scratch(x)
    moments = kernel("group_norm.cu", "moments", "PPqiq", macros, device)
    moments.launch((chunks, n), THREADS, x, partial, pixels, c, per_chunk, shared=4 * rows * c)
    combine = kernel("group_norm.cu", "combine", "PPPPPPPPPPPPffqiiii", macros, device)
    combine.launch(
        (groups, n),
        THREADS,
        *(x, partial, bias, weight, beta, ab, mean_rstd, channel_mean, tracked, largest, cell, counter),
        *(decay, eps, pixels, c, groups, chunks, int(delayed)),
    )
    return ab, mean_rstd, channel_mean, largest


def _fake_group_norm_relu(x, bias, weight, beta, groups, eps, amax, tracked, decay, quantize, delayed=False):  # type: ignore[no-untyped-def]
    n, c = x.shape[:2]
    return torch.empty_like(x), _float(x, n, 2, c), _float(x, n, groups, 2), _float(x, n, c), _float(x, 1)


@operator(
    "group_norm_relu(Tensor x, Tensor? bias, Tensor weight, Tensor beta, int groups, float eps, Tensor? amax, "
    "Tensor(a!)? tracked, float decay, bool quantize, bool delayed=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_group_norm_relu,
)
def _group_norm_relu(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    beta: torch.Tensor,
    groups: int,
    eps: float,
    amax: torch.Tensor | None,
    tracked: torch.Tensor | None,
    decay: float,
    quantize: bool,
    delayed: bool = False,
) -> tuple[torch.Tensor, ...]:
    ab, mean_rstd, channel_mean, largest = group_statistics(
        x, bias, weight, beta, groups, eps, tracked, decay, quantize, delayed
    )
    y = _group_norm_relu_again(x, ab, largest if amax is None else amax, quantize)
    return y, ab, mean_rstd, channel_mean, largest


@operator(
    "group_norm_relu_again(Tensor x, Tensor ab, Tensor amax, bool quantize) -> Tensor",
    like_first,
)
def _group_norm_relu_again(x: torch.Tensor, ab: torch.Tensor, amax: torch.Tensor, quantize: bool) -> torch.Tensor:
    n, c, h, w = x.shape
    pixels = h * w
    macros, (chunks, per_chunk) = _macros(x, quantize), chunks_of(pixels, c, n)
    y = torch.empty_like(x)
    apply = kernel("group_norm.cu", "apply", "PPPPqiq", macros, x.device)
    apply.launch((chunks, n), THREADS, x, ab, amax, y, pixels, c, per_chunk)
    return y


def _fake_gradients(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), _float(x, 3, x.shape[1])


@operator(
    "group_norm_relu_backward(Tensor x, Tensor dy, Tensor ab, Tensor mean_rstd, Tensor channel_mean, Tensor? bias, "
    "Tensor weight, Tensor amax, bool quantize) -> (Tensor, Tensor)",
    _fake_gradients,
)
def _group_norm_relu_backward(
    x: torch.Tensor, dy: torch.Tensor, *arguments: Any, in_range: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    (*saved, amax, masks), dx = arguments, torch.empty_like(x)
    dy = dy.contiguous(memory_format=torch.channels_last)
    return dx, _gradients(x, dy, saved, amax, masks, dx, in_range=in_range)


@operator(
    "group_norm_relu_backward_clipped(Tensor x, Tensor dy, Tensor ab, Tensor mean_rstd, Tensor channel_mean, "
    "Tensor? bias, Tensor weight, Tensor inside) -> (Tensor, Tensor)",
    _fake_gradients,
)
def _group_norm_relu_backward_clipped(
    x: torch.Tensor, dy: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *saved, in_range = arguments
    return _group_norm_relu_backward(x, dy, *saved, None, False, in_range=in_range)


@operator(
    "group_norm_relu_backward_(Tensor(a!) x, Tensor(b!) dy, Tensor ab, Tensor mean_rstd, Tensor channel_mean, "
    "Tensor? bias, Tensor weight, Tensor amax, bool clips, bool quantize) -> Tensor",
    lambda x, *rest: _float(x, 3, x.shape[1]),
)
def _group_norm_relu_backward_in_place(x: torch.Tensor, dy: torch.Tensor, *arguments: Any) -> torch.Tensor:
    *saved, amax, clips, quantize = arguments
    return _gradients(x, dy, saved, amax, clips, dy, x, 2 if quantize else 1)


def _gradients(
    x: torch.Tensor,
    dy: torch.Tensor,
    saved: list[Any],
    amax: torch.Tensor | None,
    masks: bool,
    dx: torch.Tensor,
    y: torch.Tensor | None = None,
    recompute: int = 0,
    in_range: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write dx, and y where `recompute` says how; the sums for gamma, beta and the bias [3, C].

    saved: ab, mean_rstd, channel_mean, bias and weight.
    in_range: the in-range mask, bits in the order of memory, of what another kernel quantised; `masks` is False then.
    """
    ab, mean_rstd, channel_mean, bias, weight = saved
    n, c, h, w = x.shape
    groups, pixels = mean_rstd.shape[1], h * w
    macros, (chunks, per_chunk), device = _macros(x, masks), chunks_of(pixels, c, n), x.device
    rows = THREADS // (c // VECTOR)
    partial, pqr, channel_sums = _float(x, n, chunks, 2, c), _float(x, n, 3, c), _float(x, n, 3, c)
    out = _float(x, 3, c)
    sums = kernel("group_norm.cu", "sums", "PPPPPPPPqiiq", macros, device)
    sums.launch(
        (chunks, n),
        THREADS,
        *(x, dy, ab, mean_rstd, bias, amax, in_range, partial, pixels, c, groups, per_chunk),
        shared=4 * rows * c,
    )
    coefficients = kernel("group_norm.cu", "coefficients", "PPPPPPPqiii", macros, device)
    coefficients.launch(
        (groups, n),
        THREADS,
        *(partial, mean_rstd, channel_mean, bias, weight, pqr, channel_sums, pixels, c, groups, chunks),
    )
    parameters = kernel("group_norm.cu", "parameters", "PPii", macros, device)
    parameters.launch(-(-3 * c // THREADS), THREADS, channel_sums, out, n, c)
    gradient = kernel(
        "group_norm.cu", "gradient", "PPPPPPPPqiq", {**macros, "AGAIN": recompute} if recompute else macros, device
    )
    gradient.launch((chunks, n), THREADS, x, dy, ab, pqr, amax, in_range, dx, y, pixels, c, per_chunk)
    return out


def _fake_amax(x: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
    return _float(x, 1)


@operator(
    "track_amax(Tensor x, Tensor? other, Tensor(a!)? tracked, float decay, bool read, bool delayed=False, "
    "Tensor? bias=None) -> Tensor",
    _fake_amax,
)
def _track_amax(
    x: torch.Tensor,
    other: torch.Tensor | None,
    tracked: torch.Tensor | None,
    decay: float,
    read: bool,
    delayed: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    amax = _float(x, 1)
    reads, grid, macros = _measured(x, x.numel() if read else 0, bias)
    launch = kernel("track_amax.cu", "track_amax", "PqPiPPPPPfi", macros, x.device).launch
    launch(grid, THREADS, *reads, other, tracked, amax, *_scratch(x), decay, int(delayed))
    return amax


def _measured(
    x: torch.Tensor, count: int, bias: torch.Tensor | None
) -> tuple[tuple[torch.Tensor | int | None, ...], int, dict[str, str | int]]:
    """(x, elements, bias, channels) of a kernel of `track_amax.cu`, its grid and its macros."""
    blocks, macros = max(1, min(BLOCKS, count // (THREADS * VECTOR * 4))), _biased(_macros(x, False), bias is not None)
    if bias is None:
        return (x, count, None, 0), blocks, macros
    lanes = x.shape[1] // VECTOR
    step = lanes // math.gcd(lanes, THREADS)  # of the grid, with which a thread keeps its channels
    x = x.contiguous(memory_format=torch.channels_last)
    return (x, count, bias, x.shape[1]), -(-blocks // step) * step, macros


def _biased(macros: dict[str, str | int], biased: bool) -> dict[str, str | int]:
    return {**macros, "BIASED": 1} if biased else macros


@operator(
    "previous_amax(Tensor x, Tensor? other, Tensor tracked, Tensor? bias=None) -> Tensor",
    _fake_amax,
)
def _previous_amax(
    x: torch.Tensor, other: torch.Tensor | None, tracked: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    amax = _float(x, 1)
    reads, grid, macros = _measured(x, x.numel(), bias)
    launch = kernel("track_amax.cu", "previous_amax", "PqPiPPPPP", macros, x.device).launch
    launch(grid, THREADS, *reads, other, tracked, amax, *_scratch(x))
    return amax


def _pooled(y: torch.Tensor, *rest: Any) -> torch.Tensor:
    n, c, h, w = y.shape
    return torch.empty((n, c, h // 2, w // 2), dtype=y.dtype, device=y.device, memory_format=torch.channels_last)


@operator("pool(Tensor y, Tensor? amax) -> Tensor", _pooled)
def _pool(y: torch.Tensor, amax: torch.Tensor | None) -> torch.Tensor:
    (n, c, _, w), pooled = y.shape, _pooled(y)
    pixels = pooled.shape[2] * pooled.shape[3]
    chunks, per_chunk = chunks_of(pixels, c, n)
    launch = kernel("pool.cu", "pool", "PPPiqiq", _macros(y, amax is not None), y.device).launch
    launch((chunks, n), THREADS, y, amax, pooled, w // 2, pixels, c, per_chunk)
    return pooled


@operator(
    "pool_backward(Tensor y, Tensor? dskip, Tensor dpooled, Tensor? amax) -> Tensor",
    like_first,
)
def _pool_backward(
    y: torch.Tensor,
    dskip: torch.Tensor | None,
    dpooled: torch.Tensor,
    amax: torch.Tensor | None,
    ab: torch.Tensor | None = None,
) -> torch.Tensor:
    n, c, h, w = y.shape
    dpooled = dpooled.contiguous(memory_format=torch.channels_last)
    if dskip is not None:
        dskip = dskip.contiguous(memory_format=torch.channels_last)
    dy = torch.empty_like(y)
    pixels = (h // 2) * (w // 2)
    chunks, per_chunk = chunks_of(pixels, c, n)
    launch = kernel("pool.cu", "pool_gradient", "PPPPPPiqiq", _normalized(y, amax, ab), y.device).launch
    launch((chunks, n), THREADS, y, ab, dskip, dpooled, amax, dy, w // 2, pixels, c, per_chunk)
    return dy


def _normalized(x: torch.Tensor, amax: torch.Tensor | None, ab: torch.Tensor | None) -> dict[str, str | int]:
    """Macros of a kernel that reads relu(a x + b) where `ab` is given."""
    macros = _macros(x, amax is not None)
    return macros if ab is None else {**macros, "NORMALIZED": 1}


@operator(
    "pool_backward_again(Tensor x, Tensor ab, Tensor? dskip, Tensor dpooled, Tensor? amax) -> Tensor",
    like_first,
)
def _pool_backward_again(
    x: torch.Tensor, ab: torch.Tensor, dskip: torch.Tensor | None, dpooled: torch.Tensor, amax: torch.Tensor | None
) -> torch.Tensor:
    return _pool_backward(x, dskip, dpooled, amax, ab)


@operator(
    "concat(Tensor a, Tensor b, Tensor? amax, Tensor? other=None, Tensor(a!)? tracked=None, float decay=0.0, "
    "Tensor? bias=None) -> (Tensor, Tensor)",
    lambda a, b, amax, other=None, tracked=None, decay=0.0, bias=None: _concat_outputs(a, b, amax is not None),
)
def _concat(
    a: torch.Tensor,
    b: torch.Tensor,
    amax: torch.Tensor | None,
    other: torch.Tensor | None = None,
    tracked: torch.Tensor | None = None,
    decay: float = 0.0,
    bias: torch.Tensor | None = None,
    ab: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, inside = _concat_outputs(a, b, amax is not None and ab is None)
    b = b.contiguous(memory_format=torch.channels_last)
    pixels, items = a.shape[0] * a.shape[2] * a.shape[3], 1
    if ab is not None:  # its coefficients are those of one item
        pixels, items = a.shape[2] * a.shape[3], a.shape[0]
    chunks, per_chunk = chunks_of(pixels, out.shape[1], items)
    macros = _biased(_normalized(a, amax, ab), bias is not None)
    launch = kernel("concat.cu", "concat", "PPPPPPPPPPPfqiiq", macros, a.device).launch
    bits, sizes = inside if inside.numel() else None, (pixels, a.shape[1], b.shape[1], per_chunk)
    tracking = (other, tracked, *(_scratch(a) if tracked is not None else (None, None)), decay)
    launch((chunks, items), THREADS, a, b, ab, bias, amax, out, bits, *tracking, *sizes)
    return out, inside


def _concat_outputs(a: torch.Tensor, b: torch.Tensor, quantize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    n, _, h, w = a.shape
    channels = a.shape[1] + b.shape[1]
    out = torch.empty((n, channels, h, w), dtype=a.dtype, device=a.device, memory_format=torch.channels_last)
    bits = n * h * w * channels // VECTOR if quantize else 0
    return out, torch.empty(bits, dtype=torch.uint8, device=a.device)


@operator(
    "concat_again(Tensor x, Tensor ab, Tensor b, Tensor? amax, Tensor? bias=None) -> Tensor",
    lambda x, ab, b, amax, bias=None: _concat_outputs(x, b, False)[0],
)
def _concat_again(
    x: torch.Tensor, ab: torch.Tensor, b: torch.Tensor, amax: torch.Tensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return _concat(x, b, amax, bias=bias, ab=ab)[0]


@operator(
    "separate(Tensor gradient, Tensor? inside, int first, bool bias=False) -> (Tensor, Tensor, Tensor)",
    lambda gradient, inside, first, bias=False: (
        *_separated(gradient, first),
        _float(gradient, gradient.shape[1] - first if bias else 0),
    ),
)
def _separate(
    gradient: torch.Tensor, inside: torch.Tensor | None, first: int, bias: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """da, db, and with `bias` the sum of db over the pixels, float32 [channels of db]; else [0]."""
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    n, c, h, w = gradient.shape
    da, db = _separated(gradient, first)
    pixels, second = n * h * w, c - first
    chunks, per_chunk = chunks_of(pixels, c, 1)
    partial = _float(gradient, chunks, second) if bias else None
    shared = 4 * (THREADS // (c // VECTOR)) * second if bias else 0
    macros = _biased(_macros(gradient, False), bias)
    launch = kernel("concat.cu", "separate", "PPPPPqiiq", macros, gradient.device).launch
    launch(chunks, THREADS, gradient, inside, da, db, partial, pixels, first, second, per_chunk, shared=shared)
    return da, db, _float(gradient, 0) if partial is None else partial.sum(0)


def _separated(gradient: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    n, c, h, w = gradient.shape
    layout: dict[str, Any] = {"dtype": gradient.dtype, "device": gradient.device, "memory_format": torch.channels_last}
    return torch.empty((n, first, h, w), **layout), torch.empty((n, c - first, h, w), **layout)
