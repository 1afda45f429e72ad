"""One operand of a GEMM, fake-quantised as its spec says: along its contraction axis, group by group.

FP8 and INT8 have no blocks: one scale for the tensor, or one for each output channel of a weight.

`axes` names the contraction axis last; before it, for 2-D blocks, the other axis of the weight. With `groups` that
axis holds several groups' channels one after the other and a block must not cross from one to the next: each group is
padded to whole blocks of its own.
"""

from __future__ import annotations

import torch

from fp4deploy import formats
from fp4deploy.formats.ms_eden import group_of
from fp4deploy.formats.philox import draw_seed
from fp4deploy.plugins.quantize.dispatch import (
    fake_quantize_and_amax,
    fake_quantize_mxfp4,
    fake_quantize_nvfp4,
    finite_amax,
)
from fp4deploy.plugins.quantize.ms_eden import fake_quantize_ms_eden
from fp4deploy.qat.recipes import QuantSpec


def quantize_operand(
    x: torch.Tensor,
    spec: QuantSpec | None,
    axes: tuple[int, ...],
    amax: torch.Tensor | None = None,
    groups: tuple[int, ...] = (1,),
    rotation: torch.Tensor | None = None,
    own: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantise and dequantise `x` by `spec`; None returns it as it is.

    Args:
        x: floating point, any layout.
        axes: the contraction axis, preceded by the other axis of a weight; 1-D blocks use the contraction axis alone.
        amax: static global amax, float32 [].
        groups: groups of each of `axes`.
        rotation: `shared_rotation` of the GEMM, where it has one.
        own: the amax of `x`, float32 [], where what wrote it found it; of channels that are not finite, nothing counts.

    Returns:
        x' in the dtype of `x` (after a Hadamard transform the contraction axis is padded to a multiple of 16, after a
        rotation to whole groups), and the in-range mask of elements that did not saturate, for
        `plugins.quantize.dispatch.mask_gradient`; None where no static scale clips.
    """
    if spec is None:
        return x, None
    if spec.rounding == "ms_eden":
        assert rotation is not None
        return _rotate_and_quantize(x, spec, axes, groups, rotation), None
    if spec.in_eight_bits:
        return formats.EIGHT_BITS[spec.format].fake_quantize(x, axes[0] if spec.row_scaled else None, amax)
    plain = spec.mx_rule is None and not (spec.hadamard or spec.row_scaled) and {*groups} == {1}
    if own is not None and amax is None and plain:
        axes = axes[-1:] if spec.block == "1d" else axes
        return fake_quantize_nvfp4(x, axes, own, False, spec.four_over_six, spec.rounding, mask=False)
    values, in_range, _ = _quantize_groups(x, spec, axes, amax, groups, measure=False)
    return values, in_range


def shared_rotation(spec: QuantSpec | None, device: torch.device) -> torch.Tensor | None:
    """The seed of the signs that both operands of a GEMM are rotated with, drawn now; None where neither is."""
    return draw_seed(device) if spec is not None and spec.rounding == "ms_eden" else None


def _rotate_and_quantize(
    x: torch.Tensor, spec: QuantSpec, axes: tuple[int, ...], groups: tuple[int, ...], rotation: torch.Tensor
) -> torch.Tensor:
    view, (axis,), split = split_groups(x, spec, axes, groups)
    values = fake_quantize_ms_eden(view, rotation, draw_seed(x.device), axis)
    for at in split:
        values = values.flatten(at, at + 1)
    return values


def quantize_and_measure(
    x: torch.Tensor, spec: QuantSpec, axes: tuple[int, ...], amax: torch.Tensor, groups: tuple[int, ...] = (1,)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantize_operand` with a static amax, and the finite amax of `x` itself, float32 [], from the same pass.

    The second pass that it costs otherwise is left where the kernel that does both does not fit.
    """
    if spec.in_eight_bits:
        values, in_range = formats.EIGHT_BITS[spec.format].fake_quantize(x, None, amax)
        assert in_range is not None
        return values, in_range, finite_amax(x)
    values, in_range, largest = _quantize_groups(x, spec, axes, amax, groups, measure=True)
    assert in_range is not None
    assert largest is not None
    return values, in_range, largest


def split_groups(
    x: torch.Tensor, spec: QuantSpec, axes: tuple[int, ...], groups: tuple[int, ...] = (1,)
) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """(view of `x`, axes of its blocks there, axes that were split): each of several groups on an axis of its own where
    one would not fill whole blocks; the contraction axis stays last among the axes.
    """
    if spec.block == "1d":
        axes, groups = axes[-1:], groups[-1:]
    axes = tuple(axis % x.ndim for axis in axes)
    counts = {at: count for at, count in zip(axes, groups, strict=True) if count > 1}
    split = {at: count for at, count in counts.items() if x.shape[at] // count % _whole(spec, x.shape[at])}
    shape = x.shape
    for axis, count in sorted(split.items(), reverse=True):
        x = x.unflatten(axis, (count, shape[axis] // count))
    moved = tuple(axis + sum(other <= axis for other in split) for axis in axes)
    return x, moved, tuple(sorted(split))


def _whole(spec: QuantSpec, size: int) -> int:
    """Elements along an axis of `size` that are quantised together."""
    return group_of(size) if spec.rounding == "ms_eden" else spec.block_size


def _quantize_groups(
    x: torch.Tensor,
    spec: QuantSpec,
    axes: tuple[int, ...],
    amax: torch.Tensor | None,
    groups: tuple[int, ...],
    measure: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    x, moved, split = split_groups(x, spec, axes, groups)
    values, in_range, largest = _quantize(x, spec, moved, amax, as_mask=bool(split), measure=measure)
    for axis in split:
        values = values.flatten(axis, axis + 1)
        in_range = None if in_range is None else in_range.flatten(axis, axis + 1)
    return values, in_range, largest


def _quantize(
    x: torch.Tensor, spec: QuantSpec, axes: tuple[int, ...], amax: torch.Tensor | None, as_mask: bool, measure: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    if spec.format == "mxfp8":
        return formats.fake_quantize_mxfp8(x, axes[-1], spec.scale_rule), None, None
    if spec.format == "mxfp4":
        return fake_quantize_mxfp4(x, axes[-1], spec.scale_rule, spec.rounding, hadamard=spec.hadamard), None, None
    if amax is not None and as_mask:  # a kernel's bits have the shape of the groups
        values, in_range = formats.fake_quantize_nvfp4(
            x, axes, amax, spec.row_scaled, spec.four_over_six, spec.rounding
        )
        return values, in_range, finite_amax(x) if measure else None
    if amax is not None and measure:
        return fake_quantize_and_amax(x, axes, amax, spec.four_over_six, spec.rounding)
    options = (amax, spec.row_scaled, spec.four_over_six, spec.rounding)
    return *fake_quantize_nvfp4(x, axes, *options, hadamard=spec.hadamard, mask=amax is not None), None
