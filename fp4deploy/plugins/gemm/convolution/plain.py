"""Convolutions and copies of FP16 and BF16 feature maps by kernels of this package: what a network needs without torch.

    y = conv2d(x, weight, bias, padding=(1, 1))        [N, H, W, C] and [O, KH, KW, C] -> [N, OH, OW, O]

cuDNN may change the order of a sum from version to version. `cuda/plain_conv.cu` adds in one order, in FP32, and
`conv2d_reference` is that order in torch, so that both give the same bytes on any machine. The price is speed: CUDA
cores, no tensor cores. `PackedNetwork(plain="kernel")` and launch plans (`fp4deploy.native`) use it for the layers
that are not quantised, usually the first, of three channels, and the last, of 1 x 1.

`cuda/layout.cu` moves elements: an image into channels-last, feature maps beside each other, logits to the caller.
"""

from __future__ import annotations

import torch

from fp4deploy.graph.sizes import output_size
from fp4deploy.plugins.quantize.input_encoding import CHANNELS
from fp4deploy.plugins.runtime.launch import kernel
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES

Pair = tuple[int, int]
PIXELS, OUTPUTS = 128, 16  # of a thread block of `plain_conv`
THREADS = 256


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    relu: bool = False,
) -> torch.Tensor:
    """relu(conv2d(x, weight) + bias) on a GPU, groups = 1.

    Args:
        x: float16 or bfloat16 [N, H, W, C], contiguous.
        weight: [O, KH, KW, C] of the same type, contiguous.
        bias: float32 [O].

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    n, h, w, c = x.shape
    outputs, kh, kw, _ = weight.shape
    oh, ow = _sizes(x, weight, stride, padding, dilation)
    y = torch.empty((n, oh, ow, outputs), dtype=x.dtype, device=x.device)
    run = kernel("plain_conv.cu", "plain_conv", "PPPPiiiiiiiiiiiiiiiq", _macros(x.dtype), x.device)
    grid = (-(-n * oh * ow // PIXELS), -(-outputs // OUTPUTS))
    sizes = (h, w, c, oh, ow, outputs, kh, kw, *stride, *padding, *dilation, int(relu), n * oh * ow)
    run.launch(grid, PIXELS, x, weight, bias, y, *sizes)
    return y


def conv2d_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    relu: bool = False,
) -> torch.Tensor:
    """`conv2d` in torch: the same order of the sum, the same bytes; one pass over the output for each element of K."""
    outputs, kh, kw, channels = weight.shape
    oh, ow = _sizes(x, weight, stride, padding, dilation)
    (ph, pw), wide = padding, x.float()
    wide = torch.nn.functional.pad(wide, (0, 0, pw, pw, ph, ph))
    total = torch.zeros((x.shape[0], oh, ow, outputs))
    for row in range(kh):
        for column in range(kw):
            top, left = row * dilation[0], column * dilation[1]
            ends = top + (oh - 1) * stride[0] + 1, left + (ow - 1) * stride[1] + 1
            part = wide[:, top : ends[0] : stride[0], left : ends[1] : stride[1]]
            for channel in range(channels):
                total += part[..., channel, None] * weight[:, row, column, channel].float()
    if bias is not None:
        total += bias
    return (total.relu() if relu else total).to(x.dtype)


def read_image(x: torch.Tensor, encoded: bool = False, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """An image [N, C, H, W], float32 or float16, as `dtype` [N, H, W, C]; encoded: its terms, [N, H, W, 13]."""
    n, c, h, w = x.shape
    y = torch.empty((n, h, w, CHANNELS if encoded else c), dtype=dtype, device=x.device)
    macros = _macros(dtype, x.dtype)
    sizes = (h * w, n * h * w)
    if encoded:
        kernel("layout.cu", "encode_image", "PPqq", macros, x.device).launch(_blocks(sizes[1]), THREADS, x, y, *sizes)
    else:
        kernel("layout.cu", "read_image", "PPiqq", macros, x.device).launch(_blocks(sizes[1]), THREADS, x, y, c, *sizes)
    return y


def concat(sources: list[torch.Tensor]) -> torch.Tensor:
    """Feature maps [N, H, W, C_i] of one type, concatenated along their channels; one launch for each."""
    total = sum(x.shape[-1] for x in sources)
    y = sources[0].new_empty((*sources[0].shape[:-1], total))
    run, first = kernel("layout.cu", "copy_channels", "PPiiiq", _macros(y.dtype), y.device), 0
    for x in sources:
        pixels = x.numel() // x.shape[-1]
        run.launch(_blocks(pixels), THREADS, x, y, x.shape[-1], first, total, pixels)
        first += x.shape[-1]
    return y


def write_planes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A feature map float16 or bfloat16 [N, H, W, C] as [N, C, H, W] of float16 or float32, contiguous."""
    n, h, w, c = x.shape
    y = torch.empty((n, c, h, w), dtype=dtype, device=x.device)
    run = kernel("layout.cu", "write_planes", "PPiqq", _macros(x.dtype, dtype), x.device)
    run.launch(_blocks(n * h * w), THREADS, x, y, c, h * w, n * h * w)
    return y


def class_map(x: torch.Tensor) -> torch.Tensor:
    """The number of the largest channel of [N, H, W, C], the first of equals, as uint8 [N, H, W]."""
    y = torch.empty(x.shape[:-1], dtype=torch.uint8, device=x.device)
    run = kernel("layout.cu", "class_map", "PPiq", _macros(x.dtype), x.device)
    run.launch(_blocks(y.numel()), THREADS, x, y, x.shape[-1], y.numel())
    return y


def _macros(half: torch.dtype, value: torch.dtype = torch.float32) -> dict[str, str]:
    """half: of the network. value: the caller's."""
    return {"HALF": CUDA_TYPES[half], "VALUE": CUDA_TYPES[value]}


def _sizes(x: torch.Tensor, weight: torch.Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Pair:
    (h, w), (kh, kw) = x.shape[1:3], weight.shape[1:3]
    places = zip((h, w), (kh, kw), stride, padding, dilation, strict=True)
    oh, ow = (output_size(size, taps, *geometry) for size, taps, *geometry in places)
    return oh, ow


def _blocks(count: int) -> int:
    return -(-count // THREADS)
