"""GEMMs and convolutions of a traced network as one operator, whose kernel is of this package.

    y = torch.ops.fp4deploy.contract(x, w, bias, stride, padding, dilation, extent, alpha, relu, transposed, apart,
                                     wide)

x [G, N, D, H, W, C] and w [G, O, KD, KH, KW, C] of any strides; bias float32 [G, O]; extent: (OD, OH, OW). The result
is [N, OD, OH, OW, G, O], or [G, N, OD, OH, OW, O] with `apart`, contiguous, in float32 with `wide`, else x's dtype.
`REPLACED` gives the operators of ATen in its terms, so that a recorded network needs no library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fp4deploy.graph.sizes import output_size, transposed_size
from fp4deploy.plugins.aot.spec import Call, Launch
from fp4deploy.plugins.gemm.convolution import operators as _operators  # noqa: F401 - registers convolution
from fp4deploy.plugins.runtime.torch_library import operator

KERNEL = "contraction:contraction_kernel"
TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
ONE, NONE = (1, 1, 1), (0, 0, 0)
aten = torch.ops.aten


def _fake(x, w, bias, stride, padding, dilation, extent, alpha, relu, transposed, apart, wide):  # type: ignore[no-untyped-def]
    (groups, items), outputs = x.shape[:2], w.shape[1]
    shape = (groups, items, *extent, outputs) if apart else (items, *extent, groups, outputs)
    return torch.empty(shape, dtype=torch.float32 if wide else x.dtype, device=x.device)


@operator(
    "contract(Tensor x, Tensor w, Tensor? bias, int[] stride, int[] padding, int[] dilation, int[] extent, "
    "float alpha, bool relu, bool transposed, bool apart, bool wide) -> Tensor",
    _fake,
    "CompositeExplicitAutograd",
    torch.Tag.flexible_layout,  # the kernel takes any strides
)
def contract(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    extent: list[int],
    alpha: float,
    relu: bool,
    transposed: bool,
    apart: bool,
    wide: bool,
) -> torch.Tensor:
    """The reference of the kernel, in FP32."""
    parts = []
    for group, (each, filters) in enumerate(zip(x.float(), w.float(), strict=True)):
        image, taps = each.movedim(-1, 1), filters.movedim(-1, 1)
        if transposed:
            given = [
                transposed_size(*axis, 0)
                for axis in zip(image.shape[2:], taps.shape[2:], stride, padding, dilation, strict=True)
            ]
            more = [size - least for size, least in zip(extent, given, strict=True)]
            y = F.conv_transpose3d(image, taps.movedim(1, 0), None, stride, padding, more, 1, dilation)
        else:
            y = F.conv3d(image, taps, None, stride, padding, dilation)
        y = y.movedim(1, -1) * alpha
        y = y if bias is None else y + bias[group]
        parts.append(y.relu() if relu else y)
    whole = torch.stack(parts, 0 if apart else -2)
    return whole if wide else whole.to(x.dtype)


def call(arguments: Sequence[Any], y: torch.Tensor) -> Call:
    """The launch of one `contract`, of tensors that need no data."""
    x, w, bias, stride, padding, dilation, extent, alpha, relu, transposed, apart, _ = arguments
    groups, items, *sizes, channels = x.shape
    outputs, taps = w.shape[1], w.shape[2:5]
    rows = items * math.prod(extent)
    strides = (rows * outputs, outputs) if apart else (outputs, groups * outputs)
    numbers = (
        *("M", "O", "C", "D", "H", "W", "OD", "OH", "OW", "KD", "KH", "KW"),
        *(f"{each}_{axis}" for each in ("stride", "padding", "dilation") for axis in "dhw"),
        *(f"{tensor}{axis}" for tensor, axes in (("x", "gndhwc"), ("w", "godhwc")) for axis in axes),
        *("yg", "yp"),
    )
    geometry = (*stride, *padding, *dilation)
    values = (rows, outputs, channels, *sizes, *extent, *taps, *geometry, *x.stride(), *w.stride(), *strides)
    # Strides of groups, items and outputs are multiplied in 64 bits by the kernel, others where offsets need it.
    far = {f"{name}{axis}" for name, tensor in (("x", x), ("w", w)) for axis in "dhwc" if _reach(tensor) >= 1 << 31}
    large = {name for name, value in zip(numbers, values, strict=True) if value >= 1 << 31}
    kinds = {name: "i64" if name in far | large else "i32" for name in numbers}
    pointers = {"x": x, "w": w, "bias": bias, "y": y}
    types = [(name, TYPES[(y if each is None else each).dtype]) for name, each in pointers.items()]
    even = [name for name, each in pointers.items() if each is None or _offset(each) % 16 == 0]
    even += [name for name, value in zip(numbers, values, strict=True) if value % 16 == 0 and value]
    block_n = 64 if outputs > 32 else 32 if outputs > 16 else 16
    constants = (
        *(("BLOCK_M", 64 if rows > 32 else 32), ("BLOCK_N", block_n), ("BLOCK_K", 32)),
        *(("TRANSPOSED", transposed), ("RELU", relu), ("BIAS", bias is not None)),
    )
    launch = Launch(KERNEL, (*types, ("alpha", "fp32"), *kinds.items()), constants, tuple(even), 4, 2)
    grid = (-(-rows // int(constants[0][1])) * groups, -(-outputs // block_n), 1)
    return Call(launch, (x, w, bias, y, float(alpha), *values), grid)


def _offset(x: torch.Tensor) -> int:
    return int(x.storage_offset()) * x.element_size()


def _reach(x: torch.Tensor) -> int:
    """The largest offset of taps and channels, elements."""
    return sum((size - 1) * stride for size, stride in zip(x.shape[2:], x.stride()[2:], strict=True))


def _vector(bias: torch.Tensor, groups: int) -> torch.Tensor:
    """[groups, O], contiguous: the kernel has no stride for it."""
    return bias.to(torch.float32).contiguous().view(groups, -1)


def _product(
    x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None, alpha: float = 1, wide: bool = False
) -> torch.Tensor:
    """[B, M, K] times [B, K, N]."""
    left, right = x[:, None, None, None], y.mT[:, :, None, None, None]
    added = None if bias is None else _vector(bias, 1)
    extent = [1, 1, x.shape[1]]
    z: torch.Tensor = torch.ops.fp4deploy.contract(
        left, right, added, ONE, NONE, ONE, extent, alpha, False, False, True, wide
    )
    return z.flatten(1, 4)


def _mm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _product(x[None], y[None])[0]


def _bmm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _product(x, y)


def _addmm(added: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    vector = beta == 1 and added.ndim == 1 and added.shape[0] == y.shape[1]
    z = _product(x[None], y[None], added if vector else None, alpha)[0]
    return z if vector or beta == 0 else z + beta * added


def _baddbmm(
    added: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    z = _product(x, y, None, alpha)
    return z if beta == 0 else z + beta * added


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    transposed: bool,
    relu: bool,
    wide: bool = False,
) -> torch.Tensor:
    """`fp4deploy::convolution`: x [N, *S, C], the weight in torch's axes."""
    axes = list(zip(x.shape[1:-1], weight.shape[2:], stride, padding, dilation, strict=True))
    if transposed:
        extent = [transposed_size(*axis, more) for axis, more in zip(axes, output_padding, strict=True)]
        filters = weight.unflatten(0, (groups, -1)).movedim(1, -1)
    else:
        extent = [output_size(*axis) for axis in axes]
        filters = weight.unflatten(0, (groups, -1)).movedim(2, -1)
    image = x.unflatten(-1, (groups, -1)).movedim(-2, 0)
    lacking = 3 - len(axes)
    for _ in range(lacking):
        image, filters = image.unsqueeze(2), filters.unsqueeze(2)
    added = None if bias is None else _vector(bias, groups)
    places = [
        [*default[:lacking], *given]
        for default, given in ((ONE, stride), (NONE, padding), (ONE, dilation), (ONE, extent))
    ]
    y: torch.Tensor = torch.ops.fp4deploy.contract(image, filters, added, *places, 1.0, relu, transposed, False, wide)
    return y.flatten(-2).view(x.shape[0], *extent, -1)


def _wide_convolution(x, weight, *places):  # type: ignore[no-untyped-def]
    return _convolution(x, weight, None, *places, False, True)


def _aten_convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):  # type: ignore[no-untyped-def]
    places = (stride, padding, dilation, output_padding, groups, transposed, False)
    return _convolution(x.movedim(1, -1), weight, bias, *places).movedim(-1, 1)


def _attention(  # type: ignore[no-untyped-def]
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
) -> torch.Tensor:
    """Scores and their softmax in FP32, probabilities rounded to the values' dtype."""
    if enable_gqa:
        k, v = (each.repeat_interleave(q.shape[-3] // each.shape[-3], -3) for each in (k, v))
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (each.expand(*batch, *each.shape[-2:]).reshape(-1, *each.shape[-2:]) for each in (q, k, v))
    scores = _product(q, k.mT, None, q.shape[-1] ** -0.5 if scale is None else scale, True)
    scores = scores.view(*batch, *scores.shape[-2:])
    if is_causal:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~kept, float("-inf"))
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if masked else scores + attn_mask
    # A row whose every key is masked gives 0.
    weights = torch.softmax(scores, -1) if attn_mask is None else aten._safe_softmax.default(scores, -1)
    return _product(weights.to(v.dtype).reshape(q.shape[0], *weights.shape[-2:]), v).view(*batch, -1, v.shape[-1])


REPLACED: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _baddbmm,
    aten.convolution.default: _aten_convolution,
    torch.ops.fp4deploy.convolution.default: _convolution,
    torch.ops.fp4deploy.wide_convolution.default: _wide_convolution,
    aten.scaled_dot_product_attention.default: _attention,
}
