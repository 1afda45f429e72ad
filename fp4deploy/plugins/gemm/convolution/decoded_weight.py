"""FP4 weights decoded to float16 once, for the kernels that decode activations only (`decoded`, `direct`).

    weight = decode_weight(packed, (64, 64))                 two planes of float16 for two sources of 64 channels

Elements go without the global scale and times 2^-7, as both kernels decode activations: exact in float16. Their order
is that in which the main loop of `triton/decoded.py` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp4deploy.formats import E2M1_MAX, NVFP4_BLOCK, Nvfp4Tensor

PAD = 64  # bytes: rows of planes are whole steps of every tile
SCALE = 128.0  # elements of the planes are divided by it (`triton.decode`)


@dataclass(frozen=True, eq=False)
class DecodedWeight:
    """A weight for `decoded_conv_kernel`.

    planes: float16 [2, rows, K]: even and odd elements; rows: outputs, of a transposed convolution 4 or 8 times as
    many.
    shape: [O, KH, KW, C] of the packed weight, or [O, KD, KH, KW, C]; channels: of each source.
    pairs: planes in the order of `pairs_of_slices`, for a kernel that wants it.
    """

    planes: torch.Tensor
    amax: torch.Tensor
    shape: tuple[int, ...]
    channels: tuple[int, ...]
    e4m3_max: int
    pairs: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the GPU."""
        return self.planes.nbytes + (0 if self.pairs is None else self.pairs.nbytes)


def supports(channels: tuple[int, ...], taps: int) -> bool:
    """Whether `decoded` takes sources of these channels: whole steps of a tap, or a tap or several a step."""
    depths = [_bytes(c) for c in channels]
    return all(depth % 32 == 0 for depth in depths) or (len({*depths}) == 1 and depths[0] in (8, 16) and taps <= 27)


def decode_weight(
    weight: Nvfp4Tensor, channels: tuple[int, ...], transposed: bool = False, pairs: tuple[bool, bool] = (False, False)
) -> DecodedWeight:
    """Decode a packed [O, KH, KW, C] or [O, KD, KH, KW, C] for sources of these channels.

    transposed: a transposed convolution whose strides are its sizes, 2 x 2 or 2 x 2 x 2; pairs: of
        `pairs_of_slices`, if any.
    """
    values = _elements(weight)  # [O, *K, C padded]
    more = None
    if any(pairs):
        parts = values[..., : sum(channels)].split(channels, -1)
        paired = [pairs_of_slices(part, *pairs, transposed) for part in parts]
        more = _planes(torch.cat(paired, -1), [part.shape[-1] for part in paired], transposed)
    planes, shape = _planes(values, [2 * _bytes(count) for count in channels], transposed), tuple(weight.shape)
    return DecodedWeight(planes, weight.amax, (*shape[:-1], sum(channels)), channels, weight.e4m3_max, more)


def pairs_of_slices(values: torch.Tensor, inputs: bool, outputs: bool, transposed: bool = False) -> torch.Tensor:
    """Filters [O, KD, KH, KW, C] over volumes for a kernel of 64 channels and 64 outputs: of two slices at a time.

    outputs: 32 outputs for each of two neighbouring slices of the output follow each other, [2 O, KD + 1, ...], with
        zeros for the slice that one of them does not read; transposed, [2 O, KH, KW, C].
    inputs: 32 channels of each of two neighbouring slices follow each other, [..., half of KD, KH, KW, 2 C].
    """
    if outputs:
        if transposed:
            both = values.movedim(1, 0)
        else:
            behind = (0, 0) * 3
            both = torch.stack([torch.nn.functional.pad(values, (*behind, *ends)) for ends in ((0, 1), (1, 0))])
        values = both.unflatten(1, (-1, 32)).movedim(0, 1).flatten(0, 2)
    if inputs:
        values = torch.nn.functional.pad(values, (*(0, 0) * 3, 0, values.shape[1] % 2))
        values = values.unflatten(-1, (-1, 32)).unflatten(1, (-1, 2)).movedim(2, -2).flatten(-3)
    return values


def _planes(values: torch.Tensor, widths: Sequence[int], transposed: bool) -> torch.Tensor:
    """Even and odd elements, [2, rows, K], of [O, *K, C]; widths: channels of each source."""
    rows = values.flatten(0, -2).unsqueeze(1) if transposed else values.flatten(1, -2)  # [rows, taps, C]
    parts, first = [], 0
    for width in widths:
        part = rows[..., first : first + width].flatten(1)
        parts.append(torch.nn.functional.pad(part, (0, -part.shape[1] % (2 * PAD))))
        first += width
    pairs = torch.cat(parts, 1).unflatten(1, (-1, 2))  # [rows, bytes, (even, odd)]
    # The order of a tensor core's fragment within 32 bytes, as `triton.decode.permute` puts it.
    pairs = pairs.unflatten(1, (-1, 4, 2, 2, 2)).permute(6, 0, 1, 3, 4, 2, 5).flatten(2)
    return pairs.contiguous()


def planes_shape(shape: Sequence[int], channels: tuple[int, ...], transposed: bool = False) -> tuple[int, int, int]:
    """The shape [2, rows, K] of the planes that `decode_weight` makes of a packed [O, *K, C]."""
    outputs, places = shape[0], math.prod(shape[1:-1])
    rows, taps = (outputs * places, 1) if transposed else (outputs, places)
    return 2, rows, sum(-(-taps * _bytes(count) // PAD) * PAD for count in channels)


def _elements(weight: Nvfp4Tensor) -> torch.Tensor:
    """Elements without the global scale, times 2^-7: exact in float16."""
    unit = torch.full((), float(E2M1_MAX * weight.e4m3_max), dtype=torch.float32, device=weight.codes.device)
    shape = torch.Size((*weight.shape[:-1], 2 * weight.codes.shape[-1]))
    plain = Nvfp4Tensor(weight.codes, weight.scales, unit, shape, weight.e4m3_max)
    return (plain.dequantize(torch.float32) / SCALE).half()


def _bytes(channels: int) -> int:
    return -(-channels // NVFP4_BLOCK) * NVFP4_BLOCK // 2
