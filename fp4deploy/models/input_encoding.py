"""Multi-term FP4 input encoding: the image as sums of E2M1 values, so that a first layer in FP4 loses almost nothing.

NVFP4 gives the three channels of a pixel one block scale and E2M1 elements, which leaves an image about 3 bits. But
the hardware multiplies blocks of 16 input channels, so 13 of the 16 are zeros. This module writes each colour as a sum
of four terms, coarse to fine, into four of those channels. `rest` is what the previous terms leave:

    v  = clamp(x GAIN, -4.5, 4.5)     x is rounded to FP16 first; GAIN maps the largest 8-bit pixel to just below 4.5
    d1 = round(v)                     -4 ... 4         contributes d1
    d2 = round(6 rest) / 2            -1.5 ... 1.5     contributes d2 / 3
    d3 = round(12 rest) / 2           -.5, 0, .5       contributes d3 / 6
    d4 = round(24 rest) / 2           -.5, 0, .5       contributes d4 / 12

    channels   d1 | d2 | d3 | d4 | 6     three channels a term (red, green, blue), and one constant: 13

    x = (d1 + d2/3 + d3/6 + d4/12) / GAIN     error at most 1/48/GAIN = 0.0123, plus FP16 rounding of x (0.001);
                                              half a step of an 8-bit pixel is 0.0087

The setting `model.digits`, the field `digits` of the model card and the flag `--digits` switch it on: "digits" is the
short name of this encoding in files and settings.

**The constant fixes the block scale.** With it the amax of every block is 6 and so is that of the tensor, which amax
tracking finds by itself. The step is then exactly 1 and every term is its own E2M1 code, in NVFP4 (static or dynamic,
with or without 4/6) and in MXFP4. (A file stores the scale 6 / 2688, from which the step comes back one ulp of FP32
below 1: the codes are the same, and so are the values in FP16.) Without the constant a pixel whose largest term is 4
would get the scale 4/6, and the finer terms would be rounded away. The constant also carries NaN and Inf of the image,
as NaN, because it is computed from the image: 6 + s - s with s = r + g + b.

**The weights.** A plain first layer w becomes [w, w/3, w/6, w/12] / GAIN over the terms and 0 over the constant, the
same function of the image (`expand_weight`). Coarse weights suffice for the fine terms: where a block's maximum is w,
E2M1 stores the four as 6, 2, 1 and 0.5, its smallest step. Training updates all of them freely. The weight of the
constant acts as a bias, except that zero padding at the edges of the image does not have it.

**Exact on every runtime.** The product of a float16 and GAIN = 27/16 is exact in float32, and so is every difference
after it (the divisions are multiplied out): torch, ONNX Runtime and an engine compute the same terms, whatever they
fuse. The terms come from rounding, whose gradient is zero: no gradient reaches the image.

Trade-off: 13 input channels instead of 3, which cost nothing where the hardware pads to 16, and a few elementwise
operations on the image. The encoding is this project's own.
"""

from __future__ import annotations

import torch

from fp4deploy.formats import E2M1_MAX

GAIN = 1.6875  # 27/16; 8-bit pixels, normalised, reach 2.64
IMAGE_CHANNELS = 3
ENCODED_CHANNELS = 4 * IMAGE_CHANNELS + 1
UNITS = (1.0, 3.0, 6.0, 12.0)  # term i contributes its value / UNITS[i]
_LIMIT = 4.5  # beyond it v saturates: round(4.5) is 4, and d2 takes the rest


def encode_input(x: torch.Tensor) -> torch.Tensor:
    """Encode a normalised image [N, 3, H, W] as its terms [N, 13, H, W], all E2M1 values, in the dtype of `x`.

    |x| beyond 4.5 / GAIN = 2.67 saturates, which no 8-bit pixel reaches. NaN and Inf give NaN.

    >>> encode_input(torch.full((1, 3, 1, 1), 1.0))[0, ::3, 0, 0]
    tensor([ 2., -1.,  0.,  0.,  6.])
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
    constant = (total - total) + E2M1_MAX
    terms = (d1, twice2 * 0.5, twice3 * 0.5, twice4 * 0.5, constant)
    return torch.cat([term.to(x.dtype) for term in terms], 1)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """`x` in float16. torch.compile drops a cast to float16 and back, but not one whose bits are used."""
    return (x.to(torch.float16).view(torch.int16) & -1).view(torch.float16)


def expand_weight(weight: torch.Tensor) -> torch.Tensor:
    """First layer over an image [O, 3, KH, KW] -> the same function over its terms [O, 13, KH, KW]."""
    scaled = [weight / (unit * GAIN) for unit in UNITS]
    return torch.cat([*scaled, torch.zeros_like(weight[:, :1])], 1)
