"""One operand of a GEMM as packed codes and block scales, its contraction axis last in memory.

    spec format   bits an element                          block
    nvfp4         4 + 8 / 16 = 4.5                         16 along the contraction axis, or 16 x 16
    mxfp4         4 + 8 / 32 = 4.25                        32 along the contraction axis

The codes, scales and random numbers are those of `quantizers.quantize_operand`, bit for bit, for the same seed. That
function returns what an operand is dequantised to, in the operand's own layout; this one keeps the packed form, in the
layout that a tensor-core GEMM reads: the contraction axis last, groups of a convolution on an axis of their own where
they do not fill whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fp4deploy.formats import Mxfp4Tensor, Nvfp4Tensor
from fp4deploy.formats.philox import draw_seed
from fp4deploy.plugins.quantize.dispatch import quantize_mxfp4, quantize_nvfp4
from fp4deploy.plugins.quantize.ms_eden import quantize_ms_eden
from fp4deploy.qat.operators.quantizers import split_groups
from fp4deploy.qat.recipes import QuantSpec


def required(spec: QuantSpec | None) -> QuantSpec:
    """The quantisation of an operand, which the recipe has where GEMMs are packed (`requirements.require_packed`)."""
    assert spec is not None
    return spec


@dataclass(frozen=True)
class PackedOperand:
    """A quantised operand.

    packed: codes and scales, the contraction axis last; with 2-D blocks the other axis of the weight before it.
    axes: where these axes stand in the operand, once `split` axes are two.
    split: axes of the operand that are (groups, channels of a group) in `packed`.
    """

    packed: Nvfp4Tensor | Mxfp4Tensor
    axes: tuple[int, ...]
    split: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and block scales."""
        return self.packed.codes.nbytes + self.packed.scales.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values in the operand's own layout (after a Hadamard transform with the contraction axis padded)."""
        last = tuple(range(-len(self.axes), 0))
        values = self.packed.dequantize(dtype).movedim(last, self.axes)
        for axis in self.split:
            values = values.flatten(axis, axis + 1)
        return values

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What `ctx.save_for_backward` takes; `with_tensors` puts it back."""
        amax = (self.packed.amax,) if isinstance(self.packed, Nvfp4Tensor) else ()
        return (self.packed.codes, self.packed.scales, *amax)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> PackedOperand:
        """The same operand with these tensors."""
        codes, scales, *amax = tensors
        packed = self.packed
        if isinstance(packed, Nvfp4Tensor):
            return replace(self, packed=replace(packed, codes=codes, scales=scales, amax=amax[0]))
        return replace(self, packed=replace(packed, codes=codes, scales=scales))

    def described(self) -> PackedOperand:
        """The same operand without its tensors."""
        nothing = torch.empty(0)
        return self.with_tensors((nothing,) * len(self.tensors()))


def pack_operand(
    x: torch.Tensor,
    spec: QuantSpec,
    axes: tuple[int, ...],
    amax: torch.Tensor | None = None,
    groups: tuple[int, ...] = (1,),
    rotation: torch.Tensor | None = None,
) -> PackedOperand:
    """Quantise `x` by `spec` and keep it packed; the arguments are those of `quantizers.quantize_operand`.

    2-D blocks are rounded to nearest (`requirements.require_packed`).

    >>> packed = pack_operand(torch.ones(2, 32, 3, 3), QuantSpec(), (1,))
    >>> packed.packed.codes.shape, packed.dequantize().shape
    (torch.Size([2, 3, 3, 16]), torch.Size([2, 32, 3, 3]))
    """
    view = x.detach()
    split: tuple[int, ...] = ()
    at = tuple(axis % x.ndim for axis in (axes if spec.block == "2d" else axes[-1:]))
    if max(groups) > 1:
        view, at, split = split_groups(view, spec, axes, groups)
    if spec.rounding == "ms_eden":
        assert rotation is not None
        return PackedOperand(quantize_ms_eden(view, rotation, draw_seed(x.device), at[-1]), at, split)
    if spec.format == "mxfp4":
        mx = quantize_mxfp4(view, spec.scale_rule, spec.rounding, axis=at[-1], hadamard=spec.hadamard)
        return PackedOperand(mx, at[-1:], split)
    if spec.block == "2d":
        tiles = quantize_nvfp4(view.movedim(at, (-2, -1)), "2d", amax, four_over_six=spec.four_over_six)
        return PackedOperand(tiles, at, split)
    packed = quantize_nvfp4(
        view, "1d", amax, spec.row_scaled, spec.four_over_six, spec.rounding, axis=at[-1], hadamard=spec.hadamard
    )
    return PackedOperand(packed, at, split)
