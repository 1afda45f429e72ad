"""The digits stem: a normalised image as E2M1 numbers, so that a first layer in FP4 reads it almost as it is.

Quantising three channels with one scale a pixel leaves an image about 3 bits. But hardware multiplies blocks of 16
channels, so that 13 of 16 are empty, and a number can be written into several of them, digit by digit (`rest` is what
the digits before leave):

    v  = clamp(x GAIN, -4.5, 4.5)     x rounded to FP16 first; GAIN takes the largest 8-bit pixel to just below 4.5
    d1 = round(v)                     -4 ... 4         stands for d1
    d2 = round(6 rest) / 2            -1.5 ... 1.5     stands for d2 / 3
    d3 = round(12 rest) / 2           -.5, 0, .5       stands for d3 / 6
    d4 = round(24 rest) / 2           -.5, 0, .5       stands for d4 / 12

    channels   d1 | d2 | d3 | d4 | 6     three of each digit (red, green, blue), and a constant

    x = (d1 + d2/3 + d3/6 + d4/12) / GAIN     off by at most 1/48/GAIN = 0.0123, and what FP16 rounds x by (0.001);
                                              half a step of an 8-bit pixel is 0.0087

**The constant pins the scale.** The amax of every block is 6 and so is that of the tensor, which amax tracking finds
by itself. The step is then exactly 1 and every digit is its own code, in NVFP4 (static or dynamic, with 4/6 or
without) and in MXFP4. (A file stores the scale 6 / 2688, from which the step comes back one ulp of FP32 below 1: the
codes are the same, and so are the digits in FP16.) Without the constant a pixel whose largest digit is 4 would get the
scale 4/6, and lose the others. It is also where a NaN or an Inf of the image shows, as NaN, because it is computed
from the image: 6 + s - s with s = r + g + b.

**The weights.** A plain first layer w is [w, w/3, w/6, w/12] / GAIN over the digits and 0 over the constant, the same
function of the image (`expand_weight`). What carries little may have a coarse weight: where a block's maximum is w,
E2M1 writes the four as 6, 2, 1 and 0.5, its smallest step. Training moves all of them freely. The constant becomes a
bias that padding at the border of the image does not have.

**Exact everywhere.** A float16 times GAIN = 27/16 fits float32, and so does every difference below it, multiplied out
so that nothing is divided: torch, ONNX Runtime and an engine compute the same digits, whatever they fuse. What gives a
digit is rounding, whose gradient is zero: none reaches the image.
"""

from __future__ import annotations

import torch

GAIN = 1.6875  # 27/16; 8-bit pixels, normalised, reach 2.64
COLOURS = 3
CHANNELS = 4 * COLOURS + 1
CONSTANT = 6.0  # E2M1's largest value
WORTH = (1.0, 3.0, 6.0, 12.0)  # a unit of each digit is 1 / so much
_LIMIT = 4.5  # beyond it v saturates: round(4.5) is 4, and d2 stands for the rest


def digits(x: torch.Tensor) -> torch.Tensor:
    """Normalised image [N, 3, H, W] -> its digits [N, 13, H, W] in the dtype of `x`, all E2M1 values.

    |x| beyond 4.5 / GAIN = 2.67 saturates, which no 8-bit pixel does. NaN and Inf give NaN.
    """
    wide = (x if x.dtype == torch.float16 else _rounded(x)).to(torch.float32)
    v = (wide * GAIN).clamp(-_LIMIT, _LIMIT)
    d1 = v.round()
    rest = (v - d1) * 6
    twice2 = rest.round()
    rest = (rest - twice2) * 2
    twice3 = rest.round()
    twice4 = ((rest - twice3) * 2).round()
    total = wide.sum(1, keepdim=True)
    constant = (total - total) + CONSTANT
    parts = (d1, twice2 * 0.5, twice3 * 0.5, twice4 * 0.5, constant)
    return torch.cat([part.to(x.dtype) for part in parts], 1)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """`x` in float16. torch.compile leaves out a cast there and back again, but not one whose bits are used."""
    return (x.to(torch.float16).view(torch.int16) & -1).view(torch.float16)


def image_of(written: torch.Tensor) -> torch.Tensor:
    """The image [N, 3, H, W] that digits [N, 13, H, W] stand for."""
    parts = written[:, : CHANNELS - 1].split(COLOURS, 1)
    return torch.stack([part / worth for part, worth in zip(parts, WORTH, strict=True)]).sum(0) / GAIN


def expand_weight(weight: torch.Tensor) -> torch.Tensor:
    """First layer over an image [O, 3, KH, KW] -> the same function over its digits [O, 13, KH, KW]."""
    scaled = [weight / (worth * GAIN) for worth in WORTH]
    return torch.cat([*scaled, torch.zeros_like(weight[:, :1])], 1)
