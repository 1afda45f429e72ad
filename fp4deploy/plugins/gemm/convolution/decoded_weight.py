"""FP4 weights decoded to float16 once, for the kernels that decode activations only (`decoded`, `direct`).

    weight = decode_weight(packed, (64, 64))                 two planes of float16 for two sources of 64 channels

Elements go without the global scale and times 2^-7, as both kernels decode activations: exact in float16. Their order
is that in which the main loop of `triton/decoded.py` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp4deploy.formats import E2M1_MAX, NVFP4_BLOCK, Nvfp4Tensor

PAD = 64  # bytes: rows of planes are whole steps of every tile
SCALE = 128.0  # elements of the planes are divided by it (`triton.decode`)


@dataclass(frozen=True, eq=False)
class DecodedWeight:
    """A weight for `decoded_conv_kernel`.

    planes: float16 [2, rows, K]: even and odd elements; rows: outputs, of a transposed convolution 4 times as many.
    shape: [O, KH, KW, C] of the packed weight; channels: of each source.
    """

    planes: torch.Tensor
    amax: torch.Tensor
    shape: tuple[int, ...]
    channels: tuple[int, ...]
    e4m3_max: int

    @property
    def nbytes(self) -> int:
        """Bytes on the GPU."""
        return self.planes.nbytes


def supports(channels: tuple[int, ...], taps: int) -> bool:
    """Whether `decoded` takes sources of these channels: whole steps of a tap, or a tap or several a step."""
    depths = [_bytes(c) for c in channels]
    return all(depth % 32 == 0 for depth in depths) or (len({*depths}) == 1 and depths[0] in (8, 16) and taps <= 9)


def decode_weight(weight: Nvfp4Tensor, channels: tuple[int, ...], transposed: bool = False) -> DecodedWeight:
    """Decode a packed [O, KH, KW, C] for sources of these channels.

    transposed: a transposed convolution of kernel 2 x 2.
    """
    outputs, kh, kw, _ = weight.shape
    values = _elements(weight)  # [O, KH, KW, C padded]
    rows = values.flatten(0, 2).unsqueeze(1) if transposed else values.flatten(1, 2)  # [rows, taps, C]
    parts, first = [], 0
    for count in channels:
        width = 2 * _bytes(count)
        part = rows[..., first : first + width].flatten(1)
        parts.append(torch.nn.functional.pad(part, (0, -part.shape[1] % (2 * PAD))))
        first += width
    pairs = torch.cat(parts, 1).unflatten(1, (-1, 2))  # [rows, bytes, (even, odd)]
    # The order of a tensor core's fragment within 32 bytes, as `triton.decode.permute` puts it.
    pairs = pairs.unflatten(1, (-1, 4, 2, 2, 2)).permute(6, 0, 1, 3, 4, 2, 5).flatten(2)
    return DecodedWeight(pairs.contiguous(), weight.amax, (outputs, kh, kw, sum(channels)), channels, weight.e4m3_max)


def planes_shape(shape: Sequence[int], channels: tuple[int, ...], transposed: bool = False) -> tuple[int, int, int]:
    """The shape [2, rows, K] of the planes that `decode_weight` makes of a packed [O, KH, KW, C]."""
    outputs, kh, kw, _ = shape
    rows, taps = (outputs * kh * kw, 1) if transposed else (outputs, kh * kw)
    return 2, rows, sum(-(-taps * _bytes(count) // PAD) * PAD for count in channels)


def _elements(weight: Nvfp4Tensor) -> torch.Tensor:
    """Elements without the global scale, times 2^-7: exact in float16."""
    unit = torch.full((), float(E2M1_MAX * weight.e4m3_max), dtype=torch.float32, device=weight.codes.device)
    shape = torch.Size((*weight.shape[:-1], 2 * weight.codes.shape[-1]))
    plain = Nvfp4Tensor(weight.codes, weight.scales, unit, shape, weight.e4m3_max)
    return (plain.dequantize(torch.float32) / SCALE).half()


def _bytes(channels: int) -> int:
    return -(-channels // NVFP4_BLOCK) * NVFP4_BLOCK // 2
