"""The operands of the backward GEMMs: G along output channels and along pixels, X along pixels.

On a GPU one kernel reads a map and writes what both GEMMs need of it (`plugins.quantize.maps`), and that of MS-EDEN
finds in a map what the columns of a filter read. Formats that they do not have, layers whose channels do not fill
blocks, and other devices quantise operand by operand (`quantizers`); the bits are the same, and so are the seeds: those
of the gradient are drawn first, then the weight's and the activation's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp4deploy.formats.philox import draw_seed
from fp4deploy.plugins.quantize.dispatch import runs_on_gpu
from fp4deploy.plugins.quantize.maps import Blocks, Columns, fake_quantize_map, supports
from fp4deploy.plugins.quantize.ms_eden import fake_quantize_columns
from fp4deploy.qat.operators.gemms import ConvGemms, LinearGemms
from fp4deploy.qat.operators.quantizers import quantize_operand
from fp4deploy.qat.recipes import QuantSpec, Recipe

Gemms = LinearGemms | ConvGemms
ALONE = (1, 1, 0, 1)  # columns of a filter that has one, its stride, padding and dilation


def gradient_operands(
    gradient: torch.Tensor,
    x_shape: Sequence[int],
    gemms: Gemms,
    recipe: Recipe,
    by_channels: bool,
    by_width: bool,
    rotations: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """G as the dgrad and as the wgrad contracts it, the one that is not asked for as it came.

    rotations: of both GEMMs, where they have one.
    """
    specs = (recipe.dgrad_gradient if by_channels else None, recipe.wgrad_gradient if by_width else None)
    groups, dtype = gemms.groups, gradient.dtype
    if by_width and gemms.widens_gradient:
        first = _by_kernel(gradient, gemms, (specs[0], None), None, dtype)
        second = _by_kernel(gradient, gemms, (None, specs[1]), x_shape, dtype)
        found = (first and first[0]), (second and second[1])
    else:
        found = _by_kernel(gradient, gemms, specs, None, dtype) or (None, None)
    channels, width = found
    if channels is None and by_channels:
        channels, _ = quantize_operand(gradient, specs[0], (gemms.input_axis,), None, (groups,), rotations[0])
    if width is None and by_width:
        width = _rotated(gradient, gemms, specs[1], x_shape, rotations[1]) if gemms.widens_gradient else None
    if width is None and by_width:
        rows = gemms.wgrad_gradient(gradient, x_shape)
        width, _ = quantize_operand(rows, specs[1], (gemms.wgrad_axis,), rotation=rotations[1])
    return (gradient if channels is None else channels), (gradient if width is None else width)


def activation_operand(
    x: torch.Tensor, gradient: torch.Tensor, gemms: Gemms, recipe: Recipe, rotation: torch.Tensor | None
) -> torch.Tensor:
    """X as the wgrad contracts it, in the dtype of the gradient."""
    other = gradient.shape if gemms.widens_input else None
    found = _by_kernel(x, gemms, (None, recipe.wgrad_activation), other, gradient.dtype)
    if found is not None and found[1] is not None:
        return found[1]
    rotated = _rotated(x, gemms, recipe.wgrad_activation, other, rotation)
    if rotated is not None:
        return rotated.to(gradient.dtype)
    rows = gemms.wgrad_input(x, gradient.shape)
    return quantize_operand(rows, recipe.wgrad_activation, (gemms.wgrad_axis,), rotation=rotation)[0].to(gradient.dtype)


def _by_kernel(
    x: torch.Tensor,
    gemms: Gemms,
    specs: tuple[QuantSpec | None, QuantSpec | None],
    other: Sequence[int] | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
    """Both operands by the kernel; None where it does not have them.

    other: the shape of the other operand, where this one is shifted by the columns of the filter.
    """
    along, across = (_blocks(spec) for spec in specs)
    left_out = any(spec is not None and own is None for spec, own in zip(specs, (along, across), strict=True))
    if left_out or not (along or across) or (isinstance(gemms, ConvGemms) and x.shape[-1] == 1 and not gemms.pixelwise):
        return None
    view = _as_map(x, gemms)
    if not supports(view, dtype, along, across, gemms.groups):
        return None
    columns = Columns(*ALONE, view.shape[-1], gemms.groups)
    if other is not None and isinstance(gemms, ConvGemms):
        columns = _columns(gemms, other)
    channels, rows = fake_quantize_map(view, along, across, columns, dtype)
    if isinstance(gemms, LinearGemms):
        matrix = None if rows is None else rows[0, :, 0].T
        return (None if channels is None else channels[0, :, 0].T.view(x.shape)), matrix
    if rows is not None:
        inner = () if gemms.pixelwise else x.shape[2:-1]
        rows = rows.view(*rows.shape[:2], *inner, rows.shape[-1])
    return (None if channels is None else channels.view(x.shape)), rows


def _rotated(
    x: torch.Tensor,
    gemms: Gemms,
    spec: QuantSpec | None,
    other: Sequence[int] | None,
    rotation: torch.Tensor | None,
) -> torch.Tensor | None:
    """The columns of a filter on `x` by MS-EDEN, `other` the shape of the other operand; None without the kernel."""
    if spec is None or rotation is None or other is None or not isinstance(gemms, ConvGemms):
        return None
    if x.shape[-1] == 1 or not runs_on_gpu(x):
        return None
    rows = fake_quantize_columns(_as_map(x, gemms), rotation, draw_seed(x.device), _columns(gemms, other))
    return rows.view(*rows.shape[:2], *x.shape[2:-1], rows.shape[-1])


def _columns(gemms: ConvGemms, other: Sequence[int]) -> Columns:
    """Those of the filter, for an other operand of this shape."""
    count, stride, padding, dilation = (sizes[-1] for sizes in gemms.steps)
    return Columns(count, stride, padding, dilation, other[-1], gemms.groups)


def _as_map(x: torch.Tensor, gemms: Gemms) -> torch.Tensor:
    """[N, C, H, W], of a linear layer [1, features, 1, tokens]."""
    if isinstance(gemms, LinearGemms):
        return x.flatten(0, -2).T[None, :, None]
    if gemms.pixelwise:
        return x.flatten(2).unsqueeze(2)
    return x.unsqueeze(2) if x.ndim == 3 else x.flatten(2, -2)


def _blocks(spec: QuantSpec | None) -> Blocks | None:
    """What the kernel calls a spec; None for one that it does not have."""
    if spec is None:
        return None
    own = Blocks(spec.mx_rule, spec.rounding, spec.hadamard)
    plain = QuantSpec(spec.format, scale_rule=spec.scale_rule, rounding=spec.rounding, hadamard=spec.hadamard)
    return own if spec == plain and spec.in_four_bits and spec.rounding != "ms_eden" else None
